//! What `#[kolo::main]` expands to.

use std::future::Future;

use kolo_transport::descriptors::make_room;

/// Descriptors that the runtime of a driver and its links need.
const DESCRIPTORS: u64 = 24;

/// Runs `main` to its end: as the program itself in the driver, as a worker or as a warden in the processes
/// that kolo starts from the same executable. In those two it does not return, and `main` is not polled.
///
/// Prefer [`#[kolo::main]`](macro@crate::main), which calls this. A program with a `main` of its own calls
/// it, or [`worker::run_if_worker`](crate::worker::run_if_worker), before it does anything else.
///
/// If two functions or two executables have one name, the process ends with exit code 70 and a line on standard error
/// that names both: see [`RegistryError`](crate::registry::RegistryError).
///
/// So it is if there are no descriptors or threads for the runtime, which the line says.
pub fn main<F: Future>(main: F) -> F::Output {
    crate::worker::run_if_worker();
    drive(main)
}

/// As [`main`], and calls `init` before that in the driver and in each worker: what `#[kolo::main(init = function)]`
/// expands to. A subscriber that `init` sets takes the place of the one that workers have by default.
pub fn main_with_init<F: Future>(init: impl FnOnce(), main: F) -> F::Output {
    // Whichever this process is, one of the two calls it.
    let mut init = Some(init);
    let mut once = || {
        if let Some(init) = init.take() {
            init();
        }
    };
    crate::worker::run_if_worker_with(&mut once);
    once();
    drive(main)
}

fn drive<F: Future>(main: F) -> F::Output {
    if let Err(error) = crate::registry::Registry::get() {
        crate::worker::refuse(error);
    }
    if let Err(error) = make_room("the program", DESCRIPTORS) {
        crate::worker::refuse(&error);
    }
    match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime.block_on(main),
        Err(error) => crate::worker::refuse(&format!("the tokio runtime can't start: {error}")),
    }
}
