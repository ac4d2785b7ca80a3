//! `kolo up` and `kolo down` with real ssh servers, each on a loopback address of its own.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod detached;
mod hosts;
mod jobs;
mod joined;
mod launch;
mod networks;
mod run;
mod servers;
