//! Run one stateful Rust type on every slot of a cluster as one synchronous group
#![deny(unsafe_code)]

// The macros say `::kolo`, in this crate's own tests too.
#[cfg(test)]
extern crate self as kolo;

#[doc(hidden)]
#[path = "private.rs"]
pub mod __private;
mod call;
mod cluster;
pub mod codec;
mod context;
mod credentials;
pub mod error;
mod executable;
mod executor;
mod function;
#[cfg(feature = "local")]
mod local;
mod macros;
pub mod prelude;
pub mod registry;
pub mod rt;
pub mod worker;

pub use call::{All, Call, CallFuture, Create, CreateFuture, Object, One, RankCall, Ranks, Scope};
pub use cluster::Cluster;
pub use context::Context;
pub use credentials::Credentials;
pub use error::{CallError, CallErrorKind, Error, Result, StartError};
pub use executable::Executable;
pub use executor::{Amount, Executor, ExecutorBuilder, ExecutorOn, Output, WorkerExit};
pub use function::{Argument, Function, IntoArgs};
pub use kolo_collectives as collectives;
pub use kolo_collectives::{CollectiveError, Communicator, ReduceOp};
pub use kolo_transport::ids::{ClusterId, Generation, JobId, NodeId, Rank};
pub use kolo_transport::wire::{
    ClusterInfo, Exit, GenerationTable, JobInfo, LogLine, Member, NodeInfo, Stdio,
};
#[cfg(feature = "local")]
pub use local::{LocalCluster, LocalClusterBuilder};
pub use macros::{executable, function, main};
pub use registry::registry_digest;
