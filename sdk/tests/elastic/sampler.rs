//! The sampler by itself: every sample once in an epoch, whatever the group does.

use std::collections::BTreeSet;

use kolo::elastic::{Batch, ElasticSampler, LastBatch};
use proptest::prelude::*;

/// The batch of all ranks, in the order of ranks, and the lengths of the slices.
fn next(sampler: &ElasticSampler, size: usize) -> Option<(Vec<usize>, Vec<usize>)> {
    let slices: Vec<_> = (0..size)
        .map(|rank| sampler.next_batch(rank, size))
        .collect();
    let ends = slices.iter().filter(|slice| slice.is_none()).count();
    assert!(
        ends == 0 || ends == size,
        "all ranks see the end at the same step"
    );
    let slices: Vec<_> = slices.into_iter().collect::<Option<_>>()?;
    let samples: Vec<usize> = slices.iter().flatten().collect();
    let lengths: Vec<usize> = slices.iter().map(Batch::len).collect();
    assert!(
        slices
            .iter()
            .all(|slice| slice.global_len() == samples.len())
    );
    let shares: f64 = slices.iter().map(Batch::share).sum();
    assert!((shares - 1.0).abs() < 1e-9);
    Some((samples, lengths))
}

fn record(sampler: &mut ElasticSampler, size: usize) {
    let batch = sampler.next_batch(0, size).unwrap();
    sampler.record(&batch).unwrap();
}

/// The state as it travels to a new rank.
fn sent(sampler: &ElasticSampler) -> ElasticSampler {
    kolo::codec::decode(&kolo::codec::encode(sampler).unwrap()).unwrap()
}

#[test]
fn horovods_partial_epoch() {
    // test_torch_elastic.py: eight samples, two ranks, batches of two for each; one batch, then a commit and a restore.
    let mut sampler = ElasticSampler::with_rank_batch(8, 2).sequential();
    assert_eq!(sampler.steps_left(2), 2);
    let slice = |sampler: &ElasticSampler, rank| {
        let batch = sampler.next_batch(rank, 2).unwrap();
        batch.iter().collect::<Vec<_>>()
    };
    assert_eq!(
        (slice(&sampler, 0), slice(&sampler, 1)),
        (vec![0, 1], vec![2, 3])
    );
    record(&mut sampler, 2);
    let committed = sent(&sampler);
    assert_eq!(
        (slice(&sampler, 0), slice(&sampler, 1)),
        (vec![4, 5], vec![6, 7])
    );
    record(&mut sampler, 2);
    assert!(sampler.next_batch(0, 2).is_none());
    sampler = committed;
    assert_eq!((sampler.recorded(), sampler.steps_left(2)), (4, 1));
    assert_eq!(sampler.steps_left(1), 2);
    sampler.set_epoch(1);
    assert_eq!((sampler.recorded(), sampler.epoch()), (0, 1));
}

#[test]
fn a_loop_may_set_its_epoch_when_it_comes_back() {
    let mut sampler = ElasticSampler::with_global_batch(10, 4);
    record(&mut sampler, 2);
    sampler.set_epoch(0);
    assert_eq!(sampler.recorded(), 4);
}

#[test]
fn a_batch_is_recorded_once() {
    let mut sampler = ElasticSampler::with_global_batch(10, 4);
    let batch = sampler.next_batch(0, 2).unwrap();
    let restored = sampler.clone();
    sampler.record(&batch).unwrap();
    let error = sampler.record(&batch).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a batch from sample 0 of epoch 0 was recorded, but the sampler is at sample 4 of epoch 0; record each batch once, \
         before the next one is made"
    );
    let second = sampler.next_batch(0, 2).unwrap();
    let mut sampler = restored;
    assert!(sampler.record(&second).is_err());
    sampler.set_epoch(1);
    assert!(sampler.record(&batch).is_err());
    assert_eq!(sampler.recorded(), 0);
}

#[test]
fn the_last_batch_is_uneven_left_out_or_filled_up() {
    let mut sampler = ElasticSampler::with_global_batch(10, 4).sequential();
    record(&mut sampler, 3);
    record(&mut sampler, 3);
    assert_eq!(sampler.steps_left(3), 1);
    assert_eq!(next(&sampler, 3), Some((vec![8, 9], vec![1, 1, 0])));
    let padded = sampler.clone().last_batch(LastBatch::Pad);
    assert_eq!(next(&padded, 3), Some((vec![8, 9, 0, 1], vec![2, 1, 1])));
    let dropped = sampler.clone().last_batch(LastBatch::Drop);
    assert_eq!((next(&dropped, 3), dropped.steps_left(3)), (None, 0));
    for mut last in [sampler, padded] {
        record(&mut last, 3);
        assert_eq!((next(&last, 3), last.steps_left(3)), (None, 0));
        assert_eq!(last.recorded(), 10);
    }
}

#[derive(Debug, Clone, Copy)]
enum Deed {
    /// A step, which is lost if the flag is not set: its commit fails.
    Step(bool),
    /// So many ranks from now on, after a change at a commit.
    Resize(usize),
}

fn deeds() -> impl Strategy<Value = Vec<Deed>> {
    let deed = prop_oneof![
        4 => any::<bool>().prop_map(Deed::Step),
        1 => (1_usize..9).prop_map(Deed::Resize),
    ];
    proptest::collection::vec(deed, 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// E-2, and all ranks make the same steps.
    #[test]
    fn each_sample_comes_exactly_once_as_counted_by_commits(
        (samples, batch, per_rank, seed) in (0_usize..200, 1_usize..20, any::<bool>(), any::<Option<u64>>()),
        (last, deeds) in (0_u8..3, deeds()),
    ) {
        let last = [LastBatch::Uneven, LastBatch::Drop, LastBatch::Pad][usize::from(last)];
        let make = if per_rank { ElasticSampler::with_rank_batch } else { ElasticSampler::with_global_batch };
        let mut live = make(samples, batch).last_batch(last);
        live = match seed {
            Some(seed) => live.seed(seed),
            None => live.sequential(),
        };
        let mut committed = sent(&live);
        let (mut size, mut epochs) = (3, vec![vec![0; samples]; 3]);
        // What was decided, and then steps without a fault for two epochs.
        let deeds = deeds.into_iter().chain(std::iter::repeat_n(Deed::Step(true), 1_000));
        for deed in deeds {
            match deed {
                Deed::Resize(to) => size = to,
                Deed::Step(works) => {
                    let before = live.steps_left(size);
                    let Some((dealt, lengths)) = next(&live, size) else {
                        prop_assert_eq!(before, 0);
                        let counts = &epochs[live.epoch() as usize];
                        let left = counts.iter().filter(|count| **count == 0).count();
                        match last {
                            LastBatch::Uneven => prop_assert!(counts.iter().all(|count| *count == 1)),
                            LastBatch::Pad => prop_assert_eq!(left, 0),
                            _ => {
                                let full = if per_rank { batch * size } else { batch };
                                prop_assert!(left < full);
                                prop_assert!(counts.iter().all(|count| *count <= 1));
                            }
                        }
                        let next = live.epoch() + 1;
                        if next == 3 {
                            break;
                        }
                        live.set_epoch(next);
                        continue;
                    };
                    let longest = lengths.iter().max().unwrap() - lengths.iter().min().unwrap();
                    prop_assert!(longest <= 1, "{:?}", lengths);
                    record(&mut live, size);
                    if works {
                        prop_assert_eq!(live.steps_left(size), before - 1);
                        let counts = &mut epochs[live.epoch() as usize];
                        for sample in dealt {
                            counts[sample] += 1;
                        }
                        committed = sent(&live);
                    } else {
                        live = sent(&committed);
                    }
                }
            }
        }
        prop_assert_eq!(live.epoch(), 2);
    }

    #[test]
    fn epochs_are_orders_of_the_same_samples(samples in 2_usize..2_000, seed in any::<u64>(), epoch in any::<u64>()) {
        let mut sampler = ElasticSampler::with_global_batch(samples, samples).seed(seed);
        let mut orders = BTreeSet::new();
        for epoch in [epoch, epoch ^ 1, epoch ^ (1 << 40)] {
            sampler.set_epoch(epoch);
            let (order, _) = next(&sampler, 1).unwrap();
            let mut sorted = order.clone();
            sorted.sort_unstable();
            prop_assert!(sorted.into_iter().eq(0..samples));
            orders.insert(order);
        }
        // Of few samples there are few orders.
        prop_assert!(samples < 20 || orders.len() == 3);
    }
}
