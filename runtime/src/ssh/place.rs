//! Which hosts are where, and the thread that serves them.

use std::net::IpAddr;
use std::time::Duration;

use tokio::sync::mpsc;

use super::error::UpError;
use super::options::SshOptions;
use super::reach;
use crate::hosts::HostSlots;

/// How long a name may take to be resolved.
const RESOLVE: Duration = Duration::from_secs(5);

/// A thread that serves the connections, whatever the caller's own threads are busy with: a node whose launcher is held
/// up must not take it for dead.
pub(super) struct Hands(Option<tokio::runtime::Runtime>);

impl Hands {
    pub(super) fn start() -> Result<Self, UpError> {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("kolo-ssh")
            .enable_all()
            .build()
            .map(|runtime| Self(Some(runtime)))
            .map_err(UpError::Start)
    }

    pub(super) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = &self.0 {
            runtime.spawn(future);
        }
    }
}

impl Drop for Hands {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            // It may be dropped on a thread of another runtime, where blocking is not allowed.
            runtime.shutdown_background();
        }
    }
}

/// A host, and how it is reached.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) host: HostSlots,
    /// It is this machine, and needs no ssh.
    pub(crate) here: bool,
    /// It reaches what listens on this machine's loopback.
    pub(super) shares_loopback: bool,
}

/// Finds out how hosts are reached, and which of them are this machine. Nothing is started.
///
/// # Errors
///
/// [`UpError::SameMachine`] if two of them are this machine.
pub(crate) async fn locate(
    hosts: &[HostSlots],
    own_name: &str,
    options: &SshOptions,
) -> Result<Vec<Place>, UpError> {
    if hosts.is_empty() {
        return Ok(Vec::new());
    }
    let hands = Hands::start()?;
    // All names at once: a name server that is slow costs its time once.
    let (sender, mut found) = mpsc::channel(hosts.len());
    for (index, host) in hosts.iter().enumerate() {
        let (sender, name) = (sender.clone(), host.host.clone());
        hands.spawn(async move {
            let looking = tokio::net::lookup_host((name.as_str(), 0));
            // A name that only ssh_config knows is another machine's.
            let addresses: Vec<IpAddr> = match tokio::time::timeout(RESOLVE, looking).await {
                Ok(Ok(addresses)) => addresses.map(|address| address.ip()).collect(),
                _ => Vec::new(),
            };
            drop(sender.send((index, addresses)).await);
        });
    }
    drop(sender);
    let mut addresses = vec![Vec::new(); hosts.len()];
    while let Some((index, list)) = found.recv().await {
        addresses[index] = list;
    }
    let mut places: Vec<Place> = Vec::new();
    for (host, addresses) in hosts.iter().zip(addresses) {
        let here = !options.ssh_local && reach::is_here(host, own_name, &addresses);
        if here && let Some(other) = places.iter().find(|place| place.here) {
            return Err(UpError::same_machine(&other.host, host));
        }
        let loopback = !addresses.is_empty() && addresses.iter().all(IpAddr::is_loopback);
        places.push(Place {
            host: host.clone(),
            here,
            shares_loopback: here || loopback,
        });
    }
    Ok(places)
}

/// The platform that this program was built for, as `uname -s -m` says it.
pub(super) fn platform() -> String {
    let name = rustix::system::uname();
    format!(
        "{} {}",
        name.sysname().to_string_lossy(),
        name.machine().to_string_lossy()
    )
}
