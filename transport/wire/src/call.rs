//! Calls between a driver and a node, after [`NodeRequest::Attach`](super::NodeRequest::Attach).
//!
//! One channel carries all calls of a driver to the workers of one node, in both directions, so that
//! calls of one handle keep their order (C-2) and one wake-up serves many. Arguments and results are the
//! frames' bodies, which a node passes on without a look.

use serde::{Deserialize, Serialize};

use super::RankFailure;
use crate::ids::{CallId, Generation, Incarnation, ObjectId, Rank, Slot};

/// What a call does in the worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum CallOp {
    /// Run a registered function. Body: its arguments.
    Function {
        /// Its registered name.
        name: String,
    },
    /// Make an executable. Body: the constructor's arguments.
    Create {
        /// The id under which methods find it.
        object: ObjectId,
        /// The registered name of its type.
        class: String,
    },
    /// Run a method of an executable. Body: its arguments.
    Method {
        /// Which executable.
        object: ObjectId,
        /// The method's name.
        name: String,
    },
    /// Drop an executable.
    Drop {
        /// Which.
        object: ObjectId,
    },
    /// Bring an executable of an elastic group to its last commit, on all ranks at once. A rank that lacks the executable makes it
    /// first. Body: the constructor's arguments. Result: how many commits its driver has made.
    Recover {
        /// The id under which methods find it.
        object: ObjectId,
        /// The registered name of its type.
        class: String,
    },
    /// Commit the state of an executable, on all ranks at once. Result: how many commits its driver has made, and the generation that
    /// ends there, if one does.
    Commit {
        /// Which.
        object: ObjectId,
    },
    /// Drop all executables but some. Body: a list of their ids.
    Retain,
}

/// From the driver. Ranks are those of the channel's generation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum CallFrame {
    /// Run something on some of this node's ranks. Body: the arguments.
    Call {
        /// Chosen by the driver, growing.
        call: CallId,
        /// The generation for which it is meant; another is refused (G-1).
        generation: Generation,
        /// On which ranks of this node.
        ranks: Vec<Rank>,
        /// How long it may take from now, in milliseconds.
        #[serde(default)]
        deadline_ms: Option<u64>,
        /// What.
        op: CallOp,
    },
    /// The result is not wanted any more. A call that has not begun does not begin.
    Cancel {
        /// Which.
        call: CallId,
        /// On which ranks of this node; on all that it was sent to if empty.
        #[serde(default)]
        ranks: Vec<Rank>,
    },
}

/// From the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum CallReply {
    /// A call ended in a worker. Body: its result.
    Result {
        /// Which.
        call: CallId,
        /// Where. A channel has one process of each slot, for as long as it lives.
        slot: Slot,
        /// As [`WorkerResult::generation`](super::WorkerResult::generation).
        #[serde(default, skip_serializing_if = "Generation::is_none")]
        generation: Generation,
        /// How.
        outcome: Outcome,
    },
    /// A call was not taken to a rank.
    Refused {
        /// Which.
        call: CallId,
        /// The rank, as the call named it.
        rank: Rank,
        /// Why.
        failure: CallFailure,
    },
    /// A process of this node is gone; calls on it that have no result fail with this.
    Lost {
        /// Its slot.
        slot: Slot,
        /// The how-manieth process of the slot it was.
        incarnation: Incarnation,
        /// Its end. The rank is that of the last generation that it was in.
        failure: RankFailure,
        /// Whether it ended because its job is being stopped: then something else is the first cause.
        #[serde(default)]
        stopping: bool,
    },
}

/// How a call ended on one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// It returned; the body is the result.
    Returned,
    /// It did not.
    Failed(CallFailure),
}

/// Why a call failed on one rank that is still alive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallFailure {
    /// The kind.
    pub kind: FailureKind,
    /// The error's or panic's message.
    pub message: String,
    /// Where it happened, if it was a panic or the error kept it.
    #[serde(default)]
    pub backtrace: Option<String>,
    /// The rank whose loss or failure caused this one: then this is an echo, not the first cause.
    #[serde(default)]
    pub caused_by: Option<Rank>,
    /// The worker was being stopped: then it is an echo of that.
    #[serde(default)]
    pub stopping: bool,
}

impl CallFailure {
    /// A failure of this kind, with no backtrace.
    pub fn new(kind: FailureKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            backtrace: None,
            caused_by: None,
            stopping: false,
        }
    }
}

/// The kinds of [`CallFailure`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FailureKind {
    /// The user's code returned an error.
    Error,
    /// The user's code panicked.
    Panic,
    /// An earlier panic left the executable in an unknown state.
    Poisoned,
    /// No such function, type, method or executable in this program.
    UnknownTarget,
    /// The arguments did not decode.
    Arguments,
    /// The result did not encode or is over the limit.
    Result,
    /// It was cancelled before it began, or at an await point.
    Cancelled,
    /// Its deadline passed before it began, or at an await point.
    Deadline,
    /// It was meant for another generation, and has not begun.
    Stale,
    /// An operation with other ranks failed because one of them is lost, or because the generation was over.
    GenerationOver,
    /// It could not go on: its group has a later generation, and this worker is not in that.
    Left,
    /// The rank is not on this node or takes no calls.
    NoSuchRank,
    /// A kind of a later version.
    #[serde(other)]
    Other,
}
