//! Why a state is not committed, restored or synced, and why an elastic loop ends.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use kolo_collectives::{CollectiveError, Generation, Rank};
use kolo_transport::wire::span::Span;

use super::Cause;

/// Why a [`State`](super::State) was not committed, restored or synced. The last commit is whole in every case.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The state is committed, on all ranks. The group is about to change, and every rank has this error at the same commit.
    /// Return the error from the loop: nothing is lost, and the loop begins again in the next generation.
    #[error("the group is about to change: the state is committed, and the loop ends for now")]
    Interrupted,
    /// A collective operation failed. The error says which rank caused the failure.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// A part of the state can't be saved, or does not fit what was saved.
    #[error("the part `{name}` of the state {reason}")]
    Part {
        /// The part's name.
        name: String,
        /// What is wrong with the part.
        reason: String,
    },
    /// The states of some ranks do not fit the state that was to be sent to all. Every rank has this error, and nothing was
    /// changed. Let [`Elastic::parts`](super::Elastic::parts) name the same parts, of the same lengths and types, on every rank.
    #[error("the state can't be synced: {}", Complaints(.complaints))]
    Differs {
        /// The ranks, and what is wrong there.
        complaints: Vec<(Rank, String)>,
    },
    /// The ranks have committed differently often. Every rank must call [`commit`](super::State::commit) and
    /// [`sync`](super::State::sync) as often as the others; a rank that is new must sync first, with all others.
    #[error(
        "the ranks are at different commits, from {lowest} to {highest} (this rank at {own}): all must commit and sync equally \
         often, and a new rank syncs before the first commit"
    )]
    OutOfStep {
        /// The number of this rank's last commit.
        own: u64,
        /// The lowest number of all ranks.
        lowest: u64,
        /// The highest number of all ranks.
        highest: u64,
    },
    /// There is no commit to go back to. Call [`commit`](super::State::commit) or [`sync`](super::State::sync) before anything can
    /// fail.
    #[error("the state was never committed or synced, so that there is nothing to restore")]
    NothingCommitted,
    /// The [`Checkpoints`](super::Checkpoints) of a directory can't be written or read.
    #[error("the directory `{}` {reason}", .directory.display())]
    Checkpoint {
        /// The directory.
        directory: PathBuf,
        /// What is wrong, and what helps.
        reason: String,
    },
    /// All ranks that had the state are lost, and the state of this rank has no [`Checkpoints`](super::Checkpoints).
    #[error(
        "all ranks that had the state are lost, and no checkpoints are set here: give the state the same checkpoints on all ranks \
         (`State::checkpoints`)"
    )]
    Lost,
}

struct Complaints<'a>(&'a [(Rank, String)]);

impl fmt::Display for Complaints<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (rank, complaint)) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}on rank {rank} {complaint}")?;
        }
        Ok(())
    }
}

/// Why an elastic loop ended, other than by an error of the loop's own.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ElasticError {
    /// The state could not be restored or synced, and no change of the group mends that.
    #[error(transparent)]
    State(#[from] StateError),
    /// A callback of [`State::on_reset`](super::State::on_reset) failed.
    #[error("a callback after the group's change failed: {0}")]
    Reset(crate::Error),
    /// There is no next generation with this rank: the job ends, say, or the rank has left.
    #[error("{cause}, and this rank is in no next generation: {error}")]
    Membership {
        /// Why a next generation was needed.
        cause: Box<Cause>,
        /// Why there is none.
        error: crate::Error,
    },
}

/// Why a worker has no next generation: the source of [`ElasticError::Membership`] in [`Context::elastic`](crate::Context::elastic).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoGeneration {
    /// The job has one generation.
    #[error("the job is static, and generation {generation} its only one")]
    Static {
        /// That generation.
        generation: Generation,
    },
    /// No generation was formed in the time that the job allows for that. The log of the head says what it waited for: often for
    /// hosts, because fewer ranks are left than the job's minimum.
    #[error("no generation after {generation} came within {}", Span(*.waited))]
    Late {
        /// The last generation.
        generation: Generation,
        /// The time that was allowed.
        waited: Duration,
    },
    /// The worker is asked to stop.
    #[error("the job ends with generation {generation}: {reason}")]
    Ended {
        /// The last generation.
        generation: Generation,
        /// Why the job ends.
        reason: String,
    },
    /// The group goes on without this worker: its host is drained, say, or was counted as lost.
    #[error("this worker is not in generation {generation}")]
    Left {
        /// The generation that the others are in.
        generation: Generation,
    },
    /// The call was cancelled, or its deadline has passed, before a generation came.
    #[error("the call is not wanted any more, and waits for no generation after {generation}")]
    Unwanted {
        /// The last generation.
        generation: Generation,
    },
}
