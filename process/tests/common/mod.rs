//! What the tests share: a warden, shell scripts as workers, and a limit on every wait.
#![allow(dead_code)] // each test program uses a part
#![allow(clippy::unwrap_used)] // a failed step is a failed test

use std::ffi::OsString;
use std::future::Future;
use std::os::fd::{OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use kolo_process::{Child, Signal, SpawnRequest, Warden, pipe};
use kolo_transport::wire::Exit;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::net::unix::pipe::Receiver;

/// Longer than anything takes on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// The future's value, or a failed test.
#[track_caller]
pub(crate) fn within<F: Future>(future: F) -> impl Future<Output = F::Output> {
    let caller = std::panic::Location::caller();
    async move {
        let done = tokio::time::timeout(LIMIT, future).await;
        done.unwrap_or_else(|_| panic!("nothing happened for {LIMIT:?} at {caller}"))
    }
}

/// The name of this process as a daemon.
pub(crate) const OWNER: &str = "test";

pub(crate) async fn warden() -> Warden {
    let exe = Path::new(env!("CARGO_BIN_EXE_kolo-warden"));
    within(Warden::start(exe, OWNER)).await.unwrap()
}

/// A request and the read ends of its output.
#[allow(clippy::struct_field_names)] // what it is
pub(crate) struct Request {
    pub(crate) request: SpawnRequest,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
}

pub(crate) fn program(path: &str, args: &[&str]) -> Request {
    let (stdout, request_stdout) = pipe().unwrap();
    let (stderr, request_stderr) = pipe().unwrap();
    let env = [("PATH", "/usr/bin:/bin")];
    Request {
        request: SpawnRequest {
            program: path.into(),
            argv0: path.to_owned(),
            args: args.iter().map(|arg| (*arg).to_owned()).collect(),
            env: env
                .iter()
                .map(|(name, value)| (OsString::from(name), OsString::from(value)))
                .collect(),
            cwd: None,
            fds: Vec::new(),
            stdin: None,
            stdout: request_stdout,
            stderr: request_stderr,
        },
        stdout,
        stderr,
    }
}

pub(crate) fn script(text: &str) -> Request {
    program("/bin/sh", &["-c", text])
}

impl Request {
    pub(crate) fn fd(mut self, fd: OwnedFd, number: RawFd) -> Self {
        self.request.fds.push((fd, number));
        self
    }

    pub(crate) async fn start(self, warden: &Warden) -> Started {
        Started {
            child: within(warden.spawn(self.request)).await.unwrap(),
            stdout: LineReader::new(self.stdout),
            stderr: LineReader::new(self.stderr),
        }
    }
}

/// The lines of the read end of a pipe.
pub(crate) struct LineReader(Lines<BufReader<Receiver>>);

impl LineReader {
    pub(crate) fn new(pipe: OwnedFd) -> Self {
        Self(BufReader::new(Receiver::from_owned_fd(pipe).unwrap()).lines())
    }

    /// The next line; `None` when all writers have closed the pipe.
    pub(crate) async fn next_line(&mut self) -> Option<String> {
        self.0.next_line().await.unwrap()
    }
}

pub(crate) struct Started {
    pub(crate) child: Child,
    pub(crate) stdout: LineReader,
    pub(crate) stderr: LineReader,
}

impl Started {
    pub(crate) async fn line(&mut self) -> String {
        within(self.stdout.next_line()).await.expect("a line")
    }

    /// All lines until every process that has the pipe is gone.
    pub(crate) async fn lines(&mut self) -> Vec<String> {
        rest(&mut self.stdout).await
    }
}

pub(crate) async fn rest(reader: &mut LineReader) -> Vec<String> {
    let mut lines = Vec::new();
    while let Some(line) = within(reader.next_line()).await {
        lines.push(line);
    }
    lines
}

/// Asks a process and everything below it to end, kills what is left after `grace`, and says how the process ended.
pub(crate) async fn stop(child: &Child, grace: Duration) -> Exit {
    // The process may have ended already.
    child.signal(Signal::Terminate).ok();
    if let Ok(exit) = tokio::time::timeout(grace, child.gone()).await {
        return exit;
    }
    child.signal(Signal::Kill).ok();
    child.gone().await
}

/// Fields of `/proc/PID/stat` after the name: state, parent, group, session.
pub(crate) fn stat(pid: u32) -> Option<Vec<String>> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let rest = &stat[stat.rfind(')')? + 2..];
    Some(rest.split(' ').map(str::to_owned).collect())
}

/// The children of all threads of a process.
pub(crate) fn children(pid: u32) -> Vec<u32> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("children")).ok())
        .flat_map(|list| {
            list.split_whitespace()
                .map(|pid| pid.parse().unwrap())
                .collect::<Vec<u32>>()
        })
        .collect()
}
