//! What goes wrong, and when it is right again.

use kolo_wire::{Exit, HeadRequest};

use crate::knobs::{AGAIN, FAULTS, MS, QUIET, SECOND, SERVE, Time};
use crate::link::Side;
use crate::queue::{Errand, Event, Fault};
use crate::world::World;
use crate::world::driver::Plan;
use crate::world::invariants::{answers, drain, f1, g2, liveness, told};

/// So long after the death of a worker, in a network without faults, nobody waits for it.
const AFTERMATH: Time = 150 * MS;

impl World {
    /// Faults of the first phase happen now and then, as often as the seed wants.
    pub(crate) fn has_fault(&mut self) -> bool {
        self.now < FAULTS && self.knobs.fault > 0 && self.random.percent(self.knobs.fault)
    }

    /// As [`World::has_fault`], of processes.
    pub(crate) fn has_mishap(&mut self) -> bool {
        self.now < FAULTS && self.knobs.mishap > 0 && self.random.percent(self.knobs.mishap)
    }

    /// All that have the state of a job may die just when others are about to get it.
    pub(crate) fn has_ill_luck(&mut self) -> bool {
        self.now < FAULTS && self.knobs.fault > 0 && self.random.percent(15)
    }

    /// Lays out the whole run.
    pub(crate) fn plan(&mut self) {
        let fault = self.knobs.fault;
        for node in 0..self.nodes.len() {
            // Some come later.
            let late = self.random.percent(15);
            let at = if late {
                self.random.below(FAULTS)
            } else {
                self.random.below(100 * MS)
            };
            self.queue.push(at, Event::Fault(Fault::NodeStarts(node)));
            if !self.random.percent(fault * 3) {
                continue;
            }
            let at = self.random.between(SECOND, FAULTS - SECOND);
            let back = at + self.random.between(100 * MS, 8 * SECOND);
            self.plan_fault_of(node, at, back);
        }
        if fault > 0 && self.random.percent(fault * 2 + 10) {
            let at = self.random.between(SECOND, FAULTS - SECOND);
            let pause = self.random.between(100 * MS, 4 * SECOND);
            if self.random.percent(50) {
                self.queue.push(at, Event::Fault(Fault::HeadCrashes));
                self.queue.push(at + pause, Event::Fault(Fault::HeadStarts));
            } else {
                self.queue.push(at, Event::Fault(Fault::HeadStops(pause)));
            }
        }
        for _ in 0..self.random.below(fault + 1) {
            let at = self.random.between(SECOND, FAULTS - SECOND);
            self.queue.push(at, Event::Fault(Fault::Kill));
        }
        for (at, phase) in [
            (FAULTS, Fault::Heal),
            (SERVE, Fault::Serve),
            (AGAIN, Fault::Again),
            (AGAIN + 12 * SECOND, Fault::Finish),
            (QUIET, Fault::Quiet),
        ] {
            self.queue.push(at, Event::Fault(phase));
        }
        self.plan_jobs();
    }

    fn plan_fault_of(&mut self, node: usize, at: Time, back: Time) {
        let kind = self.random.below(7);
        let mut push = |at, fault| self.queue.push(at, Event::Fault(fault));
        match kind {
            0 => {
                push(at, Fault::NodeCrashes(node));
                push(back, Fault::NodeStarts(node));
            }
            1 => {
                push(at, Fault::NodeLeaves(node));
                push(back + 5 * SECOND, Fault::NodeStarts(node));
            }
            5 => {
                push(at, Fault::Drain(node, true));
                push(back, Fault::Drain(node, false));
            }
            2 => {
                let pause = self.random.between(100 * MS, 5 * SECOND);
                push(at, Fault::NodeStops(node, pause));
            }
            kind => {
                // One way or both, with the data plane or without; for a moment, or until the end.
                let lasts = self.random.percent(50);
                let (at, back) = if lasts {
                    (4 * SECOND + at / 4, FAULTS)
                } else {
                    (at, back)
                };
                let ways = self
                    .random
                    .pick(&[[true, false], [false, true], [true, true]]);
                push(at, Fault::Cut(node, ways, kind == 4));
                push(back, Fault::Cut(node, [false; 2], false));
            }
        }
    }

    fn plan_jobs(&mut self) {
        let count = self.random.between(1, 3);
        for _ in 0..count {
            let at = self.random.between(200 * MS, FAULTS / 2);
            let elastic = self.random.percent(60);
            let plan = if elastic {
                self.random.pick(&[
                    Plan::Stay,
                    Plan::Stay,
                    Plan::Stay,
                    Plan::Wait,
                    Plan::Vanish,
                    Plan::Say(0),
                    Plan::Say(3),
                ])
            } else {
                self.random.pick(&[
                    Plan::Stay,
                    Plan::Wait,
                    Plan::Vanish,
                    Plan::Vanish,
                    Plan::Say(0),
                    Plan::Say(1),
                    Plan::Say(2),
                    Plan::Say(3),
                ])
            };
            self.add_driver(at, elastic, plan);
        }
        // These have a cluster that is well.
        let at = FAULTS + 20 * SECOND;
        self.add_driver(at, false, Plan::Stay);
        let last = self.add_driver(at + SECOND, true, Plan::Stay);
        if self.random.percent(50) {
            self.drivers[last].needs_all();
        }
    }

    pub(crate) fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::Gone(node, life) => {
                if self.nodes[node].life == life {
                    self.node_dies(node);
                }
                return;
            }
            Fault::Aftermath(pid) => return self.hold("F-1", f1::aftermath(self, pid)),
            _ => {}
        }
        self.trace.note(self.now, || format!("fault: {fault:?}"));
        match fault {
            Fault::NodeCrashes(node) => self.node_dies(node),
            Fault::NodeStarts(node) => {
                // The daemon of before may be about to end.
                self.node_dies(node);
                self.node_starts(node);
            }
            Fault::NodeLeaves(node) => self.node_leaves(node),
            Fault::NodeStops(node, pause) => self.node_stands_still(node, pause),
            Fault::Cut(node, ways, isolated) => {
                self.nodes[node].cut = ways;
                self.nodes[node].isolated = isolated;
                self.reconnect(node);
            }
            Fault::HeadCrashes => self.head_dies(),
            Fault::HeadStarts => {
                if self.head.core.is_none() {
                    self.head_starts();
                }
            }
            Fault::HeadStops(pause) => self.head_stands_still(pause),
            Fault::Kill => {
                let alive: Vec<u32> = (self.processes.iter())
                    .filter(|(_, process)| process.alive)
                    .map(|(pid, _)| *pid)
                    .collect();
                if !alive.is_empty() {
                    let pid = alive[self.random.below(alive.len() as u64) as usize];
                    let exit = self.random.pick(&[
                        Exit::Signal(9),
                        Exit::Signal(11),
                        Exit::Code(1),
                        Exit::Code(0),
                    ]);
                    self.process_ends(pid, exit);
                }
            }
            Fault::Heal => self.heal(),
            Fault::Serve => {
                self.check_service();
                self.kill_one_of_each();
            }
            Fault::Again => {
                self.check_service();
                let node = self.random.below(self.nodes.len() as u64) as usize;
                self.drain(node, true);
            }
            Fault::Drain(node, drained) => self.drain(node, drained),
            Fault::Finish => {
                self.hold("drain", drain::left(self));
                self.finish();
            }
            Fault::Quiet => {
                self.hold("liveness", liveness::quiet(self));
                let conserved = g2::conserved(self);
                self.hold("G-2", conserved);
                self.hold("answers", answers::all(self));
            }
            Fault::Gone(..) | Fault::Aftermath(_) => {}
        }
    }

    /// A stopped process reads what has come meanwhile before it judges anybody; a quarter of a second of the pause counts.
    fn node_stands_still(&mut self, node: usize, pause: Time) {
        let entry = &mut self.nodes[node];
        if entry.daemon.is_none() {
            return;
        }
        let frozen = pause.saturating_sub(250 * MS);
        entry.paused = self.now + pause;
        entry.frozen += frozen;
        let session = entry.daemon.as_ref().and_then(|daemon| daemon.session);
        if let Some(link) = session.and_then(|session| self.links.get_mut(&session)) {
            link.heard[Side::Peer as usize] += frozen + MS;
        }
    }

    fn head_stands_still(&mut self, pause: Time) {
        if self.head.core.is_none() {
            return;
        }
        let frozen = pause.saturating_sub(250 * MS);
        self.head.paused = self.now + pause;
        self.head.frozen += frozen;
        for link in self.links.values_mut() {
            link.heard[Side::Head as usize] += frozen + MS;
        }
    }

    /// Nothing has gone wrong for long.
    fn check_service(&mut self) {
        self.hold("F-1", told::drivers_know(self));
        self.hold("answers", answers::all(self));
        self.hold("liveness", liveness::service(self));
    }

    /// An administrator drains a node, or lets it work again.
    fn drain(&mut self, node: usize, drained: bool) {
        let name = self.nodes[node].id.to_string();
        self.nodes[node].drained = drained;
        self.administrator_asks(if drained {
            HeadRequest::DrainNode {
                node: name,
                deadline_ms: drain::DEADLINE / MS,
            }
        } else {
            HeadRequest::UndrainNode { node: name }
        });
    }

    fn heal(&mut self) {
        if self.head.core.is_none() {
            self.head_starts();
        }
        for node in 0..self.nodes.len() {
            self.nodes[node].cut = [false; 2];
            self.nodes[node].isolated = false;
            self.reconnect(node);
            if self.nodes[node].drained {
                self.drain(node, false);
            }
            if self.nodes[node].daemon.is_none() {
                self.node_starts(node);
            }
        }
    }

    /// The network is well, and each job loses a worker all the same.
    fn kill_one_of_each(&mut self) {
        let tables: Vec<_> = (self.drivers.iter())
            .filter(|driver| driver.is_there())
            .filter_map(|driver| Some((driver.table.clone()?, driver.may_end_with_a_loss())))
            .collect();
        for (table, may_end) in tables {
            let member = &table.members[self.random.below(table.members.len() as u64) as usize];
            let name = crate::worker::Name::of(table.job, member);
            if let Some(pid) = self.names.get(&name).copied() {
                self.process_ends(pid, Exit::Signal(9));
                // A job that ends has its grace time for that.
                if !may_end {
                    // Whoever is at work comes to wait later.
                    for moment in 0..8 {
                        let after = AFTERMATH + moment * 250 * MS;
                        self.later(after, Event::Fault(Fault::Aftermath(pid)));
                    }
                }
            }
        }
    }

    fn finish(&mut self) {
        for driver in 0..self.drivers.len() {
            if self.drivers[driver].is_there() {
                let done = Errand::Says(kolo_wire::SubmitFrame::Done);
                self.later(0, Event::Driver(driver, done));
            }
        }
    }
}
