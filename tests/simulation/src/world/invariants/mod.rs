//! The promises: one file each. A check only looks at the world, and tells what is wrong.

pub(super) mod answers;
pub(super) mod d2;
pub(super) mod drain;
pub(super) mod e1;
pub(super) mod e2;
pub(super) mod f1;
mod g1;
pub(super) mod g2;
pub(super) mod g3;
pub(super) mod liveness;
pub(super) mod partition;
pub(super) mod r1;
mod r2;
mod restart;
mod seat;
pub(super) mod told;

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
