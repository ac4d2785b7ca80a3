//! The same losses under Horovod's elastic driver and under torchrun: a worker is killed, and the others go on without it (`shrink`), or
//! there are as many as before, with their state (`replace`; Horovod starts one process, torchrun all).

use std::fs;

use anyhow::Context as _;
use kolo_harness::Framework;
use rustix::process::{Signal, kill_process};
use tempfile::TempDir;

use super::Options;
use crate::launchers::{Entry, Job, Launcher, now, program, torchrun};
use crate::report::Figure;
use crate::stats::median;

/// Most losses of a kind: Horovod may wait for Gloo's time-out of 30 s at each.
const MOST: u32 = 5;

/// Hosts that Horovod is told of. It gives up a host that has lost a worker, so each worker has one: all are this machine, spelt in other
/// ways.
struct Hosts {
    folder: TempDir,
    /// A line each.
    names: Vec<String>,
}

impl Hosts {
    fn new(count: usize) -> anyhow::Result<Self> {
        let mut hosts = Self {
            folder: tempfile::tempdir()?,
            names: Vec::new(),
        };
        hosts.add(count)?;
        Ok(hosts)
    }

    fn add(&mut self, count: usize) -> anyhow::Result<()> {
        for _ in 0..count {
            let zeros = "0".repeat(self.names.len());
            self.names.push(format!("127.0.0.{zeros}1:1\n"));
        }
        // Horovod reads at any moment: it sees the old hosts or the new ones.
        let new = self.folder.path().join("new");
        fs::write(&new, self.names.concat())?;
        Ok(fs::rename(new, self.folder.path().join("hosts"))?)
    }

    /// Horovod's host discovery script.
    fn script(&self) -> String {
        format!("cat {}/hosts", self.folder.path().display())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    /// Horovod goes on with one rank less; a host is added later.
    Shrink,
    /// Horovod starts a process on a host that was idle.
    Replace,
    /// torchrun starts all processes anew.
    Restart,
}

impl Loss {
    fn start(self, ranks: usize, hosts: &Hosts, bytes: u64) -> anyhow::Result<Job> {
        let (count, bytes) = (ranks.to_string(), bytes.to_string());
        let (discovery, least) = (hosts.script(), (ranks - 1).to_string());
        let least = if self == Self::Shrink { &least } else { &count };
        let (framework, options) = match self {
            Self::Shrink | Self::Replace => (
                Framework::Horovod,
                vec![
                    "-np",
                    &count,
                    "--min-np",
                    least,
                    "--max-np",
                    &count,
                    "--host-discovery-script",
                    &discovery,
                    "--network-interface",
                    "lo",
                ],
            ),
            Self::Restart => (
                Framework::Torch,
                [
                    &torchrun(&count)[..],
                    &["--max_restarts", "1000000", "--monitor_interval", "0.1"],
                ]
                .concat(),
            ),
        };
        let launcher = framework.launcher().map_err(anyhow::Error::msg)?;
        let python = framework.python().map_err(anyhow::Error::msg)?;
        let python = python.to_str().context("the path of Python is no text")?;
        let steps = [python, "-c", program(framework), &bytes];
        Job::start(launcher, &[&options[..], &steps].concat())
    }
}

/// Times of all losses of one kind under a peer, in milliseconds.
#[derive(Debug, Default)]
struct Samples {
    /// From the kill to the end of rank 0's first step in the next group.
    totals: Vec<f64>,
    /// The same, less the longest start of Python of the processes that were started meanwhile.
    less_python: Vec<f64>,
}

impl Samples {
    fn push(&mut self, killed: f64, group: &[Entry]) {
        let total = group[0].stepped - killed;
        let starts = group
            .iter()
            .filter_map(|entry| entry.start_of_python(killed));
        self.totals.push(total);
        self.less_python.push(total - starts.fold(0.0, f64::max));
    }
}

/// Kills the rank in the middle `options.n` times, at most [`MOST`] times. A group that does not form is told and not counted, and another job takes over.
fn measure(loss: Loss, options: &Options) -> anyhow::Result<Samples> {
    let (ranks, n) = (options.workers as usize, options.n.min(MOST));
    let (bytes, after) = match loss {
        Loss::Shrink => (0, ranks - 1),
        Loss::Replace | Loss::Restart => (options.bytes, ranks),
    };
    let mut samples = Samples::default();
    let mut number = 0;
    while number < n {
        let spares = if loss == Loss::Replace { n } else { 0 };
        let mut hosts = Hosts::new(ranks + spares as usize)?;
        let mut job = loss.start(ranks, &hosts, bytes)?;
        let mut group = job.group(ranks, 0.0)?;
        while number < n {
            number += 1;
            eprintln!("{loss:?} {number} of {n}");
            let killed = now();
            let mut change = || -> anyhow::Result<Vec<Entry>> {
                kill_process(group[ranks / 2].pid, Signal::KILL)?;
                let next = job.group(after, killed)?;
                samples.push(killed, &next);
                if loss != Loss::Shrink {
                    return Ok(next);
                }
                hosts.add(1)?;
                job.group(ranks, killed)
            };
            match change() {
                Ok(next) => group = next,
                Err(error) => {
                    eprintln!("{loss:?} {number}: {error}");
                    break;
                }
            }
        }
    }
    eprintln!(
        "{loss:?}: {} of {n} groups have formed",
        samples.totals.len()
    );
    anyhow::ensure!(!samples.totals.is_empty(), "no group has formed");
    Ok(samples)
}

/// Puts peers' rows behind kolo's own. A peer that is missing, or does not work, is told.
pub(super) fn beside(figures: &mut Vec<Figure>, options: &Options) {
    let mut add = |case: &str, loss, peer, less_python| match measure(loss, options) {
        Ok(samples) => {
            let own = |figure: &&Figure| figure.case.starts_with(case) && figure.metric == "p50";
            let Some(own) = figures.iter().find(own).cloned() else {
                return;
            };
            figures.push(own.beside(peer, median(&samples.totals)));
            if loss != Loss::Shrink {
                figures.push(own.beside(less_python, median(&samples.less_python)));
            }
        }
        Err(error) => eprintln!("{peer}: {error:#}"),
    };
    if options.peers.contains(&Launcher::Horovodrun) {
        let less_python = "horovodrun less Python";
        add("shrink", Loss::Shrink, "horovodrun", less_python);
        add("replace", Loss::Replace, "horovodrun", less_python);
    }
    if options.peers.contains(&Launcher::Torchrun) {
        let less_python = "torchrun less Python";
        add("replace", Loss::Restart, "torchrun", less_python);
    }
}
