//! A node's actors.
//!
//! [`kolo_core::node::NodeCore`] decides. [`NodeColocator`] takes in what happens and does what comes out; it makes a
//! `Worker` for each process, which has its sockets and pipes. [`NodeContext`] holds what both need of the daemon around them.

mod asks;
mod author;
mod colocator;
mod error_file;
mod health;
mod homes;
mod installed;
mod launch;
mod leftovers;
mod output;
mod pipe;
mod ports;
mod sent;
mod stream;
mod supervisor;
mod warden;
mod worker;

pub use asks::{Ask, Happened, NodeSnapshot, Snapshot};
pub use colocator::NodeColocator;
pub use launch::{InstalledFile, Launch, ProgramFile};
pub use output::{Output, Outputs};
pub use ports::{
    BoxFuture, CallPlane, CallsEnd, ControlError, ControlReceiver, ControlSender, HeadLink,
    NodeContext, ProgramFinder,
};
pub use stream::{Chunk, Taken};
