//! Whole clusters of kolo on a virtual clock: the cores of head and nodes as they are, with models of the network, of processes and of
//! drivers around them. One seed gives everything: sizes, times, faults and work.
//!
//! A run has phases. First everything goes wrong: messages are late, connections end, hosts are cut off one way or both,
//! daemons, head, workers and drivers die, stand still, come and go. Then all faults end. From then on every job must become whole
//! and work, and survive the loss of one worker within bounded time; at the end nothing may be left of any job. One file in
//! `invariants` checks one promise of `docs/architecture.md`.
//!
//! The models leave out calls, output, certificates and interfaces: these are not of the cores.
#![forbid(unsafe_code)]

mod group;
mod knobs;
mod link;
mod memory;
mod mutation;
mod queue;
mod random;
mod run;
mod scale;
mod trace;
mod worker;
mod world;

pub use self::mutation::Mutation;
pub use self::run::{Counts, Options, Outcome, Violation};
pub use self::scale::{Cost, Shape, scale};
pub use self::world::play;
