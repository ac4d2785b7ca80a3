//! `kolo-head`, `kolo-node` and `kolo` together, as processes.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod config;
mod descriptors;
mod doctor;
mod drain;
mod ends;
mod gpus;
mod head;
mod login;
mod logs;
mod metrics;
mod node;
mod notify;
mod process;
mod secrets;
mod test_service;
mod trust;
mod units;
