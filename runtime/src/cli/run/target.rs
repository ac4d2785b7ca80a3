//! Where the workers run, as the options and the surroundings of the command say.

use std::ffi::OsString;
use std::path::PathBuf;

use super::super::error::CliError;
use super::super::host_args::HostArgs;
use super::args::Run;
use crate::hosts::HostSlots;

/// Where the workers run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// On this machine, with a cluster for this job alone.
    Local,
    /// On the cluster of a head that is there.
    Cluster,
    /// On these nodes of that cluster.
    Nodes(Vec<HostSlots>),
    /// On these hosts, by ssh, with a cluster for this job alone.
    Hosts(Vec<HostSlots>),
    /// On hosts that a script tells, by ssh, with a cluster for this job alone.
    Discovered,
}

/// What the environment of the command says.
#[derive(Debug)]
pub(crate) struct Surroundings {
    /// Its variables.
    pub(crate) vars: Vec<(OsString, OsString)>,
    /// Its directory.
    pub(crate) cwd: PathBuf,
    /// What this machine is called.
    pub(crate) hostname: String,
    /// Whether a head is given.
    pub(crate) has_head: bool,
}

pub(super) fn usage<T>(message: impl Into<String>) -> Result<T, CliError> {
    Err(CliError::Usage(message.into()))
}

pub(super) fn target(options: &Run, here: &Surroundings) -> Result<Target, CliError> {
    let given = HostArgs {
        hosts: options.hosts.clone(),
        hostfile: options.hostfile.clone(),
    };
    Ok(match given.read()? {
        Some(hosts) if here.has_head => Target::Nodes(hosts),
        Some(hosts) => Target::Hosts(hosts),
        None if !here.has_head && options.elastic.host_discovery_script.is_some() => {
            Target::Discovered
        }
        None if here.has_head && !options.local && !options.torch.standalone => Target::Cluster,
        None => Target::Local,
    })
}
