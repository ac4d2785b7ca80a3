//! The obituary of a daemon: a datagram in which a warden says that its node's daemon is dead, and that nothing is left of a job there.
//!
//! The proof is a secret that the daemon tells its wardens alone. The head knows the [`Seal`] of that secret from the
//! registration, and a warden gives the secret away only when the daemon is dead. So nobody can say it before it is true, and it
//! stays true whoever repeats it.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{JobId, NodeId};

/// The BLAKE3 hash of the secret of a daemon's obituary.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Seal(pub [u8; 32]);

impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// An obituary as the head reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Obituary {
    /// The node of the dead daemon.
    pub node: NodeId,
    /// The job of which nothing is left on the node.
    pub job: JobId,
    /// The seal of the secret that came with it. It counts if the daemon has registered with this one.
    pub seal: Seal,
}
