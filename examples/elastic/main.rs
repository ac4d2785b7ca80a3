//! A group learns handwritten digits while its workers and one of its nodes are killed, and nodes are added.
//!
//! ```text
//! cargo run --release --example elastic
//! cargo run --release --example elastic -- --kill 3 --add 2 --nodes 3 --slots 2 --seed 7
//! ```
//!
//! Each lost worker is replaced by a new process, which gets the state of the group. No image is left out of an epoch and
//! none is used twice, whatever happens.

// `pub` says here what other files of this program use.
#![allow(unreachable_pub)]

#[path = "../digits/data.rs"]
mod data;
#[path = "../digits/mlp.rs"]
mod mlp;
#[path = "../digits/rng.rs"]
mod rng;
mod training;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::Parser;
use kolo::prelude::*;

use rng::Rng;
use training::{Config, Summary, train};

/// How long the group learns between two changes.
const PAUSE: Duration = Duration::from_millis(300);

/// Train a small neural network on handwritten digits while workers are killed and nodes come and go.
///
/// The cluster is inside this process, so that its nodes can be killed and added. The workers are processes.
#[derive(Debug, Parser)]
#[command(
    after_help = "Example:\n  cargo run --release --example elastic -- --kill 3 --add 2 --nodes 3 --slots 2 --seed 7"
)]
struct Args {
    /// Nodes at the beginning.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=32))]
    nodes: u32,
    /// Workers on each node.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    slots: u32,
    /// Workers to kill, one after the other.
    #[arg(long, default_value_t = 2)]
    kill: u32,
    /// Nodes to kill. At least one of the first nodes must stay.
    #[arg(long, default_value_t = 1)]
    kill_nodes: u32,
    /// Nodes to add.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(..=32))]
    add: u32,
    /// The fewest passes over the training images.
    #[arg(long, default_value_t = 20)]
    epochs: u64,
    /// Decides the held-out images, the first weights, the order of the images, and which workers are killed.
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

/// A change of the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    KillWorker,
    KillNode,
    AddNode,
}

impl Args {
    /// By turns, so that the group shrinks and grows.
    fn changes(&self) -> VecDeque<Change> {
        let kinds = [
            (Change::KillWorker, self.kill),
            (Change::KillNode, self.kill_nodes),
            (Change::AddNode, self.add),
        ];
        let rounds = 0..kinds
            .iter()
            .map(|(_, count)| *count)
            .max()
            .unwrap_or_default();
        rounds
            .flat_map(|round| kinds.iter().filter(move |(_, count)| round < *count))
            .map(|(kind, _)| *kind)
            .collect()
    }
}

#[kolo::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    ensure!(
        args.kill_nodes < args.nodes,
        "--kill-nodes is {} and --nodes is {}: one node must stay, since it has the state of the group",
        args.kill_nodes,
        args.nodes
    );
    let begun = Instant::now();
    let changes = args.changes();
    let nodes = args.nodes + args.add - args.kill_nodes;
    let config = Config {
        seed: args.seed,
        batch: 64,
        epochs: args.epochs,
        workers: (nodes * args.slots) as usize,
        generation: 1 + changes.len() as u64,
        most_epochs: args.epochs + 10_000,
    };
    let cluster = LocalCluster::builder()
        .nodes(args.nodes)
        .slots(args.slots)
        .start()
        .await?;
    let executor = Executor::builder()
        .workers(1..=(args.nodes + args.add) * args.slots)
        .restarts_without_progress(args.kill.max(args.kill_nodes * args.slots) + 8)
        .start(&cluster)
        .await?;
    let mut script = Script {
        executor: &executor,
        rng: Rng::new(args.seed),
        changes,
        nodes: args.nodes,
        slots: args.slots,
        lost: 0,
        joined: 0,
    };
    let summaries = tokio::select! {
        summaries = executor.run(train, (config,)) => summaries?,
        stopped = script.play() => return stopped.map(|never| match never {}),
    };
    let Script { lost, joined, .. } = script;

    let first = *summaries.first().context("the group has no ranks")?;
    ensure!(
        summaries.iter().all(|other| *other == first),
        "the ranks differ: {summaries:?}"
    );
    let generations = executor.generation();
    executor.shutdown().await?;
    let Summary {
        accuracy,
        steps_redone,
        uneven_epochs,
        ..
    } = first;
    let samples = match uneven_epochs {
        0 => "exact".to_owned(),
        uneven => format!("uneven in {uneven} epochs"),
    };
    println!(
        "elastic: accuracy={accuracy:.2} generations={generations} lost={lost} joined={joined} samples={samples} \
         steps_redone={steps_redone} workers={} seconds={:.1}",
        summaries.len(),
        begun.elapsed().as_secs_f64()
    );
    Ok(())
}

/// The changes that are still to be made, and what has come of the others.
struct Script<'a> {
    executor: &'a Executor,
    rng: Rng,
    changes: VecDeque<Change>,
    nodes: u32,
    slots: u32,
    lost: usize,
    joined: usize,
}

enum Never {}

impl Script<'_> {
    /// Makes one change after the other: the next one when the group is whole again and has learnt for a while.
    async fn play(&mut self) -> anyhow::Result<Never> {
        let mut generations = self.executor.generations();
        let mut changed: Option<Instant> = None;
        while let Some(change) = generations.next().await {
            let size = change.table.members.len();
            if change.before > 0 {
                self.lost += change.left.len();
                self.joined += change.joined.len();
                println!(
                    "{:>8} ms: generation {} of {size} workers, {} have left and {} have joined: {}",
                    changed.map_or_else(String::new, |at| at.elapsed().as_millis().to_string()),
                    change.table.generation,
                    change.left.len(),
                    change.joined.len(),
                    change.table.cause,
                );
            }
            if size == (self.nodes * self.slots) as usize
                && let Some(next) = self.changes.pop_front()
            {
                tokio::time::sleep(PAUSE).await;
                changed = Some(Instant::now());
                self.make(next).await?;
            }
        }
        // The call of the training says why the group has ended.
        std::future::pending().await
    }

    async fn make(&mut self, change: Change) -> anyhow::Result<()> {
        let cluster = self.executor.cluster();
        let table = self.executor.table();
        let index = self.rng.permutation(table.members.len())[0];
        let member = &table.members[index];
        match change {
            Change::KillWorker => {
                let info = cluster.job(self.executor.job()).await?;
                let is_it = |worker: &&kolo::WorkerInfo| worker.member.rank == member.rank;
                let worker = info.workers.iter().find(is_it);
                let pid = worker.context("the worker is not known to the head")?.pid;
                println!("-- kill rank {} (process {pid})", member.rank);
                kill(pid)?;
            }
            Change::KillNode => {
                println!("-- kill node {} with rank {}", member.node, member.rank);
                self.nodes -= 1;
                cluster.kill_local_node(member.node).await?;
            }
            Change::AddNode => {
                println!("-- add a node");
                self.nodes += 1;
                cluster.add_local_node().await?;
            }
        }
        Ok(())
    }
}

fn kill(pid: u32) -> anyhow::Result<()> {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(rustix::process::Pid::from_raw);
    let pid = pid.context("the worker has no process")?;
    rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
    Ok(())
}
