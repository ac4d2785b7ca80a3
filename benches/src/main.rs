//! Every number that kolo claims, measured beside its peers in the same run.
#![forbid(unsafe_code)]

mod call;
mod collectives;
mod commit;
mod elastic;
mod interfaces;
mod launchers;
mod losses;
mod raw;
mod recovery;
mod report;
mod run;
mod size;
mod spawn;
mod stats;

use std::time::Duration;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, Subcommand};

use collectives::Operation;
use raw::{child, echo, quic};
use report::Format;

/// Measure kolo beside its peers, in turn, in one run. Compare ratios, not absolute figures.
#[derive(Debug, Parser)]
#[command(
    name = "kolo-bench",
    after_help = "Examples:\n  cargo run --release --bin kolo-bench -- call\n  cargo run --release --bin kolo-bench -- spawn --format json\n  cargo run --release --bin kolo-bench -- all-reduce --ranks 4 --sizes 4,64KiB,32MiB"
)]
struct Args {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Calls from the driver to a worker process and back, beside a raw echo over the same links.
    #[command(after_help = "Example:\n  kolo-bench call --rounds 5 --seconds 1")]
    Call(Options),
    /// Commits of elastic states, beside a short all-reduce and a plain copy.
    #[command(after_help = "Example:\n  kolo-bench commit --workers 4 --bytes 64KiB,16MiB")]
    Commit(commit::Options),
    /// From the loss of a worker or a node to the end of the group's first step without it.
    #[command(
        after_help = "Examples:\n  kolo-bench recovery --workers 4 --n 30\n  kolo-bench recovery --kill worker,spare --n 10 --format json\n  kolo-bench recovery --kill cut --n 5    (as root)\n  kolo-bench recovery --calm 600          (as root)"
    )]
    Recovery(recovery::Options),
    /// From the loss of a rank to the next step of unmodified scripts of Horovod and torch, under `kolo run` and under their own launchers.
    ///
    /// `horovod-shrink` and `torch-restart` begin with the kill, `horovod-grow` with a new host. `less_python` is without the longest
    /// start of Python and the framework. `hung` counts groups that did not form within 60 s.
    #[command(
        after_help = "Example:\n  cargo build --release -p kolo-runtime --bin kolo && kolo-bench elastic --peer torchrun --n 10 --format json"
    )]
    Elastic(elastic::Options),
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
    /// All ranks get the sum of all ranks' values, beside Open MPI and Gloo.
    #[command(
        after_help = "Examples:\n  kolo-bench all-reduce --ranks 2 --sizes 4,1KiB,64KiB,4MiB,32MiB --peers openmpi,gloo\n  kolo-bench all-reduce --ranks 2 --shared --sizes 4MiB,128MiB\n  kolo-bench all-reduce --hosts 2 --mtu 9000 --lane quic --peers gloo --format json    (as root)"
    )]
    AllReduce(collectives::Options),
    /// All ranks get all ranks' values, beside Open MPI and Gloo.
    #[command(after_help = "Example:\n  kolo-bench all-gather --ranks 4 --sizes 1KiB,4MiB")]
    AllGather(collectives::Options),
    /// All ranks get one rank's values, beside Open MPI and Gloo. Each rank is the root in its turn.
    #[command(after_help = "Example:\n  kolo-bench broadcast --ranks 4 --sizes 1KiB,4MiB")]
    Broadcast(collectives::Options),
    /// One rank gets the sum of all ranks' values, beside Open MPI and Gloo. Each rank is the root in its turn.
    #[command(after_help = "Example:\n  kolo-bench reduce --ranks 4 --sizes 1KiB,4MiB")]
    Reduce(collectives::Options),
    /// One rank gets all ranks' values, beside Open MPI and Gloo. Each rank is the root in its turn.
    #[command(after_help = "Example:\n  kolo-bench gather --ranks 4 --sizes 1KiB,4MiB")]
    Gather(collectives::Options),
    /// Each rank gets its share of one rank's values, beside Open MPI and Gloo. Each rank is the root in its turn.
    #[command(after_help = "Example:\n  kolo-bench scatter --ranks 4 --sizes 1KiB,4MiB")]
    Scatter(collectives::Options),
    /// Each rank gets its share of the sum of all ranks' values, beside Open MPI and Gloo.
    #[command(after_help = "Example:\n  kolo-bench reduce-scatter --ranks 4 --sizes 1KiB,4MiB")]
    ReduceScatter(collectives::Options),
    /// Each rank gets its share of each rank's values, beside Open MPI and Gloo.
    #[command(after_help = "Example:\n  kolo-bench all-to-all --ranks 4 --sizes 1KiB,4MiB")]
    AllToAll(collectives::Options),
    /// Ranks in pairs: one sends, and when the other has received, it sends as much back; beside Open MPI and Gloo.
    #[command(after_help = "Example:\n  kolo-bench send-receive --ranks 2 --sizes 4,1KiB,4MiB")]
    SendReceive(collectives::Options),
    /// Ranks wait for each other, beside Open MPI and Gloo.
    #[command(after_help = "Example:\n  kolo-bench barrier --ranks 4")]
    Barrier(collectives::Options),
}

#[derive(Debug, clap::Args)]
struct Options {
    /// Rounds; kolo and its peers take turns in each, and medians over the rounds are printed.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Length of one measurement in seconds (`call`).
    #[arg(long, default_value_t = 1.0, value_parser = seconds)]
    seconds: f64,
    /// How to print.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.01..=600.0).contains(&seconds) => Ok(seconds),
        _ => Err("allowed is 0.01 to 600 seconds".to_owned()),
    }
}

/// Ends the program because of options that don't go together, with the exit code of all mistakes in options.
fn refuse(why: &str) -> ! {
    Args::command()
        .error(ErrorKind::ArgumentConflict, why)
        .exit()
}

fn main() -> anyhow::Result<()> {
    // The same binary is every process of a run: its role comes first.
    if let Ok(role) = std::env::var(child::ROLE) {
        return match role.as_str() {
            echo::UNIX_ECHO => echo::unix_echo(),
            echo::HELLO => echo::hello(),
            // It ends when the measuring process closes the connection, which quinn reports as an error.
            quic::TWO_HOPS => quic::serve().or(Ok(())),
            collectives::ENTER => collectives::enter(),
            collectives::RANK => collectives::rank(),
            other => anyhow::bail!("unknown role `{other}`"),
        };
    }
    kolo_harness::run_if_member();
    let args = Args::parse();
    if cfg!(debug_assertions) {
        eprintln!(
            "warning: this is a debug build, whose figures say nothing about kolo; build with --release"
        );
    }
    let (figures, format) = match args.bench {
        Bench::Call(options) => (
            call::run(options.rounds, Duration::from_secs_f64(options.seconds))?,
            options.format,
        ),
        Bench::Commit(options) => (commit::run(&options)?, options.format),
        Bench::Elastic(options) => (elastic::run(&options)?, options.format),
        Bench::Recovery(options) => (recovery::run(&options)?, options.format),
        Bench::AllReduce(options) => return collectives::run(Operation::AllReduce, &options),
        Bench::AllGather(options) => return collectives::run(Operation::AllGather, &options),
        Bench::Broadcast(options) => return collectives::run(Operation::Broadcast, &options),
        Bench::Reduce(options) => return collectives::run(Operation::Reduce, &options),
        Bench::Gather(options) => return collectives::run(Operation::Gather, &options),
        Bench::Scatter(options) => return collectives::run(Operation::Scatter, &options),
        Bench::ReduceScatter(options) => {
            return collectives::run(Operation::ReduceScatter, &options);
        }
        Bench::AllToAll(options) => return collectives::run(Operation::AllToAll, &options),
        Bench::SendReceive(options) => return collectives::run(Operation::SendReceive, &options),
        Bench::Barrier(options) => return collectives::run(Operation::Barrier, &options),
        Bench::Interfaces(options) => (interfaces::run(options.rounds)?, options.format),
        Bench::Run(options) => (run::run(options.rounds)?, options.format),
        Bench::Spawn(options) => (spawn::run(options.rounds)?, options.format),
    };
    report::print(&figures, format)
}
