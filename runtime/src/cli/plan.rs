//! `kolo plan`.

use kolo_core::plan::{PlanRow, plan_hosts, plan_ranks};

use super::args::{Format, Plan};
use super::error::CliError;
use super::output::{Cell, Output};
use crate::hosts::{HostsError, List, own_name};

pub(super) fn run(options: &Plan, format: Format, out: &mut Output<'_>) -> Result<(), CliError> {
    let list = List::of(&own_name());
    let wrong = |option, error: HostsError| CliError::Usage(format!("--{option}: {error}"));
    let rows = match (&options.hosts, &options.registration) {
        (Some(hosts), _) => {
            let hosts: Vec<(String, u32)> = list
                .hosts(hosts)
                .map_err(|error| wrong("hosts", error))?
                .into_iter()
                .map(|host| (host.host, host.slots))
                .collect();
            plan_hosts(&hosts, options.min, options.max)?
        }
        (None, Some(registration)) => {
            let hosts = list.ranks(registration);
            let hosts = hosts.map_err(|error| wrong("registration", error))?;
            plan_ranks(hosts.into_iter().map(|host| (host.clone(), host)))?
        }
        (None, None) => {
            return Err(CliError::Usage(
                "nothing is to be planned; give --hosts or --registration".to_owned(),
            ));
        }
    };
    if format == Format::Json {
        return out.json(&rows);
    }
    table(&rows, out)
}

/// The ranks, each in a line.
pub(super) fn table(rows: &[PlanRow], out: &mut Output<'_>) -> Result<(), CliError> {
    let rows: Vec<[Cell; 6]> = rows
        .iter()
        .map(|row| {
            [
                row.rank.to_string(),
                row.host.clone(),
                row.local_rank.to_string(),
                row.local_size.to_string(),
                row.cross_rank.to_string(),
                row.cross_size.to_string(),
            ]
            .map(Cell::from)
        })
        .collect();
    let header = [
        "RANK",
        "HOST",
        "LOCAL_RANK",
        "LOCAL_SIZE",
        "CROSS_RANK",
        "CROSS_SIZE",
    ];
    out.table(header, &rows)
}
