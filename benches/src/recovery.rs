//! From a loss, or another change of the cluster, to the end of the first step of the next generation.
//!
//! All times are read off the one monotonic clock of this host, by the driver before it makes the change and by rank 0, which has
//! survived all changes. Parts: `revoke`, until rank 0's operation has failed or its commit was interrupted; `decide`, until
//! rank 0 has the members of the next generation; `sync`, until the loop begins again with the state, links included; `first_step`.

use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use kolo::elastic::Value;
use kolo::prelude::*;
use kolo_harness::TestCluster;
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::mpsc;

use crate::report::{Figure, Format};
use crate::size;
use crate::stats::{Times, median};

/// Work between two steps of the group.
const PAUSE: Duration = Duration::from_millis(2);
/// Longest wait for a change.
const PATIENCE: Duration = Duration::from_secs(30);
const LINE: &str = "recovery ";

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Workers of the group, processes on daemons of their own.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=64))]
    workers: u32,
    /// Changes to make, with commas between; all if it is not given.
    #[arg(long, value_enum, value_delimiter = ',')]
    kill: Vec<Kill>,
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
}

/// A time in milliseconds, on the clock that all processes of a host share.
fn now() -> f64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6
}

fn millis_of(at: Instant) -> f64 {
    now() - at.elapsed().as_secs_f64() * 1e3
}

struct Load {
    steps: Value<u64>,
    data: Vec<u8>,
}

impl Elastic for Load {
    fn parts(&mut self, parts: &mut Parts<'_>) {
        parts.value("steps", &mut self.steps.0);
        if !self.data.is_empty() {
            parts.buffer("data", &mut self.data);
        }
    }
}

/// Steps of 4 bytes, each committed, for as long as the group is there. Rank 0 prints the times of each generation.
#[kolo::function]
fn steps(ctx: &Context, bytes: u64) -> Result<()> {
    let mut state = State::new(Load {
        steps: Value(0),
        data: vec![0; bytes as usize],
    });
    let mut ended = 0.0;
    ctx.elastic(&mut state, |ctx, state| {
        let times = [ended, millis_of(ctx.formed_at()), now()];
        let result = work(ctx, state, times);
        ended = now();
        result
    })
}

fn work(ctx: &Context, state: &mut State<Load>, [ended, formed, entered]: [f64; 3]) -> Result<()> {
    let mut first = true;
    loop {
        ctx.comm().all_reduce(&mut [1.0_f32], ReduceOp::Sum)?;
        state.steps.0 += 1;
        if std::mem::take(&mut first) && ctx.rank() == 0 {
            let (generation, size) = (ctx.generation().0, ctx.world_size());
            println!(
                "{LINE}{generation} {size} {ended} {formed} {entered} {}",
                now()
            );
        }
        state.commit(ctx)?;
        std::thread::sleep(PAUSE);
    }
}

/// What rank 0 says of a generation.
#[derive(Debug, Clone, Copy)]
struct Entry {
    size: usize,
    ended: f64,
    formed: f64,
    entered: f64,
    stepped: f64,
}

impl Entry {
    fn parse(line: &[u8]) -> Option<Self> {
        let line = std::str::from_utf8(line).ok()?.strip_prefix(LINE)?;
        let mut words = line.split(' ').map(str::parse::<f64>);
        let mut word = || words.next()?.ok();
        let _generation = word()?;
        #[allow(clippy::cast_sign_loss)] // a size
        let size = word()? as usize;
        Some(Self {
            size,
            ended: word()?,
            formed: word()?,
            entered: word()?,
            stepped: word()?,
        })
    }
}

/// A group under way.
struct Bed {
    cluster: TestCluster,
    executor: Executor,
    entries: mpsc::UnboundedReceiver<Entry>,
    work: tokio::task::JoinHandle<Result<Vec<()>, CallError>>,
    workers: usize,
    /// What the first node daemon, which is never killed, held at the beginning.
    held: Held,
}

/// What a process holds.
#[derive(Debug, Clone, Copy)]
struct Held {
    descriptors: usize,
    kib: u64,
}

impl Held {
    fn of(pid: u32) -> anyhow::Result<Self> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = resident.and_then(|text| text.trim().strip_suffix(" kB")?.parse().ok());
        Ok(Self {
            descriptors: std::fs::read_dir(format!("/proc/{pid}/fd"))?.count(),
            kib: kib.context("a process has a size")?,
        })
    }
}

impl Bed {
    async fn start(
        (nodes, slots): (usize, u32),
        group: impl FnOnce(kolo::ExecutorBuilder) -> kolo::ExecutorBuilder,
        (workers, bytes): (u32, u64),
    ) -> anyhow::Result<Self> {
        let cluster = TestCluster::builder()
            .nodes(nodes)
            .slots(slots)
            .start()
            .await?;
        let (told, entries) = mpsc::unbounded_channel();
        let told = Arc::new(told);
        let output = Output::callback(move |line| {
            if let Some(entry) = Entry::parse(&line.text) {
                // The receiver goes with the bench.
                let _ = told.send(entry);
            }
        });
        let builder = Executor::builder()
            .restarts_without_progress(1000)
            .output(output);
        let executor = group(builder).start(&cluster.connect().await?).await?;
        let call = executor.run(steps, bytes);
        let work = tokio::spawn(call.into_future());
        let held = Held::of(cluster.node_pid(0)?)?;
        let mut bed = Self {
            cluster,
            executor,
            entries,
            work,
            workers: workers as usize,
            held,
        };
        bed.until(workers as usize).await?;
        bed.held = Held::of(bed.cluster.node_pid(0)?)?;
        Ok(bed)
    }

    /// The first generation of this size that makes a step from now on.
    async fn until(&mut self, size: usize) -> anyhow::Result<Entry> {
        let found = async {
            loop {
                tokio::select! {
                    entry = self.entries.recv() => {
                        let entry = entry.context("the group says nothing any more")?;
                        if entry.size == size {
                            return anyhow::Ok(entry);
                        }
                    }
                    ended = &mut self.work => {
                        ended??;
                        anyhow::bail!("the group has ended");
                    }
                }
            }
        };
        let found = tokio::time::timeout(PATIENCE, found).await;
        found.with_context(|| format!("no generation of {size} ranks within {PATIENCE:?}"))?
    }

    /// The process of the rank in the middle, so that no order of ranks is measured alone.
    async fn victim(&self) -> anyhow::Result<rustix::process::Pid> {
        let rank = Rank((self.workers / 2) as u32);
        let pid = self.cluster.worker_pid(self.executor.job(), rank).await?;
        let pid = i32::try_from(pid)
            .ok()
            .and_then(rustix::process::Pid::from_raw);
        pid.context("the rank has no process")
    }

    async fn kill_worker(&self) -> anyhow::Result<f64> {
        let pid = self.victim().await?;
        let at = now();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
        Ok(at)
    }

    async fn stop(self) -> anyhow::Result<()> {
        let (before, after) = (self.held, Held::of(self.cluster.node_pid(0)?)?);
        eprintln!(
            "the first node's daemon: {} descriptors at first and {} at the end, {} and {} KiB",
            before.descriptors, after.descriptors, before.kib, after.kib
        );
        self.executor.shutdown().await?;
        drop(self.work.await?);
        Ok(self.cluster.stop().await?)
    }
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
        let part = |pick: fn(f64, &Entry) -> f64| {
            let parts: Vec<f64> = self
                .samples
                .iter()
                .map(|(at, entry)| pick(*at, entry))
                .collect();
            median(&parts)
        };
        vec![
            figure("p50", totals.quantile(0.5) / 1e3),
            figure("p99", totals.quantile(0.99) / 1e3),
            figure("revoke", part(|at, entry| entry.ended - at)),
            figure("decide", part(|_, entry| entry.formed - entry.ended)),
            figure("sync", part(|_, entry| entry.entered - entry.formed)),
            figure("first_step", part(|_, entry| entry.stepped - entry.entered)),
        ]
    }
}

/// Measures the cases one after the other.
pub(crate) fn run(options: &Options) -> anyhow::Result<Vec<Figure>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let all = [Kill::Worker, Kill::Spare, Kill::Node, Kill::Drain];
    let kinds = if options.kill.is_empty() {
        &all[..]
    } else {
        &options.kill
    };
    eprintln!(
        "Horovod's elastic driver and torchrun are no part of this: their times are in docs/performance.md"
    );
    let mut figures = Vec::new();
    for kind in kinds {
        let cases = runtime.block_on(async {
            match kind {
                Kill::Worker => workers(options).await,
                Kill::Spare => spares(options).await,
                Kill::Node => nodes(options, false).await,
                Kill::Drain => nodes(options, true).await,
            }
        })?;
        figures.extend(cases.iter().flat_map(|case| case.figures(options.workers)));
    }
    Ok(figures)
}

async fn workers(options: &Options) -> anyhow::Result<Vec<Case>> {
    let count = options.workers;
    let mut shrink = Case::new("shrink");
    let group = |builder: kolo::ExecutorBuilder| builder.workers(count - 1..=count);
    let mut bed = Bed::start((1, count), group, (count, 0)).await?;
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
    let mut bed = Bed::start((1, count), group, (count, options.bytes)).await?;
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
    let mut bed = Bed::start((1, count + 1), group, (count, 0)).await?;
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
    let mut bed = Bed::start((2, half), group, (count, 0)).await?;
    for number in 1..=options.n {
        eprintln!("{name} {number} of {}", options.n);
        // Rank 0 stays: the node of the youngest member goes.
        let table = bed.executor.table();
        let last = table.members.last().context("a group has members")?.node;
        let index = (0..2).find(|index| bed.cluster.node_id(*index).ok() == Some(last));
        let index = index.context("the node is one of the cluster's")?;
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
