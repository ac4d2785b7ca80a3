//! Which algorithm is chosen, and what it is expected to cost: no rank is started.

use std::io::{self, Write};
use std::num::NonZero;

use kolo::collectives::operation::{Operation, OperationKind};
use kolo::collectives::schedule::{Algorithm, Choices, Class, Model, Shape, Tuning, predict};
use kolo::collectives::{DType, ReduceOp, way_in_shared_memory};
use serde::Serialize;

use crate::report::{self, Format};
use crate::size;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Numbers of ranks, with commas between.
    #[arg(long, value_delimiter = ',', default_value = "2,4,8,16", value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    ranks: Vec<u32>,
    /// Hosts that the ranks are spread over; more hosts than ranks count as one rank each.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    hosts: u32,
    /// Sizes in bytes, with commas between; K, M and G are powers of 1024. Of the buffer of one rank; of gathers,
    /// scatters and all-to-all of all shares.
    #[arg(long, value_delimiter = ',', default_value = "4,1K,64K,256K,1M,4M,32M,128M", value_parser = size_of)]
    sizes: Vec<u64>,
    /// The operation, as the commands of this program are called, or adasum. One that is unknown lists them all.
    #[arg(long, default_value = "all_reduce", value_parser = operation)]
    operation: (OperationKind, Option<ReduceOp>),
    /// Use this algorithm. One that can't do the operation lists those that can.
    #[arg(long)]
    force: Option<Algorithm>,
    /// A link inside a host: latency in us, busy time for a message in us, GB/s.
    #[arg(long, value_name = "LATENCY,BUSY,GBS", value_parser = class)]
    inside: Option<Class>,
    /// A host's link to the others: latency in us, busy time for a message in us, GB/s.
    #[arg(long, value_name = "LATENCY,BUSY,GBS", value_parser = class)]
    across: Option<Class>,
    /// GB/s at which values are combined.
    #[arg(long, value_name = "GBS", value_parser = rate)]
    combine: Option<f64>,
    /// List every algorithm, the cheapest first.
    #[arg(long)]
    all: bool,
    /// How to print; json is one object a line, of one algorithm for one size.
    #[arg(long, value_enum, default_value_t = Format::Table, hide_possible_values = true, value_name = "table|json")]
    format: Format,
}

pub(crate) fn operation(name: &str) -> Result<(OperationKind, Option<ReduceOp>), String> {
    // The commands have dashes, and one another name.
    let name = match &*name.replace('-', "_") {
        "send_receive" => OperationKind::SendReceive.name().to_owned(),
        name => name.to_owned(),
    };
    let name = name.as_str();
    if name == "adasum" {
        return Ok((OperationKind::AllReduce, Some(ReduceOp::Adasum)));
    }
    let known = OperationKind::ALL
        .into_iter()
        .filter(|kind| *kind != OperationKind::AllGatherCounts);
    known
        .clone()
        .find(|kind| kind.name() == name)
        .map(|kind| (kind, None))
        .ok_or_else(|| {
            let names: Vec<&str> = known.map(OperationKind::name).collect();
            format!(
                "`{name}` is no operation; there are adasum, {}",
                names.join(", ")
            )
        })
}

fn size_of(text: &str) -> Result<u64, String> {
    const MOST: u64 = 1 << 40;
    match size::parse(text)? {
        bytes @ 0..=MOST => Ok(bytes),
        bytes => Err(format!("that is {bytes} bytes; allowed is up to 1024G")),
    }
}

/// Without those that came before.
fn distinct<T: PartialEq + Copy>(values: &[T]) -> Vec<T> {
    let mut found = Vec::new();
    for value in values {
        if !found.contains(value) {
            found.push(*value);
        }
    }
    found
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate.is_finite() => Ok(rate),
        _ => Err(format!(
            "`{text}` is no rate; write GB/s, more than 0, such as 1.2"
        )),
    }
}

fn class(text: &str) -> Result<Class, String> {
    let wrong = || {
        format!(
            "`{text}` is no link; write latency in us, busy time for a message in us and GB/s with commas between, such as 30,5,1.2"
        )
    };
    let fields: Vec<&str> = text.split(',').collect();
    let [latency, busy, gbs] = fields[..] else {
        return Err(wrong());
    };
    let micros = |text: &str| match text.parse::<f64>() {
        Ok(value) if value >= 0.0 && value.is_finite() => Ok(value * 1e-6),
        _ => Err(wrong()),
    };
    Ok(Class {
        alpha: micros(latency)?,
        overhead: micros(busy)?,
        beta: 1e-9 / rate(gbs).map_err(|_| wrong())?,
    })
}

/// One line.
#[derive(Debug, Serialize)]
struct Row {
    bench: &'static str,
    operation: &'static str,
    ranks: u32,
    hosts: u32,
    bytes: u64,
    algorithm: &'static str,
    /// Whether it is the one that is used.
    chosen: bool,
    /// Expected, in microseconds.
    micros: f64,
    steps: f64,
    /// Bytes that the busiest rank sends inside its host.
    inside_bytes: f64,
    /// Bytes that the busiest host sends to others.
    across_bytes: f64,
    /// Only for pipelined algorithms: bytes of a segment.
    segment: Option<u64>,
    /// How ranks of this machine would do it that share memory, if they do.
    shared_memory: Option<&'static str>,
}

/// One rank's part of an operation on so many bytes, as `--sizes` counts them.
fn operation_of(kind: OperationKind, op: Option<ReduceOp>, ranks: u32, bytes: u64) -> Operation {
    let shares = match kind {
        OperationKind::AllGather
        | OperationKind::AllGatherVarcount
        | OperationKind::Gather
        | OperationKind::GatherVarcount
        | OperationKind::Scatter
        | OperationKind::ScatterVarcount
        | OperationKind::AllToAll
        | OperationKind::AllToAllVarcount => u64::from(ranks),
        _ => 1,
    };
    let is_reduction = matches!(
        kind,
        OperationKind::AllReduce | OperationKind::Reduce | OperationKind::ReduceScatter
    );
    let has_root = matches!(
        kind,
        OperationKind::Reduce
            | OperationKind::Broadcast
            | OperationKind::Gather
            | OperationKind::GatherVarcount
            | OperationKind::Scatter
    );
    let count = bytes.div_ceil(shares);
    Operation {
        reduce: op.or(is_reduction.then_some(ReduceOp::Sum)),
        root: has_root.then_some(0),
        rows: count,
        ..Operation::new(kind, Some(DType::U8), count)
    }
}

fn rows(options: &Options) -> Vec<Row> {
    let mut model = Model::default();
    model.inside = options.inside.unwrap_or(model.inside);
    model.across = options.across.unwrap_or(model.across);
    model.gamma = options.combine.map_or(model.gamma, |rate| 1e-9 / rate);
    let tuning = Tuning {
        model,
        force: options.force,
        segment: None,
    };
    let (kind, op) = options.operation;
    let able = options.able();
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
    let mut rows = Vec::new();
    let sizes = distinct(&options.sizes);
    for ranks in distinct(&options.ranks) {
        let shape = Shape::even(ranks, options.hosts);
        let mut choices = Choices::new(tuning, shape);
        let shares = shape.hosts == 1 && options.force.is_none();
        for &bytes in &sizes {
            let chosen = choices.choose(kind, op, bytes);
            let operation = operation_of(kind, op, ranks, bytes);
            let shared_memory = shares
                .then(|| way_in_shared_memory(&operation, ranks, processors))
                .flatten();
            let row = |algorithm: Algorithm| {
                let segment = Some(choices.segment(kind, algorithm, bytes)).filter(|log| *log > 0);
                let segment = segment.map(|log| 1_u64 << log);
                let cost = predict(&model, shape, kind, algorithm, bytes as f64);
                Row {
                    bench: "plan",
                    operation: if op.is_some() { "adasum" } else { kind.name() },
                    ranks,
                    hosts: shape.hosts,
                    bytes,
                    algorithm: algorithm.name(),
                    chosen: algorithm == chosen,
                    micros: cost.seconds * 1e6,
                    steps: cost.steps,
                    inside_bytes: cost.inside,
                    across_bytes: cost.across,
                    segment,
                    shared_memory,
                }
            };
            if options.all && ranks > 1 {
                let mut all: Vec<Row> = able.iter().copied().map(row).collect();
                all.sort_by(|a, b| a.micros.total_cmp(&b.micros));
                rows.append(&mut all);
            } else {
                rows.push(row(chosen));
            }
        }
    }
    rows
}

impl Options {
    /// The algorithms that can do the operation.
    fn able(&self) -> &'static [Algorithm] {
        match self.operation {
            (_, Some(ReduceOp::Adasum)) => Algorithm::ADASUM,
            (kind, _) => Algorithm::able(kind),
        }
    }

    fn check(&self) -> Result<(), String> {
        if let Some(algorithm) = self.force.filter(|one| !self.able().contains(one)) {
            let names: Vec<&str> = self.able().iter().map(|one| one.name()).collect();
            return Err(format!(
                "--force {algorithm} can't do that operation; these can: {}",
                names.join(", ")
            ));
        }
        let odd = self.ranks.iter().find(|ranks| !ranks.is_power_of_two());
        if let (Some(ReduceOp::Adasum), Some(ranks)) = (self.operation.1, odd) {
            return Err(format!("--ranks has {ranks}; adasum is for powers of two"));
        }
        if self.across.is_some() && self.hosts == 1 {
            return Err(
                "--across is about the network between hosts; say with --hosts how many there are"
                    .to_owned(),
            );
        }
        Ok(())
    }
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    if let Err(why) = options.check() {
        crate::refuse(&why);
    }
    let rows = rows(options);
    report::show(|out| match options.format {
        Format::Json => report::json(out, &rows),
        Format::Table => table(out, &rows, options.all),
    })
}

/// For people. The chosen ones are marked where there are others.
fn table(out: &mut dyn Write, rows: &[Row], all: bool) -> io::Result<()> {
    writeln!(
        out,
        "Over links, as the model of this version expects it; nothing was measured. Ranks of one host that share memory do it there, in the way of the last column."
    )?;
    if all {
        writeln!(out, "A * is behind the algorithm that is chosen.")?;
    }
    writeln!(
        out,
        "{:<20} {:>7} {:>6} {:>10}  {:<20} {:>12} {:>8} {:>12} {:>12} {:>9}  IN SHARED MEMORY",
        "OPERATION",
        "RANKS",
        "HOSTS",
        "SIZE",
        "ALGORITHM",
        "EXPECTED us",
        "STEPS",
        "IN HOST MB",
        "BETWEEN MB",
        "SEGMENT"
    )?;
    for row in rows {
        let mark = if all && row.chosen { "*" } else { "" };
        writeln!(
            out,
            "{:<20} {:>7} {:>6} {:>10}  {:<20} {:>12.1} {:>8} {:>12.3} {:>12.3} {:>9}  {}",
            row.operation,
            row.ranks,
            row.hosts,
            size::show(row.bytes),
            format!("{}{mark}", row.algorithm),
            row.micros,
            row.steps,
            row.inside_bytes / 1e6,
            row.across_bytes / 1e6,
            row.segment.map_or_else(|| "-".to_owned(), size::show),
            row.shared_memory.unwrap_or("-"),
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Args {
        #[command(flatten)]
        options: Options,
    }

    fn rows_of(args: &[&str]) -> Vec<Row> {
        let args = std::iter::once("plan").chain(args.iter().copied());
        rows(&Args::try_parse_from(args).unwrap().options)
    }

    #[test]
    fn a_table_has_a_row_for_every_number_and_size() {
        let sizes = ["--hosts", "8", "--sizes", "4,32M,4"];
        let rows = rows_of(&[&["--ranks", "1,2,65536,2"], &sizes[..]].concat());
        assert_eq!(rows.len(), 6);
        assert!(rows.iter().all(|row| row.chosen));
        assert_eq!(
            (rows[0].algorithm, rows[1].hosts, rows[4].hosts),
            ("local", 1, 8)
        );
        assert!(rows[5].micros > rows[4].micros);
    }

    #[test]
    fn all_algorithms_are_listed_the_cheapest_first() {
        let rows = rows_of(&["--ranks", "16", "--hosts", "2", "--sizes", "1M", "--all"]);
        assert_eq!(rows.len(), Algorithm::able(OperationKind::AllReduce).len());
        assert!(rows[0].chosen && rows.iter().filter(|row| row.chosen).count() == 1);
        assert!(rows.windows(2).all(|pair| pair[0].micros <= pair[1].micros));
        let forced = rows_of(&["--ranks", "16", "--sizes", "4", "--force", "ring"]);
        assert_eq!(forced[0].algorithm, "ring");
        let adasum = rows_of(&["--ranks", "8", "--sizes", "4", "--operation", "adasum"]);
        assert_eq!(adasum[0].operation, "adasum");
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (args, says) in [
            (
                ["--operation", "sum"],
                "is no operation; there are adasum, all_reduce",
            ),
            (
                ["--force", "magic"],
                "no algorithm is called `magic`; there are local, flat",
            ),
            (["--across", "1,2"], "is no link"),
            (["--combine", "0"], "is no rate"),
            (["--sizes", "4X"], "is no size"),
            (["--sizes", "4,2048G"], "allowed is up to 1024G"),
        ] {
            let error = Args::try_parse_from(["plan", args[0], args[1]]).unwrap_err();
            assert!(error.to_string().contains(says), "{error}");
        }
    }

    #[test]
    fn options_that_do_not_go_together_are_refused() {
        let check = |args: &[&str]| {
            let args = std::iter::once("plan").chain(args.iter().copied());
            Args::try_parse_from(args).unwrap().options.check()
        };
        let odd = check(&["--operation", "adasum", "--ranks", "4,6"]);
        assert_eq!(
            odd.unwrap_err(),
            "--ranks has 6; adasum is for powers of two"
        );
        assert!(check(&["--operation", "adasum", "--ranks", "4,8"]).is_ok());
        let able = ["--operation", "barrier", "--force", "dissemination"];
        assert!(check(&able).is_ok());
        let unable = check(&["--operation", "barrier", "--force", "ring"]);
        assert!(unable.unwrap_err().contains("these can: dissemination"));
        let alone = check(&["--across", "30,5,1"]);
        assert!(alone.unwrap_err().contains("--hosts"));
        assert!(check(&["--across", "30,5,1", "--hosts", "2"]).is_ok());
    }

    #[test]
    fn ranks_of_one_host_may_share_memory() {
        let ways = |args: &[&str]| -> Vec<_> {
            rows_of(args).iter().map(|row| row.shared_memory).collect()
        };
        let sizes = ["--ranks", "2", "--sizes", "4,8M"];
        assert_eq!(ways(&sizes), [Some("flat"), Some("slices")]);
        let hosts = [&sizes[..], &["--hosts", "2"]].concat();
        assert_eq!(ways(&hosts), [None; 2]);
        let forced = [&sizes[..], &["--force", "ring"]].concat();
        assert_eq!(ways(&forced), [None; 2]);
        // Of all shares together.
        let gather = [
            "--ranks",
            "2",
            "--sizes",
            "1020K,1M",
            "--operation",
            "gather",
        ];
        assert_eq!(ways(&gather), [Some("flat"), Some("pieces")]);
        let scatter = [
            "--ranks",
            "2",
            "--sizes",
            "1M",
            "--operation",
            "reduce-scatter",
        ];
        assert_eq!(ways(&scatter), [Some("flat")]);
        assert_eq!(ways(&["--ranks", "1,1000", "--sizes", "4"]), [None; 2]);
        let adasum = ["--ranks", "2", "--sizes", "4", "--operation", "adasum"];
        assert_eq!(ways(&adasum), [None]);
    }

    #[test]
    fn operations_are_called_as_the_commands() {
        for name in ["all-reduce", "send-receive", "all-to-all", "barrier"] {
            assert!(operation(name).is_ok(), "{name}");
        }
    }
}
