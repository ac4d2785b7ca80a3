//! `kolo token` and `kolo revoke`: who may join, and who may stay no longer.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, Subcommand, ValueEnum};
use kolo_transport::identity::Role;
use kolo_transport::wire::span::Span;
use kolo_transport::wire::{
    HeadReply, HeadRequest, NodeInfo, Refusal, RefusalKind, RevokedMember, TokenEntry,
};
use serde::Serialize;

use super::args::{Connect, Format, count};
use super::client::Client;
use super::error::CliError;
use super::ids::pick;
use super::output::{Cell, Output, Tone, now_ms};
use crate::private_file;
use crate::settings::values::token_life;

/// How long the head may take: it tells the nodes before it answers.
const ANSWER: Duration = Duration::from_secs(15);

#[derive(Debug, ClapArgs)]
pub(super) struct Token {
    #[command(subcommand)]
    command: TokenCommand,
}

#[derive(Debug, Subcommand)]
enum TokenCommand {
    /// Make a token with which nodes or drivers join; it is shown this once
    #[command(
        after_help = "Examples:\n  kolo token create --role node --ttl 1h --uses 10 --out node.token\n  kolo --credentials /var/lib/kolo/admin token create --role driver --uses 1 > driver.token"
    )]
    Create(Create),
    /// Show all tokens, without their secrets
    #[command(after_help = "Examples:\n  kolo token list")]
    List,
    /// End a token; those that have joined with it stay
    #[command(after_help = "Examples:\n  kolo token revoke token-3f0a9b12")]
    Revoke(RevokeToken),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum JoinRole {
    Node,
    Driver,
}

#[derive(Debug, ClapArgs)]
struct Create {
    /// Who joins with it, by --token-file: a node by `kolo-node`, or a driver by `kolo login`
    #[arg(long, value_enum, default_value_t = JoinRole::Node)]
    role: JoinRole,
    /// How long it is valid, up to 366d
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = token_life)]
    ttl: Duration,
    /// How often it may be used [default: any number of times]
    #[arg(long, value_name = "N", value_parser = count)]
    uses: Option<u32>,
    /// Drivers that join with it may make tokens and revoke members, as the operator on the head's machine may
    #[arg(long)]
    admin: bool,
    /// Write the token to this file (mode 0600) and not to standard output
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
struct RevokeToken {
    /// Its id, as `kolo token list` shows it, or a start of it
    #[arg(value_name = "TOKEN_ID")]
    id: String,
}

#[derive(Debug, ClapArgs)]
pub(super) struct Revoke {
    /// Hostname of a node, or the id of a node or driver, node-ID or driver-ID, or an unambiguous start of one that the head has
    /// seen
    #[arg(value_name = "ID")]
    member: String,
    /// Why, for those who look at `kolo status` later
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
    /// Let it in again
    #[arg(long)]
    undo: bool,
}

#[derive(Serialize)]
struct JsonToken<'a> {
    id: &'a str,
    role: String,
    admin: bool,
    expires_unix: u64,
    uses_left: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<&'a str>,
}

impl<'a> JsonToken<'a> {
    fn new(entry: &'a TokenEntry, token: Option<&'a str>) -> Self {
        Self {
            id: &entry.id,
            role: entry.role.to_string(),
            admin: entry.admin,
            expires_unix: entry.expires_unix,
            uses_left: entry.uses_left,
            token,
        }
    }
}

pub(super) async fn token(
    options: &Token,
    connect: &Connect,
    format: Format,
    out: &mut Output<'_>,
) -> Result<(), CliError> {
    let client = Client::connect(&connect.config()).await?;
    let request = match &options.command {
        TokenCommand::Create(create) => HeadRequest::CreateToken {
            role: match create.role {
                JoinRole::Node => Role::Node,
                JoinRole::Driver => Role::Driver,
            },
            admin: create.admin,
            ttl_s: create.ttl.as_secs(),
            uses: create.uses,
        },
        TokenCommand::List => HeadRequest::Tokens,
        TokenCommand::Revoke(revoke) => HeadRequest::RevokeToken {
            id: token_id(&client, &revoke.id).await?,
        },
    };
    let reply = client.request(&request, ANSWER).await?;
    client.close().await;
    match (&options.command, request, reply) {
        (TokenCommand::Create(create), _, HeadReply::Token { entry, token }) => {
            created(create, &entry, &token.0, format, out)
        }
        (TokenCommand::List, _, HeadReply::Tokens(tokens)) => list(&tokens, format, out),
        (TokenCommand::Revoke(_), HeadRequest::RevokeToken { id }, HeadReply::Done) => match format
        {
            Format::Json => out.json(&serde_json::json!({ "revoked": id })),
            Format::Table => out.line(&format!(
                "{id} is revoked; those that have joined with it stay"
            )),
        },
        _ => Err(CliError::Answer("the head".to_owned())),
    }
}

/// The token that is meant: a whole id, or the start of one.
async fn token_id(client: &Client, text: &str) -> Result<String, CliError> {
    let HeadReply::Tokens(tokens) = client.request(&HeadRequest::Tokens, ANSWER).await? else {
        return Err(CliError::Answer("the head".to_owned()));
    };
    let ids = tokens.into_iter().map(|entry| entry.id);
    let found = pick("token", text, ids, "kolo token list")?;
    Ok(found.unwrap_or_else(|| text.to_owned()))
}

fn created(
    options: &Create,
    entry: &TokenEntry,
    token: &str,
    format: Format,
    out: &mut Output<'_>,
) -> Result<(), CliError> {
    let Some(path) = &options.out else {
        return match format {
            Format::Json => out.json(&JsonToken::new(entry, Some(token))),
            // Alone, so that it can go into a file.
            Format::Table => out.line(token),
        };
    };
    private_file::replace(path, format!("{token}\n").as_bytes()).map_err(|error| {
        CliError::File {
            path: path.clone(),
            error,
        }
    })?;
    match format {
        Format::Json => out.json(&JsonToken::new(entry, None)),
        Format::Table => out.line(&format!(
            "{} for {}s is in {}; it ends in {}",
            entry.id,
            entry.role,
            path.display(),
            left(entry.expires_unix, now_ms() / 1000)
        )),
    }
}

fn left(until: u64, now: u64) -> Span {
    Span(Duration::from_secs(until.saturating_sub(now)))
}

fn list(tokens: &[TokenEntry], format: Format, out: &mut Output<'_>) -> Result<(), CliError> {
    if format == Format::Json {
        let tokens: Vec<_> = tokens
            .iter()
            .map(|entry| JsonToken::new(entry, None))
            .collect();
        return out.json(&tokens);
    }
    if tokens.is_empty() {
        return out.line("there are no tokens; `kolo token create` makes one");
    }
    let now = now_ms() / 1000;
    let rows: Vec<[Cell; 4]> = tokens.iter().map(|entry| row(entry, now)).collect();
    out.table(["TOKEN", "ROLE", "ENDS IN", "USES LEFT"], &rows)
}

fn row(entry: &TokenEntry, now: u64) -> [Cell; 4] {
    let role = if entry.admin {
        format!("{} (admin)", entry.role)
    } else {
        entry.role.to_string()
    };
    let ends = if entry.expires_unix <= now {
        Cell::toned("ended", Tone::Faint)
    } else {
        left(entry.expires_unix, now).to_string().into()
    };
    let uses = match entry.uses_left {
        None => "any".into(),
        Some(0) => Cell::toned("0", Tone::Faint),
        Some(uses) => uses.to_string().into(),
    };
    [entry.id.as_str().into(), role.into(), ends, uses]
}

pub(super) async fn revoke(
    options: &Revoke,
    connect: &Connect,
    format: Format,
    out: &mut Output<'_>,
) -> Result<(), CliError> {
    let client = Client::connect(&connect.config()).await?;
    let Found {
        role,
        name,
        hostname,
        seen,
    } = find(&client, options).await?;
    let request = if options.undo {
        HeadRequest::Reinstate {
            role,
            name: name.clone(),
        }
    } else {
        HeadRequest::Revoke {
            role,
            name: name.clone(),
            reason: options.reason.clone(),
        }
    };
    let reply = client.request(&request, ANSWER).await?;
    client.close().await;
    let HeadReply::Revoked { told, late } = reply else {
        return Err(CliError::Answer("the head".to_owned()));
    };
    let late: Vec<String> = late.iter().map(ToString::to_string).collect();
    if format == Format::Json {
        return out.json(&serde_json::json!({
            "name": name,
            "role": role.to_string(),
            "revoked": !options.undo,
            "nodes_told": told,
            "nodes_late": late,
            "seen": seen,
        }));
    }
    let done = if options.undo {
        "may come back"
    } else {
        "is revoked"
    };
    let have = if told == 1 { "node has" } else { "nodes have" };
    let not_yet = match late.join(", ") {
        late if late.is_empty() => String::new(),
        late => format!("; not yet: {late}, which learn of it when they answer or register again"),
    };
    let who = hostname.map_or_else(|| name.clone(), |hostname| format!("{hostname} ({name})"));
    out.line(&format!(
        "{who} {done}; {told} {have} confirmed it{not_yet}"
    ))?;
    if !seen {
        // A driver that has started no job is known by its certificate alone.
        out.line(&format!(
            "the head has seen no {role} of this name: look whether the id is right"
        ))?;
    }
    Ok(())
}

struct Found {
    role: Role,
    name: String,
    /// What the operator has called it, if that is no id.
    hostname: Option<String>,
    /// Whether the head knows it, or knew it when it was revoked.
    seen: bool,
}

/// The member that is meant: the one node of a hostname, a whole id, or the start of one that the head has seen.
async fn find(client: &Client, options: &Revoke) -> Result<Found, CliError> {
    let text = options.member.trim();
    let cluster = client.cluster().await?;
    let out = names(&cluster.revoked);
    if let Some(found) = called(text, options.undo, &cluster.nodes, &out)? {
        return Ok(found);
    }
    let role = if text.starts_with("node-") {
        Role::Node
    } else if text.starts_with("driver-") {
        Role::Driver
    } else {
        return Err(unknown(format!(
            "`{text}` is no hostname of a node{}, and no id; expected a hostname, node-ID or driver-ID",
            if options.undo { " that is revoked" } else { "" }
        )));
    };
    let whole = role.to_string().len() + 1 + 16;
    let known: BTreeSet<String> = if options.undo {
        out.clone()
    } else {
        let nodes = cluster.nodes.iter().map(|node| node.node.to_string());
        let jobs = client.jobs().await?;
        nodes
            .chain(jobs.iter().map(|job| job.owner.to_string()))
            .collect()
    };
    if text.len() >= whole {
        return Ok(Found {
            role,
            name: text.to_owned(),
            hostname: None,
            seen: known.contains(text) || out.contains(text),
        });
    }
    let list = if role == Role::Node {
        "kolo status"
    } else {
        "kolo jobs"
    };
    match pick(&role.to_string(), text, known, list)? {
        Some(name) => Ok(Found {
            role,
            name,
            hostname: None,
            seen: true,
        }),
        None => Err(unknown(format!(
            "no {role} with an id that begins with `{text}` {}; give the whole id",
            if options.undo {
                "is revoked"
            } else {
                "is in the lists of nodes and of jobs"
            }
        ))),
    }
}

/// There is no such member.
fn unknown(message: String) -> CliError {
    Refusal::new(RefusalKind::NotFound, message).into()
}

/// The node that has this hostname, of those that are out for `--undo`, else of the others. Nothing is guessed: it is the only one, and
/// no other one's id begins with the text.
fn called(
    text: &str,
    undo: bool,
    nodes: &[NodeInfo],
    out: &BTreeSet<String>,
) -> Result<Option<Found>, CliError> {
    let there: Vec<&NodeInfo> = nodes
        .iter()
        .filter(|node| out.contains(&node.node.to_string()) == undo)
        .collect();
    if !there.iter().any(|node| node.hostname == text) {
        return Ok(None);
    }
    let meant: Vec<&&NodeInfo> = there
        .iter()
        .filter(|node| node.hostname == text || node.node.to_string().starts_with(text))
        .collect();
    if let [only] = meant[..] {
        return Ok(Some(Found {
            role: Role::Node,
            name: only.node.to_string(),
            hostname: Some(only.hostname.clone()),
            seen: true,
        }));
    }
    let list: Vec<String> = meant
        .iter()
        .map(|node| {
            let state = if node.alive { "alive" } else { "lost" };
            format!("{} ({}, {state})", node.node, node.hostname)
        })
        .collect();
    Err(CliError::Usage(format!(
        "`{text}` may be {}; give the id of one of them",
        list.join(" or ")
    )))
}

fn names(revoked: &[RevokedMember]) -> BTreeSet<String> {
    revoked.iter().map(|member| member.name.clone()).collect()
}

/// Who is out, for `kolo status`.
pub(super) fn show(revoked: &[RevokedMember], out: &mut Output<'_>) -> Result<(), CliError> {
    if revoked.is_empty() {
        return Ok(());
    }
    let now = now_ms() / 1000;
    let rows: Vec<[Cell; 3]> = revoked
        .iter()
        .map(|member| {
            [
                Cell::toned(member.name.as_str(), Tone::Bad),
                format!("{} ago", left(now, member.since_unix)).into(),
                member.reason.as_str().into(),
            ]
        })
        .collect();
    out.line("")?;
    out.table(["REVOKED", "SINCE", "REASON"], &rows)
}

#[cfg(test)]
mod tests {
    use kolo_transport::ids::{JobId, NodeId};
    use kolo_transport::wire::Resources;

    use super::*;

    fn node(id: u64, hostname: &str, alive: bool) -> NodeInfo {
        NodeInfo {
            node: NodeId(id),
            hostname: hostname.to_owned(),
            address: ([127, 0, 0, 1], 1).into(),
            alive,
            total: Resources::default(),
            available: Resources::default(),
            last_seen_ms: 0,
            jobs: Vec::<JobId>::new(),
            draining: false,
        }
    }

    #[test]
    fn a_hostname_is_one_node_or_none_is_revoked() {
        let nodes = [
            node(1, "a", true),
            node(2, "b", false),
            node(3, "b", true),
            node(0x1 << 60, "c", true),
            node(5, "node-1", true),
        ];
        let out = BTreeSet::from([NodeId(2).to_string()]);
        let name = |text: &str, undo: bool, out: &BTreeSet<String>| {
            called(text, undo, &nodes, out).map(|found| found.map(|found| found.name))
        };
        assert_eq!(name("a", false, &out).unwrap(), Some(NodeId(1).to_string()));
        assert_eq!(name("a", true, &out).unwrap(), None);
        assert_eq!(name("d", false, &out).unwrap(), None);
        // The machine was installed anew: the lost node is out already, or else may be meant.
        assert_eq!(name("b", false, &out).unwrap(), Some(NodeId(3).to_string()));
        assert_eq!(name("b", true, &out).unwrap(), Some(NodeId(2).to_string()));
        let error = name("b", false, &BTreeSet::new()).unwrap_err().to_string();
        assert!(
            error.contains("(b, lost) or ") && error.contains("(b, alive); give"),
            "{error}"
        );
        // A hostname that another node's id begins with.
        let error = name("node-1", false, &out).unwrap_err().to_string();
        assert!(
            error.contains("(c, alive) or ") && error.contains("(node-1, alive)"),
            "{error}"
        );
    }
}
