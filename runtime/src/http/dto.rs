//! The JSON of the API and of `kolo --format json`. Apart from the wire messages, so that each can change alone.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use kolo_transport::ids::JobId;
use kolo_transport::wire;
use serde::Serialize;
use utoipa::ToSchema;

/// An amount of CPUs, GPUs and named resources.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct Resources {
    /// Logical CPUs, exact in thousandths.
    pub cpus: f64,
    /// Whole GPUs.
    pub gpus: u32,
    /// Everything else, by name, exact in thousandths.
    pub custom: BTreeMap<String, f64>,
}

impl From<&wire::Resources> for Resources {
    fn from(resources: &wire::Resources) -> Self {
        Self {
            cpus: resources.cpus.as_f64(),
            gpus: resources.gpus,
            custom: resources
                .custom
                .iter()
                .map(|(name, amount)| (name.clone(), amount.as_f64()))
                .collect(),
        }
    }
}

/// A node daemon.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct Node {
    /// Its id.
    #[schema(example = "node-00f3a9c2d4e5b687")]
    pub node: String,
    /// Its hostname. Several nodes may have the same.
    pub hostname: String,
    /// Where its daemon listens (QUIC).
    #[schema(value_type = String, example = "10.0.0.2:41234")]
    pub address: SocketAddr,
    /// Its state.
    pub state: NodeState,
    /// What it has.
    pub total: Resources,
    /// What is free.
    pub available: Resources,
    /// Milliseconds since it was last heard.
    pub last_seen_ms: u64,
    /// The jobs that hold resources on it.
    pub jobs: Vec<String>,
}

/// The states of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    /// It takes work.
    Alive,
    /// It takes no new work, since it is drained or being stopped, and jobs are still on it.
    Draining,
    /// It takes no new work, and no job is on it any more.
    Drained,
    /// It took no new work any more, no job was on it, and it has ended.
    Left,
    /// It is not heard any more, and its jobs have lost it.
    Lost,
    /// It was put out of the cluster.
    Revoked,
}

impl NodeState {
    /// Each of them.
    pub(crate) const ALL: [Self; 6] = [
        Self::Alive,
        Self::Draining,
        Self::Drained,
        Self::Left,
        Self::Lost,
        Self::Revoked,
    ];

    /// The state of a node in a cluster that has put out these members.
    pub(crate) fn of(node: &wire::NodeInfo, revoked: &[wire::RevokedMember]) -> Self {
        let name = node.node.to_string();
        match (node.alive, node.draining) {
            _ if revoked.iter().any(|member| member.name == name) => Self::Revoked,
            (false, true) if node.jobs.is_empty() => Self::Left,
            (false, _) => Self::Lost,
            (true, false) => Self::Alive,
            (true, true) if node.jobs.is_empty() => Self::Drained,
            (true, true) => Self::Draining,
        }
    }

    /// Its word, the same in tables, in JSON and in metrics.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Alive => "alive",
            Self::Draining => "draining",
            Self::Drained => "drained",
            Self::Left => "left",
            Self::Lost => "lost",
            Self::Revoked => "revoked",
        }
    }
}

/// A node or driver that was put out of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Revoked {
    /// Its id.
    #[schema(example = "driver-00f3a9c2d4e5b687")]
    pub name: String,
    /// `node` or `driver`.
    pub role: String,
    /// Since when, in seconds since 1970.
    pub since_unix: u64,
    /// Why, as the operator said it.
    pub reason: String,
}

impl From<&wire::RevokedMember> for Revoked {
    fn from(member: &wire::RevokedMember) -> Self {
        Self {
            name: member.name.clone(),
            role: member.role.to_string(),
            since_unix: member.since_unix,
            reason: member.reason.clone(),
        }
    }
}

impl Node {
    fn new(node: &wire::NodeInfo, revoked: &[wire::RevokedMember]) -> Self {
        Self {
            node: node.node.to_string(),
            hostname: node.hostname.clone(),
            address: node.address,
            state: NodeState::of(node, revoked),
            total: (&node.total).into(),
            available: (&node.available).into(),
            last_seen_ms: node.last_seen_ms,
            jobs: node.jobs.iter().map(ToString::to_string).collect(),
        }
    }
}

/// The cluster and its nodes.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct Cluster {
    /// Its id.
    #[schema(example = "cluster-6d5a0c1b2e3f4a59")]
    pub cluster: String,
    /// Version of the head.
    pub version: String,
    /// Milliseconds since the head started.
    pub uptime_ms: u64,
    /// Its nodes, in order of registration.
    pub nodes: Vec<Node>,
    /// Jobs that have not ended.
    pub running_jobs: u32,
    /// Nodes and drivers that were put out, in the order in which they were.
    pub revoked: Vec<Revoked>,
}

impl From<&wire::ClusterInfo> for Cluster {
    fn from(cluster: &wire::ClusterInfo) -> Self {
        Self {
            cluster: cluster.cluster.to_string(),
            version: cluster.version.clone(),
            uptime_ms: cluster.uptime_ms,
            nodes: (cluster.nodes.iter())
                .map(|node| Node::new(node, &cluster.revoked))
                .collect(),
            running_jobs: cluster.running_jobs,
            revoked: cluster.revoked.iter().map(Into::into).collect(),
        }
    }
}

/// The states of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Accepted, nothing done yet.
    Pending,
    /// Reserving on nodes.
    Placing,
    /// Finding the interfaces that connect its nodes.
    Probing,
    /// Workers boot.
    Starting,
    /// All members are there.
    Healthy,
    /// A member was lost; a new generation is being made.
    Recovering,
    /// Ended well.
    Succeeded,
    /// Ended by a failure.
    Failed,
    /// Ended because someone asked for it.
    Stopped,
}

impl From<wire::JobState> for JobState {
    fn from(state: wire::JobState) -> Self {
        match state {
            wire::JobState::Pending => Self::Pending,
            wire::JobState::Placing => Self::Placing,
            wire::JobState::Probing => Self::Probing,
            wire::JobState::Starting => Self::Starting,
            wire::JobState::Healthy => Self::Healthy,
            wire::JobState::Recovering => Self::Recovering,
            wire::JobState::Succeeded => Self::Succeeded,
            wire::JobState::Failed => Self::Failed,
            wire::JobState::Stopped => Self::Stopped,
        }
    }
}

/// The states of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum WorkerState {
    /// Its process is being started.
    Starting,
    /// It takes calls.
    Ready,
    /// It could take calls, and is no member of the generation.
    Spare,
    /// It is being stopped.
    Stopping,
    /// Its process is gone.
    Exited,
}

impl From<wire::WorkerState> for WorkerState {
    fn from(state: wire::WorkerState) -> Self {
        match state {
            wire::WorkerState::Starting => Self::Starting,
            wire::WorkerState::Ready => Self::Ready,
            wire::WorkerState::Spare => Self::Spare,
            wire::WorkerState::Stopping => Self::Stopping,
            wire::WorkerState::Exited => Self::Exited,
        }
    }
}

/// How a process ended. At most one of `code` and `signal` is set; none if its supervisor was lost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Exit {
    /// Its exit code.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// The same in words.
    #[schema(example = "signal 9 (SIGKILL)")]
    pub text: String,
}

impl From<wire::Exit> for Exit {
    fn from(exit: wire::Exit) -> Self {
        let (code, signal) = match exit {
            wire::Exit::Code(code) => (Some(code), None),
            wire::Exit::Signal(signal) => (None, Some(signal)),
            wire::Exit::Unknown => (None, None),
        };
        Self {
            code,
            signal,
            text: exit.to_string(),
        }
    }
}

/// A worker: its ranks, its place and its process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Worker {
    /// World rank.
    pub rank: u32,
    /// Rank on its node.
    pub local_rank: u32,
    /// Members on its node.
    pub local_size: u32,
    /// Number of its node among those that have its local rank.
    pub cross_rank: u32,
    /// Number of nodes that have its local rank.
    pub cross_size: u32,
    /// The slot it fills: its identity across generations.
    pub slot: u32,
    /// Where it runs.
    pub node: String,
    /// The node's hostname.
    pub hostname: String,
    /// Where its data plane listens (QUIC), if it has one.
    #[schema(value_type = Option<String>)]
    pub address: Option<SocketAddr>,
    /// Its state.
    pub state: WorkerState,
    /// Its process id; 0 before it has one.
    pub pid: u32,
    /// How it ended.
    pub exit: Option<Exit>,
}

impl From<&wire::WorkerInfo> for Worker {
    fn from(worker: &wire::WorkerInfo) -> Self {
        let member = &worker.member;
        Self {
            rank: member.rank.0,
            local_rank: member.local_rank.0,
            local_size: member.local_size,
            cross_rank: member.cross_rank.0,
            cross_size: member.cross_size,
            slot: member.slot.0,
            node: member.node.to_string(),
            hostname: member.hostname.clone(),
            address: member.address,
            state: worker.state.into(),
            pid: worker.pid,
            exit: worker.exit.map(Into::into),
        }
    }
}

/// A job and its workers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Job {
    /// Its id.
    #[schema(example = "job-0c1d2e3f4a5b6c7d")]
    pub job: String,
    /// Its name.
    pub name: String,
    /// The driver that submitted it.
    pub owner: String,
    /// Its state.
    pub state: JobState,
    /// The current generation; 0 before the first.
    pub generation: u64,
    /// Its workers in rank order.
    pub workers: Vec<Worker>,
    /// Milliseconds since it was submitted; for a job that has ended, how long it lasted.
    pub age_ms: u64,
    /// Milliseconds since it ended, if it has.
    pub ended_ms: Option<u64>,
    /// Why it ended.
    pub reason: Option<String>,
    /// Where its plain HTTP rendezvous listens, if it asked for one.
    #[schema(value_type = Option<String>)]
    pub rendezvous: Option<SocketAddr>,
    /// What connects its nodes, once that is known. Not in lists of jobs.
    pub network: Option<Network>,
    /// Why the members of an elastic job are these. Not in lists of jobs.
    pub membership: Option<Membership>,
}

/// Why the members of an elastic job are these.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Membership {
    /// Why the current generation came about; nothing before the first.
    #[schema(
        example = "3 -> 2 members: rank 1 (process 1 of slot 1 on box) is lost: signal 9 (SIGKILL)"
    )]
    pub cause: Option<String>,
    /// What the head decided last about the members, and why.
    #[schema(example = "members: 2 of at most 4")]
    pub decision: String,
    /// The hosts that get no new worker now: something has failed there.
    pub left_out: Vec<LeftOut>,
}

/// A host that gets no new worker of an elastic job now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct LeftOut {
    /// The host.
    pub hostname: String,
    /// For how long still, in milliseconds.
    #[schema(example = 25000)]
    pub for_ms: u64,
    /// Why.
    #[schema(
        example = "its health check has failed: `gpu-check` ended with exit code 1: no device"
    )]
    pub why: String,
}

impl From<&wire::LeftOut> for LeftOut {
    fn from(host: &wire::LeftOut) -> Self {
        Self {
            hostname: host.hostname.clone(),
            for_ms: host.for_ms,
            why: host.why.clone(),
        }
    }
}

impl From<&wire::MembershipInfo> for Membership {
    fn from(membership: &wire::MembershipInfo) -> Self {
        Self {
            cause: membership.cause.clone(),
            decision: membership.decision.clone(),
            left_out: membership.left_out.iter().map(LeftOut::from).collect(),
        }
    }
}

/// What becomes of the jobs on a node that is drained, or takes work again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Drain {
    /// The node.
    #[schema(example = "node-00f3a9c2d4e5b687")]
    pub node: String,
    /// Its hostname.
    pub hostname: String,
    /// Elastic jobs that leave the node.
    pub leaving: Vec<String>,
    /// Jobs that stay until they end: those that never change their members, and all where the node takes work again.
    pub staying: Vec<String>,
}

impl From<&wire::NodeDrain> for Drain {
    fn from(drain: &wire::NodeDrain) -> Self {
        let names = |jobs: &[JobId]| jobs.iter().map(ToString::to_string).collect();
        Self {
            node: drain.node.to_string(),
            hostname: drain.hostname.clone(),
            leaving: names(&drain.leaving),
            staying: names(&drain.staying),
        }
    }
}

/// What connects the nodes of a job. `kolo interfaces --job` shows what was tried as well.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Network {
    /// `local`, `registered`, `interface`, `per_node`, `per_pair` or `none`.
    #[schema(example = "interface")]
    pub choice: String,
    /// The interface, if it has one name on all nodes.
    #[schema(example = "eth1")]
    pub interface: Option<String>,
    /// The addresses that its workers use, by node.
    pub addresses: Vec<NetworkAddress>,
    /// Whether it was known from before.
    pub cached: bool,
    /// Milliseconds that it took to find out.
    pub took_ms: u64,
    /// Why nothing was chosen.
    pub problem: Option<String>,
}

/// An address that a job's workers on a node use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct NetworkAddress {
    /// The node.
    #[schema(example = "node-00f3a9c2d4e5b687")]
    pub node: String,
    /// Its hostname.
    pub hostname: String,
    /// The interface.
    pub interface: String,
    /// The address.
    #[schema(value_type = String, example = "10.0.0.2")]
    pub address: IpAddr,
    /// Largest packet, in bytes.
    pub mtu: u32,
}

/// The name of a choice for programs, and the interface if it is one for all nodes.
pub(crate) fn choice(choice: &wire::NetworkChoice) -> (&'static str, Option<&str>) {
    match choice {
        wire::NetworkChoice::Local => ("local", None),
        wire::NetworkChoice::Registered => ("registered", None),
        wire::NetworkChoice::Interface(name) => ("interface", Some(name)),
        wire::NetworkChoice::PerNode => ("per_node", None),
        wire::NetworkChoice::PerPair => ("per_pair", None),
        wire::NetworkChoice::None => ("none", None),
    }
}

impl From<&wire::NetworkReport> for Network {
    fn from(report: &wire::NetworkReport) -> Self {
        let (choice, interface) = choice(&report.choice);
        Self {
            choice: choice.to_owned(),
            interface: interface.map(str::to_owned),
            addresses: report
                .rows
                .iter()
                .filter(|row| row.chosen)
                .map(|row| NetworkAddress {
                    node: row.node.to_string(),
                    hostname: row.hostname.clone(),
                    interface: row.interface.clone(),
                    address: row.address,
                    mtu: row.mtu,
                })
                .collect(),
            cached: report.cached,
            took_ms: report.took_ms,
            problem: report.problem.as_ref().map(|p| p.message.clone()),
        }
    }
}

impl From<&wire::JobInfo> for Job {
    fn from(job: &wire::JobInfo) -> Self {
        Self {
            job: job.job.to_string(),
            name: job.name.clone(),
            owner: job.owner.to_string(),
            state: job.state.into(),
            generation: job.generation.0,
            workers: job.workers.iter().map(Into::into).collect(),
            age_ms: job.age_ms,
            ended_ms: job.ended_ms,
            reason: job.reason.clone(),
            rendezvous: job.rendezvous,
            network: job.network.as_ref().map(Into::into),
            membership: job.membership.as_deref().map(Into::into),
        }
    }
}

/// Whether a daemon is well.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Health {
    /// `ok`, or what it waits for.
    #[schema(example = "ok")]
    pub status: String,
}

/// The body of every answer that is a "no".
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct ErrorBody {
    /// What went wrong.
    pub error: ErrorDetail,
}

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct ErrorDetail {
    /// The kind, for programs.
    #[schema(example = "not_found")]
    pub kind: String,
    /// What was given, what is allowed and what to do, for people.
    pub message: String,
}
