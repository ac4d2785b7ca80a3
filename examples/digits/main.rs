//! Four worker processes on two nodes learn to tell handwritten digits, data-parallel.
//!
//! ```text
//! cargo run --release --example digits
//! ```
//!
//! The same program is driver and worker: `#[kolo::main]` tells them apart. Without `KOLO_HEAD` it
//! makes a cluster of its own; with `KOLO_HEAD` and credentials it runs on that one.

// `pub` says here what other files of this program use.
#![allow(unreachable_pub)]

mod data;
mod mlp;
mod rng;
mod trainer;

use std::time::Instant;

use anyhow::ensure;
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use kolo::prelude::*;

use trainer::{Config, Trainer};

/// Train a small neural network on handwritten digits, with one worker process per slot.
#[derive(Debug, Parser)]
#[command(
    after_help = "Example:\n  cargo run --release --example digits -- --nodes 3 --slots 1 --epochs 10"
)]
struct Args {
    /// Nodes to use; all distinct.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    nodes: u32,
    /// Workers on each node.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    slots: u32,
    /// Passes over the training images.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Decides the held-out images, the first weights and the order of the images.
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

#[kolo::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let start = Instant::now();

    let cluster = match Cluster::connect_from_env().await? {
        Some(cluster) => cluster,
        None => {
            LocalCluster::builder()
                .nodes(args.nodes)
                .slots(args.slots)
                .start()
                .await?
        }
    };
    let executor = Executor::builder()
        .hosts(args.nodes)
        .slots(args.slots)
        .start(&cluster)
        .await?;
    let config = Config {
        seed: args.seed,
        batch: 64,
        rate: 0.08,
        momentum: 0.9,
    };
    let trainer = executor.create::<Trainer>((config,)).await?;

    // Hidden when standard error is no terminal: then the table's rows alone are the progress.
    let bar = ProgressBar::new(u64::from(args.epochs)).with_style(ProgressStyle::with_template(
        "{bar:32} {pos}/{len} epochs, {elapsed} elapsed, {eta} to go",
    )?);
    println!(
        "{:>5}  {:>10}  {:>9}  {:>8}",
        "epoch", "train loss", "test loss", "accuracy"
    );
    let mut last = None;
    for epoch in 0..args.epochs {
        let reports = trainer.train(epoch).await?;
        let report = reports[0];
        let row = format!(
            "{:>5}  {:>10.4}  {:>9.4}  {:>8.4}",
            epoch + 1,
            report.train_loss,
            report.loss,
            report.accuracy
        );
        bar.suspend(|| println!("{row}"));
        bar.inc(1);
        last = Some(report);
    }
    bar.finish_and_clear();

    let digests = trainer.digest().await?;
    ensure!(
        digests.windows(2).all(|pair| pair[0] == pair[1]),
        "the replicas differ: digests of the weights by rank are {digests:x?}"
    );
    let workers = executor.world_size();
    executor.shutdown().await?;
    if let Some(report) = last {
        println!(
            "digits: accuracy={:.2} loss={:.2} workers={workers} nodes={} epochs={} seconds={:.1}",
            report.accuracy,
            report.loss,
            args.nodes,
            args.epochs,
            start.elapsed().as_secs_f64()
        );
    }
    Ok(())
}
