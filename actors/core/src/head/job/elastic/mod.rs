//! A job whose members come and go: [`Membership`] decides, and what it wants is carried out here.
//!
//! What happens becomes a [`Fact`], and each of its actions a message to nodes, to the driver, or to the head. Nothing ends
//! such a job but the end that membership decides on, a stop, or its driver.

mod flow;
mod horovod;
mod hosts;
mod news;
mod nodes;
mod restart;
mod room;
mod tally;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use kolo_wire::ids::{Generation, NodeId, Slot};
use kolo_wire::{
    GenerationTable, Handover, JobEvent, JobState, LeftOut, Member, NodeRequest, Refusal,
    RefusalKind, WorkerState,
};

pub(super) use self::flow::Flow;
use self::horovod::Doors;
pub(in crate::head) use self::hosts::most_on;
use self::restart::Forming;
use self::tally::Tally;
use super::{Action, Blame, Ending, GroupState, Job, Phase, Push, Seat, Seating, Site};
use crate::head::milliseconds;
use crate::membership::{
    self, Budget, End, Fact, Host, Limits, LimitsError, Membership, Process, State,
};
use crate::ranks::Registration;

/// What a job that never changes its members does without.
#[derive(Debug)]
pub(super) struct Elastic {
    membership: Membership,
    /// What membership has not heard yet.
    facts: VecDeque<Fact>,
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
    /// How often the driver was told of new nodes, and how often it has said that they hold the program.
    told: u64,
    answered: u64,
    /// Nodes of which the driver has not been told.
    fresh: Vec<NodeId>,
    /// Nodes that the driver was told of, and that wait for its program, by the number of that word.
    awaiting: VecDeque<(u64, Vec<NodeId>)>,
    /// Nodes that have not answered a reservation.
    reserving: BTreeSet<NodeId>,
    /// Nodes where a seat or a process may come further now.
    pending: BTreeSet<NodeId>,
    /// Nodes where something was given up, so that perhaps nothing is left.
    touched: BTreeSet<NodeId>,
    /// Nodes that are to be left, as somebody else than the driver says.
    drained: BTreeSet<NodeId>,
    /// Nodes that are to be left, as the driver's list of hosts says.
    unlisted: BTreeSet<NodeId>,
    /// Nodes may be over, and are to be forgotten.
    has_over: bool,
    /// The failures that have ended the group before, if it is started anew, until the driver is told.
    fell: Option<Box<kolo_wire::Fall>>,
    /// For how many workers there was room when the driver was told last that the job waits for more.
    short_of: Option<u32>,
    /// Nodes where a process was killed and its end was not seen. The job gets nothing there any more.
    unseen: BTreeSet<NodeId>,
    /// Of a group that is started anew.
    forming: Option<Forming>,
    /// Its nodes, in the order of their ranks.
    nodes: BTreeMap<NodeId, u32>,
    /// The generation for which the rendezvous was opened last.
    met: Generation,
    /// The port of torch's store in the generation that was started last.
    master_port: u16,
    /// Of a group of Horovod's elastic workers.
    doors: Doors,
}

impl Elastic {
    /// The membership of a new job, and what it asks for first.
    pub(super) fn new(
        now: Instant,
        limits: Limits,
        seed: u64,
    ) -> Result<(Self, Vec<membership::Action>), LimitsError> {
        let (membership, actions) = Membership::new(now, limits, seed)?;
        let elastic = Self {
            membership,
            facts: VecDeque::new(),
            active: None,
            members: BTreeSet::new(),
            holders: BTreeMap::new(),
            tallies: BTreeMap::new(),
            wake_at: None,
            decision: String::new(),
            offered: Generation::default(),
            told: 0,
            answered: 0,
            fresh: Vec::new(),
            awaiting: VecDeque::new(),
            reserving: BTreeSet::new(),
            pending: BTreeSet::new(),
            touched: BTreeSet::new(),
            drained: BTreeSet::new(),
            unlisted: BTreeSet::new(),
            has_over: false,
            fell: None,
            short_of: None,
            unseen: BTreeSet::new(),
            forming: None,
            nodes: BTreeMap::new(),
            met: Generation(0),
            master_port: 0,
            doors: Doors::default(),
        };
        Ok((elastic, actions))
    }

    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.wake_at
    }

    pub(super) fn active(&self) -> Option<&GenerationTable> {
        self.active.as_deref()
    }

    pub(super) fn decision(&self) -> &str {
        &self.decision
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

    /// Seats that there are, so that the number of each is below.
    pub(super) fn seats(&self) -> u32 {
        self.membership.roster().seats().len() as u32
    }

    /// How often the membership has changed.
    pub(super) fn resets(&self) -> u32 {
        self.membership.budget().resets()
    }

    /// The process is a member of the generation that was active last.
    pub(super) fn is_member(&self, process: Process) -> bool {
        self.members.contains(&process)
    }
}

impl Job {
    pub(super) fn is_elastic(&self) -> bool {
        self.elastic.is_some()
    }

    /// Membership is told later in this step.
    fn fact(&mut self, fact: Fact) {
        if let Some(elastic) = &mut self.elastic {
            elastic.facts.push_back(fact);
        }
    }

    /// The driver says that nodes hold the program.
    pub(super) fn program_is_there(&mut self) {
        self.program_ready = true;
        if let Some(elastic) = &mut self.elastic {
            elastic.answered += 1;
            let is_answered = |(told, _): &(u64, _)| *told <= elastic.answered;
            while elastic.awaiting.front().is_some_and(is_answered) {
                let nodes = elastic.awaiting.pop_front().map(|(_, nodes)| nodes);
                elastic.pending.extend(nodes.into_iter().flatten());
            }
        }
    }

    /// Another job waits for room, too.
    pub(super) fn contended(&mut self) {
        self.fact(Fact::Contended);
    }

    /// There may be room for more seats.
    pub(super) fn offered(&mut self) {
        self.fact(Fact::Offered);
    }

    /// A node is to be left.
    pub(super) fn drain(&mut self, node: NodeId, why: String) {
        self.touch(node);
        if let Some(elastic) = &mut self.elastic {
            elastic.drained.insert(node);
            elastic.unlisted.remove(&node);
        }
        self.fact(Fact::Drain { node, why });
    }

    /// The time to leave a node is over.
    pub(super) fn evict(&mut self, node: NodeId, why: &str) {
        let slots = self.part(node).map(|part| &self.parts[part].slots);
        let seats = slots
            .into_iter()
            .flatten()
            .filter_map(|slot| self.seats.get(slot));
        let there = seats.filter(|seat| seat.exit.is_none() && seat.state != WorkerState::Stopping);
        for process in there.map(Seat::process).collect::<Vec<_>>() {
            self.stop_worker(process, why.to_owned());
        }
    }

    /// A node need not be left after all.
    pub(super) fn undrain(&mut self, node: NodeId) {
        if let Some(elastic) = &mut self.elastic {
            elastic.drained.remove(&node);
        }
        self.fact(Fact::Undrain { node });
        self.check_host(node);
    }

    /// The first things to do for a new job: its seats are laid over the sites, and the head looks for room for the rest.
    pub(super) fn begin(&mut self, first: Vec<membership::Action>, sites: Vec<Site>) {
        // Members and spares: the sites have room for all of them.
        let mut wanted = Vec::new();
        for action in first {
            match action {
                membership::Action::Reserve { slots, .. } => wanted.extend(slots),
                action => self.carry_out(action),
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
        self.placed(seated, Vec::new(), "");
        let slots: Vec<Slot> = slots.collect();
        if !slots.is_empty() {
            let avoid = Vec::new();
            self.actions.push(Action::Place { slots, avoid });
        }
        self.settle();
    }

    /// Tells membership what has happened and does what it wants, until there is nothing left to do.
    pub(super) fn settle(&mut self) {
        let now = self.now;
        loop {
            let Some(elastic) = self.elastic.as_mut().filter(|_| self.ending.is_none()) else {
                return;
            };
            let is_due = elastic.wake_at.is_some_and(|at| now >= at);
            if is_due || !elastic.facts.is_empty() {
                if is_due {
                    elastic.wake_at = None;
                }
                // Facts that come together make one change.
                let facts = std::mem::take(&mut elastic.facts);
                for action in elastic.membership.step(now, facts) {
                    self.carry_out(action);
                }
                continue;
            }
            self.leave_nodes();
            self.connect();
            self.confirm();
            self.acknowledge_late();
            let is_idle = |elastic: &Elastic| elastic.facts.is_empty();
            if self.elastic.as_deref().is_none_or(is_idle) {
                break;
            }
        }
        self.close_doors();
        self.announce();
        self.tell_shortage();
        self.start_queued();
        self.forget_nodes();
        let is_whole = |elastic: &Elastic| elastic.membership.active().is_some();
        let whole = self.elastic.as_deref().is_some_and(is_whole);
        let before = self.state;
        self.state = match self.phase {
            Phase::Reserve | Phase::Prepare if self.net.is_open() => JobState::Probing,
            Phase::Reserve | Phase::Prepare => JobState::Placing,
            Phase::Boot | Phase::Publish => JobState::Starting,
            Phase::Up if whole => JobState::Healthy,
            Phase::Up => JobState::Recovering,
        };
        if (before, self.state) == (JobState::Healthy, JobState::Recovering) {
            let elastic = self.elastic.as_deref();
            let why = elastic.map(|elastic| elastic.membership.budget().idle_why());
            let why = why.unwrap_or_default().to_owned();
            self.tell_state("UNHEALTHY", why);
        }
    }

    /// Says in the log how the group is, if it may change.
    pub(super) fn tell_state(&mut self, state: &'static str, cause: String) {
        if let Some(elastic) = self.elastic.as_deref() {
            let group = GroupState {
                state,
                generation: self.generation,
                members: elastic.members.len() as u32,
                restarts: elastic.membership.budget().without_progress(),
                cause,
            };
            self.actions.push(Action::Group(group));
        }
    }

    fn carry_out(&mut self, action: membership::Action) {
        if self.ending.is_some() {
            return;
        }
        match action {
            membership::Action::Reserve { slots, avoid, .. } => {
                let avoid = avoid.iter().map(ToString::to_string).collect();
                self.actions.push(Action::Place { slots, avoid });
            }
            membership::Action::GiveBack { slots } => {
                for slot in slots {
                    self.leave_seat(slot);
                }
            }
            membership::Action::Plan(generation) => self.plan(&generation),
            membership::Action::Start { process, location } if self.is_planned() => {
                self.open_door(process, location.node);
            }
            membership::Action::Start { process, location } => self.queue(process, location.node),
            membership::Action::Stop { process, why } => self.stop_worker(process, why),
            membership::Action::Revoke {
                generation,
                lost,
                cause,
            } => {
                let generation = self.inside(generation);
                let request = NodeRequest::Revoke {
                    job: self.id,
                    generation,
                    lost,
                    cause,
                };
                self.send_to_members(generation, &request);
            }
            membership::Action::Fall {
                why,
                is_failure,
                stopped,
            } => self.group_fell(why, is_failure, stopped),
            membership::Action::Publish { generation, to } => self.publish(&generation, &to),
            membership::Action::Active(generation) => self.activate(generation.number()),
            membership::Action::Hold { generation, .. } if self.is_planned() => {
                self.give_notice(generation);
            }
            membership::Action::Hold { generation, why } => {
                self.offer(generation);
                let request = NodeRequest::Hold {
                    job: self.id,
                    generation,
                    why,
                };
                self.send_to_members(generation, &request);
            }
            membership::Action::Wake(at) => {
                if let Some(elastic) = &mut self.elastic {
                    elastic.wake_at = Some(at);
                }
            }
            membership::Action::Tell(text) => {
                // That something was ignored is no decision.
                let is_decision = !text.starts_with("ignored: ");
                if let Some(elastic) = self.elastic.as_mut().filter(|_| is_decision) {
                    elastic.decision.clone_from(&text);
                }
                self.note(text);
            }
            membership::Action::End { how, why } => self.end_of_membership(how, why),
        }
    }

    /// Asks the driver to hold between two calls. Its stream loses nothing, so that once is enough.
    fn offer(&mut self, generation: Generation) {
        if let Some(elastic) = self.elastic.as_mut()
            && elastic.offered < generation
        {
            elastic.offered = generation;
            let hold = JobEvent::Hold { generation };
            self.actions.push(Action::Tell(hold));
        }
    }

    /// Gives a generation to the nodes of these processes, unless it is on its way there.
    fn publish(&mut self, generation: &Arc<membership::Generation>, to: &[Process]) {
        let number = generation.number();
        if self
            .published
            .as_ref()
            .is_none_or(|known| known.generation != number)
        {
            let table = match self.table_of(generation) {
                Ok(table) => table,
                Err(error) => return self.fail(RefusalKind::Internal, error),
            };
            self.phase = self.phase.max(Phase::Publish);
            let starts_anew = self.starts_anew();
            let is_told = !starts_anew && !self.is_planned();
            if let Some(elastic) = self.elastic.as_mut().filter(|_| is_told) {
                let tally = Tally::new(table.members.iter().map(process_of));
                elastic.tallies.insert(number, tally);
            }
            self.published = Some(Arc::new(table));
            if starts_anew {
                self.prepare_group();
            }
        }
        if self.starts_anew() {
            return;
        }
        if self.is_planned() {
            return self.acknowledge(number, to);
        }
        let seats = to
            .iter()
            .filter_map(|process| self.seats.get(&process.slot));
        let nodes: BTreeSet<NodeId> = seats.map(|seat| seat.member.node).collect();
        for part in nodes
            .into_iter()
            .filter_map(|node| self.part(node))
            .collect::<Vec<_>>()
        {
            self.push_once(part, Push::Membership(number));
        }
    }

    /// A generation as a message: R-1 holds whatever the hosts are.
    fn table_of(&self, generation: &membership::Generation) -> Result<GenerationTable, String> {
        let mut registration = Registration::new();
        for member in generation.members() {
            let node = member.location.node;
            let part = self.part(node).map(|part| &self.parts[part].site);
            let hostname = part.map_or(&*member.location.host.0, |site| &site.hostname);
            registration
                .register(node, hostname, member.rank)
                .map_err(|error| error.to_string())?;
        }
        let ranks = registration.finalize().map_err(|error| error.to_string())?;
        let members = ranks.iter().zip(generation.members());
        Ok(GenerationTable {
            job: self.id,
            generation: generation.number(),
            members: members
                .map(|(info, member)| Member {
                    incarnation: member.process.incarnation,
                    address: member.addresses.first().copied(),
                    ..info.member(member.process.slot)
                })
                .collect(),
            cause: generation.cause().to_owned(),
            handover: if generation.needs_restore() {
                Handover::Restore
            } else if generation.needs_sync() {
                Handover::Sync
            } else {
                Handover::None
            },
        })
    }

    /// All members have taken the generation.
    fn activate(&mut self, number: Generation) {
        let Some(elastic) = &mut self.elastic else {
            return;
        };
        let Some(table) = self.published.clone() else {
            return;
        };
        elastic
            .tallies
            .retain(|generation, _| *generation >= number);
        elastic.active = Some(Arc::clone(&table));
        let members = table.members.iter().map(process_of);
        elastic.members = members.collect();
        self.generation = number;
        self.phase = Phase::Up;
        for seat in self.seats.values_mut() {
            if seat.state == WorkerState::Ready {
                seat.state = WorkerState::Spare;
            }
        }
        for member in &table.members {
            let seat = self.seats.get_mut(&member.slot);
            if let Some(seat) = seat.filter(|seat| seat.exit.is_none()) {
                seat.member = member.clone();
                seat.state = WorkerState::Ready;
            }
        }
        if !(self.starts_anew() || self.is_planned()) {
            self.fall.close();
        }
        self.tell_state("HEALTHY", table.cause.clone());
        self.let_in(&table);
        let nodes = self.placed_nodes();
        let table = Arc::unwrap_or_clone(table);
        let elastic = self.elastic.as_mut();
        let fall = elastic.and_then(|elastic| elastic.fell.take());
        self.actions
            .push(Action::Tell(JobEvent::Generation { table, nodes, fall }));
    }

    fn end_of_membership(&mut self, how: End, why: String) {
        let state = if how == End::Succeeded {
            JobState::Succeeded
        } else {
            JobState::Failed
        };
        let has_failed = how != End::Succeeded;
        let budget = self.elastic.as_deref();
        let budget = budget.map(|elastic| elastic.membership.budget());
        // Else the failure itself is told.
        let first = budget.filter(|budget| !self.fall.is_open() && budget.without_progress() == 1);
        let why = match first.and_then(Budget::cause) {
            Some(cause) if how == End::TooManyRestarts => format!("{why}: {cause}"),
            _ => why,
        };
        let refusal = has_failed.then(|| {
            let kind = if how == End::BelowMin {
                RefusalKind::Timeout
            } else {
                RefusalKind::Worker
            };
            Refusal::new(kind, why.clone())
        });
        let blame = (has_failed && self.fall.is_open()).then(|| Blame {
            message: format!("{why}; the last failure: "),
            reason: None,
        });
        self.end(Ending {
            state,
            refusal,
            reason: why,
            blame,
        });
    }

    /// A seat that a node holds, whether a process is there now or not.
    fn is_held(&self, slot: Slot, node: NodeId) -> bool {
        let elastic = self.elastic.as_deref();
        let seat = elastic.and_then(|elastic| elastic.membership.roster().seat(slot));
        let Some(seat) = seat else {
            return false;
        };
        let is_there = seat
            .location
            .as_ref()
            .is_some_and(|location| location.node == node);
        let is_empty = matches!(
            seat.state,
            State::Vacant | State::Reserving | State::Held | State::Lost
        );
        is_there && !(seat.leaving && is_empty)
    }
}

impl Seat {
    /// The last process of the seat.
    pub(super) fn process(&self) -> Process {
        process_of(&self.member)
    }
}

fn process_of(member: &Member) -> Process {
    Process {
        slot: member.slot,
        incarnation: member.incarnation,
    }
}
