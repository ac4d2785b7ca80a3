//! The agent of a job that is started anew at each change: its workers here are one group, and end as one.
//!
//! The head is the authority: which group is the next, who is in it, and how many restarts are left. Its words are this agent's
//! rendezvous. One thing the agent knows first: a group of which a worker has failed is over, whatever comes next. So the other
//! workers here are stopped at once, also while the head is away.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Instant;

use kolo_wire::ids::{Incarnation, JobId, Slot};
use kolo_wire::{Exit, RankFailure, StartWorkers};

use super::entry::{Entry, Slots};
use super::{MAX_WAIT, SlotState};
use crate::agent::{
    Action, AgentCore, Barrier, ByRank, Departure, Event, MapStore, MonitorResult, Rendezvous,
    RendezvousError, RendezvousHandler, RoleInstance, SpecError, Store, WorkerFailure, WorkerGroup,
    WorkerRanks, WorkerSpec, WorkerState,
};
use crate::node::messages::Output;

/// A process of a group, as the head names it.
type Process = (Slot, Incarnation);

/// The head's words about the groups of a job, as a rendezvous. The node looks for answers after each event, so that nobody is woken.
#[derive(Debug, Default)]
pub(super) struct HeadRendezvous {
    /// A group that the head has published, until the agent joins it.
    next: Option<Rendezvous>,
    /// The head, or this node, ends a worker of the present group: all of it is to end.
    is_over: bool,
    /// Restarts that the job has used up, by the last word of the head.
    restarts: u32,
}

impl HeadRendezvous {
    fn has_news(&self) -> bool {
        self.is_over || self.next.is_some()
    }
}

impl RendezvousHandler for HeadRendezvous {
    fn wake_with(&mut self, _: Waker) {}

    fn next_rendezvous(&mut self, _: &RoleInstance) -> Poll<Result<Rendezvous, RendezvousError>> {
        self.is_over = false;
        self.next
            .take()
            .map_or(Poll::Pending, |group| Poll::Ready(Ok(group)))
    }

    fn num_nodes_waiting(&mut self) -> u32 {
        u32::from(self.has_news())
    }

    fn restarts(&self) -> u32 {
        self.restarts
    }

    /// The head counts: it publishes another group and says the number, or ends the job.
    fn spend_restart(&mut self, _: u32) -> bool {
        self.restarts += 1;
        true
    }

    /// The head ends the job when all workers have returned.
    fn exit_barrier(&mut self) -> Poll<Result<Barrier, RendezvousError>> {
        if self.next.is_some() {
            return Poll::Ready(Ok(Barrier::Again));
        }
        self.is_over = false;
        Poll::Pending
    }

    fn shutdown(&mut self, _: Departure) {}
}

/// The agent, and the processes of its group.
#[derive(Debug)]
pub(super) struct NodeAgent {
    core: AgentCore<HeadRendezvous>,
    /// The last action of the agent, whose end it waits for.
    awaits: Action,
    members: Vec<Process>,
    /// The processes of the group that is published and not joined.
    next: Vec<Process>,
    /// How processes of both have ended, and whether they were to end.
    exits: BTreeMap<Process, (Exit, bool)>,
    /// Why the group is over, for the reports of the others' exits.
    why: String,
}

impl NodeAgent {
    fn new(now: Instant, start: &StartWorkers) -> Option<Self> {
        let program = &start.installed.as_ref()?.program;
        let mut spec =
            WorkerSpec::new(program, start.slots.len() as u32, HeadRendezvous::default());
        spec.arguments.clone_from(&start.args);
        spec.max_restarts = number(start.env.get("TORCHELASTIC_MAX_RESTARTS"));
        // The head has limits of its own.
        (spec.rendezvous_timeout, spec.exit_barrier_timeout) = (MAX_WAIT, MAX_WAIT);
        let usual = spec.role.clone();
        if let Some(role) = start.user_env.get("ROLE_NAME") {
            spec.role.clone_from(role);
        }
        // Workers may have any.
        if let Err(SpecError::Role { .. }) = spec.check() {
            spec.role = usual;
        }
        let mut core = AgentCore::new(now, spec).ok()?;
        let awaits = core.step(now, Event::Begin);
        Some(Self {
            core,
            awaits,
            members: Vec::new(),
            next: Vec::new(),
            exits: BTreeMap::new(),
            why: String::new(),
        })
    }

    /// The workers here, as torchelastic's agents see them: [`WorkerState::Init`] before the first start, [`WorkerState::Stopped`]
    /// between two groups, [`WorkerState::Unknown`] after an end that nobody saw.
    pub(super) fn group(&self) -> &WorkerGroup<HeadRendezvous> {
        self.core.group()
    }

    fn is_over(&self) -> bool {
        matches!(self.awaits, Action::Finish(_))
    }

    /// The group of the agent is started or runs.
    fn runs(&self) -> bool {
        matches!(self.awaits, Action::Start | Action::Monitor { .. })
    }

    /// The head has published a group, whose processes are started.
    pub(super) fn publish(agent: &mut Option<Self>, now: Instant, start: &StartWorkers) {
        let is_known = |agent: &Self| agent.group().round >= start.generation.0;
        if !start.starts_anew() || agent.as_ref().is_some_and(is_known) {
            return;
        }
        // An agent that has lost track of its workers has ended. This is another one.
        agent.take_if(|agent| agent.is_over());
        if agent.is_none() {
            *agent = Self::new(now, start);
        }
        if let Some(agent) = agent {
            agent.comes(start);
        }
    }

    /// The next group is published.
    fn comes(&mut self, start: &StartWorkers) {
        let mut slots: Vec<_> = start.slots.iter().collect();
        slots.sort_by_key(|slot| slot.member.local_rank);
        let workers = slots.iter().map(|slot| WorkerRanks {
            global_rank: slot.member.rank.0,
            role_rank: slot
                .env
                .get("ROLE_RANK")
                .map_or(slot.member.rank.0, |rank| number(Some(rank))),
            world_size: start.world_size,
            role_world_size: start.world_size,
        });
        let store = MapStore::default();
        for name in ["MASTER_ADDR", "MASTER_PORT"] {
            let missing = || if name == "MASTER_PORT" { "0" } else { "" }.to_owned();
            let value = start.env.get(name).cloned().unwrap_or_else(missing);
            store.set(name, value.into_bytes());
        }
        let restarts = number(start.env.get("TORCHELASTIC_RESTART_COUNT"));
        self.next = slots
            .iter()
            .map(|slot| (slot.member.slot, slot.member.incarnation))
            .collect();
        let head = self.core.handler();
        head.restarts = restarts;
        head.next = Some(Rendezvous {
            round: start.generation.0,
            restarts,
            group_rank: number(slots.first().and_then(|slot| slot.env.get("GROUP_RANK"))),
            group_world_size: number(start.env.get("GROUP_WORLD_SIZE")),
            workers: workers.collect(),
            store: Arc::new(store),
        });
    }

    /// How the workers of the group are.
    fn look(&self) -> MonitorResult {
        let mut failures = ByRank::new();
        let mut returned = 0;
        for (process, worker) in self.members.iter().zip(&self.core.group().workers) {
            match self.exits.get(process) {
                Some((Exit::Unknown, _)) => return MonitorResult::of(WorkerState::Unknown),
                None | Some((_, true)) => {}
                Some((exit, false)) if exit.is_success() => returned += 1,
                Some((exit, false)) => {
                    let rank = worker
                        .ranks
                        .map_or(worker.local_rank, |ranks| ranks.global_rank);
                    let failure = WorkerFailure {
                        local_rank: worker.local_rank,
                        id: worker.id.clone(),
                        exit: *exit,
                        message: self.why.clone(),
                    };
                    failures.insert(rank, failure);
                }
            }
        }
        if !failures.is_empty() {
            MonitorResult::failed(failures)
        } else if returned == self.members.len() {
            MonitorResult::of(WorkerState::Succeeded)
        } else {
            MonitorResult::of(WorkerState::Healthy)
        }
    }

    /// A worker of the group is to end, so that the group is over. False if there is no group that runs.
    pub(super) fn ends_group(&mut self, process: Process, why: &str) -> bool {
        let ends = self.runs() && self.members.contains(&process);
        if ends {
            why.clone_into(&mut self.why);
            self.core.handler().is_over = true;
        }
        ends
    }

    /// A worker has ended. `expected`: it was to end.
    pub(super) fn has_ended(&mut self, process: Process, failure: &RankFailure, expected: bool) {
        let is_member = self.members.contains(&process);
        if !is_member && !self.next.contains(&process) {
            return;
        }
        self.exits.insert(process, (failure.exit, expected));
        if is_member && self.runs() && (expected || !failure.exit.is_success()) {
            self.why = format!("rank {} has ended: {}", failure.rank, failure.exit);
            // One that was told to end is no failure, but the group is over all the same.
            self.core.handler().is_over |= expected;
        }
    }

    /// The job ends here.
    pub(super) fn end(&mut self, now: Instant, reason: &str) {
        if !self.is_over() {
            reason.clone_into(&mut self.why);
            self.awaits = self.core.step(now, Event::End(reason.to_owned()));
        }
    }

    /// Hears what it waits for, if that has come. The processes that are to be stopped then, and why.
    pub(super) fn attend(&mut self, now: Instant, slots: &Slots) -> Option<(Vec<Process>, String)> {
        while let Some(event) = self.event(slots) {
            self.awaits = self.core.step(now, event);
            match self.awaits {
                // They are started already: each when the older process of its slot has ended.
                Action::Start => {
                    self.members = std::mem::take(&mut self.next);
                    let members = &self.members;
                    self.exits.retain(|process, _| members.contains(process));
                }
                Action::Stop => return Some((self.members.clone(), self.why.clone())),
                _ => {}
            }
        }
        None
    }

    /// What it has measured and said.
    pub(super) fn said(&mut self, job: JobId) -> Option<Output> {
        let (metrics, log) = (self.core.take_metrics(), self.core.take_log());
        let is_news = !(metrics.is_empty() && log.is_empty());
        is_news.then_some(Output::Agent { job, metrics, log })
    }

    /// The end of what the agent waits for, if it has come.
    fn event(&self, slots: &Slots) -> Option<Event> {
        let head = &self.group().spec.rendezvous;
        let mut entries = self.members.iter().filter_map(|(slot, incarnation)| {
            let entry = slots.get(slot);
            entry.filter(|entry| entry.worker.incarnation == *incarnation)
        });
        match &self.awaits {
            Action::Wait { .. } => head.has_news().then_some(Event::Woken),
            Action::Start => {
                let starts = |entry: &Entry| entry.state == SlotState::Spawning;
                let is_waited_for = self.exits.is_empty() && !head.has_news();
                let ids = (0..).zip(entries.clone().map(|entry| entry.pid.to_string()));
                let ids = ids.collect();
                (!(is_waited_for && entries.any(starts))).then_some(Event::Started(Ok(ids)))
            }
            Action::Monitor { .. } => {
                let result = self.look();
                let is_news = result.state != WorkerState::Healthy || head.has_news();
                is_news.then_some(Event::Monitored(result))
            }
            Action::Stop => {
                let is_lost = |process: &&Process| {
                    matches!(self.exits.get(process), Some((Exit::Unknown, _)))
                };
                let lost = self.members.iter().find(is_lost);
                let result = match lost {
                    Some((slot, _)) => Err(format!("nobody saw the end of slot {slot}'s process")),
                    None => Ok(()),
                };
                (!entries.any(Entry::is_present)).then_some(Event::Stopped(result))
            }
            Action::FindAddress | Action::Finish(_) => None,
        }
    }
}

fn number(text: Option<&String>) -> u32 {
    text.and_then(|text| text.parse().ok()).unwrap_or_default()
}
