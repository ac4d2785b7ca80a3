//! How workers end, and how an agent ends.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use kolo_wire::Exit;

use super::rendezvous::RendezvousError;
use super::state::WorkerState;

/// How one worker has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerFailure {
    /// The number among the workers of its agent.
    pub local_rank: u32,
    /// The name of its process, as the agent has it. None if it never had one.
    pub id: Option<String>,
    /// How the process has ended.
    pub exit: Exit,
    /// The reason, or the last words of the process. Empty if nothing is known.
    pub message: String,
}

impl fmt::Display for WorkerFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "local rank {}", self.local_rank)?;
        if let Some(id) = &self.id {
            write!(f, ", process {id}")?;
        }
        write!(f, ": {}", self.exit)?;
        if !self.message.is_empty() {
            write!(f, ": {}", self.message)?;
        }
        Ok(())
    }
}

/// Workers by global rank.
pub type ByRank<T> = BTreeMap<u32, T>;

/// What a look at the workers of an agent has shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MonitorResult {
    /// The state of all workers.
    pub state: WorkerState,
    /// What workers have returned. Empty unless they have succeeded, and for workers that return nothing, as programs.
    pub return_values: ByRank<Vec<u8>>,
    /// Workers that have failed. Empty unless the state is [`WorkerState::Failed`] or [`WorkerState::Unhealthy`].
    pub failures: ByRank<WorkerFailure>,
}

impl MonitorResult {
    /// A state without values and failures.
    #[must_use]
    pub fn of(state: WorkerState) -> Self {
        Self {
            state,
            return_values: ByRank::new(),
            failures: ByRank::new(),
        }
    }

    /// These workers have failed.
    #[must_use]
    pub fn failed(failures: ByRank<WorkerFailure>) -> Self {
        Self {
            failures,
            ..Self::of(WorkerState::Failed)
        }
    }
}

/// The end of a group of workers, as torch's agents tell of it: workers that have failed are no error of the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunResult {
    /// The last state. [`WorkerState::Init`] and [`WorkerState::Stopped`] are those of an agent that the job did not need.
    pub state: WorkerState,
    /// What workers have returned.
    pub return_values: ByRank<Vec<u8>>,
    /// Workers that have failed when no restart was left.
    pub failures: ByRank<WorkerFailure>,
}

impl RunResult {
    /// Whether workers have failed, and no restart was left.
    #[must_use]
    pub fn is_failed(&self) -> bool {
        self.state == WorkerState::Failed
    }

    /// What workers have returned. Failures are an error here, as in the first agents of torchelastic.
    ///
    /// # Errors
    ///
    /// [`WorkerGroupFailure`] if workers have failed.
    pub fn into_values(self) -> Result<ByRank<Vec<u8>>, WorkerGroupFailure> {
        if self.is_failed() {
            let failures = self.failures;
            return Err(WorkerGroupFailure { failures });
        }
        Ok(self.return_values)
    }
}

/// Workers have failed, and no restart was left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerGroupFailure {
    failures: ByRank<WorkerFailure>,
}

impl WorkerGroupFailure {
    /// The failure of each worker that has failed, by global rank.
    #[must_use]
    pub fn worker_errors(&self) -> &ByRank<WorkerFailure> {
        &self.failures
    }
}

impl fmt::Display for WorkerGroupFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.failures.len();
        write!(f, "workers have failed: {count}, and no restart is left")?;
        match self.failures.first_key_value() {
            Some((rank, failure)) => write!(f, "; the first: rank {rank} ({failure})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for WorkerGroupFailure {}

/// Why an agent gives up, for reasons that are not the workers'.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// A role that the agent does not run. Give the one that it runs.
    #[error("role `{}` is given; this agent runs `{has}`", given.escape_debug())]
    Role {
        /// The role that was asked for.
        given: String,
        /// The agent's.
        has: String,
    },
    /// The agents do not meet.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// Workers could not be started.
    #[error("[{role}] the workers could not be started: {why}")]
    Start {
        /// The role.
        role: String,
        /// The reason.
        why: String,
    },
    /// The agent has lost track of its workers. Start the agent anew.
    #[error("[{role}] the workers are in the state {state}: {why}")]
    Lost {
        /// The role.
        role: String,
        /// The state.
        state: WorkerState,
        /// What has happened.
        why: String,
    },
    /// The agent was told to end.
    #[error("the agent was told to end: {why}")]
    Ended {
        /// The reason.
        why: String,
    },
    /// The agent has run already. Make another one.
    #[error("the agent has run to its end; an agent runs once")]
    Over,
}

/// How a wait ended that took too long.
pub(super) fn late(within: Duration) -> AgentError {
    RendezvousError::Timeout { within }.into()
}
