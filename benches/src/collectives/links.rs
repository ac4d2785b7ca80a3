//! The measured cost of kolo's links, for `kolo-bench plan`.

use std::time::Instant;

use kolo::collectives::{Algorithm, CollectiveError, Communicator, Rank};

use super::wire::{LinkClass, LinkCosts};
use crate::stats::median;

const SHORT: usize = 64;
const LONG: usize = 512 << 10;
/// Short messages that follow each other without an answer.
const BURST: u32 = 16;
/// Rounds that do not count, and rounds that do.
const WARM: u32 = 8;
const TIMED: u32 = 32;

/// The links of rank 0 to another rank of its host and to one of another host. All ranks call it; rank 0 gets the figures.
pub(super) fn measure(comm: &Communicator) -> Result<LinkCosts, CollectiveError> {
    let layout = comm.layout();
    let other = |same: bool| {
        (1..comm.world_size()).find(|rank| (layout.host_of(*rank) == layout.host_of(0)) == same)
    };
    let class = |same| {
        other(same)
            .map(|peer| of_pair(comm, Rank(peer)))
            .transpose()
            .map(Option::flatten)
    };
    Ok(LinkCosts {
        inside: class(true)?,
        across: class(false)?,
    })
}

/// The link between rank 0 and another rank; `None` on the others.
fn of_pair(comm: &Communicator, peer: Rank) -> Result<Option<LinkClass>, CollectiveError> {
    let Some(pair) = comm.group(&[Rank(0), peer])? else {
        return Ok(None);
    };
    // Over the link, where the two share memory, too.
    let mut tuning = pair.tuning();
    tuning.force = Some(Algorithm::Binomial);
    pair.set_tuning(tuning);
    let short = there_and_back(&pair, 1, SHORT)?;
    let burst = there_and_back(&pair, BURST, SHORT)?;
    let long = there_and_back(&pair, 1, LONG)?;
    let busy = ((burst - short) / f64::from(BURST - 1)).max(0.0);
    let per_byte = ((long - short) / 2.0 / (LONG - SHORT) as f64).max(f64::MIN_POSITIVE);
    Ok(Some(LinkClass {
        latency: (short / 2.0 - busy).max(0.0) * 1e6,
        busy: busy * 1e6,
        rate: 1e-9 / per_byte,
    }))
}

/// The median time, in seconds, of so many messages one way and one the other way.
fn there_and_back(pair: &Communicator, burst: u32, bytes: usize) -> Result<f64, CollectiveError> {
    let mut data = vec![0_u8; bytes];
    let mut times = Vec::new();
    for round in 0..WARM + TIMED {
        let begun = Instant::now();
        for _ in 0..burst {
            pair.broadcast(&mut data, Rank(0))?;
        }
        pair.broadcast(&mut data, Rank(1))?;
        if round >= WARM {
            times.push(begun.elapsed().as_secs_f64());
        }
    }
    Ok(median(&times))
}
