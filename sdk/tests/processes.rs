//! Programs whose `main` does not begin with kolo's entry: none of them may start itself without end. And worker processes whose node is
//! gone, or no node of kolo: exit codes, and one line on standard error. The rest is in `local`.
//!
//! All of them are this program again: with the wrong `main` that a variable names, or as a worker.

// Clippy does not see that this is a test.
#![allow(clippy::unwrap_used)]

use std::io::Write as _;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use kolo::prelude::{Cluster, Context, Executor};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// Which wrong `main` to be.
const MAIN: &str = "NO_ENTRY_MAIN";
/// A file with a line for each process that runs a wrong `main`.
const PROCESSES: &str = "NO_ENTRY_PROCESSES";

macro_rules! tests {
    ($($name:ident)*) => { [$((stringify!($name), $name as fn()),)*] };
}

fn main() {
    if let Ok(kind) = std::env::var(MAIN) {
        wrong_main(&kind);
        return;
    }
    kolo::worker::run_if_worker();
    let filters: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with('-'))
        .collect();
    for (name, test) in tests![
        a_local_cluster_is_refused_before_a_process_is_started
        a_warden_that_runs_main_refuses_at_once
        a_worker_that_runs_main_refuses_at_once
        a_worker_can_not_be_a_driver
        a_node_that_dies_ends_its_worker
        nonsense_ends_the_worker
        a_wrong_environment_is_told
    ] {
        if filters.is_empty() || filters.iter().any(|filter| name.contains(filter)) {
            // A failed check ends the program with its message.
            test();
            println!("test {name} ... ok");
        }
    }
}

#[kolo::function]
fn whoami(ctx: &Context) -> usize {
    ctx.rank()
}

/// What a worker is told when it wants to be a driver.
#[kolo::function]
fn nests() -> String {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let error = runtime.block_on(Cluster::local()).unwrap_err();
    error.to_string()
}

fn wrong_main(kind: &str) {
    let mut processes = std::fs::OpenOptions::new()
        .append(true)
        .open(std::env::var_os(PROCESSES).unwrap())
        .unwrap();
    // At once: others write there, too.
    let line = format!("{}\n", std::process::id());
    processes.write_all(line.as_bytes()).unwrap();
    let started = |name| std::env::var_os(name).is_some();
    let enters = match kind {
        "never" => false,
        "not-as-warden" => !started("KOLO_WARDEN_FD"),
        "not-as-worker" => !started("KOLO_WORKER_FDS"),
        _ => true,
    };
    if enters {
        kolo::worker::run_if_worker();
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let result: kolo::Result<()> = runtime.block_on(async {
        let cluster = Cluster::connect_or_local().await?;
        let executor = Executor::builder().workers(4).start(&cluster).await?;
        if kind == "nests" {
            for text in executor.run(nests, ()).await? {
                println!("{text}");
            }
        } else {
            executor.run(whoami, ()).await?;
        }
        Ok(())
    });
    if let Err(error) = result {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

/// Runs a wrong program to its end. Gives the output and how many processes ran its `main`; none of them is left.
fn run(kind: &str) -> (Output, usize) {
    let dir = tempfile::tempdir().unwrap();
    let processes: PathBuf = dir.path().join("processes");
    std::fs::write(&processes, "").unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .env_remove("KOLO_HEAD")
        .env(MAIN, kind)
        .env(PROCESSES, &processes)
        .output()
        .unwrap();
    let pids = std::fs::read_to_string(&processes).unwrap();
    let pids: Vec<&str> = pids.lines().collect();
    for pid in &pids {
        wait_for_end(Path::new(&format!("/proc/{pid}")));
    }
    (output, pids.len())
}

/// The driver has ended, so what it started is ending.
fn wait_for_end(process: &Path) {
    for _ in 0..1000 {
        if !process.exists() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{} lives on", process.display());
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn a_local_cluster_is_refused_before_a_process_is_started() {
    let (output, processes) = run("never");
    let text = stderr(&output);
    assert!(!output.status.success());
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("put #[kolo::main] on"), "{text}");
    assert_eq!(processes, 1);
}

fn a_warden_that_runs_main_refuses_at_once() {
    let (output, processes) = run("not-as-warden");
    let text = stderr(&output);
    assert!(!output.status.success());
    assert!(text.contains("started this process as a warden"), "{text}");
    assert!(text.contains("#[kolo::main]"), "{text}");
    // The driver and its warden, and one more where the workers start much later.
    assert!(
        (2..=3).contains(&processes),
        "{processes} processes: {text}"
    );
}

fn a_worker_that_runs_main_refuses_at_once() {
    let (output, processes) = run("not-as-worker");
    let text = stderr(&output);
    assert!(!output.status.success());
    assert!(text.contains("started this process as a worker"), "{text}");
    // The driver, the warden and at most four workers.
    assert!(processes <= 6, "{processes} processes: {text}");
}

fn a_worker_can_not_be_a_driver() {
    let (output, _) = run("nests");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(text.lines().count(), 4, "{text}");
    for line in text.lines() {
        assert!(line.starts_with("this process is a worker: "), "{line}");
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
