//! The choice between several interfaces that all connect.
//!
//! In this order: the nearest, the largest packets, the fastest, the first by name, IPv4 before IPv6. The nearest is
//! measured, and measurements vary: whatever is at most twice as far as the nearest, or 5 ms farther, is as near. So two
//! interfaces of one data centre are always told apart by what does not vary.

use std::cmp::Reverse;

use super::candidates::Family;

/// Farther by no more than this is as near, in microseconds.
const AS_NEAR: u64 = 5000;

/// What connects, and how well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Scored {
    pub(super) name: String,
    pub(super) family: Family,
    /// The longest of its round trips, in microseconds.
    pub(super) rtt_us: u64,
    /// The smallest of its MTUs.
    pub(super) mtu: u32,
    /// The lowest of its speeds; 0 if one is not known.
    pub(super) speed: u32,
}

/// Farthest round trip that is as near as the nearest.
fn horizon(all: &[Scored]) -> u64 {
    let nearest = all.iter().map(|one| one.rtt_us).min().unwrap_or(0);
    nearest
        .saturating_mul(2)
        .max(nearest.saturating_add(AS_NEAR))
}

/// The index of the best; `None` if there is nothing to choose from.
pub(super) fn best(all: &[Scored]) -> Option<usize> {
    let horizon = horizon(all);
    (0..all.len()).min_by_key(|index| {
        let one = &all[*index];
        (
            one.rtt_us > horizon,
            Reverse(one.mtu),
            Reverse(one.speed),
            one.name.as_str(),
            one.family,
        )
    })
}

/// Why `index` is not the best, which is `chosen`.
pub(super) fn why_not(all: &[Scored], index: usize, chosen: usize) -> String {
    let (one, best) = (&all[index], &all[chosen]);
    let name = &best.name;
    if one.rtt_us > horizon(all) {
        format!(
            "farther than {name}: {} ms to {} ms",
            milliseconds(one.rtt_us),
            milliseconds(best.rtt_us)
        )
    } else if one.mtu < best.mtu {
        format!(
            "smaller packets than {name}: MTU {} to {}",
            one.mtu, best.mtu
        )
    } else if one.speed < best.speed {
        let speed = |speed| match speed {
            0 => "unknown".to_owned(),
            speed => format!("{speed} Mbit/s"),
        };
        format!(
            "slower than {name}: {} to {}",
            speed(one.speed),
            speed(best.speed)
        )
    } else if one.name == best.name {
        format!("another address of {name} is used")
    } else {
        format!("as good as {name}, which comes first")
    }
}

/// Milliseconds with two decimals.
pub(super) fn milliseconds(us: u64) -> String {
    format!("{:.2}", us as f64 / 1000.0)
}
