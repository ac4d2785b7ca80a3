//! What nodes and drivers ask of the head.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::daemon::DaemonState;
use super::network::{InterfacesQuery, NetworkReport, NodeNetwork};
use super::obituary::Seal;
use super::trust::{RevocationList, SecretText, TokenEntry};
use super::worker::{FailedOperation, Kept};
use super::{
    ClusterInfo, JobHost, JobInfo, JobSpec, PlacedNode, RankFailure, Refusal, Resources,
    WorkerSignal,
};
use crate::identity::Role;
use crate::ids::{Generation, Incarnation, JobId, NodeId, Slot};

/// A node's introduction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRegistration {
    /// Its id, which must be the one in its certificate.
    pub node: NodeId,
    /// Its hostname.
    pub hostname: String,
    /// Where drivers and other nodes reach its daemon.
    pub address: SocketAddr,
    /// What it has in all.
    pub resources: Resources,
    /// Version of the daemon.
    pub version: String,
    /// Jobs that hold something on it. A head that does not know one of them tells the node to stop it.
    #[serde(default)]
    pub jobs: Vec<JobId>,
    /// Its network interfaces, if it knows them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NodeNetwork>,
    /// Drawn at random when the daemon starts, so that the head tells a daemon that comes back from another one with
    /// the same identity. 0 is unknown.
    #[serde(default)]
    pub instance: u64,
    /// By which the head knows this daemon's obituary, if its wardens send one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seal: Option<Seal>,
    /// Whether its daemon is about to stop: it offers nothing.
    #[serde(default)]
    pub draining: bool,
}

/// First frame of a stream to the head.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum HeadRequest {
    /// A node registers, and keeps the connection: the head sends [`NodeRequest`](super::NodeRequest)s back over it.
    Register(NodeRegistration),
    /// A node opens its stream of heartbeats. Each side sends [`Beat`]s from then on.
    Heartbeats,
    /// Things that happened on a node, in order. The next are sent when these are acknowledged.
    Events(Vec<NodeEvent>),
    /// A node asks for the certificate of a worker that it has started.
    SignWorker {
        /// The worker's job.
        job: JobId,
        /// The worker's slot.
        slot: Slot,
        /// A certificate signing request in DER, made by the worker.
        #[serde(with = "serde_bytes")]
        csr: Vec<u8>,
    },
    /// A driver submits a job. The stream stays open for [`JobEvent`](super::JobEvent)s and [`SubmitFrame`]s;
    /// when it ends, the job is stopped.
    Submit(JobSpec),
    /// A driver asks whether a job would start. The head places it, and nodes reserve, look for its installed program and are
    /// probed, as for [`HeadRequest::Submit`]. Then all is released, before any worker starts. Of an elastic job these are the members
    /// that it would begin with. A request of its own, so that a
    /// head which does not know it starts nothing.
    DryRun(JobSpec),
    /// The whole cluster.
    Cluster,
    /// All jobs, the newest first; ended ones for as long as the head remembers them.
    Jobs,
    /// One job.
    Job {
        /// Which.
        job: JobId,
    },
    /// Stop a job; answered when it has ended.
    Stop {
        /// Which.
        job: JobId,
    },
    /// A node or driver asks for another certificate of its own, before the one it has ends.
    Renew {
        /// A certificate signing request in DER. Its key is the caller's; names in it don't count.
        #[serde(with = "serde_bytes")]
        csr: Vec<u8>,
    },
    /// What the agents of a node have measured since the last time. A head that does not know the request exports nothing of it.
    Metrics(Vec<MetricSum>),
    /// A node takes no more jobs. Answered when it holds none any more.
    Drain,
    /// An administrator makes a join token.
    CreateToken {
        /// Who may join with it: `node` or `driver`.
        role: Role,
        /// Whether drivers that join with it may administer the cluster.
        #[serde(default)]
        admin: bool,
        /// How long it is valid, in seconds.
        ttl_s: u64,
        /// How often it may be used; `None` for any number of times.
        #[serde(default)]
        uses: Option<u32>,
    },
    /// An administrator asks for all tokens.
    Tokens,
    /// An administrator ends a token. Who has joined with it stays.
    RevokeToken {
        /// Its id.
        id: String,
    },
    /// An administrator puts a node or a driver out. Answered when the nodes know.
    Revoke {
        /// Its role.
        role: Role,
        /// Its id.
        name: String,
        /// Why, for those who look at it later.
        #[serde(default)]
        reason: String,
    },
    /// An administrator lets a revoked node or driver in again.
    Reinstate {
        /// Its role.
        role: Role,
        /// Its id.
        name: String,
    },
    /// A registered node's interfaces have changed.
    Network(NodeNetwork),
    /// A driver asks which interfaces connect nodes. They are probed if that is not known.
    Interfaces(InterfacesQuery),
    /// A driver asks what the head sees around it.
    Surroundings,
    /// An administrator drains a node: it takes no new work, and elastic jobs leave it. Answered at once.
    DrainNode {
        /// Its id or hostname.
        node: String,
        /// After how long members of elastic jobs that are still there are ended, in milliseconds.
        deadline_ms: u64,
    },
    /// An administrator lets a node that is drained take work again.
    UndrainNode {
        /// Its id or hostname.
        node: String,
    },
}

/// What becomes of the jobs on a node that is drained.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeDrain {
    /// The node.
    pub node: NodeId,
    /// Its hostname.
    pub hostname: String,
    /// Elastic jobs, which leave the node.
    pub leaving: Vec<JobId>,
    /// Jobs that never change their members. They stay until they end.
    pub staying: Vec<JobId>,
}

/// What follows [`HeadRequest::Submit`] on its stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SubmitFrame {
    /// Every node of the job holds the program now.
    ProgramReady,
    /// Stop the job. The head answers with the last events and ends the stream.
    Stop,
    /// Kill what is left of the job at once, without any grace.
    Kill,
    /// The driver has all that it wanted: end the job as for [`SubmitFrame::Stop`]. If no worker was lost before, it has
    /// succeeded. A head that does not know it skips it, so a driver sends `Stop` behind it.
    Done,
    /// End the job as for [`SubmitFrame::Stop`]; workers that run an installed program hear `SIGINT` before `SIGTERM`. A
    /// head that does not know it skips it, so a driver sends `Stop` behind it.
    Interrupt,
    /// A signal for all workers that run an installed program. It ends nothing.
    Signal(WorkerSignal),
    /// The driver can't call a generation of an elastic job: it does not reach a node. If no loss explains that, the same members
    /// make up the next one. A head that does not know it skips it.
    Unreachable {
        /// The generation.
        generation: Generation,
        /// Why, in words.
        why: String,
    },
    /// The answer to [`JobEvent::Hold`](super::JobEvent::Hold): no call is under way, and none begins before the next generation.
    Holding {
        /// The generation.
        generation: Generation,
    },
    /// From now on an elastic job may use these hosts, in place of [`Elastic::hosts`](super::Elastic::hosts). It leaves nodes that
    /// are not among them, or that have more of its workers than they may, as if they were drained; it looks for room on new ones.
    Hosts(Vec<JobHost>),
    /// The job has run as long as it may: end it as for [`SubmitFrame::Stop`]. A head that does not know it skips it, so a driver
    /// sends `Stop` behind it.
    Overran {
        /// How long it was allowed to run.
        limit_ms: u64,
    },
}

/// The values of one metric, added up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetricSum {
    /// Its name, such as `workers.default.healthy`.
    pub name: String,
    /// How many values there were.
    pub count: u64,
    /// Their sum.
    pub sum: i64,
}

/// A heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Beat {
    /// Counts up; the answer repeats it.
    pub seq: u64,
}

/// What happens on a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeEvent {
    /// A worker said hello and takes calls.
    WorkerReady {
        /// Its job.
        job: JobId,
        /// Its slot.
        slot: Slot,
        /// The how-manieth process of the slot it is.
        #[serde(
            default = "Incarnation::first",
            skip_serializing_if = "Incarnation::is_first"
        )]
        incarnation: Incarnation,
        /// Where its data plane listens, if it has one.
        address: Option<SocketAddr>,
    },
    /// A worker's process ended or could not be started.
    WorkerExited {
        /// Its job.
        job: JobId,
        /// Its slot.
        slot: Slot,
        /// The how-manieth process of the slot it was.
        #[serde(
            default = "Incarnation::first",
            skip_serializing_if = "Incarnation::is_first"
        )]
        incarnation: Incarnation,
        /// The last generation that it had taken; 0 if none.
        #[serde(default, skip_serializing_if = "Generation::is_none")]
        generation: Generation,
        /// How.
        failure: RankFailure,
        /// Whether the node had been asked to stop it.
        expected: bool,
    },
    /// A worker was killed, and its end was not seen: it may still run. Only of an installed program in an elastic job. A
    /// [`NodeEvent::WorkerExited`] follows.
    WorkerUnseen {
        /// Its job.
        job: JobId,
        /// Its slot.
        slot: Slot,
        /// The how-manieth process of the slot it is.
        incarnation: Incarnation,
    },
    /// A worker of an elastic job has taken a generation. It is in no older one any more.
    Taken {
        /// Its job.
        job: JobId,
        /// Its slot.
        slot: Slot,
        /// The how-manieth process of the slot it is.
        incarnation: Incarnation,
        /// The generation.
        generation: Generation,
    },
    /// A worker of an elastic job has the state of a commit. Each says so of itself; a later commit stands for the ones
    /// before.
    Committed {
        /// Its job.
        job: JobId,
        /// Its slot.
        slot: Slot,
        /// The how-manieth process of the slot it is.
        incarnation: Incarnation,
        /// The generation that it is in.
        generation: Generation,
        /// The number of the commit.
        commit: u64,
        /// How all members have it, as this one knows.
        kept: Kept,
    },
    /// A worker of an elastic job has committed, and holds there until it is given the next generation.
    Holding {
        /// Its job.
        job: JobId,
        /// Its slot.
        slot: Slot,
        /// The how-manieth process of the slot it is.
        incarnation: Incarnation,
        /// The generation that it is in.
        generation: Generation,
        /// The number of the commit, the same on all ranks that could go on.
        commit: u64,
        /// The operation that failed on the worker. `None` if all members were asked to hold.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        failed: Option<FailedOperation>,
    },
    /// Nothing of the job is left on the node; its resources are free again.
    JobGone {
        /// The job.
        job: JobId,
    },
    /// The node leaves and ends the workers of the job here. A job that never changes its members is to end everywhere.
    JobLeft {
        /// The job.
        job: JobId,
        /// Why.
        reason: String,
    },
}

impl NodeEvent {
    /// The job that it is about.
    #[must_use]
    pub fn job(&self) -> JobId {
        match self {
            Self::WorkerReady { job, .. }
            | Self::WorkerExited { job, .. }
            | Self::WorkerUnseen { job, .. }
            | Self::Taken { job, .. }
            | Self::Committed { job, .. }
            | Self::Holding { job, .. }
            | Self::JobGone { job }
            | Self::JobLeft { job, .. } => *job,
        }
    }
}

/// The head's answer to a [`HeadRequest`] other than [`HeadRequest::Submit`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum HeadReply {
    /// Done.
    Done,
    /// Registered.
    Registered {
        /// How often to send a [`Beat`].
        heartbeat_ms: u64,
        /// After how long without one the node counts as lost.
        lease_ms: u64,
        /// Who was put out of the cluster.
        #[serde(default)]
        revoked: RevocationList,
    },
    /// A worker's certificate in DER.
    Signed {
        /// The certificate.
        #[serde(with = "serde_bytes")]
        certificate: Vec<u8>,
        /// The generation for which it was issued.
        generation: Generation,
    },
    /// Answer to [`HeadRequest::Cluster`].
    Cluster(ClusterInfo),
    /// Answer to [`HeadRequest::Jobs`].
    Jobs(Vec<JobInfo>),
    /// Answer to [`HeadRequest::Job`].
    Job(JobInfo),
    /// Answer to [`HeadRequest::Renew`]: the certificate in DER.
    Renewed {
        /// The certificate.
        #[serde(with = "serde_bytes")]
        certificate: Vec<u8>,
    },
    /// Answer to [`HeadRequest::CreateToken`].
    Token {
        /// What is known of it.
        entry: TokenEntry,
        /// The token itself. The head does not keep it.
        token: SecretText,
    },
    /// Answer to [`HeadRequest::Tokens`], the oldest first.
    Tokens(Vec<TokenEntry>),
    /// Answer to [`HeadRequest::Revoke`] and [`HeadRequest::Reinstate`]: it is done and stored.
    Revoked {
        /// Nodes that have confirmed it.
        told: u32,
        /// Nodes that have not yet. They learn of it when they register again at the latest.
        late: Vec<NodeId>,
    },
    /// Answer to [`HeadRequest::DryRun`]: the job would start on these nodes.
    Placed(Vec<PlacedNode>),
    /// Answer to [`HeadRequest::Interfaces`].
    Interfaces(NetworkReport),
    /// Answer to [`HeadRequest::Surroundings`].
    Surroundings(DaemonState),
    /// Answer to [`HeadRequest::DrainNode`].
    Draining(NodeDrain),
    /// No.
    Refused(Refusal),
}
