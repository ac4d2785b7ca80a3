//! An elastic job, step by step: its members come and go.

mod ends;
mod nodes;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kolo_wire::ids::Incarnation;
use kolo_wire::{
    GenerationTable, Handover, JobEvent, Kept, NodeEvent, NodeReply, NodeRequest, Placement,
    RankFailure, SlotStart, SubmitFrame,
};

use super::fixtures::{elastic, failure, sites, spec};
use super::tests::JOB;
use super::*;
use crate::fence::{self, Fence};

fn no_room(slots: &[Slot]) -> Event {
    Event::Placed {
        seated: Vec::new(),
        without: slots.to_vec(),
        why: "no node has room".to_owned(),
    }
}

/// A job and what it has asked for. Nodes do at once what they are told, as far as a test does not say otherwise.
struct Bed {
    job: Job,
    now: Instant,
    /// Short texts: `1:start 0.1`, `tell:generation 1`, and so on.
    log: Vec<String>,
    notes: Vec<String>,
    /// What was given to nodes last.
    tables: BTreeMap<NodeId, GenerationTable>,
    /// What the driver knows.
    told: Vec<JobEvent>,
    /// Processes that were started.
    started: Vec<(NodeId, Slot, Incarnation)>,
    /// Nodes that take a generation, and their workers with them.
    taking: bool,
    /// Answers that are to come.
    queue: VecDeque<Event>,
    /// Nodes to which something is under way.
    delivering: BTreeSet<NodeId>,
    /// A node whose reservation has ended before it is told to start.
    unreserved: Option<NodeId>,
}

impl Bed {
    /// A job of min to max on sites with so many workers, before its nodes have answered.
    fn submit(min: u32, max: u32, workers: &[u32], change: impl FnOnce(&mut JobSpec)) -> Self {
        let now = Instant::now();
        let mut spec = spec(Placement::Pack { workers: max });
        spec.elastic = Some(Box::new(elastic(min, max)));
        change(&mut spec);
        let config = JobConfig::default();
        let (job, actions) =
            Job::submit(now, JOB, DriverId(1), spec, sites(workers), config).unwrap();
        let mut bed = Self {
            job,
            now,
            log: Vec::new(),
            notes: Vec::new(),
            tables: BTreeMap::new(),
            told: Vec::new(),
            started: Vec::new(),
            taking: true,
            queue: VecDeque::new(),
            delivering: BTreeSet::new(),
            unreserved: None,
        };
        for action in actions {
            // There are no other nodes.
            if let Action::Place { slots, .. } = action {
                bed.queue.push_front(no_room(&slots));
            } else {
                bed.act(vec![action]);
            }
        }
        bed
    }

    /// A job whose first generation is active.
    fn active(min: u32, max: u32, workers: &[u32]) -> Self {
        let mut bed = Self::submit(min, max, workers, |_| ());
        bed.run();
        bed.all_ready();
        bed.wait(Duration::from_secs(2));
        assert_eq!(bed.generation(), 1, "{:?} {:?}", bed.log, bed.notes);
        bed.log.clear();
        bed.notes.clear();
        bed
    }

    fn step(&mut self, event: Event) {
        let actions = self.job.step(self.now, event);
        self.act(actions);
        self.run();
    }

    /// Gives the job the answers of its nodes and its driver.
    fn run(&mut self) {
        while let Some(mut event) = self.queue.pop_front() {
            if let Event::Replied { node, reply } = &mut event
                && matches!(reply, Reply::Answer(NodeReply::Started { .. }))
                && self.unreserved.take_if(|it| it == node).is_some()
            {
                *reply = Reply::Refused(Refusal::new(RefusalKind::NotFound, "no reservation"));
            }
            let pushed = match &event {
                Event::Pushed { node, .. } => Some(*node),
                _ => None,
            };
            let actions = self.job.step(self.now, event);
            self.delivering.retain(|node| Some(*node) != pushed);
            self.act(actions);
            if let Some(node) = pushed {
                self.deliver(node);
            }
        }
    }

    /// Time passes; the job is woken when it wants to be.
    fn wait(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(at) = self.job.deadline().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            self.step(Event::Tick);
        }
        self.now = end;
    }

    fn act(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Request { node, request, .. } => {
                    let is_other = |event: &Event| !matches!(event, Event::Pushed { node: at, .. } if *at == node);
                    self.queue.retain(is_other);
                    self.delivering.remove(&node);
                    let answer = self.order(node, *request);
                    let reply = Reply::Answer(answer);
                    self.queue.push_back(Event::Replied { node, reply });
                }
                Action::Push(node) => self.deliver(node),
                Action::Tell(event) => {
                    match &event {
                        JobEvent::Placed { .. } => self
                            .queue
                            .push_back(Event::Driver(SubmitFrame::ProgramReady)),
                        JobEvent::Generation { table, .. } => {
                            self.log
                                .push(format!("tell:generation {}", table.generation));
                        }
                        JobEvent::RankLost { failure, .. } => {
                            self.log.push(format!("tell:lost {}", failure.rank));
                        }
                        JobEvent::Ended { state, .. } => self.log.push(format!("tell:{state}")),
                        JobEvent::Healthy { .. }
                        | JobEvent::Fell { .. }
                        | JobEvent::Waits { .. } => panic!("{event:?}"),
                    }
                    self.told.push(event);
                }
                Action::Place { slots, avoid } => {
                    let slots: Vec<String> = slots.iter().map(Slot::to_string).collect();
                    self.log
                        .push(format!("place {} {avoid:?}", slots.join(" ")));
                }
                Action::GiveBack { node, workers } => {
                    self.log.push(format!("{}:back {workers}", node.0));
                }
                Action::Free(node) => self.log.push(format!("{}:free", node.0)),
                Action::Abandon(node) => self.log.push(format!("{}:abandon", node.0)),
                Action::Note(text) => self.notes.push(text),
                Action::Group(_) => {}
                Action::Finished => self.log.push("finished".to_owned()),
                Action::Discover(..)
                | Action::OpenRendezvous(_)
                | Action::CloseRendezvous
                | Action::OpenDoor(..)
                | Action::Admit(_)
                | Action::Notice(..)
                | Action::CloseDoor(_) => {
                    panic!("{action:?}")
                }
            }
        }
    }

    /// Delivers what is next, unless something is under way.
    fn deliver(&mut self, node: NodeId) {
        if self.delivering.contains(&node) {
            return;
        }
        let request = match self.job.next_push(node) {
            Some(Next::Membership) => self.job.membership(node).unwrap(),
            Some(Next::Order(request)) => *request,
            None => return,
        };
        self.delivering.insert(node);
        let answer = Ok(self.order(node, request));
        self.queue.push_back(Event::Pushed { node, answer });
    }

    fn order(&mut self, node: NodeId, request: NodeRequest) -> NodeReply {
        let at = node.0;
        match request {
            NodeRequest::Reserve { workers, .. } => {
                self.log.push(format!("{at}:reserve {workers}"));
                return NodeReply::Reserved {
                    has_program: false,
                    free_port: 1,
                    problem: None,
                };
            }
            NodeRequest::Start(start) => {
                assert!(start.is_elastic() && start.needs_data_plane);
                assert_eq!(start.env["WORLD_SIZE"], start.world_size.to_string());
                for slot in &start.slots {
                    assert!(slot.member.rank.0 < start.world_size, "{start:?}");
                }
                let name =
                    |slot: &SlotStart| format!("{}.{}", slot.member.slot, slot.member.incarnation);
                let names: Vec<_> = start.slots.iter().map(name).collect();
                self.log.push(format!("{at}:start {}", names.join(" ")));
                let members = start.slots.iter().map(|slot| &slot.member);
                self.started
                    .extend(members.map(|member| (node, member.slot, member.incarnation)));
                // One for each process, as it were.
                let pid = |slot: &SlotStart| {
                    let (slot, incarnation) = (slot.member.slot, slot.member.incarnation);
                    (slot, slot.0 * 100 + incarnation.0 as u32)
                };
                let pids = start.slots.iter().map(pid).collect();
                return NodeReply::Started { pids };
            }
            NodeRequest::Membership(table) => {
                self.log
                    .push(format!("{at}:generation {}", table.generation));
                if self.taking {
                    self.take(node, &table);
                }
                self.tables.insert(node, Arc::unwrap_or_clone(table));
            }
            NodeRequest::Revoke {
                generation, lost, ..
            } => {
                let lost: Vec<_> = lost.iter().map(Rank::to_string).collect();
                self.log
                    .push(format!("{at}:revoke {generation} {}", lost.join(" ")));
            }
            NodeRequest::Hold { generation, .. } => {
                self.log.push(format!("{at}:hold {generation}"));
            }
            NodeRequest::StopWorker {
                slot, incarnation, ..
            } => self.log.push(format!("{at}:end {slot}.{incarnation}")),
            NodeRequest::Stop { .. } => self.log.push(format!("{at}:stop")),
            NodeRequest::Release { .. } => self.log.push(format!("{at}:release")),
            other => panic!("{other:?}"),
        }
        NodeReply::Done
    }

    /// All workers of the node that were started last in their seats take the generation.
    fn take(&mut self, node: NodeId, table: &GenerationTable) {
        for (_, slot, incarnation) in self.live(node) {
            let event = NodeEvent::Taken {
                job: JOB,
                slot,
                incarnation,
                generation: table.generation,
            };
            self.queue.push_back(Event::Node { node, event });
        }
    }

    fn live(&self, node: NodeId) -> Vec<(NodeId, Slot, Incarnation)> {
        let last: BTreeMap<Slot, (NodeId, Slot, Incarnation)> = self
            .started
            .iter()
            .map(|process| (process.1, *process))
            .collect();
        last.into_values().filter(|(at, ..)| *at == node).collect()
    }

    fn report(&mut self, node: u64, event: NodeEvent) {
        let node = NodeId(node);
        self.step(Event::Node { node, event });
    }

    fn ready(&mut self, node: u64, slot: u32, incarnation: u64) {
        let event = NodeEvent::WorkerReady {
            job: JOB,
            slot: Slot(slot),
            incarnation: Incarnation(incarnation),
            address: Some(format!("10.0.0.{node}:{}", 5000 + slot).parse().unwrap()),
        };
        self.report(node, event);
    }

    fn all_ready(&mut self) {
        for (node, slot, incarnation) in self.started.clone() {
            self.ready(node.0, slot.0, incarnation.0);
        }
    }

    fn exits(&mut self, node: u64, slot: u32, incarnation: u64, exit: Exit) {
        let generation = Generation(self.generation());
        let event = NodeEvent::WorkerExited {
            job: JOB,
            slot: Slot(slot),
            incarnation: Incarnation(incarnation),
            generation,
            failure: failure(exit),
            expected: false,
        };
        self.report(node, event);
    }

    /// All members say that they have a commit, or hold at it.
    fn commit(&mut self, commit: u64, hold: bool) {
        let table = self.table().clone();
        for member in &table.members {
            let (job, slot, incarnation) = (JOB, member.slot, member.incarnation);
            let generation = table.generation;
            let event = if hold {
                NodeEvent::Holding {
                    job,
                    slot,
                    incarnation,
                    generation,
                    commit,
                    failed: None,
                }
            } else {
                NodeEvent::Committed {
                    job,
                    slot,
                    incarnation,
                    generation,
                    commit,
                    kept: Kept::Made,
                }
            };
            self.report(member.node.0, event);
        }
    }

    /// The generation that the driver knows, or 0.
    fn generation(&self) -> u64 {
        let tables = self.told.iter().rev();
        let mut tables = tables.filter_map(|event| match event {
            JobEvent::Generation { table, .. } => Some(table.generation.0),
            _ => None,
        });
        tables.next().unwrap_or(0)
    }

    fn table(&self) -> &GenerationTable {
        let mut tables = self.told.iter().rev();
        tables
            .find_map(|event| match event {
                JobEvent::Generation { table, .. } => Some(table),
                _ => None,
            })
            .expect("a generation is active")
    }

    /// `slot.incarnation` of all members, in rank order. Checks R-1.
    fn members(&self) -> Vec<String> {
        let members = &self.table().members;
        for (rank, member) in (0..).zip(members) {
            assert_eq!(member.rank, Rank(rank), "R-1");
        }
        members
            .iter()
            .map(|member| format!("{}.{}", member.slot, member.incarnation))
            .collect()
    }

    fn take_log(&mut self) -> Vec<String> {
        std::mem::take(&mut self.log)
    }

    fn place(&mut self, node: u64, slots: &[u32]) {
        let mut site = sites(&[0]).remove(0);
        site.node = NodeId(node);
        site.hostname = format!("host{node}");
        let slots = slots.iter().copied().map(Slot).collect();
        self.step(Event::Placed {
            seated: vec![Seating { site, slots }],
            without: Vec::new(),
            why: String::new(),
        });
    }

    fn ended(&self) -> (JobState, Option<Refusal>, Option<RankFailure>) {
        match self.told.last() {
            Some(JobEvent::Ended {
                state,
                refusal,
                failure,
                ..
            }) => (*state, refusal.clone(), failure.clone()),
            other => panic!("{other:?} {:?}", self.notes),
        }
    }
}

#[test]
fn the_pid_of_a_process_is_known_when_it_is_started_later() {
    let mut bed = Bed::active(1, 2, &[2]);
    bed.exits(1, 0, 1, Exit::Signal(9));
    let workers = bed.job.info(Duration::ZERO).workers;
    let of_slot = |slot| {
        let worker = workers
            .iter()
            .find(|worker| worker.member.slot == Slot(slot));
        worker.map(|worker| worker.pid)
    };
    assert_eq!(of_slot(0), Some(2), "the second process of the slot");
    assert_eq!(of_slot(1), Some(101));
}

#[test]
fn a_job_starts_with_what_there_is_room_for() {
    let mut bed = Bed::submit(2, 4, &[2, 1], |_| ());
    bed.run();
    assert_eq!(
        bed.take_log(),
        [
            "1:reserve 2",
            "2:reserve 1",
            "1:start 0.1 1.1",
            "2:start 2.1"
        ]
    );
    assert_eq!(bed.job.info(Duration::ZERO).state, JobState::Starting);
    bed.all_ready();
    // The fourth has no node, so that nobody is waited for.
    assert_eq!(
        bed.take_log(),
        ["1:generation 1", "2:generation 1", "tell:generation 1"]
    );
    assert_eq!(bed.members(), ["0.1", "1.1", "2.1"]);
    let info = bed.job.info(Duration::ZERO);
    assert_eq!(
        (info.state, info.generation),
        (JobState::Healthy, Generation(1))
    );
    let why = info.membership.unwrap();
    assert_eq!(why.cause.as_deref(), Some("the first 3 members"));
    assert_eq!(why.decision, "members: 3 of at most 4");
    assert!(bed.told.iter().any(|event| matches!(
        event,
        JobEvent::Generation { nodes, .. } if nodes[0].ranks == [Rank(0), Rank(1)]
    )));
}

#[test]
fn r2_after_a_kill_the_survivors_go_on_in_their_order() {
    let mut bed = Bed::active(2, 4, &[2, 2]);
    bed.commit(1, false);
    bed.exits(1, 0, 1, Exit::Signal(9));
    // One step: the survivors need nobody else. The seat gets its next process at the same time.
    assert_eq!(
        bed.take_log(),
        [
            "tell:lost 0",
            "1:revoke 1 0",
            "2:revoke 1 0",
            "1:generation 2",
            "2:generation 2",
            "1:start 0.2",
            "tell:generation 2",
        ]
    );
    assert_eq!(bed.members(), ["1.1", "2.1", "3.1"]);
    let table = bed.table();
    assert!(table.cause.contains("rank 0"), "{}", table.cause);
    assert_eq!(table.handover, Handover::None);
    let local: Vec<_> = table
        .members
        .iter()
        .map(|member| member.local_size)
        .collect();
    assert_eq!(local, [1, 2, 2]);
    assert_eq!(bed.job.info(Duration::ZERO).state, JobState::Healthy);
}

#[test]
fn the_next_process_of_a_seat_joins_at_a_commit() {
    let mut bed = Bed::active(2, 4, &[2, 2]);
    bed.commit(1, false);
    bed.exits(2, 3, 1, Exit::Code(3));
    assert_eq!(bed.members(), ["0.1", "1.1", "2.1"]);
    bed.take_log();
    bed.ready(2, 3, 2);
    assert_eq!(bed.take_log(), ["1:hold 2", "2:hold 2"]);
    bed.commit(2, true);
    assert_eq!(
        bed.take_log(),
        ["1:generation 3", "2:generation 3", "tell:generation 3"]
    );
    assert_eq!(bed.members(), ["0.1", "1.1", "2.1", "3.2"]);
    assert_eq!(bed.table().handover, Handover::Sync);
    assert_eq!(bed.table().members[3].address.unwrap().port(), 5003);
}

#[test]
fn a_dry_run_of_an_elastic_job_is_refused() {
    let mut bed = Bed::submit(1, 2, &[2], |_| ());
    let refusal = bed.job.run_dry().unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::Invalid);
    assert!(!bed.job.is_dry_run());
}
