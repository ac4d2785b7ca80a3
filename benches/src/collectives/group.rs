//! A group of ranks that is measured: its processes, and the connections to them.

use std::io::{BufRead as _, BufReader};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process};

use super::wire::{Answer, How, Run, parse_ready};
use crate::stats::Times;

/// How long a rank may take for its part in a series.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long processes get to end by themselves.
const GRACE: Duration = Duration::from_secs(3);

/// The figures of one series.
#[derive(Debug, Clone)]
pub(crate) struct Series {
    /// Of each operation, in microseconds: from when the last rank began it to when the last rank ended it.
    pub(crate) times: Vec<f64>,
    /// How kolo's ranks did it.
    pub(crate) how: Option<How>,
}

impl Series {
    /// Puts the answers of all ranks together.
    pub(crate) fn new(answers: &[Answer]) -> anyhow::Result<Self> {
        let count = answers.first().map_or(0, |answer| answer.stamps.len());
        let wrong: u64 = answers.iter().map(|answer| answer.wrong).sum();
        anyhow::ensure!(wrong == 0, "{wrong} values of the results were wrong");
        anyhow::ensure!(
            answers.iter().all(|answer| answer.stamps.len() == count),
            "the ranks did not do the same number of operations"
        );
        let times = (0..count)
            .map(|i| {
                let stamps = || answers.iter().map(|answer| answer.stamps[i]);
                let begun = stamps().map(|(begun, _)| begun).max().unwrap_or_default();
                let ended = stamps().map(|(_, ended)| ended).max().unwrap_or_default();
                (ended - begun) as f64 / 1e3
            })
            .collect();
        Ok(Self {
            times,
            how: How::of_all(answers.iter().filter_map(|answer| answer.how.as_ref())),
        })
    }

    pub(crate) fn p50(&self) -> f64 {
        let mut times = Times::default();
        self.times.iter().for_each(|time| times.push_micros(*time));
        times.quantile(0.5)
    }
}

/// A connection to one rank.
#[derive(Debug)]
pub(crate) struct Link {
    socket: UnixStream,
    lines: BufReader<UnixStream>,
}

impl Link {
    pub(crate) fn new(socket: UnixStream) -> anyhow::Result<Self> {
        socket.set_nonblocking(false)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(Self {
            lines: BufReader::new(socket.try_clone()?),
            socket,
        })
    }

    pub(crate) fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// The next line, without its end.
    pub(crate) fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        let count = self
            .lines
            .read_line(&mut line)
            .context("a rank is silent")?;
        anyhow::ensure!(count > 0, "a rank ended");
        if let Some(reason) = line.strip_prefix("error ") {
            anyhow::bail!("{}", reason.trim_end());
        }
        Ok(line.trim_end().to_owned())
    }
}

/// Processes that are gone when this is dropped.
#[derive(Debug, Default)]
pub(crate) struct Processes(Vec<Child>);

impl Processes {
    pub(crate) fn push(&mut self, child: Child) {
        self.0.push(child);
    }

    /// Whether one of them has ended.
    pub(crate) fn ended(&mut self) -> Option<std::process::ExitStatus> {
        self.0
            .iter_mut()
            .find_map(|child| child.try_wait().ok().flatten())
    }

    fn all_end_within(&mut self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        loop {
            let left = self
                .0
                .iter_mut()
                .any(|child| matches!(child.try_wait(), Ok(None)));
            if !left || Instant::now() >= end {
                return !left;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        if self.all_end_within(GRACE) {
            return;
        }
        for child in &mut self.0 {
            if matches!(child.try_wait(), Ok(None)) {
                let pid = Pid::from_child(child);
                // It may end at this very moment.
                let _gone = kill_process(pid, Signal::TERM);
            }
        }
        if self.all_end_within(GRACE) {
            return;
        }
        for child in &mut self.0 {
            if child.kill().is_ok() {
                drop(child.wait());
            }
        }
    }
}

/// A group. Ranks end when their connections do, so those are dropped before the processes.
#[derive(Debug)]
pub(crate) struct Group {
    links: Vec<Link>,
    processes: Processes,
    /// In how many ways it can do the operation.
    pub(crate) variants: u32,
    /// Where the processes write what goes wrong.
    log: Option<PathBuf>,
}

impl Group {
    /// Waits until every rank says that it is ready. Links come in any order.
    pub(crate) fn ready(
        links: Vec<Link>,
        processes: Processes,
        log: Option<PathBuf>,
    ) -> anyhow::Result<Self> {
        let mut ranks: Vec<Option<Link>> = links.iter().map(|_| None).collect();
        let mut variants = 1;
        for mut link in links {
            let line = link.line().map_err(|error| explain(error, log.as_ref()))?;
            let (rank, ways) = parse_ready(&line)?;
            let place = ranks
                .get_mut(rank)
                .with_context(|| format!("there is no rank {rank}"))?;
            anyhow::ensure!(
                place.is_none(),
                "two processes say that they are rank {rank}"
            );
            *place = Some(link);
            variants = ways;
        }
        Ok(Self {
            links: ranks.into_iter().flatten().collect(),
            processes,
            variants,
            log,
        })
    }

    /// Has all ranks do a series.
    pub(crate) fn run(&mut self, run: &Run) -> anyhow::Result<Series> {
        self.exchange(run).map_err(|error| {
            let ended = self.processes.ended();
            let error = explain(error, self.log.as_ref());
            match ended {
                Some(status) => error.context(format!("a process ended with {status}")),
                None => error,
            }
        })
    }

    fn exchange(&mut self, run: &Run) -> anyhow::Result<Series> {
        for link in &mut self.links {
            run.send(&mut link.socket).context("a rank ended")?;
        }
        let mut answers = Vec::new();
        let mut failure: Option<anyhow::Error> = None;
        for link in &mut self.links {
            match Answer::receive(&mut link.lines) {
                Ok(answer) => answers.push(answer),
                Err(error) => {
                    failure.get_or_insert(error);
                }
            }
        }
        match failure {
            Some(error) => Err(error),
            None => Series::new(&answers),
        }
    }
}

/// Adds the last lines of a log.
pub(crate) fn explain(error: anyhow::Error, log: Option<&PathBuf>) -> anyhow::Error {
    let Some(text) = log.and_then(|log| std::fs::read(log).ok()) else {
        return error;
    };
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| line.chars().any(char::is_alphanumeric))
        .collect();
    match lines.len() {
        0 => error,
        count => error.context(lines[count.saturating_sub(6)..].join(" | ")),
    }
}
