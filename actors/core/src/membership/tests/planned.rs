//! A group whose survivors go on, and whose new processes are started with their ranks.

use super::*;

fn limits(min: u32, max: u32) -> Limits {
    Limits {
        mode: Mode::Planned {
            stop_timeout: s(20),
        },
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
        let process = self.membership.roster().seats()[slot as usize].process();
        self.ready(process);
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
    let successor = bed.membership.roster().seats()[2].process();
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
    bed.hung
        .extend([0, 2].map(|slot: usize| bed.membership.roster().seats()[slot].process()));
    bed.then(failed(bed.membership.roster().seats()[0].process()));
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
    for failures in 2..=3 {
        bed.fail(1);
        assert_eq!(bed.members(), [(0, 1)]);
        assert_eq!(bed.membership.budget().without_progress(), failures);
        assert_eq!(bed.end(), None);
    }
    bed.fail(1);
    let (end, why) = bed.end().unwrap();
    assert_eq!(end, End::TooManyRestarts);
    assert!(
        why.starts_with("4 failures, allowed are 3 restarts (max_restarts)"),
        "{why}"
    );
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
    let hung = bed.membership.roster().seats()[1].process();
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
    let processes = [0, 1].map(|slot: usize| bed.membership.roster().seats()[slot].process());
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
    bed.then(Fact::Drain {
        node: NodeId(1),
        why: "maintenance".to_owned(),
    });
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
    let process = bed.membership.roster().seats()[0].process();
    bed.then(exited(process, Exit::Code(0), ""));
    bed.room.insert(2, 1);
    bed.then(Fact::Offered);
    bed.pass(s(5));
    assert_eq!(bed.plans().len(), 1);
    let process = bed.membership.roster().seats()[1].process();
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
