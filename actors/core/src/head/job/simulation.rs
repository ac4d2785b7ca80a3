//! One job on a simulated cluster: a virtual clock, late and lost messages, crashes, refusals, and a driver that
//! does anything at any time. A failing seed is printed, and replays.

mod elastic;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use kolo_wire::ids::Incarnation;
use kolo_wire::{JobEvent, NodeEvent, NodeReply, NodeRequest, Placement};

use super::fixtures::{failure, sites, spec};
use super::*;
use crate::fence::Fence;

const JOB: JobId = JobId(9);
const LEASE: u64 = 3000;

/// splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

#[derive(Debug)]
enum Delivery {
    ToJob(Event),
    ToNode {
        node: NodeId,
        request: Box<NodeRequest>,
        /// When the asker gives up.
        until: u64,
    },
    Crash(NodeId),
    WorkerExits(NodeId, Slot, Exit),
}

#[derive(Debug, Default)]
struct Node {
    dead: bool,
    reserved: bool,
    running: BTreeSet<u32>,
}

#[expect(
    clippy::struct_excessive_bools,
    reason = "what was seen of a run, each by itself"
)]
struct World {
    seed: u64,
    random: Random,
    /// How often, in percent, something goes wrong.
    fault: u64,
    start: Instant,
    /// Milliseconds since `start`.
    now: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    waiting: BTreeMap<u64, Delivery>,
    sequence: u64,
    job: Job,
    nodes: BTreeMap<NodeId, Node>,
    asked: BTreeSet<NodeId>,
    confirmed: BTreeSet<NodeId>,
    lost: BTreeSet<NodeId>,
    over: BTreeMap<NodeId, &'static str>,
    told: Vec<JobEvent>,
    rendezvous: bool,
    finished: bool,
    clean_exits: bool,
    /// The driver may say that it has all it wanted.
    done: bool,
}

impl World {
    fn run(seed: u64) -> (JobState, Phase) {
        let mut random = Random(seed);
        let workers: Vec<u32> = (0..=random.below(4))
            .map(|_| 1 + random.below(3) as u32)
            .collect();
        let fault = [0, 1, 5, 20][random.below(4) as usize];
        let mut spec = spec(Placement::Pack {
            workers: workers.iter().sum(),
        });
        spec.rendezvous = random.percent(30);
        spec.start_timeout_ms = 1 + random.below(20_000);
        let sites = sites(&workers);
        let start = Instant::now();
        let config = JobConfig::default();
        let nodes = sites
            .iter()
            .map(|site| (site.node, Node::default()))
            .collect();
        let (job, actions) = Job::submit(start, JOB, DriverId(1), spec, sites, config).unwrap();
        let mut world = Self {
            seed,
            random,
            fault,
            start,
            now: 0,
            queue: BinaryHeap::new(),
            waiting: BTreeMap::new(),
            sequence: 0,
            job,
            nodes,
            asked: BTreeSet::new(),
            confirmed: BTreeSet::new(),
            lost: BTreeSet::new(),
            over: BTreeMap::new(),
            told: Vec::new(),
            rendezvous: false,
            finished: false,
            clean_exits: true,
            done: false,
        };
        for node in world.nodes.keys().copied().collect::<Vec<_>>() {
            if world.random.percent(world.fault) {
                let at = world.some_time();
                world.later(at, Delivery::Crash(node));
            }
        }
        if world.random.percent(world.fault) {
            let at = world.some_time();
            let event = world.end_by_someone();
            world.later(at, Delivery::ToJob(event));
        }
        // Nothing lasts for ever, whatever the driver does.
        world.later(60_000, Delivery::ToJob(Event::DriverGone));
        world.act(actions);
        while !world.finished {
            world.turn();
        }
        world.check_end();
        (world.job.state, world.job.phase)
    }

    /// Often while the job starts, which takes about 100 ms if nothing goes wrong.
    fn some_time(&mut self) -> u64 {
        let limit = [100, 1000, 40_000][self.random.below(3) as usize];
        self.random.below(limit)
    }

    fn end_by_someone(&mut self) -> Event {
        match self.random.below(4) {
            0 => Event::Driver(SubmitFrame::Stop),
            1 => {
                self.done = true;
                Event::Driver(SubmitFrame::Done)
            }
            2 => Event::DriverGone,
            _ => Event::Stop {
                reason: "operator".to_owned(),
            },
        }
    }

    fn later(&mut self, delay: u64, delivery: Delivery) {
        self.sequence += 1;
        self.queue.push(Reverse((self.now + delay, self.sequence)));
        self.waiting.insert(self.sequence, delivery);
    }

    fn clock(&self) -> Instant {
        self.start + Duration::from_millis(self.now)
    }

    fn turn(&mut self) {
        let Reverse((at, sequence)) = self.queue.pop().expect("the last event ends the job");
        assert!(at < 200_000, "seed {}: it does not end", self.seed);
        if let Some(deadline) = self.job.deadline() {
            let deadline = deadline.duration_since(self.start).as_millis() as u64;
            if deadline <= at {
                self.queue.push(Reverse((at, sequence)));
                self.now = self.now.max(deadline);
                let actions = self.job.step(self.clock(), Event::Tick);
                assert!(self.job.deadline().is_none(), "seed {}", self.seed);
                return self.act(actions);
            }
        }
        self.now = at;
        let delivery = self.waiting.remove(&sequence).unwrap();
        match delivery {
            Delivery::ToJob(event) => self.job_hears(event),
            Delivery::ToNode {
                node,
                request,
                until,
            } => self.node_hears(node, *request, until),
            Delivery::Crash(node) => {
                let state = self.nodes.get_mut(&node).unwrap();
                self.clean_exits &= state.running.is_empty();
                *state = Node {
                    dead: true,
                    ..Node::default()
                };
                let reason = "lease".to_owned();
                self.later(
                    LEASE,
                    Delivery::ToJob(Event::NodeLost {
                        node,
                        reason,
                        fence: Fence::Lease,
                    }),
                );
            }
            Delivery::WorkerExits(node, slot, exit) => self.worker_exits(node, slot, exit, false),
        }
    }

    fn job_hears(&mut self, event: Event) {
        match &event {
            Event::Replied { node, reply } => {
                self.asked.remove(node);
                if matches!(reply, Reply::Answer(NodeReply::Reserved { .. })) {
                    self.confirmed.insert(*node);
                }
            }
            Event::NodeLost { node, .. } => {
                self.lost.insert(*node);
            }
            Event::Rendezvous(Ok(_)) => self.rendezvous = true,
            _ => {}
        }
        let actions = self.job.step(self.clock(), event);
        self.act(actions);
    }

    fn delay(&mut self) -> u64 {
        if self.random.percent(self.fault) {
            self.random.below(9000)
        } else {
            self.random.below(20)
        }
    }

    fn act(&mut self, actions: Vec<Action>) {
        for action in actions {
            let seed = self.seed;
            assert!(
                !self.finished || matches!(action, Action::Note(_)),
                "seed {seed}: {action:?} after the end"
            );
            match action {
                Action::Request {
                    node,
                    request,
                    deadline,
                } => {
                    assert!(self.asked.insert(node), "seed {seed}: two requests at once");
                    assert!(!self.lost.contains(&node), "seed {seed}: asks a lost node");
                    if matches!(*request, NodeRequest::Start(_)) {
                        assert_eq!(
                            self.confirmed.len(),
                            self.nodes.len(),
                            "seed {seed}: G-2, started before all have reserved"
                        );
                    }
                    let until = self.now + deadline.as_millis() as u64;
                    let delay = self.delay().min(until - self.now);
                    self.later(
                        delay,
                        Delivery::ToNode {
                            node,
                            request,
                            until,
                        },
                    );
                }
                Action::Push { node, request } => {
                    let delay = self.delay();
                    let membership = matches!(*request, NodeRequest::Membership(_));
                    let refusal = self
                        .random
                        .percent(self.fault)
                        .then(|| Refusal::new(RefusalKind::NotFound, "gone"));
                    self.later(
                        delay,
                        Delivery::ToJob(Event::Pushed {
                            node,
                            membership,
                            pids: Vec::new(),
                            refusal,
                        }),
                    );
                }
                Action::Tell(event) => self.told(event),
                Action::OpenRendezvous(_) => {
                    let delay = self.delay();
                    let opened = if self.random.percent(self.fault) {
                        Err("no".to_owned())
                    } else {
                        Ok("10.0.0.1:1".parse().unwrap())
                    };
                    self.later(delay, Delivery::ToJob(Event::Rendezvous(opened)));
                }
                Action::Discover(..) => panic!("seed {seed}: its sites report no interfaces"),
                Action::Place { .. } | Action::GiveBack { .. } => panic!("seed {seed}: {action:?}"),
                Action::CloseRendezvous => {
                    assert!(self.rendezvous, "seed {seed}");
                    self.rendezvous = false;
                }
                Action::Free(node) => {
                    assert!(self.over.insert(node, "free").is_none(), "seed {seed}");
                    let state = &self.nodes[&node];
                    assert!(
                        !state.reserved && state.running.is_empty(),
                        "seed {seed}: {node} is not free"
                    );
                }
                Action::Abandon(node) => {
                    assert!(self.over.insert(node, "abandoned").is_none(), "seed {seed}");
                }
                Action::Finished => self.finished = true,
                Action::Note(_) => {}
            }
        }
    }

    /// What the driver does when it is told something.
    fn told(&mut self, event: JobEvent) {
        match &event {
            JobEvent::Placed { .. } => {
                assert!(self.told.is_empty());
                if !self.random.percent(self.fault) {
                    let delay = self.delay();
                    self.later(
                        delay,
                        Delivery::ToJob(Event::Driver(SubmitFrame::ProgramReady)),
                    );
                }
            }
            JobEvent::Healthy { table, .. } => {
                assert_eq!(self.told.len(), 1, "seed {}", self.seed);
                let members = table.members.clone();
                let at = self.random.below(10_000);
                if self.random.percent(50) {
                    let event = self.end_by_someone();
                    self.later(at, Delivery::ToJob(event));
                } else {
                    let well = self.random.percent(50);
                    for member in members {
                        let exit = Exit::Code(i32::from(!well && self.random.percent(50)));
                        let at = at + self.random.below(5000);
                        self.later(at, Delivery::WorkerExits(member.node, member.slot, exit));
                    }
                }
            }
            JobEvent::Generation { .. } => panic!("seed {}: {event:?}", self.seed),
            JobEvent::RankLost { .. } => {
                assert!(matches!(self.told[1], JobEvent::Healthy { .. }));
            }
            JobEvent::Ended { state, .. } => assert!(state.is_final()),
        }
        assert!(
            !matches!(self.told.last(), Some(JobEvent::Ended { .. })),
            "seed {}: news after the end",
            self.seed
        );
        self.told.push(event);
    }

    fn node_hears(&mut self, node: NodeId, request: NodeRequest, until: u64) {
        let (dead, got_lost) = (self.nodes[&node].dead, self.random.percent(self.fault));
        let reply = if dead || got_lost {
            None
        } else {
            let reply = self.node_does(node, request);
            // Done, and the answer may be lost.
            (!self.random.percent(self.fault)).then_some(reply)
        };
        let (delay, reply) = match reply {
            Some(reply) => (self.delay().min(until.saturating_sub(self.now)), reply),
            None => (
                until.saturating_sub(self.now),
                Reply::Unknown("late".to_owned()),
            ),
        };
        self.later(delay, Delivery::ToJob(Event::Replied { node, reply }));
    }

    fn node_does(&mut self, node: NodeId, request: NodeRequest) -> Reply {
        let refuses = self.random.percent(self.fault);
        let state = self.nodes.get_mut(&node).unwrap();
        match request {
            NodeRequest::Reserve { .. } if refuses => {
                Reply::Refused(Refusal::new(RefusalKind::Unplaceable, "full"))
            }
            NodeRequest::Reserve { .. } => {
                state.reserved = true;
                Reply::Answer(NodeReply::Reserved {
                    has_program: self.random.percent(50),
                    free_port: 1,
                    problem: None,
                })
            }
            NodeRequest::Start(start) => {
                assert!(state.reserved, "seed {}: start without reserve", self.seed);
                if refuses {
                    // It keeps the reservation until it is released.
                    return Reply::Refused(Refusal::new(RefusalKind::NotFound, "no program"));
                }
                state.reserved = false;
                state.running = start.slots.iter().map(|slot| slot.member.slot.0).collect();
                for slot in &start.slots {
                    self.boot(node, slot.member.slot);
                }
                Reply::Answer(NodeReply::Started { pids: Vec::new() })
            }
            NodeRequest::Release { .. } => {
                assert!(state.running.is_empty(), "seed {}", self.seed);
                state.reserved = false;
                Reply::Answer(NodeReply::Done)
            }
            NodeRequest::Stop { .. } => {
                state.reserved = false;
                for slot in state.running.clone() {
                    self.worker_exits(node, Slot(slot), Exit::Signal(15), true);
                }
                if self.random.percent(50) {
                    let delay = self.delay();
                    let event = NodeEvent::JobGone { job: JOB };
                    self.later(delay, Delivery::ToJob(Event::Node { node, event }));
                }
                Reply::Answer(NodeReply::Done)
            }
            other => panic!("{other:?}"),
        }
    }

    fn boot(&mut self, node: NodeId, slot: Slot) {
        if self.random.percent(self.fault) {
            let delay = self.delay();
            return self.later(delay, Delivery::WorkerExits(node, slot, Exit::Code(1)));
        }
        if self.random.percent(self.fault) {
            return; // It never says hello.
        }
        let delay = self.delay();
        let event = fixtures::ready(JOB, slot.0);
        self.later(delay, Delivery::ToJob(Event::Node { node, event }));
    }

    fn worker_exits(&mut self, node: NodeId, slot: Slot, exit: Exit, expected: bool) {
        if !self.nodes.get_mut(&node).unwrap().running.remove(&slot.0) {
            return;
        }
        self.clean_exits &= exit.is_success();
        let event = NodeEvent::WorkerExited {
            job: JOB,
            slot,
            failure: failure(exit),
            expected,
            incarnation: Incarnation::FIRST,
            generation: Generation(0),
        };
        let delay = self.delay();
        self.later(delay, Delivery::ToJob(Event::Node { node, event }));
    }

    fn check_end(&self) {
        let seed = self.seed;
        assert!(!self.rendezvous, "seed {seed}: the rendezvous is left open");
        let Some(JobEvent::Ended { state, refusal, .. }) = self.told.last() else {
            panic!("seed {seed}: the driver was not told the end");
        };
        assert_eq!(*state, self.job.state);
        match state {
            // A driver may be done before the head learns of a worker that failed.
            JobState::Succeeded => assert!(
                self.clean_exits || (self.done && self.job.first_failure.is_none()),
                "seed {seed}"
            ),
            JobState::Failed => assert!(refusal.is_some(), "seed {seed}: failed without a cause"),
            _ => {}
        }
        for (node, state) in &self.nodes {
            if state.dead || self.lost.contains(node) {
                continue;
            }
            assert!(
                self.over.contains_key(node),
                "seed {seed}: {node} is forgotten"
            );
            assert!(
                self.over[node] == "abandoned" || (!state.reserved && state.running.is_empty()),
                "seed {seed}: something is left on {node}"
            );
        }
    }
}

#[test]
fn g2_whatever_happens_a_job_ends_and_leaks_nothing() {
    let mut ends = BTreeMap::new();
    for seed in 0..20_000 {
        let (state, phase) = World::run(seed);
        *ends.entry(format!("{state} {phase:?}")).or_insert(0) += 1;
    }
    // The simulation reaches every end from every phase, or it would show nothing.
    for end in [
        "failed Reserve",
        "failed Prepare",
        "failed Boot",
        "failed Publish",
        "failed Up",
        "stopped Reserve",
        "stopped Prepare",
        "stopped Boot",
        "stopped Publish",
        "stopped Up",
        "succeeded Up",
    ] {
        assert!(
            ends.get(end).is_some_and(|count| *count > 3),
            "{end}: {ends:?}"
        );
    }
}
