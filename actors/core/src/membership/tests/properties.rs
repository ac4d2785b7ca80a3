//! Random faults in a small world: messages are lost, repeated and reordered, processes and nodes die, fall silent and hang.
//! Then all faults end, and the job must end or serve. The invariants are checked all the time.

use proptest::prelude::*;

use super::world::{Message, Node, World};
use super::*;

/// Something that goes wrong, or right. Numbers choose among what is there.
#[derive(Debug, Clone)]
enum Op {
    Fail(usize),
    Return(usize),
    Hang(usize),
    Silence(usize),
    End(usize),
    Join(u32),
    Drain(usize),
    Undrain(usize),
    /// A fact comes again, much later.
    Again(usize),
    Pass(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let which = 0..64_usize;
    prop_oneof![
        4 => which.clone().prop_map(Op::Fail),
        1 => which.clone().prop_map(Op::Return),
        1 => which.clone().prop_map(Op::Hang),
        1 => which.clone().prop_map(Op::Silence),
        1 => which.clone().prop_map(Op::End),
        2 => (1..4_u32).prop_map(Op::Join),
        1 => which.clone().prop_map(Op::Drain),
        1 => which.clone().prop_map(Op::Undrain),
        2 => which.prop_map(Op::Again),
        8 => (1..6000_u64).prop_map(Op::Pass),
    ]
}

fn any_limits() -> impl Strategy<Value = Limits> {
    let sizes = (1..4_u32, 0..5_u32, 0..3_u32);
    let filters = prop_oneof![
        4 => Just(vec![]),
        1 => Just(vec![Filter::DivisibleBy(2)]),
        1 => Just(vec![Filter::WholeHosts(2)]),
        1 => Just(vec![Filter::Max(3)]),
    ];
    let resets = prop_oneof![3 => Just(None), 1 => (0..4_u32).prop_map(Some)];
    let cooldown = prop_oneof![1 => Just(None), 1 => Just(Some(s(1)..=s(20)))];
    let per_host = prop_oneof![2 => Just(1_u32), 1 => 2..4_u32];
    (sizes, filters, resets, cooldown, 0..8_u32, per_host)
        .prop_map(
            |((min, more, spares), filters, max_resets, cooldown, restarts, per_host)| Limits {
                per_host,
                spares: spares * per_host,
                filters,
                max_resets,
                cooldown,
                restarts_without_progress: restarts,
                ..Limits::elastic(min * per_host, (min + more) * per_host)
            },
        )
        .prop_filter("they make sense", |limits| limits.check().is_ok())
}

impl World {
    fn apply(&mut self, op: Op) {
        let alive = |world: &Self| -> Vec<Process> {
            let workers = world.workers.iter().filter(|(_, worker)| worker.is_alive);
            workers.map(|(process, _)| *process).collect()
        };
        let nodes: Vec<u64> = self
            .nodes
            .iter()
            .filter(|(_, node)| !node.is_gone && !node.is_silent)
            .map(|(node, _)| *node)
            .collect();
        let pick =
            |list: &[u64], which: usize| (!list.is_empty()).then(|| list[which % list.len()]);
        match op {
            Op::Fail(which) | Op::Return(which) | Op::Hang(which) => {
                let alive = alive(self);
                if alive.is_empty() {
                    return;
                }
                let process = alive[which % alive.len()];
                match op {
                    Op::Fail(_) => self.exit(process, Exit::Code(1)),
                    Op::Return(_) => self.exit(process, Exit::Code(0)),
                    _ => self.workers.get_mut(&process).unwrap().is_hung = true,
                }
            }
            Op::Silence(which) => {
                let Some(number) = pick(&nodes, which) else {
                    return;
                };
                self.nodes.get_mut(&number).unwrap().is_silent = true;
                let (seen, fence) = (500 + self.random.below(1500), 2500);
                self.later(fence, Message::Fenced(number));
                let fenced = self.instant(self.now + fence + 1);
                let why = "silent".to_owned();
                self.later(
                    seen,
                    Message::ToHead(Fact::NodeLost {
                        node: NodeId(number),
                        why,
                        fenced,
                    }),
                );
            }
            Op::End(which) => {
                let Some(number) = pick(&nodes, which) else {
                    return;
                };
                self.nodes.get_mut(&number).unwrap().is_gone = true;
                for worker in self
                    .workers
                    .values_mut()
                    .filter(|worker| worker.node == number)
                {
                    worker.is_alive = false;
                }
                let (why, fenced) = ("its end was seen".to_owned(), self.instant(self.now));
                self.send(Message::ToHead(Fact::NodeLost {
                    node: NodeId(number),
                    why,
                    fenced,
                }));
            }
            Op::Join(room) => {
                let number = self.nodes.len() as u64 + 1;
                self.nodes.insert(
                    number,
                    Node {
                        room,
                        ..Node::default()
                    },
                );
                self.send(Message::ToHead(Fact::Offered));
            }
            Op::Drain(which) => {
                let Some(number) = pick(&nodes, which) else {
                    return;
                };
                self.nodes.get_mut(&number).unwrap().is_draining = true;
                self.tell(Fact::Drain {
                    node: NodeId(number),
                    why: "drain".to_owned(),
                });
            }
            Op::Undrain(which) => {
                let Some(number) = pick(&nodes, which) else {
                    return;
                };
                self.nodes.get_mut(&number).unwrap().is_draining = false;
                self.tell(Fact::Undrain {
                    node: NodeId(number),
                });
            }
            Op::Again(which) => {
                if let Some(fact) = self.past.get(which % self.past.len().max(1)).cloned() {
                    self.tell(fact);
                }
            }
            Op::Pass(time) => self.run(self.now + time),
        }
    }

    /// No more faults: the job ends, or it serves with all that it can have.
    fn heal(&mut self) {
        self.loss = 0;
        for worker in self.workers.values_mut() {
            worker.is_hung = false;
        }
        self.apply(Op::Join(32));
        self.run(self.now + 200_000);
        if self.ended.is_some() {
            return;
        }
        let returned = self.membership.roster().count(State::Returned);
        let Some(active) = self.membership.active() else {
            panic!(
                "neither ended nor active: {:#?}",
                self.membership.roster().seats()
            )
        };
        if returned > 0 {
            return;
        }
        let whole = self.whole();
        assert_eq!(
            whole.first().map(|whole| whole.number()),
            Some(active.number())
        );
        let commit = self.commit;
        self.run(self.now + 1000);
        assert!(self.commit > commit, "the group works");
        let leaving = self
            .membership
            .roster()
            .seats()
            .iter()
            .filter(|seat| seat.leaving && seat.state.is_live());
        let roster = self.membership.roster();
        let all = self.limits.max + self.limits.spares;
        assert!(
            roster.staying() <= all as usize,
            "nobody is there who is not needed"
        );
        let lost = roster.in_state(State::Lost);
        let booked = lost.filter(|seat| seat.location.is_some() && !seat.leaving);
        assert!(
            booked.count() + roster.staying() <= all as usize,
            "no room is booked that is not needed"
        );
        let is_limited = !self.membership.budget().has_resets(&self.limits);
        if !is_limited && self.limits.filters.is_empty() {
            let active = self.membership.active().unwrap();
            assert_eq!(
                active.members().len() as u32,
                self.limits.max,
                "there is room for all"
            );
            assert!(
                leaving.count() == 0 || self.limits.max == self.limits.per_host,
                "nobody is left that leaves"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_the_invariants_hold_and_in_the_end_the_job_ends_or_serves(
        limits in any_limits(),
        seed in any::<u64>(),
        loss in prop_oneof![Just(0_u64), Just(5), Just(30)],
        durable in any::<bool>(),
        nodes in prop::collection::vec(0..5_u32, 1..4),
        ops in prop::collection::vec(op(), 0..40),
    ) {
        let mut world = World::new(limits, seed, loss, durable, &nodes);
        for op in ops {
            world.apply(op);
        }
        world.heal();
    }
}
