//! A job whose members come and go: [`Membership`] decides, and what it wants is carried out here.
//!
//! What happens becomes a [`Fact`], and each of its actions a message to nodes, to the driver, or to the head. Nothing ends
//! such a job but the end that membership decides on, a stop, or its driver.

mod bringing;
mod facts;
mod horovod;
mod news;
mod nodes;
mod restart;
mod table;
mod tally;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_wire::ids::{Generation, NodeId, Slot};
use kolo_wire::{
    GenerationTable, JobEvent, JobState, LeftOut, MembershipInfo, NodeRequest, OnChange, Refusal,
    RefusalKind, SubmitFrame, WorkerSignal, WorkerState,
};

use self::bringing::Bringing;
use self::facts::Facts;
use self::horovod::Doors;
use self::nodes::{connect, queue};
use self::restart::Anew;
use self::table::table_of;
use self::tally::Tally;
use super::end::{Ending, cut};
use super::parts::Push;
use super::seat::{Seat, process_of};
use super::{Action, Base, Event, GroupState, Phase, Rendezvous, Seating, Site};
use crate::env::{self, JobEnv};
use crate::head::milliseconds;
use crate::membership::{
    self, Budget, End, Fact, Host, Limits, LimitsError, Membership, Process, State,
};

/// Longest reason that a node or a driver gives, in bytes, and longest last words of a process in a reason. All of them are in the
/// failure.
const MAX_WORDS: usize = 256;

/// The state of a job whose members come and go, beside the state that every job has.
#[derive(Debug)]
pub(super) struct Elastic {
    membership: Membership,
    facts: Facts,
    /// The generation that was active last, if any.
    active: Option<Arc<GenerationTable>>,
    /// Its members.
    members: BTreeSet<Process>,
    /// The node that holds each seat.
    holders: BTreeMap<Slot, NodeId>,
    /// What members say of their commits, for each generation that may still count.
    tallies: BTreeMap<Generation, Tally>,
    wake_at: Option<Instant>,
    /// What was decided last, and why.
    decision: String,
    /// The last generation whose change the driver was offered.
    offered: Generation,
    bringing: Bringing,
    leaving: Leaving,
    /// For how many workers there was room when the driver was told last that the job waits for more.
    short_of: Option<u32>,
    anew: Anew,
    doors: Doors,
}

/// Nodes that get nothing more of the job.
#[derive(Debug, Default)]
struct Leaving {
    /// Nodes that are to be left, as somebody else than the driver says.
    drained: BTreeSet<NodeId>,
    /// Nodes that are to be left, as the driver's list of hosts says.
    unlisted: BTreeSet<NodeId>,
    /// Nodes where a process was killed and its end was not seen.
    unseen: BTreeSet<NodeId>,
}

impl Elastic {
    /// A new job: its seats are laid over the sites, and the head looks for room for the rest.
    pub(super) fn begin(
        job: &mut Base,
        limits: Limits,
        sites: Vec<Site>,
    ) -> Result<Self, LimitsError> {
        // Ids of jobs are random.
        let (membership, first) = Membership::new(job.now, limits, job.id.0)?;
        let mut elastic = Self {
            membership,
            facts: Facts::default(),
            active: None,
            members: BTreeSet::new(),
            holders: BTreeMap::new(),
            tallies: BTreeMap::new(),
            wake_at: None,
            decision: String::new(),
            offered: Generation::default(),
            bringing: Bringing::default(),
            leaving: Leaving::default(),
            short_of: None,
            anew: Anew::default(),
            doors: Doors::default(),
        };
        // Members and spares: the sites have room for all of them.
        let mut wanted = Vec::new();
        for action in first {
            match action {
                membership::Action::Reserve { slots, .. } => wanted.extend(slots),
                action => elastic.carry_out(job, action),
            }
        }
        let mut slots = wanted.into_iter();
        let seated = sites
            .into_iter()
            .map(|site| Seating {
                slots: slots.by_ref().take(site.workers as usize).collect(),
                site,
            })
            .collect();
        elastic.placed(job, seated, Vec::new(), "");
        let slots: Vec<Slot> = slots.collect();
        if !slots.is_empty() {
            let avoid = Vec::new();
            job.actions.push(Action::Place { slots, avoid });
        }
        elastic.settle(job);
        Ok(elastic)
    }

    pub(super) fn deadline(&self, job: &Base) -> Option<Instant> {
        self.wake_at.filter(|_| job.ending.is_none())
    }

    /// What people see of the membership.
    pub(super) fn info(&self) -> MembershipInfo {
        let active = self.active.as_deref();
        MembershipInfo {
            cause: active.map(|table| table.cause.clone()),
            decision: self.decision.clone(),
            left_out: Vec::new(),
        }
    }

    /// The hosts that get no new worker now.
    pub(super) fn left_out(&self, now: Instant) -> Vec<LeftOut> {
        let hosts = self.membership.budget().left_out(now);
        let left_out = |(host, until, why): (&Host, Instant, &str)| LeftOut {
            hostname: host.to_string(),
            for_ms: milliseconds(until.saturating_duration_since(now)),
            why: why.to_owned(),
        };
        hosts.map(left_out).collect()
    }

    /// The members come first, in the order of their ranks.
    pub(super) fn sort(&self, seats: &mut [&Seat]) {
        seats.sort_by_key(|seat| {
            let is_member = self.members.contains(&seat.process());
            (!is_member, seat.member.rank, seat.member.slot)
        });
    }

    pub(super) fn wants_room(&self) -> bool {
        let roster = self.membership.roster();
        roster.refused().is_some() || roster.count(State::Reserving) > 0
    }

    pub(super) fn waits_for_room(&self) -> bool {
        self.membership.next_group_by().is_some()
    }

    pub(super) fn hear(&mut self, job: &mut Base, event: Event) {
        match event {
            Event::Replied { node, reply } => self.replied(job, node, reply),
            Event::Pushed { node, answer } => self.pushed(job, node, answer),
            Event::Node { node, event } => self.news(job, node, event),
            Event::NodeLost {
                node,
                reason,
                fence,
            } => self.node_lost(job, node, reason, fence),
            // A later stay there knows more.
            Event::Fenced { node, reason } if job.parts.there(node).is_none() => {
                self.facts.push(Fact::NodeLost {
                    node,
                    why: reason,
                    fenced: job.now,
                });
            }
            Event::Discovered(found) => self.discovered(job, found),
            Event::Rendezvous(opened) if job.rendezvous == Rendezvous::Opening => {
                (self.anew).rendezvous_opened(job, &mut self.facts, opened);
            }
            Event::Door(process, news) => {
                let news = (process, news);
                (self.doors).hear(job, &mut self.facts, &self.members, news);
            }
            Event::Placed {
                seated,
                without,
                why,
            } => self.placed(job, seated, without, &why),
            Event::Contended => self.facts.push(Fact::Contended),
            Event::Offered => self.facts.push(Fact::Offered),
            Event::Drain { node, reason } => self.drain(job, node, reason),
            Event::Evict { node, reason } => self.evict(job, node, &reason),
            Event::Undrain { node } => {
                self.leaving.drained.remove(&node);
                self.facts.push(Fact::Undrain { node });
                self.check_host(job, node);
            }
            Event::Driver(SubmitFrame::ProgramReady) => self.bringing.answered(job),
            Event::Driver(SubmitFrame::Hosts(hosts)) => self.use_hosts(job, hosts),
            Event::Driver(SubmitFrame::Holding { generation }) if !job.starts_anew() => {
                let commit = None;
                self.facts.push(Fact::Holding { generation, commit });
            }
            // It does not reach a node with members of the generation.
            Event::Driver(SubmitFrame::Unreachable {
                generation,
                mut why,
            }) if !job.starts_anew() => {
                cut(&mut why, MAX_WORDS);
                let culprit = None;
                self.facts.push(Fact::Broken {
                    generation,
                    culprit,
                    why,
                });
            }
            Event::Driver(SubmitFrame::Signal(signal)) => {
                // It asks the processes to prepare for their end: they have the grace time for that.
                if matches!(signal, WorkerSignal::User1 | WorkerSignal::User2)
                    && job.starts_anew()
                    && job.ending.is_none()
                {
                    let until = job.now + Duration::from_millis(job.spec.grace_ms);
                    self.facts.push(Fact::Noticed { until });
                }
                job.signal(signal);
            }
            event => job.hear(event),
        }
        self.settle(job);
    }

    /// Tells membership what has happened and does what it wants, until there is nothing left to do.
    fn settle(&mut self, job: &mut Base) {
        loop {
            if job.ending.is_some() {
                return;
            }
            let is_due = self.wake_at.is_some_and(|at| job.now >= at);
            if is_due || !self.facts.is_empty() {
                if is_due {
                    self.wake_at = None;
                }
                let facts = self.facts.take();
                for action in self.membership.step(job.now, facts) {
                    self.carry_out(job, action);
                }
                continue;
            }
            self.leave_nodes(job);
            connect(job);
            self.confirm(job);
            self.doors.acknowledge_late(job, &mut self.facts);
            if self.facts.is_empty() {
                break;
            }
        }
        if job.ending.is_some() {
            return;
        }
        self.doors.close(job);
        self.bringing.announce(job);
        self.tell_shortage(job);
        self.start_queued(job);
        job.parts.forget_over();
        let whole = self.membership.active().is_some();
        let before = job.state;
        job.state = match job.phase {
            Phase::Reserve | Phase::Prepare if job.net.is_open() => JobState::Probing,
            Phase::Reserve | Phase::Prepare => JobState::Placing,
            Phase::Boot | Phase::Publish => JobState::Starting,
            Phase::Up if whole => JobState::Healthy,
            Phase::Up => JobState::Recovering,
        };
        if (before, job.state) == (JobState::Healthy, JobState::Recovering) {
            let why = self.membership.budget().idle_why().to_owned();
            self.tell_state(job, "UNHEALTHY", why);
        }
    }

    /// Says in the log how the group is.
    fn tell_state(&self, job: &mut Base, state: &'static str, cause: String) {
        job.actions.push(Action::Group(GroupState {
            state,
            generation: job.generation,
            members: self.members.len() as u32,
            restarts: self.membership.budget().without_progress(),
            cause,
        }));
    }

    /// The last word of the group's state.
    pub(super) fn tell_end(&self, job: &mut Base, state: JobState, reason: String) {
        let name = match state {
            JobState::Succeeded => "SUCCEEDED",
            JobState::Stopped => "STOPPED",
            _ => "FAILED",
        };
        self.tell_state(job, name, reason);
    }

    fn carry_out(&mut self, job: &mut Base, action: membership::Action) {
        if job.ending.is_some() {
            return;
        }
        match action {
            membership::Action::Reserve { slots, avoid, .. } => {
                let avoid = avoid.iter().map(ToString::to_string).collect();
                job.actions.push(Action::Place { slots, avoid });
            }
            membership::Action::GiveBack { slots } => {
                for slot in slots {
                    self.leave_seat(job, slot);
                }
            }
            // New processes are to be started for this generation.
            membership::Action::Plan(generation) => match table_of(job, &generation) {
                Ok(table) => self.doors.plan = Some(Arc::new(table)),
                Err(error) => job.fail(RefusalKind::Internal, error),
            },
            membership::Action::Start { process, location } if job.is_horovod() => {
                self.doors.open(job, process, location.node);
            }
            membership::Action::Start { process, location } => {
                queue(job, process, location.node);
            }
            membership::Action::Stop { process, why } => self.stop_worker(job, process, why),
            membership::Action::Revoke {
                generation,
                lost,
                cause,
            } => {
                // Horovod's workers are let into a generation when it is active.
                let generation = if job.is_horovod() {
                    job.generation
                } else {
                    generation
                };
                let request = NodeRequest::Revoke {
                    job: job.id,
                    generation,
                    lost,
                    cause,
                };
                self.send_to_members(job, generation, &request);
            }
            membership::Action::Fall {
                why,
                is_failure,
                stopped,
            } => self.group_fell(job, why, is_failure, stopped),
            membership::Action::Publish { generation, to } => {
                self.publish(job, &generation, &to);
            }
            membership::Action::Active(generation) => self.activate(job, generation.number()),
            membership::Action::Hold { generation, .. } if job.is_horovod() => {
                let active = self.active.as_deref();
                if let Some(table) = active.filter(|table| table.generation == generation) {
                    self.doors.give_notice(job, table);
                }
            }
            membership::Action::Hold { generation, why } => {
                // The driver's stream loses nothing, so that once is enough.
                if self.offered < generation {
                    self.offered = generation;
                    let hold = JobEvent::Hold { generation };
                    job.actions.push(Action::Tell(hold));
                }
                let request = NodeRequest::Hold {
                    job: job.id,
                    generation,
                    why,
                };
                self.send_to_members(job, generation, &request);
            }
            membership::Action::Wake(at) => self.wake_at = Some(at),
            membership::Action::Tell(text) => {
                // That something was ignored is no decision.
                if !text.starts_with("ignored: ") {
                    self.decision.clone_from(&text);
                }
                job.note(text);
            }
            membership::Action::End { how, why } => self.end(job, how, why),
        }
    }

    /// Gives a generation to the nodes of these processes, unless it is on its way there.
    fn publish(&mut self, job: &mut Base, generation: &membership::Generation, to: &[Process]) {
        let number = generation.number();
        let known = job.published.as_ref();
        let is_new = known.is_none_or(|known| known.generation != number);
        if is_new {
            let table = match table_of(job, generation) {
                Ok(table) => Arc::new(table),
                Err(error) => return job.fail(RefusalKind::Internal, error),
            };
            job.phase = job.phase.max(Phase::Publish);
            job.published = Some(Arc::clone(&table));
            match job.on_change() {
                OnChange::Restart => self.anew.prepare(job, &table),
                OnChange::InPlace => {
                    let tally = Tally::new(table.members.iter().map(process_of));
                    self.tallies.insert(number, tally);
                }
                OnChange::Horovod => {}
            }
        }
        match job.on_change() {
            OnChange::Restart => {}
            OnChange::Horovod => (self.doors).acknowledge(job, &mut self.facts, number, to),
            OnChange::InPlace => {
                let seats = to.iter().filter_map(|process| job.seats.get(&process.slot));
                let nodes: BTreeSet<NodeId> = seats.map(|seat| seat.member.node).collect();
                for node in nodes {
                    if let Some(part) = job.parts.find(node) {
                        job.push_once(part, Push::Membership(number));
                    }
                }
            }
        }
    }

    /// All members have taken the generation.
    fn activate(&mut self, job: &mut Base, number: Generation) {
        let Some(table) = job.published.clone() else {
            return;
        };
        self.tallies.retain(|generation, _| *generation >= number);
        self.active = Some(Arc::clone(&table));
        self.members = table.members.iter().map(process_of).collect();
        job.generation = number;
        job.phase = Phase::Up;
        for seat in job.seats.values_mut() {
            if seat.state == WorkerState::Ready {
                seat.state = WorkerState::Spare;
            }
        }
        for member in &table.members {
            let seat = job.seats.get_mut(&member.slot);
            if let Some(seat) = seat.filter(|seat| seat.exit.is_none()) {
                seat.member = member.clone();
                seat.state = WorkerState::Ready;
            }
        }
        self.tell_state(job, "HEALTHY", table.cause.clone());
        match job.on_change() {
            OnChange::Restart => {}
            OnChange::InPlace => job.fall.close(),
            OnChange::Horovod => self.doors.let_in(job, &table),
        }
        let event = JobEvent::Generation {
            table: Arc::unwrap_or_clone(table),
            nodes: job.placed_nodes(),
            fall: job.fall.take_untold(),
        };
        job.actions.push(Action::Tell(event));
    }

    fn end(&self, job: &mut Base, how: End, why: String) {
        let budget = self.membership.budget();
        let is_open = job.fall.is_open();
        // Else the failure itself is told.
        let is_first = !is_open && budget.without_progress() == 1;
        let first = Some(budget).filter(|_| is_first && how == End::TooManyRestarts);
        let why = match first.and_then(Budget::cause) {
            Some(cause) => format!("{why}: {cause}"),
            None => why,
        };
        let kind = match how {
            End::Succeeded => return job.end(Ending::success(&why)),
            End::BelowMin => RefusalKind::Timeout,
            _ => RefusalKind::Worker,
        };
        let refusal = Some(Refusal::new(kind, why.clone()));
        let ending = Ending::new(JobState::Failed, refusal, why.clone());
        job.end(if is_open {
            ending.blame(format!("{why}; the last failure: "), None)
        } else {
            ending
        });
    }

    /// A group that is to be started anew is over, and the driver hears why.
    fn group_fell(&mut self, job: &mut Base, why: String, is_failure: bool, stopped: u32) {
        self.anew.fell();
        let most = job.spec.elastic.as_ref();
        let most = most.map_or(0, |elastic| elastic.restarts_without_progress);
        let restart = self.membership.budget().without_progress() + 1;
        let failure = job.fall.cause().filter(|_| is_failure).map(|failure| {
            let mut failure = failure.clone();
            failure.stderr_tail.clear();
            Box::new(failure)
        });
        job.actions.push(Action::Tell(JobEvent::Fell {
            why,
            failure,
            stopped,
            restart: is_failure.then_some((restart, most)),
        }));
    }

    /// Tells the driver that a group waits for room, whenever the number of workers is another one for which there is some.
    fn tell_shortage(&mut self, job: &mut Base) {
        let Some(until) = self.membership.next_group_by() else {
            self.short_of = None;
            return;
        };
        let Some(room) = self.membership.shortage() else {
            return;
        };
        if self.short_of.replace(room) != Some(room) {
            let needed = job.spec.elastic.as_ref().map_or(0, |elastic| elastic.min);
            job.actions.push(Action::Tell(JobEvent::Waits {
                room,
                needed,
                for_ms: milliseconds(until.saturating_duration_since(job.now)),
            }));
        }
    }

    /// The number and the environment of the group that new processes are started for. A job whose members start without ranks has
    /// none, and its ranks are the numbers of its seats.
    fn group(&self, job: &Base) -> (Generation, JobEnv) {
        let budget = self.membership.budget();
        // The number of each seat is below.
        let seats = self.membership.roster().seats().len() as u32;
        let mut all = job.common_env(seats);
        all.restarts = budget.resets();
        let table = match job.on_change() {
            OnChange::InPlace => None,
            OnChange::Horovod => self.doors.plan.as_deref(),
            OnChange::Restart => job.published.as_deref(),
        };
        let Some(table) = table else {
            return (Generation(0), all);
        };
        let nodes: BTreeSet<NodeId> = table.members.iter().map(|member| member.node).collect();
        all.generation = table.generation;
        all.world_size = table.world_size();
        all.nodes = nodes.len() as u32;
        all.hostnames = env::horovod_hostnames(&table.members);
        if job.starts_anew() {
            let first = table.members.first();
            let master = first.and_then(|member| job.parts.find(member.node));
            all.master = master.map_or(all.master, |part| job.ip_of(part));
            all.master_port = self.anew.master_port;
            all.restarts = budget.without_progress();
            let limits = job.spec.elastic.as_deref();
            all.max_restarts = limits.map_or(0, |limits| limits.restarts_without_progress);
        }
        (table.generation, all)
    }
}
