//! Groups of real Horovod and torch, under their own launchers or under `kolo run`: our own small programs in `benches/peers`.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Seek as _};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use kolo_harness::{Framework, TestCluster};
use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};

/// Longest wait for a group's first step.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a launcher may take to end its workers.
const GRACE: Duration = Duration::from_secs(20);

/// A time in milliseconds, on the clock that all processes of a host share.
pub(crate) fn now() -> f64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6
}

/// What is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Launcher {
    /// Horovod's, elastic.
    Horovodrun,
    /// torch's.
    Torchrun,
}

/// The steps of a framework's group.
pub(crate) fn program(framework: Framework) -> &'static str {
    match framework {
        Framework::Horovod => include_str!("../peers/steps_horovod.py"),
        Framework::Torch => include_str!("../peers/steps_torch.py"),
    }
}

/// Options of torchrun: so many processes on this machine, of any program. torch 1.13 with Python 3.11 takes the default for streams, which
/// are not redirected, for nothing; to redirect those of a rank that is not there means the same.
pub(crate) fn torchrun(count: &str) -> [&str; 8] {
    let streams = "9:1";
    [
        "--standalone",
        "--nproc_per_node",
        count,
        "--no_python",
        "--redirects",
        streams,
        "--tee",
        streams,
    ]
}

/// The path of `kolo`.
pub(crate) fn kolo() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let beside = own.with_file_name("kolo");
    anyhow::ensure!(
        beside.is_file(),
        "there is no {}; build it first: cargo build --release -p kolo-runtime --bin kolo",
        beside.display()
    );
    Ok(beside)
}

/// The command of a launcher, which ends when this process does.
pub(crate) fn command<'a>(words: impl IntoIterator<Item = &'a OsStr>) -> anyhow::Result<Command> {
    let mut words = words.into_iter();
    let name = words.next().context("a launcher has a name")?;
    let mut command = crate::collectives::command(name, None);
    command.args(words);
    Ok(command)
}

/// A command of `kolo` is for this cluster.
pub(crate) fn reach(command: &mut Command, cluster: &TestCluster) -> anyhow::Result<()> {
    for (name, value) in cluster.kolo()?.get_envs() {
        match value {
            Some(value) if name != "KOLO_HARNESS_TASK" => command.env(name, value),
            _ => command.env_remove(name),
        };
    }
    Ok(())
}

/// What a rank says after its first step in a group; times are of [`now`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    rank: usize,
    size: usize,
    pub(crate) pid: Pid,
    pub(crate) stepped: f64,
    began: f64,
    entered: f64,
}

impl Entry {
    /// Launchers put something in front of lines.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_once("peer ")?.1.split(' ');
        let (rank, size): (usize, usize) =
            (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        if rank >= size {
            return None;
        }
        let pid = Pid::from_raw(words.next()?.parse().ok()?)?;
        let mut time = || words.next()?.trim_end().parse().ok();
        Some(Self {
            rank,
            size,
            pid,
            stepped: time()?,
            began: time()?,
            entered: time()?,
        })
    }

    /// How long Python and the framework took to be there, if the process began after `since`.
    pub(crate) fn start_of_python(&self, since: f64) -> Option<f64> {
        // The kernel counts beginnings in hundredths of a second.
        (self.began > since - 10.0).then_some(self.entered - self.began)
    }
}

/// A group of processes below a launcher, which end with this.
#[derive(Debug)]
pub(crate) struct Job {
    launcher: Child,
    entries: Receiver<Entry>,
    /// The latest group.
    pids: Vec<Pid>,
    errors: File,
}

impl Job {
    /// Starts a launcher, by its [`command`].
    pub(crate) fn start(mut launcher: Command) -> anyhow::Result<Self> {
        let errors = tempfile::tempfile()?;
        let mut launcher = launcher
            .env("OMP_NUM_THREADS", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(errors.try_clone()?)
            .spawn()?;
        let out = launcher.stdout.take().context("there is no output")?;
        let (send, entries) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(out).lines().map_while(Result::ok);
            for entry in lines.filter_map(|line| Entry::parse(&line)) {
                if send.send(entry).is_err() {
                    return;
                }
            }
        });
        Ok(Self {
            launcher,
            entries,
            pids: Vec::new(),
            errors,
        })
    }

    /// Waits until all ranks of a group of `size` have made their first step in it, after `since`; gives them in their order.
    pub(crate) fn group(&mut self, size: usize, since: f64) -> anyhow::Result<Vec<Entry>> {
        let end = Instant::now() + PATIENCE;
        let mut ranks = vec![None; size];
        while ranks.iter().any(Option::is_none) {
            let left = end.saturating_duration_since(Instant::now());
            let why = match self.entries.recv_timeout(left) {
                Ok(entry) => {
                    if entry.size == size && entry.stepped > since {
                        // The first time counts if a group forms twice.
                        ranks[entry.rank].get_or_insert(entry);
                    }
                    continue;
                }
                Err(RecvTimeoutError::Timeout) => format!("hangs for {PATIENCE:?}"),
                Err(RecvTimeoutError::Disconnected) => "has ended".to_owned(),
            };
            bail!("the group {why}; last lines:\n{}", self.last_lines());
        }
        let ranks: Vec<Entry> = ranks.into_iter().flatten().collect();
        self.pids = ranks.iter().map(|entry| entry.pid).collect();
        Ok(ranks)
    }

    fn last_lines(&mut self) -> String {
        let mut text = Vec::new();
        if self
            .errors
            .rewind()
            .and_then(|()| self.errors.read_to_end(&mut text))
            .is_err()
        {
            return String::new();
        }
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // Launchers end their workers when they are asked to end. An error means that this one has ended.
        let _gone = kill_process(Pid::from_child(&self.launcher), Signal::TERM);
        let end = Instant::now() + GRACE;
        while matches!(self.launcher.try_wait(), Ok(None)) {
            if Instant::now() > end {
                eprintln!("a launcher does not end, and is killed with its workers");
                let _gone = self.launcher.kill();
                let _status = self.launcher.wait();
                for pid in &self.pids {
                    let _gone = kill_process(*pid, Signal::KILL);
                }
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::float_cmp, clippy::unwrap_used)] // nothing is computed with them but differences of whole numbers
    fn entries_are_read_with_any_prefix() {
        let entry = Entry::parse("[1]<stdout>:peer 1 4 77 20.5 10.0 15.0").unwrap();
        assert_eq!((entry.rank, entry.size, entry.stepped), (1, 4, 20.5));
        assert_eq!(entry.start_of_python(9.0), Some(5.0));
        assert_eq!(entry.start_of_python(30.0), None);
        assert_eq!(entry.pid.as_raw_nonzero().get(), 77);
        for bad in [
            "peer 1 4 0 1.0 1.0 1.0",
            "peer 4 4 7 1.0 1.0 1.0",
            "peer 1 4 7 1.0",
            "pear 1 4 7 1 1 1",
            "",
        ] {
            assert!(Entry::parse(bad).is_none(), "{bad}");
        }
    }
}
