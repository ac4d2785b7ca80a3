//! Each rule of the policy, by itself.

use super::*;

/// What the policy looks at.
struct Case {
    now: Instant,
    limits: Limits,
    roster: Roster,
    budget: Budget,
    previous: Option<Generation>,
}

impl Case {
    /// Booting processes in slots 0, 1, ... on these nodes.
    fn booting(limits: Limits, nodes: &[u64]) -> Self {
        let now = Instant::now();
        let mut case = Self {
            now,
            limits,
            roster: Roster::default(),
            budget: Budget::new(now, 1),
            previous: None,
        };
        case.add(nodes);
        case
    }

    /// Processes on these nodes are the members of generation 1.
    fn active(limits: Limits, nodes: &[u64]) -> Self {
        let mut case = Self::booting(limits, nodes);
        let slots: Vec<u32> = (0..nodes.len() as u32).collect();
        case.ready(&slots);
        let generation = first(&arrange(None, case.roster.live()));
        case.roster.activate(case.now, &generation);
        case.budget.formed(false);
        case.previous = Some(generation);
        case
    }

    fn reserve(&mut self, count: usize) -> Vec<Slot> {
        self.roster.reserve(self.now, count, 1, &BTreeSet::new())
    }

    fn add(&mut self, nodes: &[u64]) {
        for (slot, node) in self.reserve(nodes.len()).into_iter().zip(nodes) {
            self.take(reserved(slot.0, *node));
        }
    }

    fn take(&mut self, fact: Fact) {
        self.now += ms(1);
        self.roster.take(self.now, &fact).unwrap();
    }

    fn ready(&mut self, slots: &[u32]) {
        for slot in slots {
            let process = self.roster.seats()[*slot as usize].process();
            self.take(ready(process));
        }
    }

    /// A member is lost, so that no generation is active any more.
    fn lose(&mut self, slots: &[u32]) {
        for slot in slots {
            self.take(failed(process(*slot, 1)));
        }
        self.idle();
    }

    /// No generation is active any more, or its members hold.
    fn idle(&mut self) {
        self.budget.idle(self.now, "lost");
    }

    /// The first host has a failure, and cools down.
    fn cools(&mut self) {
        self.limits.cooldown = Some(s(10)..=s(10));
        let (now, host) = (self.now, host(1));
        self.budget
            .failed(now, &self.limits, now, Some(&host), "failure");
    }

    /// Nobody has room for more.
    fn full(&mut self) {
        let slot = self.reserve(1)[0];
        self.take(refused(slot));
    }

    /// Until when the job waits for a group.
    fn deadline(&self) -> Instant {
        self.budget.idle_since().unwrap() + s(30)
    }

    fn decide(&self) -> Decision {
        let previous = self.previous.as_ref();
        let (limits, roster) = (&self.limits, &self.roster);
        decide(self.now, roster, limits, &self.budget, previous, None)
    }

    fn choice(&self) -> Choice {
        self.decide().choice
    }

    fn decides(&self, expected: Choice, why: &str) {
        let Decision { choice, reason } = self.decide();
        assert_eq!((choice, reason.as_str()), (expected, why));
    }

    fn ends(&self, expected: End, words: &[&str]) {
        let Decision { choice, reason } = self.decide();
        assert_eq!(choice, Choice::End(expected), "{reason}");
        for word in words {
            assert!(reason.contains(word), "{word} in {reason}");
        }
    }
}

/// A group of these slots, whose first processes are in it.
fn form(slots: &[u32]) -> Choice {
    Choice::Form(slots.iter().map(|slot| process(*slot, 1)).collect())
}

/// A group of these slots and incarnations.
fn group(processes: &[(u32, u64)]) -> Choice {
    let processes = processes.iter();
    Choice::Form(processes.map(|(slot, nth)| process(*slot, *nth)).collect())
}

fn ask(purpose: Purpose, count: usize) -> Choice {
    Choice::Ask { purpose, count }
}

#[test]
fn a_job_asks_for_its_most_and_its_spares() {
    let mut case = Case::booting(with(2, 4, |it| it.spares = 2), &[]);
    assert_eq!(case.choice(), ask(Purpose::Grow, 4));
    case.add(&[1, 1, 2]);
    assert_eq!(case.choice(), ask(Purpose::Grow, 1));
    case.add(&[2]);
    assert_eq!(case.choice(), ask(Purpose::Spare, 2));
    case.add(&[3]);
    assert_eq!(case.choice(), ask(Purpose::Spare, 1));
    case.full();
    assert!(matches!(case.choice(), Choice::WaitUntil(_)));
    case.take(Fact::Offered);
    assert_eq!(case.choice(), ask(Purpose::Spare, 1));
}

#[test]
fn after_a_refusal_only_seats_that_are_held_are_used() {
    let mut case = Case::active(Limits::elastic(1, 4), &[1, 1, 2]);
    assert_eq!(case.choice(), ask(Purpose::Grow, 1));
    case.full();
    assert_eq!(case.choice(), Choice::Keep);
    case.lose(&[0]);
    assert_eq!(case.choice(), ask(Purpose::Replace, 1));
    // A cool-down takes the seat away, and its end gives it back.
    case.cools();
    assert_eq!(case.choice(), form(&[1, 2]));
    case.now += s(10);
    assert_eq!(case.choice(), ask(Purpose::Replace, 2));
}

#[test]
fn the_first_group_waits_for_others_on_their_way_for_the_join_window() {
    let mut case = Case::booting(Limits::elastic(2, 3), &[1, 1, 2]);
    let deadline = case.deadline();
    case.ready(&[0]);
    assert_eq!(case.choice(), Choice::WaitUntil(deadline));
    let window = case.now + s(1);
    case.now += ms(500);
    case.ready(&[2]);
    // It is counted from the first one that is ready.
    assert_eq!(case.choice(), Choice::WaitUntil(window));
    case.now = window;
    assert_eq!(case.choice(), form(&[0, 2]));
    case.ready(&[1]);
    assert_eq!(case.choice(), form(&[0, 1, 2]));
    // No longer than the start timeout.
    let limits = with(1, 2, |it| it.join_window = s(60));
    let mut case = Case::booting(limits, &[1, 1]);
    let deadline = case.deadline();
    case.ready(&[0]);
    assert_eq!(case.choice(), Choice::WaitUntil(deadline));
    case.now = deadline;
    assert_eq!(case.choice(), form(&[0]));
}

#[test]
fn below_the_minimum_the_job_waits_for_the_start_timeout_and_ends() {
    let mut case = Case::booting(Limits::elastic(2, 2), &[1, 2]);
    let deadline = case.deadline();
    case.ready(&[0]);
    case.now = deadline.checked_sub(ms(1)).unwrap();
    assert_eq!(case.choice(), Choice::WaitUntil(deadline));
    case.now = deadline;
    let why = "ready processes: 1; needed are at least 2 (min_workers), and no more came within the start timeout of 30s; \
               late: process 1 of slot 1 on h2";
    case.ends(End::BelowMin, &[why]);
}

#[test]
fn a_group_shrinks_at_once_and_takes_whoever_is_ready() {
    let mut case = Case::active(Limits::elastic(2, 3), &[1, 1, 2]);
    case.lose(&[0]);
    case.full();
    case.cools();
    let why = "3 -> 2 members: rank 0 (process 1 of slot 0 on h1) is lost: exit code 1: boom";
    case.decides(form(&[1, 2]), why);
    // A spare takes the place, behind the survivors.
    case.add(&[3]);
    case.ready(&[0]);
    assert_eq!(case.choice(), group(&[(1, 1), (2, 1), (0, 2)]));
}

#[test]
fn survivors_do_not_wait_for_processes_on_their_way() {
    let mut case = Case::active(Limits::elastic(1, 4), &[1, 2]);
    case.lose(&[0]);
    assert_eq!(case.choice(), ask(Purpose::Replace, 3));
    case.add(&[3, 3, 3]);
    assert_eq!(case.choice(), form(&[1]));
    // Not even when one has come just now.
    case.ready(&[2]);
    assert_eq!(case.choice(), form(&[1, 2]));
}

#[test]
fn an_intact_group_grows_at_a_commit_and_after_the_join_window() {
    let mut case = Case::active(Limits::elastic(1, 4), &[1, 1]);
    case.add(&[2, 2]);
    assert_eq!(case.choice(), Choice::Keep);
    case.ready(&[2]);
    let window = case.now + s(1);
    assert_eq!(case.choice(), Choice::WaitUntil(window));
    case.now += ms(1);
    case.ready(&[3]);
    assert_eq!(case.choice(), Choice::Hold);
    // They hold.
    case.idle();
    assert_eq!(case.choice(), form(&[0, 1, 2, 3]));
    // The one that was to join is gone: they go on all the same.
    case.take(failed(process(2, 1)));
    case.take(failed(process(3, 1)));
    case.add(&[3, 3]);
    assert_eq!(case.choice(), form(&[0, 1]));
}

#[test]
fn a_group_never_grows_beyond_its_maximum_or_its_filters() {
    let mut case = Case::active(with(1, 2, |it| it.spares = 2), &[1, 1]);
    case.add(&[2, 2]);
    case.ready(&[2, 3]);
    assert_eq!(case.choice(), Choice::Keep);
    case.idle();
    assert_eq!(case.choice(), form(&[0, 1]));

    let filters = vec![Filter::DivisibleBy(2)];
    let mut case = Case::active(with(1, 4, |it| it.filters = filters), &[1, 1]);
    case.add(&[2, 2]);
    case.ready(&[2]);
    case.now += s(1);
    assert_eq!(case.choice(), Choice::Keep);
    case.ready(&[3]);
    assert_eq!(case.choice(), Choice::Hold);
}

#[test]
fn a_filter_may_leave_too_few_and_never_leaves_out_all_who_have_the_state() {
    let filters = vec![Filter::WholeHosts(2)];
    let mut case = Case::active(with(2, 4, |it| it.filters = filters), &[1, 1]);
    case.add(&[2, 2]);
    case.ready(&[2, 3]);
    case.lose(&[0]);
    case.full();
    assert_eq!(case.choice(), ask(Purpose::Replace, 1));
    case.roster.boot(case.now, Slot(0));
    // Node 2 is whole, and has nobody with the state.
    let deadline = case.deadline();
    let Decision { choice, reason } = case.decide();
    assert_eq!(choice, Choice::WaitUntil(deadline));
    assert!(reason.contains("of which too few fit together"), "{reason}");
    case.ready(&[0]);
    assert_eq!(case.choice(), group(&[(1, 1), (0, 2), (2, 1), (3, 1)]));
}

#[test]
fn who_leaves_stays_until_there_are_enough_without_it() {
    let mut case = Case::active(Limits::elastic(2, 3), &[1, 2, 3]);
    case.take(drain(2));
    assert_eq!(case.choice(), ask(Purpose::Replace, 1));
    case.full();
    // Enough without it.
    assert_eq!(case.choice(), Choice::Hold);
    case.idle();
    assert_eq!(case.choice(), form(&[0, 2]));

    let mut case = Case::active(Limits::elastic(3, 3), &[1, 2, 3]);
    case.take(drain(1));
    case.full();
    assert_eq!(case.choice(), Choice::Keep);
    case.take(Fact::Offered);
    assert_eq!(case.choice(), ask(Purpose::Replace, 1));
    case.add(&[4]);
    assert_eq!(case.choice(), Choice::Keep);
    case.ready(&[3]);
    assert_eq!(case.choice(), Choice::Hold);
    case.idle();
    assert_eq!(case.choice(), form(&[1, 2, 3]));
    // Before they held, another one was lost: the one that leaves is needed again.
    case.lose(&[1]);
    case.add(&[5]);
    assert_eq!(case.choice(), form(&[0, 2, 3]));
}

#[test]
fn the_last_with_the_state_hands_it_over_before_it_leaves() {
    let mut case = Case::active(Limits::elastic(1, 2), &[1, 1]);
    case.take(drain(1));
    case.add(&[2, 2]);
    case.ready(&[2]);
    case.now += s(1);
    // The one that is new joins one that leaves; there is room for no more.
    assert_eq!(case.choice(), Choice::Hold);
    case.idle();
    assert_eq!(case.choice(), form(&[0, 2]));
}

#[test]
fn nobody_left_is_an_error_unless_a_commit_outlives_them() {
    let mut case = Case::active(with(1, 2, |it| it.restarts_without_progress = 9), &[1, 2]);
    case.budget.committed(ids::Generation(1), 7, Kept::Made);
    case.lose(&[0, 1]);
    let words = [
        "no member of generation 1 that could hand on the state is left",
        "nobody has the state of commit 7",
        "boom",
    ];
    case.ends(End::NoSurvivor, &words);
    case.budget.committed(ids::Generation(1), 7, Kept::Durable);
    assert_eq!(case.choice(), ask(Purpose::Replace, 2));
    case.add(&[3, 3]);
    case.ready(&[0, 1]);
    assert_eq!(case.choice(), group(&[(0, 2), (1, 2)]));
}

#[test]
fn the_limit_of_resets_is_horovods() {
    // 1: the second change ends the job.
    let limits = |max, resets| with(1, max, |it| it.max_resets = Some(resets));
    let mut case = Case::active(limits(3, 1), &[1, 2, 3]);
    case.lose(&[0]);
    assert_eq!(case.choice(), ask(Purpose::Replace, 1));
    case.add(&[4]);
    assert_eq!(case.choice(), form(&[1, 2]));
    case.budget.formed(false);
    // Nothing is asked for and nobody joins any more.
    case.ready(&[0]);
    case.now += s(5);
    assert_eq!(case.choice(), Choice::Keep);
    case.lose(&[1]);
    let why = "changes of the membership: 1, which is the limit (max_resets)";
    case.ends(End::ResetLimit, &[why]);
    // 0: the first one does.
    let mut case = Case::active(limits(2, 0), &[1, 2]);
    case.lose(&[1]);
    let why = "(max_resets), and rank 1 (process 1 of slot 1 on h2) is lost: exit code 1: boom";
    case.ends(End::ResetLimit, &[why]);
}

#[test]
fn a_job_that_may_not_change_any_more_gives_back_the_room_of_each_lost_process() {
    // Two workers on each host; on the first one is lost, so that the other one there is in no group.
    for (max_resets, choice) in [
        (Some(1), Choice::GiveBack(vec![Slot(1)])),
        // One that may change starts the next process there.
        (Some(2), ask(Purpose::Replace, 1)),
    ] {
        let limits = with(2, 4, |it| (it.per_host, it.max_resets) = (2, max_resets));
        let mut case = Case::active(limits, &[1, 1, 2, 2]);
        case.lose(&[1]);
        case.budget.formed(false);
        assert_eq!(case.choice(), choice);
        if max_resets == Some(1) {
            case.roster.vacate(case.now, &[Slot(1)]);
            assert_eq!(case.choice(), Choice::Keep);
        }
    }
}

#[test]
fn members_that_return_end_the_job_and_freeze_it() {
    let mut case = Case::active(Limits::elastic(1, 3), &[1, 2]);
    let code = |slot| returned(process(slot, 1));
    case.take(code(0));
    case.decides(Choice::Keep, "members that have returned: 1 of 2");
    let mut other = Case::active(Limits::elastic(1, 3), &[1, 2]);
    other.take(code(0));
    other.lose(&[1]);
    let words = ["rank 1", "boom; members that have returned already: 1"];
    other.ends(End::Lost, &words);
    // Nobody is lost, and the rest waits for what has returned.
    let mut other = Case::active(Limits::elastic(1, 3), &[1, 2]);
    other.take(code(0));
    other.idle();
    let why = "members that have returned already: 1, so that the rest can't go on";
    other.decides(Choice::End(End::Lost), why);
    case.take(code(1));
    case.ends(End::Succeeded, &["all members have returned: 2"]);
}

#[test]
fn half_of_the_members_unseen_are_a_reason_to_wait() {
    // (members on node 1, on node 2; node 2 is silent) and a group is formed at once.
    for (stay, silent, at_once) in [(2, 1, true), (1, 1, false), (1, 2, false), (3, 2, true)] {
        let nodes: Vec<u64> = [vec![1; stay], vec![2; silent]].concat();
        let mut case = Case::active(Limits::elastic(1, nodes.len() as u32), &nodes);
        let fenced = case.now + s(3);
        case.take(node_lost(2, fenced));
        case.idle();
        case.full();
        let group: Vec<u32> = (0..stay as u32).collect();
        let wait = Choice::WaitUntil(fenced);
        let expected = if at_once { form(&group) } else { wait };
        assert_eq!(case.choice(), expected, "{stay} and {silent}");
        case.now = fenced;
        assert_eq!(case.choice(), form(&group), "{stay} and {silent}");
    }
}

#[test]
fn with_nobody_left_each_that_runs_unseen_is_a_reason_to_wait() {
    let mut case = Case::active(with(1, 2, |it| it.restarts_without_progress = 9), &[1, 1]);
    case.budget.committed(ids::Generation(1), 1, Kept::Durable);
    case.lose(&[0]);
    let late = Loss::Late("late".to_owned());
    case.roster.give_up(case.now, process(1, 1), late);
    case.add(&[2, 2]);
    case.ready(&[0, 1]);
    let deadline = case.deadline();
    assert_eq!(case.choice(), Choice::WaitUntil(deadline));
    case.now = deadline;
    case.ends(End::BelowMin, &["1 of 2 members may still run unseen"]);
    // Its node says that it has ended.
    assert!(case.roster.take(case.now, &failed(process(1, 1))).is_err());
    assert_eq!(case.choice(), group(&[(0, 2), (1, 2)]));
}
