//! A group under way, and what rank 0 says of each of its generations.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use kolo::elastic::Value;
use kolo::prelude::*;
use kolo_harness::{TestCluster, TestClusterBuilder};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::mpsc;

/// Work between two steps of the group.
pub(super) const PAUSE: Duration = Duration::from_millis(2);
/// Longest wait for a change.
const PATIENCE: Duration = Duration::from_secs(60);
const LINE: &str = "recovery ";

/// A time in milliseconds, on the clock that all processes of a host share.
pub(super) fn now() -> f64 {
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
        let result = work(ctx, state, ended);
        ended = now();
        result
    })
}

fn work(ctx: &Context, state: &mut State<Load>, ended: f64) -> Result<()> {
    let (formed, entered) = (millis_of(ctx.formed_at()), now());
    let records = ctx.comm().records();
    let met = records
        .first()
        .map(|record| record.ended.saturating_sub(record.asked));
    let mut is_first = true;
    loop {
        ctx.comm().all_reduce(&mut [1.0_f32], ReduceOp::Sum)?;
        state.steps.0 += 1;
        if std::mem::take(&mut is_first) {
            let stepped = now();
            // The last and the first time at which a rank of the generation before stopped.
            let mut stops = [ended, if ended > 0.0 { -ended } else { f64::MIN }];
            ctx.comm().all_reduce(&mut stops, ReduceOp::Max)?;
            if ctx.rank() == 0 {
                let (size, steps) = (ctx.world_size(), state.steps.0);
                let connect = met.unwrap_or_default().as_secs_f64() * 1e3;
                let [revoked, stopped] = [stops[0], -stops[1]];
                println!(
                    "{LINE}{size} {steps} {stopped} {revoked} {formed} {connect} {entered} {stepped}"
                );
            }
        }
        state.commit(ctx)?;
        std::thread::sleep(PAUSE);
    }
}

/// What rank 0 says of a generation: times of [`now`], and a length.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    size: usize,
    /// Steps of the group so far.
    pub(super) steps: u64,
    pub(super) stopped: f64,
    pub(super) revoked: f64,
    pub(super) formed: f64,
    pub(super) connect: f64,
    pub(super) entered: f64,
    pub(super) stepped: f64,
}

impl Entry {
    fn parse(line: &[u8]) -> Option<Self> {
        let line = std::str::from_utf8(line).ok()?.strip_prefix(LINE)?;
        let mut words = line.split(' ');
        let (size, steps) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let mut times = words.map(str::parse::<f64>);
        let mut time = || times.next()?.ok();
        Some(Self {
            size,
            steps,
            stopped: time()?,
            revoked: time()?,
            formed: time()?,
            connect: time()?,
            entered: time()?,
            stepped: time()?,
        })
    }
}

/// A group under way.
pub(super) struct Bed {
    pub(super) cluster: TestCluster,
    pub(super) executor: Executor,
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
    pub(super) async fn start(
        cluster: TestClusterBuilder,
        group: impl FnOnce(kolo::ExecutorBuilder) -> kolo::ExecutorBuilder,
        (workers, bytes): (u32, u64),
    ) -> anyhow::Result<Self> {
        let cluster = cluster.start().await?;
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
    pub(super) async fn until(&mut self, size: usize) -> anyhow::Result<Entry> {
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

    /// The index of the node of the youngest rank: rank 0 is elsewhere, if there are several.
    pub(super) fn youngest_node(&self) -> anyhow::Result<usize> {
        let table = self.executor.table();
        let last = table.members.last().context("a group has members")?.node;
        let mut indices = 0..self.workers; // Each node has a worker.
        let index = indices.find(|index| self.cluster.node_id(*index).ok() == Some(last));
        index.context("the node is one of the cluster's")
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

    pub(super) async fn kill_worker(&self) -> anyhow::Result<f64> {
        let pid = self.victim().await?;
        let at = now();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
        Ok(at)
    }

    pub(super) async fn stop(self) -> anyhow::Result<()> {
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
