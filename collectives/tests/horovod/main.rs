//! The rows of Horovod's parallel tests, by their names: `test_torch.py`, `test_process_sets_static.py`,
//! `test_tensorflow_process_sets_dynamic.py`, `test_timeline.py`, `test_adasum_pytorch.py`. What is about a framework
//! (gradients, optimizers, devices) has no counterpart here.

#![allow(
    clippy::unwrap_used,
    clippy::float_cmp,
    clippy::cast_possible_truncation
)]

#[path = "../common/mod.rs"]
mod common;
mod moves;
mod others;
mod reduce;

use common::{Group, Kind};
use half::f16;
use kolo_collectives::{
    CollectiveError, Communicator, Compression, Element, Handle, Options, ReduceOp,
};
use kolo_transport::ids::Rank;

const SIZE: u32 = 4;

/// One closure on all ranks of a new group.
fn on_all<R: Send>(body: impl Fn(&Communicator) -> R + Sync) -> Vec<R> {
    Group::new(Kind::Unix, SIZE).run(body)
}

/// 17 in each of so many dimensions, as Horovod's tests have it.
fn cube(dimensions: u32) -> usize {
    17_usize.pow(dimensions)
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

trait Small: Element {
    fn small(number: u32) -> Self;
}

macro_rules! small {
    ($($type:ty),*) => {$(
        impl Small for $type {
            fn small(number: u32) -> Self {
                number as $type
            }
        }
    )*};
}

small!(u8, i8, u16, i16, i32, i64, f32, f64);

impl Small for f16 {
    fn small(number: u32) -> Self {
        Self::from_f32(number as f32)
    }
}

fn each_type(comm: &Communicator, check: &dyn Fn(&Communicator, u32)) {
    for dimensions in 1..=3 {
        check(comm, dimensions);
    }
}

fn sums<T: Small>(comm: &Communicator, dimensions: u32) {
    let mut data = vec![T::small(comm.rank().0); cube(dimensions)];
    comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    assert_eq!(data, vec![T::small(6); cube(dimensions)]);
}
