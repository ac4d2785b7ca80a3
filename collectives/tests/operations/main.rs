//! Every operation, in every form that has a way of its own, of every type, with every operator, on every kind of lane, against a
//! plain reference: one table, in worlds of 1 to 8 ranks. All schedules are tried without ranks (`src/schedule/tests.rs`).
//!
//! Of all lengths around every change of algorithm there are too many to try. `what_is_drawn_is_right` tries some, others in each
//! run: `KOLO_TEST_SEED=…` repeats one, which a failure names, `KOLO_TEST_SAMPLES=…` sets how many there are, and
//! `KOLO_TEST_ALL=1 cargo test --release -p kolo-collectives --test operations` tries all.
//!
//! Rows of Horovod's `test_torch.py`, `test_process_sets_static.py` and `test_adasum_pytorch.py` have their names beside the tests: most
//! here, process sets and barriers in `groups.rs`, ranks without data in `joins.rs`, timelines in `diagnosis.rs`, errors in `mistakes.rs`
//! and `disagreement`. No counterpart have: gradients, optimizers, layers and models (they are the framework's), GPUs, sparse tensors,
//! `alltoall_splits_type_error` and operations in place (the compiler sees to both), `reinit` and `is_initialized` (no global state).

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::float_cmp,
    clippy::unwrap_used
)]

#[path = "../common/mod.rs"]
mod common;
mod floats;
mod forms;
mod mistakes;
mod sample;
mod special;
mod switches;

use std::hash::{BuildHasher, RandomState};

use common::value::{Value, combined, for_each_type, input, number};
use common::{Group, Kind, run as run_each};
use half::{bf16, f16};
use kolo_collectives::operation::{Operation, OperationKind};
use kolo_collectives::schedule::{Algorithm, Choices, Layout, Model, Shape, Tuning};
use kolo_collectives::{
    CollectiveError, Communicator, Compression, DType, Element, Gathered, Options, ReduceOp, Start,
    way_in_shared_memory,
};
use kolo_transport::ids::Rank;
use sample::{Sample, What, run, run_on};

const WORLDS: [u32; 7] = [1, 2, 3, 4, 5, 7, 8];

/// How many are drawn, if nothing else is said: some seconds' worth without optimisation.
const SAMPLES: u64 = 100;

/// Each operation, type and operator of these, at these lengths.
fn cases(kind: Kind, world: u32, dtypes: &[DType], lengths: &[usize]) -> Vec<Sample> {
    Sample::each(kind, world, dtypes)
        .into_iter()
        .flat_map(|sample| sample.of_lengths(lengths))
        .collect()
}

/// Each case in every world, of one length and one root, and over the worlds of every length and several roots.
///
/// Horovod: `test_horovod_allreduce`, `_allgather`, `_broadcast`, `_alltoall`, `_reducescatter`, their averages, minima, maxima, products,
/// variable and uneven sizes, equal splits, splits of 0 and groups.
#[test]
fn every_operation_type_and_operator_is_right_on_every_lane() {
    use Kind::{Memory, Quic, Ring, Shared, Tls, Unix};

    for (kind, worlds, lengths) in [
        (Memory, &WORLDS[..], &[0, 1, 2, 3, 31][..]),
        (Unix, &[2, 5], &[1, 17]),
        (Ring, &[3, 4], &[0, 13]),
        (Shared, &WORLDS, &[0, 3, 13]),
        (Tls, &[3], &[5]),
        (Quic, &[2], &[5]),
    ] {
        for (number, &world) in worlds.iter().enumerate() {
            let samples = Sample::each(kind, world, &DType::ALL).into_iter();
            let of_lengths = samples.zip(number..).map(|(sample, number)| Sample {
                length: lengths[number % lengths.len()],
                root: sample.root.map(|_| Rank(number as u32 % world)),
                ..sample
            });
            run(&Group::new(kind, world), &of_lengths.collect::<Vec<_>>());
        }
    }
}

/// With low limits, so that all algorithms are met at short lengths.
#[test]
fn every_operation_is_right_around_every_switch() {
    let shared = WORLDS.map(|world| (Kind::Shared, world));
    let linked = [2, 5, 8].map(|world| (Kind::Unix, world));
    for (kind, world) in shared.into_iter().chain(linked) {
        let samples: Vec<Sample> = Sample::each(kind, world, &[DType::F32, DType::Bool])
            .into_iter()
            .filter(|sample| sample.op.is_none_or(|op| op == ReduceOp::Sum))
            .flat_map(Sample::around_switches)
            .filter(|sample| sample.length < 1 << 15)
            .collect();
        run(&Group::new(kind, world), &samples);
    }
}

#[test]
fn every_algorithm_is_right_on_lanes_that_hold_little() {
    let even = WORLDS.map(|world| (100, Layout::single(world)));
    // Hosts of different size, as far as algorithms know.
    let uneven =
        [&[1, 1][..], &[2, 3], &[1, 4, 2], &[4, 4]].map(|slots| (300, Layout::of_slots(slots)));
    for (room, layout) in even.into_iter().chain(uneven) {
        let (kind, world) = (Kind::Narrow(room), layout.world());
        let group = Group::new(kind, world);
        group.run(|comm| comm.set_layout(layout.clone()).unwrap());
        let samples: Vec<Sample> = Algorithm::ALL
            .into_iter()
            .flat_map(|force| {
                let cases = cases(kind, world, &[DType::F64], &[0, 1, 5, 61, 251]);
                cases.into_iter().map(move |sample| Sample {
                    force: Some(force),
                    ..sample
                })
            })
            .filter(|sample| match sample.op {
                Some(op) => op == ReduceOp::Sum,
                None => true,
            })
            .filter(|sample| Algorithm::able(sample.what.kind()).contains(&sample.force.unwrap()))
            .collect();
        run(&group, &samples);
        let other = Layout::single(layout.world() + 1);
        let error = group.members[0].set_layout(other).unwrap_err();
        assert!(
            matches!(error, CollectiveError::Invalid { .. }),
            "{error:?}"
        );
    }
}

/// More than lanes, frames and segments hold, both directions at once, and not a whole number of them.
#[test]
fn long_data_are_right_on_every_lane() {
    for (kind, world) in [
        (Kind::Memory, 3),
        (Kind::Unix, 4),
        (Kind::Ring, 2),
        (Kind::Ring, 4),
        (Kind::Tls, 3),
        (Kind::Quic, 2),
    ] {
        let samples: Vec<Sample> = cases(kind, world, &[DType::F64], &[(1 << 17) + 3])
            .into_iter()
            .filter(|sample| sample.op.is_none_or(|op| op == ReduceOp::Sum))
            .map(|sample| Sample {
                slowed: 1,
                ..sample
            })
            .collect();
        run(&Group::new(kind, world), &samples);
    }
}

/// Around the lengths from which shared memory passes data piece by piece, or sums go round by round.
#[test]
fn long_data_in_shared_memory_are_right_around_every_switch() {
    const SIZE: usize = size_of::<u64>();
    // From here on two ranks sum in slices, and not all at once.
    const AT_ONCE: usize = (4 << 20) + SIZE;
    const ROUNDS: usize = 12 << 20;
    use What as W;

    let around = |bytes: usize, parts: usize| {
        let first = bytes.div_ceil(SIZE * parts);
        [first - 1, first, first + 1]
    };
    // The second has more ranks than processors where this usually runs.
    for world in [2, 5] {
        let ranks = world as usize;
        let mut samples = Vec::new();
        for (what, bytes, parts) in [
            (W::Broadcast, 512 << 10, 1),
            (W::AllGather, 512 << 10, 1),
            (W::Gather, 512 << 10, 1),
            (W::Scatter, 512 << 10, ranks),
            (W::AllToAll, 6 << 20, ranks),
            (W::ReduceScatter, 6 << 20, 1),
            (W::AllReduce, AT_ONCE, 1),
            (W::AllReduce, ROUNDS, 1),
            (W::Reduce, ROUNDS, 1),
            (W::AllReduceInto, ROUNDS, 1),
            (W::AllReduceGrouped, ROUNDS, 1),
            (W::NamedAllReduce, ROUNDS, 1),
        ] {
            let is_form = what.kind() == OperationKind::AllReduce && what != W::AllReduce;
            if is_form && world > 2 {
                continue;
            }
            let around = around(bytes, parts);
            let lengths = match bytes {
                ROUNDS if world > 2 => &around[1..2],
                _ if is_form => &around[..2],
                _ => &around[..],
            };
            let all = cases(Kind::Shared, world, &[DType::U64], lengths).into_iter();
            let of_what: Vec<Sample> = all
                .filter(|sample| sample.what == what)
                .filter(|sample| sample.op.is_none_or(|op| op == ReduceOp::Sum))
                .collect();
            if world == 2 {
                let ways: Vec<_> = of_what.iter().map(|sample| sample.way_with(2)).collect();
                assert_ne!(ways[0], ways[1], "{what:?} of {bytes} bytes");
            }
            samples.extend(of_what);
        }
        let group = Group::new(Kind::Shared, world);
        run(&group, &samples);
        // Factors, too.
        group.run(|comm| {
            let mut data = vec![comm.rank().0 as f32; ROUNDS / size_of::<f32>() + 77];
            let scaled = comm.with(Options::new().prescale(0.5).postscale(4.0));
            scaled.all_reduce(&mut data, ReduceOp::Average).unwrap();
            assert!(data.iter().all(|value| *value == (world - 1) as f32));
        });
    }
}

#[test]
fn a_large_world_works() {
    let samples: Vec<Sample> = cases(Kind::Memory, 64, &[DType::I64], &[0, 1, 100])
        .into_iter()
        .filter(|sample| sample.op.is_none_or(|op| op == ReduceOp::Sum))
        .collect();
    run(&Group::new(Kind::Memory, 64), &samples);
}

fn variable(name: &str) -> Option<u64> {
    let given = std::env::var(name).ok()?;
    Some(given.parse().expect(name))
}

#[test]
fn what_is_drawn_is_right() {
    let check = |seed| {
        let sample = Sample::draw(seed);
        let right = std::panic::catch_unwind(|| {
            // What an operation leaves behind is met by the next.
            run(&Group::new(sample.kind, sample.world), &[sample, sample]);
        });
        assert!(right.is_ok(), "KOLO_TEST_SEED={seed} has it again");
    };
    if let Some(seed) = variable("KOLO_TEST_SEED") {
        return check(seed);
    }
    let first = RandomState::new().hash_one(0);
    for number in 0..variable("KOLO_TEST_SAMPLES").unwrap_or(SAMPLES) {
        check(first.wrapping_add(number));
    }
}

/// Every operation, type, operator and small world, around every change, in shared memory and over links: if that is asked for.
#[test]
fn all_is_right() {
    if variable("KOLO_TEST_ALL").is_none() {
        return;
    }
    for (kind, world) in [Kind::Shared, Kind::Unix, Kind::Memory]
        .into_iter()
        .flat_map(|kind| WORLDS.map(|world| (kind, world)))
    {
        let mut tried = 0;
        for first in Sample::each(kind, world, &DType::ALL) {
            let samples: Vec<Sample> = first.around_switches().collect();
            run(&Group::new(kind, world), &samples);
            tried += samples.len();
        }
        println!("{kind:?}, {world} ranks: {tried} are right");
    }
}

/// The lengths that are tried are there, and those of each lane are its own.
#[test]
fn there_are_switches_to_draw() {
    let drawn: Vec<Sample> = (0..150).map(Sample::draw).collect();
    for kind in [Kind::Shared, Kind::Unix, Kind::Memory] {
        let near = |sample: &&Sample| sample.kind == kind && sample.switch.is_some();
        let near = drawn.iter().filter(near).count();
        assert!(near > 10, "{kind:?}: {near}");
    }
    for way in ["flat", "slices", "pieces"] {
        let into = |sample: &Sample| sample.way() == Some(way);
        assert!(drawn.iter().any(into), "{way}");
    }
}
