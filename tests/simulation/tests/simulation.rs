//! Whole clusters under every kind of fault. `cargo run --release -p kolo-sim -- --help` plays more and larger ones.

#![allow(clippy::unwrap_used)]

use kolo_sim::{Cost, Counts, Mutation, Options, Shape, play, scale};

const SMALL: Options = Options::SMALL;

const SEEDS: u64 = 200;

#[test]
fn every_promise_holds() {
    let mut counts = Counts::default();
    for seed in 0..SEEDS {
        let outcome = play(seed, SMALL, false);
        assert_eq!(outcome.violation, None, "seed {seed} of {SMALL:?}");
        counts += outcome.counts;
    }
    // A simulation in which nothing happens would show nothing.
    assert!(counts.generations > SEEDS, "{counts:?}");
    assert!(counts.losses > SEEDS, "{counts:?}");
    assert!(counts.commits > 10 * SEEDS, "{counts:?}");
    assert!(
        counts.ends.iter().all(|ends| *ends > SEEDS / 4),
        "{counts:?}"
    );
}

#[test]
fn one_seed_gives_one_trace() {
    for seed in 0..10 {
        let [first, second] = [(); 2].map(|()| play(seed, SMALL, true));
        assert_eq!(first.hash, second.hash, "seed {seed}");
        assert!(first.lines.len() > 20, "seed {seed}");
        assert_eq!(first.lines, second.lines, "seed {seed}");
        assert_ne!(first.hash, play(seed + 10, SMALL, true).hash, "seed {seed}");
    }
}

#[test]
fn each_bug_is_found() {
    let mut found = 0;
    for mutation in Mutation::ALL.iter().copied() {
        let options = Options {
            mutation: Some(mutation),
            ..SMALL
        };
        let seed = (0..SEEDS).find(|seed| play(*seed, options, false).violation.is_some());
        assert!(seed.is_some(), "{mutation}: not found in {SEEDS} seeds");
        found += 1;
    }
    assert!(found >= 10, "{found}");
}

#[test]
fn what_a_job_costs_the_head_grows_with_its_nodes_alone() {
    let cost = |nodes| scale(Shape { nodes, slots: 4 }).unwrap();
    let (small, large) = (cost(100), cost(1000));
    let per_node = |what: fn(&Cost) -> u64| {
        let [small, large] =
            [small, large].map(|cost| what(&cost) as f64 / f64::from(cost.shape.nodes));
        large / small
    };
    for growth in [per_node(|cost| cost.messages), per_node(|cost| cost.bytes)] {
        assert!(
            (0.8..1.5).contains(&growth),
            "{growth}: {small:?} {large:?}"
        );
    }
    // Each node gets the whole table.
    assert!(per_node(|cost| cost.tables) < 12.0, "{small:?} {large:?}");
}
