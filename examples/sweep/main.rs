//! One rank is the chief: it hands out settings to the others, one at a time, and keeps the best.
//!
//! ```text
//! cargo run --release --example sweep
//! cargo run --release --example sweep -- --workers 8 --epochs 10
//! ```
//!
//! Each setting trains a small network on handwritten digits. Some settings take longer than others, so nobody can deal them out
//! in advance: a worker that is done gets the next one. The chief is rank 0. It has a thread for each worker, which sends a
//! setting and waits for the result; `send` and `receive` concern two ranks, so the others go on meanwhile.

// `pub` says here what other files of this program use.
#![allow(unreachable_pub)]

#[path = "../digits/data.rs"]
#[allow(dead_code)]
mod data;
#[path = "../digits/mlp.rs"]
mod mlp;
#[path = "../digits/rng.rs"]
mod rng;

use std::sync::Mutex;
use std::time::Instant;

use anyhow::Context as _;
use clap::Parser;
use kolo::prelude::*;

use data::Digits;
use mlp::{Mlp, PARAMETERS};
use rng::Rng;

const SEED: u64 = 42;
const RATES: [f32; 4] = [0.001, 0.02, 0.1, 1.0];
const MOMENTA: [f32; 2] = [0.5, 0.9];
const BATCHES: [usize; 2] = [16, 64];
const SETTINGS: usize = RATES.len() * MOMENTA.len() * BATCHES.len();

/// Try settings for a small neural network: one rank hands them out, and the others train.
#[derive(Debug, Parser)]
struct Args {
    /// Ranks in all, the chief among them.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..))]
    workers: u32,
    /// Passes over the training images for each setting.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
}

/// Rate, momentum and batch of a setting.
fn setting(number: usize) -> (f32, f32, usize) {
    let batch = BATCHES[number % BATCHES.len()];
    let number = number / BATCHES.len();
    let momentum = MOMENTA[number % MOMENTA.len()];
    (RATES[number / MOMENTA.len()], momentum, batch)
}

/// The chief gives the accuracy of each setting, and which rank has tried it; the others give nothing.
#[kolo::function]
fn sweep(ctx: &Context, epochs: u32) -> anyhow::Result<Vec<(f64, usize)>> {
    if ctx.rank() == 0 {
        chief(ctx)
    } else {
        work(ctx, epochs)?;
        Ok(Vec::new())
    }
}

fn chief(ctx: &Context) -> anyhow::Result<Vec<(f64, usize)>> {
    let next = Mutex::new(0..SETTINGS);
    let results = Mutex::new(vec![(0.0, 0); SETTINGS]);
    let serve = |worker: usize| -> anyhow::Result<()> {
        loop {
            let number = next.lock().map_err(poisoned)?.next();
            // An empty message says that there are no more.
            let message: Vec<u64> = number.map(|number| number as u64).into_iter().collect();
            ctx.comm().send(&message, Rank(worker as u32))?;
            let Some(number) = number else {
                return Ok(());
            };
            let accuracy = ctx.comm().receive::<f64>(Rank(worker as u32))?;
            let accuracy = *accuracy.first().context("a result has a number")?;
            results.lock().map_err(poisoned)?[number] = (accuracy, worker);
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (1..ctx.world_size())
            .map(|worker| scope.spawn(move || serve(worker)))
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(poisoned)?)
    })?;
    results.into_inner().map_err(poisoned)
}

fn poisoned<T>(_: T) -> anyhow::Error {
    anyhow::anyhow!("another thread of the chief has panicked")
}

fn work(ctx: &Context, epochs: u32) -> anyhow::Result<()> {
    let (train, test) = Digits::load()?.split(SEED);
    while let Some(&number) = ctx.comm().receive::<u64>(Rank(0))?.first() {
        let accuracy = try_out(&train, &test, setting(number as usize), epochs);
        ctx.comm().send(&[accuracy], Rank(0))?;
    }
    Ok(())
}

/// Trains with one setting, and gives the share of the held-out images that are told right.
fn try_out(
    train: &Digits,
    test: &Digits,
    (rate, momentum, batch): (f32, f32, usize),
    epochs: u32,
) -> f64 {
    let mut model = Mlp::new(SEED);
    let mut velocity = vec![0.0; PARAMETERS];
    let mut gradient = vec![0.0; PARAMETERS];
    let mut rng = Rng::new(SEED);
    for _ in 0..epochs {
        for images in rng.permutation(train.len()).chunks(batch) {
            gradient.fill(0.0);
            for &index in images {
                let (pixels, label) = train.get(index);
                model.add_gradient(pixels, label, 1.0 / images.len() as f32, &mut gradient);
            }
            let weights = model.parameters.iter_mut();
            for ((weight, velocity), slope) in weights.zip(&mut velocity).zip(&gradient) {
                *velocity = momentum * *velocity - rate * slope;
                *weight += *velocity;
            }
        }
    }
    let right = (0..test.len()).filter(|&index| {
        let (pixels, label) = test.get(index);
        model.test(pixels, label).1
    });
    right.count() as f64 / test.len() as f64
}

#[kolo::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let begun = Instant::now();
    let cluster = Cluster::connect_or_local().await?;
    let executor = Executor::builder()
        .workers(args.workers)
        .start(&cluster)
        .await?;
    let results = executor.run(sweep, (args.epochs,)).await?.swap_remove(0);
    executor.shutdown().await?;

    println!(
        "{:>6}  {:>8}  {:>5}  {:>8}  {:>4}",
        "rate", "momentum", "batch", "accuracy", "rank"
    );
    for (number, (accuracy, rank)) in results.iter().enumerate() {
        let (rate, momentum, batch) = setting(number);
        println!("{rate:>6}  {momentum:>8}  {batch:>5}  {accuracy:>8.4}  {rank:>4}");
    }
    let best = results
        .iter()
        .enumerate()
        .max_by(|a, b| a.1.0.total_cmp(&b.1.0));
    let (number, (accuracy, _)) = best.context("there are settings")?;
    let (rate, momentum, batch) = setting(number);
    println!(
        "sweep: accuracy={accuracy:.2} rate={rate} momentum={momentum} batch={batch} settings={} workers={} seconds={:.1}",
        results.len(),
        args.workers,
        begun.elapsed().as_secs_f64()
    );
    Ok(())
}
