//! What can go wrong in the harness.

use std::time::Duration;

/// How long anything in the harness waits before it gives up.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// What went wrong in the harness itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HarnessError {
    /// A daemon did not start or did not end well; its log is in the message.
    #[error("a daemon failed: {0}")]
    Daemon(String),
    /// A fault could not be made: no such node, rank or process, or not in this mode.
    #[error("the fault can't be made: {0}")]
    Fault(String),
    /// What was waited for did not happen within a minute.
    #[error("waited {PATIENCE:?} in vain for {what}; last seen: {last}")]
    Patience {
        /// What was waited for.
        what: String,
        /// What was there instead.
        last: String,
    },
    /// The cluster could not be reached as a driver.
    #[error("can't reach the cluster: {0}")]
    Cluster(String),
}
