//! A job that is led step by step.

use std::collections::VecDeque;

use super::*;
use crate::head::job::fixtures::{pushed, sites, spec};

pub(in crate::head::job) const JOB: JobId = JobId(5);

pub(in crate::head::job) struct Run {
    pub(in crate::head::job) job: Job,
    pub(in crate::head::job) now: Instant,
    /// All actions that nobody has taken yet.
    pub(in crate::head::job) actions: Vec<Action>,
    /// What [`Action::Push`] stands for, in order.
    pub(in crate::head::job) pushed: VecDeque<(NodeId, NodeRequest)>,
}

pub(in crate::head::job) fn submit_on(
    sites: Vec<Site>,
    change: impl FnOnce(&mut JobSpec),
) -> Result<Run, Refusal> {
    let now = Instant::now();
    let workers = sites.iter().map(|site| site.workers).sum();
    let mut spec = spec(Placement::Pack { workers });
    change(&mut spec);
    let config = JobConfig::default();
    let (job, actions) = Job::submit(now, JOB, DriverId(1), spec, sites, config)?;
    let pushed = VecDeque::new();
    Ok(Run {
        job,
        now,
        actions,
        pushed,
    })
}

pub(in crate::head::job) fn submit(workers: &[u32], change: impl FnOnce(&mut JobSpec)) -> Run {
    submit_on(sites(workers), change).unwrap()
}

impl Run {
    pub(in crate::head::job) fn step(&mut self, event: Event) {
        let mut actions = self.job.step(self.now, event);
        self.pushed.extend(pushed(&self.job, &mut actions));
        self.actions.extend(actions);
    }

    pub(in crate::head::job) fn answer(&mut self, node: u64, answer: NodeReply) {
        self.step(Event::Replied {
            node: NodeId(node),
            reply: Reply::Answer(answer),
        });
    }

    pub(in crate::head::job) fn report(&mut self, node: u64, event: NodeEvent) {
        self.step(Event::Node {
            node: NodeId(node),
            event,
        });
    }

    pub(in crate::head::job) fn reserve(&mut self, node: u64, has_program: bool) {
        self.answer(
            node,
            NodeReply::Reserved {
                has_program,
                free_port: 29_000 + node as u16,
                problem: None,
            },
        );
    }

    /// Nodes 1, 2, ... have room.
    pub(in crate::head::job) fn reserve_all(&mut self, nodes: u64, has_program: bool) {
        for node in 1..=nodes {
            self.reserve(node, has_program);
        }
    }

    /// Nodes 1, 2, ... have done what they were asked last.
    pub(in crate::head::job) fn all_done(&mut self, nodes: u64) {
        for node in 1..=nodes {
            self.answer(node, NodeReply::Done);
        }
    }

    pub(in crate::head::job) fn start(&mut self, node: u64) {
        self.answer(node, NodeReply::Started { pids: Vec::new() });
    }

    /// The workers of a node run, each with its pid.
    pub(in crate::head::job) fn started(&mut self, node: u64, pids: &[(u32, u32)]) {
        let pids = pids.iter().map(|(slot, pid)| (Slot(*slot), *pid)).collect();
        self.answer(node, NodeReply::Started { pids });
    }

    /// A process of an elastic job has ended.
    pub(in crate::head::job) fn ends(
        &mut self,
        node: u64,
        slot: u32,
        incarnation: u64,
        exit: Exit,
        expected: bool,
    ) {
        self.fails(node, slot, incarnation, failure(exit), expected);
    }

    pub(in crate::head::job) fn fails(
        &mut self,
        node: u64,
        slot: u32,
        incarnation: u64,
        failure: RankFailure,
        expected: bool,
    ) {
        let event = NodeEvent::WorkerExited {
            job: JOB,
            slot: Slot(slot),
            failure: RankFailure {
                pid: 40 + slot,
                ..failure
            },
            expected,
            incarnation: Incarnation(incarnation),
            generation: Generation(incarnation),
        };
        self.report(node, event);
    }

    /// The requests to start workers since the last call, each with its node.
    pub(in crate::head::job) fn starts(&mut self) -> Vec<(u64, StartWorkers)> {
        let taken = std::mem::take(&mut self.actions);
        let requests = taken.into_iter().filter_map(|action| match action {
            Action::Request { node, request, .. } => Some((node, *request)),
            _ => None,
        });
        let all = requests.chain(std::mem::take(&mut self.pushed));
        let starts = all.filter_map(|(node, request)| match request {
            NodeRequest::Start(start) => Some((node.0, start)),
            _ => None,
        });
        starts.collect()
    }

    /// A node has taken what was pushed to it.
    pub(in crate::head::job) fn taken(&mut self, node: u64) {
        self.step(Event::Pushed {
            node: NodeId(node),
            answer: Ok(NodeReply::Done),
        });
    }

    /// Everything that was asked for since the last call, as short text: `1:reserve`, `tell:placed`.
    pub(in crate::head::job) fn asked(&mut self) -> Vec<String> {
        let text = |node: &NodeId, request: &NodeRequest| {
            let what = match request {
                NodeRequest::Reserve { .. } => "reserve",
                NodeRequest::Release { .. } => "release",
                NodeRequest::Start(_) => "start",
                NodeRequest::Membership(_) => "membership",
                NodeRequest::RankLost { .. } => "lost",
                NodeRequest::Stop {
                    interrupt: true, ..
                } => "interrupt",
                NodeRequest::Stop { .. } => "stop",
                NodeRequest::Kill { .. } => "kill",
                _ => "something else",
            };
            format!("{}:{what}", node.0)
        };
        std::mem::take(&mut self.actions)
            .iter()
            .filter_map(|action| {
                Some(match action {
                    Action::Request { node, request, .. } => text(node, request),
                    Action::Push(_) => {
                        let (node, request) = self.pushed.pop_front().unwrap();
                        text(&node, &request)
                    }
                    Action::Tell(JobEvent::Placed { .. }) => "tell:placed".to_owned(),
                    Action::Tell(JobEvent::Healthy { .. }) => "tell:healthy".to_owned(),
                    Action::Tell(JobEvent::Generation { table, .. }) => {
                        format!("tell:generation {}", table.generation)
                    }
                    Action::Tell(JobEvent::RankLost { failure, .. }) => {
                        format!("tell:lost {}", failure.rank)
                    }
                    Action::Tell(JobEvent::Ended { state, .. }) => format!("tell:{state}"),
                    Action::OpenRendezvous(members) => format!("open {}", members.len()),
                    Action::Discover(_) => "discover".to_owned(),
                    Action::CloseRendezvous => "close".to_owned(),
                    Action::Free(node) => format!("{}:free", node.0),
                    Action::Abandon(node) => format!("{}:abandon", node.0),
                    Action::Finished => "finished".to_owned(),
                    Action::Place { .. } | Action::GiveBack { .. } => panic!("{action:?}"),
                    Action::OpenDoor(process, ..) => format!("open door {}", process.slot),
                    Action::CloseDoor(process) => format!("close door {}", process.slot),
                    Action::Admit(table) => format!("admit {}", table.generation),
                    Action::Notice(process, number) => {
                        format!("notice {number} to {}", process.slot)
                    }
                    Action::Tell(JobEvent::Hold { .. }) => "tell:hold".to_owned(),
                    Action::Tell(JobEvent::Fell { .. }) => "tell:fell".to_owned(),
                    Action::Tell(JobEvent::Waits { .. }) => "tell:waits".to_owned(),
                    Action::Note(_) | Action::Group(_) => return None,
                })
            })
            .collect()
    }

    /// The last event for the driver.
    pub(in crate::head::job) fn ended(&self) -> (JobState, Option<Refusal>, Option<RankFailure>) {
        self.actions
            .iter()
            .find_map(|action| match action {
                Action::Tell(JobEvent::Ended {
                    state,
                    refusal,
                    failure,
                    ..
                }) => Some((*state, refusal.clone(), failure.clone())),
                _ => None,
            })
            .expect("the job has ended")
    }
}

/// Two nodes with two workers each, healthy.
pub(in crate::head::job) fn healthy() -> Run {
    let mut run = submit(&[2, 2], |_| ());
    run.reserve_all(2, true);
    run.start(1);
    run.start(2);
    for slot in 0..4 {
        run.report(1 + u64::from(slot) / 2, ready(JOB, slot));
    }
    run.taken(1);
    run.taken(2);
    assert_eq!(run.asked().last().unwrap(), "tell:healthy");
    run
}
