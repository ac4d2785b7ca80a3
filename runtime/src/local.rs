//! A whole cluster inside this process: a head and nodes, nothing on disk, keys in memory, the loopback alone.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::future::try_join_all;
use kolo_core::env;
use kolo_transport::identity::{IdentityError, Role};
use kolo_transport::ids::{DriverId, NodeId};
use kolo_transport::wire::ProgramHash;
use kolo_transport::{Credentials, RandomId as _, TransportRuntime};

use crate::{
    Head, HeadConfig, HeadError, Node, NodeConfig, NodeError, NodeResources, ProgramSource,
};

/// When members of one process count as lost. They can't be lost one by one, so it only has to be longer than a busy
/// machine may stall.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A cluster to start in this process. Start from [`LocalConfig::default`].
#[derive(Debug, Clone)]
pub struct LocalConfig {
    /// Number of nodes. Default: 1.
    pub nodes: u32,
    /// What each node declares. Default: what is found.
    pub resources: NodeResources,
    /// Whether the nodes are there for one job: see [`NodeConfig::gpus_for_all`]. Default: no.
    pub gpus_for_all: bool,
    /// What each node is called. Default: what the operating system says.
    pub hostname: Option<String>,
    /// Programs that need not be sent. Default: none.
    pub preloaded: Vec<(ProgramHash, PathBuf)>,
    /// Where all connections run. Default: a runtime of its own with one thread.
    pub runtime: Option<TransportRuntime>,
    /// Where the head listens. Default: the loopback. Nodes of other hosts need more.
    pub listen: SocketAddr,
}

impl Default for LocalConfig {
    fn default() -> Self {
        Self {
            nodes: 1,
            resources: NodeResources::default(),
            gpus_for_all: false,
            hostname: None,
            preloaded: Vec::new(),
            runtime: None,
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        }
    }
}

/// Why a cluster in this process did not start. Nothing of it is left then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LocalError {
    /// Threads could not be started. Look at the limits of processes and memory.
    #[error("the threads of the connections could not be started: {0}")]
    Threads(std::io::Error),
    /// The head did not start.
    #[error(transparent)]
    Head(#[from] HeadError),
    /// A node did not start.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// A certificate could not be made.
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// Head and nodes of this process. Each stops in the background when it is dropped.
#[derive(Debug)]
pub struct LocalMembers {
    /// The nodes.
    pub nodes: Vec<Node>,
    /// The head.
    pub head: Head,
    /// Where all connections of this process run. It has one thread: a call from driver to node wakes no other.
    pub runtime: TransportRuntime,
    /// Credentials of a driver.
    pub driver: Credentials,
}

impl LocalMembers {
    /// Starts head and nodes; returns when all nodes are registered. May be awaited on any executor.
    ///
    /// # Errors
    ///
    /// [`LocalError`].
    pub async fn start(config: LocalConfig) -> Result<Self, LocalError> {
        let (head, runtime, driver) = start_head(config.listen, config.runtime.clone()).await?;
        let nodes = start_nodes(&head, &runtime, config).await?;
        Ok(Self {
            nodes,
            head,
            runtime,
            driver,
        })
    }
}

/// The head alone, the runtime of its connections, and credentials of a driver.
pub(crate) async fn start_head(
    listen: SocketAddr,
    runtime: Option<TransportRuntime>,
) -> Result<(Head, TransportRuntime, Credentials), LocalError> {
    kolo_actors::log::be_guest();
    let runtime = match runtime {
        Some(runtime) => runtime,
        // One thread: a call from driver to node wakes no other.
        None => TransportRuntime::new(1).map_err(LocalError::Threads)?,
    };
    let head = Head::start(HeadConfig {
        listen,
        lease: PATIENCE,
        heartbeat: PATIENCE / 10,
        runtime: Some(runtime.clone()),
        ..HeadConfig::default()
    })
    .await?;
    let driver = head
        .authority()
        .issue(Role::Driver, &DriverId::random().to_string())?;
    Ok((head, runtime, driver))
}

/// Nodes of this process.
pub(crate) async fn start_nodes(
    head: &Head,
    runtime: &TransportRuntime,
    config: LocalConfig,
) -> Result<Vec<Node>, LocalError> {
    try_join_all((0..config.nodes).map(|_| start_node(head, runtime, &config))).await
}

/// One node of this process, as the configuration describes each; returns when the node is registered.
///
/// # Errors
///
/// [`LocalError`].
pub async fn start_node(
    head: &Head,
    runtime: &TransportRuntime,
    config: &LocalConfig,
) -> Result<Node, LocalError> {
    let issued = head
        .authority()
        .issue(Role::Node, &NodeId::random().to_string())?;
    let node = NodeConfig {
        resources: config.resources.clone(),
        gpus_for_all: config.gpus_for_all,
        hostname: config.hostname.clone(),
        programs: ProgramSource {
            preloaded: config.preloaded.clone(),
            ..ProgramSource::default()
        },
        transport: Some(runtime.clone()),
        idle_timeout: PATIENCE,
        keep_alive: PATIENCE / 6,
        ..NodeConfig::new(loopback(head.address()), issued)
    };
    Ok(Node::start(node).await?)
}

/// Whether kolo sets a variable of this name to a rank, a size or an address, so that a value for all workers misleads.
#[must_use]
pub fn tells_workers_apart(name: &str) -> bool {
    env::assigned(name) == Some(env::Assigned::Place)
}

/// Where processes of this machine reach what listens at `address`.
pub(crate) fn loopback(address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        // What listens on all addresses of IPv6 listens on those of IPv4 as well, and `::1` is not everywhere.
        (std::net::Ipv4Addr::LOCALHOST, address.port()).into()
    } else {
        address
    }
}
