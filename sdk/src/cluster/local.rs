//! A whole cluster inside the driver's process.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kolo_runtime::local::{LocalConfig, LocalMembers, start_node};
use kolo_runtime::{Head, Node, NodeResources};
use kolo_transport::descriptors::make_room;
use kolo_transport::ids::NodeId;
use kolo_transport::runtime::TransportRuntime;

use super::Cluster;
use crate::error::ConnectError;
use crate::options::Amount;
use crate::program;

/// Least number of slots of [`Cluster::local`], so that programs for a few workers run on small machines too.
const LEAST_SLOTS: u32 = 4;

/// Descriptors of the links and the head, and of each node. Workers need more.
const OWN_DESCRIPTORS: u64 = 32;
const NODE_DESCRIPTORS: u64 = 16;

/// Head and nodes inside this process; worker processes as usual. For tests, examples and machines without a cluster.
///
/// Nothing is written to disk, keys included, and only the loopback is listened on. Links are the same as between hosts,
/// mutual TLS included. It ends with the last handle, and at the latest with the process; its workers end with it.
///
/// ```no_run
/// # async fn example() -> kolo::Result<()> {
/// let cluster = kolo::LocalCluster::builder().nodes(2).slots(2).start().await?;
/// let executor = kolo::Executor::builder().hosts(2).slots(2).start(&cluster).await?;
/// # Ok(()) }
/// ```
///
/// The program's `main` must begin as [`#[kolo::main]`](macro@crate::main) makes it, for the worker processes are the same
/// program.
#[derive(Debug, Clone, Copy)]
pub struct LocalCluster {
    _private: (),
}

impl LocalCluster {
    /// A cluster of one node, with as many slots as the machine has CPUs, but at least 4, until told otherwise.
    pub fn builder() -> LocalClusterBuilder {
        LocalClusterBuilder {
            nodes: 1,
            slots: None,
            cpus: None,
            gpus: 0,
            custom: BTreeMap::new(),
        }
    }
}

/// Describes a [`LocalCluster`].
#[derive(Debug, Clone)]
#[must_use = "nothing is started without `start`"]
pub struct LocalClusterBuilder {
    nodes: u32,
    slots: Option<u32>,
    cpus: Option<f64>,
    gpus: u32,
    custom: BTreeMap<String, f64>,
}

impl LocalClusterBuilder {
    /// Number of nodes. Default: 1. Allowed: 1 to 256.
    pub fn nodes(mut self, nodes: u32) -> Self {
        self.nodes = nodes;
        self
    }

    /// How many workers with default resources fit on each node. Default: the number of CPUs of this machine, but at least
    /// 4. It need not be the number of CPUs that there are.
    pub fn slots(mut self, slots: u32) -> Self {
        self.slots = Some(slots);
        self
    }

    /// CPUs that each node declares. Default: one for each slot. It wins over [`slots`](Self::slots).
    pub fn cpus(mut self, cpus: impl Amount) -> Self {
        self.cpus = Some(cpus.units());
        self
    }

    /// GPUs that each node declares; they need not exist. Default: 0.
    pub fn gpus(mut self, gpus: u32) -> Self {
        self.gpus = gpus;
        self
    }

    /// A custom resource of each node. May be repeated for other names.
    pub fn resource(mut self, name: impl Into<String>, amount: impl Amount) -> Self {
        self.custom.insert(name.into(), amount.units());
        self
    }

    /// Starts head and nodes; returns when all nodes are registered. May be awaited on any executor.
    ///
    /// # Errors
    ///
    /// [`ConnectError::Local`] if a number is not allowed, or a thread, socket or key can't be had.
    pub async fn start(self) -> Result<Cluster, ConnectError> {
        if !(1..=256).contains(&self.nodes) || self.slots == Some(0) {
            let (nodes, slots) = (self.nodes, self.slots.unwrap_or_default());
            return Err(failed(format!(
                "nodes is {nodes} and slots is {slots}; allowed are 1 to 256 nodes with at least 1 slot"
            )));
        }
        crate::entry::may_start()?;
        let descriptors = OWN_DESCRIPTORS + u64::from(self.nodes) * NODE_DESCRIPTORS;
        make_room("a local cluster", descriptors).map_err(failed)?;
        // One thread for all links of this process: a call from driver to node wakes no other.
        let runtime = TransportRuntime::new(1).map_err(failed)?;
        let own = blocking(&runtime, program::own).await?.map_err(failed)?;
        let config = LocalConfig {
            nodes: self.nodes,
            resources: NodeResources {
                cpus: Some(
                    self.cpus
                        .unwrap_or_else(|| f64::from(self.slots.unwrap_or_else(default_slots))),
                ),
                gpus: Some(self.gpus),
                custom: self.custom,
            },
            preloaded: vec![(own.program.hash, own.file())],
            runtime: Some(runtime),
            ..LocalConfig::default()
        };
        let started = LocalMembers::start(config.clone()).await.map_err(failed)?;
        let LocalMembers {
            nodes,
            head,
            runtime,
            driver,
        } = started;
        let address = head.address();
        Cluster::with_members(
            runtime,
            address,
            driver,
            Members {
                nodes: Mutex::new(nodes),
                head,
                config,
            },
        )
        .await
    }
}

/// What lives as long as the cluster's handles. Each stops in the background when it is dropped.
pub(crate) struct Members {
    nodes: Mutex<Vec<Node>>,
    head: Head,
    /// For nodes that are added.
    config: LocalConfig,
}

impl Members {
    fn nodes(&self) -> MutexGuard<'_, Vec<Node>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Cluster {
    /// Adds a node to a [`LocalCluster`], with as many slots as its other nodes have; returns when the node is registered.
    /// Elastic groups that have room for more workers grow onto the node.
    ///
    /// # Errors
    ///
    /// [`ConnectError::Local`] if the cluster is not in this process, or the node does not start.
    pub async fn add_local_node(&self) -> Result<NodeId, ConnectError> {
        let members = self.members()?;
        make_room("a node of a local cluster", NODE_DESCRIPTORS).map_err(failed)?;
        let node = start_node(&members.head, self.runtime(), &members.config);
        let node = node.await.map_err(failed)?;
        let id = node.id();
        members.nodes().push(node);
        Ok(id)
    }

    /// Kills a node of a [`LocalCluster`] and its workers at once, as a power cut would: to try how a program takes that.
    ///
    /// # Errors
    ///
    /// [`ConnectError::Local`] if the cluster is not in this process, or has no such node.
    pub async fn kill_local_node(&self, node: NodeId) -> Result<(), ConnectError> {
        let members = self.members()?;
        let found = {
            let mut nodes = members.nodes();
            let index = nodes.iter().position(|other| other.id() == node);
            index.map(|index| nodes.swap_remove(index))
        };
        let found = found.ok_or_else(|| failed(format!("{node} is no node of this process")))?;
        blocking(self.runtime(), || found.kill()).await
    }

    fn members(&self) -> Result<&Members, ConnectError> {
        self.local_members().ok_or_else(|| {
            let head = self.head();
            failed(format!(
                "the cluster of {head} is not in this process; only clusters that `LocalCluster` has started are"
            ))
        })
    }
}

fn default_slots() -> u32 {
    let cpus = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
    cpus.max(LEAST_SLOTS)
}

fn failed(error: impl std::fmt::Display) -> ConnectError {
    ConnectError::Local {
        reason: error.to_string(),
    }
}

/// Runs what blocks on the runtime's threads for that; the caller may be on any executor.
async fn blocking<T: Send + 'static>(
    runtime: &TransportRuntime,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ConnectError> {
    runtime.handle().spawn_blocking(work).await.map_err(failed)
}
