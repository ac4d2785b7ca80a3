//! A job's processes on this node, and the channels to them.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use bytes::Bytes;
use kolo_core::membership::Process;
use kolo_transport::ids::{DriverId, Generation, JobId, Rank};
use kolo_transport::wire::{
    CallReply, GenerationTable, RankFailure, Refusal, RefusalKind, StartWorkers,
};

use super::channel::Channel;
use super::link::Link;

/// A process that is gone.
#[derive(Debug)]
pub(super) struct Loss {
    pub(super) failure: RankFailure,
    /// Whether it ended because the job is being stopped.
    pub(super) stopping: bool,
}

/// The members of one generation on this node, in rank order: a channel keeps those that it was opened with.
pub(super) type Routes = Arc<[(Rank, Process)]>;

#[derive(Debug)]
struct Table {
    /// The newest generation. Channels are opened for this one alone.
    generation: Generation,
    routes: Routes,
    /// Processes that run here, in a generation or not.
    links: BTreeMap<Process, Arc<Link>>,
    /// Processes that are gone, while the newest generation or a channel has them.
    losses: BTreeMap<Process, Loss>,
    channels: Vec<(Arc<Channel>, Routes)>,
    closed: bool,
}

/// A job's processes on this node, and the channels to them.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) id: JobId,
    pub(super) owner: DriverId,
    /// Its members come and go.
    pub(super) elastic: bool,
    /// Streams of the driver: channels of calls, and logs that it follows.
    pub(super) present: AtomicUsize,
    table: RwLock<Table>,
}

impl Job {
    pub(super) fn new(start: &StartWorkers) -> Self {
        // Programs that are not kolo's take no calls. Their job is known here all the same: whether its driver is there decides
        // whether it is an orphan. Members of an elastic job come with its generations.
        let members = (start.slots.iter())
            .filter(|_| start.installed.is_none() && !start.is_elastic())
            .map(|slot| &slot.member);
        let routes = members.map(|member| (member.rank, process_of(member)));
        Self {
            id: start.job,
            owner: start.owner,
            elastic: start.is_elastic(),
            present: AtomicUsize::new(0),
            table: RwLock::new(Table {
                generation: start.generation,
                routes: routes.collect(),
                links: BTreeMap::new(),
                losses: BTreeMap::new(),
                channels: Vec::new(),
                closed: false,
            }),
        }
    }

    fn table(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn table_mut(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The ranks that a driver may call here, and their processes.
    pub(super) fn admit(
        &self,
        driver: DriverId,
        generation: Generation,
    ) -> Result<Routes, Refusal> {
        if driver != self.owner {
            return Err(Refusal::new(
                RefusalKind::Forbidden,
                format!(
                    "{} belongs to another driver; only the one that submitted it may call its workers",
                    self.id
                ),
            ));
        }
        let table = self.table();
        if generation != table.generation {
            return Err(Refusal::new(
                RefusalKind::Stale,
                format!(
                    "generation {generation} of {} is not the current one, {}",
                    self.id, table.generation
                ),
            ));
        }
        Ok(table.routes.clone())
    }

    /// Whether the job takes one more channel. It learns of the losses so far among its processes.
    pub(super) fn add(&self, channel: &Arc<Channel>, routes: &Routes) -> bool {
        let mut table = self.table_mut();
        if table.closed {
            return false;
        }
        for (_, process) in &**routes {
            if let Some(loss) = table.losses.get(process) {
                push_loss(channel, *process, loss);
            }
        }
        table.channels.push((channel.clone(), routes.clone()));
        true
    }

    pub(super) fn remove(&self, channel: &Arc<Channel>) {
        let mut table = self.table_mut();
        let ended = (table.channels).extract_if(.., |(other, _)| Arc::ptr_eq(other, channel));
        let ended: Vec<_> = ended.collect();
        // Nobody waits for what it called.
        for (_, process) in ended.iter().flat_map(|(_, routes)| &**routes) {
            if let Some(link) = table.links.get(process) {
                link.cancel_all(channel);
            }
        }
        table.forget();
    }

    /// A process can be called from now on.
    pub(super) fn put(&self, link: Arc<Link>) {
        self.table_mut().links.insert(link.process(), link);
    }

    /// The call socket of a process, if it has one.
    pub(super) fn link(&self, process: Process) -> Option<Arc<Link>> {
        self.table().links.get(&process).cloned()
    }

    /// Tells a channel once more of a loss, if the process is known to be lost.
    pub(super) fn repeat_loss(&self, channel: &Channel, process: Process) -> bool {
        let table = self.table();
        let loss = table.losses.get(&process);
        if let Some(loss) = loss {
            push_loss(channel, process, loss);
        }
        loss.is_some()
    }

    /// A generation is complete. Channels of earlier ones keep their processes.
    pub(super) fn complete(&self, new: &GenerationTable) {
        let mut table = self.table_mut();
        if new.generation < table.generation {
            return;
        }
        let here = |process: &Process| {
            table.links.contains_key(process)
                || table.losses.contains_key(process)
                || table.routes.iter().any(|(_, known)| known == process)
        };
        let routes = (new.members.iter())
            .map(|member| (member.rank, process_of(member)))
            .filter(|(_, process)| here(process));
        table.routes = routes.collect();
        table.generation = new.generation;
        table.forget();
    }

    /// Notes a loss, and gives the channels that must learn of it.
    pub(super) fn lose(&self, process: Process, loss: Loss) -> Vec<Arc<Channel>> {
        let mut table = self.table_mut();
        if let Some(link) = table.links.remove(&process) {
            link.close();
        }
        let told: Vec<Arc<Channel>> = (table.channels.iter())
            .filter(|(_, routes)| has(routes, process))
            .map(|(channel, _)| channel.clone())
            .collect();
        for channel in &told {
            push_loss(channel, process, &loss);
        }
        table.losses.insert(process, loss);
        table.forget();
        told
    }

    /// The lost processes that are remembered.
    #[cfg(test)]
    pub(super) fn losses(&self) -> Vec<Process> {
        self.table().losses.keys().copied().collect()
    }

    /// Ends all channels and links; gives the channels, to be finished.
    pub(super) fn close(&self) -> Vec<Arc<Channel>> {
        let mut table = self.table_mut();
        table.closed = true;
        for link in table.links.values() {
            link.close();
        }
        let channels = std::mem::take(&mut table.channels);
        channels.into_iter().map(|(channel, _)| channel).collect()
    }
}

impl Table {
    /// Forgets losses of which nobody can hear any more, so that they do not grow with the job's age.
    fn forget(&mut self) {
        let (routes, channels) = (&self.routes, &self.channels);
        (self.losses).retain(|process, _| {
            has(routes, *process) || channels.iter().any(|(_, routes)| has(routes, *process))
        });
    }
}

fn has(routes: &Routes, process: Process) -> bool {
    routes.iter().any(|(_, other)| *other == process)
}

fn process_of(member: &kolo_transport::wire::Member) -> Process {
    Process {
        slot: member.slot,
        incarnation: member.incarnation,
    }
}

fn push_loss(channel: &Channel, process: Process, loss: &Loss) {
    let reply = CallReply::Lost {
        slot: process.slot,
        incarnation: process.incarnation,
        failure: loss.failure.clone(),
        stopping: loss.stopping,
    };
    channel.push(&reply, &Bytes::new());
}
