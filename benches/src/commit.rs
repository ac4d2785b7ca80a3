//! Commits of elastic states: beside a short all-reduce, and beside a copy of the same bytes.

use std::hint::black_box;
use std::time::Instant;

use kolo::prelude::*;

use crate::report::{Figure, Format};
use crate::size;
use crate::stats::median;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Worker processes of one host.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=256))]
    workers: u32,
    /// Sizes of states in bytes, with commas between; K, M and G are powers of 1024. An empty state is measured in any case.
    #[arg(long, value_delimiter = ',', default_value = "64KiB,16MiB", value_parser = size_of_state)]
    bytes: Vec<u64>,
    /// Rounds; all cases take turns in each, and medians over the rounds are printed.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Length of one measurement in seconds.
    #[arg(long, default_value_t = 0.5, value_parser = crate::seconds)]
    seconds: f64,
    /// How to print.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub(crate) format: Format,
}

fn size_of_state(text: &str) -> Result<u64, String> {
    match size::parse(text)? {
        bytes @ 1..=0x1_0000_0000 => Ok(bytes),
        bytes => Err(format!("that is {bytes} bytes; allowed is 1 to 4G")),
    }
}

/// A state of one buffer, or of none.
struct Model(Vec<u8>);

impl Elastic for Model {
    fn parts(&mut self, parts: &mut Parts<'_>) {
        if !self.0.is_empty() {
            parts.buffer("model", &mut self.0);
        }
    }
}

/// Microseconds of one operation, the longest of all ranks: as many one after the other as fit in a time.
fn time(ctx: &Context, seconds: f64, mut operation: impl FnMut() -> Result<()>) -> Result<f64> {
    let longest = |seconds: f64| {
        let mut all = [seconds];
        ctx.comm().all_reduce(&mut all, ReduceOp::Max)?;
        Ok::<f64, kolo::Error>(all[0])
    };
    let mut series = |operations: u32| {
        ctx.comm().barrier()?;
        let begun = Instant::now();
        (0..operations).try_for_each(|_| operation())?;
        longest(begun.elapsed().as_secs_f64() / f64::from(operations))
    };
    let once = series(5)?;
    #[allow(clippy::cast_sign_loss)] // a time is not negative
    let operations = ((seconds / once.max(1e-9)) as u32).clamp(5, 1_000_000);
    Ok(series(operations)? * 1e6)
}

/// The times of one round: an all-reduce, a commit of nothing; then for each size a copy, a copy and an all-reduce, and a commit.
#[kolo::function]
fn commits(ctx: &Context, sizes: Vec<u64>, seconds: f64) -> Result<Vec<f64>> {
    let reduce = || ctx.comm().all_reduce(&mut [1_u32], ReduceOp::Max);
    let mut times = vec![time(ctx, seconds, || Ok(reduce()?))?];
    let committed = |mut state: State<Model>| {
        state.sync(ctx)?;
        time(ctx, seconds, || Ok(state.commit(ctx)?))
    };
    times.push(committed(State::new(Model(Vec::new())))?);
    for size in sizes {
        let model = vec![1_u8; size as usize];
        // As a commit does: into memory that is two copies old.
        let mut copies = [model.clone(), model.clone()];
        let mut copy = || {
            copies.swap(0, 1);
            copies[0].copy_from_slice(black_box(&model));
        };
        times.push(time(ctx, seconds, || {
            copy();
            Ok(())
        })?);
        // Ranks wait here for the one whose copy takes longest.
        times.push(time(ctx, seconds, || {
            copy();
            Ok(reduce()?)
        })?);
        times.push(committed(State::new(Model(model)))?);
    }
    Ok(times)
}

/// Measures all cases in turn on a local cluster of one node.
pub(crate) fn run(options: &Options) -> anyhow::Result<Vec<Figure>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let mut rounds = Vec::new();
    runtime.block_on(async {
        let cluster = LocalCluster::builder()
            .slots(options.workers)
            .start()
            .await?;
        let executor = Executor::builder()
            .workers(options.workers)
            .start(&cluster)
            .await?;
        for number in 1..=options.rounds {
            eprintln!("round {number} of {}", options.rounds);
            let args = (options.bytes.clone(), options.seconds);
            let times = executor.run(commits, args).await?;
            // The same on all ranks.
            rounds.extend(times.into_iter().next());
        }
        executor.shutdown().await?;
        anyhow::Ok(())
    })?;
    Ok(figures(options, &rounds))
}

fn figures(options: &Options, rounds: &[Vec<f64>]) -> Vec<Figure> {
    let mut column = 0;
    let mut next = || {
        let times: Vec<f64> = rounds.iter().map(|times| times[column]).collect();
        column += 1;
        median(&times)
    };
    let workers = options.workers;
    let figure = |case: String, value| {
        Figure::new(
            "commit",
            format!("{case}, {workers} workers"),
            "p50",
            "us",
            value,
        )
    };
    let reduce = next();
    let reduces = "all-reduce of 4 B";
    let mut figures = vec![
        figure(reduces.to_owned(), reduce),
        figure("empty state".to_owned(), next()).beside(reduces, reduce),
    ];
    for bytes in &options.bytes {
        let shown = size::show(*bytes);
        let (copy, both, commit) = (next(), next(), next());
        let commits = figure(shown, commit);
        figures.push(commits.beside("copy", copy));
        figures.push(commits.beside("copy and all-reduce", both));
    }
    figures
}
