//! The command line of the simulator.
#![forbid(unsafe_code)]

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use kolo_sim::{Cost, Counts, Mutation, Options, Shape, Violation, play, scale};

/// Play whole clusters of kolo on a virtual clock, and look whether they keep their promises.
///
/// The cores of head and nodes are the real ones. One seed gives everything: the sizes, the times, the faults and the work. First
/// everything goes wrong; then all faults end, and every job must become whole, work, and survive the loss of a
/// worker; at the end nothing may be left.
#[derive(Debug, Parser)]
#[command(
    name = "kolo-sim",
    after_help = "Examples:\n  cargo run --release -p kolo-sim -- --seeds 10000 --nodes 50\n  \
                  cargo run --release -p kolo-sim -- --nodes 50 --reproduce 4711   # prints what happens\n  \
                  cargo run --release -p kolo-sim -- --mutate list                 # bugs that can be put in\n  \
                  cargo run --release -p kolo-sim -- --mutate lose-exit            # must find a violation\n  \
                  cargo run --release -p kolo-sim -- --scale 10000x8               # what one large job costs the head\n\n\
                  Exit code: 0 if every promise holds, 1 if one does not, 2 if the command line is wrong. A violation is printed \
                  with its seed and options."
)]
struct Args {
    /// How many seeds to play.
    #[arg(long, default_value_t = 200, value_name = "N")]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0, value_name = "SEED")]
    first: u64,
    /// The most nodes of a cluster.
    #[arg(long, default_value_t = 6, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    nodes: u32,
    /// The most slots of a node.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    slots: u32,
    /// Play this seed alone, and print everything that happens.
    #[arg(long, value_name = "SEED")]
    reproduce: Option<u64>,
    /// Put a bug in, which must be found; `list` prints all of them.
    #[arg(long, value_name = "NAME", value_parser = mutation)]
    mutate: Option<Chosen>,
    /// Play no faults: form one job on clusters of a hundredth, a tenth, and all of so many nodes and slots, for example 10000x8,
    /// lose one node in a hundred, heal, and print what that costs the head. Exit code 1 if that grows faster than the nodes.
    #[arg(long, value_name = "NODESxSLOTS", value_parser = shape, conflicts_with_all = ["reproduce", "mutate"])]
    scale: Option<Shape>,
}

#[derive(Debug, Clone, Copy)]
enum Chosen {
    List,
    One(Mutation),
}

fn mutation(name: &str) -> Result<Chosen, String> {
    if name == "list" {
        return Ok(Chosen::List);
    }
    Mutation::find(name).map(Chosen::One).ok_or_else(|| {
        let names: Vec<&str> = Mutation::ALL.iter().map(|it| it.name()).collect();
        format!("allowed are `list` and {}", names.join(", "))
    })
}

fn shape(text: &str) -> Result<Shape, String> {
    let numbers = text.split_once('x').and_then(|(nodes, slots)| {
        let (nodes, slots) = (nodes.parse().ok()?, slots.parse().ok()?);
        let is_legal = (100..=100_000).contains(&nodes) && (1..=64).contains(&slots);
        is_legal.then_some(Shape { nodes, slots })
    });
    numbers.ok_or_else(|| {
        "allowed are 100 to 100000 nodes and 1 to 64 slots, as in 10000x8".to_owned()
    })
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(shape) = args.scale {
        return grow(shape);
    }
    let mutation = match args.mutate {
        Some(Chosen::List) => {
            for mutation in Mutation::ALL {
                println!("{mutation:20} {}", mutation.about());
            }
            return ExitCode::SUCCESS;
        }
        Some(Chosen::One(mutation)) => Some(mutation),
        None => None,
    };
    let options = Options {
        nodes: args.nodes,
        slots: args.slots,
        mutation,
    };
    if let Some(seed) = args.reproduce {
        let outcome = play(seed, options, true);
        // Whoever reads may have seen enough.
        let mut out = std::io::stdout().lock();
        let mut lines = outcome.lines.iter();
        let all = lines.all(|line| writeln!(out, "{line}").is_ok());
        if all {
            writeln!(out, "seed {seed}: trace {:016x}", outcome.hash).ok();
        }
        return match outcome.violation {
            Some(violation) => complain(seed, &args, &violation),
            None => ExitCode::SUCCESS,
        };
    }
    run(&args, options)
}

fn run(args: &Args, options: Options) -> ExitCode {
    let begun = Instant::now();
    let mut counts = Counts::default();
    let mut found = None;
    let mut seeds = 0;
    for seed in args.first..args.first.saturating_add(args.seeds) {
        let outcome = play(seed, options, false);
        seeds += 1;
        counts += outcome.counts;
        if let Some(violation) = outcome.violation {
            found = Some((seed, violation));
            break;
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    let Counts {
        generations,
        losses,
        joins,
        commits,
        events,
        ..
    } = counts;
    let violations = u64::from(found.is_some());
    println!(
        "sim: seeds={seeds} violations={violations} generations={generations} losses={losses} joins={joins} \
         commits={commits} events={events} seconds={seconds:.1}"
    );
    match found {
        Some((seed, violation)) => complain(seed, args, &violation),
        None => ExitCode::SUCCESS,
    }
}

fn grow(wanted: Shape) -> ExitCode {
    let largest = wanted.legal();
    if largest != wanted {
        eprintln!(
            "kolo-sim: a job of {wanted} has more ranks than a job may have; {largest} is played"
        );
    }
    println!(
        "{:>10} {:>10} {:>12} {:>12} {:>8} {:>10} {:>8}",
        "cluster", "messages", "bytes", "tables", "cpu s", "memory", "took s"
    );
    let (mut before, mut result): (Option<Cost>, _) = (None, Ok(()));
    for part in [100, 10, 1] {
        let nodes = (largest.nodes / part).max(1);
        let cost = match scale(Shape { nodes, ..largest }) {
            Ok(cost) => cost,
            Err(problem) => {
                eprintln!("kolo-sim: {nodes}x{}: {problem}", largest.slots);
                return ExitCode::FAILURE;
            }
        };
        println!(
            "{:>10} {:>10} {:>12} {:>12} {:>8.3} {:>10} {:>8.1}",
            cost.shape.to_string(),
            cost.messages,
            cost.bytes,
            cost.tables,
            cost.cpu.as_secs_f64(),
            cost.memory,
            cost.took.as_secs_f64()
        );
        // Of the smallest cluster hardly anything is measured.
        if let (Some(before), 1) = (before, part) {
            result = before.is_linear(&cost);
        }
        before = Some(cost);
    }
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("kolo-sim: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn complain(seed: u64, args: &Args, violation: &Violation) -> ExitCode {
    eprintln!("kolo-sim: seed {seed}: {violation}");
    let mut options = format!("--nodes {} --slots {}", args.nodes, args.slots);
    if let Some(Chosen::One(mutation)) = args.mutate {
        options.push_str(" --mutate ");
        options.push_str(mutation.name());
    }
    eprintln!(
        "kolo-sim: to see how: cargo run --release -p kolo-sim -- {options} --reproduce {seed}"
    );
    ExitCode::FAILURE
}
