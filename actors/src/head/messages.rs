//! What the head's actors can be told and asked.

use std::fmt;
use std::sync::Arc;

use actix::{Addr, Message};
use kolo_core::head::job::Event;
use kolo_core::head::registry::Session;
use kolo_core::interfaces::{Key, Network};
use kolo_transport::ids::{DriverId, Generation, JobId, NodeId, Slot};
use kolo_transport::wire::{
    ClusterInfo, InterfacesQuery, JobEvent, JobInfo, JobSpec, NetworkReport, NodeEvent,
    NodeNetwork, NodeRegistration, Refusal,
};
use tokio::sync::{mpsc, watch};

use super::coordinator::Coordinator;
use super::link::NodeLink;

/// A node introduces itself. Its identity was checked.
#[derive(Message)]
#[rtype(result = "Result<Session, Refusal>")]
pub struct Register {
    /// The introduction.
    pub registration: NodeRegistration,
    /// The way back to it.
    pub link: Arc<dyn NodeLink>,
}

impl fmt::Debug for Register {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Register").field(&self.registration).finish()
    }
}

/// A node was heard. The answer is false if its stay is over.
#[derive(Debug, Message)]
#[rtype(result = "bool")]
pub struct Heard {
    /// The node.
    pub node: NodeId,
    /// Its stay.
    pub session: Session,
}

/// A node's interfaces have changed. Its identity was checked.
#[derive(Debug, Message)]
#[rtype(result = "Result<(), Refusal>")]
pub struct NetworkChanged {
    /// The node.
    pub node: NodeId,
    /// Its stay.
    pub session: Session,
    /// What it has now.
    pub network: NodeNetwork,
}

/// Asks which interfaces connect nodes. They are probed if that is not known.
#[derive(Debug, Message)]
#[rtype(result = "Result<NetworkReport, Refusal>")]
pub struct GetInterfaces(pub InterfacesQuery);

/// What connects nodes was found out.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub(super) struct Learned {
    pub(super) key: Key,
    pub(super) network: Arc<Network>,
}

/// A node's connection has ended.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Gone {
    /// The node.
    pub node: NodeId,
    /// Its stay.
    pub session: Session,
    /// How it ended.
    pub reason: String,
}

/// Things happened on a node, in this order. Answered when the jobs have taken them; refused if the stay is over.
#[derive(Debug, Message)]
#[rtype(result = "Result<(), Refusal>")]
pub struct Report {
    /// The node.
    pub node: NodeId,
    /// Its stay.
    pub session: Session,
    /// What happened.
    pub events: Vec<NodeEvent>,
}

/// Whether a node may have a certificate made for a worker (S-2).
#[derive(Debug, Message)]
#[rtype(result = "Result<Generation, Refusal>")]
pub struct MaySign {
    /// The node.
    pub node: NodeId,
    /// Its stay.
    pub session: Session,
    /// The worker's job.
    pub job: JobId,
    /// The worker's slot.
    pub slot: Slot,
}

/// A driver submits a job.
#[derive(Debug, Message)]
#[rtype(result = "Result<Submitted, Refusal>")]
pub struct Submit {
    /// What to run.
    pub spec: JobSpec,
    /// Who submits.
    pub owner: DriverId,
    /// Where the driver is told of the job. Its capacity must be at least [`Submit::capacity`].
    pub events: mpsc::Sender<JobEvent>,
}

impl Submit {
    /// How many events a job has at most, so that the queue of its driver is never full.
    #[must_use]
    pub fn capacity(spec: &JobSpec) -> usize {
        let workers = spec.placement.workers().unwrap_or(0);
        workers.min(kolo_core::ranks::MAX_WORLD_SIZE) as usize + 4
    }
}

/// A job that was taken.
#[derive(Debug, Clone)]
pub struct Submitted {
    /// Its id.
    pub job: JobId,
    /// Its Coordinator, for [`Happened`].
    pub coordinator: Addr<Coordinator>,
}

/// Tells a Coordinator what happened.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Happened(pub Event);

/// Asks for the whole cluster.
#[derive(Debug, Message)]
#[rtype(result = "ClusterInfo")]
pub struct GetCluster;

/// Asks for all jobs, the newest first. If they are very large together, the older ones come without workers
/// and nodes; [`GetJob`] has them as long as the head remembers them.
#[derive(Debug, Message)]
#[rtype(result = "Vec<JobInfo>")]
pub struct GetJobs;

/// Asks for one job. One that ended before several of the largest jobs has no workers and nodes any more.
#[derive(Debug, Message)]
#[rtype(result = "Result<JobInfo, Refusal>")]
pub struct GetJob(pub JobId);

/// Stops a job. Answered when it is being stopped, with what to wait on for its end.
#[derive(Debug, Message)]
#[rtype(result = "Result<JobEnd, Refusal>")]
pub struct StopJob {
    /// The job.
    pub job: JobId,
    /// Who and why.
    pub reason: String,
}

/// The end of a job. Whoever drops it leaves nothing behind with the job.
#[derive(Debug, Clone)]
pub struct JobEnd(pub(super) Option<watch::Receiver<()>>);

impl JobEnd {
    /// Waits until the job has ended; no time if it had. Cancel safe.
    pub async fn wait(self) {
        if let Some(mut ended) = self.0 {
            // Nothing is ever sent: the sender is dropped when the job has ended.
            while ended.changed().await.is_ok() {}
        }
    }
}

/// A node gets no more jobs. Answered when it holds none any more, or its stay is over.
#[derive(Debug, Message)]
#[rtype(result = "Result<(), Refusal>")]
pub struct DrainNode {
    /// The node.
    pub node: NodeId,
    /// Its stay.
    pub session: Session,
}

/// Takes no more jobs, and lets those that run go on. Answered when all have ended.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Drain {
    /// Why, for drivers that submit one.
    pub reason: String,
}

/// Takes no more jobs and stops all. Answered when all have ended.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Shutdown {
    /// Why, for drivers and workers.
    pub reason: String,
}

/// Asks a Coordinator for its job as people see it.
#[derive(Debug, Message)]
#[rtype(result = "JobInfo")]
pub(super) struct Info;

/// Asks a Coordinator whether a node may sign.
#[derive(Debug, Message)]
#[rtype(result = "Result<Generation, Refusal>")]
pub(super) struct MaySignHere {
    pub(super) node: NodeId,
    pub(super) slot: Slot,
}

/// Asks a Coordinator for the end of its job.
#[derive(Debug, Message)]
#[rtype(result = "JobEnd")]
pub(super) struct GetEnd;

/// From a Coordinator to the head.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub(super) struct News {
    pub(super) job: JobId,
    /// Nodes on which nothing is left.
    pub(super) free: Vec<NodeId>,
    /// Nodes that must be asked to stop it until they confirm.
    pub(super) abandoned: Vec<NodeId>,
    /// The last word on a job that has ended.
    pub(super) finished: Option<JobInfo>,
    /// What connects its nodes, just found out.
    pub(super) learned: Option<Arc<Network>>,
}
