//! Of every operation on every type, with every operator, in every small world, of lengths around every change of algorithm, over
//! several lanes there are too many to try. This tries some, others in each run, against the plain reference.
//!
//! What is tried to exhaustion is elsewhere: all schedules (`collectives/src/schedule/tests.rs`, without ranks), all types and operators
//! at short lengths (`matrix.rs`, `operations`), one or two types around all switches (`operations`).
//!
//! `KOLO_TEST_SEED=…` repeats one sample, which a failure names; `KOLO_TEST_SAMPLES=…` sets how many there are. And those who have the
//! time try all: `KOLO_TEST_ALL=1 cargo test --release -p kolo-collectives --test samples`.

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

const WORLDS: [u32; 7] = [1, 2, 3, 4, 5, 7, 8];

/// How many there are, if nothing else is said: about ten seconds' worth without optimisation.
const SAMPLES: u64 = 400;

fn number(variable: &str) -> Option<u64> {
    let given = std::env::var(variable).ok()?;
    Some(given.parse().expect(variable))
}

/// Says which sample it was.
struct Named(Option<u64>, Sample);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let again = (self.0).map(|seed| format!("KOLO_TEST_SEED={seed} has it again: "));
            eprintln!("{}{:?}", again.unwrap_or_default(), self.1);
        }
    }
}

fn check(seed: u64) {
    let sample = Sample::draw(seed);
    let group = Group::new(sample.kind, sample.world);
    check_in(&group, Some(seed), sample);
}

fn check_in(group: &Group, seed: Option<u64>, sample: Sample) {
    let _named = Named(seed, sample);
    let run = match sample.dtype {
        DType::Bool => run::<bool>,
        DType::U8 => run::<u8>,
        DType::I8 => run::<i8>,
        DType::U16 => run::<u16>,
        DType::I16 => run::<i16>,
        DType::U32 => run::<u32>,
        DType::I32 => run::<i32>,
        DType::U64 => run::<u64>,
        DType::I64 => run::<i64>,
        DType::F16 => run::<f16>,
        DType::Bf16 => run::<bf16>,
        DType::F32 => run::<f32>,
        DType::F64 => run::<f64>,
        other => panic!("{other} has no reference"),
    };
    run(group, &sample);
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

/// Every operation, type, operator and small world, around every change, in shared memory and over links: if that is asked for.
#[test]
fn all_is_right() {
    if number("KOLO_TEST_ALL").is_none() {
        return;
    }
    for (kind, world) in [Kind::Shared, Kind::Unix, Kind::Memory]
        .into_iter()
        .flat_map(|kind| WORLDS.map(|world| (kind, world)))
    {
        let mut tried = 0;
        for first in Sample::each(kind, world) {
            // As many as share a group are a series.
            let group = Group::new(kind, world);
            for sample in first.around_switches() {
                check_in(&group, None, sample);
                tried += 1;
            }
        }
        println!("{kind:?}, {world} ranks: {tried} are right");
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
