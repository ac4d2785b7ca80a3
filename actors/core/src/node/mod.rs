//! A node's side of every job: what it holds, its workers, their output.

pub mod colocator;
pub mod environment;
pub mod inventory;
pub mod logs;
pub mod orphans;
#[cfg(test)]
mod testing;
