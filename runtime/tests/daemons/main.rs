//! `kolo-head`, `kolo-node` and `kolo` together, as processes.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod config;
mod descriptors;
mod doctor;
mod drain;
mod ends;
mod gpus;
mod login;
mod logs;
mod notify;
mod process;
mod secrets;
mod test_service;
mod trust;
mod units;
