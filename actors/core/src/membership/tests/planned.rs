//! A group whose survivors go on, and whose new processes are started with their ranks.

use proptest::prelude::*;

use super::*;

fn limits(min: u32, max: u32) -> Limits {
    with(min, max, |it| {
        it.on_change = OnChange::Horovod;
        it.ack_timeout = s(30);
    })
}

/// (slot, incarnation) of members, in rank order.
type Members = Vec<(u32, u64)>;

impl Bed {
    /// A group whose members are there, and whose next processes come when they are said to.
    fn planned(min: u32, max: u32, room: &[u32]) -> Self {
        let mut bed = Self::up(limits(min, max), room);
        bed.boots = false;
        bed.news();
        bed
    }

    /// (slot, incarnation) of each group for which processes were started.
    fn plans(&self) -> Vec<Members> {
        let plans = self.done.iter().filter_map(|action| match action {
            Action::Plan(generation) => Some(members(generation)),
            _ => None,
        });
        plans.collect()
    }

    fn asks_to_hold(&self) -> bool {
        self.count(is_hold) > 0
    }
}

#[test]
fn nobody_is_in_a_group_before_all_of_it_are_there() {
    let mut bed = Bed::slow(limits(1, 3), &[2, 1]);
    assert_eq!(bed.plans(), [[(0, 1), (1, 1), (2, 1)]]);
    bed.boot(2);
    bed.boot(0);
    assert!(bed.is_idle());
    bed.boot(1);
    assert_eq!(bed.members(), [(0, 1), (1, 1), (2, 1)]);
    assert!(!bed.asks_to_hold());
}

#[test]
fn survivors_go_on_at_once_and_hold_when_the_new_process_is_ready() {
    let mut bed = Bed::planned(1, 3, &[3]);
    bed.fail(0);
    // Two survivors, in their order. They work while it starts.
    assert_eq!(bed.members(), [(1, 1), (2, 1)]);
    assert_eq!(bed.plans(), [[(1, 1), (2, 1), (0, 2)]]);
    assert!(!bed.asks_to_hold());
    bed.boot(0);
    // No member is in before all hold.
    assert!(bed.asks_to_hold());
    assert_eq!(bed.members(), [(1, 1), (2, 1)]);
    bed.hold(0);
    assert_eq!(bed.members(), [(1, 1), (2, 1), (0, 2)]);
    assert_eq!(bed.stopped(), []);
}

#[test]
fn a_loss_makes_a_plan_void_and_its_processes_are_started_again() {
    let mut bed = Bed::planned(1, 3, &[3]);
    bed.fail(2);
    assert_eq!(bed.plans(), [[(0, 1), (1, 1), (2, 2)]]);
    bed.fail(0);
    assert_eq!(bed.members(), [(1, 1)]);
    // Its ranks are of a group that can't be.
    assert_eq!(bed.stopped(), [(2, 2)]);
    let next = [(1, 1), (0, 2), (2, 3)];
    assert_eq!(bed.plans().last().unwrap(), &next);
    bed.boot(0);
    bed.boot(2);
    bed.hold(0);
    assert_eq!(bed.members(), next);
    assert_eq!(bed.restarts(), 2, "one that was stopped has not failed");
}

#[test]
fn nothing_is_planned_before_the_processes_of_a_void_plan_have_ended() {
    let mut bed = Bed::planned(1, 3, &[3]);
    bed.fail(2);
    let successor = bed.last(2);
    bed.hung.insert(successor);
    bed.news();
    bed.fail(0);
    // The survivor does not wait, and the seat stays where it is.
    assert_eq!(bed.members(), [(1, 1)]);
    assert!(bed.plans().is_empty());
    let reserves = |action: &Action| matches!(action, Action::Reserve { .. });
    assert_eq!(bed.count(reserves), 0);
    bed.then(exited(successor, Exit::Signal(9), ""));
    assert_eq!(bed.plans(), [[(1, 1), (0, 2), (2, 3)]]);
    // The end of another one is never seen.
    bed.hung.extend([bed.last(0), bed.last(2)]);
    bed.fail(0);
    bed.pass(s(19));
    assert_eq!(bed.plans().len(), 1);
    bed.pass(s(2));
    assert!(bed.plans().len() > 1);
}

#[test]
fn a_new_process_that_fails_costs_a_restart_and_no_member() {
    let mut bed = Bed::planned(1, 2, &[2]);
    bed.fail(1);
    // The first one is replaced at once, and others after pauses.
    for (failures, pause) in [(2, 0), (3, 1)] {
        let plans = bed.plans().len();
        bed.fail(1);
        assert_eq!(bed.plans().len() == plans, pause > 0);
        bed.pass(s(pause));
        assert_eq!(bed.plans().len(), plans + 1);
        assert_eq!(bed.members(), [(0, 1)]);
        assert_eq!((bed.restarts(), bed.end()), (failures, None));
    }
    bed.fail(1);
    let (end, why) = bed.end().unwrap();
    assert_eq!(end, End::TooManyRestarts);
    let start = "4 failures, allowed restarts: 3 (--max-restarts)";
    assert!(why.starts_with(start), "{why}");
}

#[test]
fn workers_that_return_before_they_have_met_have_done_their_work() {
    let mut bed = Bed::slow(limits(2, 2), &[2]);
    for process in [bed.last(0), bed.last(1)] {
        bed.then(returned(process));
    }
    assert_eq!(bed.how(), Some(End::Succeeded));
}

#[test]
fn members_that_can_not_go_on_without_a_loss_meet_again() {
    let mut bed = Bed::planned(1, 2, &[2]);
    bed.breaks(None, "a link");
    // The loss behind it may be heard of in a moment.
    assert_eq!(bed.number(), 1);
    bed.pass(s(1));
    assert_eq!((bed.number(), bed.members()), (2, vec![(0, 1), (1, 1)]));
    assert_eq!(bed.stopped(), []);
}

#[test]
fn a_member_that_never_asks_is_stopped_in_time() {
    let mut bed = Bed::planned(1, 3, &[1, 1, 1]);
    bed.hung.insert(bed.last(1));
    bed.fail(2);
    bed.pass(s(29));
    assert_eq!(bed.stopped(), []);
    bed.pass(s(2));
    assert_eq!(bed.stopped(), [(1, 1)]);
    assert_eq!(bed.members(), [(0, 1)]);
}

#[test]
fn too_few_survivors_wait_for_new_processes() {
    let mut bed = Bed::planned(2, 2, &[2]);
    bed.fail(0);
    assert!(bed.is_idle());
    // The survivor has the state.
    assert_eq!(bed.plans(), [[(1, 1), (0, 2)]]);
    bed.boot(0);
    assert_eq!(bed.members(), [(1, 1), (0, 2)]);
}

#[test]
fn a_job_that_lost_all_members_begins_anew() {
    let mut bed = Bed::up(limits(1, 2), &[2]);
    bed.all([bed.last(0), bed.last(1)].map(failed));
    assert_eq!(bed.members(), [(0, 2), (1, 2)]);
    assert_eq!(bed.restarts(), 1, "one is the echo of the other");
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
    let mut bed = Bed::planned(1, 2, &[1]);
    bed.offer(2, 1);
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
    let mut bed = Bed::planned(1, 3, &[2]);
    bed.then(returned(bed.last(0)));
    bed.offer(2, 1);
    bed.pass(s(5));
    assert!(bed.plans().is_empty());
    bed.then(returned(bed.last(1)));
    assert_eq!(bed.how(), Some(End::Succeeded));
}

#[test]
fn a_unit_of_a_host_is_in_a_group_as_a_whole() {
    let mut unit = limits(2, 4);
    unit.per_host = 2;
    // One node has both units here: the bed does not mind.
    let mut bed = Bed::up(unit, &[4]);
    bed.boots = false;
    bed.fail(1);
    assert_eq!(bed.members(), [(2, 1), (3, 1)]);
    // Its neighbour can't go on without it.
    assert_eq!(bed.stopped(), [(0, 1)]);
    let next = [(2, 1), (3, 1), (0, 2), (1, 2)];
    assert_eq!(bed.plans().last().unwrap(), &next);
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
                    self.boot(process.slot.0);
                }
            }
            Chance::Hold if !self.is_idle() => self.hold(0),
            Chance::Break if !self.is_idle() => self.breaks(None, "a link"),
            Chance::LoseNode(node) => {
                self.room.remove(&node);
                self.then(node_lost(node, self.now));
            }
            Chance::Drain(node) => {
                self.room.remove(&node);
                self.then(drain(node));
            }
            Chance::Join(node) => self.offer(node, 2),
            Chance::Pass(time) => self.pass(ms(time)),
            Chance::Hold | Chance::Break => {}
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
        let mut limits = limits(min, 4);
        limits.restarts_without_progress = 1000;
        let mut bed = Bed::slow(limits, &[2, 1]);
        let mut plan: Option<Arc<Generation>> = None;
        let mut last: Option<Arc<Generation>> = None;
        for chance in chances {
            bed.happens(chance);
            for action in std::mem::take(&mut bed.done) {
                match action {
                    Action::Plan(generation) => plan = Some(generation),
                    Action::Active(generation) => {
                        let now = members(&generation);
                        let before = last.as_deref().map(members).unwrap_or_default();
                        let (old, new): (Members, Members) =
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
