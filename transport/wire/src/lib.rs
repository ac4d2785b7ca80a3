//! Every message that crosses a process boundary, by the pair of roles that speak it.
//!
//! All are MessagePack with named fields inside a [frame]. A field may be added if it has
//! `#[serde(default)]`: receivers ignore fields they do not know. A message that is not known is refused
//! with [`RefusalKind::UnknownRequest`]. What is incompatible needs a new ALPN (`kolo_transport::endpoint`).
//!
//! No I/O, clock or random number is in this crate: what decides upon messages needs none of them either.
//!
//! | who speaks | request | reply | module |
//! |---|---|---|---|
//! | anyone with a token, to the head | [`JoinRequest`] | [`JoinReply`] | [`join`] |
//! | any listener, to whom it lets in | [`Welcome`] | | [`join`] |
//! | node, driver to head | [`HeadRequest`] | [`HeadReply`] | [`head`] |
//! | head, driver to node | [`NodeRequest`] | [`NodeReply`] | [`node`] |
//! | driver to node, after [`NodeRequest::Attach`] | [`CallFrame`] | [`CallReply`] | [`call`] |
//! | node to worker process and back | [`ToWorker`], [`WorkerCall`] | [`FromWorker`], [`WorkerResult`] | [`worker`] |
#![forbid(unsafe_code)]

pub mod call;
pub mod cluster;
pub mod counted;
pub mod daemon;
pub mod elastic;
pub mod failure;
pub mod frame;
pub mod head;
pub mod identity;
pub mod ids;
pub mod ink;
pub mod job;
pub mod join;
pub mod network;
pub mod node;
pub mod obituary;
pub mod resources;
pub mod span;
pub mod trust;
pub mod worker;

use serde::{Deserialize, Serialize};

pub use call::{CallFailure, CallFrame, CallOp, CallReply, FailureKind, Outcome};
pub use cluster::{ClusterInfo, NodeInfo};
pub use daemon::{DaemonState, FolderState, FolderUse};
pub use elastic::{
    Cooldown, Elastic, GroupFilter, Handover, HealthCheck, JobHost, LeftOut, MembershipInfo,
    OnChange, RestartWindow,
};
pub use failure::{Account, Fall, Follower, Followers, RankFailure, WorkerError};
pub use head::{
    HeadReply, HeadRequest, MetricSum, NodeDrain, NodeEvent, NodeRegistration, SubmitFrame,
};
pub use job::{
    Exit, GenerationTable, Installed, InstalledHere, JobEvent, JobInfo, JobSpec, JobState, Member,
    NodeShare, PlacedNode, Placement, Program, ProgramHash, WorkerInfo, WorkerSignal, WorkerState,
    signal_name,
};
pub use join::{JoinReply, JoinRequest, Welcome};
pub use network::{
    Echo, Interface, InterfaceAddress, InterfaceRow, InterfaceSelection, InterfacesQuery,
    NetworkChoice, NetworkReport, NodeNetwork, Probe, ProbeFailure, ProbeResult, ProbeTarget,
    ReachedBy,
};
pub use node::{
    LogBatch, LogLine, NodeReply, NodeRequest, OutputChunk, SlotStart, StartWorkers, StdinChunk,
    Stdio,
};
pub use obituary::{Obituary, Seal};
pub use resources::{Milli, ResourceError, Resources, Shortage};
pub use trust::{RevocationList, RevokedMember, SecretText, TokenEntry};
pub use worker::{FailedOperation, FromWorker, Kept, ToWorker, WorkerCall, WorkerResult};

/// Why a request was not done. What every reply type carries for "no".
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// The kind, for programs.
    pub kind: RefusalKind,
    /// What was given, what is allowed and what to do, for people. Holds no secret.
    pub message: String,
}

impl Refusal {
    /// A refusal of this kind with this message.
    pub fn new(kind: RefusalKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }

    /// Whether the same request may succeed later without a change.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(
            self.kind,
            RefusalKind::Busy
                | RefusalKind::Unplaceable
                | RefusalKind::Timeout
                | RefusalKind::Duplicate
        )
    }
}

/// The kinds of [`Refusal`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RefusalKind {
    /// The request's own values are wrong.
    Invalid,
    /// The caller's role or identity may not do this.
    Forbidden,
    /// The token is unknown, used up or expired.
    Token,
    /// No such job, node, rank or program.
    NotFound,
    /// The message is not one that this version knows.
    UnknownRequest,
    /// The generation is not the current one (G-1).
    Stale,
    /// Another process with the same identity is there, and alive.
    Duplicate,
    /// The resources are not there.
    Unplaceable,
    /// It did not happen in time.
    Timeout,
    /// Too much at once; try again.
    Busy,
    /// A limit of size or number is exceeded.
    TooLarge,
    /// A worker could not be started or ended while starting.
    Worker,
    /// A node was lost meanwhile.
    NodeLost,
    /// No network connects the nodes.
    Network,
    /// The program is not installed on all nodes.
    NoProgram,
    /// The installed program can't be executed, or its directory is not there.
    NotExecutable,
    /// The job or daemon was stopped meanwhile.
    Stopped,
    /// A fault on the side that answers; its log says more.
    Internal,
    /// A kind of a later version.
    #[serde(other)]
    Other,
}
