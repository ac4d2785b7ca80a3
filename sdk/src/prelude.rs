//! What most programs use: `use kolo::prelude::*;`.

pub use kolo_collectives::ReduceOp;

pub use crate::elastic::{Elastic, ElasticSampler, Parts, State};
pub use crate::{
    All, CallError, CallErrorKind, Cluster, Context, Credentials, Executor, LogLine, One, Output,
    Rank, RankCall, Ranks, Result, StartError, Stdio,
};
#[cfg(feature = "local")]
pub use crate::{LocalCluster, LocalClusterBuilder};
