//! What a detached launch puts on record, for `kolo down`.

use super::error::CliError;
use crate::hosts::HostSlots;
use crate::ssh::UpNode;
use crate::ssh::state::{Launch, RecordedNode};

/// A launch that is on record and not yet up. If this process is killed now, by whatever means, `kolo down` looks on all hosts
/// on which a node may be.
#[derive(Debug)]
pub(super) struct Pending {
    cluster: String,
    /// The hosts that were not on record before.
    new: Vec<HostSlots>,
}

impl Pending {
    /// Puts the launch on record, with hosts on which nothing of this cluster runs yet; those of earlier launches for the
    /// cluster stay.
    ///
    /// # Errors
    ///
    /// [`CliError::Hosts`]: then nothing may be started.
    pub(super) fn begin(launch: Launch, hosts: &[HostSlots]) -> Result<Self, CliError> {
        let cluster = launch.cluster.clone();
        let mut new = hosts.to_vec();
        let merge = |before: Option<Launch>| {
            let mut launch = launch;
            if let Some(before) = before {
                new.retain(|host| !before.has(host));
                launch.head_pid = launch.head_pid.or(before.head_pid);
                launch.head_state = launch.head_state.take().or(before.head_state);
                launch.hosts = before.hosts;
                launch.nodes = before.nodes;
            }
            launch.add(hosts);
            Some(launch)
        };
        Launch::change(&cluster, merge).map_err(CliError::Hosts)?;
        Ok(Self { cluster, new })
    }

    /// All nodes are up: puts their ids on record. One that was up by itself is not this launch's.
    pub(super) fn up(self, nodes: &[UpNode]) -> Result<(), CliError> {
        let set = |before: Option<Launch>| {
            let mut launch = before?;
            for up in nodes {
                match &up.started {
                    Some(ready) => {
                        launch.nodes.retain(|node| !node.is_of(&up.host));
                        launch.nodes.push(RecordedNode {
                            host: up.host.host.clone(),
                            node: up.node,
                            pid: ready.pid,
                            state: ready.state.clone(),
                        });
                    }
                    None if self.new.contains(&up.host) => {
                        launch.remove(std::slice::from_ref(&up.host));
                    }
                    None => {}
                }
            }
            Some(launch)
        };
        Launch::change(&self.cluster, set).map_err(CliError::Hosts)?;
        Ok(())
    }

    /// It did not come up, and has left nothing but what may be on some hosts. A head that the launch has started stays on record.
    pub(super) fn not_up(mut self, left: &[HostSlots]) {
        self.new.retain(|host| !left.contains(host));
        let strike = |before: Option<Launch>| {
            let mut launch = before?;
            launch.remove(&self.new);
            Some(launch)
        };
        if let Err(error) = Launch::change(&self.cluster, strike) {
            // What is on record too much costs `kolo down` a look.
            tracing::warn!(error, "the record of the launch stays as it is");
        }
    }
}
