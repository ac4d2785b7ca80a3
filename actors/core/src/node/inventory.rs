//! What a node has, and which job holds how much of it.
//!
//! A reservation is held for a while and must be committed before its lease ends, or it is released
//! again (G-2). No clock of its own: every call takes the time.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kolo_wire::ids::JobId;
use kolo_wire::{Refusal, RefusalKind, Resources, Shortage};

/// The longest lease that a node gives to a reservation that is not committed: the longest start timeout, and some time to answer.
pub const MAX_LEASE: Duration = Duration::from_secs(25 * 3600);

/// The most workers of one job that a node takes, whatever they ask for.
pub const MAX_WORKERS: u32 = 4096;

/// Why resources are not held.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HoldError {
    /// There is too little. Retry when another job has ended, or ask for less.
    #[error("this node lacks {}", list(.0))]
    Shortage(Vec<Shortage>),
    /// A reservation without a worker. Ask for at least one.
    #[error("a reservation is for 0 workers; allowed is 1 to {MAX_WORKERS}")]
    NoWorkers,
    /// More workers than a node ever takes.
    #[error("a reservation is for {0} workers; allowed is 1 to {MAX_WORKERS}")]
    TooManyWorkers(u32),
    /// More workers of an elastic job than a node ever takes.
    #[error("{0} would have more than {MAX_WORKERS} workers on this node; start fewer")]
    TooManyMore(JobId),
    /// A lease of zero or of more than [`MAX_LEASE`].
    #[error("a reservation's lease is {0:?}; allowed is 1 ms to {MAX_LEASE:?}")]
    Lease(Duration),
    /// The job holds something else here already, or runs. Release it first.
    #[error("{0} holds resources on this node already")]
    Held(JobId),
    /// Nothing is reserved: never, or the lease ended and it was released. Reserve again.
    #[error("{0} has no reservation on this node; if it had one, its lease has ended")]
    NotReserved(JobId),
    /// The reservation is committed already.
    #[error("{0} has been started on this node already")]
    Committed(JobId),
    /// Another number of workers than was reserved.
    #[error("{job} has a reservation for {reserved} workers on this node and starts {given}")]
    Workers {
        /// The job.
        job: JobId,
        /// What the reservation is for.
        reserved: u32,
        /// What is to be started.
        given: u32,
    },
}

fn list(shortages: &[Shortage]) -> String {
    let texts: Vec<String> = shortages.iter().map(ToString::to_string).collect();
    texts.join("; ")
}

impl From<HoldError> for Refusal {
    fn from(error: HoldError) -> Self {
        let kind = match error {
            HoldError::Shortage(_) => RefusalKind::Unplaceable,
            HoldError::NotReserved(_) => RefusalKind::NotFound,
            HoldError::TooManyWorkers(_) | HoldError::TooManyMore(_) => RefusalKind::TooLarge,
            _ => RefusalKind::Invalid,
        };
        Self::new(kind, error.to_string())
    }
}

/// What a job holds on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// What one worker holds.
    pub per_worker: Resources,
    /// Number of workers.
    pub workers: u32,
    /// The ids of the GPUs of all workers together, in the order in which they were given out. Empty if no GPU is used.
    pub devices: Vec<String>,
    /// When it is released if it is not committed; `None` once it is.
    pub expires: Option<Instant>,
}

/// A node's resources and who holds them.
#[derive(Debug)]
pub struct Inventory {
    total: Resources,
    free: Resources,
    devices: Vec<String>,
    holdings: BTreeMap<JobId, Holding>,
}

impl Inventory {
    /// A node with these resources. `devices` are the ids of its GPUs as `CUDA_VISIBLE_DEVICES` takes
    /// them, in the order in which they are given out; their number replaces `total.gpus`.
    #[must_use]
    pub fn new(mut total: Resources, devices: Vec<String>) -> Self {
        total.gpus = devices.len() as u32;
        Self {
            free: total.clone(),
            total,
            devices,
            holdings: BTreeMap::new(),
        }
    }

    /// Everything that the node has.
    #[must_use]
    pub fn total(&self) -> &Resources {
        &self.total
    }

    /// What nobody holds.
    #[must_use]
    pub fn free(&self) -> &Resources {
        &self.free
    }

    /// Holds `workers` times `per_worker`, all or nothing, until `lease` has passed. The same request
    /// again renews the lease.
    ///
    /// # Errors
    ///
    /// [`HoldError`]; nothing is changed then.
    pub fn reserve(
        &mut self,
        now: Instant,
        job: JobId,
        per_worker: &Resources,
        workers: u32,
        lease: Duration,
    ) -> Result<&Holding, HoldError> {
        match workers {
            0 => return Err(HoldError::NoWorkers),
            1..=MAX_WORKERS => {}
            _ => return Err(HoldError::TooManyWorkers(workers)),
        }
        if lease.is_zero() || lease > MAX_LEASE {
            return Err(HoldError::Lease(lease));
        }
        // An amount of nothing of a resource that the node does not know would be given back to it.
        let mut per_worker = per_worker.clone();
        per_worker.custom.retain(|_, amount| amount.0 > 0);
        let expires = Some(now + lease);
        if let Some(holding) = self.holdings.get(&job) {
            let same = holding.expires.is_some()
                && holding.workers == workers
                && holding.per_worker == per_worker;
            if !same {
                return Err(HoldError::Held(job));
            }
        } else {
            let all = per_worker.times(workers);
            let shortages = self.free.shortages(&all);
            let Some(free) = self.free.minus(&all) else {
                return Err(HoldError::Shortage(shortages));
            };
            self.free = free;
            let devices = self.free_devices(all.gpus as usize);
            self.holdings.insert(
                job,
                Holding {
                    per_worker,
                    workers,
                    devices,
                    expires,
                },
            );
        }
        let holding = self
            .holdings
            .get_mut(&job)
            .expect("it was there or was put there above");
        holding.expires = expires;
        Ok(holding)
    }

    fn free_devices(&self, count: usize) -> Vec<String> {
        let held = |device: &&String| {
            !self
                .holdings
                .values()
                .any(|holding| holding.devices.contains(*device))
        };
        self.devices
            .iter()
            .filter(held)
            .take(count)
            .cloned()
            .collect()
    }

    /// Makes a reservation permanent, until [`Inventory::release`].
    ///
    /// # Errors
    ///
    /// [`HoldError`]; a reservation whose lease has ended is as good as none, even if
    /// [`Inventory::expire`] has not run since.
    pub fn commit(
        &mut self,
        now: Instant,
        job: JobId,
        workers: u32,
    ) -> Result<&Holding, HoldError> {
        let holding = self
            .holdings
            .get_mut(&job)
            .ok_or(HoldError::NotReserved(job))?;
        match holding.expires {
            None => return Err(HoldError::Committed(job)),
            Some(expires) if expires <= now => return Err(HoldError::NotReserved(job)),
            Some(_) => {}
        }
        if holding.workers != workers {
            return Err(HoldError::Workers {
                job,
                reserved: holding.workers,
                given: workers,
            });
        }
        holding.expires = None;
        Ok(holding)
    }

    /// Holds room for so many more workers of an elastic job, all or nothing, and gives the devices of each. The first time
    /// this commits the reservation, whose room these workers get; what they do not need of it is free again.
    ///
    /// # Errors
    ///
    /// [`HoldError`]; nothing is changed then.
    pub fn grow(
        &mut self,
        now: Instant,
        job: JobId,
        workers: u32,
    ) -> Result<Vec<Vec<String>>, HoldError> {
        let holding = self
            .holdings
            .get(&job)
            .filter(|holding| holding.expires.is_none_or(|expires| expires > now))
            .ok_or(HoldError::NotReserved(job))?;
        let had = match holding.expires {
            Some(_) => 0,
            None => holding.workers,
        };
        let wanted = had.saturating_add(workers);
        if wanted > MAX_WORKERS {
            return Err(HoldError::TooManyMore(job));
        }
        let per_worker = holding.per_worker.clone();
        let all = per_worker.times(wanted);
        let free = self.free.plus(&per_worker.times(holding.workers));
        let Some(left) = free.minus(&all) else {
            return Err(HoldError::Shortage(free.shortages(&all)));
        };
        self.free = left;
        if let Some(holding) = self.holdings.get_mut(&job) {
            if had == 0 {
                holding.devices.clear();
            }
            holding.workers = wanted;
            holding.expires = None;
        }
        let gpus = per_worker.gpus as usize;
        let devices = self.free_devices(gpus * workers as usize);
        if let Some(holding) = self.holdings.get_mut(&job) {
            holding.devices.extend(devices.iter().cloned());
        }
        let mut devices = devices.into_iter();
        let of_one = |_| devices.by_ref().take(gpus).collect();
        Ok((0..workers).map(of_one).collect())
    }

    /// Gives back what one worker of an elastic job held.
    pub fn shrink(&mut self, job: JobId, devices: &[String]) {
        if let Some(holding) = self.holdings.get_mut(&job)
            && holding.workers > 0
        {
            holding.workers -= 1;
            holding.devices.retain(|device| !devices.contains(device));
            self.free = self.free.plus(&holding.per_worker);
        }
    }

    /// Gives back what a job holds; `None` if it holds nothing.
    pub fn release(&mut self, job: JobId) -> Option<Holding> {
        let holding = self.holdings.remove(&job)?;
        self.free = self.free.plus(&holding.per_worker.times(holding.workers));
        Some(holding)
    }

    /// Releases every reservation whose lease has ended, and names their jobs.
    pub fn expire(&mut self, now: Instant) -> Vec<JobId> {
        let ended: Vec<JobId> = self
            .holdings
            .iter()
            .filter(|(_, holding)| holding.expires.is_some_and(|expires| expires <= now))
            .map(|(job, _)| *job)
            .collect();
        for job in &ended {
            self.release(*job);
        }
        ended
    }

    /// When the next lease ends.
    #[must_use]
    pub fn next_expiry(&self) -> Option<Instant> {
        self.holdings
            .values()
            .filter_map(|holding| holding.expires)
            .min()
    }
}

#[cfg(test)]
#[path = "inventory_tests.rs"]
mod tests;
