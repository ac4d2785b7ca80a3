//! The rows of Horovod's parallel tests, by their names: `test_torch.py`, `test_process_sets_static.py`,
//! `test_process_sets_multi_comm.py`, `test_tensorflow_process_sets_dynamic.py`, `test_timeline.py`,
//! `test_adasum_pytorch.py`. Uneven rows and splits of 0 are from `test_tensorflow.py`, and some of
//! `test_tensorflow_process_sets.py`. What Horovod does and has no test for has a name of the same form: `allreduce_op_error`,
//! `allreduce_scale_error`, `join_last_joined_rank`, `barrier`.
//!
//! No counterpart here have: gradients, optimizers, layers and models (they are the framework's), GPUs (buffers are in the
//! host's memory), sparse tensors (no such type),
//! `alltoall_splits_type_error` (splits are `&[usize]`: the compiler refuses others), `reinit` and `is_initialized` (no global
//! state).

#![allow(
    clippy::unwrap_used,
    clippy::float_cmp,
    clippy::cast_possible_truncation,
    clippy::cast_lossless
)]

#[path = "../common/mod.rs"]
mod common;

/// A function for each type as an array, for types that are combined as numbers.
macro_rules! of_numbers {
    ($check:ident) => {
        [
            $check::<u8>,
            $check::<i8>,
            $check::<u16>,
            $check::<i16>,
            $check::<u32>,
            $check::<i32>,
            $check::<u64>,
            $check::<i64>,
            $check::<f16>,
            $check::<bf16>,
            $check::<f32>,
            $check::<f64>,
        ]
    };
}

/// As `of_numbers`, for all types.
macro_rules! of_all {
    ($check:ident) => {{
        let mut all = of_numbers!($check).to_vec();
        all.push($check::<bool>);
        all
    }};
}

/// Calls a function with a number as every type, and with what is to come of it, of integers and of floats.
macro_rules! with_numbers {
    ($check:ident($comm:expr), $value:literal, $whole:literal, $real:literal) => {
        with_numbers!(@whole $check $comm, $value, $whole, u8 i8 u16 i16 u32 i32 u64 i64);
        $check($comm, f16::from_f32($value as f32), f16::from_f32($real));
        $check($comm, bf16::from_f32($value as f32), bf16::from_f32($real));
        $check($comm, $value as f32, $real as f32);
        $check($comm, $value as f64, $real as f64);
    };
    (@whole $check:ident $comm:expr, $value:literal, $whole:literal, $($type:ty)*) => {
        $($check($comm, $value as $type, $whole as $type);)*
    };
}

mod adasum;
mod moves;
mod others;
mod reduce;
mod scatter;
mod sets;

use std::fmt::Debug;

use common::value::{Value, combined, input};
use common::{Group, Kind, until};
use half::{bf16, f16};
use kolo_collectives::{
    CollectiveError, Communicator, Compression, Element, GroupId, Handle, Options, ReduceOp, Start,
};
use kolo_transport::ids::Rank;

const SIZE: u32 = 4;

/// One closure on all ranks of a new group.
fn on_all<R: Send>(body: impl Fn(&Communicator) -> R + Sync) -> Vec<R> {
    Group::new(Kind::Unix, SIZE).run(body)
}

/// As [`on_all`], with the even or the odd ranks, as it is one of them.
fn on_halves(body: impl Fn(&Communicator) + Sync) {
    on_all(|comm| body(&half(comm)));
}

/// The even or the odd ranks.
fn half(comm: &Communicator) -> Communicator {
    let even = comm.group(&[Rank(0), Rank(2)]).unwrap();
    let odd = comm.group(&[Rank(1), Rank(3)]).unwrap();
    even.or(odd).unwrap()
}

/// 17 in each of so many dimensions, as Horovod's tests have it.
fn cube(dimensions: u32) -> usize {
    17_usize.pow(dimensions)
}

/// Each check in one to three dimensions.
fn each<C>(checks: impl AsRef<[C]>, run: impl Fn(&C, usize)) {
    for dimensions in 1..=3 {
        for check in checks.as_ref() {
            run(check, cube(dimensions));
        }
    }
}

/// The members by their ranks in the job: whose values are whose.
fn members(comm: &Communicator) -> Vec<u32> {
    comm.members().into_iter().map(|rank| rank.0).collect()
}

/// This rank's values.
fn mine<T: Value>(comm: &Communicator, length: usize) -> Vec<T> {
    input(members(comm)[comm.rank().index()], length)
}

fn all_mismatch(results: Vec<Result<(), CollectiveError>>, words: &[&str]) {
    for result in results {
        let error = result.unwrap_err();
        assert!(matches!(error, CollectiveError::Mismatch { .. }), "{error}");
        for word in words {
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}

/// The same for several operations, one after the other.
fn each_mismatch<const N: usize>(
    results: &[[Result<(), CollectiveError>; N]],
    words: [[&str; 2]; N],
) {
    for (index, words) in words.iter().enumerate() {
        let of_one = results.iter().map(|results| results[index].clone());
        all_mismatch(of_one.collect(), words);
    }
}

fn all_invalid(results: Vec<Result<(), CollectiveError>>, word: &str) {
    for result in results {
        let error = result.unwrap_err();
        assert!(matches!(error, CollectiveError::Invalid { .. }), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
}

/// What was started, and what is to come of it.
struct Started {
    was_done: bool,
    check: Box<dyn FnOnce()>,
}

impl Started {
    fn new<R: PartialEq + Debug + 'static>(handle: Handle<R>, expected: R) -> Self {
        Self {
            was_done: handle.poll(),
            check: Box::new(move || assert_eq!(handle.wait().unwrap(), expected)),
        }
    }
}

/// All types and dimensions are under way at once, started in another order on each rank.
fn async_fused(starts: impl AsRef<[fn(&Communicator, &Start, usize) -> Started]> + Sync) {
    on_all(|comm| {
        let starts = starts.as_ref();
        if comm.rank() != Rank(0) {
            comm.barrier().unwrap();
        }
        let mut numbers: Vec<usize> = (0..3 * starts.len()).collect();
        numbers.rotate_left(5 * comm.rank().index());
        let started: Vec<Started> = numbers
            .into_iter()
            .map(|number| {
                let start = comm.named(format!("noname.{number}"));
                starts[number / 3](comm, &start, cube(1 + number as u32 % 3))
            })
            .collect();
        if comm.rank() == Rank(0) {
            // Nobody else has started any yet.
            assert!(started.iter().all(|started| !started.was_done));
            comm.barrier().unwrap();
        }
        for started in started {
            (started.check)();
        }
    });
}

/// Each rank in turn uses a name twice, which fails there and leaves the first use alone.
fn duplicate_name<R: PartialEq + Debug>(
    start: impl Fn(&Start) -> Handle<R> + Sync,
    expected: impl Fn(Rank) -> R + Sync,
) {
    on_all(|comm| {
        let named = comm.named("duplicate_name");
        for hasty in 0..SIZE {
            if comm.rank() != Rank(hasty) {
                // The first can't end before that rank has tried twice.
                comm.barrier().unwrap();
                assert_eq!(start(&named).wait().unwrap(), expected(comm.rank()));
                continue;
            }
            let first = start(&named);
            in_use(start(&named));
            comm.barrier().unwrap();
            assert_eq!(first.wait().unwrap(), expected(comm.rank()));
        }
    });
}

/// Another operation has this one's name.
fn in_use<R: Debug>(handle: Handle<R>) {
    let error = handle.wait().unwrap_err().to_string();
    assert!(error.contains("under way on this rank already"), "{error}");
}
