//! All or nothing, whichever message is lost, repeated or late.

use super::*;

const NEW: ids::Generation = ids::Generation(2);

/// A generation of slots 0, 1 and 2.
fn generation() -> Arc<Generation> {
    let roster = seated(&[1, 1, 1]);
    let (seats, committed) = (roster.seats(), ids::Generation(0));
    Arc::new(Generation::new(NEW, String::new(), seats, None, committed))
}

fn lost(why: &str) -> Fate {
    Fate::Lost(Loss::Died(why.to_owned()))
}

fn formation(now: Instant, old: &[Process]) -> Formation {
    Formation::new(now, generation(), old.iter().copied(), s(10))
}

#[test]
fn it_is_whole_when_each_member_has_taken_it_once() {
    let now = Instant::now();
    let mut formation = formation(now, &[]);
    // Repeated, of another generation, of another process: none of them counts.
    for _ in 0..3 {
        formation.taken(NEW, process(0, 1));
        formation.taken(ids::Generation(1), process(1, 1));
        formation.taken(ids::Generation(3), process(1, 1));
        formation.taken(NEW, process(1, 2));
    }
    formation.taken(NEW, process(2, 1));
    assert_eq!(formation.outcome(), Outcome::Waiting);
    formation.taken(NEW, process(1, 1));
    assert_eq!(formation.outcome(), Outcome::Whole);
}

#[test]
fn it_is_sent_again_to_those_who_have_not_answered() {
    let now = Instant::now();
    let mut formation = formation(now, &[process(0, 1), process(7, 1)]);
    let all = [0, 1, 2, 7].map(|slot| process(slot, 1));
    assert_eq!(formation.due(now), Due::Publish(all.to_vec()));
    assert_eq!(formation.due(now), Due::Nothing(now + REPEAT));
    formation.taken(NEW, process(0, 1));
    formation.taken(NEW, process(7, 1));
    let missing = [1, 2].map(|slot| process(slot, 1)).to_vec();
    assert_eq!(formation.due(now + REPEAT), Due::Publish(missing.clone()));
    assert_eq!(formation.due(now + REPEAT), Due::Nothing(now + REPEAT * 2));
    assert_eq!(formation.due(now + s(10)), Due::Late(missing));
}

#[test]
fn it_breaks_with_the_first_member_that_is_lost() {
    let now = Instant::now();
    let mut formation = formation(now, &[process(7, 1)]);
    for slot in 0..3 {
        formation.taken(NEW, process(slot, 1));
    }
    assert_eq!(formation.outcome(), Outcome::Waiting);
    formation.gone(process(2, 1), &lost("exit code 1"));
    formation.gone(process(0, 1), &lost("exit code 2"));
    assert_eq!(formation.outcome(), Outcome::Broken);
    let (lost, why) = formation.lost();
    assert_eq!(lost, [Rank(2), Rank(0)]);
    assert_eq!(why, "rank 2 is lost: exit code 1");
}

#[test]
fn a_member_that_has_returned_had_taken_what_it_returned_from() {
    let now = Instant::now();
    let mut formation = formation(now, &[]);
    formation.taken(NEW, process(0, 1));
    formation.taken(NEW, process(1, 1));
    let mut other = formation.clone();
    formation.gone(process(2, 1), &Fate::Returned(NEW));
    assert_eq!(formation.outcome(), Outcome::Whole);
    // It has ended its work in the generation before, and is in this one no more.
    other.gone(process(2, 1), &Fate::Returned(ids::Generation(1)));
    assert_eq!(other.outcome(), Outcome::Broken);
}

#[test]
fn a_commit_says_that_all_have_taken_it() {
    let now = Instant::now();
    let mut formation = formation(now, &[process(0, 1)]);
    formation.committed(ids::Generation(1));
    assert_eq!(formation.outcome(), Outcome::Waiting);
    formation.committed(NEW);
    assert_eq!(formation.outcome(), Outcome::Whole);
}

/// G-3: (old members that are there, those of them that have taken the new one, those that are lost) and the outcome.
#[test]
fn more_of_the_old_generation_have_left_it_than_are_in_it() {
    use Outcome::{Waiting, Whole};
    type Case<'a> = (&'a [u32], &'a [u32], &'a [u32], Outcome);
    let cases: [Case<'_>; 8] = [
        (&[], &[], &[], Whole),
        (&[7], &[], &[], Waiting),
        (&[7], &[7], &[], Whole),
        (&[7], &[], &[7], Whole),
        (&[7, 8], &[7], &[], Waiting),
        (&[7, 8], &[7], &[8], Whole),
        (&[7, 8, 9], &[7, 8], &[], Whole),
        // Members of the new one are among them: 0, 1 and 2 have taken it.
        (&[0, 1, 2, 7, 8, 9], &[], &[], Waiting),
    ];
    let now = Instant::now();
    for (old, taken, gone, expected) in cases {
        let processes: Vec<_> = old.iter().map(|slot| process(*slot, 1)).collect();
        let mut formation = formation(now, &processes);
        for slot in [0, 1, 2].iter().chain(taken) {
            formation.taken(NEW, process(*slot, 1));
        }
        for slot in gone {
            formation.gone(process(*slot, 1), &lost("lost"));
        }
        assert_eq!(formation.outcome(), expected, "{old:?} {taken:?} {gone:?}");
        if expected == Waiting {
            // Those that are late are given up, and it goes on without them.
            let due = formation.due(now + s(10));
            let Due::Late(late) = due else {
                panic!("{due:?}")
            };
            for process in late {
                formation.gone(process, &lost("late"));
            }
            assert_eq!(formation.outcome(), Whole);
        }
    }
}
