//! What `#[kolo::main]` expands to.

use std::future::Future;

/// Runs `main` to its end: as the program itself in the driver, as a worker or as a warden in the processes
/// that kolo starts from the same executable. In those two it does not return, and `main` is not polled.
///
/// Prefer [`#[kolo::main]`](macro@crate::main), which calls this. A program with a `main` of its own calls
/// it, or [`worker::run_if_worker`](crate::worker::run_if_worker), before it does anything else.
///
/// If two functions or two executables have one name, the process ends with exit code 70 and a line on standard error
/// that names both: see [`RegistryError`](crate::registry::RegistryError).
///
/// # Panics
///
/// If the threads of the runtime can't be started.
pub fn main<F: Future>(main: F) -> F::Output {
    crate::worker::run_if_worker();
    if let Err(error) = crate::registry::Registry::get() {
        crate::worker::refuse(error);
    }
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("the system gives the threads of the tokio runtime")
        .block_on(main)
}
