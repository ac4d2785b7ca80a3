//! `kolo`: see what a cluster does, read logs, stop jobs, and plan without starting anything.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    kolo_process::run_if_warden();
    kolo_runtime::cli::main()
}
