//! The cluster.

mod faults;

use std::fmt;
use std::fs::File;
use std::net::SocketAddr;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use kolo::Cluster;
use kolo_runtime::{
    Head, HeadConfig, HeadState, Node, NodeConfig, NodeCredentials, NodeResources, ProgramSource,
};
use kolo_transport::identity::Role;
use kolo_transport::ids::{DriverId, JobId, NodeId, Rank};
use kolo_transport::interfaces::wildcard;
use kolo_transport::wire::{ClusterInfo, JobInfo, ProgramHash};
use kolo_transport::{Credentials, RandomId as _};
use tempfile::TempDir;

use crate::builder::{Mode, TestClusterBuilder};
use crate::error::{HarnessError, PATIENCE};
use crate::member::{Ready, Task, preloaded, with_life};
use crate::process::{Daemon, Spawner};

/// Looks again and again until what is seen is as wanted.
async fn poll_until<T: fmt::Debug>(
    what: &str,
    look: impl AsyncFn() -> Result<T, kolo::error::ClusterError>,
    mut holds: impl FnMut(&T) -> bool,
) -> Result<T, HarnessError> {
    let start = Instant::now();
    loop {
        let seen = look().await.map_err(cluster_error)?;
        if holds(&seen) {
            return Ok(seen);
        }
        if start.elapsed() > PATIENCE {
            return Err(HarnessError::Patience {
                what: what.to_owned(),
                last: format!("{seen:?}"),
            });
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn cluster_error(error: impl fmt::Display) -> HarnessError {
    HarnessError::Cluster(error.to_string())
}

/// The hash of this program, which is read once.
fn own_program() -> Option<ProgramHash> {
    static OWN: OnceLock<Option<ProgramHash>> = OnceLock::new();
    *OWN.get_or_init(|| {
        let mut hasher = blake3::Hasher::new();
        let program = File::open("/proc/self/exe").ok()?;
        hasher.update_reader(program).ok()?;
        Some(ProgramHash(*hasher.finalize().as_bytes()))
    })
}

impl TestClusterBuilder {
    /// Starts the head, then all nodes at once; returns when all are registered.
    ///
    /// # Errors
    ///
    /// [`HarnessError::Daemon`] with the log of what did not start.
    pub async fn start(self) -> Result<TestCluster, HarnessError> {
        let spawner = Spawner::start();
        let dir = TempDir::with_prefix("kolo-test-")
            .map_err(|error| HarnessError::Daemon(error.to_string()))?;
        let head = match self.mode {
            Mode::Processes => {
                let state = dir.path().join("head");
                let lease_ms = self.lease.as_millis() as u64;
                let life_ms = self.certificate_life.map(|life| life.as_millis() as u64);
                let lab = self.lab.as_ref();
                let task = Task::Head {
                    state,
                    lease_ms,
                    life_ms,
                    listen: lab.map(|_| wildcard(0)),
                    address: lab.map(|lab| lab.address),
                };
                let host = lab.map(|lab| lab.head.clone());
                HeadMember::Process(spawner.spawn(task, host).await?)
            }
            Mode::InProcess => {
                let config = HeadConfig {
                    state: HeadState::Memory,
                    lease: self.lease,
                    ..with_life(self.certificate_life)
                };
                HeadMember::Here(Box::new(
                    Head::start(config)
                        .await
                        .map_err(|e| HarnessError::Daemon(e.to_string()))?,
                ))
            }
        };
        let mut cluster = TestCluster {
            config: self,
            slots: Vec::new(),
            nodes: Vec::new(),
            head: Some(head),
            old_logs: Vec::new(),
            spawner,
            dir,
        };
        let nodes = cluster.config.nodes;
        for index in 0..nodes {
            let node = cluster.start_node(index).await?;
            cluster.nodes.push(Some(node));
        }
        Ok(cluster)
    }
}

#[derive(Debug)]
enum HeadMember {
    Process(Daemon),
    Here(Box<Head>),
}

#[derive(Debug)]
enum NodeMember {
    Process(Daemon, NodeId),
    Here(Box<Node>),
}

impl NodeMember {
    fn id(&self) -> NodeId {
        match self {
            Self::Process(_, id) => *id,
            Self::Here(node) => node.id(),
        }
    }
}

/// A head and its nodes. Dropping it kills all of them, and with them all workers.
#[derive(Debug)]
pub struct TestCluster {
    // Order of fields is order of drop: the daemons before their directory.
    nodes: Vec<Option<NodeMember>>,
    head: Option<HeadMember>,
    old_logs: Vec<(String, String)>,
    config: TestClusterBuilder,
    /// Slots of nodes that were added with a number of their own.
    slots: Vec<u32>,
    spawner: Spawner,
    dir: TempDir,
}

impl TestCluster {
    /// A cluster of one node with one slot, until told otherwise.
    #[must_use]
    pub fn builder() -> TestClusterBuilder {
        TestClusterBuilder {
            mode: Mode::Processes,
            nodes: 1,
            slots: 1,
            gpus: 0,
            custom: Vec::new(),
            hostnames: Vec::new(),
            lease: Duration::from_secs(10),
            certificate_life: None,
            lab: None,
            orphan_timeout: Duration::from_secs(60),
        }
    }

    async fn start_node(&self, index: usize) -> Result<NodeMember, HarnessError> {
        let config = &self.config;
        let slots = self.slots.get(index).copied().unwrap_or(config.slots);
        let hostname = config.hostnames.get(index).cloned();
        let head = self.address()?;
        let token = self.node_token()?;
        // A node that is added gets the program as a host does: it is sent.
        let has_program = (index < config.nodes).then(own_program).flatten();
        match config.mode {
            Mode::Processes => {
                let task = Task::Node {
                    head,
                    token,
                    hostname,
                    cpus: f64::from(slots),
                    gpus: config.gpus,
                    custom: config.custom.clone(),
                    programs: self.dir.path().join(format!("programs-{index}")),
                    has_program,
                    listen: config.lab.as_ref().map(|_| wildcard(0)),
                    orphan_timeout_ms: config.orphan_timeout.as_millis() as u64,
                };
                let host = config
                    .lab
                    .as_ref()
                    .and_then(|lab| lab.nodes.get(index).cloned());
                let daemon = self.spawner.spawn(task, host).await?;
                match daemon.ready {
                    Ready::Node { node } => Ok(NodeMember::Process(daemon, node)),
                    _ => Err(HarnessError::Daemon("it is no node".to_owned())),
                }
            }
            Mode::InProcess => {
                let bad = |error: &dyn fmt::Display| HarnessError::Daemon(error.to_string());
                let token = token.parse().map_err(|error| bad(&error))?;
                let programs = ProgramSource {
                    preloaded: preloaded(has_program),
                    ..ProgramSource::default()
                };
                let node = NodeConfig {
                    hostname,
                    programs,
                    resources: NodeResources {
                        cpus: Some(f64::from(slots)),
                        gpus: Some(config.gpus),
                        custom: config.custom.iter().cloned().collect(),
                    },
                    orphan_timeout: config.orphan_timeout,
                    ..NodeConfig::new(head, NodeCredentials::Token(token))
                };
                Ok(NodeMember::Here(Box::new(
                    Node::start(node).await.map_err(|error| bad(&error))?,
                )))
            }
        }
    }

    fn head(&self) -> Result<&HeadMember, HarnessError> {
        self.head
            .as_ref()
            .ok_or_else(|| HarnessError::Fault("the head was killed".to_owned()))
    }

    fn node(&self, index: usize) -> Result<&NodeMember, HarnessError> {
        self.nodes
            .get(index)
            .and_then(Option::as_ref)
            .ok_or_else(|| {
                HarnessError::Fault(format!(
                    "node {index} is not running; there are {} nodes",
                    self.nodes.len()
                ))
            })
    }

    /// Where the head listens.
    ///
    /// # Errors
    ///
    /// [`HarnessError::Fault`] if it was killed.
    pub fn address(&self) -> Result<SocketAddr, HarnessError> {
        match self.head()? {
            HeadMember::Here(head) => Ok(head.address()),
            HeadMember::Process(daemon) => match &daemon.ready {
                Ready::Head { address, .. } => Ok(*address),
                _ => Err(HarnessError::Daemon("it is no head".to_owned())),
            },
        }
    }

    fn node_token(&self) -> Result<String, HarnessError> {
        match self.head()? {
            HeadMember::Here(head) => Ok(head
                .create_token(Role::Node, Duration::from_secs(3600), None)
                .to_string()),
            HeadMember::Process(daemon) => match &daemon.ready {
                Ready::Head { node_token, .. } => Ok(node_token.clone()),
                _ => Err(HarnessError::Daemon("it is no head".to_owned())),
            },
        }
    }

    /// Credentials of a driver; in [`Mode::Processes`] always the same driver, the administrator.
    ///
    /// # Errors
    ///
    /// [`HarnessError::Cluster`] if they can't be had.
    pub fn credentials(&self) -> Result<Credentials, HarnessError> {
        match self.head()? {
            HeadMember::Here(head) => head
                .authority()
                .issue(Role::Driver, &DriverId::random().to_string())
                .map_err(cluster_error),
            HeadMember::Process(_) => Credentials::load(&self.admin_dir()).map_err(cluster_error),
        }
    }

    /// Where the head of [`Mode::Processes`] keeps the administrator's credentials.
    pub(crate) fn admin_dir(&self) -> std::path::PathBuf {
        self.dir.path().join("head").join("admin")
    }

    /// Connects as a driver.
    ///
    /// # Errors
    ///
    /// [`HarnessError::Cluster`].
    pub async fn connect(&self) -> Result<Cluster, HarnessError> {
        Cluster::connect(self.address()?, self.credentials()?)
            .await
            .map_err(cluster_error)
    }

    /// Connects as a driver with all links on `runtime`; see [`Cluster::connect_on`].
    ///
    /// # Errors
    ///
    /// [`HarnessError::Cluster`].
    pub async fn connect_on(
        &self,
        runtime: tokio::runtime::Handle,
    ) -> Result<Cluster, HarnessError> {
        let connected = Cluster::connect_on(runtime, self.address()?, self.credentials()?);
        connected.await.map_err(cluster_error)
    }

    /// The id of a node; it changes when the node is restarted.
    ///
    /// # Errors
    ///
    /// [`HarnessError::Fault`] if it is not running.
    pub fn node_id(&self, index: usize) -> Result<NodeId, HarnessError> {
        self.node(index).map(NodeMember::id)
    }

    /// The process id of a node's daemon.
    ///
    /// # Errors
    ///
    /// [`HarnessError::Fault`] if it is not running or not a process.
    pub fn node_pid(&self, index: usize) -> Result<u32, HarnessError> {
        match self.node(index)? {
            NodeMember::Process(daemon, _) => {
                Ok(daemon.pid().as_raw_nonzero().get().unsigned_abs())
            }
            NodeMember::Here(_) => Err(HarnessError::Fault(
                "nodes are no processes in this mode".to_owned(),
            )),
        }
    }

    /// The process id of the head.
    ///
    /// # Errors
    ///
    /// [`HarnessError::Fault`] if the head was killed or is no process.
    pub fn head_pid(&self) -> Result<u32, HarnessError> {
        match self.head()? {
            HeadMember::Process(daemon) => Ok(daemon.pid().as_raw_nonzero().get().unsigned_abs()),
            HeadMember::Here(_) => Err(HarnessError::Fault(
                "the head is no process in this mode".to_owned(),
            )),
        }
    }

    /// Adds a node to the cluster; gives its index.
    ///
    /// # Errors
    ///
    /// [`HarnessError::Daemon`] if it does not start.
    pub async fn add_node(&mut self) -> Result<usize, HarnessError> {
        self.add_node_with_slots(self.config.slots).await
    }

    /// Adds a node with another number of slots than the others; gives its index.
    ///
    /// # Errors
    ///
    /// [`HarnessError::Daemon`] if it does not start.
    pub async fn add_node_with_slots(&mut self, slots: u32) -> Result<usize, HarnessError> {
        let index = self.nodes.len();
        self.slots.resize(index, self.config.slots);
        self.slots.push(slots);
        let node = self.start_node(index).await?;
        self.nodes.push(Some(node));
        Ok(index)
    }

    /// The process id of a job's worker, as the head knows it.
    ///
    /// # Errors
    ///
    /// [`HarnessError::Fault`] if there is no such rank; [`HarnessError::Cluster`].
    pub async fn worker_pid(&self, job: JobId, rank: Rank) -> Result<u32, HarnessError> {
        let info = self.job(job).await?;
        info.workers
            .iter()
            .find(|worker| worker.member.rank == rank && worker.pid != 0)
            .map(|worker| worker.pid)
            .ok_or_else(|| HarnessError::Fault(format!("{job} has no running rank {rank}")))
    }

    /// The cluster as the head sees it.
    ///
    /// # Errors
    ///
    /// [`HarnessError::Cluster`].
    pub async fn status(&self) -> Result<ClusterInfo, HarnessError> {
        self.connect().await?.status().await.map_err(cluster_error)
    }

    /// A job as the head sees it.
    ///
    /// # Errors
    ///
    /// [`HarnessError::Cluster`].
    pub async fn job(&self, job: JobId) -> Result<JobInfo, HarnessError> {
        self.connect().await?.job(job).await.map_err(cluster_error)
    }

    /// Waits until the head sees the cluster as `holds` wants it; at most a minute.
    ///
    /// # Errors
    ///
    /// [`HarnessError::Patience`] with what the head saw last.
    pub async fn wait_until(
        &self,
        what: &str,
        holds: impl FnMut(&ClusterInfo) -> bool,
    ) -> Result<ClusterInfo, HarnessError> {
        let cluster = self.connect().await?;
        poll_until(what, async || cluster.status().await, holds).await
    }

    /// Waits until the head sees the jobs, the newest first, as `holds` wants them; at most a minute.
    ///
    /// # Errors
    ///
    /// [`HarnessError::Patience`] with what the head saw last.
    pub async fn wait_for_jobs(
        &self,
        what: &str,
        mut holds: impl FnMut(&[JobInfo]) -> bool,
    ) -> Result<Vec<JobInfo>, HarnessError> {
        let cluster = self.connect().await?;
        poll_until(
            what,
            async || cluster.jobs().await,
            |jobs: &Vec<JobInfo>| holds(jobs),
        )
        .await
    }

    /// What every daemon wrote so far, with its name. Empty in [`Mode::InProcess`].
    #[must_use]
    pub fn logs(&self) -> Vec<(String, String)> {
        let mut logs = self.old_logs.clone();
        if let Some(HeadMember::Process(daemon)) = &self.head {
            logs.push(("head".to_owned(), daemon.log.text()));
        }
        for (index, node) in self.nodes.iter().enumerate() {
            if let Some(NodeMember::Process(daemon, id)) = node {
                logs.push((format!("node {index} ({id})"), daemon.log.text()));
            }
        }
        logs
    }

    /// Stops everything gracefully, nodes first.
    ///
    /// # Errors
    ///
    /// [`HarnessError::Daemon`] if one does not end well.
    pub async fn stop(mut self) -> Result<(), HarnessError> {
        for node in self.nodes.iter_mut().filter_map(Option::take) {
            match node {
                NodeMember::Process(daemon, _) => daemon.stop().await?,
                NodeMember::Here(node) => node.stop().await,
            }
        }
        match self.head.take() {
            Some(HeadMember::Process(daemon)) => daemon.stop().await,
            Some(HeadMember::Here(head)) => {
                head.stop().await;
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl Drop for TestCluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for (name, text) in self.logs() {
                eprintln!("---- log of {name}\n{text}");
            }
        }
    }
}
