//! The `kolo` binary: what it prints and with which exit code it ends.

#![allow(clippy::unwrap_used)] // a test may fail by a panic, also in its helpers

mod cluster;
mod environment;
mod fake;
mod kolo;
mod logs;
mod plan;
mod run;
