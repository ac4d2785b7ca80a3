#![allow(clippy::cast_possible_wrap)] // small numbers

mod moves;
mod reductions;

use proptest::prelude::*;

use super::counts::piece;
use super::simulate::{Kernels, Traffic, run, run_with};
use super::*;
use crate::operation::OperationKind;

const WORLDS: std::ops::RangeInclusive<u32> = 1..=64;
const REDUCERS: [Algorithm; 6] = [
    Algorithm::Flat,
    Algorithm::Halving,
    Algorithm::Ring,
    Algorithm::Doubling,
    Algorithm::Binomial,
    // On one host: every rank collects its piece from all, and hands it to all.
    Algorithm::TwoLevelRing,
];

const GATHERERS: [Algorithm; 2] = [Algorithm::Bruck, Algorithm::Ring];

/// One schedule that is reused, as the engine does: nothing of the previous operation may be left.
pub(super) fn schedules(layout: &Layout, make: impl Fn(&mut Schedule, Group<'_>)) -> Vec<Schedule> {
    let mut schedule = Schedule::default();
    schedule.broadcast(Group::new(0, 7), Algorithm::Binomial, 3, 5);
    (0..layout.world())
        .map(|rank| {
            make(&mut schedule, Group::on(rank, layout));
            schedule.clone()
        })
        .collect()
}

fn of_world(world: u32, make: impl Fn(&mut Schedule, Group<'_>)) -> Vec<Schedule> {
    schedules(&Layout::single(world), make)
}

/// Without anything, fewer than ranks, more, and not a multiple.
fn lengths(world: u32) -> Vec<usize> {
    let world = world as usize;
    let mut lengths = vec![0, 1, world / 2, world + 1, 2 * world + 1];
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

fn roots(world: u32) -> Vec<u32> {
    if world <= 9 {
        return (0..world).collect();
    }
    vec![0, world / 2 + world % 3, world - 1]
}

/// Shares of ranks: all alike, none, uneven, one rank alone.
fn shares(world: u32) -> Vec<Vec<usize>> {
    let of = |share: &dyn Fn(usize) -> usize| (0..world as usize).map(share).collect();
    vec![
        of(&|_| 3),
        of(&|_| 0),
        of(&|rank| rank % 4),
        of(&|rank| usize::from(rank + 1 == world as usize) * 5),
    ]
}

fn offsets(counts: &[usize]) -> Vec<usize> {
    let mut offsets = vec![0];
    for count in counts {
        offsets.push(offsets[offsets.len() - 1] + count);
    }
    offsets
}

pub(super) fn sum(schedules: &[Schedule], inputs: &[Vec<i64>]) -> (Vec<Vec<i64>>, Traffic) {
    let world = schedules.len() as i64;
    run(schedules, inputs, |a, b| a + b, |value| value / world).unwrap()
}

/// Rank r has `(r + 1) (i + 3)`; the sum over all ranks is known.
pub(super) fn inputs(world: u32, count: usize) -> Vec<Vec<i64>> {
    (0..i64::from(world))
        .map(|rank| (0..count as i64).map(|i| (rank + 1) * (i + 3)).collect())
        .collect()
}

pub(super) fn sums(world: u32, count: usize, finish: bool) -> Vec<i64> {
    let world = i64::from(world);
    let by = if finish { world } else { 1 };
    (0..count as i64)
        .map(|i| world * (world + 1) / 2 * (i + 3) / by)
        .collect()
}

/// What each rank is known by in gathers.
fn named(counts: &[usize]) -> Vec<Vec<i64>> {
    counts
        .iter()
        .enumerate()
        .map(|(rank, count)| (0..*count).map(|i| (rank * 1000 + i + 1) as i64).collect())
        .collect()
}

/// Hashes of expression trees: results are alike if and only if values were combined in the same order.
pub(super) fn same_order(schedules: &[Schedule], count: usize) -> bool {
    let inputs: Vec<Vec<u64>> = (0..schedules.len() as u64)
        .map(|rank| (0..count as u64).map(|i| rank << 32 | i).collect())
        .collect();
    let tree = |a: u64, b: u64| {
        a.wrapping_mul(6_364_136_223_846_793_005)
            .rotate_left(17)
            .wrapping_add(b.wrapping_mul(1_442_695_040_888_963_407) ^ 0x9e37)
    };
    let (results, _) = run(schedules, &inputs, tree, |value| value).unwrap();
    results.windows(2).all(|pair| pair[0] == pair[1])
}

/// A value of a buffer. What nobody has written is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Marked(i64);

impl Default for Marked {
    fn default() -> Self {
        Self(-77)
    }
}

/// Which buffer a rank can do without another one in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Works {
    /// That for the result.
    Into,
    /// That of the input and that for the result.
    Apart,
    /// None of the caller's.
    Buffered,
}

/// Each rank's result has to be what is expected, also where it is not copied from the working buffer. Returns where each rank can
/// work, and what was sent.
fn check(
    all: &[Schedule],
    inputs: &[Vec<i64>],
    expected: &[Vec<i64>],
    what: &str,
) -> (Vec<Works>, Traffic) {
    let whole: Vec<Schedule> = all
        .iter()
        .map(|schedule| Schedule {
            outputs: vec![Output {
                from: Span::between(0, schedule.buffer),
                to: 0,
            }],
            ..schedule.clone()
        })
        .collect();
    let marked: Vec<Vec<Marked>> = inputs
        .iter()
        .map(|input| input.iter().copied().map(Marked).collect())
        .collect();
    let sum = |a: Marked, b: Marked| Marked(a.0 + b.0);
    let world = all.len() as i64;
    // All that is in the buffers in the end.
    let (left, traffic) = run(&whole, &marked, sum, |value| Marked(value.0 / world)).unwrap();
    let works = all
        .iter()
        .enumerate()
        .map(|(rank, schedule)| {
            let left: Vec<i64> = left[rank].iter().map(|value| value.0).collect();
            let (input, expected) = (&inputs[rank], &expected[rank]);
            let mut result = vec![0; schedule.outputs.iter().map(|output| output.from.len).sum()];
            for Output { from, to } in &schedule.outputs {
                result[*to..to + from.len].copy_from_slice(&left[from.start..from.end()]);
            }
            assert_eq!(result, *expected, "{what}: rank {rank}");
            if schedule.is_into(expected.len()) {
                assert_eq!(left, *expected, "{what}: rank {rank}");
                return Works::Into;
            }
            let Some(written) = schedule.is_apart(input.len(), expected.len()) else {
                return Works::Buffered;
            };
            for (at, (left, given)) in left.iter().zip(input).enumerate() {
                let is_written = (written.start..written.end()).contains(&at);
                assert!(is_written || left == given, "{what}: rank {rank}");
            }
            // What is of the input is there before the rest comes.
            let mut result = left[written.start..written.end()].to_vec();
            for output in &schedule.outputs {
                if output.from.start < written.start || output.from.end() > written.end() {
                    let from = &input[output.from.start..output.from.end()];
                    result[output.to..output.to + from.len()].copy_from_slice(from);
                }
            }
            assert_eq!(result, *expected, "{what}: rank {rank}");
            Works::Apart
        })
        .collect();
    (works, traffic)
}

/// On one host and, of few ranks, on hosts of two and on two hosts by turns.
fn layouts(world: u32) -> Vec<(u32, Layout)> {
    let hosts = |host: fn(u32) -> u32| -> Vec<u32> { (0..world).map(host).collect() };
    let mut layouts = vec![(world, Layout::single(world))];
    if world <= 9 {
        layouts.push((world, Layout::of_hosts(&hosts(|rank| rank / 2))));
        layouts.push((world, Layout::of_hosts(&hosts(|rank| rank % 2))));
    }
    layouts
}

/// For the root alone.
fn at_root(world: u32, root: u32, values: &[i64]) -> Vec<Vec<i64>> {
    (0..world)
        .map(|rank| {
            if rank == root {
                values.to_vec()
            } else {
                Vec::new()
            }
        })
        .collect()
}

fn log2_up(world: u32) -> usize {
    world.next_power_of_two().ilog2() as usize
}

#[test]
fn ranks_send_as_many_bytes_as_theory_says() {
    for world in 2..=64_u32 {
        let n = world as usize;
        let count = 5 * n;
        let inputs = vec![vec![1; count]; n];
        let traffic = |algorithm| {
            let all = of_world(world, |schedule, group| {
                schedule.all_reduce(group, algorithm, count, count, false);
            });
            (sum(&all, &inputs).1.sent, all)
        };
        let (ring, all) = traffic(Algorithm::Ring);
        assert_eq!(ring, vec![2 * (n - 1) * 5; n]);
        assert!(all.iter().all(|one| one.len() == 2 * (n - 1)));

        let (gather, all) = traffic(Algorithm::Flat);
        assert_eq!(gather, vec![(n - 1) * count; n]);
        assert!(all.iter().all(|one| one.len() == log2_up(world)));

        let (halving, all) = traffic(Algorithm::Halving);
        let power = 1_usize << world.ilog2();
        let over = n - power;
        // Inside the power of two everybody sends 2 S (p-1)/p in total; the others S each way.
        assert_eq!(
            halving.iter().sum::<usize>(),
            power * 2 * count * (power - 1) / power + 2 * over * count
        );
        let steps = 2 * power.ilog2() as usize + if over > 0 { 2 } else { 0 };
        assert_eq!(all.iter().map(Schedule::len).max(), Some(steps));

        let (doubling, all) = traffic(Algorithm::Doubling);
        let rounds = power.ilog2() as usize;
        assert_eq!(
            doubling.iter().sum::<usize>(),
            count * (power * rounds + 2 * over)
        );
        let steps = rounds + if over > 0 { 2 } else { 0 };
        assert_eq!(all.iter().map(Schedule::len).max(), Some(steps));

        // Every byte goes up the tree once and down once.
        let (tree, all) = traffic(Algorithm::Binomial);
        assert_eq!(tree.iter().sum::<usize>(), 2 * count * (n - 1));
        assert!(all.iter().all(|one| one.len() <= 2 * log2_up(world)));

        let (direct, all) = traffic(Algorithm::TwoLevelRing);
        assert_eq!(direct, vec![2 * (n - 1) * 5; n]);
        assert!(all.iter().all(|one| one.len() == 2));
    }
}

#[test]
fn the_first_step_of_a_pair_is_found_by_its_peers() {
    let mut schedule = Schedule::default();
    schedule.all_reduce(Group::new(1, 4), Algorithm::Ring, 8, 8, true);
    assert_eq!(schedule.peers_from(0).count(), 12);
    assert_eq!(schedule.peers_from(5).collect::<Vec<_>>(), [2, 0]);
    assert_eq!(schedule.peers_from(6).count(), 0);
    assert_eq!(schedule.peers_from(60).count(), 0);
    assert_eq!(schedule.step(60), &[]);
}

#[test]
fn what_is_sent_and_what_is_written_may_be_apart() {
    let mut schedule = Schedule::default();
    for rank in 0..2 {
        let rows = Rows {
            rows: 5,
            width: 3,
            world: 2,
        };
        for algorithm in [Algorithm::Ring, Algorithm::Halving] {
            schedule.reduce_scatter(Group::new(rank, 2), algorithm, rows, true);
            let own = rows.span(rank);
            assert_eq!(schedule.is_apart(15, own.len), Some(own));
            assert_eq!(schedule.is_apart(15, own.len + 1), None);
            assert_eq!(schedule.is_apart(14, own.len), None);
        }
    }
    // What another rank gets is a sum already when it is sent on.
    for algorithm in [Algorithm::Ring, Algorithm::Halving] {
        schedule.reduce_scatter(Group::new(1, 4), algorithm, Equal(2), false);
        assert_eq!(schedule.is_apart(8, 2), None);
    }
    for world in WORLDS {
        let (group, count) = (Group::new(world / 2, world), 3 * world as usize);
        for algorithm in [Algorithm::Pairwise, Algorithm::Linear] {
            schedule.all_to_all(group, algorithm, Equal(3), Equal(3));
            let received = Span::between(count, 2 * count);
            assert_eq!(schedule.is_apart(count, count), Some(received));
        }
    }
    schedule.all_reduce(Group::new(0, 2), Algorithm::Ring, 8, 8, true);
    assert_eq!(schedule.is_apart(8, 8), None);
    schedule.scatter(Group::new(1, 3), Algorithm::Linear, 1, Equal(2));
    assert_eq!(schedule.is_apart(6, 2), Some(Span::between(2, 4)));
}

#[test]
fn the_simulator_sees_what_is_wrong() {
    let span = Span::between(0, 2);
    let send = |peer| Action::Send { peer, span };
    let receive = |peer| Action::Receive { peer, span };
    let make = |steps: &[&[Action]]| {
        let mut schedule = Schedule {
            buffer: 2,
            ..Schedule::default()
        };
        for step in steps {
            step.iter().for_each(|action| schedule.act(*action));
            schedule.end_step();
        }
        schedule
    };
    let error = |a: &[&[Action]], b: &[&[Action]]| {
        let result = run::<i64>(
            &[make(a), make(b)],
            &[Vec::new(), Vec::new()],
            |a, _| a,
            |a| a,
        );
        result.unwrap_err()
    };
    // Both send first, then receive: it would work on lanes that buffer, and must not be relied on.
    assert!(error(&[&[send(1)], &[receive(1)]], &[&[send(0)], &[receive(0)]]).contains("deadlock"));
    assert!(error(&[&[send(1)]], &[]).contains("deadlock"));
    assert!(error(&[&[receive(1)]], &[]).contains("deadlock"));
    assert!(error(&[&[send(0)]], &[]).contains("to itself"));
    assert!(error(&[&[send(1), receive(1)]], &[]).contains("overwritten"));
    let short = Action::Receive {
        peer: 0,
        span: Span::between(0, 1),
    };
    assert!(error(&[&[send(1)]], &[&[short]]).contains("expects 1"));
    let outside = Action::Finish {
        span: Span::between(0, 3),
    };
    assert!(error(&[&[outside]], &[]).contains("outside"));
}

proptest! {
    #[test]
    fn any_reduction_of_any_length_is_right(
        world in WORLDS,
        count in 0_usize..700,
        algorithm in prop::sample::select(REDUCERS.to_vec()),
        segment in 1_usize..200,
        seed in any::<u32>(),
    ) {
        let all = of_world(world, |schedule, group| {
            schedule.all_reduce(group, algorithm, count, segment, false);
        });
        let inputs: Vec<Vec<i64>> = (0..world)
            .map(|rank| (0..count).map(|i| i64::from(seed ^ rank) * (i as i64 + 1)).collect())
            .collect();
        let expected: Vec<i64> = (0..count)
            .map(|i| inputs.iter().map(|input| input[i]).sum())
            .collect();
        let (results, _) = sum(&all, &inputs);
        for result in results {
            prop_assert_eq!(&result, &expected);
        }
    }

    #[test]
    fn any_gather_is_right(
        counts in prop::collection::vec(0_usize..40, 1..=64),
        algorithm in prop::sample::select(GATHERERS.to_vec()),
    ) {
        let mut offsets = vec![0];
        for count in &counts {
            offsets.push(offsets[offsets.len() - 1] + count);
        }
        let all = of_world(counts.len() as u32, |schedule, group| {
            schedule.all_gather(group, algorithm, Offsets(&offsets));
        });
        let inputs: Vec<Vec<i64>> = counts
            .iter()
            .enumerate()
            .map(|(rank, count)| (0..*count).map(|i| (rank * 1000 + i) as i64).collect())
            .collect();
        let (results, _) = sum(&all, &inputs);
        for result in results {
            prop_assert_eq!(&result, &inputs.concat());
        }
    }

    #[test]
    fn pieces_cover_everything_once(count in 0_usize..10_000, pieces in 1_u32..100) {
        let mut end = 0;
        for index in 0..pieces {
            let piece = piece(count, pieces, index);
            prop_assert_eq!(piece.start, end);
            prop_assert!(piece.len.abs_diff(count / pieces as usize) <= 1);
            end = piece.end();
        }
        prop_assert_eq!(end, count);
    }
}
