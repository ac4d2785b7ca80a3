//! Jobs of `kolo run`, bounded in time.

use std::collections::hash_map::RandomState;
use std::ffi::OsStr;
use std::hash::{BuildHasher as _, Hasher as _};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use kolo_harness::{Framework, TestCluster};
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::{Mutex, MutexGuard};

/// Longest time for a job: each imports a framework in every worker.
const PATIENCE: Duration = Duration::from_secs(300);

/// The turn of a test: its interpreters alone fill a small machine.
pub async fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::const_new(());
    TURN.lock().await
}

/// Numbers that a seed gives (splitmix64).
pub struct Random(u64);

impl Random {
    /// The seed of `KOLO_INTEROP_SEED`, or another one each time, which a test that fails shows.
    pub fn new() -> anyhow::Result<Self> {
        let seed = match std::env::var("KOLO_INTEROP_SEED") {
            Ok(seed) => seed.parse()?,
            Err(_) => RandomState::new().build_hasher().finish(),
        };
        eprintln!("KOLO_INTEROP_SEED={seed}");
        Ok(Self(seed))
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (bits ^ (bits >> 31)) % limit
    }
}

/// `kill -9 PID`.
pub fn kill(pid: i32) -> anyhow::Result<()> {
    let pid = Pid::from_raw(pid).context("no pid")?;
    Ok(kill_process(pid, Signal::KILL)?)
}

/// What a job has written, and how it has ended.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub out: String,
    pub err: String,
}

/// A command under way, which is killed when this is dropped or takes too long.
#[derive(Debug)]
pub struct Running {
    child: Child,
    lines: Receiver<String>,
    seen: String,
    err: Option<JoinHandle<String>>,
    deadline: Instant,
}

impl Running {
    pub fn start(mut command: Command) -> anyhow::Result<Self> {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let out = child.stdout.take().context("there is no output")?;
        let mut errors = child.stderr.take().context("there are no errors")?;
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        let err = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            // What was read until an error is what there is to show.
            drop(errors.read_to_end(&mut bytes));
            String::from_utf8_lossy(&bytes).into_owned()
        });
        Ok(Self {
            child,
            lines,
            seen: String::new(),
            err: Some(err),
            deadline: Instant::now() + PATIENCE,
        })
    }

    /// The next line of its standard output; none at its end.
    pub fn line(&mut self) -> anyhow::Result<Option<String>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match self.lines.recv_timeout(left) {
            Ok(line) => {
                self.seen.push_str(&line);
                self.seen.push('\n');
                Ok(Some(line))
            }
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => {
                self.child.kill()?;
                bail!("{PATIENCE:?} are over: {:?}", self.ended()?)
            }
        }
    }

    /// Waits for its end.
    pub fn end(mut self) -> anyhow::Result<Ended> {
        while self.line()?.is_some() {}
        self.ended()
    }

    fn ended(&mut self) -> anyhow::Result<Ended> {
        let status = self.child.wait()?;
        let err = self.err.take().and_then(|thread| thread.join().ok());
        Ok(Ended {
            status,
            out: std::mem::take(&mut self.seen),
            err: err.unwrap_or_default(),
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // An error means that it has ended.
        drop(self.child.kill());
        drop(self.child.wait());
    }
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
    /// Without the framework a line says so, and the test has nothing to do.
    pub fn find(framework: Framework, file: &'static str) -> anyhow::Result<Option<Self>> {
        let word = match framework {
            Framework::Horovod => "horovod",
            Framework::Torch => "torch",
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

    /// `kolo run OPTIONS` of it.
    pub fn command(self, mut kolo: Command, options: &[&str]) -> Command {
        kolo.args(["run", "--prefix", "none"]).args(options);
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop/scripts");
        kolo.arg("--").arg(self.python).arg(scripts.join(self.file));
        kolo
    }

    /// Runs it with `kolo run OPTIONS`. All ranks have to end with their line, and nothing else may be on standard output.
    pub fn check(self, kolo: Command, options: &[&str], shape: Shape) -> anyhow::Result<()> {
        let kolo = self.command(kolo, options);
        let ended = Running::start(kolo)?.end()?;
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

/// So many workers, half of them on each of two nodes.
pub fn on_nodes(cluster: &TestCluster, script: Script, size: usize) -> anyhow::Result<()> {
    let options = ["-n", &size.to_string(), "--nnodes", "2"];
    script.check(cluster.kolo()?, &options, Shape { size, hosts: 2 })
}
