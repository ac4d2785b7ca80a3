//! Random changes: each sample is worked on exactly once in every epoch (E-2).

use proptest::prelude::*;

use crate::group::{Event, Id, Plan, What, When};

/// Threads that may join.
const MORE: usize = 3;

fn event(size: usize) -> impl Strategy<Value = Event> {
    let when = prop_oneof![
        3 => Just(When::BeforeStep),
        3 => Just(When::BeforeCommit),
        1 => Just(When::AfterChange),
    ];
    let what = (0_u8..4, 1..size + MORE).prop_map(|(what, id): (u8, Id)| match what {
        0 | 1 => What::Kill,
        2 => What::Drain(id),
        _ => What::Doom(id),
    });
    // Thread 0 stays, so that there is an end to look at.
    (0_u64..20, 1..size + MORE, when, what).prop_map(|(step, by, when, what)| Event {
        step,
        by,
        when,
        what,
    })
}

fn plan() -> impl Strategy<Value = Plan> {
    (1_usize..5, 1_usize..60, 1_u64..4, 1_usize..9, any::<bool>()).prop_flat_map(
        |(size, samples, epochs, batch, per_rank)| {
            let joins = proptest::collection::vec(0_u64..20, 0..=MORE);
            let others = proptest::collection::vec(event(size), 0..5);
            (joins, others).prop_map(move |(joins, mut events)| {
                events.extend(joins.iter().enumerate().map(|(index, step)| Event {
                    step: *step,
                    by: 0,
                    when: When::BeforeStep,
                    what: What::Join(size + index),
                }));
                Plan {
                    size,
                    threads: size + MORE,
                    samples,
                    epochs,
                    batch,
                    per_rank,
                    events,
                }
            })
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn each_sample_is_worked_on_exactly_once_in_every_epoch(plan in plan()) {
        let ends = plan.play();
        let there: Vec<_> = ends.iter().filter(|(_, end)| end.result.is_ok()).collect();
        prop_assert!(there.iter().any(|(id, _)| **id == 0), "{ends:?}");
        for (id, end) in there {
            prop_assert!(end.seen.iter().all(|seen| u64::from(*seen) == plan.epochs), "thread {id}: {ends:?}");
            prop_assert_eq!(&end.sizes, &ends[&0].sizes, "thread {}", id);
        }
    }
}
