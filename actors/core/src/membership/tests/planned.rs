//! A group whose survivors go on, and whose new processes are started with their ranks.

use proptest::prelude::*;

use super::*;

fn limits(min: u32, max: u32) -> Limits {
    Limits {
        on_change: OnChange::Horovod,
        ack_timeout: s(30),
        ..Limits::elastic(min, max)
    }
}

impl Bed {
    /// (slot, incarnation) of the members, in rank order.
    fn members(&self) -> Vec<(u32, u64)> {
        let table = self.table();
        table.iter().map(|member| (member.0, member.1)).collect()
    }

    /// (slot, incarnation) of each group for which processes were started.
    fn plans(&self) -> Vec<Vec<(u32, u64)>> {
        let plans = self.done.iter().filter_map(|action| match action {
            Action::Plan(generation) => Some(table(generation)),
            _ => None,
        });
        plans
            .map(|plan| plan.iter().map(|member| (member.0, member.1)).collect())
            .collect()
    }

    fn stopped(&self) -> Vec<(u32, u64)> {
        let stops = self.done.iter().filter_map(|action| match action {
            Action::Stop { process, .. } => Some((process.slot.0, process.incarnation.0)),
            _ => None,
        });
        stops.collect()
    }

    fn asks_to_hold(&self) -> bool {
        self.done
            .iter()
            .any(|action| matches!(action, Action::Hold { .. }))
    }

    fn boot(&mut self, slot: u32) {
        self.ready(self.last(slot));
        self.settle();
    }
}

#[test]
fn nobody_is_in_a_group_before_all_of_it_are_there() {
    let mut bed = Bed::new(limits(1, 3), &[2, 1]);
    bed.boots = false;
    bed.settle();
    assert_eq!(bed.plans(), [[(0, 1), (1, 1), (2, 1)]]);
    bed.boot(2);
    bed.boot(0);
    assert!(bed.membership.active().is_none());
    bed.boot(1);
    assert_eq!(bed.members(), [(0, 1), (1, 1), (2, 1)]);
    assert!(!bed.asks_to_hold());
}

#[test]
fn survivors_go_on_at_once_and_hold_when_the_new_process_is_ready() {
    let mut bed = Bed::up(limits(1, 3), &[3]);
    bed.boots = false;
    bed.news();
    bed.fail(0);
    assert_eq!(
        bed.members(),
        [(1, 1), (2, 1)],
        "two survivors, in their order"
    );
    assert_eq!(bed.plans(), [[(1, 1), (2, 1), (0, 2)]]);
    assert!(!bed.asks_to_hold(), "they work while it starts");
    bed.boot(0);
    assert!(bed.asks_to_hold());
    assert_eq!(
        bed.members(),
        [(1, 1), (2, 1)],
        "no member is in before all hold"
    );
    bed.hold(0);
    assert_eq!(bed.members(), [(1, 1), (2, 1), (0, 2)]);
    assert_eq!(bed.stopped(), []);
}

#[test]
fn a_loss_makes_a_plan_void_and_its_processes_are_started_again() {
    let mut bed = Bed::up(limits(1, 3), &[3]);
    bed.boots = false;
    bed.news();
    bed.fail(2);
    assert_eq!(bed.plans(), [[(0, 1), (1, 1), (2, 2)]]);
    bed.fail(0);
    assert_eq!(bed.members(), [(1, 1)]);
    assert_eq!(
        bed.stopped(),
        [(2, 2)],
        "its ranks are of a group that can't be"
    );
    let plans = bed.plans();
    assert_eq!(plans.last().unwrap(), &[(1, 1), (0, 2), (2, 3)]);
    bed.boot(0);
    bed.boot(2);
    bed.hold(0);
    assert_eq!(bed.members(), [(1, 1), (0, 2), (2, 3)]);
    let used = bed.membership.budget().without_progress();
    assert_eq!(used, 2, "a process that was stopped has not failed");
}

#[test]
fn nothing_is_planned_before_the_processes_of_a_void_plan_have_ended() {
    let mut bed = Bed::up(limits(1, 3), &[3]);
    bed.boots = false;
    bed.fail(2);
    let successor = bed.last(2);
    bed.hung.insert(successor);
    bed.news();
    bed.fail(0);
    assert_eq!(bed.members(), [(1, 1)], "the survivor does not wait");
    assert!(bed.plans().is_empty());
    let reserves = |action: &Action| matches!(action, Action::Reserve { .. });
    assert!(!bed.done.iter().any(reserves), "the seat stays where it is");
    bed.then(exited(successor, Exit::Signal(9), ""));
    assert_eq!(bed.plans(), [[(1, 1), (0, 2), (2, 3)]]);
    // The end of another one is never seen.
    bed.hung.extend([bed.last(0), bed.last(2)]);
    bed.then(failed(bed.last(0)));
    bed.pass(s(19));
    assert_eq!(bed.plans().len(), 1);
    bed.pass(s(2));
    assert!(bed.plans().len() > 1);
}

#[test]
fn a_new_process_that_fails_costs_a_restart_and_no_member() {
    let mut bed = Bed::up(limits(1, 2), &[2]);
    bed.boots = false;
    bed.fail(1);
    // The first one is replaced at once, and others after pauses.
    for (failures, pause) in [(2, 0), (3, 1)] {
        let plans = bed.plans().len();
        bed.fail(1);
        assert_eq!(bed.plans().len() == plans, pause > 0);
        bed.pass(s(pause));
        assert_eq!(bed.plans().len(), plans + 1);
        assert_eq!(bed.members(), [(0, 1)]);
        assert_eq!(bed.membership.budget().without_progress(), failures);
        assert_eq!(bed.end(), None);
    }
    bed.fail(1);
    let (end, why) = bed.end().unwrap();
    assert_eq!(end, End::TooManyRestarts);
    assert!(
        why.starts_with("4 failures, allowed restarts: 3 (max_restarts)"),
        "{why}"
    );
}

#[test]
fn workers_that_return_without_a_word_have_done_their_work() {
    let mut bed = Bed::up(limits(2, 2), &[2]);
    bed.boots = false;
    for process in [bed.last(0), bed.last(1)] {
        bed.then(exited(process, Exit::Code(0), ""));
    }
    assert_eq!(bed.end().unwrap().0, End::Succeeded);

    let mut bed = Bed::new(limits(2, 2), &[2]);
    bed.boots = false;
    bed.settle();
    for process in [bed.last(0), bed.last(1)] {
        bed.then(exited(process, Exit::Code(0), ""));
    }
    assert_eq!(bed.end().unwrap().0, End::Succeeded);
}

#[test]
fn members_that_can_not_go_on_without_a_loss_meet_again() {
    let mut bed = Bed::up(limits(1, 2), &[2]);
    let generation = bed.active().number();
    bed.then(Fact::Broken {
        generation,
        culprit: None,
        why: "a link".to_owned(),
    });
    assert_eq!(
        bed.number(),
        1,
        "the loss behind it may be heard of in a moment"
    );
    bed.pass(s(1));
    assert_eq!((bed.number(), bed.members()), (2, vec![(0, 1), (1, 1)]));
    assert_eq!(bed.stopped(), []);
}

#[test]
fn a_member_that_never_asks_is_stopped_in_time() {
    let mut bed = Bed::up(limits(1, 3), &[1, 1, 1]);
    bed.boots = false;
    let hung = bed.last(1);
    bed.hung.insert(hung);
    bed.fail(2);
    bed.pass(s(29));
    assert_eq!(bed.stopped(), []);
    bed.pass(s(2));
    assert_eq!(bed.stopped(), [(1, 1)]);
    assert_eq!(bed.members(), [(0, 1)]);
}

#[test]
fn too_few_survivors_wait_for_new_processes() {
    let mut bed = Bed::up(limits(2, 2), &[2]);
    bed.boots = false;
    bed.fail(0);
    assert!(bed.membership.active().is_none());
    assert_eq!(bed.plans().last().unwrap(), &[(1, 1), (0, 2)]);
    bed.boot(0);
    assert_eq!(
        bed.members(),
        [(1, 1), (0, 2)],
        "the survivor has the state"
    );
}

#[test]
fn a_job_that_lost_all_members_begins_anew() {
    let mut bed = Bed::up(limits(1, 2), &[2]);
    let processes = [bed.last(0), bed.last(1)];
    bed.now += ms(1);
    bed.steps(processes.map(failed));
    bed.settle();
    assert_eq!(bed.members(), [(0, 2), (1, 2)]);
    assert_eq!(
        bed.membership.budget().without_progress(),
        1,
        "one is the echo of the other"
    );
}

#[test]
fn a_node_that_leaves_goes_when_the_others_hold() {
    let mut bed = Bed::up(limits(1, 2), &[1, 1]);
    bed.then(drain(1));
    assert!(bed.asks_to_hold());
    bed.hold(0);
    assert_eq!(bed.members(), [(1, 1)]);
    assert_eq!(bed.stopped(), [(0, 1)]);
}

#[test]
fn a_node_that_joins_gets_a_process_before_anybody_holds() {
    let mut bed = Bed::up(limits(1, 2), &[1]);
    bed.boots = false;
    bed.news();
    bed.room.insert(2, 1);
    bed.then(Fact::Offered);
    assert_eq!(bed.plans(), [[(0, 1), (1, 1)]]);
    bed.pass(s(20));
    assert!(!bed.asks_to_hold());
    bed.boot(1);
    assert!(bed.asks_to_hold());
    bed.hold(0);
    assert_eq!(bed.members(), [(0, 1), (1, 1)]);
}

#[test]
fn a_member_that_returns_ends_all_changes() {
    let mut bed = Bed::up(limits(1, 3), &[2]);
    let process = bed.last(0);
    bed.then(exited(process, Exit::Code(0), ""));
    bed.room.insert(2, 1);
    bed.then(Fact::Offered);
    bed.pass(s(5));
    assert_eq!(bed.plans().len(), 1);
    let process = bed.last(1);
    bed.then(exited(process, Exit::Code(0), ""));
    assert_eq!(bed.end().unwrap().0, End::Succeeded);
}

#[test]
fn a_unit_of_a_host_is_in_a_group_as_a_whole() {
    let unit = Limits {
        per_host: 2,
        ..limits(2, 4)
    };
    // One node has both units here: the bed does not mind.
    let mut bed = Bed::up(unit, &[4]);
    bed.boots = false;
    bed.fail(1);
    assert_eq!(bed.members(), [(2, 1), (3, 1)]);
    assert_eq!(
        bed.stopped(),
        [(0, 1)],
        "its neighbour can't go on without it"
    );
    assert_eq!(
        bed.plans().last().unwrap(),
        &[(2, 1), (3, 1), (0, 2), (1, 2)]
    );
}

/// Something that happens in a random run. Slots and nodes are taken modulo those there are.
#[derive(Debug, Clone, Copy)]
enum Chance {
    Fail(usize),
    Arrive(usize),
    Hold,
    Break,
    LoseNode(u64),
    Drain(u64),
    Join(u64),
    Pass(u64),
}

fn chance() -> impl Strategy<Value = Chance> {
    prop_oneof![
        1 => (0..8_usize).prop_map(Chance::Fail),
        6 => (0..8_usize).prop_map(Chance::Arrive),
        4 => Just(Chance::Hold),
        1 => Just(Chance::Break),
        1 => (1..4_u64).prop_map(Chance::LoseNode),
        1 => (1..4_u64).prop_map(Chance::Drain),
        2 => (1..6_u64).prop_map(Chance::Join),
        3 => (1..40_000_u64).prop_map(Chance::Pass),
    ]
}

impl Bed {
    fn happens(&mut self, chance: Chance) {
        let seats = self.membership.roster().seats();
        let at = |slot: usize| seats.get(slot % seats.len().max(1)).map(Seat::process);
        let in_state = |process: Process, wanted: &[State]| {
            let seat = self.membership.roster().seat(process.slot);
            seat.is_some_and(|seat| wanted.contains(&seat.state))
        };
        match chance {
            Chance::Fail(slot) => {
                let there = [State::Booting, State::Ready, State::Active];
                if let Some(process) = at(slot).filter(|process| in_state(*process, &there)) {
                    self.then(failed(process));
                }
            }
            Chance::Arrive(slot) => {
                let booting = |process: &Process| in_state(*process, &[State::Booting]);
                if let Some(process) = at(slot).filter(booting) {
                    self.ready(process);
                    self.settle();
                }
            }
            Chance::Hold if self.membership.active().is_some() => self.hold(0),
            Chance::Break => {
                if let Some(active) = self.membership.active() {
                    let generation = active.number();
                    let why = "a link".to_owned();
                    let culprit = None;
                    self.then(Fact::Broken {
                        generation,
                        culprit,
                        why,
                    });
                }
            }
            Chance::LoseNode(node) => {
                self.room.remove(&node);
                self.then(node_lost(node, self.now));
            }
            Chance::Drain(node) => {
                self.room.remove(&node);
                self.then(drain(node));
            }
            Chance::Join(node) => {
                self.room.insert(node, 2);
                self.then(Fact::Offered);
            }
            Chance::Pass(time) => self.pass(ms(time)),
            Chance::Hold => {}
        }
    }
}

proptest! {
    /// Whatever happens: a new process is in the group that it was started for, and in no other; the members before keep their order and
    /// come first; and a group of enough members is never given up for a process that has not come.
    #[test]
    fn a_new_process_is_in_the_group_of_its_plan(
        chances in prop::collection::vec(chance(), 1..80),
        min in 1..3_u32,
    ) {
        let limits = Limits {
            restarts_without_progress: 1000,
            ..limits(min, 4)
        };
        let mut bed = Bed::new(limits, &[2, 1]);
        bed.boots = false;
        bed.settle();
        let mut plan: Option<Arc<Generation>> = None;
        let mut last: Option<Arc<Generation>> = None;
        for chance in chances {
            bed.happens(chance);
            for action in std::mem::take(&mut bed.done) {
                match action {
                    Action::Plan(generation) => plan = Some(generation),
                    Action::Active(generation) => {
                        let members = |group: &Generation| -> Vec<Process> {
                            group.members().iter().map(|member| member.process).collect()
                        };
                        let now = members(&generation);
                        let before = last.as_deref().map(members).unwrap_or_default();
                        let (old, new): (Vec<Process>, Vec<Process>) =
                            now.iter().partition(|process| before.contains(process));
                        prop_assert_eq!([&old[..], &new[..]].concat(), now.clone());
                        let mut order = before.clone();
                        order.retain(|process| old.contains(process));
                        prop_assert_eq!(&old, &order);
                        if !new.is_empty() {
                            let planned = plan.as_deref().map(members);
                            prop_assert_eq!(planned, Some(now.clone()));
                        }
                        prop_assert!(now.len() >= min as usize && now.len() <= 4);
                        last = Some(generation);
                    }
                    _ => {}
                }
            }
        }
    }
}
