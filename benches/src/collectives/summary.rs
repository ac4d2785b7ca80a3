//! From times of single operations to figures.

use std::io::{self, Write};

use serde::Serialize;

use crate::report::Figure;
use crate::size;
use crate::stats::{Times, median};

use super::group::Series;
use super::wire::{How, Operation};

/// What one contestant did for one size.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) name: &'static str,
    pub(crate) rounds: Vec<Series>,
}

impl Entry {
    pub(crate) fn new(name: &'static str) -> Self {
        Self {
            name,
            rounds: Vec::new(),
        }
    }

    /// The figures, if there are any.
    pub(crate) fn figures(&self, bytes: u64) -> Option<Measured> {
        if self.rounds.is_empty() {
            return None;
        }
        let medians: Vec<f64> = self.rounds.iter().map(Series::p50).collect();
        let mut all = Times::default();
        for series in &self.rounds {
            series.times.iter().for_each(|time| all.push_micros(*time));
        }
        let p50 = median(&medians);
        Some(Measured {
            p50,
            p99: all.quantile(0.99),
            rate: (bytes > 0).then(|| bytes as f64 / p50 / 1e3),
            operations: all.len(),
        })
    }
}

/// A contestant's figures for one size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Measured {
    /// Median over the rounds of each round's median, in microseconds.
    pub(crate) p50: f64,
    /// Of all operations of all rounds.
    pub(crate) p99: f64,
    /// GB/s: size over p50.
    pub(crate) rate: Option<f64>,
    /// Operations that were timed.
    pub(crate) operations: usize,
}

/// One size. The first entry is kolo's.
#[derive(Debug)]
pub(crate) struct Row {
    /// As it was asked for.
    pub(crate) bytes: u64,
    /// What was really used: at least one value for each rank.
    pub(crate) real: u64,
    pub(crate) entries: Vec<Entry>,
}

impl Row {
    /// How kolo did it.
    fn how(&self) -> Option<&How> {
        self.entries.first()?.rounds.last()?.how.as_ref()
    }

    /// The smallest and the largest ratio of kolo's time to a peer's in one round.
    fn spread(&self, peer: &Entry) -> Option<(f64, f64)> {
        let ratios = self
            .entries
            .first()?
            .rounds
            .iter()
            .zip(&peer.rounds)
            .map(|(kolo, peer)| kolo.p50() / peer.p50());
        ratios.fold(None, |range, ratio| {
            let (low, high) = range.unwrap_or((ratio, ratio));
            Some((f64::min(low, ratio), f64::max(high, ratio)))
        })
    }
}

/// For programs: a figure, and what it is of.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Line {
    #[serde(flatten)]
    pub(crate) figure: Figure,
    #[serde(flatten)]
    pub(crate) setting: Setting,
    /// How kolo did it, see [`How`].
    pub(crate) lanes: Option<String>,
    pub(crate) algorithm: Option<String>,
}

/// What holds for all figures of a run.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Setting {
    pub(crate) ranks: u32,
    pub(crate) hosts: u32,
    /// Of the network between hosts, where there is one.
    pub(crate) mtu: Option<u16>,
    /// `own` or `shared`.
    pub(crate) buffers: &'static str,
    pub(crate) cores: usize,
}

/// Each of kolo's figures beside each peer's, or alone if there is none.
pub(crate) fn figures(operation: Operation, setting: Setting, rows: &[Row]) -> Vec<Line> {
    let mut lines = Vec::new();
    for row in rows {
        let mut entries = row
            .entries
            .iter()
            .filter_map(|entry| Some((entry.name, entry.figures(row.real)?)));
        let Some((_, kolo)) = entries.next() else {
            continue;
        };
        let peers: Vec<(&'static str, Measured)> = entries.collect();
        let how = row.how();
        let mut add = |metric, unit, of: fn(&Measured) -> Option<f64>| {
            let Some(value) = of(&kolo) else { return };
            let figure = Figure::new(operation.name(), row.bytes.to_string(), metric, unit, value);
            let mut beside: Vec<Figure> = peers
                .iter()
                .filter_map(|(name, peer)| Some(figure.beside(name, of(peer)?)))
                .collect();
            if beside.is_empty() {
                beside.push(figure);
            }
            lines.extend(beside.into_iter().map(|figure| Line {
                figure,
                setting,
                lanes: how.map(|how| how.lanes.clone()),
                algorithm: how.map(|how| how.algorithm.clone()),
            }));
        };
        add("p50", "us", |measured| Some(measured.p50));
        add("p99", "us", |measured| Some(measured.p99));
        add("algbw", "GB/s", |measured| measured.rate);
    }
    lines
}

/// What the columns mean.
pub(crate) fn legend(operation: Operation, ranks: u32) -> String {
    let times =
        "A time is from when the last rank begins an operation to when the last one ends it.";
    let ratios = "A ratio is kolo / peer of p50, less than 1 is faster; behind it its range over the rounds.";
    let ranks = f64::from(ranks);
    let bus = match operation {
        Operation::Barrier => return format!("{times}\n{ratios}"),
        Operation::AllReduce => 2.0 * (ranks - 1.0) / ranks,
        Operation::Broadcast | Operation::Reduce => 1.0,
        // There and back.
        Operation::SendReceive => 2.0,
        Operation::AllGather
        | Operation::Gather
        | Operation::Scatter
        | Operation::ReduceScatter
        | Operation::AllToAll => (ranks - 1.0) / ranks,
    };
    format!("{times}\nGB/s is algbw, size / p50 (busbw is {bus:.2} times as much).\n{ratios}")
}

/// For people.
pub(crate) fn table(out: &mut dyn Write, rows: &[Row]) -> io::Result<()> {
    writeln!(
        out,
        "{:<10} {:<8} {:>11} {:>11} {:>8} {:>8}  RATIO",
        "SIZE", "WHO", "P50 us", "P99 us", "GB/s", "TIMED"
    )?;
    for row in rows {
        let kolo = row
            .entries
            .first()
            .and_then(|entry| entry.figures(row.real));
        for entry in &row.entries {
            let Some(measured) = entry.figures(row.real) else {
                continue;
            };
            let ratio = match (kolo, row.spread(entry)) {
                (Some(kolo), Some((low, high))) if entry.name != "kolo" => {
                    format!("{:.3} ({low:.3} to {high:.3})", kolo.p50 / measured.p50)
                }
                _ => match entry.rounds.last() {
                    Some(Series { how: Some(how), .. }) => how.to_string(),
                    _ => String::new(),
                },
            };
            let or_dash = |value: Option<f64>| {
                value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"))
            };
            let shown = match (entry.name, row.bytes) {
                ("kolo", 0) => "-".to_owned(),
                ("kolo", bytes) => size::show(bytes),
                _ => String::new(),
            };
            let line = format!(
                "{shown:<10} {:<8} {:>11.2} {:>11.2} {:>8} {:>8}  {ratio}",
                entry.name,
                measured.p50,
                measured.p99,
                or_dash(measured.rate),
                measured.operations,
            );
            writeln!(out, "{}", line.trim_end())?;
        }
    }
    Ok(())
}
