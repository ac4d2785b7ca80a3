//! `--dry-run`: what would run where.

use kolo_core::head::job::problem_on;
use kolo_core::interfaces::Host;
use kolo_core::placement::{Offer, Share};
use kolo_core::plan::{PlanRow, plan_ranks};
use kolo_transport::ids::NodeId;
use kolo_transport::wire::{InterfacesQuery, NodeNetwork, Refusal};
use serde::Serialize;

use super::super::args::{Connect, Format};
use super::super::client::Client;
use super::super::error::CliError;
use super::super::interfaces;
use super::super::output::{Cell, Output};
use super::args::Run;
use super::layout;
use super::plan::{Plan, Surroundings, Target};
use super::report::Outcome;
use super::{files, place};
use crate::node::find_installed;

#[derive(Serialize)]
struct Json<'a> {
    target: &'static str,
    program: &'a str,
    args: &'a [String],
    cwd: Option<&'a str>,
    env: &'a std::collections::BTreeMap<String, String>,
    workers: &'a [PlanRow],
}

/// Where the ranks go.
struct Hosts {
    /// The host of every rank, with what tells it from others.
    names: Vec<(u64, String)>,
    /// The name of this machine, if all ranks are on it.
    only_here: Option<String>,
    /// Why the interfaces that are asked for do not connect the hosts. Hosts that only ssh reaches are not asked.
    no_network: Option<Refusal>,
}

async fn hosts(
    options: &Run,
    plan: &Plan,
    here: &Surroundings,
    connect: &Connect,
) -> Result<Hosts, CliError> {
    let repeat = |key: u64, name: &str, count: u32| {
        std::iter::repeat_n((key, name.to_owned()), count as usize)
    };
    match &plan.target {
        Target::Local => {
            let found = place::own_resources(plan)
                .find()
                .map_err(|error| CliError::Local(error.to_string()))?;
            let own = Offer {
                node: NodeId(1),
                hostname: here.hostname.clone(),
                available: found.resources.clone(),
                total: found.resources,
            };
            place_on(plan, &[own])?;
            Ok(Hosts {
                names: repeat(0, &here.hostname, plan.workers).collect(),
                only_here: Some(here.hostname.clone()),
                no_network: interfaces_here(plan, &here.hostname)?,
            })
        }
        Target::Hosts(hosts) => {
            let ssh = options.ssh.options();
            let places = crate::ssh::locate(hosts, &here.hostname, &ssh).await?;
            let shares = layout::shares(options, hosts, plan.workers)?;
            let names = shares
                .iter()
                .flat_map(|(index, workers)| repeat(*index as u64, &hosts[*index].host, *workers));
            let only_here = match &shares[..] {
                [(only, _)] if places[*only].here => Some(hosts[*only].host.clone()),
                _ => None,
            };
            Ok(Hosts {
                names: names.collect(),
                no_network: match &only_here {
                    Some(host) => interfaces_here(plan, host)?,
                    None => None,
                },
                only_here,
            })
        }
        Target::Cluster => {
            let client = Client::connect(&connect.config()).await?;
            let cluster = client.cluster().await?;
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
            let shares = place_on(plan, &offers)?;
            let name = |id| {
                offers
                    .iter()
                    .find(|offer| offer.node == id)
                    .map_or("", |offer| offer.hostname.as_str())
            };
            let names = shares
                .iter()
                .flat_map(|share| repeat(share.node.0, name(share.node), share.workers));
            let selection = &plan.spec.interfaces;
            let mut no_network = None;
            if !selection.is_empty() {
                let query = InterfacesQuery {
                    nodes: shares.iter().map(|share| share.node.to_string()).collect(),
                    selection: selection.clone(),
                    no_cache: plan.spec.no_cache,
                    ..InterfacesQuery::default()
                };
                no_network = interfaces::ask(&client, query).await?.problem;
            }
            client.close().await;
            Ok(Hosts {
                names: names.collect(),
                only_here: None,
                no_network,
            })
        }
    }
}

fn place_on(plan: &Plan, offers: &[Offer]) -> Result<Vec<Share>, CliError> {
    kolo_core::placement::place(plan.spec.placement, &plan.spec.per_worker, offers)
        .map_err(|error| Refusal::from(error).into())
}

/// Why this machine, alone, does not have the interfaces that are asked for.
fn interfaces_here(plan: &Plan, name: &str) -> Result<Option<Refusal>, CliError> {
    let selection = &plan.spec.interfaces;
    if selection.is_empty() {
        return Ok(None);
    }
    let listen = crate::local::LocalConfig::default().listen;
    let interfaces = kolo_transport::interfaces::here()
        .map_err(|error| CliError::Local(format!("the network interfaces: {error}")))?;
    let host = Host {
        node: NodeId(1),
        hostname: name.to_owned(),
        address: listen,
        network: Some(NodeNetwork {
            listen,
            host: kolo_transport::interfaces::host(),
            interfaces,
        }),
    };
    Ok(kolo_core::interfaces::plan(vec![host], selection).err())
}

/// What this machine says of the program, if it is the only host.
async fn problem_here(plan: &Plan, only_here: Option<String>) -> Option<Refusal> {
    let host = only_here?;
    let problem = find_installed(plan.spec.installed.as_ref()?).await.err()?;
    Some(problem_on(&problem, &[host]))
}

/// Prints the plan, or says what a run would end with before anything is started.
pub(crate) async fn dry_run(
    options: &Run,
    plan: &Plan,
    here: &Surroundings,
    connect: &Connect,
    format: Format,
    out: &mut Output<'_>,
) -> Result<Option<Outcome>, CliError> {
    files::try_to_prepare(plan.output_dir.as_deref())?;
    let hosts = hosts(options, plan, here, connect).await?;
    let refusal = match hosts.no_network {
        Some(refusal) => Some(refusal),
        None => problem_here(plan, hosts.only_here).await,
    };
    if let Some(refusal) = refusal {
        return Ok(Some(Outcome {
            refusal: Some(refusal),
            workers: plan.workers,
            ..Outcome::default()
        }));
    }
    let rows = plan_ranks(hosts.names.into_iter())?;
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
        return Ok(None);
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
    Ok(None)
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
