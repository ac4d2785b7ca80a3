//! A group learns handwritten digits while its workers and one of its nodes are killed, and nodes are added.
//!
//! ```text
//! cargo run --release --example elastic
//! cargo run --release --example elastic -- --kill 3 --add 2 --nodes 3 --slots 2 --seed 7
//! cargo run --release --example elastic -- --kill all --checkpoints /tmp/digits
//! cargo run --release --example elastic -- --resume /tmp/digits --epochs 30
//! ```
//!
//! Each lost worker is replaced by a new process, which gets the state of the group. No image is left out of an epoch and
//! none is used twice, whatever happens. With checkpoints that also holds if all workers are killed at once, or this program.

// `pub` says here what other files of this program use.
#![allow(unreachable_pub)]

#[path = "../digits/data.rs"]
mod data;
#[path = "../digits/mlp.rs"]
mod mlp;
mod report;
#[path = "../digits/rng.rs"]
mod rng;
mod script;
mod training;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use clap::Parser;
use kolo::prelude::*;

use report::Report;
use rng::Rng;
use script::{Change, Script};
use training::{Config, Summary, train};

/// Train a small neural network on handwritten digits while workers are killed and nodes come and go.
///
/// The cluster is inside this process, so that its nodes can be killed and added. The workers are processes.
#[derive(Debug, Parser)]
#[command(
    after_help = "Examples:\n  cargo run --release --example elastic -- --kill 3 --add 2 --nodes 3 --slots 2 --seed 7\n  cargo run --release --example elastic -- --kill all --checkpoints /tmp/digits\n  cargo run --release --example elastic -- --resume /tmp/digits --epochs 30"
)]
struct Args {
    /// Nodes at the beginning.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=32))]
    nodes: u32,
    /// Workers on each node.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    slots: u32,
    /// Workers to kill, one after the other; or `all`: all of them at once, which needs checkpoints.
    #[arg(long, default_value = "2", value_parser = kills)]
    kill: Kills,
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
    /// Keeps checkpoints in this directory, which has none yet.
    #[arg(long, value_name = "DIR", conflicts_with = "resume")]
    checkpoints: Option<PathBuf>,
    /// Goes on from the newest checkpoint in this directory, and keeps checkpoints there.
    #[arg(long, value_name = "DIR")]
    resume: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kills {
    OneByOne(u32),
    All,
}

fn kills(text: &str) -> Result<Kills, String> {
    match text {
        "all" => Ok(Kills::All),
        number => number
            .parse()
            .map(Kills::OneByOne)
            .map_err(|_| "allowed is a number, or `all`".to_owned()),
    }
}

impl Args {
    /// By turns, so that the group shrinks and grows.
    fn changes(&self) -> VecDeque<Change> {
        let kinds = [
            match self.kill {
                Kills::OneByOne(count) => (Change::KillWorker, count),
                Kills::All => (Change::KillAll, 1),
            },
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
    let resume = args.resume.is_some();
    let checkpoints = args.checkpoints.clone().or(args.resume.clone());
    ensure!(
        args.kill != Kills::All || checkpoints.is_some(),
        "--kill all leaves no worker that has the state of the group: add --checkpoints DIR"
    );
    let begun = Instant::now();
    let changes = args.changes();
    let folder = tempfile::tempdir()?;
    let most = (args.nodes + args.add) * args.slots;
    let config = Config {
        seed: args.seed,
        batch: 64,
        epochs: args.epochs,
        end: folder.path().join("end"),
        most_epochs: args.epochs + 10_000,
        checkpoints,
        resume,
    };
    let cluster = LocalCluster::builder()
        .nodes(args.nodes)
        .slots(args.slots)
        .start()
        .await?;
    let report = Report::new();
    let executor = Executor::builder()
        .workers(1..=most)
        .restarts_without_progress(most + changes.len() as u32)
        .output(report.output())
        .start(&cluster)
        .await?;
    let mut script = Script {
        executor: &executor,
        report: &report,
        rng: Rng::new(args.seed),
        changes,
        nodes: args.nodes,
        slots: args.slots,
        end: config.end.clone(),
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
        uneven_epochs,
        ..
    } = first;
    let samples = match uneven_epochs {
        0 => "exact".to_owned(),
        uneven => format!("uneven in {uneven} epochs"),
    };
    println!(
        "elastic: accuracy={accuracy:.2} generations={generations} lost={lost} joined={joined} samples={samples} \
         steps_redone={} workers={} seconds={:.1}",
        report.redone(),
        summaries.len(),
        begun.elapsed().as_secs_f64()
    );
    Ok(())
}
