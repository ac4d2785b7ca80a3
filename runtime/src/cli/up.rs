//! `kolo up`.

use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;
use kolo_transport::identity::Role;
use kolo_transport::ids::{ClusterId, DriverId, NodeId};
use kolo_transport::wire::{HeadReply, HeadRequest};
use kolo_transport::{JoinToken, RandomId as _};
use serde::Serialize;
use tokio::signal::unix::SignalKind;

use super::args::{Connect, Format, count, time};
use super::client::{Client, ClientConfig};
use super::error::CliError;
use super::host_args::{HostArgs, SshArgs};
use super::output::{Cell, Output, Tone};
use super::progress::{self, Progress};
use super::up_head::{Folder, LAUNCH_PREFIX, heads_dir, listen, start_head, stop_head, sweep};
use super::up_record::Pending;
use crate::hosts::HostSlots;
use crate::local::loopback;
use crate::settings::values::{address, host_and_port};
use crate::signals::{self, Ends};
use crate::ssh::state::Launch;
use crate::ssh::{
    BroughtUp, Ending, HeadAccess, HostEvent, NodeAuthority, SshOptions, Stage, UpError, UpNode,
    bring_up_with, take_down,
};
use crate::{Head, HeadConfig, HeadState};

/// How long a node's token is valid: it is used as soon as it is there.
const TOKEN_TTL: Duration = Duration::from_secs(600);

/// How long the head may take for an answer.
const ANSWER: Duration = Duration::from_secs(10);

#[derive(Debug, Args)]
pub(super) struct Up {
    #[command(flatten)]
    pub(super) hosts: HostArgs,
    /// Leave the nodes running, and the head if it was started, until `kolo down`
    #[arg(long, short)]
    pub(super) detach: bool,
    /// Start a head on this machine for the launch, also where there is a cluster already
    #[arg(long)]
    pub(super) own_head: bool,
    /// Where a head that is started listens [default: a free port on all interfaces]
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    pub(super) head_listen: Option<SocketAddr>,
    /// HOST:PORT by which all hosts reach the head [default: what works, of the addresses that are known]
    #[arg(long, value_name = "HOST:PORT", value_parser = host_and_port)]
    pub(super) head_address: Option<String>,
    /// How long a node lives when nothing is heard from this command any more, as when the network is cut
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = time)]
    pub(super) lease: Duration,
    /// How many hosts are brought up at the same time
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = count)]
    pub(super) parallel: u32,
    /// Do not show how far each host is
    #[arg(long, short)]
    pub(super) quiet: bool,
    #[command(flatten)]
    pub(super) ssh: SshArgs,
}

/// What is up.
#[derive(Serialize)]
struct Shown<'a> {
    cluster: String,
    head: &'a str,
    credentials: String,
    detached: bool,
    nodes: Vec<ShownNode>,
}

#[derive(Serialize)]
struct ShownNode {
    host: String,
    slots: u32,
    node: String,
    address: SocketAddr,
    /// Whether it was up before.
    existing: bool,
    /// Its process on its host, if it was started.
    pid: Option<u32>,
    /// By which address it reaches the head, if it was started.
    head: Option<SocketAddr>,
    /// Its folder on its host, if it was started.
    state: Option<String>,
}

impl From<&UpNode> for ShownNode {
    fn from(node: &UpNode) -> Self {
        let started = node.started.as_ref();
        Self {
            host: node.host.destination(),
            slots: node.host.slots,
            node: node.node.to_string(),
            address: node.address,
            existing: started.is_none(),
            pid: started.map(|ready| ready.pid),
            head: started.map(|ready| ready.head),
            state: started.map(|ready| ready.state.clone()),
        }
    }
}

/// An administrator's connection to a head that runs.
impl NodeAuthority for &Client {
    async fn node_token(&self) -> Result<JoinToken, String> {
        let request = HeadRequest::CreateToken {
            role: Role::Node,
            admin: false,
            ttl_s: TOKEN_TTL.as_secs(),
            uses: Some(1),
        };
        match self.request(&request, ANSWER).await {
            Ok(HeadReply::Token { token, .. }) => token
                .0
                .parse()
                .map_err(|_| "the head's answer holds no token".to_owned()),
            Ok(_) => Err("the head gave an answer to another question".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    async fn alive(&self) -> Result<Vec<(String, NodeId, SocketAddr)>, String> {
        let cluster = self.cluster().await.map_err(|error| error.to_string())?;
        Ok(cluster
            .nodes
            .into_iter()
            .filter(|node| node.alive)
            .map(|node| (node.hostname, node.node, node.address))
            .collect())
    }
}

pub(super) async fn run(
    options: &Up,
    connect: &Connect,
    format: Format,
    out: &mut Output<'_>,
) -> Result<u8, CliError> {
    let Some(mut hosts) = options.hosts.read()? else {
        return Err(CliError::Usage(
            "no hosts are given: give --hosts a:4,b:4 or --hostfile FILE".to_owned(),
        ));
    };
    hosts.retain(|host| host.slots > 0);
    let ssh = SshOptions {
        detach: options.detach,
        lease: options.lease,
        parallel: options.parallel as usize,
        ..options.ssh.options()
    };
    let config = connect.config();
    if !options.own_head && has_head(&config)? {
        return on_cluster(options, &hosts, &ssh, &config, format, out).await;
    }
    if options.detach {
        detached(options, &hosts, &ssh, &config, format, out).await
    } else {
        attached(options, &hosts, &ssh, format, out).await
    }
}

/// Whether a head is named by a flag, the environment or the last login.
fn has_head(config: &ClientConfig) -> Result<bool, CliError> {
    if config
        .head
        .as_deref()
        .is_some_and(|head| !head.trim().is_empty())
    {
        return Ok(true);
    }
    Ok(config.credentials_dir()?.join("head").exists())
}

/// The nodes join a cluster that runs.
async fn on_cluster(
    options: &Up,
    hosts: &[HostSlots],
    ssh: &SshOptions,
    config: &ClientConfig,
    format: Format,
    out: &mut Output<'_>,
) -> Result<u8, CliError> {
    let mut signals = watch_signals()?;
    let client = Client::connect(config).await?;
    let dir = config.credentials_dir()?;
    let named = config.head(&dir)?;
    let cluster = client.cluster().await?.cluster;
    let access = HeadAccess::running(cluster, &named, client.address(), &client)
        .by_address(options.head_address.clone());
    // What is up is not this launch's to end.
    let alive = (&client).alive().await.map_err(CliError::Hosts)?;
    let is_alive = |host: &HostSlots| alive.iter().any(|(name, ..)| host.is_called(name));
    let new: Vec<HostSlots> = hosts
        .iter()
        .filter(|host| !is_alive(host))
        .cloned()
        .collect();
    if !new.is_empty() {
        // Whoever may not make tokens hears that before a host is touched.
        client.request(&HeadRequest::Tokens, ANSWER).await?;
    }
    let pending = if options.detach {
        let launch = Launch {
            cluster: cluster.to_string(),
            head: named.clone(),
            credentials: dir.clone(),
            head_pid: None,
            head_state: None,
            hosts: Vec::new(),
            nodes: Vec::new(),
            ssh: options.ssh.record(),
        };
        // Without new hosts nothing is to be remembered, least of all how to reach them.
        (!new.is_empty())
            .then(|| Pending::begin(launch, &new))
            .transpose()?
    } else {
        None
    };
    let up = match bring_up(options, hosts, ssh, cluster, &access, &mut signals).await {
        Ok(up) => up,
        Err(not_up) => {
            if let Some(pending) = pending {
                pending.not_up(&not_up.left);
            }
            return Err(not_up.into());
        }
    };
    let shown = Shown {
        cluster: cluster.to_string(),
        head: &named,
        credentials: dir.display().to_string(),
        detached: options.detach,
        nodes: up.nodes().iter().map(ShownNode::from).collect(),
    };
    if options.detach {
        if let Some(pending) = pending {
            pending.up(up.nodes())?;
        }
        show(&shown, format, out)?;
        client.close().await;
        return Ok(0);
    }
    show(&shown, format, out)?;
    let code = keep(up, &mut signals, out).await?;
    client.close().await;
    Ok(code)
}

async fn bring_up<A: NodeAuthority>(
    options: &Up,
    hosts: &[HostSlots],
    ssh: &SshOptions,
    cluster: ClusterId,
    access: &HeadAccess<A>,
    signals: &mut Ends,
) -> Result<BroughtUp, NotUp> {
    let mut shown = Progress::new(hosts, options.quiet);
    let mut started: Vec<HostSlots> = Vec::new();
    let bringing = bring_up_with(hosts, ssh, access, |event| {
        shown.on(&event);
        if let HostEvent::Stage {
            host,
            stage: Stage::Starting,
        } = event
        {
            started.push(host);
        }
    });
    // Dropping it ends what was started, but for detached nodes that are up.
    let name = tokio::select! {
        up = bringing => {
            progress::end();
            return up.map_err(|error| {
                let left = match &error {
                    UpError::Hosts { left, .. } => left.clone(),
                    _ => Vec::new(),
                };
                NotUp { error: error.into(), left }
            });
        }
        signal = signals.next() => signals::name(signal),
    };
    progress::end();
    if !ssh.detach || started.is_empty() {
        let text = format!("given up by {name}; what was started ends by itself");
        return Err(NotUp::nothing_left(CliError::Hosts(text)));
    }
    eprintln_or_ignore(&format!(
        "kolo: {name}: ending what was started; a second signal leaves it as it is"
    ));
    let ended = tokio::select! {
        ended = take_down(&started, ssh, cluster, Ending::Graceful) => ended,
        _ = signals.next() => Err(UpError::NoHosts),
    };
    let left: Vec<HostSlots> = match ended {
        Ok(ended) => ended
            .into_iter()
            .filter(|(_, result)| result.is_err())
            .map(|(host, _)| host)
            .collect(),
        Err(_) => started,
    };
    if left.is_empty() {
        let text = format!("given up by {name}; what was started has ended");
        return Err(NotUp::nothing_left(CliError::Hosts(text)));
    }
    let hosts: Vec<String> = left.iter().map(ToString::to_string).collect();
    Err(NotUp {
        error: CliError::Hosts(format!(
            "given up by {name}; nodes may be left, and are ended by `kolo down --hosts {}`",
            hosts.join(",")
        )),
        left,
    })
}

/// Why nothing is up.
struct NotUp {
    error: CliError,
    /// Where there may be nodes all the same.
    left: Vec<HostSlots>,
}

impl NotUp {
    fn nothing_left(error: CliError) -> Self {
        Self {
            error,
            left: Vec::new(),
        }
    }
}

impl From<NotUp> for CliError {
    fn from(not_up: NotUp) -> Self {
        not_up.error
    }
}

/// The signals that ask to end, from now on. What is ignored stays so, as under `nohup`.
fn watch_signals() -> Result<Ends, CliError> {
    let kinds: Vec<SignalKind> = [
        SignalKind::terminate(),
        SignalKind::interrupt(),
        SignalKind::hangup(),
        SignalKind::quit(),
    ]
    .into_iter()
    .filter(|kind| !kolo_process::ignores(kind.as_raw_value()))
    .collect();
    Ends::take(&kinds).map_err(CliError::Start)
}

fn show(shown: &Shown<'_>, format: Format, out: &mut Output<'_>) -> Result<(), CliError> {
    match format {
        Format::Json => out.json(shown)?,
        Format::Table => {
            let rows: Vec<[Cell; 5]> = shown
                .nodes
                .iter()
                .map(|node| {
                    let state = if node.existing { "was up" } else { "up" };
                    [
                        node.host.clone().into(),
                        node.slots.to_string().into(),
                        node.node.clone().into(),
                        node.address.to_string().into(),
                        Cell::toned(state, Tone::Good),
                    ]
                })
                .collect();
            out.table(["HOST", "SLOTS", "NODE", "ADDRESS", "STATE"], &rows)?;
            out.line("")?;
            out.line("To use the cluster from here:")?;
            let quoted = crate::ssh::quote(&shown.credentials);
            out.line(&format!(
                "  export KOLO_HEAD={} KOLO_CREDENTIALS={quoted}",
                shown.head
            ))?;
            out.line(if shown.nodes.iter().all(|node| node.existing) {
                "Nothing was started: all nodes were up before."
            } else if shown.detached {
                "To end it: kolo down"
            } else {
                "To end it: Ctrl-C"
            })?;
        }
    }
    out.flush()
}

/// Stays until it is told to end, then ends the nodes with care.
async fn keep(mut up: BroughtUp, signals: &mut Ends, out: &mut Output<'_>) -> Result<u8, CliError> {
    let mut left = up
        .nodes()
        .iter()
        .filter(|node| node.started.is_some())
        .count();
    if left == 0 {
        eprintln_or_ignore("kolo: all hosts were up before; there is nothing to keep");
        return Ok(0);
    }
    let mut code = 0;
    loop {
        tokio::select! {
            signal = signals.next() => {
                let name = signals::name(signal);
                eprintln_or_ignore(&format!("kolo: {name}: ending the nodes; a second signal ends them at once"));
                break;
            }
            (host, error) = up.lost() => {
                code = super::error::FAILURE;
                left -= 1;
                eprintln_or_ignore(&format!("kolo: {} is lost: {error}", host.destination()));
                if left == 0 {
                    eprintln_or_ignore("kolo: no node is left");
                    return Ok(code);
                }
            }
        }
    }
    out.flush()?;
    let down = tokio::select! {
        down = up.down(Ending::Graceful) => down,
        // Dropping it ends the nodes; they kill what is left after a short grace.
        _ = signals.next() => return Ok(super::error::FAILURE),
    };
    for (host, result) in down {
        match result {
            Ok(()) => eprintln_or_ignore(&format!("kolo: {}: down", host.destination())),
            Err(error) => {
                code = super::error::FAILURE;
                eprintln_or_ignore(&format!("kolo: {}: {error}", host.destination()));
            }
        }
    }
    Ok(code)
}

pub(super) fn eprintln_or_ignore(text: &str) {
    use std::io::Write as _;
    // Whoever closed standard error does not want to know.
    drop(writeln!(std::io::stderr(), "{text}"));
}

/// With a head in this process, for as long as it runs.
async fn attached(
    options: &Up,
    hosts: &[HostSlots],
    ssh: &SshOptions,
    format: Format,
    out: &mut Output<'_>,
) -> Result<u8, CliError> {
    let mut signals = watch_signals()?;
    let heads = heads_dir()?;
    sweep(&heads);
    let folder = Folder(heads.join(format!("{LAUNCH_PREFIX}{:016x}", DriverId::random().0)));
    let head = Head::start(HeadConfig {
        state: HeadState::Dir(folder.0.clone()),
        listen: listen(options.head_listen),
        ..HeadConfig::default()
    })
    .await
    .map_err(|error| CliError::Hosts(format!("the head can't start: {error}")))?;
    let access = HeadAccess::to(&head).by_address(options.head_address.clone());
    let up = bring_up(options, hosts, ssh, head.cluster(), &access, &mut signals).await;
    let code = match up {
        Ok(up) => {
            let shown = Shown {
                cluster: head.cluster().to_string(),
                head: &loopback(head.address()).to_string(),
                credentials: folder.0.join("admin").display().to_string(),
                detached: false,
                nodes: up.nodes().iter().map(ShownNode::from).collect(),
            };
            match show(&shown, format, out) {
                Ok(()) => keep(up, &mut signals, out).await,
                Err(error) => {
                    up.down(Ending::Graceful).await;
                    Err(error)
                }
            }
        }
        Err(not_up) => Err(not_up.into()),
    };
    head.stop().await;
    drop(folder);
    code
}

/// With a head of its own in the background.
async fn detached(
    options: &Up,
    hosts: &[HostSlots],
    ssh: &SshOptions,
    config: &ClientConfig,
    format: Format,
    out: &mut Output<'_>,
) -> Result<u8, CliError> {
    let mut signals = watch_signals()?;
    let heads = heads_dir()?;
    sweep(&heads);
    let state = heads.join(format!("detached-{:016x}", DriverId::random().0));
    let (pid, line, held) = start_head(options.head_listen, &state)?;
    let undo = |error: CliError| {
        stop_head(pid);
        drop(std::fs::remove_dir_all(&state));
        error
    };
    let named = loopback(line.address).to_string();
    let credentials = state.join("admin");
    let config = ClientConfig {
        head: Some(named.clone()),
        credentials: Some(credentials.clone()),
        ..config.clone()
    };
    let client = Client::connect(&config).await.map_err(undo)?;
    let cluster: ClusterId = client.cluster().await.map_err(undo)?.cluster;
    let mut access = HeadAccess::running(cluster, &named, client.address(), &client)
        .by_address(options.head_address.clone());
    access.listens_here(line.address);
    let launch = Launch {
        cluster: line.cluster.clone(),
        head: named.clone(),
        credentials: credentials.clone(),
        head_pid: Some(pid),
        head_state: Some(state.clone()),
        hosts: Vec::new(),
        nodes: Vec::new(),
        ssh: options.ssh.record(),
    };
    // Before anything is up: without the record nobody could end it if this process was killed.
    let pending = Pending::begin(launch, hosts).map_err(undo)?;
    held.noted();
    let up = match bring_up(options, hosts, ssh, cluster, &access, &mut signals).await {
        Ok(up) => up,
        Err(not_up) => {
            pending.not_up(&not_up.left);
            // The record and the head are needed to end what is left.
            if not_up.left.is_empty() {
                drop(Launch::change(&line.cluster, |_| None));
                return Err(undo(not_up.into()));
            }
            return Err(not_up.into());
        }
    };
    pending.up(up.nodes())?;
    let shown = Shown {
        cluster: line.cluster,
        head: &named,
        credentials: credentials.display().to_string(),
        detached: true,
        nodes: up.nodes().iter().map(ShownNode::from).collect(),
    };
    show(&shown, format, out)?;
    client.close().await;
    Ok(0)
}
