//! A group under way, and what rank 0 says of each of its generations.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use kolo::elastic::Value;
use kolo::prelude::*;
use kolo_harness::{TestCluster, TestClusterBuilder};
use tokio::sync::mpsc;

use crate::launchers::now;

/// Work between two steps of the group.
pub(super) const PAUSE: Duration = Duration::from_millis(2);
/// Longest wait for a change.
const PATIENCE: Duration = Duration::from_secs(60);
const LINE: &str = "recovery ";

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

/// Steps of 4 bytes, each committed, for as long as the group is there. Rank 0 prints the time of the first one of each generation.
#[kolo::function]
fn steps(ctx: &Context, bytes: u64) -> Result<()> {
    let mut state = State::new(Load {
        steps: Value(0),
        data: vec![0; bytes as usize],
    });
    ctx.elastic(&mut state, |ctx, state| -> Result<()> {
        let mut is_first = ctx.rank() == 0;
        loop {
            ctx.comm().all_reduce(&mut [1.0_f32], ReduceOp::Sum)?;
            state.steps.0 += 1;
            if std::mem::take(&mut is_first) {
                println!("{LINE}{} {} {}", ctx.world_size(), state.steps.0, now());
            }
            state.commit(ctx)?;
            std::thread::sleep(PAUSE);
        }
    })
}

/// What rank 0 says of a generation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    size: usize,
    /// Steps of the group so far.
    pub(super) steps: u64,
    /// When the first one in the generation had ended, by [`now`].
    pub(super) stepped: f64,
}

impl Entry {
    fn parse(line: &[u8]) -> Option<Self> {
        let line = std::str::from_utf8(line).ok()?.strip_prefix(LINE)?;
        let mut words = line.split(' ');
        Some(Self {
            size: words.next()?.parse().ok()?,
            steps: words.next()?.parse().ok()?,
            stepped: words.next()?.parse().ok()?,
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
        let mut bed = Self {
            cluster,
            executor,
            entries,
            work,
            workers: workers as usize,
        };
        bed.until(workers as usize).await?;
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
        self.executor.shutdown().await?;
        drop(self.work.await?);
        Ok(self.cluster.stop().await?)
    }
}
