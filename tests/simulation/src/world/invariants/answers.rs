//! Every question has its answer: of peers to the head, of the head to nodes, of a node's core to its shell. A driver hears of
//! its job in order, and the truth about its end.

use kolo_wire::{JobEvent, JobState, Refusal};

use crate::knobs::{MS, SECOND};
use crate::world::World;
use crate::world::driver::{Driver, View};

impl Driver {
    /// Nothing comes after the end, and no loss before there is a group.
    pub(crate) fn check_order(&self, event: &JobEvent) -> Result<(), String> {
        let is_early = matches!(event, JobEvent::RankLost { .. }) && self.table.is_none();
        if is_early || matches!(self.view, View::Ended(..)) {
            let (job, view) = (self.job, &self.view);
            return Err(format!(
                "the driver of {job} is {view:?} and hears {event:?}"
            ));
        }
        Ok(())
    }
}

/// A failure has a cause, and a success no worker that failed, unless the driver had enough before.
pub(crate) fn end(
    world: &World,
    driver: &Driver,
    state: JobState,
    refusal: Option<&Refusal>,
) -> Result<(), String> {
    let job = driver.job;
    if state == JobState::Failed && refusal.is_none() {
        return Err(format!("{job} has failed without a cause"));
    }
    let has_failures = !driver.is_elastic() && world.oracle.told.has_exits(job);
    if state == JobState::Succeeded && has_failures && !driver.is_done() {
        return Err(format!(
            "{job} has succeeded, and a worker of it has failed"
        ));
    }
    match (refusal, driver.limits()) {
        (Some(refusal), Some(limits)) if refusal.message.contains("(--max-restarts)") => {
            let allowed = limits.restarts_without_progress;
            world.oracle.restarts.check_failures(job, allowed)
        }
        _ => Ok(()),
    }
}

/// Nobody owes an answer for long.
pub(crate) fn all(world: &World) -> Result<(), String> {
    // Heartbeats are under way at any time.
    if world.head.asks.len() > world.nodes.len() {
        return Err(format!("the head owes {} answers", world.head.asks.len()));
    }
    let old = world.now - 40 * SECOND + MS;
    let mut requests = world.head.requests.iter();
    if let Some((id, (since, _))) = requests.find(|(_, (since, _))| *since < old) {
        return Err(format!(
            "request {} to the node of connection {} has no end after {} s",
            id.number,
            id.session.0,
            (world.now - since) / SECOND
        ));
    }
    for node in &world.nodes {
        let owed = node.daemon.as_ref().map_or(0, |it| it.orders.len());
        if owed > 0 {
            return Err(format!("{} owes {owed} answers", node.id));
        }
    }
    Ok(())
}
