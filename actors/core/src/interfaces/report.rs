//! What people see of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::IpAddr;

use kolo_wire::{Interface, InterfaceRow, NetworkReport, ReachedBy, Refusal};

use super::Host;
use super::candidates::{Family, Unfit};
use super::choose::{self, Scored, milliseconds};
use super::seen::{Resolver, Seen};
use super::words::listed;

/// Rows of a table in an error.
pub(super) const MOST_ROWS: usize = 64;
/// Rows of a report, and who reached each: it must fit into a frame.
const KEPT_ROWS: usize = 1024;
const KEPT_PROBERS: usize = 8;
/// Longest reason, in characters.
const LONGEST: usize = 300;

/// The problem of a report with its table, for an error that is complete by itself. A report without a problem has none.
#[must_use]
pub fn refusal(report: &NetworkReport) -> Option<Refusal> {
    let problem = report.problem.as_ref()?;
    Some(Refusal::new(
        problem.kind,
        format!(
            "{}\n{}",
            problem.message,
            table(report, MOST_ROWS).trim_end()
        ),
    ))
}

/// The row of an address of which nothing else is known.
pub(super) fn plain_row(host: &Host, interface: &Interface, address: IpAddr) -> InterfaceRow {
    InterfaceRow {
        node: host.node,
        hostname: host.hostname.clone(),
        interface: interface.name.clone(),
        address,
        mtu: interface.mtu,
        speed: interface.speed,
        reached_by: Vec::new(),
        chosen: false,
        why_not: None,
    }
}

/// A row for every address of every node.
pub(super) fn rows(
    resolver: &Resolver<'_>,
    chosen: &BTreeSet<(usize, usize)>,
    scored: &[Scored],
) -> Vec<InterfaceRow> {
    let sites = resolver.sites;
    // By target: who tried it, in order.
    let mut probers: Vec<Vec<usize>> = vec![Vec::new(); sites.len()];
    for (prober, target) in resolver.seen.keys() {
        probers[*target].push(*prober);
    }
    let best = choose::best(scored);
    // By interface, since all links are looked at for it.
    let mut gaps: BTreeMap<(&str, Family), String> = BTreeMap::new();
    let mut rows = Vec::new();
    for (index, site) in sites.iter().enumerate() {
        for (candidate, entry) in site.candidates.iter().enumerate() {
            let mut row = plain_row(&site.host, site.interface(candidate), entry.ip);
            let mut against: Vec<String> = Vec::new();
            for prober in &probers[index] {
                let by = &sites[*prober].host;
                let seen = resolver.seen(*prober, index).iter();
                for (_, seen) in seen.filter(|(of, _)| *of == candidate) {
                    row.reached_by.extend(reached_by(by, seen));
                    against.extend(objection(&by.hostname, &row.interface, seen));
                }
            }
            let key = (site.name(candidate), entry.family);
            let own = scored
                .iter()
                .position(|one| (one.name.as_str(), one.family) == key);
            row.chosen = chosen.contains(&(index, candidate));
            row.why_not = if row.chosen {
                None
            } else if let Some(unfit) = entry.unfit {
                Some(unfit.to_string())
            } else if !against.is_empty() {
                Some(listed(&against))
            } else if let Some((own, best)) = own.zip(best) {
                Some(choose::why_not(scored, own, best))
            } else {
                let gaps = gaps.entry(key).or_insert_with(|| without(resolver, key));
                Some(gaps.clone())
            };
            rows.push(row);
        }
    }
    // The chosen ones matter most.
    if rows.len() > KEPT_ROWS {
        rows.retain(|row| row.chosen || !row.reached_by.is_empty());
        rows.truncate(KEPT_ROWS);
    }
    for row in &mut rows {
        row.reached_by.truncate(KEPT_PROBERS);
        if let Some(why) = &mut row.why_not
            && let Some((end, _)) = why.char_indices().nth(LONGEST)
        {
            why.truncate(end);
            why.push_str("...");
        }
    }
    rows
}

fn reached_by(by: &Host, seen: &Seen) -> Option<ReachedBy> {
    match seen {
        Seen::Reached {
            rtt_us,
            source: Some(source),
            ..
        } => Some(ReachedBy {
            node: by.node,
            hostname: by.hostname.clone(),
            interface: source.clone(),
            rtt_us: *rtt_us,
        }),
        _ => None,
    }
}

/// What speaks against an address of the interface `name`, by what the host `by` saw of it.
fn objection(by: &str, name: &str, seen: &Seen) -> Option<String> {
    match seen {
        Seen::Failed(why) => Some(why.clone()),
        Seen::Reached {
            source: None, from, ..
        } => Some(format!(
            "{by} comes from {from}, which is none of its addresses (NAT)"
        )),
        Seen::Reached {
            source: Some(source),
            ..
        } if source != name => Some(format!("{by} comes from its {source}")),
        Seen::Reached { at: Some(at), .. } if at != name => Some(format!("{by} arrives at {at}")),
        Seen::Reached { .. } => None,
    }
}

/// Which links of the ring an interface is not on.
fn without(resolver: &Resolver<'_>, (name, family): (&str, Family)) -> String {
    let host = |site: usize| &resolver.sites[site].host.hostname;
    let gaps: Vec<String> = resolver
        .gaps(name, family)
        .map(|(from, to)| format!("{} to {}", host(from), host(to)))
        .collect();
    if gaps.is_empty() {
        "others are used".to_owned()
    } else {
        format!("does not connect all: not {}", listed(&gaps))
    }
}

/// The columns of a report for people; [`cells`] has those of a row.
pub const COLUMNS: [&str; 7] = [
    "NODE",
    "INTERFACE",
    "ADDRESS",
    "MTU",
    "REACHED BY",
    "ROUND TRIP",
    "CHOSEN",
];

/// A row of the report for people.
#[must_use]
pub fn cells(row: &InterfaceRow) -> [String; COLUMNS.len()] {
    let by: Vec<String> = row
        .reached_by
        .iter()
        .map(|by| {
            if by.interface == row.interface {
                by.hostname.clone()
            } else {
                format!("{} ({})", by.hostname, by.interface)
            }
        })
        .collect();
    let worst = row.reached_by.iter().map(|by| by.rtt_us).max();
    [
        row.hostname.clone(),
        row.interface.clone(),
        row.address.to_string(),
        row.mtu.to_string(),
        if by.is_empty() {
            "-".to_owned()
        } else {
            listed(&by)
        },
        worst.map_or_else(|| "-".to_owned(), |us| format!("{} ms", milliseconds(us))),
        match &row.why_not {
            _ if row.chosen => "yes".to_owned(),
            Some(why) => format!("no: {why}"),
            None => "no".to_owned(),
        },
    ]
}

/// The report as lines for people, columns aligned; at most `most` rows. Addresses that never come into question (loopback,
/// down, ...) are left out if that makes it fit.
#[must_use]
pub fn table(report: &NetworkReport, most: usize) -> String {
    let dull = |row: &&InterfaceRow| {
        !row.chosen && row.why_not.as_deref() == Some(Unfit::Loopback.to_string().as_str())
    };
    let mut rows: Vec<&InterfaceRow> = report.rows.iter().collect();
    if rows.len() > most {
        rows.retain(|row| !dull(row));
    }
    let left_out = rows.len().saturating_sub(most);
    rows.truncate(most);
    let cells: Vec<_> = rows.into_iter().map(cells).collect();
    let mut widths = COLUMNS.map(str::len);
    for row in &cells {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    let header = COLUMNS.map(str::to_owned);
    for row in std::iter::once(&header).chain(&cells) {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(widths) {
            let _ = write!(line, "{cell:width$}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    if left_out > 0 {
        let _ = writeln!(text, "... and {left_out} more rows");
    }
    text
}
