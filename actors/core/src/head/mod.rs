//! The head: the registry of nodes, the state machine of a job, and the memory of those that have ended.

pub mod history;
mod introduction;
pub mod job;
pub mod registry;
pub mod validate;
