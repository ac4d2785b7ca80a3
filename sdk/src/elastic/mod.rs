//! Loops that outlive changes of their group: what a group has learnt is committed, and each sample is worked on once.
//!
//! | to | see |
//! |---|---|
//! | keep what a group has learnt, and give the same to all ranks | [`State`], [`Elastic`], [`Value`] |
//! | go on after the loss of all ranks | [`Checkpoints`] |
//! | deal out the samples of a data set, each once in an epoch | [`ElasticSampler`], [`Batch`] |
//! | go on with a loop when ranks are lost or join | [`Context::elastic`](crate::Context::elastic); [`run`], [`Membership`] |
//!
//! `State` and `ElasticSampler` work in any group. `docs/elastic.md` tells how the pieces fit together.

mod checkpoint;
mod error;
mod order;
mod parts;
mod run;
mod sampler;
mod snapshot;
mod state;
mod sync;

pub use checkpoint::Checkpoints;
pub use error::{ElasticError, NoGeneration, StateError};
pub use parts::{Elastic, Parts, Value};
pub use run::{Cause, Epoch, Interrupt, Membership, run};
pub use sampler::{Batch, ElasticSampler, LastBatch, Samples, StaleBatch};
pub use state::State;

/// The program of that page compiles.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/elastic.md")]
const PAGE: () = ();
