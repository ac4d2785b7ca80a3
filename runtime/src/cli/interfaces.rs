//! `kolo interfaces`: which network interfaces connect the nodes.

use std::time::Duration;

use clap::Args as ClapArgs;
use kolo_core::interfaces::{COLUMNS, cells};
use kolo_transport::wire::{
    HeadReply, HeadRequest, InterfaceSelection, InterfacesQuery, NetworkReport,
};
use serde::Serialize;

use super::args::{Connect, Format};
use super::client::Client;
use super::error::CliError;
use super::output::{Cell, Output, human};
use crate::http::dto;

/// How long the head may take: the nodes' answers, of which some are waited for in vain.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) const EXAMPLES: &str = "\
Each node tries the next one on every address. An address counts if that node itself answers there, over QUIC with mutual \
TLS, and if the packets come from the interface of the same name.

Exit codes:
  0  the nodes are connected
  1  they are not; other codes are as `kolo --help` says

Examples:
  kolo interfaces
  kolo interfaces --nodes a,b,c --interfaces eth1 --no-cache
  kolo interfaces --job job-3f0a --format json";

#[derive(Debug, ClapArgs)]
#[allow(clippy::struct_field_names)] // they are the names of the flags
pub(super) struct Interfaces {
    /// What was found when this job started: its id, or an unambiguous start of it
    #[arg(long, value_name = "JOB", conflicts_with_all = ["nodes", "interfaces", "no_cache"])]
    pub(super) job: Option<String>,
    /// Only these nodes, by hostname or start of the id [default: all that live]
    #[arg(long, value_name = "NODE,...", value_delimiter = ',')]
    pub(super) nodes: Vec<String>,
    /// Only these interfaces; HOST=NAME for one host alone
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub(super) interfaces: Vec<String>,
    /// Try again, even if the answer is known (for an hour, as long as no node's interfaces change)
    #[arg(long)]
    pub(super) no_cache: bool,
}

/// Reads `eth0`, `ib0` and `b=ens3`: names for all hosts, and names for one.
pub(super) fn selection(given: &[String]) -> Result<InterfaceSelection, CliError> {
    let mut selection = InterfaceSelection::default();
    for entry in given {
        let (host, name) = match entry.split_once('=') {
            Some((host, name)) => (Some(host.trim()), name.trim()),
            None => (None, entry.trim()),
        };
        if name.is_empty() || host.is_some_and(str::is_empty) {
            return Err(CliError::Usage(format!(
                "`{}` is no network interface; expected NAME or HOST=NAME, such as eth0 or b=ens3",
                entry.escape_debug()
            )));
        }
        let names = match host {
            Some(host) => selection.by_host.entry(host.to_owned()).or_default(),
            None => &mut selection.names,
        };
        names.push(name.to_owned());
    }
    Ok(selection)
}

pub(super) async fn run(
    options: &Interfaces,
    connect: &Connect,
    format: Format,
    out: &mut Output<'_>,
) -> Result<u8, CliError> {
    let mut query = InterfacesQuery {
        job: None,
        nodes: options.nodes.clone(),
        selection: selection(&options.interfaces)?,
        no_cache: options.no_cache,
    };
    let client = Client::connect(&connect.config()).await?;
    for node in &mut query.nodes {
        *node = client.node_name(node).await?;
    }
    if let Some(text) = &options.job {
        query.job = Some(client.find(text).await?.job);
    }
    let report = ask(&client, query).await?;
    client.close().await;
    match format {
        Format::Json => out.json(&Document::from(&report))?,
        Format::Table => show(&report, out)?,
    }
    Ok(u8::from(report.problem.is_some()))
}

/// Asks the head.
pub(super) async fn ask(
    client: &Client,
    query: InterfacesQuery,
) -> Result<NetworkReport, CliError> {
    match client
        .request(&HeadRequest::Interfaces(query), PATIENCE)
        .await?
    {
        HeadReply::Interfaces(report) => Ok(report),
        _ => Err(CliError::Answer("the head".to_owned())),
    }
}

fn show(report: &NetworkReport, out: &mut Output<'_>) -> Result<(), CliError> {
    let rows = report.rows.iter().map(|row| cells(row).map(Cell::from));
    out.table(COLUMNS, &rows.collect::<Vec<_>>())?;
    out.line("")?;
    let how = match (report.cached, report.took_ms) {
        (true, _) => "known from before; --no-cache tries again".to_owned(),
        (false, 0) => "nothing had to be tried".to_owned(),
        (false, ms) => format!("found in {}", human(ms)),
    };
    match &report.problem {
        Some(problem) => out.prose(&problem.message),
        None => out.prose(&format!("chosen: {} ({how})", report.choice)),
    }
}

/// The report for programs.
#[derive(Debug, Serialize)]
struct Document<'a> {
    /// `local`, `registered`, `interface`, `per_node`, `per_pair` or `none`.
    choice: &'static str,
    /// The interface, if it is one for all.
    interface: Option<&'a str>,
    cached: bool,
    took_ms: u64,
    problem: Option<&'a str>,
    interfaces: Vec<Row<'a>>,
}

#[derive(Debug, Serialize)]
struct Row<'a> {
    node: String,
    hostname: &'a str,
    interface: &'a str,
    address: String,
    mtu: u32,
    /// Megabits a second.
    speed: Option<u32>,
    reached_by: Vec<By<'a>>,
    chosen: bool,
    why_not: Option<&'a str>,
}

#[derive(Debug, Serialize)]
struct By<'a> {
    node: String,
    hostname: &'a str,
    interface: &'a str,
    round_trip_us: u64,
}

impl<'a> From<&'a NetworkReport> for Document<'a> {
    fn from(report: &'a NetworkReport) -> Self {
        let (choice, interface) = dto::choice(&report.choice);
        Self {
            choice,
            interface,
            cached: report.cached,
            took_ms: report.took_ms,
            problem: report.problem.as_ref().map(|p| p.message.as_str()),
            interfaces: report
                .rows
                .iter()
                .map(|row| Row {
                    node: row.node.to_string(),
                    hostname: &row.hostname,
                    interface: &row.interface,
                    address: row.address.to_string(),
                    mtu: row.mtu,
                    speed: row.speed,
                    reached_by: row
                        .reached_by
                        .iter()
                        .map(|by| By {
                            node: by.node.to_string(),
                            hostname: &by.hostname,
                            interface: &by.interface,
                            round_trip_us: by.rtt_us,
                        })
                        .collect(),
                    chosen: row.chosen,
                    why_not: row.why_not.as_deref(),
                })
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(given: &[&str]) -> Result<InterfaceSelection, String> {
        let given: Vec<String> = given.iter().map(ToString::to_string).collect();
        selection(&given).map_err(|error| error.to_string())
    }

    #[test]
    fn interfaces_are_for_all_hosts_or_for_one() {
        let selection = read(&["eth0", "ib0", "b=ens3", "b=ens4"]).unwrap();
        assert_eq!(selection.names, ["eth0", "ib0"]);
        assert_eq!(selection.by_host["b"], ["ens3", "ens4"]);
        assert!(read(&[]).unwrap().is_empty());
        for bad in ["", "=eth0", "b=", "="] {
            let error = read(&[bad]).unwrap_err();
            assert!(error.contains("NAME or HOST=NAME"), "{error}");
        }
    }
}
