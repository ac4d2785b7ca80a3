//! A group that is started anew at each change. Tests that have a model in torchelastic's have its name.

mod falls;

use super::*;

fn limits(min: u32, max: u32, max_restarts: u32) -> Limits {
    Limits {
        on_change: OnChange::Restart,
        restarts_without_progress: max_restarts,
        ..Limits::elastic(min, max)
    }
}

/// A process that has done its work, as a member of the generation that was published last.
fn returned(bed: &Bed, slot: u32, generation: u64) -> Fact {
    Fact::Exited {
        process: bed.last(slot),
        exit: Exit::Code(0),
        generation: ids::Generation(generation),
        said: String::new(),
    }
}

impl Bed {
    fn done_by(&mut self, slots: &[u32]) {
        let generation = self.number();
        for slot in slots {
            let fact = returned(self, *slot, generation);
            self.then(fact);
        }
    }

    fn join(&mut self, node: u64, room: u32) {
        self.room.insert(node, room);
        self.then(Fact::Offered);
        self.pass(s(2));
    }

    /// Of the generation that is active, or 0.
    fn last_number(&self) -> u64 {
        let active = self.membership.active();
        active.map_or(0, |active| active.number().0)
    }

    fn restarts(&self) -> u32 {
        self.membership.budget().without_progress()
    }

    fn stops(&self) -> usize {
        let stops = self.done.iter();
        stops
            .filter(|action| matches!(action, Action::Stop { .. }))
            .count()
    }

    /// (rank, slot, node, incarnation) of the members.
    fn ranks(&self) -> Vec<(u32, u32, u64, u64)> {
        let active = self.active();
        let members = active.members().iter();
        members
            .map(|member| {
                let Process { slot, incarnation } = member.process;
                (member.rank.0, slot.0, member.location.node.0, incarnation.0)
            })
            .collect()
    }
}

#[test]
fn test_run_happy() {
    let mut bed = Bed::up(limits(4, 4, 3), &[4]);
    assert_eq!(
        bed.ranks(),
        [(0, 0, 1, 1), (1, 1, 1, 1), (2, 2, 1, 1), (3, 3, 1, 1)]
    );
    bed.done_by(&[2, 0, 1]);
    assert_eq!(bed.end(), None, "the group goes on until all have returned");
    bed.done_by(&[3]);
    assert_eq!(
        bed.end(),
        Some((End::Succeeded, "all workers have returned: 4"))
    );
    assert_eq!((bed.restarts(), bed.stops()), (0, 0));
}

#[test]
fn test_restart_workers() {
    let mut bed = Bed::up(limits(4, 4, 3), &[2, 2]);
    for restart in 1..=3 {
        bed.fail(1);
        assert_eq!(bed.number(), u64::from(restart) + 1);
        assert_eq!(bed.restarts(), restart);
        assert_eq!(
            bed.stops(),
            3 * restart as usize,
            "the one that failed needs no stop"
        );
        let incarnation = u64::from(restart) + 1;
        assert_eq!(
            bed.ranks(),
            [
                (0, 0, 1, incarnation),
                (1, 1, 1, incarnation),
                (2, 2, 2, incarnation),
                (3, 3, 2, incarnation)
            ]
        );
    }
    let cause = bed.active().cause().to_owned();
    assert_eq!(
        cause,
        "4 -> 4 workers, failures so far 3 of 3: rank 1 on h1: exit code 1: boom"
    );
}

#[test]
fn test_run_max_retries_exceeded() {
    for max_restarts in [0, 1, 2, 5] {
        let mut bed = Bed::up(limits(2, 2, max_restarts), &[2]);
        for _ in 0..max_restarts {
            bed.fail(0);
            assert_eq!(bed.end(), None);
        }
        assert_eq!(bed.number(), u64::from(max_restarts) + 1);
        bed.fail(0);
        let (how, why) = bed.end().unwrap();
        assert_eq!(how, End::TooManyRestarts);
        let failures = max_restarts + 1;
        let start = if max_restarts == 0 {
            "a worker has failed, and no restart is allowed (max_restarts=0)".to_owned()
        } else {
            format!(
                "{failures} failures, allowed restarts: {max_restarts} (max_restarts); the first: rank 0 on h1: exit code 1"
            )
        };
        assert!(why.starts_with(&start), "{why}");
        assert_eq!(bed.membership.active(), None);
    }
}

#[test]
fn test_run_membership_change() {
    let mut bed = Bed::up(limits(1, 3, 1), &[1]);
    for node in [2, 3] {
        bed.join(node, 1);
        assert_eq!(
            bed.number(),
            node,
            "the group is stopped at once, whatever it does"
        );
    }
    assert_eq!(bed.active().members().len(), 3);
    assert_eq!(
        bed.active().cause(),
        "2 -> 3 workers, failures so far 0 of 1: there is room for more"
    );
    assert_eq!(bed.restarts(), 0, "joins cost nothing");
    bed.done_by(&[0, 1, 2]);
    assert_eq!(bed.end().unwrap().0, End::Succeeded);
}

#[test]
fn test_run_sad_function() {
    let mut bed = Bed::up(limits(8, 8, 1), &[4, 4]);
    let all: [Fact; 8] = std::array::from_fn(|slot| failed(process(slot as u32, 1)));
    bed.now += ms(1);
    bed.steps(all);
    bed.settle();
    assert_eq!(bed.restarts(), 1, "they fail together");
    assert_eq!((bed.number(), bed.stops()), (2, 0));
}

#[test]
fn test_run_bipolar_function() {
    let mut bed = Bed::up(limits(4, 4, 2), &[4]);
    for _ in 0..2 {
        let number = bed.number();
        bed.done_by(&[0, 2]);
        bed.fail(1);
        assert_eq!(bed.number(), number + 1);
        assert_eq!(
            bed.active().members().len(),
            4,
            "those that had returned are started, too"
        );
    }
    bed.fail(3);
    assert_eq!(bed.end().unwrap().0, End::TooManyRestarts);
}

#[test]
fn test_workers_drift_success() {
    let mut bed = Bed::up(limits(1, 4, 0), &[1, 1]);
    bed.done_by(&[1]);
    bed.join(3, 2);
    assert_eq!(
        bed.number(),
        1,
        "nobody joins a group that has begun to return"
    );
    bed.pass(s(3600));
    assert_eq!(bed.end(), None, "nothing is waited for by time");
    bed.done_by(&[0]);
    assert_eq!(bed.end().unwrap().0, End::Succeeded);
}

#[test]
fn test_run_with_double_agent_fault_tolerance() {
    let mut bed = Bed::up(limits(2, 2, 0), &[1, 1, 1]);
    bed.then(node_lost(2, bed.now));
    assert_eq!(bed.ranks(), [(0, 0, 1, 2), (1, 1, 3, 2)]);
    assert_eq!(bed.restarts(), 0, "a lost node costs nothing");
    bed.done_by(&[0, 1]);
    assert_eq!(bed.end().unwrap().0, End::Succeeded);
}

#[test]
fn test_run_with_double_agent_elastic() {
    let mut bed = Bed::up(limits(1, 2, 0), &[1, 1]);
    bed.then(node_lost(1, bed.now));
    assert_eq!(bed.ranks(), [(0, 1, 2, 2)]);
    bed.done_by(&[1]);
    assert_eq!(bed.end().unwrap().0, End::Succeeded);
}

#[test]
fn test_redundancy_transition_to_wait_list_then_join_rendezvous() {
    let mut bed = Bed::up(limits(2, 2, 3), &[1, 1]);
    bed.join(3, 1);
    assert_eq!(bed.number(), 1, "a full group is left alone");
    bed.then(node_lost(1, bed.now));
    assert_eq!(
        bed.ranks(),
        [(0, 0, 3, 2), (1, 1, 2, 2)],
        "survivors keep their ranks"
    );
}

#[test]
fn test_redundancy_list_is_not_started_with_too_few() {
    let mut bed = Bed::up(limits(2, 3, 3), &[1, 1]);
    bed.then(node_lost(2, bed.now));
    assert!(bed.membership.active().is_none());
    bed.pass(s(29));
    assert_eq!(bed.end(), None);
    bed.pass(s(2));
    let (how, why) = bed.end().unwrap();
    assert_eq!(how, End::BelowMin);
    assert!(
        why.contains("rank 1 on h2: its node was lost: cable"),
        "{why}"
    );
}

#[test]
fn g3_the_next_group_waits_for_the_end_of_each_process() {
    let mut bed = Bed::up(limits(3, 3, 3), &[3]);
    bed.hung.insert(process(2, 1));
    bed.fail(0);
    assert!(bed.membership.active().is_none());
    // A second loss meanwhile, and one that returns.
    bed.pass(s(15));
    assert!(bed.membership.active().is_none());
    bed.then(exited(process(2, 1), Exit::Code(0), ""));
    assert_eq!(bed.number(), 2);
    assert_eq!(bed.restarts(), 1);
    assert_eq!(bed.ranks(), [(0, 0, 1, 2), (1, 1, 1, 2), (2, 2, 1, 2)]);
}

#[test]
fn a_slow_stop_is_not_taken_from_the_time_to_start() {
    let mut bed = Bed::up(limits(2, 2, 3), &[1, 1]);
    bed.hung.insert(process(1, 1));
    bed.fail(0);
    bed.pass(s(19));
    bed.room.clear();
    // The host of the other one goes just then: 30 s begin now.
    bed.then(node_lost(2, bed.now));
    bed.pass(s(29));
    assert_eq!(bed.end(), None);
    bed.room.insert(3, 1);
    bed.then(Fact::Offered);
    assert_eq!(bed.number(), 2);
}

#[test]
fn a_process_whose_end_nobody_sees_is_given_up_and_no_group_is_formed_beside_it() {
    let mut bed = Bed::up(limits(2, 2, 3), &[3]);
    bed.hung.insert(process(1, 1));
    bed.fail(0);
    bed.pass(s(21));
    assert!(bed.membership.active().is_none());
    assert_eq!(bed.restarts(), 1, "that is no failure of the program");
    bed.then(exited(process(1, 1), Exit::Signal(9), ""));
    assert_eq!(bed.number(), 2);
}

#[test]
fn a_failure_while_the_group_starts_costs_a_restart() {
    let mut bed = Bed::new(limits(2, 2, 1), &[2]);
    bed.boots = false;
    bed.settle();
    bed.ready(process(0, 1));
    bed.boots = true;
    bed.then(exited(process(1, 1), Exit::Code(127), "no such file"));
    assert_eq!((bed.number(), bed.restarts()), (2, 1));
    assert_eq!(bed.ranks(), [(0, 0, 1, 2), (1, 1, 1, 2)]);
    bed.fail(1);
    assert_eq!(bed.end().unwrap().0, End::TooManyRestarts);
}

#[test]
fn a_process_that_is_done_before_the_others_have_started_has_returned() {
    let mut bed = Bed::new(limits(2, 2, 0), &[2]);
    bed.boots = false;
    bed.settle();
    let fact = returned(&bed, 0, 1);
    bed.then(fact);
    assert!(bed.membership.active().is_none());
    bed.ready(process(1, 1));
    bed.settle();
    assert_eq!(bed.number(), 1);
    bed.done_by(&[1]);
    assert_eq!(bed.end().unwrap().0, End::Succeeded);
}

#[test]
fn a_process_that_never_runs_is_late() {
    let mut bed = Bed::new(limits(2, 2, 1), &[2]);
    bed.hung.insert(process(1, 1));
    bed.settle();
    bed.pass(s(29));
    assert_eq!(bed.restarts(), 0);
    bed.pass(s(2));
    assert_eq!(bed.restarts(), 1);
    assert!(bed.membership.active().is_none(), "nobody has seen its end");
    bed.then(exited(process(1, 1), Exit::Code(1), "given up"));
    assert_eq!((bed.number(), bed.restarts()), (2, 1));
}

#[test]
fn a_node_that_leaves_is_left_at_once_if_others_are_enough() {
    let mut bed = Bed::up(limits(2, 4, 0), &[2, 2]);
    bed.then(drain(2));
    assert_eq!(bed.ranks(), [(0, 0, 1, 2), (1, 1, 1, 2)]);
    assert_eq!(
        bed.active().cause(),
        "4 -> 2 workers, failures so far 0 of 0: h2 leaves: maintenance"
    );

    let mut bed = Bed::up(limits(4, 4, 0), &[2, 2]);
    bed.then(drain(2));
    assert_eq!(bed.number(), 1, "they are needed until others come");
    bed.join(3, 2);
    assert_eq!(
        bed.ranks(),
        [(0, 0, 1, 2), (1, 1, 1, 2), (2, 4, 3, 1), (3, 5, 3, 1)]
    );
    assert_eq!(bed.restarts(), 0);
}

fn nodes(bed: &Bed) -> Vec<u64> {
    bed.ranks().iter().map(|rank| rank.2).collect()
}

/// Two workers on each host.
fn on_whole_hosts(min: u32, max: u32) -> Limits {
    Limits {
        per_host: 2,
        ..limits(min, max, 3)
    }
}

#[test]
fn ranks_of_a_node_follow_each_other_and_whole_hosts_take_part() {
    let mut bed = Bed::up(on_whole_hosts(2, 6), &[2]);
    assert_eq!(bed.ranks(), [(0, 0, 1, 1), (1, 1, 1, 1)]);
    bed.room.insert(2, 2);
    bed.join(3, 2);
    assert_eq!(bed.number(), 2, "they join together");
    assert_eq!(nodes(&bed), [1, 1, 2, 2, 3, 3]);
    bed.then(node_lost(1, bed.now));
    assert_eq!(nodes(&bed), [2, 2, 3, 3]);
    bed.fail(3);
    assert_eq!(nodes(&bed), [2, 2, 3, 3]);
    assert_eq!(bed.restarts(), 1);
}

#[test]
fn a_host_is_replaced_as_a_whole_and_its_room_is_given_back_if_its_last_process_ends_late() {
    let mut bed = Bed::up(on_whole_hosts(4, 4), &[2, 2, 2]);
    assert_eq!(nodes(&bed), [1, 1, 2, 2]);
    bed.hung.insert(process(1, 1));
    bed.fail(0);
    bed.pass(s(21));
    assert!(bed.membership.active().is_none(), "nobody has seen its end");
    assert_eq!(bed.room[&3], 0);
    bed.then(exited(process(1, 1), Exit::Signal(9), ""));
    assert_eq!(nodes(&bed), [1, 1, 2, 2]);
    let slots = vec![Slot(4), Slot(5)];
    assert!(bed.done.contains(&Action::GiveBack { slots }));
}

#[test]
fn a_host_that_cools_down_gets_no_process_meanwhile() {
    let limits = Limits {
        cooldown: Some(s(10)..=s(100)),
        ..limits(1, 2, 3)
    };
    let mut bed = Bed::up(limits, &[1, 1]);
    bed.fail(1);
    assert_eq!(bed.ranks(), [(0, 0, 1, 2)]);
    bed.pass(s(9));
    assert_eq!(bed.number(), 2);
    bed.pass(s(31));
    assert_eq!(bed.ranks(), [(0, 0, 1, 3), (1, 1, 2, 2)]);
    assert_eq!(bed.restarts(), 1);
}

#[test]
fn the_limit_of_changes_ends_the_job() {
    let limits = Limits {
        max_resets: Some(1),
        ..limits(1, 2, 9)
    };
    let mut bed = Bed::up(limits, &[1]);
    bed.fail(0);
    assert_eq!(bed.number(), 2);
    bed.join(2, 1);
    assert_eq!(
        bed.number(),
        2,
        "a change that would be the last is not made for a join"
    );
    bed.fail(0);
    let (how, why) = bed.end().unwrap();
    assert_eq!(how, End::ResetLimit);
    assert!(
        why.starts_with(
            "changes of the membership: 1, which is the limit (reset_limit), and rank 0 on h1: exit"
        ),
        "{why}"
    );
}

#[test]
fn a_group_that_may_not_change_any_more_gives_back_the_room_that_it_does_not_use() {
    let limits = Limits {
        max_resets: Some(1),
        cooldown: Some(s(60)..=s(600)),
        ..limits(2, 4, 9)
    };
    let mut bed = Bed::up(limits, &[2, 2]);
    assert_eq!(nodes(&bed), [1, 1, 2, 2]);
    bed.fail(0);
    assert_eq!((bed.number(), nodes(&bed)), (2, vec![2, 2]));
    let slots = vec![Slot(0), Slot(1)];
    assert!(bed.done.contains(&Action::GiveBack { slots }));
}
