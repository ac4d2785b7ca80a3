//! The promises: one file each.

mod answers;
mod d2;
mod drain;
mod e1;
mod e2;
mod f1;
mod g1;
mod g2;
mod g3;
mod liveness;
mod partition;
mod r1;
mod r2;
mod restart;
mod seat;
mod told;

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
