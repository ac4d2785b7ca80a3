//! Worker processes whose node is gone, or no node of kolo: exit codes, and one line on standard error. The rest is in `local`.
//!
//! The workers are this program again, so it has a `main` of its own in place of the test runner's.

// Clippy does not see that this is a test.
#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

fn main() {
    kolo::worker::run_if_worker();
    let tests: [(&str, fn()); 3] = [
        (
            "a_node_that_dies_ends_its_worker",
            a_node_that_dies_ends_its_worker,
        ),
        ("nonsense_ends_the_worker", nonsense_ends_the_worker),
        ("a_wrong_environment_is_told", a_wrong_environment_is_told),
    ];
    let filters: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with('-'))
        .collect();
    for (name, test) in tests {
        if filters.is_empty() || filters.iter().any(|filter| name.contains(filter)) {
            // A failed check ends the program with its message.
            test();
            println!("test {name} ... ok");
        }
    }
}

/// The second end is inherited by the next program that is started.
fn pair() -> (UnixStream, OwnedFd) {
    let flags = SocketFlags::empty();
    let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let (here, there) = pair.unwrap();
    rustix::io::fcntl_setfd(&here, rustix::io::FdFlags::CLOEXEC).unwrap();
    (UnixStream::from(here), there)
}

fn command() -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A worker process with the node's ends of its sockets: for calls, and for control.
fn start() -> (Child, UnixStream, UnixStream) {
    let (calls, calls_there) = pair();
    let (control, control_there) = pair();
    let numbers = format!("{},{}", calls_there.as_raw_fd(), control_there.as_raw_fd());
    let child = command().env("KOLO_WORKER_FDS", numbers).spawn().unwrap();
    (child, calls, control)
}

/// How a worker has ended, and all that it has said.
fn ended(child: Child) -> (Option<i32>, String) {
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    (output.status.code(), said)
}

fn a_node_that_dies_ends_its_worker() {
    let (child, calls, control) = start();
    drop((calls, control));
    let (code, said) = ended(child);
    assert_eq!(code, Some(69), "{said}");
    assert!(
        said.starts_with("kolo worker: the node closed the "),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");
}

fn nonsense_ends_the_worker() {
    let (child, _calls, mut control) = start();
    control.write_all(&[0xff; 8]).unwrap();
    let (code, said) = ended(child);
    assert_eq!(code, Some(70), "{said}");
    assert!(said.contains("over the limit"), "{said}");
}

fn a_wrong_environment_is_told() {
    for given in ["", "3", "3,3", "1,2", "3,4,5", "a,b", "77777,77778", "-1,4"] {
        let child = command().env("KOLO_WORKER_FDS", given).spawn().unwrap();
        let (code, said) = ended(child);
        assert_eq!(code, Some(70), "{given}: {said}");
        assert!(
            said.contains(&format!("KOLO_WORKER_FDS is `{given}`")),
            "{said}"
        );
    }
}
