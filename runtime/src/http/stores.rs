//! The rendezvous of kolo's own workers and drivers: one store for each generation of a job.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kolo_actors::rendezvous::RendezvousPlan;
use kolo_transport::ids::{DriverId, Generation, JobId};
use kolo_transport::wire::{JobInfo, RefusalKind};

use super::api::HeadApi;
use super::error::ApiError;
use super::store::SharedStore;

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
    fn new(job: &JobInfo, asked: Instant) -> Self {
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
            store: SharedStore::new(plan.limits(), plan.scopes().clone()),
            asked,
        }
    }
}

/// The stores of all jobs that have been asked for and have not ended.
#[derive(Debug, Default)]
pub(super) struct JobStores {
    stores: Mutex<HashMap<JobId, JobStore>>,
}

impl JobStores {
    fn lock(&self) -> MutexGuard<'_, HashMap<JobId, JobStore>> {
        self.stores.lock().unwrap_or_else(PoisonError::into_inner)
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
        let known = self.lock().get(&job).cloned();
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
        let info = match head.job(job).await {
            Ok(info) if !info.state.is_final() => info,
            Ok(info) => {
                self.remove(job);
                return Err(ApiError::not_found(format!(
                    "{job} has ended ({}), and its rendezvous with it",
                    info.state
                )));
            }
            Err(refusal) => {
                if refusal.kind == RefusalKind::NotFound {
                    self.remove(job);
                }
                return Err(refusal.into());
            }
        };
        let is_new = !self.lock().contains_key(&job);
        if is_new {
            self.sweep(head).await?;
        }
        let mut stores = self.lock();
        // Another request may have been here meanwhile, and even with later news.
        if let Some(known) = stores.get_mut(&job)
            && known.generation >= info.generation
        {
            known.asked = known.asked.max(asked);
            return Ok(known.clone());
        }
        let fresh = JobStore::new(&info, asked);
        if let Some(old) = stores.insert(job, fresh.clone()) {
            old.store.retire();
        }
        Ok(fresh)
    }

    /// Drops the stores of jobs that have ended. Called for each new one, so that there are never many more than jobs.
    async fn sweep(&self, head: &dyn HeadApi) -> Result<(), ApiError> {
        let states: BTreeMap<_, _> = head
            .jobs()
            .await?
            .into_iter()
            .map(|info| (info.job, info.state))
            .collect();
        self.lock().retain(|job, known| {
            let lives = states.get(job).is_some_and(|state| !state.is_final());
            // A job that is newer than the list is not in it.
            let keep = lives || known.asked.elapsed() < FRESH;
            if !keep {
                known.store.retire();
            }
            keep
        });
        Ok(())
    }

    fn remove(&self, job: JobId) {
        if let Some(old) = self.lock().remove(&job) {
            old.store.retire();
        }
    }
}
