//! Commit, restore and sync in a group that stays.

use std::time::Duration;

use kolo::collectives::{CollectiveError, local_group};
use kolo::elastic::{Elastic, Parts, State, StateError, Value};
use kolo::{Context, Rank};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Calls the function on a thread for each rank of a new job.
pub(crate) fn group<R: Send>(size: u32, rank: impl Fn(&Context) -> R + Sync) -> Vec<R> {
    let contexts: Vec<_> = (local_group(size).unwrap().into_iter())
        .map(Context::for_tests)
        .collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (contexts.iter())
            .map(|ctx| scope.spawn(|| rank(ctx)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

/// One part of each kind.
#[derive(Debug, Clone, PartialEq)]
struct All {
    name: String,
    weights: Vec<f32>,
    flags: [bool; 3],
    history: Vec<u16>,
    last: Option<i64>,
}

impl All {
    fn new(rank: usize) -> Self {
        Self {
            name: format!("rank {rank}"),
            weights: vec![rank as f32; 1_000],
            flags: [rank == 0, true, false],
            history: vec![7; rank + 2],
            last: Some(-1).filter(|_| rank == 0),
        }
    }
}

impl Elastic for All {
    fn parts(&mut self, parts: &mut Parts<'_>) {
        parts.value("name", &mut self.name);
        parts.buffer("weights", &mut self.weights);
        parts.buffer("flags", &mut self.flags);
        parts.list("history", &mut self.history);
        parts.value("last", &mut self.last);
    }
}

#[test]
fn a_state_goes_back_to_its_last_commit() {
    group(2, |ctx| {
        let mut state = State::new(All::new(ctx.rank()));
        assert_eq!(state.restore(), Err(StateError::NothingCommitted));
        for commits in 1..4 {
            state.weights[5] += 1.0;
            state.history.push(commits);
            state.commit(ctx).unwrap();
            assert_eq!(state.commits(), u64::from(commits));
            let committed = state.clone();
            state.name.clear();
            state.weights.fill(f32::NAN);
            state.flags = [false; 3];
            state.history.clear();
            state.last = None;
            state.restore().unwrap();
            assert_eq!(*state, committed);
        }
        // Twice gives the same.
        state.restore().unwrap();
        assert_eq!(state.into_inner().history.len(), ctx.rank() + 5);
    });
}

#[test]
fn all_get_the_state_of_rank_0() {
    group(3, |ctx| {
        let mut state = State::new(All::new(ctx.rank()));
        state.sync(ctx).unwrap();
        assert_eq!(*state, All::new(0));
        assert_eq!(state.commits(), 1);
        state.name.push('!');
        state.restore().unwrap();
        assert_eq!(*state, All::new(0));
        // And again, with what rank 0 has not committed.
        state.last = Some(ctx.rank() as i64);
        state.sync(ctx).unwrap();
        assert_eq!(state.last, Some(0));
    });
}

#[test]
fn a_borrowed_value_may_be_a_state() {
    let mut value = All::new(0);
    let committed = group(1, |ctx| {
        let mut value = value.clone();
        let mut state = State::new(&mut value);
        state.sync(ctx).unwrap();
        state.history.push(9);
        state.commit(ctx).unwrap();
        state.history.push(10);
        state.restore().unwrap();
        state.into_inner().clone()
    });
    value.history.push(9);
    assert_eq!(committed, [value]);
}

#[test]
fn a_rank_that_has_committed_gives_its_state_to_a_new_rank_0() {
    let (first, mut rest) = {
        let mut states = group(2, |ctx| {
            let mut state = State::new(Value(ctx.rank() as u32 + 10));
            state.sync(ctx).unwrap();
            state.commit(ctx).unwrap();
            state
        });
        (states.remove(0), states)
    };
    assert_eq!(first.commits(), 2);
    // The first rank is gone; a new one has its number.
    let old = std::sync::Mutex::new(rest.pop());
    group(2, |ctx| {
        let old = (ctx.rank() == 1).then(|| old.lock().unwrap().take().unwrap());
        let mut state = old.unwrap_or_else(|| State::new(Value(99)));
        state.sync(ctx).unwrap();
        assert_eq!((**state, state.commits()), (10, 3));
    });
}

#[test]
fn a_commit_that_fails_leaves_the_last_one_whole() {
    group(2, |ctx| {
        let mut state = State::new(All::new(0));
        state.commit(ctx).unwrap();
        let committed = state.clone();
        state.weights.fill(2.0);
        state.history.push(1);
        if ctx.rank() == 0 {
            ctx.comm().set_timeout(Duration::from_millis(20));
            // Rank 1 does not commit.
            let error = state.commit(ctx).unwrap_err();
            assert!(
                matches!(
                    error,
                    StateError::Collective(CollectiveError::Deadline { .. })
                ),
                "{error}"
            );
            assert_eq!(state.commits(), 1);
        }
        state.restore().unwrap();
        assert_eq!(*state, committed);
    });
}

/// Rank 1 is gone when the values have come and the buffers are still to come.
#[test]
fn a_sync_that_fails_changes_nothing() {
    let contexts = local_group(3).unwrap().into_iter().map(Context::for_tests);
    std::thread::scope(|scope| {
        for ctx in contexts {
            scope.spawn(move || {
                let rank = ctx.rank();
                let mut state = State::new(All::new(rank));
                if rank == 1 {
                    let mut state = State::new(Made(|parts: &mut Parts<'_>| {
                        ctx.comm().revoke("this rank ends");
                        state.parts(parts);
                    }));
                    state.sync(&ctx).unwrap_err();
                    return;
                }
                let StateError::Collective(error) = state.sync(&ctx).unwrap_err() else {
                    panic!("a collective error");
                };
                assert_eq!(error.culprit_rank(), Some(Rank(1)));
                assert_eq!(*state, All::new(rank));
                assert_eq!(state.commits(), 0);
            });
        }
    });
}

#[test]
fn ranks_that_commit_differently_often_are_told() {
    let errors = group(2, |ctx| {
        let mut state = State::new(Value(0));
        if ctx.rank() == 0 {
            // A commit of another group of ranks, say.
            let alone = Context::for_tests(local_group(1).unwrap().remove(0));
            state.commit(&alone).unwrap();
        }
        let error = state.commit(ctx).unwrap_err();
        // And a sync mends that.
        state.sync(ctx).unwrap();
        assert_eq!(state.commits(), 2);
        state.commit(ctx).unwrap();
        error
    });
    let error = |own| StateError::OutOfStep {
        own,
        lowest: 0,
        highest: 1,
    };
    assert_eq!(errors, [error(1), error(0)]);
}

/// Parts that are made for each test.
struct Made<F>(F);

impl<F: FnMut(&mut Parts<'_>)> Elastic for Made<F> {
    fn parts(&mut self, parts: &mut Parts<'_>) {
        (self.0)(parts);
    }
}

/// What all ranks are told if the parts of rank 1 are not those of rank 0.
fn told(parts: impl Fn(usize, &mut Parts<'_>) + Sync) -> String {
    let errors = group(3, |ctx| {
        let rank = ctx.rank();
        let mut state = State::new(Made(|made: &mut Parts<'_>| parts(rank, made)));
        let error = state.sync(ctx).unwrap_err();
        assert_eq!(state.commits(), 0);
        // Nobody waits: what follows works.
        ctx.comm().barrier().unwrap();
        error
    });
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    let message = errors[0].to_string();
    let told = message.strip_prefix("the state can't be synced: on rank 1 the part ");
    told.unwrap_or(&message).to_owned()
}

#[test]
fn parts_that_differ_are_named_on_all_ranks() {
    let other = |rank, text: &'static str| if rank == 1 { text } else { "model" };
    assert_eq!(
        told(|rank, parts| parts.buffer(other(rank, "weights"), &mut [0.0_f32; 4])),
        "`weights` of the state is where `model` is on rank 0"
    );
    assert_eq!(
        told(|rank, parts| parts.buffer("model", &mut [0.0_f32; 4][rank % 2..])),
        "`model` of the state is a buffer of 3 f32, but a buffer of 4 f32 on rank 0"
    );
    assert_eq!(
        told(|rank, parts| match rank {
            1 => parts.buffer("model", &mut [0.0_f64; 4]),
            _ => parts.buffer("model", &mut [0.0_f32; 4]),
        }),
        "`model` of the state is a buffer of 4 f64, but a buffer of 4 f32 on rank 0"
    );
    assert_eq!(
        told(|rank, parts| match rank {
            1 => parts.value("model", &mut 4_u8),
            _ => parts.list("model", &mut vec![0_u8; 4]),
        }),
        "`model` of the state is a value, but a list of 4 u8 on rank 0"
    );
    assert_eq!(
        told(|rank, parts| {
            parts.value("epoch", &mut 1);
            if rank != 1 {
                parts.value("step", &mut 2);
            }
        }),
        "`step` of the state is missing, but a value on rank 0"
    );
    assert_eq!(
        told(|rank, parts| {
            parts.value("epoch", &mut 1);
            if rank == 1 {
                parts.value("step", &mut 2);
            }
        }),
        "`step` of the state is missing on rank 0"
    );
}

#[test]
fn values_that_do_not_fit_are_named_on_all_ranks() {
    let text = told(|rank, parts| match rank {
        1 => parts.value("epoch", &mut String::new()),
        _ => parts.value("epoch", &mut 3),
    });
    assert!(
        text.starts_with(
            "`epoch` of the state is refused: 1 bytes are no value of type `alloc::string::String`"
        ),
        "{text}"
    );
    // One that can't be saved is named by the rank that sends.
    let text = told(|_, parts| parts.value("epoch", &mut Never));
    assert_eq!(
        text,
        "the state can't be synced: on rank 0 the part `epoch` of the state is refused: a value of type \
         `elastic::state::Never` can't be encoded: never"
    );
}

struct Never;

impl Serialize for Never {
    fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("never"))
    }
}

impl<'de> Deserialize<'de> for Never {
    fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        Err(serde::de::Error::custom("never"))
    }
}

#[test]
fn a_state_whose_parts_change_is_committed_anew() {
    let ctx = Context::for_tests(local_group(1).unwrap().remove(0));
    let stage = std::cell::Cell::new(0);
    let mut state = State::new(Made(|parts: &mut Parts<'_>| match stage.get() {
        0 => {
            parts.buffer("a", &mut [1_u8; 4]);
            parts.buffer("b", &mut [1.0_f64; 2]);
        }
        1 => {
            parts.value("b", &mut 1);
            parts.buffer("a", &mut [1_u64; 4]);
            parts.list("c", &mut vec![1_u8; 2]);
        }
        2 => parts.buffer("a", &mut [1_u8; 4]),
        _ => {
            parts.value("a", &mut 1);
            parts.value("a", &mut 2);
        }
    }));
    for next in [0, 1, 2, 0, 0, 1, 1] {
        stage.set(next);
        state.commit(&ctx).unwrap();
        state.restore().unwrap();
    }
    stage.set(2);
    let error = state.restore().unwrap_err().to_string();
    assert_eq!(
        error,
        "the part `a` of the state is where `b` is in the last commit"
    );
    stage.set(3);
    for _ in 0..3 {
        let error = state.commit(&ctx).unwrap_err().to_string();
        assert_eq!(error, "the part `a` of the state is named twice");
    }
    stage.set(1);
    state.restore().unwrap();
}
