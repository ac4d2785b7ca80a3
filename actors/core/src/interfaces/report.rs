//! What people see of it.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use kolo_wire::{InterfaceRow, NetworkReport, ReachedBy, Refusal};

use super::candidates::Unfit;
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

/// A row for every address of every node.
pub(super) fn rows(
    resolver: &Resolver<'_>,
    chosen: &BTreeSet<(usize, usize)>,
    scored: &[Scored],
) -> Vec<InterfaceRow> {
    let sites = resolver.sites;
    let count = sites.len();
    // By target: who tried it.
    let mut probers: Vec<Vec<usize>> = vec![Vec::new(); count];
    for (prober, target) in resolver.seen.keys() {
        probers[*target].push(*prober);
    }
    let best = choose::best(scored);
    let mut gaps: std::collections::BTreeMap<(String, super::candidates::Family), String> =
        std::collections::BTreeMap::new();
    let mut rows = Vec::new();
    for (index, site) in sites.iter().enumerate() {
        probers[index].sort_unstable();
        for (candidate, entry) in site.candidates.iter().enumerate() {
            let interface = site.interface(candidate);
            let mut reached_by = Vec::new();
            let mut against: Vec<String> = Vec::new();
            for prober in &probers[index] {
                let by = &sites[*prober].host;
                for (_, seen) in resolver
                    .seen(*prober, index)
                    .iter()
                    .filter(|(of, _)| *of == candidate)
                {
                    match seen {
                        Seen::Reached {
                            rtt_us,
                            from,
                            source,
                            at,
                        } => {
                            if let Some(source) = source {
                                reached_by.push(ReachedBy {
                                    node: by.node,
                                    hostname: by.hostname.clone(),
                                    interface: source.clone(),
                                    rtt_us: *rtt_us,
                                });
                                if *source != interface.name {
                                    against
                                        .push(format!("{} comes from its {source}", by.hostname));
                                } else if let Some(at) =
                                    at.as_ref().filter(|at| **at != interface.name)
                                {
                                    against.push(format!("{} arrives at {at}", by.hostname));
                                }
                            } else {
                                against.push(format!(
                                    "{} comes from {from}, which is none of its addresses (NAT)",
                                    by.hostname
                                ));
                            }
                        }
                        Seen::Failed(why) => against.push(format!("{}: {why}", by.hostname)),
                        Seen::Skipped(why) => against.push(why.clone()),
                    }
                }
            }
            let is_chosen = chosen.contains(&(index, candidate));
            let why_not = if is_chosen {
                None
            } else if let Some(unfit) = entry.unfit {
                Some(unfit.to_string())
            } else if !against.is_empty() {
                Some(listed(&against))
            } else if let Some(better) = better(resolver, scored, best, index, candidate) {
                Some(better)
            } else {
                let key = (interface.name.clone(), entry.family);
                let text = gaps.entry(key).or_insert_with_key(|(name, family)| {
                    let gaps: Vec<String> = resolver
                        .gaps(name, *family)
                        .iter()
                        .map(|(from, to)| {
                            format!(
                                "{} to {}",
                                sites[*from].host.hostname, sites[*to].host.hostname
                            )
                        })
                        .collect();
                    if gaps.is_empty() {
                        "others are used".to_owned()
                    } else {
                        format!("does not connect all: not {}", listed(&gaps))
                    }
                });
                Some(text.clone())
            };
            rows.push(InterfaceRow {
                node: site.host.node,
                hostname: site.host.hostname.clone(),
                interface: interface.name.clone(),
                address: entry.ip,
                mtu: interface.mtu,
                speed: interface.speed,
                reached_by,
                chosen: is_chosen,
                why_not,
            });
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

/// What speaks against an address on a link that connects all.
fn better(
    resolver: &Resolver<'_>,
    scored: &[Scored],
    best: Option<usize>,
    site: usize,
    candidate: usize,
) -> Option<String> {
    let name = resolver.sites[site].name(candidate);
    let family = resolver.sites[site].candidates[candidate].family;
    let own = scored
        .iter()
        .position(|one| one.name == name && one.family == family)?;
    let best = best?;
    Some(if own == best {
        format!("another address of {name} is used")
    } else {
        choose::why_not(scored, own, best)
    })
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
