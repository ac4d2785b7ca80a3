//! The head's actors.
//!
//! [`kolo_core::head`] decides. [`HeadActor`] and [`Coordinator`] turn messages into its events and its actions into
//! messages. They know nothing of QUIC and HTTP: nodes are reached through a [`NodeLink`], the rendezvous is opened by a
//! [`RendezvousHost`].

mod actor;
mod coordinator;
mod drain;
mod interfaces;
mod link;
pub mod messages;
mod probing;
#[cfg(test)]
mod tests;

pub use actor::{HeadActor, HeadSettings};
pub use coordinator::Coordinator;
pub use link::{LocalFuture, NodeLink, RendezvousHost, SendFuture};
