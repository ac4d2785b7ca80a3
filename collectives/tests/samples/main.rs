//! Of every operation on every type, with every operator, in every small world, of lengths around every change of algorithm, over
//! several lanes there are too many to try. This tries some, others in each run, against the plain reference.
//!
//! What is tried to exhaustion is elsewhere: all schedules (`collectives/src/schedule/tests.rs`, without ranks), all types and operators
//! at short lengths (`matrix.rs`, `operations`), one or two types around all switches (`operations`).
//!
//! `KOLO_TEST_SEED=…` repeats one sample, which a failure names; `KOLO_TEST_SAMPLES=…` sets how many there are.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

#[path = "../common/mod.rs"]
mod common;
mod sample;
mod switches;

use std::hash::{BuildHasher, RandomState};

use common::value::{Value, combined, input};
use common::{Group, Kind};
use half::{bf16, f16};
use kolo_collectives::operation::{Operation, OperationKind};
use kolo_collectives::schedule::{Choices, Model, Shape, Tuning};
use kolo_collectives::{Communicator, DType, Element, Gathered, ReduceOp, way_in_shared_memory};
use kolo_transport::ids::Rank;
use sample::{Sample, run};

/// How many there are, if nothing else is said: about ten seconds' worth without optimisation.
const SAMPLES: u64 = 400;

fn number(variable: &str) -> Option<u64> {
    let given = std::env::var(variable).ok()?;
    Some(given.parse().expect(variable))
}

/// Says which sample it was.
struct Named(u64, Sample);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("KOLO_TEST_SEED={} has it again: {:?}", self.0, self.1);
        }
    }
}

fn check(seed: u64) {
    let sample = Sample::draw(seed);
    let _named = Named(seed, sample);
    match sample.dtype {
        DType::Bool => run::<bool>(&sample),
        DType::U8 => run::<u8>(&sample),
        DType::I8 => run::<i8>(&sample),
        DType::U16 => run::<u16>(&sample),
        DType::I16 => run::<i16>(&sample),
        DType::U32 => run::<u32>(&sample),
        DType::I32 => run::<i32>(&sample),
        DType::U64 => run::<u64>(&sample),
        DType::I64 => run::<i64>(&sample),
        DType::F16 => run::<f16>(&sample),
        DType::Bf16 => run::<bf16>(&sample),
        DType::F32 => run::<f32>(&sample),
        DType::F64 => run::<f64>(&sample),
        other => panic!("{other} has no reference"),
    }
}

#[test]
fn what_is_drawn_is_right() {
    if let Some(seed) = number("KOLO_TEST_SEED") {
        return check(seed);
    }
    let first = RandomState::new().hash_one(0);
    for number in 0..number("KOLO_TEST_SAMPLES").unwrap_or(SAMPLES) {
        check(first.wrapping_add(number));
    }
}

/// The lengths that are tried are there, and those of each lane are its own.
#[test]
fn there_are_switches_to_draw() {
    let drawn: Vec<Sample> = (0..2000).map(Sample::draw).collect();
    for kind in [Kind::Shared, Kind::Unix, Kind::Memory] {
        let near = |sample: &&Sample| sample.kind == kind && sample.switch.is_some();
        let near = drawn.iter().filter(near).count();
        assert!(near > 200, "{kind:?}: {near}");
    }
    for way in ["flat", "slices", "pieces"] {
        let into = |sample: &Sample| sample.way() == Some(way);
        assert!(drawn.iter().any(into), "{way}");
    }
}
