//! One elastic job on a simulated cluster. First everything goes wrong, then everything works again, and the job must be
//! whole and serve. One seed gives the cluster, the job and the faults.

mod checks;
mod orders;

use std::collections::VecDeque;

use kolo_wire::ids::Incarnation;
use kolo_wire::{Elastic, GenerationTable, Kept, SubmitFrame};

use super::*;
use crate::head::job::fixtures::elastic;

/// Faults happen before, in milliseconds.
const HEAL: u64 = 30_000;
/// The group must be as large as it can be, in milliseconds.
const SERVE: u64 = 120_000;

type Name = (Slot, Incarnation);

#[derive(Debug)]
enum What {
    ToJob(Event),
    Request(NodeId, Box<NodeRequest>, u64),
    /// The first of the node's outbox arrives there.
    Pushed(NodeId, u64),
    Ready(NodeId, Name),
    Exit(NodeId, Name, Exit),
    Commit,
    /// Any worker dies.
    Kill,
    Crash(NodeId),
    /// Nothing passes between head and node, which ends its workers in the end.
    Cut(NodeId),
    Back(NodeId),
    Drain(NodeId),
    Place(Vec<Slot>, Vec<String>),
}

/// A node, with its workers and the generation that each has taken.
#[derive(Debug, Default)]
struct Machine {
    seats: u32,
    booked: u32,
    is_away: bool,
    is_draining: bool,
    is_reserved: bool,
    workers: BTreeMap<Name, u64>,
    outbox: VecDeque<NodeRequest>,
    /// Counts up when the outbox is dropped, or the machine is another one.
    life: u64,
    /// Events arrive in order.
    said: u64,
}

struct Cluster {
    seed: u64,
    random: Random,
    fault: u64,
    start: Instant,
    now: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    waiting: BTreeMap<u64, What>,
    sequence: u64,
    job: Job,
    min: u32,
    max: u32,
    machines: BTreeMap<NodeId, Machine>,
    /// The last generation that each process took, those that have ended included.
    taken: BTreeMap<Name, u64>,
    tables: Vec<GenerationTable>,
    commits: u64,
    asked: BTreeSet<NodeId>,
    ended: Option<JobState>,
    finished: bool,
}

impl Cluster {
    fn run(seed: u64) -> Self {
        let mut random = Random(seed);
        let seats: Vec<u32> = (0..2 + random.below(4))
            .map(|_| 1 + random.below(3) as u32)
            .collect();
        let all: u32 = seats.iter().sum();
        let max = 1 + random.below(u64::from(all)) as u32;
        let min = 1 + random.below(u64::from(max)) as u32;
        let fault = [0, 2, 10, 30][random.below(4) as usize];
        let mut spec = spec(Placement::Pack { workers: max });
        spec.elastic = Some(Box::new(Elastic {
            spares: random.below(3) as u32,
            restarts_without_progress: [3, 1000][random.below(2) as usize],
            join_window_ms: random.below(2000),
            ack_timeout_ms: 5000,
            ..elastic(min, max)
        }));
        let mut left = max;
        let first: Vec<u32> = seats
            .iter()
            .map(|seats| {
                let workers = left.min(*seats);
                left -= workers;
                workers
            })
            .collect();
        let used: Vec<u32> = first
            .iter()
            .copied()
            .take_while(|workers| *workers > 0)
            .collect();
        let machines = (1..).map(NodeId).zip(&seats).zip(&first);
        let machines = machines
            .map(|((node, seats), booked)| {
                let machine = Machine {
                    seats: *seats,
                    booked: *booked,
                    ..Machine::default()
                };
                (node, machine)
            })
            .collect();
        let start = Instant::now();
        let config = JobConfig::default();
        let sites = sites(&used);
        let (job, actions) = Job::submit(start, JOB, DriverId(1), spec, sites, config).unwrap();
        let mut cluster = Self {
            seed,
            random,
            fault,
            start,
            now: 0,
            queue: BinaryHeap::new(),
            waiting: BTreeMap::new(),
            sequence: 0,
            job,
            min,
            max,
            machines,
            taken: BTreeMap::new(),
            tables: Vec::new(),
            commits: 0,
            asked: BTreeSet::new(),
            ended: None,
            finished: false,
        };
        cluster.plan_faults();
        cluster.act(actions);
        while !cluster.finished && cluster.now < SERVE {
            cluster.turn();
        }
        if !cluster.finished {
            cluster.check_service();
            cluster.hear(Event::Driver(SubmitFrame::Done));
            while !cluster.finished {
                cluster.turn();
            }
            assert_eq!(cluster.ended, Some(JobState::Succeeded), "seed {seed}");
        }
        for (node, machine) in &cluster.machines {
            assert!(
                machine.workers.is_empty() && !machine.is_reserved || machine.is_away,
                "seed {seed}: something is left on {node}: {machine:?}"
            );
        }
        cluster
    }

    fn plan_faults(&mut self) {
        for node in self.machines.keys().copied().collect::<Vec<_>>() {
            if !self.random.percent(self.fault * 2) {
                continue;
            }
            let at = self.random.below(HEAL);
            let fault = match self.random.below(3) {
                0 => What::Crash(node),
                1 => What::Cut(node),
                _ => What::Drain(node),
            };
            self.later(at, fault);
            self.later(HEAL + 15_000, What::Back(node));
        }
        for _ in 0..self.fault {
            let at = self.random.below(HEAL);
            self.later(at, What::Kill);
        }
        for at in 0..=SERVE / 500 {
            self.later(at * 500, What::Commit);
        }
    }

    fn later(&mut self, delay: u64, what: What) {
        self.sequence += 1;
        self.queue.push(Reverse((self.now + delay, self.sequence)));
        self.waiting.insert(self.sequence, what);
    }

    fn has_fault(&mut self) -> bool {
        self.now < HEAL && self.random.percent(self.fault)
    }

    fn delay(&mut self) -> u64 {
        if self.has_fault() {
            self.random.below(7000)
        } else {
            self.random.below(20)
        }
    }

    /// A node says something; its events arrive in order.
    fn say(&mut self, node: NodeId, event: NodeEvent) {
        let delay = self.delay();
        let now = self.now;
        let machine = self.machines.get_mut(&node).unwrap();
        if machine.is_away {
            return;
        }
        machine.said = machine.said.max(now + delay);
        let delay = machine.said - now;
        self.later(delay, What::ToJob(Event::Node { node, event }));
    }

    fn turn(&mut self) {
        let next = self.queue.peek().map(|Reverse(next)| *next);
        if let Some(deadline) = self.job.deadline() {
            let deadline = deadline.saturating_duration_since(self.start);
            let deadline = deadline.as_nanos().div_ceil(1_000_000) as u64;
            if next.is_none_or(|(at, _)| deadline <= at) {
                self.now = self.now.max(deadline);
                return self.hear(Event::Tick);
            }
        }
        let Some((at, sequence)) = next else {
            panic!("seed {}: nothing more happens", self.seed);
        };
        assert!(at < SERVE + 100_000, "seed {}: it does not end", self.seed);
        self.queue.pop();
        self.now = at;
        match self.waiting.remove(&sequence).unwrap() {
            What::ToJob(event) => {
                if let Event::Replied { node, .. } = &event {
                    self.asked.remove(node);
                }
                if let Event::Node { node, .. } = &event
                    && self.machines[node].is_away
                {
                    return;
                }
                self.hear(event);
            }
            What::Request(node, request, until) => self.request(node, *request, until),
            What::Pushed(node, life) => self.pushed(node, life),
            What::Ready(node, (slot, incarnation)) => {
                if self.machines[&node]
                    .workers
                    .contains_key(&(slot, incarnation))
                {
                    let address = Some("10.0.0.9:5000".parse().unwrap());
                    let job = JOB;
                    self.say(
                        node,
                        NodeEvent::WorkerReady {
                            job,
                            slot,
                            incarnation,
                            address,
                        },
                    );
                }
            }
            What::Exit(node, name, exit) => self.exit(node, name, exit, false),
            What::Commit => self.commit(),
            What::Kill => self.kill(),
            What::Crash(node) => {
                self.machines.get_mut(&node).unwrap().workers.clear();
                self.away(node);
            }
            What::Cut(node) => self.away(node),
            What::Back(node) => {
                let machine = self.machines.get_mut(&node).unwrap();
                if machine.is_draining {
                    machine.is_draining = false;
                    self.hear(Event::Undrain { node });
                } else {
                    *machine = Machine {
                        seats: machine.seats,
                        life: machine.life + 1,
                        ..Machine::default()
                    };
                }
                self.hear(Event::Offered);
            }
            What::Drain(node) => {
                self.machines.get_mut(&node).unwrap().is_draining = true;
                let reason = "maintenance".to_owned();
                self.hear(Event::Drain { node, reason });
            }
            What::Place(slots, avoid) => self.place(slots, &avoid),
        }
    }

    fn kill(&mut self) {
        let machines = self.machines.iter();
        let workers: Vec<(NodeId, Name)> = machines
            .filter(|(_, machine)| !machine.is_away)
            .flat_map(|(node, machine)| machine.workers.keys().map(|name| (*node, *name)))
            .collect();
        if workers.is_empty() {
            return;
        }
        let (node, name) = workers[self.random.below(workers.len() as u64) as usize];
        self.exit(node, name, Exit::Signal(9), false);
    }

    fn away(&mut self, node: NodeId) {
        let machine = self.machines.get_mut(&node).unwrap();
        machine.is_away = true;
        machine.booked = 0;
        machine.life += 1;
        machine.outbox.clear();
        let reason = "lease".to_owned();
        self.later(
            LEASE,
            What::ToJob(Event::NodeLost {
                node,
                reason,
                fence: Fence::Lease,
            }),
        );
    }

    fn hear(&mut self, event: Event) {
        if let Event::NodeLost { node, .. } = &event {
            let machine = self.machines.get_mut(node).unwrap();
            machine.booked = 0;
            machine.outbox.clear();
        }
        let now = self.start + Duration::from_millis(self.now);
        let actions = self.job.step(now, event);
        self.act(actions);
    }

    fn act(&mut self, actions: Vec<Action>) {
        let seed = self.seed;
        for action in actions {
            match action {
                Action::Request {
                    node,
                    request,
                    deadline,
                } => {
                    assert!(self.asked.insert(node), "seed {seed}: two requests at once");
                    let until = self.now + deadline.as_millis() as u64;
                    let delay = self.delay().min(until - self.now);
                    let machine = self.machines.get_mut(&node).unwrap();
                    machine.outbox.clear();
                    machine.life += 1;
                    self.later(delay, What::Request(node, request, until));
                }
                Action::Push { node, request } => {
                    assert!(
                        !self.asked.contains(&node),
                        "seed {seed}: {request:?} overtakes"
                    );
                    let machine = self.machines.get_mut(&node).unwrap();
                    machine.outbox.push_back(*request);
                    if machine.outbox.len() == 1 {
                        let life = machine.life;
                        let delay = self.delay();
                        self.later(delay, What::Pushed(node, life));
                    }
                }
                Action::Tell(JobEvent::Placed { .. }) => {
                    let delay = self.delay();
                    self.later(delay, What::ToJob(Event::Driver(SubmitFrame::ProgramReady)));
                }
                Action::Tell(JobEvent::Generation { table, .. }) => self.active(table),
                Action::Tell(JobEvent::Ended { state, refusal, .. }) => {
                    assert_eq!(refusal.is_some(), state == JobState::Failed, "seed {seed}");
                    self.ended = Some(state);
                }
                Action::Tell(_) | Action::Note(_) => {}
                Action::Place { slots, avoid } => {
                    let delay = self.delay();
                    self.later(delay, What::Place(slots, avoid));
                }
                Action::GiveBack { node, workers } => {
                    let machine = self.machines.get_mut(&node).unwrap();
                    machine.booked = machine.booked.saturating_sub(workers);
                    self.later(0, What::ToJob(Event::Offered));
                }
                Action::Free(node) => {
                    let machine = self.machines.get_mut(&node).unwrap();
                    machine.booked = 0;
                    assert!(
                        machine.is_away || machine.workers.is_empty() && !machine.is_reserved,
                        "seed {seed}: {node} is not free"
                    );
                    self.later(0, What::ToJob(Event::Offered));
                }
                // The head goes on until it works.
                Action::Abandon(node) => {
                    let machine = self.machines.get_mut(&node).unwrap();
                    machine.workers.clear();
                    machine.is_reserved = false;
                    machine.booked = 0;
                    self.later(0, What::ToJob(Event::Offered));
                }
                Action::Finished => self.finished = true,
                Action::Discover(..) | Action::OpenRendezvous(_) | Action::CloseRendezvous => {
                    panic!("seed {seed}: {action:?}")
                }
            }
        }
    }

    fn place(&mut self, slots: Vec<Slot>, avoid: &[String]) {
        let mut seated: Vec<Seating> = Vec::new();
        let mut without = Vec::new();
        for slot in slots {
            let free = self.machines.iter_mut().find(|(node, machine)| {
                let is_good = !machine.is_away && !machine.is_draining;
                let name = format!("host{}", node.0);
                is_good && machine.booked < machine.seats && !avoid.contains(&name)
            });
            let Some((node, machine)) = free else {
                without.push(slot);
                continue;
            };
            machine.booked += 1;
            match seated.iter_mut().find(|seating| seating.site.node == *node) {
                Some(seating) => seating.slots.push(slot),
                None => seated.push(Seating {
                    site: Site {
                        node: *node,
                        hostname: format!("host{}", node.0),
                        address: format!("10.0.0.{}:4433", node.0).parse().unwrap(),
                        workers: 0,
                    },
                    slots: vec![slot],
                }),
            }
        }
        let why = "no node has room".to_owned();
        self.hear(Event::Placed {
            seated,
            without,
            why,
        });
    }

    fn request(&mut self, node: NodeId, request: NodeRequest, until: u64) {
        let is_lost = self.machines[&node].is_away || self.has_fault();
        let reply = if is_lost {
            None
        } else {
            let reply = self.order(node, request);
            (!self.has_fault()).then_some(reply)
        };
        let left = until.saturating_sub(self.now);
        let (delay, reply) = match reply {
            Some(Ok(answer)) => (self.delay().min(left), Reply::Answer(answer)),
            Some(Err(refusal)) => (self.delay().min(left), Reply::Refused(refusal)),
            None => (left, Reply::Unknown("late".to_owned())),
        };
        self.later(delay, What::ToJob(Event::Replied { node, reply }));
    }

    /// The first of the outbox arrives, and the next one follows.
    fn pushed(&mut self, node: NodeId, life: u64) {
        let machine = self.machines.get_mut(&node).unwrap();
        if machine.life != life || machine.is_away {
            return;
        }
        let Some(request) = machine.outbox.pop_front() else {
            return;
        };
        let is_more = !machine.outbox.is_empty();
        let membership = matches!(request, NodeRequest::Membership(_));
        let refusal = self.order(node, request).err();
        if is_more {
            let delay = self.delay();
            self.later(delay, What::Pushed(node, life));
        }
        self.hear(Event::Pushed {
            node,
            membership,
            pids: Vec::new(),
            refusal,
        });
    }

    /// Workers of a node that are members of the generation and in no later one.
    fn members_on(&self, node: NodeId, generation: u64) -> Vec<Name> {
        let workers = self.machines[&node].workers.iter();
        let there = workers.filter(|(_, taken)| **taken == generation);
        there.map(|(name, _)| *name).collect()
    }

    /// The group commits, if it is whole.
    fn commit(&mut self) {
        let Some(table) = self.tables.last().cloned() else {
            return;
        };
        if !self.is_whole(&table) || self.random.percent(self.fault) {
            return;
        }
        self.commits += 1;
        for member in &table.members {
            let event = NodeEvent::Committed {
                job: JOB,
                slot: member.slot,
                incarnation: member.incarnation,
                generation: table.generation,
                commit: self.commits,
                kept: Kept::Made,
            };
            self.say(member.node, event);
        }
    }
}

#[test]
fn r1_r2_g2_g3_whatever_happens_to_an_elastic_job_it_heals_or_ends() {
    let mut ends = BTreeMap::new();
    let (mut generations, mut largest) = (0, 0);
    for seed in 0..2000 {
        let cluster = Cluster::run(seed);
        *ends.entry(format!("{:?}", cluster.ended)).or_insert(0) += 1;
        generations += cluster.tables.len();
        largest = largest.max(cluster.tables.len());
    }
    // The simulation reaches both ends, and many generations, or it would show nothing.
    assert!(
        ends.len() == 2 && ends.values().all(|count| *count > 20),
        "{ends:?}"
    );
    assert!(generations > 2500 && largest > 8, "{generations} {largest}");
}
