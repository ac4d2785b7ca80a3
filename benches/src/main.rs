//! Every number that kolo claims, measured beside its peers in the same run.
#![forbid(unsafe_code)]

mod call;
mod interfaces;
mod raw;
mod report;
mod run;
mod spawn;
mod stats;

use std::time::Duration;

use clap::{Parser, Subcommand};

use raw::{child, echo, quic};
use report::Format;

/// Measure kolo beside its peers, in turn, in one run. Compare ratios, not absolute figures.
#[derive(Debug, Parser)]
#[command(
    name = "kolo-bench",
    after_help = "Examples:\n  cargo run --release --bin kolo-bench -- call\n  cargo run --release --bin kolo-bench -- spawn --format json"
)]
struct Args {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Calls from the driver to a worker process and back, beside raw echoes over the same links.
    #[command(after_help = "Example:\n  kolo-bench call --rounds 5 --seconds 1")]
    Call(Options),
    /// Which network interfaces connect hosts: the plan for many, and the probe over network namespaces (as root).
    #[command(after_help = "Example:\n  kolo-bench interfaces --rounds 5")]
    Interfaces(Options),
    /// `kolo run` of a program that does nothing and of one that writes a lot, beside `mpirun`.
    #[command(
        after_help = "Example:\n  cargo build --release -p kolo-runtime --bin kolo && kolo-bench run --rounds 11"
    )]
    Run(Options),
    /// Time from `start()` to all workers ready, beside bare spawns of the same binary.
    #[command(after_help = "Example:\n  kolo-bench spawn --rounds 11")]
    Spawn(Options),
}

#[derive(Debug, clap::Args)]
struct Options {
    /// Rounds; kolo and its peers take turns in each, and medians over the rounds are printed.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Length of one measurement in seconds (`call`).
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// How to print.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

impl Options {
    fn length(&self) -> anyhow::Result<Duration> {
        anyhow::ensure!(
            (0.01..=600.0).contains(&self.seconds),
            "--seconds is {}; allowed is 0.01 to 600",
            self.seconds
        );
        Ok(Duration::from_secs_f64(self.seconds))
    }
}

fn main() -> anyhow::Result<()> {
    // The same binary is every process of a run: its role comes first.
    if let Ok(role) = std::env::var(child::ROLE) {
        return match role.as_str() {
            echo::UNIX_ECHO => echo::unix_echo(),
            echo::HELLO => echo::hello(),
            // They end when the measuring process closes the connection, which quinn reports as an error.
            quic::QUIC_ECHO => quic::serve(false).or(Ok(())),
            quic::TWO_HOPS => quic::serve(true).or(Ok(())),
            other => anyhow::bail!("unknown role `{other}`"),
        };
    }
    kolo_harness::run_if_member();
    let args = Args::parse();
    let (figures, format) = match args.bench {
        Bench::Call(options) => (
            call::run(options.rounds, options.length()?)?,
            options.format,
        ),
        Bench::Interfaces(options) => (interfaces::run(options.rounds)?, options.format),
        Bench::Run(options) => (run::run(options.rounds)?, options.format),
        Bench::Spawn(options) => (spawn::run(options.rounds)?, options.format),
    };
    report::print(&figures, format)
}
