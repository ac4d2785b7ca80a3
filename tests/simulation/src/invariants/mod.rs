//! The promises: one file each.

mod answers;
mod d2;
mod drain;
pub(crate) mod e1;
pub(crate) mod e2;
mod f1;
mod g1;
mod g2;
mod g3;
mod liveness;
mod partition;
pub(crate) mod r1;
mod r2;
mod restart;
mod seat;
mod told;

use kolo_wire::HeadRequest;

/// What is known of the whole run, without asking the cores.
#[derive(Debug, Default)]
pub(crate) struct Oracle {
    pub(crate) seats: seat::Seats,
    pub(crate) fences: g1::Fences,
    pub(crate) generations: g3::Generations,
    pub(crate) order: r2::Order,
    pub(crate) commits: e1::Commits,
    pub(crate) progress: liveness::Progress,
    pub(crate) restarts: restart::Restarts,
    pub(crate) told: told::Told,
}

impl Oracle {
    /// Jobs of the head that has died are over.
    pub(crate) fn head_died(&mut self) {
        self.told.head_died();
    }

    /// A peer says something to the head.
    pub(crate) fn reported(&mut self, request: &HeadRequest) {
        self.told.reported(request);
    }
}
