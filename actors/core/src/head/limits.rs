//! The limits of an elastic job, as its driver gives them.

use std::time::Duration;

use kolo_wire::{Elastic, JobSpec, Placement};

use crate::membership::Limits;
use crate::node::colocator::KILLED;

/// How much later than it should a node may say that a process has ended.
const MARGIN: Duration = Duration::from_secs(5);

/// The limits that a driver asks for. [`Limits::check`] says what is wrong with them.
pub(super) fn limits(elastic: &Elastic, spec: &JobSpec) -> Limits {
    let ms = Duration::from_millis;
    Limits {
        on_change: elastic.on_change,
        // TERM, KILL, and the end of the wait for the end.
        stop_timeout: ms(spec.grace_ms) + KILLED + MARGIN,
        per_host: match spec.placement {
            Placement::Pack { .. } => 1,
            Placement::Spread { slots, .. } => slots,
        },
        min: elastic.min,
        max: elastic.max,
        spares: elastic.spares,
        join_window: ms(elastic.join_window_ms),
        start_timeout: ms(spec.start_timeout_ms),
        ack_timeout: ms(elastic.ack_timeout_ms),
        max_resets: elastic.max_resets,
        restarts_within: elastic
            .restarts_within
            .map(|window| (window.restarts, ms(window.within_ms))),
        restarts_without_progress: elastic.restarts_without_progress,
        cooldown: elastic
            .cooldown
            .map(|range| ms(range.least_ms)..=ms(range.most_ms)),
        filters: elastic.filters.clone(),
    }
}
