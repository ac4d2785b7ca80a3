//! `--dry-run`: what would run where.

use kolo_actors::placement::{Offer, place};
use kolo_actors::plan::{PlanRow, plan_ranks};
use serde::Serialize;

use super::super::args::{Connect, Format};
use super::super::client::Client;
use super::super::error::CliError;
use super::super::output::{Cell, Output};
use super::args::Run;
use super::layout;
use super::plan::{Plan, Surroundings, Target};

#[derive(Serialize)]
struct Json<'a> {
    target: &'static str,
    program: &'a str,
    args: &'a [String],
    cwd: Option<&'a str>,
    env: &'a std::collections::BTreeMap<String, String>,
    workers: &'a [PlanRow],
}

/// The host of every rank, with what tells it from others.
async fn hosts(
    options: &Run,
    plan: &Plan,
    here: &Surroundings,
    connect: &Connect,
) -> Result<Vec<(u64, String)>, CliError> {
    let repeat = |key: u64, name: &str, count: u32| {
        std::iter::repeat_n((key, name.to_owned()), count as usize)
    };
    match &plan.target {
        Target::Local => Ok(repeat(0, &here.hostname, plan.workers).collect()),
        Target::Hosts(hosts) => {
            crate::ssh::are_here(hosts, &here.hostname, &options.ssh.options()).await?;
            let shares = layout::shares(options, hosts, plan.workers)?;
            let names = shares
                .iter()
                .flat_map(|(index, workers)| repeat(*index as u64, &hosts[*index].host, *workers));
            Ok(names.collect())
        }
        Target::Cluster => {
            let client = Client::connect(&connect.config()).await?;
            let cluster = client.cluster().await?;
            client.close().await;
            let offers: Vec<Offer> = cluster
                .nodes
                .iter()
                .filter(|node| node.alive && !node.draining)
                .map(|node| Offer {
                    node: node.node,
                    hostname: node.hostname.clone(),
                    available: node.available.clone(),
                    total: node.total.clone(),
                })
                .collect();
            let shares = place(plan.spec.placement, &plan.spec.per_worker, &offers)
                .map_err(|error| CliError::Local(error.to_string()))?;
            let name = |id| {
                offers
                    .iter()
                    .find(|offer| offer.node == id)
                    .map_or("", |offer| offer.hostname.as_str())
            };
            let names = shares
                .iter()
                .flat_map(|share| repeat(share.node.0, name(share.node), share.workers));
            Ok(names.collect())
        }
    }
}

/// Prints the plan.
pub(crate) async fn dry_run(
    options: &Run,
    plan: &Plan,
    here: &Surroundings,
    connect: &Connect,
    format: Format,
    out: &mut Output<'_>,
) -> Result<u8, CliError> {
    for note in &plan.notes {
        super::job::say(note);
    }
    let hosts = hosts(options, plan, here, connect).await?;
    let rows = plan_ranks(hosts.into_iter())?;
    let (program, cwd) = plan
        .spec
        .installed
        .as_ref()
        .map(|installed| (installed.program.as_str(), installed.cwd.as_deref()))
        .unwrap_or_default();
    let target = match plan.target {
        Target::Local => "this machine",
        Target::Cluster => "the cluster",
        Target::Hosts(_) => "hosts",
    };
    if format == Format::Json {
        out.json(&Json {
            target,
            program,
            args: &plan.spec.args,
            cwd,
            env: &plan.spec.env,
            workers: &rows,
        })?;
        return Ok(0);
    }
    let table: Vec<[Cell; 6]> = rows
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
    out.table(header, &table)?;
    let words: Vec<String> = std::iter::once(program.to_owned())
        .chain(plan.spec.args.iter().cloned())
        .map(|word| quoted(&word))
        .collect();
    out.line(&format!(
        "on {target}, in {}: {}",
        cwd.unwrap_or("."),
        words.join(" ")
    ))?;
    for (name, value) in &plan.spec.env {
        out.line(&format!("  {name}={}", quoted(value)))?;
    }
    Ok(0)
}

/// As a shell would need it.
fn quoted(word: &str) -> String {
    let plain = |char: char| char.is_ascii_alphanumeric() || "-_./=:,@%+".contains(char);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_as_a_shell_needs_it() {
        assert_eq!(quoted("--lr=0.1"), "--lr=0.1");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }
}
