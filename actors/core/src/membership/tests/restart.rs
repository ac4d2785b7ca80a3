//! A group that is started anew at each change. Tests that have a model in torchelastic's have its name.

mod falls;

use super::*;

fn limits(min: u32, max: u32, max_restarts: u32) -> Limits {
    with(min, max, |it| {
        it.on_change = OnChange::Restart;
        it.restarts_without_progress = max_restarts;
    })
}

impl Bed {
    /// Processes have done their work, one after the other.
    fn done_by(&mut self, slots: &[u32]) {
        for slot in slots {
            let fact = returned(self.last(*slot));
            self.then(fact);
        }
    }

    fn join(&mut self, node: u64, room: u32) {
        self.offer(node, room);
        self.pass(s(2));
    }

    /// (rank, slot, node, incarnation) of the members.
    fn ranks(&self) -> Vec<(u32, u32, u64, u64)> {
        let active = self.active();
        let members = active.members().iter();
        let row = |member: &Member| {
            let Process { slot, incarnation } = member.process;
            (member.rank.0, slot.0, member.location.node.0, incarnation.0)
        };
        members.map(row).collect()
    }

    /// The nodes of the members, in rank order.
    fn nodes(&self) -> Vec<u64> {
        self.ranks().iter().map(|rank| rank.2).collect()
    }
}

#[test]
fn test_run_happy() {
    let mut bed = Bed::up(limits(4, 4, 3), &[4]);
    let expected = [(0, 0, 1, 1), (1, 1, 1, 1), (2, 2, 1, 1), (3, 3, 1, 1)];
    assert_eq!(bed.ranks(), expected);
    bed.done_by(&[2, 0, 1]);
    assert_eq!(bed.end(), None, "the group goes on until all have returned");
    bed.done_by(&[3]);
    let why = "all workers have returned: 4";
    assert_eq!(bed.end(), Some((End::Succeeded, why)));
    assert_eq!((bed.restarts(), bed.stopped()), (0, vec![]));
}

#[test]
fn test_restart_workers() {
    let mut bed = Bed::up(limits(4, 4, 3), &[2, 2]);
    for restart in 1..=3 {
        bed.fail(1);
        assert_eq!(bed.restarts(), restart);
        let stops = bed.stopped().len();
        assert_eq!(stops, 3 * restart as usize, "one has failed");
        let next = u64::from(restart) + 1;
        let nodes = [(0, 0, 1), (1, 1, 1), (2, 2, 2), (3, 3, 2)];
        let expected = nodes.map(|(rank, slot, node)| (rank, slot, node, next));
        assert_eq!((bed.number(), bed.ranks()), (next, expected.to_vec()));
    }
    let cause = "4 -> 4 workers, failures so far 3 of 3: rank 1 on h1: exit code 1: boom";
    assert_eq!(bed.active().cause(), cause);
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
            "a worker has failed, and no restart is allowed (--max-restarts 0)".to_owned()
        } else {
            format!(
                "{failures} failures, allowed restarts: {max_restarts} (--max-restarts); the first: rank 0 on h1: exit code 1"
            )
        };
        assert!(why.starts_with(&start), "{why}");
        assert!(bed.is_idle());
    }
}

#[test]
fn test_run_membership_change() {
    let mut bed = Bed::up(limits(1, 3, 1), &[1]);
    for node in [2, 3] {
        bed.join(node, 1);
        assert_eq!(bed.number(), node, "the group is stopped at once");
    }
    assert_eq!(bed.active().members().len(), 3);
    let cause = "2 -> 3 workers, failures so far 0 of 1: there is room for more";
    assert_eq!(bed.active().cause(), cause);
    assert_eq!(bed.restarts(), 0, "joins cost nothing");
    bed.done_by(&[0, 1, 2]);
    assert_eq!(bed.how(), Some(End::Succeeded));
}

#[test]
fn test_run_sad_function() {
    let mut bed = Bed::up(limits(8, 8, 1), &[4, 4]);
    let all: [Fact; 8] = std::array::from_fn(|slot| failed(process(slot as u32, 1)));
    bed.all(all);
    assert_eq!(bed.restarts(), 1, "they fail together");
    assert_eq!((bed.number(), bed.stopped()), (2, vec![]));
}

#[test]
fn test_run_bipolar_function() {
    let mut bed = Bed::up(limits(4, 4, 2), &[4]);
    for number in [2, 3] {
        bed.done_by(&[0, 2]);
        bed.fail(1);
        // Those that had returned are started, too.
        assert_eq!((bed.number(), bed.slots().len()), (number, 4));
    }
    bed.fail(3);
    assert_eq!(bed.how(), Some(End::TooManyRestarts));
}

#[test]
fn test_workers_drift_success() {
    let mut bed = Bed::up(limits(1, 4, 0), &[1, 1]);
    bed.done_by(&[1]);
    bed.join(3, 2);
    // Nobody joins a group that has begun to return, and nothing is waited for by time.
    bed.pass(s(3600));
    assert_eq!((bed.number(), bed.end()), (1, None));
    bed.done_by(&[0]);
    assert_eq!(bed.how(), Some(End::Succeeded));
}

#[test]
fn test_run_with_double_agent_fault_tolerance() {
    let mut bed = Bed::up(limits(2, 2, 0), &[1, 1, 1]);
    bed.then(node_lost(2, bed.now));
    assert_eq!(bed.ranks(), [(0, 0, 1, 2), (1, 1, 3, 2)]);
    assert_eq!(bed.restarts(), 0, "a lost node costs nothing");
    bed.done_by(&[0, 1]);
    assert_eq!(bed.how(), Some(End::Succeeded));
}

#[test]
fn test_run_with_double_agent_elastic() {
    let mut bed = Bed::up(limits(1, 2, 0), &[1, 1]);
    bed.then(node_lost(1, bed.now));
    assert_eq!(bed.ranks(), [(0, 1, 2, 2)]);
    bed.done_by(&[1]);
    assert_eq!(bed.how(), Some(End::Succeeded));
}

#[test]
fn test_redundancy_transition_to_wait_list_then_join_rendezvous() {
    let mut bed = Bed::up(limits(2, 2, 3), &[1, 1]);
    bed.join(3, 1);
    assert_eq!(bed.number(), 1, "a full group is left alone");
    bed.then(node_lost(1, bed.now));
    // Survivors keep their ranks.
    assert_eq!(bed.ranks(), [(0, 0, 3, 2), (1, 1, 2, 2)]);
}

#[test]
fn test_redundancy_list_is_not_started_with_too_few() {
    let mut bed = Bed::up(limits(2, 3, 3), &[1, 1]);
    bed.then(node_lost(2, bed.now));
    assert!(bed.is_idle());
    bed.pass(s(29));
    assert_eq!(bed.end(), None);
    bed.pass(s(2));
    let (how, why) = bed.end().unwrap();
    assert_eq!(how, End::BelowMin);
    let lost = "rank 1 on h2: its node was lost: cable";
    assert!(why.contains(lost), "{why}");
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
    bed.offer(3, 1);
    assert_eq!(bed.number(), 2);
}

#[test]
fn a_failure_while_the_group_starts_costs_a_restart() {
    let mut bed = Bed::slow(limits(2, 2, 1), &[2]);
    bed.boot(0);
    bed.boots = true;
    bed.then(exited(process(1, 1), Exit::Code(127), "no such file"));
    assert_eq!((bed.number(), bed.restarts()), (2, 1));
    assert_eq!(bed.ranks(), [(0, 0, 1, 2), (1, 1, 1, 2)]);
    bed.fail(1);
    assert_eq!(bed.how(), Some(End::TooManyRestarts));
}

#[test]
fn a_process_that_is_done_before_the_others_have_started_has_returned() {
    let mut bed = Bed::slow(limits(2, 2, 0), &[2]);
    bed.done_by(&[0]);
    assert!(bed.is_idle());
    bed.boot(1);
    assert_eq!(bed.number(), 1);
    bed.done_by(&[1]);
    assert_eq!(bed.how(), Some(End::Succeeded));
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
    assert!(bed.is_idle(), "nobody has seen its end");
    bed.then(exited(process(1, 1), Exit::Code(1), "given up"));
    assert_eq!((bed.number(), bed.restarts()), (2, 1));
}

#[test]
fn a_node_that_leaves_is_left_at_once_if_others_are_enough() {
    let mut bed = Bed::up(limits(2, 4, 0), &[2, 2]);
    bed.then(drain(2));
    assert_eq!(bed.ranks(), [(0, 0, 1, 2), (1, 1, 1, 2)]);
    let cause = "4 -> 2 workers, failures so far 0 of 0: h2 leaves: maintenance";
    assert_eq!(bed.active().cause(), cause);

    let mut bed = Bed::up(limits(4, 4, 0), &[2, 2]);
    bed.then(drain(2));
    assert_eq!(bed.number(), 1, "they are needed until others come");
    bed.join(3, 2);
    let expected = [(0, 0, 1, 2), (1, 1, 1, 2), (2, 4, 3, 1), (3, 5, 3, 1)];
    assert_eq!(bed.ranks(), expected);
    assert_eq!(bed.restarts(), 0);
}

/// Two workers on each host.
fn on_whole_hosts(min: u32, max: u32) -> Limits {
    let mut limits = limits(min, max, 3);
    limits.per_host = 2;
    limits
}

#[test]
fn ranks_of_a_node_follow_each_other_and_whole_hosts_take_part() {
    let mut bed = Bed::up(on_whole_hosts(2, 6), &[2]);
    assert_eq!(bed.ranks(), [(0, 0, 1, 1), (1, 1, 1, 1)]);
    bed.room.insert(2, 2);
    bed.join(3, 2);
    assert_eq!(bed.number(), 2, "they join together");
    assert_eq!(bed.nodes(), [1, 1, 2, 2, 3, 3]);
    bed.then(node_lost(1, bed.now));
    assert_eq!(bed.nodes(), [2, 2, 3, 3]);
    bed.fail(3);
    assert_eq!(bed.nodes(), [2, 2, 3, 3]);
    assert_eq!(bed.restarts(), 1);
}

#[test]
fn a_host_is_replaced_as_a_whole_and_its_room_is_given_back_if_its_last_process_ends_late() {
    let mut bed = Bed::up(on_whole_hosts(4, 4), &[2, 2, 2]);
    assert_eq!(bed.nodes(), [1, 1, 2, 2]);
    bed.hung.insert(process(1, 1));
    bed.fail(0);
    bed.pass(s(21));
    assert!(bed.is_idle(), "nobody has seen its end");
    assert_eq!((bed.restarts(), bed.room[&3]), (1, 0));
    bed.then(exited(process(1, 1), Exit::Signal(9), ""));
    assert_eq!(bed.nodes(), [1, 1, 2, 2]);
    assert!(bed.done.contains(&give_back(&[4, 5])));
}

#[test]
fn a_host_that_cools_down_gets_no_process_meanwhile() {
    let mut limits = limits(1, 2, 3);
    limits.cooldown = Some(s(10)..=s(100));
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
    let mut limits = limits(1, 2, 9);
    limits.max_resets = Some(1);
    let mut bed = Bed::up(limits, &[1]);
    bed.fail(0);
    assert_eq!(bed.number(), 2);
    bed.join(2, 1);
    assert_eq!(bed.number(), 2, "the last change is not made for a join");
    bed.fail(0);
    let (how, why) = bed.end().unwrap();
    assert_eq!(how, End::ResetLimit);
    let start =
        "changes of the membership: 1, which is the limit (--reset-limit), and rank 0 on h1: exit";
    assert!(why.starts_with(start), "{why}");
}

#[test]
fn a_group_that_may_not_change_any_more_gives_back_the_room_that_it_does_not_use() {
    let mut limits = limits(2, 4, 9);
    limits.max_resets = Some(1);
    limits.cooldown = Some(s(60)..=s(600));
    let mut bed = Bed::up(limits, &[2, 2]);
    assert_eq!(bed.nodes(), [1, 1, 2, 2]);
    bed.fail(0);
    assert_eq!((bed.number(), bed.nodes()), (2, vec![2, 2]));
    assert!(bed.done.contains(&give_back(&[0, 1])));
}
