//! Agents that run workers and start them anew: torchelastic's, for one or many nodes.
//!
//! An agent runs the workers of one node. It meets the agents of other nodes at a [`RendezvousHandler`], which gives all workers
//! ranks. Then the agent starts its workers and watches them. When a worker fails, or when agents come or go, all agents stop
//! their workers, meet again, and start new ones.
//!
//! | type | is |
//! |---|---|
//! | [`WorkerSpec`] | the blueprint of the workers |
//! | [`WorkerGroup`], [`Worker`], [`WorkerState`] | the workers, and how they are |
//! | [`RendezvousHandler`] | where agents meet: [`LocalRendezvous`] inside one process; in a node daemon what the head says |
//! | [`AgentCore`] | all that an agent decides, as a state machine |
//! | [`ElasticAgent`], [`SimpleElasticAgent`], [`Workers`] | an agent that blocks, over workers of any kind |
//! | [`MetricHandler`] | takes metrics by torchelastic's names |
//!
//! Three things differ from torchelastic. The restarts are the job's, and not those of each agent. Nothing polls: an agent acts at
//! once when a worker ends or the group changes. An agent whose workers have succeeded starts them anew if those of another fail.

mod group;
mod local;
mod machine;
mod metrics;
mod outcome;
mod rendezvous;
mod roles;
mod simple;
mod spec;
mod state;
#[cfg(test)]
mod tests;

pub use group::{Worker, WorkerGroup};
pub use local::{LocalHandler, LocalRendezvous};
pub use machine::{Action, AgentCore, Event};
pub use metrics::{
    METRICS_GROUP, Metric, MetricHandler, MetricSums, flakiness, prof, record_metrics,
};
pub use outcome::{
    AgentError, ByRank, MonitorResult, RunResult, WorkerFailure, WorkerGroupFailure,
};
pub(crate) use rendezvous::MapStore;
pub use rendezvous::{Barrier, Departure, Rendezvous, RendezvousError, RendezvousHandler, Store};
pub use roles::{AssignedRanks, RoleInstance, WorkerRanks, assign_worker_ranks};
pub use simple::{ElasticAgent, SimpleElasticAgent, Workers};
pub use spec::{DEFAULT_ROLE, SpecError, WorkerSpec};
pub use state::WorkerState;
