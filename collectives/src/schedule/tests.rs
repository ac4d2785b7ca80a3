//! All schedules, run in memory: what every rank has in the end, in which order values were combined, and how much was sent.
#![allow(clippy::cast_possible_wrap)] // small numbers

use proptest::prelude::*;

use super::bed::{Case, of_world};
use super::simulate::{Kernels, run, run_with};
use super::*;
use crate::operation::OperationKind as Kind;

const KINDS: [Kind; 8] = [
    Kind::AllReduce,
    Kind::Reduce,
    Kind::ReduceScatter,
    Kind::AllGather,
    Kind::Gather,
    Kind::Scatter,
    Kind::Broadcast,
    Kind::AllToAll,
];

const ROOTED: [Kind; 4] = [Kind::Reduce, Kind::Gather, Kind::Scatter, Kind::Broadcast];

/// All algorithms of all operations in one layout: lengths around the number of ranks, equal and uneven shares.
fn check_all(layout: &Layout) {
    let world = layout.world();
    let n = world as usize;
    // What goes wrong goes wrong in few ranks: of more, some cases; of many, one of five.
    let step = if n <= 20 { 3 } else { 5 };
    let picks = |index: usize| n <= 9 || (index + n).is_multiple_of(step);
    let roots = if n <= 9 {
        (0..world).collect()
    } else {
        vec![world / 2 + world % 3]
    };
    for (kind, root) in KINDS.into_iter().flat_map(|kind| {
        let roots = if ROOTED.contains(&kind) {
            &roots[..]
        } else {
            &[0]
        };
        roots.iter().map(move |root| (kind, *root))
    }) {
        for &algorithm in Algorithm::able(kind) {
            let uneven = |rank: usize| rank % 4;
            let alone = |rank: usize| usize::from(rank + 1 == n) * 5;
            let lengths = [0, 1, 3, n + 1, 2 * n + 1];
            let whole = [Kind::AllReduce, Kind::Reduce, Kind::Broadcast].contains(&kind);
            let mut cases: Vec<Case> = lengths[..if whole { 5 } else { 3 }]
                .iter()
                .map(|count| Case::new(kind, algorithm, world, *count))
                .collect();
            if !whole {
                for share in [&uneven as &dyn Fn(usize) -> usize, &alone] {
                    let shares = (0..n).map(share).collect();
                    cases.push(Case {
                        shares,
                        ..cases[0].clone()
                    });
                }
            }
            let some = (cases.into_iter().enumerate()).filter(|(index, _)| picks(*index));
            for (index, mut case) in some {
                case.root = root;
                case.finish = index % 2 == n % 2;
                if index % 3 == 0 {
                    case.segment = 3;
                }
                case.check(layout);
            }
        }
    }
}

#[test]
fn every_operation_is_right_for_every_world_size_and_root() {
    for world in 1..=64 {
        check_all(&Layout::single(world));
        if world <= 9 {
            for host in [|rank| rank / 2, |rank| rank % 2] {
                check_all(&Layout::of_hosts(
                    &(0..world).map(host).collect::<Vec<u32>>(),
                ));
            }
        }
    }
}

const TWO_LEVELS: [(Kind, Algorithm); 5] = [
    (Kind::AllReduce, Algorithm::TwoLevelRing),
    (Kind::AllReduce, Algorithm::TwoLevelHalving),
    (Kind::AllReduce, Algorithm::TwoLevelDoubling),
    (Kind::AllGather, Algorithm::TwoLevelRing),
    (Kind::Broadcast, Algorithm::TwoLevelTree),
];

/// All that works on two levels, on one layout, and what crosses between hosts.
fn check_levels(layout: &Layout, count: usize) {
    let world = layout.world();
    for (kind, algorithm) in TWO_LEVELS {
        let mut case = Case::new(kind, algorithm, world, count);
        case.shares = (0..world as usize)
            .map(|rank| (rank * 7 + count) % 5)
            .collect();
        case.root = world / 3;
        let (all, sent) = case.check(layout);
        let crossing: Vec<usize> = both_ways(layout, &all).map(|(sent, _)| sent).collect();
        let Shape { hosts, least, .. } = layout.shape();
        let (hosts, pieces) = (hosts as usize, least as usize);
        match (kind, algorithm) {
            // Each host is sent the values once.
            (Kind::Broadcast, _) => {
                assert_eq!(crossing.iter().sum::<usize>(), count * (hosts - 1));
            }
            // As a ring of hosts, whatever the number of ranks there.
            (Kind::AllReduce, Algorithm::TwoLevelRing) if count.is_multiple_of(hosts * pieces) => {
                assert_eq!(crossing, vec![2 * count * (hosts - 1) / hosts; hosts]);
            }
            _ => {}
        }
        // A rank without a piece sends its values once.
        for (rank, sent) in (0..).zip(&sent) {
            if kind == Kind::AllReduce && layout.local_of(rank) >= least {
                assert_eq!(*sent, count, "rank {rank} on {layout:?}");
            }
        }
    }
}

/// Elements that each host sends to others and receives from them.
fn both_ways(layout: &Layout, all: &[Schedule]) -> impl Iterator<Item = (usize, usize)> {
    let mut crossing = vec![(0, 0); layout.hosts() as usize];
    for (rank, schedule) in (0..).zip(all) {
        let host = layout.host_of(rank) as usize;
        for action in schedule.steps().flatten() {
            if let Action::Send { peer, span } = action
                && layout.host_of(*peer) as usize != host
            {
                crossing[host].0 += span.len;
                crossing[layout.host_of(*peer) as usize].1 += span.len;
            }
        }
    }
    crossing.into_iter()
}

#[test]
fn every_layout_up_to_eight_by_eight_is_right() {
    for hosts in 1..=8_u32 {
        for slots in 1..=8_u32 {
            let layout = Layout::of_slots(&vec![slots; hosts as usize]);
            let all = (hosts * slots) as usize;
            for count in [0, 3, all, 2 * all + 5] {
                check_levels(&layout, count);
            }
        }
    }
}

/// The steps and bytes of the formula are those of the schedules: the same for rings, halving and doubling of as many ranks as a power
/// of two; within a factor for trees and pairs whose distances do not fit the hosts.
#[test]
fn the_formula_agrees_with_the_schedules() {
    const SHARE: usize = 64;
    let model = Model::default();
    for (hosts, slots) in [
        (1, 2),
        (1, 5),
        (1, 8),
        (2, 1),
        (4, 1),
        (2, 4),
        (4, 4),
        (3, 5),
        (8, 8),
    ] {
        let layout = Layout::of_slots(&vec![slots; hosts]);
        let world = layout.world();
        // Elements of one byte.
        let total = SHARE * world as usize;
        for kind in KINDS {
            for &algorithm in Algorithm::able(kind) {
                let mut case = Case::new(kind, algorithm, world, total);
                case.shares = vec![SHARE; world as usize];
                let (all, sent) = case.check(&layout);
                let said = predict(&model, layout.shape(), kind, algorithm, total as f64);
                let busier = both_ways(&layout, &all).map(|(sent, received)| sent.max(received));
                let across = busier.max().unwrap_or(0);
                let steps = all.iter().map(Schedule::len).max().unwrap_or(0);
                let what = format!("{kind} by {algorithm} on {:?}", layout.shape());
                let near = |name: &str, said: f64, is: usize, factor: f64| {
                    let is = is as f64;
                    let holds = said <= is * factor + 1e-6 && is <= said * factor + 1e-6;
                    assert!(holds, "{what}: {name} {said} and {is}");
                };
                near("across", said.across, across, 2.0);
                // A rank of a tree waits for those below it and has few steps of its own.
                let is_tree = [Algorithm::Binomial, Algorithm::TwoLevelTree].contains(&algorithm);
                if !is_tree {
                    near("steps", said.steps, steps, 2.0);
                }
                let is_exact = kind == Kind::AllReduce && world.is_power_of_two();
                if is_exact && hosts == 1 {
                    near("steps", said.steps, steps, 1.0);
                    near("inside", said.inside, sent[0], 1.0);
                }
            }
        }
    }
}

#[test]
fn costs_of_very_many_ranks_are_known_at_once() {
    let model = Model::default();
    for world in [16, 1024, 65_536] {
        let shape = Shape::even(world, world.div_ceil(8));
        for kind in Kind::ALL {
            for &algorithm in Algorithm::able(kind) {
                let one = predict(&model, shape, kind, algorithm, 1e6);
                let two = predict(&model, shape, kind, algorithm, 2e6);
                assert!(one.seconds.is_finite() && one.seconds > 0.0 && one.steps >= 1.0);
                assert!(two.seconds >= one.seconds, "{kind} by {algorithm}");
            }
        }
    }
}

/// Which ranks need no buffer beside the caller's.
#[test]
fn where_nothing_is_combined_on_the_way_no_buffer_is_needed() {
    let layout = Layout::single(5);
    let of = |kind, algorithm, root| Case {
        root,
        ..Case::new(kind, algorithm, 5, 3)
    };
    for case in [
        of(Kind::AllGather, Algorithm::Ring, 0),
        of(Kind::Broadcast, Algorithm::Binomial, 2),
        of(Kind::Broadcast, Algorithm::ScatterGather, 2),
    ] {
        let len = case.data(5)[1][0].len();
        let all = case.schedules(&layout);
        assert!(all.iter().all(|one| one.is_into(len)), "{case:?}");
    }
    for algorithm in [Algorithm::Pairwise, Algorithm::Linear] {
        let all = of(Kind::AllToAll, algorithm, 0).schedules(&layout);
        let received = Some(Span::between(15, 30));
        assert!(all.iter().all(|one| one.is_apart(15, 15) == received));
    }
    for root in 0..5 {
        let gather = of(Kind::Gather, Algorithm::Linear, root).schedules(&layout);
        let scatter = of(Kind::Scatter, Algorithm::Linear, root).schedules(&layout);
        for (rank, (gather, scatter)) in (0..).zip(gather.iter().zip(&scatter)) {
            if rank == root {
                assert!(gather.is_into(15));
                let own = Span::between(3 * root as usize, 3 * root as usize + 3);
                assert_eq!(scatter.is_apart(15, 3), Some(own));
            } else {
                assert!(scatter.is_into(3) && gather.is_apart(3, 0).is_some());
            }
        }
    }
    // Of two, each sends what it has. Of more, sums are passed on.
    let split = |world, rows| Rows {
        rows,
        width: 3,
        world,
    };
    for algorithm in [Algorithm::Ring, Algorithm::Halving] {
        for rank in 0..2 {
            let mut one = Schedule::default();
            one.reduce_scatter(Group::new(rank, 2), algorithm, split(2, 5), true);
            let own = split(2, 5).span(rank);
            assert_eq!(one.is_apart(15, own.len), Some(own));
            assert_eq!(one.is_apart(15, own.len + 1), None);
            assert_eq!(one.is_apart(14, own.len), None);
            one.reduce_scatter(Group::new(rank, 4), algorithm, split(4, 4), true);
            assert_eq!(one.is_apart(12, 3), None);
        }
    }
}

#[test]
fn nobody_leaves_a_barrier_before_all_have_come() {
    for world in 1..=64_u32 {
        let all = of_world(world, Schedule::barrier);
        let steps = world.next_power_of_two().ilog2() as usize;
        // What each rank knows after each step, as a set of ranks that have come.
        let mut known: Vec<u64> = (0..world).map(|rank| 1 << rank).collect();
        for step in 0..steps {
            let before = known.clone();
            for (rank, schedule) in all.iter().enumerate() {
                assert!(schedule.len() == steps && schedule.buffer == 0);
                for (peer, _) in schedule.step(step).iter().filter_map(Action::receive) {
                    known[rank] |= before[peer as usize];
                }
            }
        }
        let everybody = u64::MAX >> (64 - world);
        assert!(known.iter().all(|set| *set == everybody), "world {world}");
        run(
            &all,
            &vec![Vec::<i64>::new(); world as usize],
            |a, _| a,
            |a| a,
        )
        .unwrap();
    }
}

#[test]
fn one_rank_sends_to_another() {
    for count in [0, 5] {
        let (mut one, mut other) = (Schedule::default(), Schedule::default());
        one.receive(1, count);
        other.send(0, count);
        let data: Vec<i64> = (1..=count as i64).collect();
        let inputs = [vec![], data.clone()];
        let (results, _) = run(&[one, other], &inputs, |a, _| a, |a| a).unwrap();
        assert_eq!(results, [data, vec![]]);
    }
}

/// Adasum of two vectors, in its plainest form.
fn blend(left: &mut [f64], right: &[f64], [both, lefts, rights]: [f64; 3]) {
    let factor = |own: f64| {
        if own == 0.0 {
            1.0
        } else {
            1.0 - both / (2.0 * own)
        }
    };
    for (a, b) in left.iter_mut().zip(right) {
        *a = factor(lefts) * *a + factor(rights) * *b;
    }
}

#[test]
fn adasum_is_right_for_every_power_of_two() {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum();
    let dots = |a: &[f64], b: &[f64]| [dot(a, b), dot(a, a), dot(b, b)];
    let kernels = Kernels {
        combine: &|_, _| unreachable!("adasum blends"),
        finish: &|value: f64| value * 2.0,
        dots: &dots,
        add: &|a, b| a + b,
        blend: &blend,
    };
    for (world, count) in
        (0..7).flat_map(|bit| [0, 1, 3, 17, 128].map(|count| (1_u32 << bit, count)))
    {
        let number = |rank, i| f64::from((rank * 37 + i * 11 + rank * rank * i) % 19) - 9.0;
        let input = |rank| (0..count).map(|i| number(rank, i)).collect();
        let inputs: Vec<Vec<f64>> = (0..world).map(input).collect();
        let mut expected = inputs.clone();
        while expected.len() > 1 {
            let pairs = expected.chunks(2).map(|pair| {
                let mut result = pair[0].clone();
                blend(&mut result, &pair[1], dots(&pair[0], &pair[1]));
                result
            });
            expected = pairs.collect();
        }
        for &algorithm in Algorithm::ADASUM {
            let all = of_world(world, |schedule, group| {
                schedule.adasum(group, algorithm, count as usize, 8, true);
            });
            let (results, sent) = run_with(&all, &inputs, &kernels).unwrap();
            for result in &results {
                let bits = |all: &[f64]| all.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(result), bits(&results[0]), "{algorithm} {world}");
                for (value, expected) in result.iter().zip(&expected[0]) {
                    let near = (value - expected * 2.0).abs() <= 1e-9 * expected.abs().max(1.0);
                    assert!(
                        near,
                        "{algorithm} of {count} in {world}: {value}, half of {expected}"
                    );
                }
            }
            let (n, levels) = (world as usize, world.ilog2() as usize);
            if algorithm == Algorithm::Halving && count == 128 {
                let scalars = 3 * levels * (levels + 1) / 2;
                assert_eq!(sent, vec![2 * 128 * (n - 1) / n + scalars; n]);
            }
        }
    }
    // Scalar products lie where an `f64` may.
    for (size, count) in [2, 4, 8]
        .into_iter()
        .flat_map(|size| (0..40).map(move |count| (size, count)))
    {
        for &algorithm in Algorithm::ADASUM {
            let mut schedule = Schedule::default();
            schedule.adasum(Group::new(3, 8), algorithm, count, size, false);
            for action in schedule.steps().flatten() {
                if let Action::Dots { into, .. } | Action::AddDots { into, .. } = action {
                    assert!((into.start * size).is_multiple_of(8) && into.len * size == 24);
                    assert!(into.end() <= schedule.buffer);
                }
            }
        }
    }
}

/// So what a rank works on stays in its caches.
#[test]
fn a_ring_in_segments_reduces_one_while_it_gathers_the_other() {
    for world in 2..=9_u32 {
        let (rounds, segment) = (world as usize - 1, 3 * world as usize);
        for segments in 1..5 {
            let count = segments * segment - 1;
            let mut case = Case::new(Kind::AllReduce, Algorithm::Ring, world, count);
            case.segment = segment;
            let (all, sent) = case.check(&Layout::single(world));
            assert_eq!(sent.iter().sum::<usize>(), 2 * rounds * count);
            for schedule in &all {
                assert_eq!(schedule.len(), (segments + 1) * rounds);
                assert!(schedule.is_in_place(count));
                assert_eq!(schedule.peers_from(schedule.len()).count(), 0);
                for step in schedule.steps() {
                    let spans = || {
                        step.iter()
                            .filter_map(Action::transfer)
                            .map(|(_, span)| span)
                    };
                    let start = spans().map(|span| span.start).min().unwrap();
                    assert!(spans().all(|span| span.end() <= start + 2 * segment));
                }
            }
        }
    }
}

type Steps<'a> = &'a [&'a [Action]];

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
    let (peer, short) = (0, Span::between(0, 1));
    let short = Action::Receive { peer, span: short };
    let outside = Action::Finish {
        span: Span::between(0, 3),
    };
    let cases: [(Steps<'_>, Steps<'_>, &str); 6] = [
        // Both send first, then receive: it would work on lanes that buffer, and must not be relied on.
        (
            &[&[send(1)], &[receive(1)]],
            &[&[send(0)], &[receive(0)]],
            "deadlock",
        ),
        (&[&[receive(1)]], &[], "deadlock"),
        (&[&[send(0)]], &[], "to itself"),
        (&[&[send(1), receive(1)]], &[], "overwritten"),
        (&[&[send(1)]], &[&[short]], "expects 1"),
        (&[&[outside]], &[], "outside"),
    ];
    for (one, other, why) in cases {
        let inputs = [Vec::<i64>::new(), Vec::new()];
        let error = run(&[make(one), make(other)], &inputs, |a, _| a, |a| a).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
}

proptest! {
    #[test]
    fn any_operation_of_any_lengths_is_right(
        kind in prop::sample::select(KINDS.to_vec()),
        shares in prop::collection::vec(0_usize..40, 1..=40),
        count in 0_usize..300,
        segment in 1_usize..100,
        choice in any::<prop::sample::Index>(),
    ) {
        let algorithm = *choice.get(Algorithm::able(kind));
        let world = shares.len() as u32;
        let root = choice.index(shares.len()) as u32;
        let case = Case { root, shares, segment, ..Case::new(kind, algorithm, world, count) };
        case.check(&Layout::single(world));
    }

    /// Hosts with different numbers of ranks, and ranks anywhere.
    #[test]
    fn any_layout_is_right(hosts in prop::collection::vec(0_u32..8, 1..=64), count in 0_usize..150) {
        check_levels(&Layout::of_hosts(&hosts), count);
    }
}
