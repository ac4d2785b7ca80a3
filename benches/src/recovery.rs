//! From a loss, or another change of the cluster, to the end of the first step of the next generation.
//!
//! All times are read off the one monotonic clock of this host: by the driver before it makes the change, and by rank 0, which has
//! survived all changes.

mod bed;
mod hosts;

use std::process::Stdio;
use std::time::Duration;

use anyhow::ensure;
use kolo_harness::TestCluster;

use crate::launchers::now;
use crate::report::{Figure, Format};
use crate::size;
use crate::stats::Times;
use bed::{Bed, Entry, PAUSE};

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Workers of the group, processes on daemons of their own.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=64))]
    workers: u32,
    /// Changes to make, with commas between; all if it is not given.
    #[arg(long, value_enum, value_delimiter = ',')]
    kill: Vec<Kill>,
    /// In place of changes, seconds in which none may come: a group works on hosts between which one of ten packets is lost, while all
    /// processors are busy. Ends with exit code 1 if a worker or a node counts as lost (as root).
    #[arg(long, value_parser = crate::seconds, conflicts_with = "kill")]
    calm: Option<f64>,
    /// How often each.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
    n: u32,
    /// Size of the state that a replaced worker gets; K, M and G are powers of 1024.
    #[arg(long, default_value = "16MiB", value_parser = size::parse)]
    bytes: u64,
    /// How to print.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub(crate) format: Format,
}

/// Something that happens to a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Kill {
    /// A worker is killed: the group shrinks, or gets a new process where it may not (`shrink`, `replace`).
    Worker,
    /// A worker is killed, and a process that was kept ready takes its place (`spare`).
    Spare,
    /// A node daemon is killed, and started again later (`node`, `grow`).
    Node,
    /// A node is drained by `kolo node drain`, the start of that command included (`drain`).
    Drain,
    /// A host with one worker is cut off: all packets to and from it are dropped (`cut`; as root).
    Cut,
}

/// The changes of one case: when each was made, and the generation that followed.
#[derive(Debug)]
struct Case {
    name: &'static str,
    samples: Vec<(f64, Entry)>,
}

impl Case {
    fn new(name: &'static str) -> Self {
        let samples = Vec::new();
        Self { name, samples }
    }

    fn figures(&self, workers: u32) -> Vec<Figure> {
        let figure = |metric, value| {
            let case = format!("{}, {workers} workers", self.name);
            Figure::new("recovery", case, metric, "ms", value)
        };
        let mut totals = Times::default();
        for (at, entry) in &self.samples {
            totals.push_micros((entry.stepped - at) * 1e3);
        }
        vec![
            figure("p50", totals.quantile(0.5) / 1e3),
            figure("p99", totals.quantile(0.99) / 1e3),
        ]
    }
}

/// Measures the cases one after the other.
pub(crate) fn run(options: &Options) -> anyhow::Result<Vec<Figure>> {
    if let Some(seconds) = options.calm {
        return hosts::calm(options, Duration::from_secs_f64(seconds));
    }
    let all = [
        Kill::Worker,
        Kill::Spare,
        Kill::Node,
        Kill::Drain,
        Kill::Cut,
    ];
    let kinds = if options.kill.is_empty() {
        &all[..]
    } else {
        &options.kill
    };
    let mut figures = Vec::new();
    for kind in kinds {
        let cases = match kind {
            Kill::Worker => here(workers(options))?,
            Kill::Spare => here(spares(options))?,
            Kill::Node => here(nodes(options, false))?,
            Kill::Drain => here(nodes(options, true))?,
            Kill::Cut => hosts::cut(options)?,
        };
        figures.extend(cases.iter().flat_map(|case| case.figures(options.workers)));
    }
    Ok(figures)
}

/// On a thread of the host that this one is on.
fn here<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(work)
}

/// Daemons on this host.
fn cluster(nodes: usize, slots: u32) -> kolo_harness::TestClusterBuilder {
    TestCluster::builder().nodes(nodes).slots(slots)
}

async fn workers(options: &Options) -> anyhow::Result<Vec<Case>> {
    let count = options.workers;
    let mut shrink = Case::new("shrink");
    let group = |builder: kolo::ExecutorBuilder| builder.workers(count - 1..=count);
    let mut bed = Bed::start(cluster(1, count), group, (count, 0)).await?;
    for number in 1..=options.n {
        eprintln!("shrink {number} of {}", options.n);
        let at = bed.kill_worker().await?;
        shrink
            .samples
            .push((at, bed.until(count as usize - 1).await?));
        bed.until(count as usize).await?;
    }
    bed.stop().await?;

    let mut replace = Case::new("replace");
    let group = |builder: kolo::ExecutorBuilder| builder.workers(count..=count);
    let mut bed = Bed::start(cluster(1, count), group, (count, options.bytes)).await?;
    for number in 1..=options.n {
        eprintln!("replace {number} of {}", options.n);
        let at = bed.kill_worker().await?;
        replace.samples.push((at, bed.until(count as usize).await?));
    }
    bed.stop().await?;
    Ok(vec![shrink, replace])
}

async fn spares(options: &Options) -> anyhow::Result<Vec<Case>> {
    let count = options.workers;
    let mut spare = Case::new("spare");
    let group = |builder: kolo::ExecutorBuilder| builder.workers(count..=count).spares(1);
    let mut bed = Bed::start(cluster(1, count + 1), group, (count, 0)).await?;
    for number in 1..=options.n {
        eprintln!("spare {number} of {}", options.n);
        let job = bed.executor.job();
        let waits = |workers: &[kolo::WorkerInfo]| {
            workers
                .iter()
                .any(|worker| worker.state.to_string() == "spare")
        };
        let is_ready = |jobs: &[kolo::JobInfo]| jobs.iter().any(|info| info.job == job);
        bed.cluster.wait_for_jobs("the job", is_ready).await?;
        while !waits(&bed.cluster.job(job).await?.workers) {
            tokio::time::sleep(PAUSE).await;
        }
        let at = bed.kill_worker().await?;
        spare.samples.push((at, bed.until(count as usize).await?));
    }
    bed.stop().await?;
    Ok(vec![spare])
}

/// Two nodes, of which the second is killed or drained, and comes back.
async fn nodes(options: &Options, drain: bool) -> anyhow::Result<Vec<Case>> {
    let half = options.workers.div_ceil(2);
    let count = half * 2;
    let name = if drain { "drain" } else { "node" };
    let (mut leave, mut grow) = (Case::new(name), Case::new("grow"));
    let group = |builder: kolo::ExecutorBuilder| builder.workers(half..=count);
    let mut bed = Bed::start(cluster(2, half), group, (count, 0)).await?;
    for number in 1..=options.n {
        eprintln!("{name} {number} of {}", options.n);
        // Rank 0 stays.
        let index = bed.youngest_node()?;
        let last = bed.cluster.node_id(index)?;
        let mut command = bed.cluster.kolo()?;
        command
            .args(["node", "drain", &last.to_string()])
            .stdout(Stdio::null());
        let at = now();
        if drain {
            ensure!(
                command.status()?.success(),
                "`kolo node drain {last}` has failed"
            );
        } else {
            bed.cluster.kill_node(index)?;
        }
        leave.samples.push((at, bed.until(half as usize).await?));
        let at = now();
        bed.cluster.restart_node(index).await?;
        grow.samples.push((at, bed.until(count as usize).await?));
    }
    bed.stop().await?;
    Ok(if drain {
        vec![leave]
    } else {
        vec![leave, grow]
    })
}
