//! `elastic::run`: one test for each kind of change, and for Horovod's faults by number.

use std::collections::BTreeMap;

use kolo::elastic::{self, Cause, Epoch, Membership, State, Value};
use kolo::{Context, Error, ReduceOp, Result};
use serde::{Deserialize, Serialize};

use crate::group::{End, Event, Id, Plan, What, When};

/// Twelve steps of five samples each, over two epochs.
fn play(size: usize, threads: usize, events: &[(u64, Id, When, What)]) -> BTreeMap<Id, End> {
    let events = events.iter().map(|(step, by, when, what)| Event {
        step: *step,
        by: *by,
        when: *when,
        what: what.clone(),
    });
    let plan = Plan {
        size,
        threads,
        samples: 30,
        epochs: 2,
        batch: 5,
        per_rank: false,
        events: events.collect(),
    };
    plan.play()
}

/// Those that are there at the end have seen each sample twice, in steps of groups of these sizes.
fn assert_exact(ends: &BTreeMap<Id, End>, ids: &[Id], sizes: &[(usize, u32)]) {
    let sizes: Vec<u32> = (sizes.iter())
        .flat_map(|(count, size)| std::iter::repeat_n(*size, *count))
        .collect();
    for id in ids {
        let end = &ends[id];
        assert_eq!(end.result, Ok(()), "thread {id}");
        assert!(
            end.seen.iter().all(|seen| *seen == 2),
            "thread {id}: {:?}",
            end.seen
        );
        assert_eq!(end.sizes, sizes, "thread {id}");
    }
    let ended = ends.iter().filter(|(_, end)| end.result.is_ok());
    assert!(ended.map(|(id, _)| id).eq(ids));
}

#[test]
fn a_group_that_stays_takes_the_first_values_of_rank_0() {
    let ends = play(3, 3, &[]);
    assert_exact(&ends, &[0, 1, 2], &[(12, 3)]);
    assert!(ends.values().all(|end| end.asked == 0 && end.resets == 0));
}

#[test]
fn a_killed_rank_costs_the_step_since_the_last_commit() {
    let ends = play(3, 3, &[(4, 1, When::BeforeStep, What::Kill)]);
    assert_exact(&ends, &[0, 2], &[(4, 3), (8, 2)]);
    // The step had not been done.
    assert_eq!((ends[&0].done, ends[&0].asked, ends[&0].resets), (12, 1, 1));
    assert_eq!(ends[&1].result, Err("killed".to_owned()));
}

#[test]
fn a_step_that_is_not_committed_is_done_again() {
    let ends = play(3, 3, &[(4, 2, When::BeforeCommit, What::Kill)]);
    assert_exact(&ends, &[0, 1], &[(4, 3), (8, 2)]);
    assert_eq!((ends[&0].done, ends[&1].done), (13, 13));
}

#[test]
fn whoever_is_lost_and_whenever_the_others_go_on() {
    type Step = (u64, Id, When, What);
    type Case<'a> = (usize, &'a [Step], &'a [Id], &'a [(usize, u32)]);
    let kill = |step, by, when| (step, by, when, What::Kill);
    let join = |id| (4, 1, When::BeforeStep, What::Join(id));
    let cases: [Case<'_>; 4] = [
        // The next rank 0 has the state.
        (
            3,
            &[kill(4, 0, When::BeforeStep)],
            &[1, 2],
            &[(4, 3), (8, 2)],
        ),
        // Before the first commit.
        (3, &[kill(0, 1, When::BeforeStep)], &[0, 2], &[(12, 2)]),
        (3, &[kill(0, 0, When::BeforeCommit)], &[1, 2], &[(12, 2)]),
        // While others join (Horovod's #3494: survivors skip the sync that new ranks wait in).
        (
            2,
            &[join(2), join(3), kill(4, 0, When::BeforeCommit)],
            &[1, 2, 3],
            &[(4, 2), (8, 3)],
        ),
    ];
    for (size, events, ids, sizes) in cases {
        assert_exact(&play(size, 4, events), ids, sizes);
    }
}

#[test]
fn a_rank_that_joins_interrupts_all_at_the_same_commit() {
    let ends = play(2, 3, &[(4, 1, When::BeforeStep, What::Join(2))]);
    assert_exact(&ends, &[0, 1, 2], &[(5, 2), (7, 3)]);
    // The first sync has number 1, the commit of the fifth step number 6.
    assert_eq!(ends[&0].interrupted, [6]);
    assert_eq!(ends[&1].interrupted, [6]);
    // No work is lost, and the callback is called on the new rank, too.
    assert_eq!([0, 1, 2].map(|id| ends[&id].done), [12, 12, 7]);
    assert_eq!([0, 1, 2].map(|id| ends[&id].resets), [1, 1, 1]);
}

#[test]
fn a_rank_that_is_drained_leaves_after_a_commit() {
    let ends = play(3, 3, &[(4, 0, When::BeforeStep, What::Drain(1))]);
    assert_exact(&ends, &[0, 2], &[(5, 3), (7, 2)]);
    assert_eq!([0, 1, 2].map(|id| ends[&id].done), [12, 5, 12]);
    let error = ends[&1].result.clone().unwrap_err();
    assert_eq!(
        error,
        "the group was about to change, and this rank is in no next generation: thread 1 is not in the next generation"
    );
}

/// Horovod loses the second of two changes in one second.
#[test]
fn two_changes_at_once_are_both_made() {
    let (drain, join) = (What::Drain(1), What::Join(3));
    let at = When::BeforeStep;
    let ends = play(3, 4, &[(4, 0, at, drain), (4, 2, at, join)]);
    assert_exact(&ends, &[0, 2, 3], &[(5, 3), (7, 3)]);
    assert_eq!(ends[&0].asked, 1);
}

/// Horovod's #3399: a sampler that keeps an old rank and size deals samples out twice. Here batches are per rank.
#[test]
fn samples_are_dealt_out_anew_in_every_generation() {
    let plan = Plan {
        size: 4,
        threads: 5,
        samples: 100,
        epochs: 1,
        batch: 6,
        per_rank: true,
        events: vec![
            Event {
                step: 1,
                by: 3,
                when: When::BeforeStep,
                what: What::Kill,
            },
            Event {
                step: 3,
                by: 2,
                when: When::BeforeStep,
                what: What::Join(4),
            },
        ],
    };
    let ends = plan.play();
    for id in [0, 1, 2, 4] {
        assert!(ends[&id].seen.iter().all(|seen| *seen == 1), "thread {id}");
        // 24, then three times 18, then the rest of 22.
        assert_eq!(ends[&id].sizes, [4, 3, 3, 3, 4]);
    }
}

#[test]
fn an_error_of_the_loop_itself_ends_that_rank_alone() {
    let ends = play(3, 3, &[(4, 1, When::BeforeStep, What::Fail)]);
    assert_exact(&ends, &[0, 2], &[(4, 3), (8, 2)]);
    assert_eq!(ends[&1].result, Err("no luck".to_owned()));
    assert_eq!(ends[&1].asked, 0);
}

#[test]
fn ranks_that_disagree_end_with_that_error() {
    let ends = play(2, 2, &[(4, 1, When::BeforeStep, What::Disagree)]);
    for end in ends.values() {
        let error = end.result.clone().unwrap_err();
        assert!(error.contains("ranks disagree"), "{error}");
        assert_eq!(end.asked, 0);
    }
}

#[derive(Default, Serialize, Deserialize)]
struct Count {
    count: u32,
}

/// A group of one, whose every change is refused.
pub(crate) struct Alone(Epoch);

impl Alone {
    pub(crate) fn new() -> Self {
        let comm = kolo::collectives::local_group(1).unwrap().remove(0);
        Self(Epoch::new(Context::for_tests(comm)))
    }
}

impl Membership for Alone {
    fn current(&self) -> Epoch {
        self.0.clone()
    }

    fn next(&mut self, _: &Cause) -> Result<Epoch, Error> {
        Err(Error::msg("nothing changes"))
    }
}

#[test]
fn an_error_of_any_type_is_told_from_a_change() {
    let mut state = State::new(Value(Count::default()));
    let mut group = Alone::new();
    let ended: Result<()> = elastic::run(&mut group, &mut state, |ctx, state| {
        state.count += 1;
        // The first commit works, and what the loop makes of a revoked communicator is its own affair.
        state.commit(ctx)?;
        state.count += 1;
        ctx.comm().revoke("the host is cut off");
        let refused = ctx.comm().all_reduce(&mut [1], ReduceOp::Sum);
        refused.map_err(|_| Error::msg("something else"))
    });
    assert_eq!(
        ended.unwrap_err().to_string(),
        "no operation goes on: the host is cut off, and this rank is in no next generation: nothing changes"
    );
    assert_eq!(state.count, 1);
}

#[test]
fn callbacks_are_called_in_order_and_their_errors_are_the_loops() {
    /// A group of one that is interrupted once.
    struct Once(Alone);

    impl Membership for Once {
        fn current(&self) -> Epoch {
            self.0.current()
        }

        fn next(&mut self, cause: &Cause) -> Result<Epoch, Error> {
            assert_eq!(*cause, Cause::Interrupted);
            self.0 = Alone::new();
            Ok(self.current())
        }
    }

    let mut group = Once(Alone::new());
    group.0.0.interrupt().raise();
    let mut state = State::new(Value(Count::default()))
        .on_reset(|_, calls| {
            calls.count += 1;
            Ok(())
        })
        .on_reset(|_, calls| {
            assert_eq!(calls.count, 1);
            Err(Error::msg("no file"))
        })
        .on_reset(|_, _| panic!("a callback failed before"));
    let ended: Result<()> = elastic::run(&mut group, &mut state, |ctx, state| {
        state.commit(ctx)?;
        unreachable!("the commit is interrupted, and then a callback fails")
    });
    assert_eq!(
        ended.unwrap_err().to_string(),
        "a callback after the group's change failed: no file"
    );
}
