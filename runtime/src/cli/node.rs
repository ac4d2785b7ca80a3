//! `kolo node`: nodes that are to be left, and may be used again.

use std::time::Duration;

use clap::{Args as ClapArgs, Subcommand};
use kolo_transport::ids::JobId;
use kolo_transport::wire::span::Span;
use kolo_transport::wire::{HeadReply, HeadRequest, NodeDrain};

use super::args::{Connect, Format, time};
use super::client::Client;
use super::error::CliError;
use super::ids::shortened;
use super::output::Output;
use crate::http::dto;

/// How long the head may take.
const ANSWER: Duration = Duration::from_secs(10);

#[derive(Debug, ClapArgs)]
pub(super) struct Node {
    #[command(subcommand)]
    command: NodeCommand,
}

#[derive(Debug, Subcommand)]
enum NodeCommand {
    /// Give a node no new work, and let elastic jobs leave the node at their next commit
    #[command(
        after_help = "Jobs that never change their members stay until they end. `kolo status` shows what is left.\n\nExamples:\n  kolo node drain host7 --deadline 10m"
    )]
    Drain(Drain),
    /// Let a drained node take work again
    #[command(after_help = "Examples:\n  kolo node undrain host7")]
    Undrain {
        /// Hostname of the node, or its id or a start of it
        #[arg(value_name = "NODE")]
        name: String,
    },
}

#[derive(Debug, ClapArgs)]
struct Drain {
    /// Hostname of the node, or its id or a start of it
    #[arg(value_name = "NODE")]
    name: String,
    /// When members of elastic jobs that are still there are ended, up to 1d
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = time)]
    deadline: Duration,
}

pub(super) async fn run(
    options: &Node,
    connect: &Connect,
    format: Format,
    out: &mut Output<'_>,
) -> Result<(), CliError> {
    let client = Client::connect(&connect.config()).await?;
    let mut is_there = true;
    let request = match &options.command {
        NodeCommand::Drain(drain) => HeadRequest::DrainNode {
            node: match client.node_named(&drain.name).await? {
                Some(node) => {
                    is_there = node.alive;
                    node.node.to_string()
                }
                None => drain.name.clone(),
            },
            deadline_ms: u64::try_from(drain.deadline.as_millis()).unwrap_or(u64::MAX),
        },
        NodeCommand::Undrain { name } => HeadRequest::UndrainNode {
            node: client.node_name(name).await?,
        },
    };
    let reply = client.request(&request, ANSWER).await?;
    let drain = match (&options.command, reply) {
        (NodeCommand::Drain(_), HeadReply::Draining(drain)) => Some(drain),
        (NodeCommand::Undrain { name }, HeadReply::Done) => {
            client.node_named(name).await?.map(|node| NodeDrain {
                node: node.node,
                hostname: node.hostname,
                leaving: Vec::new(),
                staying: node.jobs,
            })
        }
        _ => None,
    };
    client.close().await;
    let drain = drain.ok_or_else(|| CliError::Answer("the head".to_owned()))?;
    match (format, &options.command) {
        (Format::Json, _) => out.json(&dto::Drain::from(&drain)),
        (Format::Table, NodeCommand::Drain(_)) if !is_there => {
            let NodeDrain { node, hostname, .. } = drain;
            out.line(&shortened(&format!(
                "{hostname} ({node}) is not there, as `kolo status` shows; if it comes back, it takes no new work"
            )))
        }
        (Format::Table, NodeCommand::Drain(options)) => drained(options, &drain, out),
        (Format::Table, NodeCommand::Undrain { .. }) => {
            let NodeDrain { node, hostname, .. } = drain;
            out.line(&shortened(&format!("{hostname} ({node}) takes new work")))
        }
    }
}

fn drained(options: &Drain, drain: &NodeDrain, out: &mut Output<'_>) -> Result<(), CliError> {
    let NodeDrain {
        node,
        hostname,
        leaving,
        staying,
    } = drain;
    let mut lines = vec![format!("{hostname} ({node}) takes no new work")];
    if !leaving.is_empty() {
        lines.push(format!(
            "  to leave the node within {}: {}",
            Span(options.deadline),
            listed(leaving)
        ));
    }
    if !staying.is_empty() {
        lines.push(format!(
            "  to stay until their end: {}; `kolo stop` ends a job",
            listed(staying)
        ));
    }
    if leaving.is_empty() && staying.is_empty() {
        lines.push("  no job is there".to_owned());
    }
    for line in shortened(&lines.join("\n")).lines() {
        out.line(line)?;
    }
    Ok(())
}

fn listed(jobs: &[JobId]) -> String {
    let jobs: Vec<String> = jobs.iter().map(ToString::to_string).collect();
    jobs.join(", ")
}
