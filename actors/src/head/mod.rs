//! The head: node registry, the state machine of a job, and the actors around them.
//!
//! [`registry`], [`validate`] and [`job`] decide and do nothing else. [`HeadActor`] and [`Coordinator`] turn messages
//! into their events and their actions into messages. They know nothing of QUIC and HTTP: nodes are reached
//! through a [`NodeLink`], the rendezvous is opened by a [`RendezvousHost`].

mod actor;
mod coordinator;
mod drain;
mod history;
mod interfaces;
mod introduction;
pub mod job;
mod link;
pub mod messages;
mod probing;
pub mod registry;
#[cfg(test)]
mod tests;
pub mod validate;

pub use actor::{HeadActor, HeadSettings};
pub use coordinator::Coordinator;
pub use link::{LocalFuture, NodeLink, RendezvousHost, SendFuture};
