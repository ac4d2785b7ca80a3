//! The workers of one agent.

use std::sync::Arc;

use super::rendezvous::{Rendezvous, Store};
use super::roles::WorkerRanks;
use super::spec::WorkerSpec;
use super::state::WorkerState;
use crate::env::Env;

/// One worker of a group. Ranks are of the present group, and may change from one group to the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Worker {
    /// The name of the worker's process, as the agent has it: a process id for workers on this host. None until the start.
    pub id: Option<String>,
    /// The number among the workers of this agent.
    pub local_rank: u32,
    /// Numbers among the workers of all agents. None until agents have met.
    pub ranks: Option<WorkerRanks>,
}

/// The workers of one agent, and the group of agents in which they are.
#[derive(Debug)]
pub struct WorkerGroup<H> {
    /// The blueprint.
    pub spec: WorkerSpec<H>,
    /// The workers, by local rank.
    pub workers: Vec<Worker>,
    /// Keys and values that all agents of the group see. None until they have met.
    pub store: Option<Arc<dyn Store>>,
    /// The number of this agent in its group. None until agents have met.
    pub group_rank: Option<u32>,
    /// The number of agents in the group. None until they have met.
    pub group_world_size: Option<u32>,
    /// The number of the group: each group that comes together has a higher one. 0 before the first.
    pub round: u64,
    /// Restarts after failures that the job had used up when the group came together.
    pub restarts: u32,
    /// Where rank 0 listens. None until it is known.
    pub master: Option<(String, u16)>,
    /// The state of all workers.
    pub state: WorkerState,
}

impl<H> WorkerGroup<H> {
    /// Workers that were never started.
    #[must_use]
    pub fn new(spec: WorkerSpec<H>) -> Self {
        let workers = (0..spec.local_world_size).map(|local_rank| Worker {
            id: None,
            local_rank,
            ranks: None,
        });
        Self {
            workers: workers.collect(),
            spec,
            store: None,
            group_rank: None,
            group_world_size: None,
            round: 0,
            restarts: 0,
            master: None,
            state: WorkerState::Init,
        }
    }

    /// The agents have met: workers have the ranks of the new group.
    pub(super) fn join(&mut self, rendezvous: Rendezvous) {
        self.workers = (0..)
            .zip(rendezvous.workers)
            .map(|(local_rank, ranks)| Worker {
                id: None,
                local_rank,
                ranks: Some(ranks),
            })
            .collect();
        self.store = Some(rendezvous.store);
        self.group_rank = Some(rendezvous.group_rank);
        self.group_world_size = Some(rendezvous.group_world_size);
        self.round = rendezvous.round;
        self.restarts = rendezvous.restarts;
        self.master = None;
    }

    /// Torch's variables for a worker. None for a worker that is not in a group, and while nobody knows where rank 0 listens.
    #[must_use]
    pub fn environment(&self, local_rank: u32) -> Option<Env> {
        let worker = self.workers.get(local_rank as usize)?;
        let ranks = worker.ranks.as_ref()?;
        let (address, port) = self.master.as_ref()?;
        let variables = [
            ("LOCAL_RANK", local_rank.to_string()),
            ("RANK", ranks.global_rank.to_string()),
            ("GROUP_RANK", self.group_rank?.to_string()),
            ("ROLE_RANK", ranks.role_rank.to_string()),
            ("ROLE_NAME", self.spec.role.clone()),
            ("LOCAL_WORLD_SIZE", self.workers.len().to_string()),
            ("WORLD_SIZE", ranks.world_size.to_string()),
            ("GROUP_WORLD_SIZE", self.group_world_size?.to_string()),
            ("ROLE_WORLD_SIZE", ranks.role_world_size.to_string()),
            ("MASTER_ADDR", address.clone()),
            ("MASTER_PORT", port.to_string()),
            ("TORCHELASTIC_RESTART_COUNT", self.restarts.to_string()),
            (
                "TORCHELASTIC_MAX_RESTARTS",
                self.spec.max_restarts.to_string(),
            ),
            // "True" would make torch connect to a store that nobody serves.
            ("TORCHELASTIC_USE_AGENT_STORE", "False".to_owned()),
        ];
        let named = |(name, value): (&str, String)| (name.to_owned(), value);
        Some(variables.into_iter().map(named).collect())
    }
}
