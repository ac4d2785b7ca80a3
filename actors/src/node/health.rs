//! Health checks: commands that must succeed on a node before workers of a job start there.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use kolo_core::node::colocator::{KILLED, millis};
use kolo_core::node::environment;
use kolo_core::node::messages::Wanted;
use kolo_process::{Child, Signal, SpawnRequest};
use kolo_transport::wire::span::Span;
use kolo_transport::wire::{HealthCheck, Installed};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::launch::Launch;
use super::leftovers::DRAIN;
use super::ports::ProgramFinder;
use super::warden::JobWarden;

/// Longest last words of a check in its failure, in characters.
const MAX_WORDS: usize = 200;

/// The last bytes of a check's output, among which its last words are looked for.
const TAIL: usize = 8 << 10;

/// Runs a check to its end, and to the end of what the check has started.
///
/// # Errors
///
/// The failure in words: the check was not started, was late, or has not exited with code 0.
pub(super) async fn run(
    programs: Arc<dyn ProgramFinder>,
    warden: Option<JobWarden>,
    check: HealthCheck,
) -> Result<(), String> {
    let name = check.program.escape_debug().to_string();
    let limit = millis(check.timeout_ms);
    let (child, output) = start(programs, warden, check)
        .await
        .map_err(|why| format!("`{name}` was not started: {why}"))?;
    let mut words = JoinSet::new();
    words.spawn(last_line(output));
    let ended = timeout(limit, child.wait()).await;
    // Whatever is left: the check itself if it is late, and processes that it has started.
    if let Err(error) = child.signal(Signal::Kill) {
        tracing::debug!(pid = child.pid(), %error, "the end of a health check");
    }
    if timeout(KILLED, child.gone()).await.is_err() {
        tracing::error!(pid = child.pid(), "a killed health check has not ended");
    }
    let failed = match ended {
        Ok(exit) if exit.is_success() => return Ok(()),
        Ok(exit) => format!("`{name}` ended with {exit}"),
        Err(_) => format!("`{name}` did not end within {}", Span(limit)),
    };
    // A process that has left the warden may hold the pipe.
    let words = timeout(DRAIN, words.join_next()).await;
    match words {
        Ok(Some(Ok(Some(words)))) => Err(format!("{failed}: {words}")),
        _ => Err(failed),
    }
}

/// Starts a check. Standard output and standard error are one pipe.
async fn start(
    programs: Arc<dyn ProgramFinder>,
    warden: Option<JobWarden>,
    check: HealthCheck,
) -> Result<(Child, OwnedFd), String> {
    let warden = warden.ok_or("its job has no warden")?;
    let installed = Installed {
        program: check.program.clone(),
        ..Installed::default()
    };
    let found = programs.find(Wanted::Installed(installed)).await;
    let file = match found {
        Ok(Some(Launch::Installed(file))) => file,
        Ok(_) => return Err("it is not installed".to_owned()),
        Err(refusal) => return Err(refusal.message),
    };
    let no_pipe = |error: std::io::Error| format!("no pipe for its output: {error}");
    let (output, stdout) = kolo_process::pipe().map_err(no_pipe)?;
    let stderr = stdout.try_clone().map_err(no_pipe)?;
    let warden = warden.get().await.map_err(|error| error.to_string())?;
    let child = warden.spawn(SpawnRequest {
        program: file.path,
        argv0: check.program,
        args: check.args,
        env: environment::inherited(std::env::vars_os()).collect(),
        cwd: file.cwd,
        fds: Vec::new(),
        stdin: None,
        stdout,
        stderr,
    });
    let child = child.await.map_err(|error| error.to_string())?;
    Ok((child, output))
}

/// The last line that is not empty, for people.
async fn last_line(output: OwnedFd) -> Option<String> {
    let mut pipe = Receiver::from_owned_fd(output).ok()?;
    let mut tail = Vec::new();
    while pipe.read_buf(&mut tail).await.is_ok_and(|read| read > 0) {
        tail.drain(..tail.len().saturating_sub(TAIL));
    }
    let tail = String::from_utf8_lossy(&tail);
    let words = tail.lines().map(str::trim).rfind(|line| !line.is_empty())?;
    let words: String = words.chars().take(MAX_WORDS).collect();
    Some(words.escape_debug().to_string())
}
