//! `kolo plan`.

use kolo_actors::plan::{plan_hosts, plan_registration};

use super::args::{Format, Plan};
use super::error::CliError;
use super::output::{Cell, Output};
use crate::hosts::parse_hosts;

pub(super) fn run(options: &Plan, format: Format, out: &mut Output<'_>) -> Result<(), CliError> {
    let rows = match (&options.hosts, &options.registration) {
        (Some(hosts), _) => {
            let hosts: Vec<(String, u32)> = parse_hosts(hosts)
                .map_err(|error| CliError::Usage(format!("--hosts: {error}")))?
                .into_iter()
                .map(|host| (host.host, host.slots))
                .collect();
            plan_hosts(&hosts, options.min, options.max)?
        }
        (None, Some(registration)) => plan_registration(registration)?,
        (None, None) => {
            return Err(CliError::Usage(
                "nothing is to be planned; give --hosts or --registration".to_owned(),
            ));
        }
    };
    if format == Format::Json {
        return out.json(&rows);
    }
    let rows: Vec<[Cell; 7]> = rows
        .iter()
        .map(|row| {
            [
                row.host.clone(),
                row.rank.to_string(),
                row.size.to_string(),
                row.local_rank.to_string(),
                row.local_size.to_string(),
                row.cross_rank.to_string(),
                row.cross_size.to_string(),
            ]
            .map(Cell::from)
        })
        .collect();
    let header = [
        "HOST",
        "RANK",
        "SIZE",
        "LOCAL_RANK",
        "LOCAL_SIZE",
        "CROSS_RANK",
        "CROSS_SIZE",
    ];
    out.table(header, &rows)
}
