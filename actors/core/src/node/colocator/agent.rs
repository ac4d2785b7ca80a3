//! The agent of a job that is started anew at each change: its workers here are one group, and end as one.
//!
//! The head is the authority: which group is the next, who is in it, and how many restarts are left. Its words are this agent's
//! rendezvous. One thing the agent knows first: a group of which a worker has failed is over, whatever comes next. So the other
//! workers here are stopped at once, also while the head is away.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Instant;

use kolo_wire::ids::{Incarnation, Slot};
use kolo_wire::{Exit, RankFailure, StartWorkers};

use super::{Colocator, Entry, MAX_WAIT, SlotState};
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
pub struct HeadRendezvous {
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

    fn is_over(&self) -> bool {
        matches!(self.awaits, Action::Finish(_))
    }

    /// The head has published a group.
    fn publish(&mut self, start: &StartWorkers) {
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
}

fn number(text: Option<&String>) -> u32 {
    text.and_then(|text| text.parse().ok()).unwrap_or_default()
}

impl Colocator {
    /// The workers here of a job that is started anew at each change, as torchelastic's agents see them: [`WorkerState::Init`]
    /// before the first start, [`WorkerState::Stopped`] between two groups, [`WorkerState::Unknown`] after an end that nobody saw.
    #[must_use]
    pub fn worker_group(&self) -> Option<&WorkerGroup<HeadRendezvous>> {
        self.agent.as_ref().map(|agent| agent.core.group())
    }

    /// The head has published a group, whose processes are started.
    pub(super) fn publish(&mut self, now: Instant, start: &StartWorkers) {
        let group = self.worker_group();
        if !start.starts_anew() || group.is_some_and(|group| group.round >= start.generation.0) {
            return;
        }
        // An agent that has lost track of its workers has ended. This is another one.
        self.agent.take_if(|agent| agent.is_over());
        if self.agent.is_none() {
            self.agent = NodeAgent::new(now, start);
        }
        if let Some(agent) = &mut self.agent {
            agent.publish(start);
        }
    }

    /// A worker of the group is to end, so that the group is over. False if there is no group that runs.
    pub(super) fn ends_group(&mut self, process: Process, why: &str) -> bool {
        let Some(agent) = &mut self.agent else {
            return false;
        };
        let runs = matches!(agent.awaits, Action::Start | Action::Monitor { .. });
        let ends = runs && agent.members.contains(&process);
        if ends {
            why.clone_into(&mut agent.why);
            agent.core.handler().is_over = true;
        }
        ends
    }

    /// A worker has ended. `expected`: it was to end.
    pub(super) fn has_ended(&mut self, process: Process, failure: &RankFailure, expected: bool) {
        let Some(agent) = &mut self.agent else {
            return;
        };
        let is_member = agent.members.contains(&process);
        if !is_member && !agent.next.contains(&process) {
            return;
        }
        agent.exits.insert(process, (failure.exit, expected));
        let runs = matches!(agent.awaits, Action::Start | Action::Monitor { .. });
        if is_member && runs && (expected || !failure.exit.is_success()) {
            agent.why = format!("rank {} has ended: {}", failure.rank, failure.exit);
            // One that was told to end is no failure, but the group is over all the same.
            agent.core.handler().is_over |= expected;
        }
    }

    /// The job ends here.
    pub(super) fn end_agent(&mut self, now: Instant, reason: &str) {
        if let Some(agent) = self.agent.as_mut().filter(|agent| !agent.is_over()) {
            reason.clone_into(&mut agent.why);
            agent.awaits = agent.core.step(now, Event::End(reason.to_owned()));
        }
    }

    /// Tells the agent what it waits for, and does what it wants.
    pub(super) fn attend(&mut self, now: Instant, outputs: &mut Vec<Output>) {
        while let Some(event) = self.agent_event()
            && let Some(agent) = &mut self.agent
        {
            agent.awaits = agent.core.step(now, event);
            match agent.awaits {
                // They are started already: each when the older process of its slot has ended.
                Action::Start => {
                    agent.members = std::mem::take(&mut agent.next);
                    let members = &agent.members;
                    agent.exits.retain(|process, _| members.contains(process));
                }
                Action::Stop => self.stop_group(now, outputs),
                _ => {}
            }
        }
        if let Some(agent) = &mut self.agent {
            let (metrics, log) = (agent.core.take_metrics(), agent.core.take_log());
            if !(metrics.is_empty() && log.is_empty()) {
                let job = self.job;
                outputs.push(Output::Agent { job, metrics, log });
            }
        }
    }

    /// The end of what the agent waits for, if it has come.
    fn agent_event(&self) -> Option<Event> {
        let agent = self.agent.as_ref()?;
        let head = &agent.core.group().spec.rendezvous;
        let entries = agent.members.iter().filter_map(|(slot, incarnation)| {
            let entry = self.slots.get(slot);
            entry.filter(|entry| entry.worker.incarnation == *incarnation)
        });
        match &agent.awaits {
            Action::Wait { .. } => head.has_news().then_some(Event::Woken),
            Action::Start => {
                let starts = |entry: &Entry| entry.state == SlotState::Spawning;
                let is_waited_for = agent.exits.is_empty() && !head.has_news();
                let ids = (0..).zip(entries.clone().map(|entry| entry.pid.to_string()));
                let ids = ids.collect();
                (!(is_waited_for && entries.clone().any(starts))).then_some(Event::Started(Ok(ids)))
            }
            Action::Monitor { .. } => {
                let result = agent.look();
                let is_news = result.state != WorkerState::Healthy || head.has_news();
                is_news.then_some(Event::Monitored(result))
            }
            Action::Stop => {
                let is_lost = |process: &&Process| {
                    matches!(agent.exits.get(process), Some((Exit::Unknown, _)))
                };
                let lost = agent.members.iter().find(is_lost);
                let result = match lost {
                    Some((slot, _)) => Err(format!("nobody saw the end of slot {slot}'s process")),
                    None => Ok(()),
                };
                (!entries.clone().any(Entry::is_present)).then_some(Event::Stopped(result))
            }
            Action::FindAddress | Action::Finish(_) => None,
        }
    }

    fn stop_group(&mut self, now: Instant, outputs: &mut Vec<Output>) {
        let Some(agent) = &self.agent else {
            return;
        };
        let (members, why) = (agent.members.clone(), agent.why.clone());
        for (slot, incarnation) in members {
            let entry = self.slots.get(&slot);
            if entry.is_some_and(|entry| entry.worker.incarnation == incarnation) {
                self.stop_process(now, slot, &why, outputs);
                self.press(now, slot, outputs);
            }
        }
    }
}
