//! The rendezvous of kolo's own workers and drivers: one store for each generation of a job.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kolo_actors::budget::Budget;
use kolo_core::rendezvous::RendezvousPlan;
use kolo_transport::ids::{DriverId, Generation, JobId};
use kolo_transport::wire::{JobInfo, RefusalKind};

use super::api::HeadApi;
use super::error::ApiError;
use super::store::SharedStore;

/// Jobs that ended last, none of which gets a store by an answer that is older.
const ENDED: usize = 256;

/// How long what the head has said of a job is taken for true.
const FRESH: Duration = Duration::from_secs(1);

/// A job's store, for one generation.
#[derive(Debug, Clone)]
pub(super) struct JobStore {
    pub(super) owner: DriverId,
    pub(super) generation: Generation,
    pub(super) store: SharedStore,
    asked: Instant,
}

impl JobStore {
    fn new(job: &JobInfo, asked: Instant, memory: &Arc<Budget>) -> Self {
        let members: Vec<_> = job
            .workers
            .iter()
            .map(|worker| worker.member.clone())
            .collect();
        // Nodes are told apart by id: several may have one hostname.
        let plan = RendezvousPlan::from_members(&members, |member| member.node.to_string(), []);
        Self {
            owner: job.owner,
            generation: job.generation,
            store: SharedStore::new(plan.limits(), plan.scopes().clone(), memory),
            asked,
        }
    }
}

#[derive(Debug, Default)]
struct State {
    stores: HashMap<JobId, JobStore>,
    /// The oldest first.
    ended: VecDeque<JobId>,
}

/// The stores of all jobs that have been asked for and have not ended, and the memory that all of a head's rendezvous share.
#[derive(Debug)]
pub struct JobStores {
    state: Mutex<State>,
    memory: Arc<Budget>,
}

impl JobStores {
    /// No stores; all together may take so many bytes.
    #[must_use]
    pub fn new(memory: usize) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::default(),
            memory: Budget::new(memory),
        })
    }

    /// What they share, and the plain rendezvous with them.
    #[must_use]
    pub fn memory(&self) -> &Arc<Budget> {
        &self.memory
    }

    /// A job has ended: its store is dropped, and what waits for it ends.
    pub fn end(&self, job: JobId) {
        let mut state = self.lock();
        // Said twice of a job that had a plain rendezvous, too.
        if !state.ended.contains(&job) {
            if state.ended.len() >= ENDED {
                state.ended.pop_front();
            }
            state.ended.push_back(job);
        }
        drop(state);
        self.remove(job);
    }

    fn remove(&self, job: JobId) {
        let store = self.lock().stores.remove(&job);
        if let Some(store) = store {
            store.store.retire();
        }
    }

    #[cfg(test)]
    pub(super) fn waiting(&self, job: JobId) -> usize {
        let state = self.lock();
        let store = state.stores.get(&job);
        store.map_or(0, |store| store.store.usage().waiters)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The store of a job's current generation.
    ///
    /// With `generation`, the request is refused if that is not the current one (G-1).
    pub(super) async fn get(
        &self,
        head: &dyn HeadApi,
        job: JobId,
        generation: Option<Generation>,
    ) -> Result<JobStore, ApiError> {
        let known = self.lock().stores.get(&job).cloned();
        let known = known.filter(|known| {
            known.asked.elapsed() < FRESH
                && generation.is_none_or(|given| given <= known.generation)
        });
        let current = match known {
            Some(known) => known,
            None => self.ask(head, job).await?,
        };
        match generation {
            Some(given) if given != current.generation => Err(ApiError::stale(format!(
                "{job} is in generation {}, not {given}",
                current.generation
            ))),
            _ => Ok(current),
        }
    }

    async fn ask(&self, head: &dyn HeadApi, job: JobId) -> Result<JobStore, ApiError> {
        let asked = Instant::now();
        let ended = |how: &dyn std::fmt::Display| {
            ApiError::not_found(format!(
                "{job} has ended ({how}), and its rendezvous with it"
            ))
        };
        let info = match head.job(job).await {
            Ok(info) if !info.state.is_final() => info,
            Ok(info) => {
                self.end(job);
                return Err(ended(&info.state));
            }
            Err(refusal) => {
                if refusal.kind == RefusalKind::NotFound {
                    self.remove(job);
                }
                return Err(refusal.into());
            }
        };
        let mut state = self.lock();
        if state.ended.contains(&job) {
            return Err(ended(&"just now"));
        }
        // Another request may have been here meanwhile, and even with later news.
        if let Some(known) = state.stores.get_mut(&job)
            && known.generation >= info.generation
        {
            known.asked = known.asked.max(asked);
            return Ok(known.clone());
        }
        let fresh = JobStore::new(&info, asked, &self.memory);
        if let Some(old) = state.stores.insert(job, fresh.clone()) {
            old.store.retire();
        }
        Ok(fresh)
    }
}
