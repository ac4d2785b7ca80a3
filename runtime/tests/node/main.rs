//! A node daemon with real workers, between a head and drivers that the tests play.
#![allow(clippy::unwrap_used)] // helpers are tests too

mod bed;
mod calls;
mod daemon;
mod life;
mod link;
mod logs;
mod orphans;
mod programs;
mod starts;
mod stops;
mod worker;

/// No test: what the workers of the tests run. They are this binary, started by the node with this
/// function's name as the filter.
#[test]
fn worker_process() {
    if std::env::var_os("KOLO_WORKER_FDS").is_some() {
        worker::run();
    }
}
