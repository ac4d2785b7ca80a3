//! Random sequences of operations and failures, the same for every run of a seed.

#![allow(clippy::unwrap_used, clippy::cast_sign_loss)]

mod common;

use common::{Group, Kind};
use kolo_collectives::schedule::{Algorithm, Tuning};
use kolo_collectives::{CollectiveError, Communicator, ReduceOp, SharedBuffer};
use kolo_transport::ids::{CallId, Rank};
use std::pin::Pin;
use std::sync::Mutex;

/// A small generator (xorshift); the quality does not matter.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// What happens in one call.
#[derive(Debug, Clone, Copy)]
struct Round {
    length: usize,
    operations: u64,
    root: u32,
    force: Option<Algorithm>,
    /// In which operation, on which rank, what goes wrong.
    trouble: Option<(u64, u32, Trouble)>,
}

#[derive(Debug, Clone, Copy)]
enum Trouble {
    /// The user's code fails in place of the operation.
    Abort,
    /// The operation is begun and dropped.
    Cancel,
    /// It has another length.
    Length,
    /// It is another operation.
    Other,
}

fn round(random: &mut Random, world: u32, calm: bool) -> Round {
    // The last goes in pieces in shared memory.
    let lengths = [0, 1, 5, 300, 5000, 60_000, 90_000];
    let operations = 1 + random.below(5);
    let trouble = [
        Trouble::Abort,
        Trouble::Cancel,
        Trouble::Length,
        Trouble::Other,
    ];
    Round {
        length: lengths[random.below(7) as usize],
        operations,
        root: random.below(u64::from(world)) as u32,
        force: [None, Some(Algorithm::Ring), Some(Algorithm::Halving)][random.below(3) as usize],
        trouble: (!calm).then(|| {
            (
                random.below(operations),
                random.below(u64::from(world)) as u32,
                trouble[random.below(4) as usize],
            )
        }),
    }
}

fn operation(
    comm: &Communicator,
    buffer: &mut SharedBuffer<f64>,
    round: &Round,
    index: u64,
) -> Result<(), CollectiveError> {
    let (me, world) = (comm.rank().0, comm.world_size());
    match index % 4 {
        0 => {
            let mut data = vec![u64::from(me) as f64 + 1.0; round.length];
            let before = data.clone();
            let result = comm.all_reduce(&mut data, ReduceOp::Sum);
            let sum = f64::from(world * (world + 1) / 2);
            let expected = if result.is_ok() {
                vec![sum; round.length]
            } else {
                before
            };
            assert_eq!(data, expected);
            result
        }
        1 => {
            let mut data = vec![me; round.length]
                .into_iter()
                .map(f64::from)
                .collect::<Vec<_>>();
            let result = comm.broadcast(&mut data, Rank(round.root));
            // If it fails, only the root's is an input. The others' may hold anything.
            if result.is_ok() || me == round.root {
                let expected = f64::from(round.root);
                assert!(data.iter().all(|value| (value - expected).abs() < 0.5));
            }
            result
        }
        2 => {
            let value = f64::from(me + round.root);
            buffer.fill(value);
            let result = comm.all_reduce_buffer(buffer, ReduceOp::Max);
            let most = f64::from(world - 1 + round.root);
            let expected = if result.is_ok() { most } else { value };
            assert!(buffer.iter().all(|got| (got - expected).abs() < 0.5));
            result
        }
        _ => {
            let counts: Vec<usize> = (0..world as usize).map(|rank| rank * 7 % 5).collect();
            let gathered = comm.all_gather_varcount(&vec![me as f32; counts[me as usize]])?;
            assert_eq!(gathered.counts, counts);
            let expected: Vec<f32> = (0..world)
                .flat_map(|rank| vec![rank as f32; counts[rank as usize]])
                .collect();
            assert_eq!(gathered.values, expected);
            Ok(())
        }
    }
}

fn wrong(
    comm: &Communicator,
    round: &Round,
    index: u64,
    (trouble, call): (Trouble, CallId),
) -> Result<(), CollectiveError> {
    match trouble {
        Trouble::Abort => {
            comm.abort_call(call, "chaos");
            Ok(())
        }
        Trouble::Cancel => {
            // It gives what it would give otherwise: the others may end well.
            let me = f64::from(comm.rank().0);
            let value = if index % 4 == 1 { me } else { me + 1.0 };
            let mut data = vec![value; round.length];
            let mut future: Pin<Box<dyn Future<Output = _> + Send>> = if index % 4 == 1 {
                Box::pin(comm.broadcast_async(&mut data, Rank(round.root)))
            } else {
                Box::pin(comm.all_reduce_async(&mut data, ReduceOp::Sum))
            };
            let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
            // It may be dropped in the middle, and even be through, if all others were waiting for this rank only.
            for _ in 0..=(call.0 + index) % 9 {
                if future.as_mut().poll(&mut cx).is_ready() {
                    break;
                }
                std::thread::yield_now();
            }
            Ok(())
        }
        Trouble::Length => comm.all_gather(&vec![1_i64; round.length + 1]).map(|_| ()),
        Trouble::Other => comm.barrier(),
    }
}

fn play(
    comm: &Communicator,
    buffer: &mut SharedBuffer<f64>,
    round: &Round,
    call: CallId,
) -> Result<(), CollectiveError> {
    comm.begin_call(call);
    comm.set_tuning(Tuning {
        force: round.force,
        ..Tuning::default()
    });
    let result = (0..round.operations).try_for_each(|index| match round.trouble {
        Some((at, rank, trouble)) if at == index && rank == comm.rank().0 => {
            wrong(comm, round, index, (trouble, call))
        }
        _ => operation(comm, buffer, round, index),
    });
    if result.is_err() {
        comm.abort_call(call, "an operation failed");
    }
    result
}

#[test]
fn a_group_gets_over_anything() {
    // More seeds than the usual 12, or one that failed: KOLO_TEST_SEEDS=100..=200
    let (first, last) = std::env::var("KOLO_TEST_SEEDS")
        .ok()
        .and_then(|range| {
            let (first, last) = range.split_once("..=")?;
            Some((first.parse().ok()?, last.parse().ok()?))
        })
        .unwrap_or((1, 12));
    for seed in first..=last {
        let mut random = Random(u64::wrapping_mul(seed, 0x9e37_79b9_7f4a_7c15));
        let world = 2 + random.below(5) as u32;
        let kinds = [
            Kind::Memory,
            Kind::Unix,
            Kind::Narrow(5000),
            Kind::Shared,
            Kind::Tls,
            Kind::Ring,
        ];
        let kind = kinds[seed as usize % kinds.len()];
        let group = Group::new(kind, world);
        let buffers = group.run(|comm| Mutex::new(comm.buffer(40_000).unwrap()));
        for call in 0..30 {
            let calm = call % 3 == 2;
            let round = round(&mut random, world, calm);
            let results = group.run(|comm| {
                let mut buffer = buffers[comm.rank().index()].lock().unwrap();
                play(comm, &mut buffer, &round, CallId(call))
            });
            for result in &results {
                match result {
                    Ok(()) => {}
                    Err(error) => {
                        assert!(!calm, "seed {seed} call {call} {round:?}: {error}");
                        let lost = matches!(
                            error,
                            CollectiveError::PeerLost { .. }
                                | CollectiveError::Protocol { .. }
                                | CollectiveError::Connect { .. }
                                | CollectiveError::Deadline { .. }
                        );
                        assert!(
                            !lost,
                            "seed {seed} {kind:?} x{world} call {call} {round:?}: {error}"
                        );
                    }
                }
            }
        }
    }
}
