//! A node's side of every job: what it holds, its workers, their output.

pub mod colocator;
pub mod environment;
pub mod inventory;
pub mod logs;
mod machine;
pub mod messages;
pub mod orphans;
mod outbox;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use machine::NodeCore;
