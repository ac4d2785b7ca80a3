//! HTTP: the rendezvous of Horovod's workers, and the API for operators.
//!
//! | listener | started by | who may come |
//! |---|---|---|
//! | plain, one per job that asks for it | [`RendezvousServer::start`] | the addresses of the job's nodes, for the job's scopes |
//! | HTTPS, one per head | [`serve`] | who has a certificate of the cluster or the bearer token |
//!
//! With curl and a driver's credentials (the folder that `kolo login` has written):
//!
//! ```text
//! curl --cacert identity.pem --cert identity.pem --resolve kolo:8443:10.0.0.1 https://kolo:8443/api/v1/jobs
//! ```

pub mod api;
mod auth;
mod body;
mod connection;
pub mod dto;
mod error;
mod metrics;
pub mod openapi;
pub mod rendezvous;
mod routes;
mod server;
mod state;
pub mod store;
#[cfg(test)]
mod tests;

/// Descriptors that the threads of a server need.
const DESCRIPTORS: u64 = 12;

pub use api::{BoxFuture, HeadApi};
pub use auth::{BearerSecret, BearerSecretError};
pub use connection::Connections;
pub use kolo_core::rendezvous::{RendezvousPlan, RendezvousSlot};
pub use rendezvous::{DoorServer, Place, RendezvousServer, RendezvousStartError};
pub use server::{HttpConfig, HttpHandle, HttpLimits, HttpStartError, serve, serve_with};
pub use store::SharedStore;
