//! Groups that lose and gain members while they work.

pub mod job;
pub mod training;

mod faults;
mod growth;
mod health;
mod kills;
mod replacement;
