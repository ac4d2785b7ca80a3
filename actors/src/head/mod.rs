//! The head's actor.
//!
//! [`HeadCore`](kolo_core::head::HeadCore) decides. The [`Coordinator`] brings it what happens and does what it says. It knows
//! nothing of QUIC and HTTP: nodes are reached through a [`NodeLink`], the rendezvous is opened by a [`RendezvousHost`].

mod actor;
mod beats;
mod link;
mod log;
pub mod messages;
#[cfg(test)]
mod tests;
mod ways;

pub use actor::{Coordinator, ask};
pub use beats::Beats;
pub use link::{LocalFuture, NodeLink, RendezvousHost, SendFuture, TellNews};
