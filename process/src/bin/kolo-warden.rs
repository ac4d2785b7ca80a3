//! A program that is a warden and nothing else, for [`kolo_process::Warden::start`]: for a daemon that lives in a
//! program whose `main` does not call [`kolo_process::run_if_warden`].
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    kolo_process::run_if_warden();
    eprintln!(
        "kolo-warden: started by hand; it is started by a kolo node, which sets {}",
        kolo_process::WARDEN_FD_VAR
    );
    ExitCode::from(2)
}
