//! Losses of ranks of real Horovod and torch, under their own launchers or under `kolo run`: the same programs, killed in the same way.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use anyhow::Context as _;
use kolo_harness::{Framework, TestCluster};
use rustix::process::{Signal, kill_process};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::launchers::{Entry, Job, command, now, program, reach, torchrun};

/// More restarts than a run makes.
const ENDLESS: &str = "1000000";

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

/// Nodes of kolo with a slot each.
struct Nodes {
    runtime: Runtime,
    /// `None` when it has stopped.
    cluster: Option<TestCluster>,
}

impl Nodes {
    fn new(count: usize) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let builder = TestCluster::builder().nodes(count).slots(1);
        let cluster = Some(runtime.block_on(builder.start())?);
        Ok(Self { runtime, cluster })
    }

    fn cluster(&mut self) -> anyhow::Result<(&Runtime, &mut TestCluster)> {
        let cluster = self.cluster.as_mut().context("the cluster runs")?;
        Ok((&self.runtime, cluster))
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        if let Some(cluster) = self.cluster.take()
            && let Err(error) = self.runtime.block_on(cluster.stop())
        {
            eprintln!("the cluster has not stopped: {error}");
        }
    }
}

/// Whose launcher the ranks are under.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Side<'a> {
    /// The framework's own.
    Peer,
    /// `kolo run`, by the path of `kolo`.
    Kolo(&'a Path),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Loss {
    /// Horovod goes on with one rank less; a host is added later.
    Shrink,
    /// All processes of torch are started anew.
    Restart,
}

/// What is lost, and how often.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scale {
    pub(crate) ranks: usize,
    pub(crate) n: u32,
}

/// Where one more rank finds room.
enum Room {
    /// There is enough.
    Enough,
    Hosts(Hosts),
    Nodes(Box<Nodes>),
}

/// A job in which ranks are lost. It ends before its room does.
struct Scene {
    job: Job,
    room: Room,
}

impl Loss {
    fn framework(self) -> Framework {
        match self {
            Self::Shrink => Framework::Horovod,
            Self::Restart => Framework::Torch,
        }
    }

    /// Ranks of the group after it.
    fn after(self, ranks: usize) -> usize {
        if self == Self::Shrink {
            ranks - 1
        } else {
            ranks
        }
    }

    fn start(self, side: Side<'_>, ranks: usize) -> anyhow::Result<Scene> {
        let count = ranks.to_string();
        let least = self.after(ranks).to_string();
        let framework = self.framework();
        let python = framework.python().map_err(anyhow::Error::msg)?;
        let steps = [python, "-c".as_ref(), program(framework).as_ref()];
        let elastic = ["-np", &count, "--min-np", &least, "--max-np", &count];
        let anew = ["--nproc-per-node", &count, "--max-restarts", ENDLESS];
        let (mut command, room) = match side {
            Side::Peer => {
                let mut command = command(framework.launcher().map_err(anyhow::Error::msg)?)?;
                if self == Self::Restart {
                    command.args(torchrun(&count));
                    command.args(["--max_restarts", ENDLESS, "--monitor_interval", "0.1"]);
                    (command, Room::Enough)
                } else {
                    let hosts = Hosts::new(ranks)?;
                    command.args(elastic).args([
                        "--host-discovery-script",
                        &hosts.script(),
                        "--network-interface",
                        "lo",
                    ]);
                    (command, Room::Hosts(hosts))
                }
            }
            Side::Kolo(kolo) => {
                let mut command = command([kolo.as_os_str(), OsStr::new("run")])?;
                let room = if self == Self::Restart {
                    command.arg("--local").args(anew);
                    Room::Enough
                } else {
                    let mut nodes = Nodes::new(ranks)?;
                    reach(&mut command, nodes.cluster()?.1)?;
                    command.args(elastic);
                    command.args(["--elastic", "horovod", "--max-restarts", ENDLESS]);
                    Room::Nodes(Box::new(nodes))
                };
                command.arg("--");
                (command, room)
            }
        };
        command.args(steps);
        Ok(Scene {
            job: Job::start(command)?,
            room,
        })
    }
}

impl Scene {
    /// After a loss since `killed`: makes room for one more rank. Gives when that was, and the group that has the rank.
    fn grow(&mut self, ranks: usize, killed: f64) -> anyhow::Result<(f64, Vec<Entry>)> {
        let added = match &mut self.room {
            Room::Enough => killed,
            Room::Hosts(hosts) => {
                let added = now();
                hosts.add(1)?;
                added
            }
            // The host of the killed worker is still there: kolo has put another one there by now.
            Room::Nodes(nodes) => {
                self.job.group(ranks, killed)?;
                let (runtime, cluster) = nodes.cluster()?;
                let left = now();
                cluster.kill_node(ranks - 1)?;
                self.job.group(ranks - 1, left)?;
                let added = now();
                runtime.block_on(cluster.restart_node(ranks - 1))?;
                added
            }
        };
        Ok((added, self.job.group(ranks, added)?))
    }
}

/// Times of all losses of one kind, in milliseconds.
#[derive(Debug, Default)]
pub(crate) struct Samples {
    /// From the kill to the end of rank 0's first step in the next group.
    pub(crate) totals: Vec<f64>,
    /// The same, less the longest start of Python of the processes that were started meanwhile.
    pub(crate) less_python: Vec<f64>,
    /// From a new host to the end of rank 0's first step in a group with one more rank.
    pub(crate) grown: Vec<f64>,
    /// Groups that did not form.
    pub(crate) hung: u32,
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

    pub(crate) fn extend(&mut self, more: Self) {
        self.totals.extend(more.totals);
        self.less_python.extend(more.less_python);
        self.grown.extend(more.grown);
        self.hung += more.hung;
    }
}

/// Kills the rank in the middle `scale.n` times. A group that does not form is told and not counted, and another job takes over.
pub(crate) fn measure(loss: Loss, side: Side<'_>, scale: Scale) -> anyhow::Result<Samples> {
    let Scale { ranks, n } = scale;
    let mut samples = Samples::default();
    let mut number = 0;
    while number < n {
        let mut scene = loss.start(side, ranks)?;
        let mut group = scene.job.group(ranks, 0.0)?;
        while number < n {
            number += 1;
            eprintln!("{loss:?} {number} of {n}");
            let killed = now();
            let mut change = || -> anyhow::Result<Vec<Entry>> {
                kill_process(group[ranks / 2].pid, Signal::KILL)?;
                let next = scene.job.group(loss.after(ranks), killed)?;
                samples.push(killed, &next);
                if loss != Loss::Shrink {
                    return Ok(next);
                }
                let (added, next) = scene.grow(ranks, killed)?;
                samples.grown.push(next[0].stepped - added);
                Ok(next)
            };
            match change() {
                Ok(next) => group = next,
                Err(error) => {
                    eprintln!("{loss:?} {number}: {error}");
                    samples.hung += 1;
                    break;
                }
            }
        }
    }
    Ok(samples)
}
