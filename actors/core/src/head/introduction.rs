//! What a node says of itself, and whether it can be true.

use kolo_wire::{NodeNetwork, NodeRegistration, Refusal, RefusalKind};

use crate::placement::is_sane;

/// Most jobs that a node may bring along.
const MAX_JOBS: usize = 4096;
/// Most custom resources of a node.
const MAX_CUSTOM: usize = 1024;
/// Longest hostname, version, and name of a custom resource.
const MAX_TEXT: usize = 256;
/// Characters of a name that is too long, in a message.
const SHOWN: usize = 80;

/// Whether interfaces are such as a host can have.
///
/// # Errors
///
/// [`RefusalKind::Invalid`].
pub(super) fn check_network(network: &NodeNetwork) -> Result<(), Refusal> {
    let invalid = |message: String| Err(Refusal::new(RefusalKind::Invalid, message));
    if network.interfaces.len() > NodeNetwork::MAX_INTERFACES {
        return invalid(format!(
            "the node has {} network interfaces; allowed are {}",
            network.interfaces.len(),
            NodeNetwork::MAX_INTERFACES
        ));
    }
    let fits = |name: &str| {
        !name.is_empty()
            && name.len() <= NodeNetwork::MAX_NAME
            && !name.chars().any(char::is_control)
    };
    if !fits(&network.host) {
        return invalid("the node's network stack has no name, or one that is too long".to_owned());
    }
    for interface in &network.interfaces {
        if !fits(&interface.name) || interface.addresses.len() > NodeNetwork::MAX_ADDRESSES {
            return invalid(format!(
                "the node's interface {:?} has {} addresses; allowed are {}, and names of 1 to {} bytes",
                interface.name.chars().take(SHOWN).collect::<String>(),
                interface.addresses.len(),
                NodeNetwork::MAX_ADDRESSES,
                NodeNetwork::MAX_NAME
            ));
        }
    }
    Ok(())
}

/// Whether an introduction can be true.
///
/// # Errors
///
/// [`RefusalKind::Invalid`].
pub(super) fn check(registration: &NodeRegistration) -> Result<(), Refusal> {
    if let Some(network) = &registration.network {
        check_network(network)?;
    }
    let invalid = |message: String| Err(Refusal::new(RefusalKind::Invalid, message));
    let hostname = &registration.hostname;
    if hostname.is_empty() || hostname.len() > MAX_TEXT || hostname.chars().any(char::is_control) {
        return invalid(format!(
            "the node's hostname is {:?}; allowed are 1 to {MAX_TEXT} bytes without control characters",
            hostname.chars().take(SHOWN).collect::<String>()
        ));
    }
    if registration.version.len() > MAX_TEXT {
        return invalid(format!("the node's version has more than {MAX_TEXT} bytes"));
    }
    if registration.jobs.len() > MAX_JOBS {
        return invalid(format!(
            "the node says that it holds {} jobs; allowed are {MAX_JOBS}",
            registration.jobs.len()
        ));
    }
    if !is_sane(&registration.resources) {
        return invalid(format!(
            "the node has {}; allowed is at most 1000000 of a resource",
            registration.resources
        ));
    }
    let custom = &registration.resources.custom;
    if custom.len() > MAX_CUSTOM || custom.keys().any(|name| name.len() > MAX_TEXT) {
        return invalid(format!(
            "the node has {} custom resources, or one whose name is too long; allowed are {MAX_CUSTOM} with \
             names of up to {MAX_TEXT} bytes",
            custom.len()
        ));
    }
    if registration.address.port() == 0 || registration.address.ip().is_unspecified() {
        return invalid(format!(
            "the node's address is {}; others must be able to connect to it",
            registration.address
        ));
    }
    Ok(())
}
