//! Jobs of `kolo run`, bounded in time.

use std::ffi::OsStr;
use std::io::{Read, Write as _};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use kolo_harness::Framework;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::sync::{Mutex, MutexGuard};

/// Longest time for a job: each imports a framework in every worker.
const PATIENCE: Duration = Duration::from_secs(180);

/// The turn of a test: its interpreters alone fill a small machine.
pub async fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::const_new(());
    TURN.lock().await
}

/// What a job has written, and how it has ended.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub out: String,
    pub err: String,
}

/// Runs a command to its end. It is killed, and an error is given, when it takes too long.
pub fn finish(mut command: Command) -> anyhow::Result<Ended> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let handle = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
    let (ended, waiting) = channel::<()>();
    std::thread::scope(|scope| {
        let killed = scope.spawn(move || {
            let late = waiting.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout);
            // An error means that it has ended meanwhile.
            late && pidfd_send_signal(&handle, Signal::KILL).is_ok()
        });
        let out = scope.spawn(|| read(out));
        let err = scope.spawn(|| read(err));
        let status = child.wait();
        drop(ended);
        let join = |thread: std::thread::ScopedJoinHandle<'_, std::io::Result<String>>| {
            thread
                .join()
                .ok()
                .context("a reader has panicked")?
                .context("output is lost")
        };
        let ended = Ended {
            status: status?,
            out: join(out)?,
            err: join(err)?,
        };
        ensure!(
            !killed.join().unwrap_or(true),
            "it took longer than {PATIENCE:?}: {ended:?}"
        );
        Ok(ended)
    })
}

fn read(pipe: Option<impl Read>) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    if let Some(mut pipe) = pipe {
        pipe.read_to_end(&mut bytes)?;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Workers on hosts, as many on each.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub size: usize,
    pub hosts: usize,
}

impl Shape {
    /// What the scripts print at their end, of all ranks.
    fn lines(self, word: &str) -> Vec<String> {
        let local = self.size / self.hosts;
        (0..self.size)
            .map(|rank| {
                let (size, hosts) = (self.size, self.hosts);
                let (host, place) = (rank / local, rank % local);
                format!("{word} {rank}/{size} {place}/{local} {host}/{hosts}")
            })
            .collect()
    }
}

/// A script of a framework that is installed.
#[derive(Debug, Clone, Copy)]
pub struct Script {
    python: &'static OsStr,
    file: &'static str,
    /// First word of the lines that it prints.
    word: &'static str,
}

impl Script {
    /// The static script of a framework. Without the framework a line says so, and the test has nothing to do.
    pub fn find(framework: Framework) -> anyhow::Result<Option<Self>> {
        let (file, word) = match framework {
            Framework::Horovod => ("horovod_static.py", "horovod"),
            Framework::Torch => ("torch_static.py", "torch"),
        };
        match framework.python() {
            Ok(python) => Ok(Some(Self { python, file, word })),
            Err(reason) => {
                // Not by `eprintln`, whose output is captured where the test passes.
                std::io::stderr().write_all(format!("SKIPPED: {reason}\n").as_bytes())?;
                Ok(None)
            }
        }
    }

    /// Runs it with `kolo run OPTIONS`. All ranks have to end with their line, and nothing else may be on standard output.
    pub fn check(self, mut kolo: Command, options: &[&str], shape: Shape) -> anyhow::Result<()> {
        kolo.args(["run", "--prefix", "none"]).args(options);
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop/scripts");
        kolo.arg("--").arg(self.python).arg(scripts.join(self.file));
        let ended = finish(kolo)?;
        let mut lines: Vec<&str> = ended.out.lines().collect();
        lines.sort_unstable();
        ensure!(
            ended.status.success() && lines == shape.lines(self.word),
            "{self:?}, {options:?}: {}\n{}\n{}",
            ended.status,
            ended.out,
            ended.err
        );
        Ok(())
    }
}
