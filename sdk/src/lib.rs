//! Run one stateful Rust type on every slot of a cluster as one synchronous group.
//!
//! A program is its own driver and its own workers: [`main`] runs in the driver, and kolo starts the same executable again
//! for each worker. What workers can do is marked in the source, and typed:
//!
//! ```no_run
//! use kolo::prelude::*;
//!
//! struct Counter {
//!     total: f64,
//! }
//!
//! #[kolo::executable]
//! impl Counter {
//!     fn new(start: f64) -> Self {
//!         Self { total: start }
//!     }
//!
//!     /// Adds up a number from every rank.
//!     fn add(&mut self, ctx: &Context, step: f64) -> Result<f64> {
//!         let mut sum = step * ctx.rank() as f64;
//!         ctx.comm().all_reduce(&mut sum, ReduceOp::Sum)?;
//!         self.total += sum;
//!         Ok(self.total)
//!     }
//! }
//!
//! #[kolo::function]
//! fn whoami(ctx: &Context) -> usize {
//!     ctx.rank()
//! }
//!
//! #[kolo::main]
//! async fn main() -> Result<()> {
//!     // The cluster that KOLO_HEAD names, or one inside this process.
//!     let cluster = Cluster::connect_or_local().await?;
//!     let executor = Executor::builder().workers(4).start(&cluster).await?;
//!
//!     let ranks: Vec<usize> = executor.run(whoami, ()).await?;
//!     assert_eq!(ranks, [0, 1, 2, 3]);
//!
//!     let counter = executor.create::<Counter>(10.0).await?;
//!     let totals: Vec<f64> = counter.add(1.0).await?;
//!     let last: f64 = counter.on(Rank(3)).add(1.0).await?;
//!     println!("{totals:?}, then {last}");
//!
//!     executor.shutdown().await?;
//!     Ok(())
//! }
//! ```
//!
//! | to | see |
//! |---|---|
//! | find or start a cluster | [`Cluster`], [`LocalCluster`], [`Credentials`] |
//! | start a group of workers | [`Executor::builder`], [`ExecutorBuilder`] |
//! | write what workers do | [`function`], [`executable`], [`Context`], [`Communicator`] |
//! | keep state that outlives changes of the group | [`elastic`], [`State`](elastic::State), [`ElasticSampler`](elastic::ElasticSampler) |
//! | call it, on all ranks or on some | [`Executor`], the handle that [`executable`] makes, [`Call`] |
//! | know what went wrong | [`CallError`], [`StartError`], [`error`](mod@error) |
//!
//! # Features
//!
//! `local`, on by default: clusters inside the driver's process. A driver that only connects to clusters compiles faster
//! without it, for it needs neither head nor node then.
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
pub mod elastic;
mod entry;
pub mod error;
mod executable;
mod executor;
mod function;
mod macros;
mod options;
pub mod prelude;
mod program;
pub mod registry;
pub mod rt;
pub mod worker;

pub use call::{
    All, Call, CallFuture, Create, CreateFuture, GenerationChange, Object, One, RankCall, Ranks,
    Scope,
};
pub use cluster::Cluster;
#[cfg(feature = "local")]
pub use cluster::{LocalCluster, LocalClusterBuilder};
pub use context::Context;
pub use credentials::Credentials;
pub use error::{CallError, CallErrorKind, Error, Result, StartError};
pub use executable::Executable;
pub use executor::{
    Amount, Count, Executor, ExecutorBuilder, ExecutorOn, GenerationChanges, Output, Recovered,
    WorkerExit,
};
pub use function::{Argument, ArgumentTuple, Function, IntoArgs, Marked};
pub use kolo_collectives as collectives;
pub use kolo_collectives::lane::LaneChoice;
pub use kolo_collectives::{CollectiveError, Communicator, ReduceOp};
pub use kolo_transport::ids::{ClusterId, Generation, JobId, NodeId, Rank};
pub use kolo_transport::wire::{
    ClusterInfo, Exit, GenerationTable, GroupFilter, JobInfo, LogLine, Member, NodeInfo, Stdio,
    WorkerInfo,
};
pub use macros::{executable, function, main};
pub use registry::registry_digest;

/// The program of the tutorial compiles.
#[cfg(doctest)]
#[doc = include_str!("../../docs/tutorial.md")]
const TUTORIAL: () = ();
