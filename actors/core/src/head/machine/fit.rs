//! Where the workers of an elastic job fit.

use kolo_wire::ids::NodeId;
use kolo_wire::{JobHost, JobSpec, NodeShare, Placement, Refusal};

use super::running::Running;
use crate::head::job::most_on;
use crate::placement::{Offer, Share, place, place_at_most, spread_at_most};

/// Nodes for at most so many workers of an elastic job, which has so many workers on each node already.
pub(super) fn at_most(
    workers: u32,
    spec: &JobSpec,
    offers: &[Offer],
    there: impl Fn(NodeId) -> u32,
) -> Vec<Share> {
    match spec.placement {
        Placement::Pack { .. } => place_at_most(workers, &spec.per_worker, offers, there),
        Placement::Spread { slots, .. } => {
            spread_at_most(workers / slots, slots, &spec.per_worker, offers)
        }
    }
}

/// The same placement for so many workers.
fn of_size(placement: Placement, workers: u32) -> Placement {
    match placement {
        Placement::Pack { .. } => Placement::Pack { workers },
        Placement::Spread { slots, .. } => Placement::Spread {
            hosts: workers / slots,
            slots,
        },
    }
}

/// What a job is offered that may use these hosts, and has so many workers on each node already.
pub(super) fn allowed(
    mut offers: Vec<Offer>,
    hosts: Option<&[JobHost]>,
    there: impl Fn(NodeId) -> u32,
) -> Vec<Offer> {
    if hosts.is_some() {
        for offer in &mut offers {
            let most = most_on(hosts, offer.node, &offer.hostname);
            offer.most = offer.most.min(most.saturating_sub(there(offer.node)));
        }
        offers.retain(|offer| offer.most > 0);
    }
    offers
}

/// Why there are no nodes for so many more workers of a job, which has so many on each node already.
pub(super) fn missing(
    running: &Running,
    wanted: u32,
    mut offers: Vec<Offer>,
    there: impl Fn(NodeId) -> u32,
    avoid: &[String],
) -> String {
    let spec = running.job.spec();
    let least = spec.elastic.as_ref().map_or(0, |elastic| elastic.min);
    let held: u32 = running.job.held().map(|(_, workers)| workers).sum();
    // The workers without which the job can't go on, if they are missing.
    let needed = least.saturating_sub(held).min(wanted);
    let sizes = [needed, wanted].into_iter().filter(|size| *size > 0);
    let has_some = offers.iter().any(|offer| there(offer.node) > 0);
    // What the job has itself is not there when others have ended.
    for offer in &mut offers {
        let own = spec.per_worker.times(there(offer.node));
        if let Some(rest) = offer.total.minus(&own) {
            offer.total = rest;
        }
    }
    let place = |size| place(of_size(spec.placement, size), &spec.per_worker, &offers);
    let mut why = match sizes.map(place).find_map(Result::err) {
        Some(error) if has_some => format!("beside those that it has, {error}"),
        Some(error) => error.to_string(),
        None => "its nodes take no more workers of it".to_owned(),
    };
    if !avoid.is_empty() {
        let hosts = avoid.join(", ");
        why = format!("{why}; left out after a failure there: {hosts}");
    }
    if let Some(hosts) = running.job.hosts() {
        let allowed = match hosts.len() {
            0 => "its driver allows no host at present".to_owned(),
            1 => "its driver allows 1 host alone".to_owned(),
            more => format!("its driver allows {more} hosts and no others"),
        };
        why = format!("{why}; {allowed}");
    }
    why
}

/// In place of an elastic job one that never changes, of the members that it would begin with.
pub(super) fn as_it_begins(spec: &mut JobSpec, offers: &[Offer]) -> Result<(), Refusal> {
    let Some(elastic) = spec.elastic.take() else {
        return Ok(());
    };
    let offers = allowed(offers.to_vec(), elastic.hosts.as_deref(), |_| 0);
    let shares = at_most(elastic.max, spec, &offers, |_| 0);
    let workers = shares.iter().map(|share| share.workers).sum();
    if workers < elastic.min {
        let least = of_size(spec.placement, elastic.min);
        place(least, &spec.per_worker, &offers)?;
    }
    spec.placement = Placement::Pack { workers };
    let share = |share: Share| NodeShare {
        node: share.node,
        workers: share.workers,
    };
    spec.layout = shares.into_iter().map(share).collect();
    Ok(())
}
