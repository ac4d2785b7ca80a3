//! Collective operations of kolo beside those of Open MPI and Gloo: all in turn in one run, every result checked.
//!
//! Each contestant is a group of processes that stay for the whole run and sleep while it is not their turn. They all speak
//! one small protocol ([`wire`]), fill and check the same values ([`pattern`]), and stamp when each operation began and
//! ended on the one clock that all processes of a machine share.

mod group;
mod hosts;
mod kolo_group;
mod launch;
mod pattern;
mod peers;
mod rank;
mod scratch;
mod summary;
mod wire;

use std::io::{IsTerminal as _, Write as _};
use std::time::Instant;

use crate::report::{self, Format};
use crate::size;
use anyhow::Context as _;
use group::{Group, Series};
use hosts::Hosts;
use scratch::Scratch;
use summary::{Entry, Row, Setting};
use wire::{Lane, Run};

pub(crate) use launch::{ENTER, command, enter};
pub(crate) use rank::{RANK, rank};
pub(crate) use wire::Operation;

/// Sizes up to this one are measured without a barrier in front of each operation, which costs more than they do.
const SMALL: u64 = 64 << 10;

/// What is measured if nothing else is asked for.
const SIZES: [u64; 6] = [4, 1 << 10, 64 << 10, 256 << 10, 4 << 20, 32 << 20];

/// A series takes at most so many times as long as its operations are to take, or a second.
const LONGEST: f64 = 10.0;

/// What kolo is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Peer {
    /// Open MPI, on one host only.
    Openmpi,
    /// Gloo over TCP, not encrypted.
    Gloo,
    /// Nothing: kolo alone.
    None,
}

impl Peer {
    fn name(self) -> &'static str {
        match self {
            Self::Openmpi => "openmpi",
            Self::Gloo => "gloo",
            Self::None => "none",
        }
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Ranks, each a process of its own.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// Hosts that the ranks are spread over, the first ranks on the first. Two hosts are two network namespaces of this machine,
    /// with a pair of interfaces between them; that needs root and `ip`.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=2))]
    hosts: u32,
    /// MTU of the network between two hosts, in bytes. [default: 1500]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1280..=65_000))]
    mtu: Option<u16>,
    /// Sizes in bytes, with commas between; K, M and G are powers of 1024. Of the buffer of one rank; of gathers,
    /// scatters and all-to-all of all ranks' shares; of send-receive of one message. A barrier has none. What is no
    /// whole number of 4-byte values for each rank is rounded down to that. [default: 4,1KiB,64KiB,256KiB,4MiB,32MiB]
    #[arg(long, value_delimiter = ',', value_parser = size_of)]
    sizes: Option<Vec<u64>>,
    /// What to compare with, with commas between.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "openmpi,gloo"
    )]
    peers: Vec<Peer>,
    /// How kolo's bytes travel.
    #[arg(long, value_enum, default_value_t = Lane::Auto)]
    lane: Lane,
    /// kolo reduces memory from `Communicator::buffer`, which the ranks of a host share (all-reduce).
    #[arg(long)]
    shared: bool,
    /// Rounds; kolo and its peers take turns in each, and medians over the rounds are printed.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// About how long one contestant's operations of one size take in one round, in seconds.
    #[arg(long, default_value_t = 0.2, value_parser = seconds)]
    seconds: f64,
    /// How to print. JSON says behind each figure what it is of: `ranks, hosts, mtu, buffers, cores, lanes, algorithm`.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

fn size_of(text: &str) -> Result<u64, String> {
    match size::parse(text)? {
        bytes @ 4..=0x1_0000_0000 => Ok(bytes),
        bytes => Err(format!("that is {bytes} bytes; allowed is 4 to 4G")),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.001..=600.0).contains(&seconds) => Ok(seconds),
        _ => Err("allowed is 0.001 to 600 seconds".to_owned()),
    }
}

impl Options {
    fn check(&self, operation: Operation) -> anyhow::Result<()> {
        anyhow::ensure!(
            !self.shared || operation == Operation::AllReduce,
            "--shared is for all-reduce; leave it out for {}",
            operation.name()
        );
        anyhow::ensure!(
            self.hosts <= self.ranks,
            "--hosts {} with --ranks {}: give each host a rank",
            self.hosts,
            self.ranks
        );
        anyhow::ensure!(
            self.ranks > 1 || !self.shared && self.lane == Lane::Auto,
            "--ranks 1 has nobody to share memory with and no lane; leave --shared and --lane out"
        );
        anyhow::ensure!(
            !self.shared || (self.hosts == 1 && self.lane == Lane::Auto),
            "--shared is for ranks that share memory; use it with --hosts 1 and --lane auto"
        );
        anyhow::ensure!(
            operation != Operation::SendReceive || self.ranks.is_multiple_of(2),
            "--ranks is {}; send-receive has ranks in pairs, so use an even number",
            self.ranks
        );
        anyhow::ensure!(
            self.mtu.is_none() || self.hosts > 1,
            "--mtu is of the network between two hosts; use it with --hosts 2"
        );
        anyhow::ensure!(
            operation != Operation::Barrier || self.sizes.is_none(),
            "--sizes is for what ranks send each other, which in a barrier is nothing; leave it out"
        );
        anyhow::ensure!(
            !self.peers.contains(&Peer::None) || self.peers.iter().all(|peer| *peer == Peer::None),
            "--peers has none and others; leave one of them out"
        );
        Ok(())
    }

    fn mtu(&self) -> u16 {
        self.mtu.unwrap_or(1500)
    }

    /// The host of each rank.
    fn host_of(&self) -> Vec<u32> {
        (0..self.ranks)
            .map(|rank| rank * self.hosts / self.ranks)
            .collect()
    }

    /// What holds for all figures.
    fn setting(&self) -> Setting {
        Setting {
            ranks: self.ranks,
            hosts: self.hosts,
            mtu: (self.hosts > 1).then_some(self.mtu()),
            buffers: if self.shared { "shared" } else { "own" },
            cores: cores(),
        }
    }

    fn sizes(&self, operation: Operation) -> Vec<u64> {
        match operation {
            Operation::Barrier => vec![0],
            _ => self.sizes.clone().unwrap_or_else(|| SIZES.to_vec()),
        }
    }

    /// Refuses sizes for which this machine, where so many bytes are free, does not have the memory.
    fn check_memory(&self, operation: Operation, free: u64) -> anyhow::Result<()> {
        let most = self.sizes(operation).into_iter().max().unwrap_or(0);
        let needed = pattern::memory(operation, self.ranks, operation.share(most, self.ranks));
        anyhow::ensure!(
            needed <= free,
            "{} of {} by {} ranks take {} MiB for their values alone, and this machine has {} MiB left; use smaller --sizes or fewer --ranks",
            operation.name(),
            size::show(most),
            self.ranks,
            needed >> 20,
            free >> 20
        );
        Ok(())
    }

    /// What the figures are of, in words.
    fn title(&self, operation: Operation) -> String {
        let hosts = match self.hosts {
            1 => "one host".to_owned(),
            _ => format!("two hosts (network namespaces), MTU {}", self.mtu()),
        };
        let values = match operation {
            Operation::Barrier => "",
            Operation::AllReduce | Operation::Reduce | Operation::ReduceScatter => " of f32, sum",
            _ => " of f32",
        };
        let buffers = match (operation, self.shared) {
            (Operation::Barrier, _) => "",
            (_, true) => ", shared buffers",
            (_, false) => ", own buffers",
        };
        format!(
            "{}{values}: {} ranks on {hosts}, lane {}{buffers}, {} rounds of {} s",
            operation.name(),
            self.ranks,
            self.lane.name(),
            self.rounds,
            self.seconds
        )
    }
}

/// One of those that are measured.
struct Contestant {
    name: &'static str,
    group: Group,
    /// Why it is out.
    failed: Option<String>,
}

impl Contestant {
    /// Measures; if that fails the contestant is out.
    fn measure(&mut self, run: &Run) -> Option<Series> {
        if self.failed.is_some() {
            return None;
        }
        match self.group.run(run) {
            Ok(series) => Some(series),
            Err(error) => {
                self.failed = Some(format!("{error:#}"));
                None
            }
        }
    }
}

/// Says on a terminal what is being done.
struct Progress(bool);

impl Progress {
    fn say(&self, text: std::fmt::Arguments<'_>) {
        if self.0 {
            // Nothing is lost if it can't be shown.
            drop(write!(std::io::stderr(), "\r\x1b[K{text}"));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.say(format_args!(""));
    }
}

pub(crate) fn run(operation: Operation, options: &Options) -> anyhow::Result<()> {
    if let Err(error) = options.check(operation) {
        crate::refuse(&error.to_string());
    }
    if let Some(free) = free_memory() {
        options.check_memory(operation, free)?;
    }
    let progress = Progress(std::io::stderr().is_terminal());
    let load_before = load();
    let scratch = Scratch::new()?;
    let hosts = Hosts::new(options.hosts, options.mtu())?;
    progress.say(format_args!("starting kolo's ranks"));
    let kolo =
        kolo_group::start(operation, options, &hosts).context("kolo's ranks did not start")?;
    let mut contestants = vec![Contestant {
        name: "kolo",
        group: kolo,
        failed: None,
    }];
    for peer in &options.peers {
        if *peer == Peer::None || contestants.iter().any(|known| known.name == peer.name()) {
            continue;
        }
        progress.say(format_args!("starting {}", peer.name()));
        match peers::start(*peer, operation, &options.host_of(), &hosts, &scratch) {
            Ok(group) => contestants.push(Contestant {
                name: peer.name(),
                group,
                failed: None,
            }),
            Err(error) => {
                progress.say(format_args!(""));
                eprintln!("{} is missing: {error:#}", peer.name());
            }
        }
    }
    let mut rows = Vec::new();
    // What was measured before is shown all the same.
    let mut failure = None;
    for bytes in options.sizes(operation) {
        match compare(operation, options, bytes, &mut contestants, &progress) {
            Ok(row) => rows.push(row),
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    // A contestant that still waits for its turn may take memory bandwidth, but nothing else.
    drop(contestants);
    drop(progress);
    if options.format == Format::Json {
        let lines = summary::figures(operation, options.setting(), &rows);
        report::show(|out| report::json(out, &lines))?;
        return failure.map_or(Ok(()), Err);
    }
    report::show(|out| {
        writeln!(out, "{}", options.title(operation))?;
        writeln!(out, "{}", summary::legend(operation, options.ranks))?;
        let (cores, load_after) = (cores(), load());
        writeln!(
            out,
            "{cores} cores, load {load_before} before and {load_after} after"
        )?;
        summary::table(out, &rows)
    })?;
    failure.map_or(Ok(()), Err)
}

/// Processors that this process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Bytes of memory that programs can still have here, if the system says so.
fn free_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kilobytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    };
    let swap = kilobytes("SwapFree:").unwrap_or(0);
    Some((kilobytes("MemAvailable:")? + swap) << 10)
}

/// The system's load average of the last minute.
fn load() -> String {
    std::fs::read_to_string("/proc/loadavg")
        .ok()
        .and_then(|text| text.split(' ').next().map(str::to_owned))
        .unwrap_or_else(|| "unknown".to_owned())
}

/// One size: contestants are tried, then measured in turn, round by round.
fn compare(
    operation: Operation,
    options: &Options,
    bytes: u64,
    contestants: &mut [Contestant],
    progress: &Progress,
) -> anyhow::Result<Row> {
    let shown = size::show(bytes);
    let mut entries = Vec::new();
    let mut seed = 1;
    let mut plan = Vec::new();
    for contestant in contestants.iter_mut() {
        progress.say(format_args!("{shown}: trying {}", contestant.name));
        let mut best: Option<(f64, Run)> = None;
        for variant in 0..contestant.group.variants {
            let mut run = Run {
                share: operation.share(bytes, options.ranks),
                warm: 2,
                timed: if bytes <= SMALL { 20 } else { 3 },
                variant,
                seed,
                barrier: operation.wants_barrier() || bytes > SMALL,
            };
            seed += run.warm + run.timed;
            let begun = Instant::now();
            let Some(series) = contestant.measure(&run) else {
                continue;
            };
            // What takes long is filling and checking, where the operation itself does little.
            let each = begun.elapsed() / (run.warm + run.timed);
            let most = (options.seconds * LONGEST).max(1.0) / each.as_secs_f64().max(1e-9);
            let time = series.p50();
            // The shortest time: the others may be those of a machine that does something else.
            let shortest = series.times.iter().copied().fold(time, f64::min).max(0.05);
            let fit = (options.seconds * 1e6 / shortest).ceil();
            #[allow(clippy::cast_sign_loss)] // times are not negative
            let timed = fit.clamp(5.0, most.clamp(5.0, 20_000.0)) as u32;
            run.timed = timed;
            run.warm = (timed / 20).clamp(1, 200);
            if best.as_ref().is_none_or(|(fastest, _)| time < *fastest) {
                best = Some((time, run));
            }
        }
        plan.push(best.map(|(_, run)| run));
        entries.push(Entry::new(contestant.name));
    }
    for round in 1..=options.rounds {
        for ((contestant, run), entry) in contestants.iter_mut().zip(&plan).zip(&mut entries) {
            let Some(run) = run else { continue };
            progress.say(format_args!(
                "{shown}: round {round} of {}, {}",
                options.rounds, contestant.name
            ));
            let run = Run { seed, ..*run };
            seed = (seed + run.warm + run.timed) % (1 << 30);
            if let Some(series) = contestant.measure(&run) {
                entry.rounds.push(series);
            }
        }
    }
    for (contestant, entry) in contestants.iter().zip(&mut entries) {
        let Some(reason) = &contestant.failed else {
            continue;
        };
        anyhow::ensure!(
            contestant.name != "kolo",
            "kolo failed at {shown}: {reason}"
        );
        progress.say(format_args!(""));
        eprintln!("{} has no figures for {shown}: {reason}", contestant.name);
        entry.rounds.clear();
    }
    Ok(Row {
        bytes,
        real: operation.bytes(bytes, options.ranks),
        entries,
    })
}

#[cfg(test)]
mod tests;
