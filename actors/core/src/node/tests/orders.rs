//! Every order of the head's wishes and of what processes do, for a job whose members come and go.

use std::collections::{BTreeMap, BTreeSet};

use kolo_wire::Kept;
use kolo_wire::ids::Incarnation;
use proptest::prelude::*;

use super::*;
use crate::node::messages::{Spawning, WorkerId};
use crate::node::testing::{start_of, table_of};

const SLOTS: u32 = 4;

#[derive(Debug, Clone)]
enum Step {
    /// The next process of each of these slots, or the last one again.
    Start(Vec<(u32, bool)>),
    Table(u64),
    Revoke(u64),
    Hold(u64),
    StopWorker(u32, u64),
    Leave,
    Stop,
    Tick(u64),
    Worker(u32, u8),
}

fn step() -> impl Strategy<Value = Step> {
    let slots = proptest::collection::vec((0..SLOTS, any::<bool>()), 1..4);
    prop_oneof![
        20 => slots.prop_map(Step::Start),
        10 => (0_u64..3).prop_map(Step::Table),
        4 => (0_u64..3).prop_map(Step::Revoke),
        4 => (0_u64..3).prop_map(Step::Hold),
        6 => (0..SLOTS, 0_u64..2).prop_map(|(slot, back)| Step::StopWorker(slot, back)),
        1 => Just(Step::Leave),
        1 => Just(Step::Stop),
        8 => (0_u64..8).prop_map(Step::Tick),
        80 => (0..SLOTS, 0_u8..9).prop_map(|(slot, kind)| Step::Worker(slot, kind)),
    ]
}

/// A process as the shell has it.
#[derive(Debug, Default)]
struct Process {
    runs: bool,
    is_killed: bool,
    /// The last table that it was given.
    table: u64,
}

/// A node with one elastic job, and all that must hold of it.
struct Bench {
    node: Node,
    /// The last process of each slot that was asked for.
    last: BTreeMap<u32, u64>,
    /// Processes that have not ended.
    live: BTreeMap<WorkerId, Process>,
    spawned: BTreeSet<WorkerId>,
    exited: BTreeSet<(Slot, Incarnation)>,
    generation: u64,
    open: BTreeSet<AskId>,
    /// The job was told to end, or the node is: a process whose end is not seen is given up.
    is_ending: bool,
    is_closing: bool,
}

impl Bench {
    fn new() -> Self {
        let mut bench = Self {
            node: node(),
            last: BTreeMap::new(),
            live: BTreeMap::new(),
            spawned: BTreeSet::new(),
            exited: BTreeSet::new(),
            generation: 0,
            open: BTreeSet::new(),
            is_ending: false,
            is_closing: false,
        };
        bench.node.registered();
        bench.node.order(reserve(JOB, 2));
        bench.node.found(Found::Here);
        bench.node.warden(STAY);
        bench
    }

    fn order(&mut self, request: NodeRequest) {
        self.is_ending |= request == stop();
        let is_start = matches!(request, NodeRequest::Start(_));
        let outputs = self.node.order(request);
        self.open.insert(AskId(self.node.asks));
        self.see(outputs);
        if is_start {
            let outputs = self.node.found(Found::Here);
            self.see(outputs);
        }
    }

    /// What the node wants must make sense.
    fn see(&mut self, outputs: Vec<Output>) {
        for output in outputs {
            match output {
                Output::Answer { ask, reply } => {
                    assert!(
                        self.open.remove(&ask),
                        "{ask:?} is answered twice: {reply:?}"
                    );
                }
                Output::Spawn(Spawning { worker, .. }) => {
                    assert!(self.spawned.insert(worker), "{worker:?} is started twice");
                    let other = self.live.keys().find(|live| live.slot == worker.slot);
                    assert_eq!(other, None, "beside {worker:?}");
                    self.live.insert(worker, Process::default());
                }
                Output::Tell(worker, message) => self.told(worker, &message),
                Output::Send { session, events } => {
                    for event in events {
                        self.said(&event);
                    }
                    let delivery = Delivery::Taken;
                    let outputs = self.node.step(Input::Delivered { session, delivery });
                    self.see(outputs);
                }
                Output::Signal(worker, Signal::Kill) => {
                    if let Some(process) = self.live.get_mut(&worker) {
                        process.is_killed = true;
                    }
                }
                Output::CloseWarden(_) => self.is_closing = true,
                _ => {}
            }
        }
        self.check_room();
    }

    fn told(&mut self, worker: WorkerId, message: &ToWorker) {
        let process = self.live.get_mut(&worker);
        let process = process.unwrap_or_else(|| panic!("{worker:?} is told {message:?}"));
        match message {
            ToWorker::Membership(table) => {
                let generation = table.generation.0;
                assert!(process.table <= generation, "{generation} comes late");
                process.table = generation;
            }
            ToWorker::RankLost { generation, .. }
            | ToWorker::Revoke { generation, .. }
            | ToWorker::Hold { generation, .. } => {
                assert_eq!(process.table, generation.0, "{message:?} without its table");
            }
            _ => {}
        }
    }

    fn said(&mut self, event: &NodeEvent) {
        if let NodeEvent::WorkerExited {
            slot, incarnation, ..
        } = event
        {
            assert!(
                self.exited.insert((*slot, *incarnation)),
                "{event:?} is said twice"
            );
        }
    }

    /// A slot holds what one worker needs as long as it has a process or is to get one. So does the reservation.
    fn check_room(&self) {
        if self.spawned.is_empty() || self.is_closing {
            return;
        }
        let total = self.node.core.total();
        let held = total.gpus - self.node.core.free().gpus;
        let live: BTreeSet<Slot> = self.live.keys().map(|worker| worker.slot).collect();
        let held = held as usize;
        let is_right = held == live.len() || self.is_ending && held < live.len();
        assert!(is_right, "{held} for {:?}", self.live);
    }

    fn event(&mut self, slot: u32, kind: u8) {
        let live = self.live.iter_mut().find(|(live, _)| live.slot.0 == slot);
        let Some((worker, process)) = live.map(|(worker, process)| (*worker, process)) else {
            return;
        };
        let generation = Generation(process.table);
        let exit = Exit::Code(1);
        let hello = FromWorker::Hello {
            protocol: LOCAL_PROTOCOL,
            pid: 100,
            registry: 1,
        };
        let said = |message| Some(WorkerEvent::Said(message));
        let event = match kind {
            0..=2 if !process.runs => {
                process.runs = true;
                Some(WorkerEvent::Spawned { pid: 100 })
            }
            1 if !process.runs => Some(WorkerEvent::SpawnFailed {
                exit,
                reason: "no".to_owned(),
            }),
            _ if !process.runs => None,
            0..=3 => said(hello),
            4 => said(FromWorker::Ready { address: None }),
            5 => said(FromWorker::Taken { generation }),
            6 => said(FromWorker::Committed {
                generation,
                commit: 1,
                kept: Kept::Made,
            }),
            7 => said(FromWorker::RequestLink {
                rank: kolo_wire::ids::Rank(0),
                generation,
                group: 0,
            }),
            _ => Some(WorkerEvent::Exited {
                exit,
                stderr_tail: Vec::new(),
            }),
        };
        let Some(event) = event else { return };
        if matches!(
            event,
            WorkerEvent::Exited { .. } | WorkerEvent::SpawnFailed { .. }
        ) {
            self.live.remove(&worker);
        }
        let outputs = self.node.of(worker, event);
        self.see(outputs);
    }

    fn step(&mut self, step: Step) {
        let generation = |back: u64| Generation(self.generation.saturating_sub(back));
        match step {
            Step::Start(wanted) => {
                let mut processes = BTreeMap::new();
                for (slot, again) in wanted {
                    let last = self.last.entry(slot).or_default();
                    *last += u64::from(!again || *last == 0);
                    processes.insert(slot, *last);
                }
                let processes: Vec<_> = processes.into_iter().collect();
                self.order(NodeRequest::Start(start_of(&processes)));
            }
            Step::Table(back) => {
                self.generation += u64::from(back == 0);
                let number = self.generation.saturating_sub(back);
                let members = self.live.keys().filter(|worker| worker.slot.0 != 3);
                let members: Vec<_> = members
                    .map(|worker| (worker.slot.0, worker.incarnation.0))
                    .collect();
                self.order(NodeRequest::Membership(table_of(number, &members).into()));
            }
            Step::Revoke(back) => self.order(NodeRequest::Revoke {
                job: JOB,
                generation: generation(back),
                lost: Vec::new(),
                cause: "x".to_owned(),
            }),
            Step::Hold(back) => self.order(NodeRequest::Hold {
                job: JOB,
                generation: generation(back),
                why: "x".to_owned(),
            }),
            Step::StopWorker(slot, back) => {
                let last = self.last.get(&slot).copied().unwrap_or_default();
                self.order(NodeRequest::StopWorker {
                    job: JOB,
                    slot: Slot(slot),
                    incarnation: Incarnation(last.saturating_sub(back)),
                    why: "x".to_owned(),
                });
            }
            Step::Leave => {
                self.is_ending = true;
                let ask = self.node.ask();
                self.open.insert(ask);
                let reason = "x".to_owned();
                let outputs = self.node.step(Input::StopAll { ask, reason });
                self.see(outputs);
            }
            Step::Stop => self.order(stop()),
            Step::Tick(seconds) => self.wait(Duration::from_secs(seconds)),
            Step::Worker(slot, kind) => self.event(slot, kind),
        }
    }

    /// Time passes, in which what was killed ends.
    fn wait(&mut self, time: Duration) {
        let live = self.live.iter();
        let killed = live.filter(|(_, process)| process.is_killed);
        let killed: Vec<WorkerId> = killed.map(|(worker, _)| *worker).collect();
        for worker in killed {
            self.end(worker);
        }
        self.node.now += time;
        let outputs = self.node.step(Input::Tick);
        self.see(outputs);
    }

    fn end(&mut self, worker: WorkerId) {
        if self.live.remove(&worker).is_some() {
            let exit = Exit::Signal(9);
            let stderr_tail = Vec::new();
            let outputs = self
                .node
                .of(worker, WorkerEvent::Exited { exit, stderr_tail });
            self.see(outputs);
        }
    }

    /// The job ends, and nothing of it is left.
    fn finish(mut self) {
        self.order(stop());
        while let Some(worker) = self.live.keys().next().copied() {
            self.end(worker);
        }
        let outputs = self.node.step(Input::Closed(STAY));
        self.see(outputs);
        assert!(self.is_closing);
        assert_eq!(self.open, BTreeSet::new());
        assert_eq!(self.node.core.free(), self.node.core.total());
        assert_eq!(self.node.core.jobs().count(), 0);
        let spawned = self.spawned.iter();
        let spawned: BTreeSet<_> = spawned
            .map(|worker| (worker.slot, worker.incarnation))
            .collect();
        assert!(spawned.is_subset(&self.exited));
    }
}

proptest! {
    #[test]
    fn every_order_keeps_processes_tables_and_room_in_order(
        steps in proptest::collection::vec(step(), 0..120)
    ) {
        let mut bench = Bench::new();
        for step in steps {
            bench.step(step);
        }
        bench.finish();
    }
}
