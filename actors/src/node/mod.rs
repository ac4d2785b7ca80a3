//! A node's side of every job: what it holds, its workers, their output.
//!
//! [`inventory`], [`colocator`], [`environment`], [`logs`] and [`orphans`] decide, without I/O and clock. [`NodeActor`]
//! owns the node's resources and makes a `NodeColocator` for each job that reserves some; that makes a
//! `Worker` for each slot. What the actors need of the daemon around them is in [`NodeContext`].

pub mod colocator;
mod colocator_actor;
pub mod environment;
mod installed;
pub mod inventory;
pub mod logs;
mod node_actor;
pub mod orphans;
mod output;
mod ports;
mod stream;
#[cfg(test)]
mod testing;
mod worker_actor;

pub use installed::InstalledFile;
pub use node_actor::{
    Kill, Membership, NodeActor, NodeContext, NodeSnapshot, RankLost, Reserve, SendSignal,
    Snapshot, Start, Stop, StopAll,
};
pub use output::{Output, Outputs};
pub use ports::{
    BoxFuture, CallPlane, CallsEnd, ControlError, ControlReceiver, ControlSender, HeadLink,
};
pub use stream::{Chunk, Taken};
pub use worker_actor::{Launch, ProgramFile};
