//! A small world of processes and nodes around a membership, on a network that loses, repeats and reorders.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::*;

/// Milliseconds between two steps of a group.
const WORK: u64 = 250;

/// splitmix64.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub(super) fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

#[derive(Debug, Clone)]
pub(super) enum Order {
    Start(Location),
    Stop,
    Publish(Arc<Generation>),
    Revoke(ids::Generation),
    Hold(ids::Generation),
}

#[derive(Debug, Clone)]
pub(super) enum Message {
    ToHead(Fact),
    ToProcess(Process, Order),
    /// The nodes of a silent host have ended their workers by themselves.
    Fenced(u64),
    /// Members that can go on a step.
    Work,
}

#[derive(Debug, Clone, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each can be true by itself")]
pub(super) struct Worker {
    pub(super) node: u64,
    pub(super) is_alive: bool,
    pub(super) is_hung: bool,
    /// The last generation that it has taken.
    pub(super) taken: Option<Arc<Generation>>,
    pub(super) is_revoked: bool,
    pub(super) asked_to_hold: bool,
    pub(super) is_holding: bool,
    /// The number of the last commit that it has the state of.
    pub(super) commit: u64,
}

#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each can be true by itself")]
pub(super) struct Node {
    pub(super) room: u32,
    pub(super) is_silent: bool,
    pub(super) is_gone: bool,
    pub(super) is_draining: bool,
    pub(super) is_known_lost: bool,
}

pub(super) struct World {
    pub(super) now: u64,
    pub(super) start: Instant,
    pub(super) random: Random,
    pub(super) membership: Membership,
    pub(super) limits: Limits,
    /// In percent.
    pub(super) loss: u64,
    pub(super) durable: bool,
    pub(super) queue: BinaryHeap<Reverse<(u64, u64)>>,
    pub(super) messages: BTreeMap<u64, Message>,
    pub(super) sequence: u64,
    pub(super) wake: Option<u64>,
    pub(super) nodes: BTreeMap<u64, Node>,
    pub(super) seats: BTreeMap<Slot, u64>,
    pub(super) workers: BTreeMap<Process, Worker>,
    pub(super) stopped: BTreeSet<Process>,
    pub(super) past: Vec<Fact>,
    /// Generations that were active.
    pub(super) active: Vec<Arc<Generation>>,
    pub(super) last: u64,
    pub(super) commit: u64,
    pub(super) on_disk: u64,
    pub(super) ended: Option<(End, String)>,
    pub(super) resets: u32,
    /// Whether a commit was known when a generation was published.
    pub(super) known: BTreeMap<ids::Generation, bool>,
}

impl World {
    pub(super) fn new(limits: Limits, seed: u64, loss: u64, durable: bool, nodes: &[u32]) -> Self {
        let start = Instant::now();
        let (membership, actions) = Membership::new(start, limits.clone(), seed).unwrap();
        let mut world = Self {
            now: 0,
            start,
            random: Random(seed),
            membership,
            limits,
            loss,
            durable,
            queue: BinaryHeap::new(),
            messages: BTreeMap::new(),
            sequence: 0,
            wake: None,
            nodes: BTreeMap::new(),
            seats: BTreeMap::new(),
            workers: BTreeMap::new(),
            stopped: BTreeSet::new(),
            past: Vec::new(),
            active: Vec::new(),
            last: 0,
            commit: 0,
            on_disk: 0,
            ended: None,
            resets: 0,
            known: BTreeMap::new(),
        };
        for (node, room) in (1..).zip(nodes) {
            let room = *room;
            world.nodes.insert(
                node,
                Node {
                    room,
                    ..Node::default()
                },
            );
        }
        world.later(WORK, Message::Work);
        world.carry_out(actions);
        world
    }

    pub(super) fn instant(&self, at: u64) -> Instant {
        self.start + ms(at)
    }

    pub(super) fn later(&mut self, delay: u64, message: Message) {
        self.sequence += 1;
        self.queue.push(Reverse((self.now + delay, self.sequence)));
        self.messages.insert(self.sequence, message);
    }

    /// On a network that reorders and repeats.
    pub(super) fn send(&mut self, message: Message) {
        loop {
            let delay = 1 + if self.loss > 0 {
                self.random.below(400)
            } else {
                0
            };
            self.later(delay, message.clone());
            if !self.random.percent(self.loss) {
                return;
            }
        }
    }

    /// On a network that loses, too.
    fn try_send(&mut self, message: Message) {
        if !self.random.percent(self.loss) {
            self.send(message);
        }
    }

    pub(super) fn run(&mut self, until: u64) {
        loop {
            let next = self.queue.peek().map(|Reverse((at, _))| *at);
            let at = next.into_iter().chain(self.wake).min();
            let Some(at) = at.filter(|at| *at <= until) else {
                break;
            };
            self.now = self.now.max(at);
            if next == Some(at) {
                let Some(Reverse((_, sequence))) = self.queue.pop() else {
                    break;
                };
                let message = self.messages.remove(&sequence).unwrap();
                self.receive(message);
            } else {
                self.wake = None;
                self.step(None);
            }
        }
        self.now = until;
    }

    pub(super) fn tell(&mut self, fact: Fact) {
        let is_of_process = matches!(
            fact,
            Fact::Ready { .. }
                | Fact::Exited { .. }
                | Fact::NodeLost { .. }
                | Fact::Acknowledged { .. }
                | Fact::Committed { .. }
                | Fact::Holding { .. }
        );
        if let Fact::NodeLost { node, .. } = &fact {
            self.nodes.get_mut(&node.0).unwrap().is_known_lost = true;
        }
        if is_of_process {
            self.past.push(fact.clone());
        }
        self.step(Some(fact));
    }

    fn step(&mut self, fact: Option<Fact>) {
        let actions = self.membership.step(self.instant(self.now), fact);
        assert!(self.ended.is_none() || actions.is_empty());
        self.carry_out(actions);
        let resets = self.membership.budget().resets();
        assert!(resets >= self.resets);
        assert!(
            self.limits.max_resets.is_none_or(|max| resets <= max),
            "{resets} resets"
        );
        self.resets = resets;
        self.check_groups();
    }

    fn receive(&mut self, message: Message) {
        match message {
            // The head knows which nodes it has said to be lost.
            Message::ToHead(Fact::Reserved { slot, location })
                if self.nodes[&location.node.0].is_known_lost =>
            {
                self.seats.remove(&slot);
                self.tell(Fact::Refused {
                    slot,
                    why: "full".to_owned(),
                });
            }
            Message::ToHead(fact) => self.tell(fact),
            Message::ToProcess(process, order) => self.order(process, order),
            Message::Fenced(node) => {
                let on = self
                    .workers
                    .values_mut()
                    .filter(|worker| worker.node == node);
                on.for_each(|worker| worker.is_alive = false);
            }
            Message::Work => {
                self.work();
                self.later(WORK, Message::Work);
            }
        }
    }

    fn carry_out(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Reserve { slots, avoid, .. } => {
                    for unit in slots.chunks(self.limits.per_host as usize) {
                        assert_eq!(unit.len(), self.limits.per_host as usize);
                        let delay = 1 + self.random.below(50);
                        for fact in self.place(unit, &avoid) {
                            self.later(delay, Message::ToHead(fact));
                        }
                    }
                }
                Action::GiveBack { slots } => {
                    for slot in slots {
                        let node = self.seats.remove(&slot).expect("a node holds it");
                        self.nodes.get_mut(&node).unwrap().room += 1;
                    }
                }
                Action::Start { process, location } => {
                    self.try_send(Message::ToProcess(process, Order::Start(location)));
                }
                Action::Stop { process, .. } => self.send(Message::ToProcess(process, Order::Stop)),
                Action::Revoke { generation, .. } => {
                    for process in self.workers.keys().copied().collect::<Vec<_>>() {
                        self.try_send(Message::ToProcess(process, Order::Revoke(generation)));
                    }
                }
                Action::Publish { generation, to } => {
                    self.check_generation(&generation);
                    for process in to {
                        let order = Order::Publish(Arc::clone(&generation));
                        self.try_send(Message::ToProcess(process, order));
                    }
                }
                Action::Active(generation) => self.check_active(generation),
                Action::Hold { generation, .. } => {
                    for process in self.workers.keys().copied().collect::<Vec<_>>() {
                        self.try_send(Message::ToProcess(process, Order::Hold(generation)));
                    }
                }
                Action::Wake(at) => {
                    let at = at.duration_since(self.start).as_nanos().div_ceil(1_000_000) as u64;
                    assert!(at > self.now, "woken at {at} at {}", self.now);
                    self.wake = Some(at);
                }
                Action::Tell(_) | Action::Plan(_) | Action::Fall { .. } => {}
                Action::End { how, why } => {
                    self.ended = Some((how, why));
                    self.wake = None;
                }
            }
        }
    }

    /// The seats of one unit go to one node.
    fn place(&mut self, unit: &[Slot], avoid: &[Host]) -> Vec<Fact> {
        let wanted = unit.len() as u32;
        let fits = |(number, node): &(&u64, &mut Node)| {
            let there = !node.is_gone && !node.is_silent && !node.is_draining;
            there && node.room >= wanted && !avoid.contains(&host(**number))
        };
        let Some((number, node)) = self.nodes.iter_mut().find(fits) else {
            let refused = |slot: &Slot| Fact::Refused {
                slot: *slot,
                why: "full".to_owned(),
            };
            return unit.iter().map(refused).collect();
        };
        node.room -= wanted;
        let number = *number;
        let mut facts = Vec::new();
        for slot in unit.iter().copied() {
            if let Some(before) = self.seats.insert(slot, number) {
                self.nodes.get_mut(&before).unwrap().room += 1;
            }
            let location = location(number);
            facts.push(Fact::Reserved { slot, location });
        }
        facts
    }

    /// What a process and its node do with an order.
    fn order(&mut self, process: Process, order: Order) {
        if let Order::Start(location) = &order {
            let node = location.node.0;
            let at = &self.nodes[&node];
            let newest = self
                .workers
                .keys()
                .filter(|other| other.slot == process.slot)
                .max();
            let is_old = newest.is_some_and(|newest| *newest >= process);
            if at.is_gone || at.is_silent || is_old || self.stopped.contains(&process) {
                return;
            }
            let older: Vec<_> = self
                .workers
                .keys()
                .copied()
                .filter(|other| other.slot == process.slot)
                .collect();
            for other in older {
                self.exit(other, Exit::Signal(9));
            }
            let worker = Worker {
                node,
                is_alive: true,
                ..Worker::default()
            };
            self.workers.insert(process, worker);
            let addresses = [].into();
            self.try_send(Message::ToHead(Fact::Ready { process, addresses }));
            return;
        }
        if matches!(order, Order::Stop) {
            self.stopped.insert(process);
            if !self.workers.contains_key(&process) {
                let (exit, said) = (Exit::Unknown, String::new());
                let generation = ids::Generation(0);
                return self.send(Message::ToHead(Fact::Exited {
                    process,
                    exit,
                    generation,
                    said,
                }));
            }
            return self.exit(process, Exit::Signal(15));
        }
        let Some(worker) = self.workers.get_mut(&process) else {
            return;
        };
        let is_reached = worker.is_alive && !worker.is_hung && !self.nodes[&worker.node].is_silent;
        if !is_reached {
            return;
        }
        let taken = worker
            .taken
            .as_ref()
            .map_or(ids::Generation(0), |taken| taken.number());
        match order {
            Order::Publish(generation) => {
                if generation.number() > taken {
                    worker.taken = Some(Arc::clone(&generation));
                    worker.is_revoked = false;
                    worker.asked_to_hold = false;
                    worker.is_holding = false;
                }
                if generation.number() >= taken {
                    let generation = generation.number();
                    self.try_send(Message::ToHead(Fact::Acknowledged {
                        generation,
                        process,
                    }));
                }
            }
            Order::Revoke(generation) if generation == taken => worker.is_revoked = true,
            Order::Hold(generation) if generation == taken => {
                worker.asked_to_hold = true;
                if worker.is_holding {
                    let commit = worker.commit;
                    self.try_send(Message::ToHead(Fact::Holding { generation, commit }));
                }
            }
            _ => {}
        }
    }

    pub(super) fn exit(&mut self, process: Process, exit: Exit) {
        let Some(worker) = self
            .workers
            .get_mut(&process)
            .filter(|worker| worker.is_alive)
        else {
            return;
        };
        worker.is_alive = false;
        if !self.nodes[&worker.node].is_silent {
            let taken = worker.taken.as_ref();
            let generation = taken.map_or(ids::Generation(0), |taken| taken.number());
            self.send(Message::ToHead(Fact::Exited {
                process,
                exit,
                generation,
                said: "said".to_owned(),
            }));
        }
    }

    /// The generations all members of which have taken them, and are there.
    pub(super) fn whole(&self) -> Vec<Arc<Generation>> {
        let taken = self
            .workers
            .values()
            .filter_map(|worker| worker.taken.clone());
        let taken: BTreeMap<_, _> = taken.map(|taken| (taken.number(), taken)).collect();
        let is_in = |process: Process, number| {
            let worker = &self.workers[&process];
            let taken = worker.taken.as_ref().map(|taken| taken.number());
            worker.is_alive && taken == Some(number)
        };
        taken
            .into_values()
            .filter(|generation| {
                let mut members = generation.members().iter();
                members.all(|member| is_in(member.process, generation.number()))
            })
            .collect()
    }

    /// A whole group synchronises and commits (E-1).
    fn work(&mut self) {
        for generation in self.whole() {
            let members: Vec<_> = generation
                .members()
                .iter()
                .map(|member| member.process)
                .collect();
            let is_stuck = |worker: &Worker| {
                worker.is_hung
                    || worker.is_holding
                    || worker.is_revoked
                    || self.nodes[&worker.node].is_silent
            };
            if members
                .iter()
                .any(|process| is_stuck(&self.workers[process]))
            {
                continue;
            }
            let number = generation.number();
            let alive = self.workers.values().filter(|worker| worker.is_alive);
            let best = alive.map(|worker| worker.commit).max().unwrap_or(0);
            let mut commit = self.workers[&members[0]].commit;
            if generation.needs_restore() {
                assert!(self.durable, "only a durable commit is restored");
                commit = self.on_disk;
            }
            // Before the first report nothing is known to be worth keeping.
            let is_known = self.known.get(&number).is_some_and(|known| *known);
            if is_known {
                assert!(
                    commit >= best,
                    "E-1: rank 0 has {commit}, another one {best}"
                );
            }
            if !generation.needs_sync() {
                for process in &members {
                    assert_eq!(
                        self.workers[process].commit, commit,
                        "all have the same without a sync"
                    );
                }
            }
            let holds = self.workers[&members[0]].asked_to_hold;
            for process in &members {
                let worker = self.workers.get_mut(process).unwrap();
                worker.commit = commit + 1;
                worker.is_holding = holds;
            }
            self.commit = commit + 1;
            let commit = self.commit;
            let durable = self.durable;
            if durable {
                self.on_disk = commit;
            }
            let fact = if holds {
                Fact::Holding {
                    generation: number,
                    commit,
                }
            } else {
                Fact::Committed {
                    generation: number,
                    commit,
                    kept: if durable { Kept::Durable } else { Kept::Made },
                }
            };
            self.try_send(Message::ToHead(fact));
        }
    }
}
