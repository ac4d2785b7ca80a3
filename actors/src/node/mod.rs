//! A node's actors.
//!
//! [`kolo_core::node`] decides. [`NodeActor`] owns the node's resources and makes a `NodeColocator` for each job that
//! reserves some; that makes a `Worker` for each slot. [`NodeContext`] holds what the actors need of the daemon around them.

mod colocator_actor;
mod installed;
mod node_actor;
mod output;
mod ports;
mod stream;
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
