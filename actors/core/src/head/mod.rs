//! The head: all its decisions as one state machine, [`HeadCore`].
//!
//! | to decide | look in |
//! |---|---|
//! | which nodes live, and what is free | [`registry`] |
//! | how a job starts, fails and ends | [`job`] |
//! | which jobs can't be taken | [`validate`] |
//! | when a push is tried again | `outbox` |
//! | what nodes are to stop | `cleaning` |
//! | when a node or the head may leave | `drains` |
//! | which probes run | `probes` |
//! | what is remembered of ended jobs | [`history`] |

mod agenda;
mod cleaning;
mod drains;
pub mod history;
mod introduction;
pub mod job;
mod limits;
mod machine;
pub mod messages;
mod outbox;
mod probes;
pub mod registry;
mod requests;
pub mod validate;

use std::time::Duration;

pub use self::machine::HeadCore;

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
