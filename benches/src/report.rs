//! Figures, as a table for people or one JSON object a line for programs.

use std::io::{self, BufWriter, Write};

use anyhow::Context as _;
use serde::Serialize;

/// One measured figure, beside a peer's from the same run where there is one.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Figure {
    /// The benchmark: `call`, `spawn`.
    pub(crate) bench: &'static str,
    /// What varied: a number of workers, a way of calling.
    pub(crate) case: String,
    /// What was measured: `p50`, `p99`, `rate`.
    pub(crate) metric: &'static str,
    /// Its unit.
    pub(crate) unit: &'static str,
    /// kolo's figure.
    pub(crate) value: f64,
    /// What it is compared with.
    pub(crate) peer: Option<&'static str>,
    /// The peer's figure.
    pub(crate) peer_value: Option<f64>,
    /// `value / peer_value`.
    pub(crate) ratio: Option<f64>,
}

impl Figure {
    pub(crate) fn new(
        bench: &'static str,
        case: impl Into<String>,
        metric: &'static str,
        unit: &'static str,
        value: f64,
    ) -> Self {
        Self {
            bench,
            case: case.into(),
            metric,
            unit,
            value,
            peer: None,
            peer_value: None,
            ratio: None,
        }
    }

    /// The same figure beside a peer's.
    pub(crate) fn beside(&self, peer: &'static str, peer_value: f64) -> Self {
        Self {
            peer: Some(peer),
            peer_value: Some(peer_value),
            ratio: Some(self.value / peer_value),
            ..self.clone()
        }
    }
}

/// How to print.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// Aligned columns.
    Table,
    /// One object a line: `bench, case, metric, unit, value, peer, peer_value, ratio`.
    Json,
}

/// Writes to the standard output. Who reads it may have enough and go (`| head`): that is no error.
pub(crate) fn show(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> anyhow::Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    match write(&mut out).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("the figures can't be written"),
    }
}

/// Prints the figures.
pub(crate) fn print(figures: &[Figure], format: Format) -> anyhow::Result<()> {
    show(|out| match format {
        Format::Json => json(out, figures),
        Format::Table => table(out, figures),
    })
}

/// One object a line.
pub(crate) fn json(out: &mut dyn Write, rows: &[impl Serialize]) -> io::Result<()> {
    for row in rows {
        serde_json::to_writer(&mut *out, row)?;
        writeln!(out)?;
    }
    Ok(())
}

/// For people.
pub(crate) fn table(out: &mut dyn Write, figures: &[Figure]) -> io::Result<()> {
    writeln!(
        out,
        "{:<8} {:<26} {:<10} {:>12} {:<8} {:<22} {:>12} {:>7}",
        "BENCH", "CASE", "METRIC", "KOLO", "UNIT", "PEER", "PEER'S", "RATIO"
    )?;
    for f in figures {
        writeln!(
            out,
            "{:<8} {:<26} {:<10} {:>12} {:<8} {:<22} {:>12} {:>7}",
            f.bench,
            f.case,
            f.metric,
            number(f.value),
            f.unit,
            f.peer.unwrap_or("-"),
            f.peer_value.map_or_else(|| "-".to_owned(), number),
            f.ratio
                .map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}")),
        )?;
    }
    Ok(())
}

fn number(value: f64) -> String {
    if value >= 1000.0 {
        format!("{value:.0}")
    } else {
        format!("{value:.2}")
    }
}
