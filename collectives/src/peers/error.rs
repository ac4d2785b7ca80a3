//! Why a rank could not take its place.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use kolo_transport::endpoint::BindError;
use kolo_transport::ids::Rank;

use crate::error::CollectiveError;

/// Why a rank could not take its place among its peers. Nothing is left of the attempt.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PeersError {
    /// The arguments can't be right.
    #[error("{reason}")]
    Invalid {
        /// What was given and what is allowed.
        reason: String,
    },
    /// The socket of this rank can't be made. Check that the folder is there and may be written by this user.
    #[error("the socket {path} of rank {rank} can't be made: {error}", path = path.display())]
    Socket {
        /// Its path.
        path: PathBuf,
        /// This rank.
        rank: Rank,
        /// What the system says.
        error: io::Error,
    },
    /// A process listens already in this rank's place. Was a rank started twice, or does one of the generation before still
    /// run? End it, or give this world another folder.
    #[error(
        "another process has listened at {path}, the socket of rank {rank}, for {} s: end it, or use another folder",
        waited.as_secs_f64(),
        path = path.display()
    )]
    InUse {
        /// The path.
        path: PathBuf,
        /// This rank.
        rank: Rank,
        /// How long it was waited for.
        waited: Duration,
    },
    /// This rank can't listen for other hosts. Give it an address of this host and a port that is free for UDP and TCP.
    #[error("rank {rank} can't listen: {error}")]
    Listen {
        /// This rank.
        rank: Rank,
        /// Why not.
        error: BindError,
    },
    /// The system gives no thread or no event queue: raise its limits.
    #[error("no thread that drives the links of rank {rank}: {error}")]
    Runtime {
        /// This rank.
        rank: Rank,
        /// What the system says.
        error: io::Error,
    },
}

impl From<CollectiveError> for PeersError {
    fn from(error: CollectiveError) -> Self {
        Self::Invalid {
            reason: error.to_string(),
        }
    }
}
