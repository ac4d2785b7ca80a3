//! Where agents meet.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use super::roles::{RoleInstance, WorkerRanks};

/// Keys and values that all agents of one group see. Each group has its own: nothing of an older group is in there.
pub trait Store: fmt::Debug + Send + Sync {
    /// The value of a key, if an agent has set the key.
    fn get(&self, key: &str) -> Option<Vec<u8>>;

    /// Sets the value of a key, and wakes the other agents of the group.
    fn set(&self, key: &str, value: Vec<u8>);
}

/// A group of agents that has come together, as one of them sees the group.
#[derive(Debug, Clone)]
pub struct Rendezvous {
    /// The number of the group: higher than that of each group before.
    pub round: u64,
    /// Restarts after failures that the job has used up.
    pub restarts: u32,
    /// The number of this agent.
    pub group_rank: u32,
    /// The number of agents.
    pub group_world_size: u32,
    /// The ranks of this agent's workers, by local rank.
    pub workers: Vec<WorkerRanks>,
    /// Keys and values of the group. `MASTER_ADDR` and `MASTER_PORT` may be in there already; else the agent of group rank 0 sets
    /// them.
    pub store: Arc<dyn Store>,
}

/// How the wait for the other agents ends, once the workers of an agent have succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Barrier {
    /// All workers of the group have succeeded.
    Done,
    /// Workers of another agent have failed or are lost: all start anew.
    Again,
}

/// Why an agent leaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Departure {
    /// Its workers have succeeded. Others may run on, and are not disturbed.
    Succeeded,
    /// Its workers have failed, and no restart is left. The job is over for all agents.
    Failed {
        /// The failure in words.
        why: String,
    },
    /// The agent can't go on, was told to end, or is not needed. The others go on if they are enough.
    Left,
}

/// Why agents do not meet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// The job has succeeded without this agent, which was not needed.
    #[error("the job has succeeded without this agent")]
    NotNeeded,
    /// The job has failed elsewhere. Look at that agent.
    #[error("the job is over: {reason}")]
    Closed {
        /// The failure of the job.
        reason: String,
    },
    /// Too few agents came in time. Start more, or give more time.
    #[error("the group did not come together within {within:?} (rendezvous_timeout)")]
    Timeout {
        /// The longest wait.
        within: Duration,
    },
    /// The agent can't be in the group. The text says what to change.
    #[error("{0}")]
    Refused(String),
}

/// The place where the agents of one job meet, in the hands of one agent.
///
/// No function waits. Where an answer is [`Poll::Pending`], or may change later, the handler wakes the agent with the waker
/// that it was given last. The handler also counts the restarts of the job: the count is of all its agents.
pub trait RendezvousHandler: fmt::Debug {
    /// Takes the waker of the agent. Called before anything else.
    fn wake_with(&mut self, waker: Waker);

    /// Asks for a place in the next group. An agent that is in a group leaves that group so, and calls again until an answer is
    /// there.
    ///
    /// # Errors
    ///
    /// [`RendezvousError`] if there will be no group with this agent.
    fn next_rendezvous(
        &mut self,
        instance: &RoleInstance,
    ) -> Poll<Result<Rendezvous, RendezvousError>>;

    /// How many nodes wait for the end of this group: to join the next one, or because members of this one are lost. If it is not 0,
    /// the agent stops its workers and asks for the next group, which uses up no restart.
    fn num_nodes_waiting(&mut self) -> u32;

    /// Restarts after failures that the job has used up.
    fn restarts(&self) -> u32;

    /// Uses up a restart of the job, for the failures in this group: once, however many agents ask. False if `max_restarts` are
    /// used up.
    fn spend_restart(&mut self, max_restarts: u32) -> bool;

    /// The workers of this agent have succeeded: waits for those of the other agents.
    ///
    /// # Errors
    ///
    /// Why the others can't be asked. The agent ends without them then.
    fn exit_barrier(&mut self) -> Poll<Result<Barrier, RendezvousError>>;

    /// The agent leaves. Called once, last.
    fn shutdown(&mut self, departure: Departure);
}

/// A store in the memory of this process.
#[derive(Debug, Default)]
pub(crate) struct MapStore {
    values: Mutex<BTreeMap<String, Vec<u8>>>,
    /// Woken when a value is set.
    wakers: Vec<Waker>,
}

impl MapStore {
    pub(crate) fn new(wakers: Vec<Waker>) -> Self {
        let values = Mutex::default();
        Self { values, wakers }
    }
}

impl Store for MapStore {
    fn get(&self, key: &str) -> Option<Vec<u8>> {
        let values = self.values.lock();
        values
            .unwrap_or_else(PoisonError::into_inner)
            .get(key)
            .cloned()
    }

    fn set(&self, key: &str, value: Vec<u8>) {
        let values = self.values.lock();
        values
            .unwrap_or_else(PoisonError::into_inner)
            .insert(key.to_owned(), value);
        for waker in &self.wakers {
            waker.wake_by_ref();
        }
    }
}
