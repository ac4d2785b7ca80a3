//! What head and nodes of kolo decide: functions and state machines without I/O, clock and randomness.
//!
//! A caller passes in the time, ids and what it was told, and carries out what comes back. So a decision can be tried to
//! exhaustion, and `kolo-actors` only carries messages.
//!
//! | to decide | look in |
//! |---|---|
//! | anything that a head does | [`head::HeadCore`] |
//! | which nodes a job gets | [`placement`], [`head::registry`] |
//! | which ranks its members have | [`ranks`], [`plan`] |
//! | how a job starts, fails and ends | [`head::job`] |
//! | which processes are its members, as they come and go | [`membership`] |
//! | when no worker of a node runs that is cut off | [`fence`] |
//! | which network interfaces connect its nodes | [`interfaces`] |
//! | what a node does for its jobs | [`node::NodeCore`], [`node::colocator`], [`node::inventory`] |
//! | when workers of a node are started anew | [`agent`] |
//! | how members find each other | [`rendezvous`] |
//! | what a worker's environment holds | [`mod@env`], [`node::environment`] |
#![forbid(unsafe_code)]

pub mod agent;
pub mod env;
pub mod fence;
pub mod head;
pub mod interfaces;
pub mod membership;
pub mod node;
pub mod pace;
pub mod placement;
pub mod plan;
pub mod ranks;
pub mod rendezvous;
