//! All that a node decides, as one state machine.

mod reservation;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_wire::ids::JobId;
use kolo_wire::{
    HealthCheck, InstalledHere, NodeEvent, NodeReply, NodeRequest, Refusal, RefusalKind, Resources,
    StartWorkers, ToWorker,
};

use super::colocator::{Colocator, Here};
use super::inventory::{HoldError, Inventory};
use super::messages::{AskId, Found, Input, Output, Stay, Wanted};
use super::outbox::Outbox;

/// How long the answer to a stop waits for the events before it.
const EXITS_FIRST: Duration = Duration::from_secs(1);

/// An order that waits for [`Input::Found`].
#[derive(Debug)]
enum Finding {
    Reserve(Stay, Option<InstalledHere>, Option<HealthCheck>),
    /// The reservation that is to be committed, if there is one.
    Start(Option<Stay>, StartWorkers),
    Port,
}

/// A question that waits for the end of jobs.
#[derive(Debug)]
struct Ending {
    ask: AskId,
    reply: NodeReply,
    left: BTreeSet<Stay>,
}

/// An answer that waits for events: the head takes the answer to a stop for the end of the job, so that it must know before
/// how the workers ended.
#[derive(Debug)]
struct Held {
    ask: AskId,
    reply: NodeReply,
    /// So many events must be acknowledged.
    mark: u64,
    /// It waits no longer.
    by: Option<Instant>,
}

/// A node: its resources, the jobs that hold some, and the events that the head does not know yet.
///
/// [`NodeCore::step`] takes everything that happens and gives everything that is to be done. Nothing here does I/O or
/// reads a clock.
#[derive(Debug)]
pub struct NodeCore {
    here: Arc<Here>,
    inventory: Inventory,
    jobs: BTreeMap<Stay, Colocator>,
    stays: u64,
    /// Why the node stops, once it does.
    stopping: Option<String>,
    /// It is to stop.
    draining: bool,
    /// Questions that wait for the end of all workers.
    drains: Vec<AskId>,
    finding: BTreeMap<AskId, Finding>,
    /// Reservations that wait for [`Input::Checked`], and the answer if nothing is wrong.
    checking: BTreeMap<AskId, (Stay, NodeReply)>,
    endings: Vec<Ending>,
    held: Vec<Held>,
    outbox: Outbox,
}

fn refused<T: Into<Refusal>>(refusal: T) -> NodeReply {
    NodeReply::Refused(refusal.into())
}

impl NodeCore {
    /// A node with these resources and no jobs.
    #[must_use]
    pub fn new(here: Here, inventory: Inventory) -> Self {
        Self {
            here: Arc::new(here),
            inventory,
            jobs: BTreeMap::new(),
            stays: 0,
            stopping: None,
            draining: false,
            drains: Vec::new(),
            finding: BTreeMap::new(),
            checking: BTreeMap::new(),
            endings: Vec::new(),
            held: Vec::new(),
            outbox: Outbox::default(),
        }
    }

    /// The jobs that hold something, in order of their ids.
    pub fn jobs(&self) -> impl Iterator<Item = JobId> + '_ {
        self.present().map(|stay| stay.job)
    }

    /// Everything that the node has.
    #[must_use]
    pub fn total(&self) -> &Resources {
        self.inventory.total()
    }

    /// Everything that no job holds.
    #[must_use]
    pub fn free(&self) -> &Resources {
        self.inventory.free()
    }

    /// Whether the node stops, or is to stop when its jobs have ended.
    #[must_use]
    pub fn is_leaving(&self) -> bool {
        self.draining || self.stopping.is_some()
    }

    /// When to say [`Input::Tick`], if nothing else happens.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let jobs = self.jobs.values().filter_map(Colocator::next_deadline);
        let held = self.held.iter().filter_map(|held| held.by);
        jobs.chain(held).chain(self.inventory.next_expiry()).min()
    }

    /// Something has happened; what is to be done now, in order.
    pub fn step(&mut self, now: Instant, input: Input) -> Vec<Output> {
        let mut outputs = Vec::new();
        match input {
            Input::Order { ask, request } => {
                if let Some(reply) = self.order(now, ask, *request, &mut outputs) {
                    outputs.push(Output::Answer { ask, reply });
                }
            }
            Input::Found {
                ask,
                program,
                free_port,
            } => {
                let reply = match self.finding.remove(&ask) {
                    None => None,
                    Some(Finding::Reserve(stay, installed, check)) => {
                        let found = (program, free_port);
                        let reply = self.reserved(stay, installed, found, &mut outputs);
                        self.check((ask, stay), reply, check, &mut outputs)
                    }
                    // The job may have left meanwhile, and come again.
                    Some(Finding::Start(stay, start)) if self.stay(start.job) != stay => {
                        Some(refused(HoldError::NotReserved(start.job)))
                    }
                    Some(Finding::Start(_, start)) => {
                        self.start(now, (ask, start), program, &mut outputs)
                    }
                    Some(Finding::Port) => Some(NodeReply::FreePort(free_port)),
                };
                outputs.extend(reply.map(|reply| Output::Answer { ask, reply }));
            }
            Input::Checked { ask, checked } => {
                let reply = self.checked(ask, checked);
                outputs.extend(reply.map(|reply| Output::Answer { ask, reply }));
            }
            Input::StopAll { ask, reason } => self.stop_all(now, ask, reason, &mut outputs),
            Input::Drain { ask } => {
                self.draining = true;
                self.drains.push(ask);
                // Before the ends of workers that a signal to all processes ends, too: these have left, and have not failed.
                let elastic = self.jobs.iter().filter(|(_, job)| job.is_elastic());
                for job in elastic.map(|(stay, _)| stay.job) {
                    let reason = "the daemon of the node is stopping".to_owned();
                    self.outbox.push(NodeEvent::JobLeft { job, reason });
                }
            }
            Input::Flush { ask } => self.held.push(Held {
                ask,
                reply: NodeReply::Done,
                mark: self.outbox.mark(),
                by: None,
            }),
            Input::Warden { stay, started } => {
                self.with(stay, &mut outputs, |job| job.warden(started));
            }
            Input::Worker { worker, event } => {
                self.with(worker.stay, &mut outputs, |job| {
                    job.worker(now, worker, event)
                });
            }
            Input::Signed { worker, signed } => {
                self.with(worker.stay, &mut outputs, |job| {
                    job.signed(now, worker, signed)
                });
            }
            Input::Closed(stay) => self.with(stay, &mut outputs, Colocator::closed),
            Input::Head { registered } => self.outbox.set_registered(registered),
            Input::Delivered { session, delivery } => {
                outputs.extend(self.outbox.delivered(session, delivery));
            }
            Input::Tick => self.tick(now, &mut outputs),
        }
        self.end(now);
        self.drained(&mut outputs);
        self.release(now, &mut outputs);
        outputs.extend(self.outbox.send());
        outputs
    }

    /// The stays that hold something.
    fn present(&self) -> impl Iterator<Item = Stay> + '_ {
        self.jobs
            .iter()
            .filter(|(_, job)| !job.is_expired())
            .map(|(stay, _)| *stay)
    }

    /// The stay of a job that holds something.
    fn stay(&self, job: JobId) -> Option<Stay> {
        let [first, last] = [0, u64::MAX].map(|number| Stay { job, number });
        self.jobs
            .range(first..=last)
            .find(|(_, job)| !job.is_expired())
            .map(|(stay, _)| *stay)
    }

    /// Does something with a job, and sees to what comes of it.
    fn with(
        &mut self,
        stay: Stay,
        outputs: &mut Vec<Output>,
        act: impl FnOnce(&mut Colocator) -> Vec<Output>,
    ) {
        let Some(job) = self.jobs.get_mut(&stay) else {
            return;
        };
        outputs.extend(act(job));
        for event in job.take_reports() {
            self.outbox.push(event);
        }
        for devices in job.take_freed() {
            self.inventory.shrink(stay.job, &devices);
        }
        if !job.is_gone() {
            return;
        }
        if !job.is_expired() {
            self.inventory.release(stay.job);
        }
        self.jobs.remove(&stay);
        for ending in &mut self.endings {
            ending.left.remove(&stay);
        }
    }

    /// A request of the head; the answer if there is one at once.
    fn order(
        &mut self,
        now: Instant,
        ask: AskId,
        request: NodeRequest,
        outputs: &mut Vec<Output>,
    ) -> Option<NodeReply> {
        match request {
            NodeRequest::Reserve { .. } if self.stopping.is_some() => {
                let reason = self.stopping.as_deref().unwrap_or_default();
                let message = format!("this node is stopping: {reason}");
                Some(refused(Refusal::new(RefusalKind::Stopped, message)))
            }
            NodeRequest::Reserve {
                job,
                per_worker,
                workers,
                lease_ms,
                program,
                installed,
                health_check,
            } => {
                let lease = Duration::from_millis(lease_ms);
                let reserved = self
                    .inventory
                    .reserve(now, job, &per_worker, workers, lease);
                if let Err(error) = reserved {
                    return Some(refused(error));
                }
                let program = match &installed {
                    Some(installed) => Wanted::Installed(installed.program.clone()),
                    None => Wanted::Sent(program),
                };
                let stay = self.arrive(job, outputs);
                self.find(
                    ask,
                    program,
                    Finding::Reserve(stay, installed, health_check),
                    outputs,
                );
                None
            }
            NodeRequest::Start(start) => {
                let program = match &start.installed {
                    Some(installed) => Wanted::Installed(installed.clone()),
                    None => Wanted::Sent(start.program.hash),
                };
                let finding = Finding::Start(self.stay(start.job), start);
                self.find(ask, program, finding, outputs);
                None
            }
            NodeRequest::FreePort { .. } => {
                outputs.push(Output::FindPort { ask });
                self.finding.insert(ask, Finding::Port);
                None
            }
            NodeRequest::Membership(table) => {
                Some(self.ask(table.job, outputs, |job| job.membership(table)))
            }
            NodeRequest::RankLost {
                job,
                generation,
                failure,
            } => Some(self.ask(job, outputs, |job| job.rank_lost(generation, failure))),
            NodeRequest::Revoke {
                job,
                generation,
                lost,
                cause,
            } => {
                let message = ToWorker::Revoke {
                    generation,
                    cause,
                    lost,
                };
                Some(self.ask(job, outputs, |job| Ok(job.revoke(generation, &message))))
            }
            NodeRequest::Hold {
                job,
                generation,
                why,
            } => {
                let message = ToWorker::Hold { generation, why };
                Some(self.ask(job, outputs, |job| {
                    Ok(job.tell_members(generation, &message))
                }))
            }
            NodeRequest::StopWorker {
                job,
                slot,
                incarnation,
                why,
            } => {
                if let Some(stay) = self.stay(job) {
                    self.with(stay, outputs, |job| {
                        job.stop_worker(now, (slot, incarnation), &why)
                    });
                }
                Some(NodeReply::Done)
            }
            NodeRequest::Signal { job, signal, seq } => {
                Some(self.ask(job, outputs, |job| job.signal(seq, signal)))
            }
            NodeRequest::Release { job } => {
                self.stop((ask, job), NodeReply::Done, outputs, |job| {
                    job.stop(now, "it was released")
                });
                None
            }
            NodeRequest::Stop {
                job,
                reason,
                interrupt,
            } => {
                self.stop((ask, job), NodeReply::Done, outputs, |job| {
                    if interrupt {
                        job.interrupt(now, &reason)
                    } else {
                        job.stop(now, &reason)
                    }
                });
                None
            }
            NodeRequest::Kill { job } => {
                self.stop((ask, job), NodeReply::Done, outputs, |job| {
                    job.kill_all(now, "it was killed")
                });
                None
            }
            _ => Some(refused(Refusal::new(
                RefusalKind::Internal,
                "this request has nothing to do with the jobs of a node",
            ))),
        }
    }

    /// Something of a job that is here.
    fn ask(
        &mut self,
        job: JobId,
        outputs: &mut Vec<Output>,
        act: impl FnOnce(&mut Colocator) -> Result<Vec<Output>, Refusal>,
    ) -> NodeReply {
        let Some(stay) = self.stay(job) else {
            let message = format!("{job} holds nothing on this node");
            return refused(Refusal::new(RefusalKind::NotFound, message));
        };
        let mut reply = NodeReply::Done;
        self.with(stay, outputs, |job| {
            act(job).unwrap_or_else(|refusal| {
                reply = refused(refusal);
                Vec::new()
            })
        });
        reply
    }

    /// The stay of a job that holds something; a new one if there is none.
    fn arrive(&mut self, job: JobId, outputs: &mut Vec<Output>) -> Stay {
        if let Some(stay) = self.stay(job) {
            return stay;
        }
        self.stays += 1;
        let number = self.stays;
        let stay = Stay { job, number };
        self.jobs
            .insert(stay, Colocator::new(self.here.clone(), stay));
        // At once, so that it is there when the job starts.
        outputs.push(Output::StartWarden(stay));
        stay
    }

    fn find(&mut self, ask: AskId, program: Wanted, finding: Finding, outputs: &mut Vec<Output>) {
        outputs.push(Output::Find {
            ask,
            program,
            port: matches!(finding, Finding::Reserve(..)),
        });
        self.finding.insert(ask, finding);
    }

    /// Commits a reservation and starts the workers of a job, now that its program was looked for.
    fn start(
        &mut self,
        now: Instant,
        (ask, start): (AskId, StartWorkers),
        program: Found,
        outputs: &mut Vec<Output>,
    ) -> Option<NodeReply> {
        let job = start.job;
        match program {
            Found::Here => {}
            Found::Unusable(problem) => return Some(refused(problem)),
            Found::NotSent => {
                let message = format!(
                    "the program `{}` ({}) is not on this node; it must be sent before {job} starts",
                    start.program.name.escape_debug(),
                    start.program.hash
                );
                return Some(refused(Refusal::new(RefusalKind::NotFound, message)));
            }
        }
        let devices = match self.room(now, &start) {
            Ok(devices) => devices,
            Err(refusal) => return Some(refused(refusal)),
        };
        let started = self.ask(job, outputs, |job| job.start(now, ask, start, devices));
        if let NodeReply::Refused(refusal) = started {
            // It can't be started, so it must not hold anything (G-2).
            let reason = refusal.message.clone();
            self.stop((ask, job), refused(refusal), outputs, |job| {
                job.stop(now, &reason)
            });
        }
        None
    }

    /// Commits what the workers of a start need: the GPUs of a static job, or of each new worker of an elastic job, which has what
    /// it had before if it is refused.
    fn room(&mut self, now: Instant, start: &StartWorkers) -> Result<Vec<Vec<String>>, Refusal> {
        let job = start.job;
        if !start.is_elastic() {
            let holding = self.inventory.commit(now, job, start.slots.len() as u32)?;
            return Ok(vec![holding.devices.clone()]);
        }
        let colocator = self.stay(job).and_then(|stay| self.jobs.get(&stay));
        let colocator = colocator.ok_or(HoldError::NotReserved(job))?;
        let new = colocator.admit(start)?.len() as u32;
        Ok(self.inventory.grow(now, job, new)?)
    }

    /// Ends a job; answered when nothing of it is left, at once if it is not here.
    fn stop(
        &mut self,
        (ask, job): (AskId, JobId),
        reply: NodeReply,
        outputs: &mut Vec<Output>,
        act: impl FnOnce(&mut Colocator) -> Vec<Output>,
    ) {
        let stay = self.stay(job);
        self.endings.push(Ending {
            ask,
            reply,
            left: stay.into_iter().collect(),
        });
        if let Some(stay) = stay {
            self.with(stay, outputs, act);
        }
    }

    fn stop_all(&mut self, now: Instant, ask: AskId, reason: String, outputs: &mut Vec<Output>) {
        let all: BTreeSet<Stay> = self.present().collect();
        for stay in &all {
            let (job, reason) = (stay.job, reason.clone());
            self.outbox.push(NodeEvent::JobLeft { job, reason });
        }
        self.endings.push(Ending {
            ask,
            reply: NodeReply::Done,
            left: all.clone(),
        });
        let head_hears = self.outbox.is_registered();
        for stay in all {
            self.with(stay, outputs, |job| job.leave(now, &reason, head_hears));
        }
        self.stopping = Some(reason);
    }

    fn tick(&mut self, now: Instant, outputs: &mut Vec<Output>) {
        for job in self.inventory.expire(now) {
            outputs.push(Output::Warn(format!(
                "the reservation of {job} was not committed in time and is released"
            )));
            if let Some(stay) = self.stay(job) {
                // From here on it is only what is left to be cleaned up.
                self.with(stay, outputs, Colocator::expire);
            }
        }
        let all: Vec<Stay> = self.jobs.keys().copied().collect();
        for stay in all {
            self.with(stay, outputs, |job| job.tick(now));
        }
    }

    /// Questions whose jobs have ended wait only for the events up to now.
    fn end(&mut self, now: Instant) {
        let mark = self.outbox.mark();
        let over = self.endings.extract_if(.., |ending| ending.left.is_empty());
        self.held.extend(over.map(|ending| Held {
            ask: ending.ask,
            reply: ending.reply,
            mark,
            by: Some(now + EXITS_FIRST),
        }));
    }

    /// Answers those that wait for the end of all workers, if it has come.
    fn drained(&mut self, outputs: &mut Vec<Output>) {
        if self.drains.is_empty() || !self.jobs.values().all(Colocator::is_idle) {
            return;
        }
        for ask in self.drains.drain(..) {
            let reply = NodeReply::Done;
            outputs.push(Output::Answer { ask, reply });
        }
    }

    /// Answers for which nothing is to be waited for any more.
    fn release(&mut self, now: Instant, outputs: &mut Vec<Output>) {
        let settled = self.outbox.settled();
        let due = self.held.extract_if(.., |held| {
            held.mark <= settled || held.by.is_some_and(|by| by <= now)
        });
        for Held {
            ask, reply, mark, ..
        } in due
        {
            if mark > settled {
                outputs.push(Output::Warn(
                    "the head did not take the exits of the workers in time".to_owned(),
                ));
            }
            outputs.push(Output::Answer { ask, reply });
        }
    }
}
