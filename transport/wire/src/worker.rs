//! Node daemon and worker process, over two inherited Unix sockets.
//!
//! The *call* socket carries [`WorkerCall`] and [`WorkerResult`]; the worker's main thread reads it
//! between calls, so that a call costs no hand-over between threads. The *control* socket carries all
//! that must be seen while user code runs: membership, losses, cancellation, the notice to stop.

use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{CallOp, GenerationTable, Member, Outcome, RankFailure};
use crate::ids::{CallId, ClusterId, Generation, JobId, Rank};

/// On the call socket, to the worker. Body: the arguments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerCall {
    /// The driver's number for it.
    pub call: CallId,
    /// The generation for which it is meant.
    pub generation: Generation,
    /// How long it may take from now, in milliseconds.
    #[serde(default)]
    pub deadline_ms: Option<u64>,
    /// What to do.
    pub op: CallOp,
}

/// On the call socket, from the worker. Body: the result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerResult {
    /// Which call.
    pub call: CallId,
    /// The generation in which it ended, if that is a later one than the one it was meant for; else 0.
    #[serde(default, skip_serializing_if = "Generation::is_none")]
    pub generation: Generation,
    /// How it ended.
    pub outcome: Outcome,
}

/// On the control socket, to the worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToWorker {
    /// Answer to [`FromWorker::Hello`].
    Welcome {
        /// The cluster.
        cluster: ClusterId,
        /// The job.
        job: JobId,
        /// The generation that is being formed, or 0: the worker is in none before a [`ToWorker::Membership`] has its slot.
        generation: Generation,
        /// Who you are. The ranks are those of the generation, and mean nothing without one.
        member: Member,
        /// Members of the whole job.
        world_size: u32,
        /// Whether to make a key, ask for a certificate and listen.
        needs_data_plane: bool,
        /// How long a rank that can't go on waits for the next generation, in milliseconds. `None` if the job is static: there is
        /// no next one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        next_within_ms: Option<u64>,
    },
    /// Answer to [`FromWorker::Sign`].
    Certificate {
        /// The worker's certificate in DER.
        #[serde(with = "serde_bytes")]
        certificate: Vec<u8>,
        /// The cluster's CA certificate in DER.
        #[serde(with = "serde_bytes")]
        authority: Vec<u8>,
    },
    /// A generation is complete. It is answered with [`FromWorker::Taken`], and ends all generations before it. A worker whose slot is
    /// not in it idles. It may come again until it is answered. All workers of a node get it before any other message of the
    /// generation.
    Membership(Arc<GenerationTable>),
    /// A generation is over: all waits in it end, with an error that has the cause and the lost ranks.
    Revoke {
        /// The generation.
        generation: Generation,
        /// Why.
        cause: String,
        /// The ranks that are lost, in that generation.
        lost: Vec<Rank>,
    },
    /// A change waits: hold at the next commit, which is the same on all ranks, and say [`FromWorker::Holding`].
    Hold {
        /// The generation that is to end there.
        generation: Generation,
        /// Why.
        why: String,
    },
    /// A rank of the generation is lost.
    RankLost {
        /// The generation.
        generation: Generation,
        /// What is known, without last words.
        failure: RankFailure,
    },
    /// A connected socket to a rank of the same node comes with this frame.
    Peer {
        /// To whom.
        rank: Rank,
        /// For which generation.
        generation: Generation,
    },
    /// A lower rank of the same node waits for this one's link to it.
    LinkRequested {
        /// Which rank.
        rank: Rank,
        /// For which generation.
        generation: Generation,
        /// In which group of ranks.
        group: u64,
    },
    /// The caller does not want the result any more.
    Cancel {
        /// Which call.
        call: CallId,
    },
    /// Notice: finish and exit; TERM follows after the grace period.
    Stop {
        /// Why.
        reason: String,
    },
}

/// On the control socket, from the worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromWorker {
    /// First message.
    Hello {
        /// Version of the local protocol: [`LOCAL_PROTOCOL`].
        protocol: u32,
        /// Its process id.
        pid: u32,
        /// Digest of the registered functions and types, which must be the same on every rank.
        registry: u64,
    },
    /// Please have this signing request (DER) signed.
    Sign {
        /// The request.
        #[serde(with = "serde_bytes")]
        csr: Vec<u8>,
    },
    /// It takes calls now.
    Ready {
        /// Where its data plane listens.
        address: Option<SocketAddr>,
    },
    /// It wants a socket to a rank of the same node.
    ConnectPeer {
        /// To whom.
        rank: Rank,
        /// For which generation.
        generation: Generation,
    },
    /// It waits for the link of a higher rank of the same node, which is to be told.
    RequestLink {
        /// Of whom.
        rank: Rank,
        /// For which generation.
        generation: Generation,
        /// In which group of ranks.
        group: u64,
    },
    /// It has taken a generation, and is in no older one any more.
    Taken {
        /// The generation.
        generation: Generation,
    },
    /// All members of a generation have a commit. Said once in a generation for each way in which they have it.
    Committed {
        /// The generation.
        generation: Generation,
        /// The number of the commit.
        commit: u64,
        /// How they have it.
        kept: Kept,
    },
    /// Its elastic loop waits for the next generation, at a commit that it has.
    Holding {
        /// The generation that it was in.
        generation: Generation,
        /// The number of its last commit; 0 if it has none.
        commit: u64,
        /// The operation that failed on it. `None` if it was asked to [hold](ToWorker::Hold), and all members do.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        failed: Option<FailedOperation>,
    },
}

/// How all members of a generation have a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kept {
    /// They were given the last commit of the generation before.
    Received,
    /// They have made it in this generation.
    Made,
    /// It outlives them: it is on disk.
    Durable,
}

/// Why a rank can't go on, as it sees that itself. A link that has ended is a suspicion: the rank behind it may live.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedOperation {
    /// The rank that is to blame, if one is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub culprit: Option<Rank>,
    /// What has happened.
    pub reason: String,
}

/// Version of the messages in this module.
pub const LOCAL_PROTOCOL: u32 = 2;
