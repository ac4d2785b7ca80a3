//! The head of a launch: where it listens, its folder, and its process if it runs in the background.

use std::io::{BufRead as _, Write as _};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};

use kolo_transport::interfaces::wildcard;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, kill_process};
use serde::Deserialize;

use super::error::CliError;
use crate::head::held::{HELD, NOTED};
use crate::private_file;
use crate::ssh::find_program;
use crate::ssh::state::state_home;

/// Folders of heads that end with their launch begin so.
pub(super) const LAUNCH_PREFIX: &str = "up-";

/// Where a head of a launch listens: a host's name does not tell by which family it is reached, so on all addresses of both.
pub(super) fn listen(given: Option<SocketAddr>) -> SocketAddr {
    given.unwrap_or_else(|| wildcard(0))
}

/// A folder that is removed at the end.
pub(super) struct Folder(pub(super) PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // The next launch tries again.
        drop(std::fs::remove_dir_all(&self.0));
    }
}

pub(super) fn heads_dir() -> Result<PathBuf, CliError> {
    let dir = state_home().map_err(CliError::Hosts)?.join("heads");
    private_file::make_dir(&dir).map_err(|error| CliError::File {
        path: dir.clone(),
        error,
    })?;
    Ok(dir)
}

/// Removes what launches that were killed have left: folders whose lock nobody holds.
pub(super) fn sweep(dir: &Path) {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return;
    };
    for entry in entries.flatten() {
        let path = entry.path();
        if !entry
            .file_name()
            .to_string_lossy()
            .starts_with(LAUNCH_PREFIX)
        {
            continue;
        }
        // One without a lock is just being made.
        if let Ok(lock) = std::fs::File::open(path.join("lock"))
            && flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok()
        {
            drop(std::fs::remove_dir_all(&path));
        }
    }
}

/// What `kolo-head` prints when it is ready.
#[derive(Deserialize)]
pub(super) struct HeadLine {
    pub(super) cluster: String,
    pub(super) address: SocketAddr,
}

/// Until it is told otherwise, a head ends when this is dropped, also by the end of this process.
#[derive(Debug)]
pub(super) struct Held(Option<ChildStdin>);

impl Held {
    /// The head is on record.
    pub(super) fn noted(self) {
        if let Some(mut stdin) = self.0 {
            // One that has ended shows that elsewhere.
            drop(stdin.write_all(NOTED));
        }
    }
}

pub(super) fn start_head(
    given: Option<SocketAddr>,
    state: &Path,
) -> Result<(u32, HeadLine, Held), CliError> {
    let program = find_program("kolo-head")?;
    let failed = |error: &dyn std::fmt::Display| {
        CliError::Hosts(format!("{} can't start: {error}", program.display()))
    };
    private_file::make_dir(state).map_err(|error| failed(&error))?;
    let log = state.join("log");
    let file = std::fs::File::create(&log).map_err(|error| failed(&error))?;
    let mut child = Command::new(&program)
        .arg("--state-dir")
        .arg(state)
        .arg("--listen")
        .arg(listen(given).to_string())
        .args(["--format", "json"])
        .env_remove("KOLO_HEAD")
        .env(HELD, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(file)
        // Ctrl-C here is not for it.
        .process_group(0)
        .spawn()
        .map_err(|error| failed(&error))?;
    let held = Held(child.stdin.take());
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        std::io::BufReader::new(stdout)
            .read_line(&mut line)
            .map_err(|error| failed(&error))?;
    }
    if let Ok(ready) = serde_json::from_str(&line) {
        return Ok((child.id(), ready, held));
    }
    drop(child.kill());
    drop(child.wait());
    let log = std::fs::read_to_string(&log).unwrap_or_default();
    drop(std::fs::remove_dir_all(state));
    let last = log.lines().last().unwrap_or("it said nothing").to_owned();
    Err(failed(&last))
}

/// Asks a head that this machine runs to end. Not by `SIGTERM`, at which it would first wait for jobs to end by themselves.
pub(super) fn stop_head(pid: u32) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw)
        && let Err(error) = kill_process(pid, rustix::process::Signal::INT)
    {
        tracing::debug!(%error, "the head has ended before");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_killed_launches_are_swept_and_others_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let make = |name: &str, lock: bool| {
            let path = dir.path().join(name);
            std::fs::create_dir(&path).unwrap();
            lock.then(|| std::fs::File::create(path.join("lock")).unwrap())
        };
        drop(make("up-dead", true));
        let held = make("up-alive", true).unwrap();
        flock(&held, FlockOperation::NonBlockingLockExclusive).unwrap();
        make("up-young", false);
        make("detached-dead", true);
        sweep(dir.path());
        let mut left: Vec<String> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["detached-dead", "up-alive", "up-young"]);
    }
}
