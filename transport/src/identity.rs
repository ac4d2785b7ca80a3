//! Who a peer is.

use serde::{Deserialize, Serialize};

/// What a process may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The head.
    Head,
    /// A node daemon.
    Node,
    /// A driver or an operator.
    Driver,
    /// A worker of a job.
    Worker,
}
