//! `kolo-node`: a node of a cluster as a daemon.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display, Formatter};
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use kolo_runtime::daemon::{DaemonArgs, Format, Service, begin, complain, reload_log};
use kolo_runtime::node::default_listen;
use kolo_runtime::settings::Daemon;
use kolo_runtime::settings::logging::{Log, LogArgs};
use kolo_runtime::settings::size::{memory, size};
use kolo_runtime::settings::values::{address, amount, host_and_port, number};
use kolo_runtime::{
    Node, NodeConfig, NodeCredentials, NodeError, NodeResources, ProgramSource, private_file,
    secret,
};
use kolo_transport::wire::Milli;
use kolo_transport::wire::span::{Span, duration};
use kolo_transport::{Credentials, JoinToken};
use serde::Serialize;
use tokio::signal::unix::SignalKind;

const EXAMPLE: &str = "\
The node prints one line with its id and address when the head has registered it. When the head goes away, workers run on as \
long as their driver is there (see --orphan-timeout), and the node registers again when the head is back. The workers end with \
the node in any case.

Each flag is also an environment variable and a key of the file --config; flags go before variables, and these before the file.

Signals:
  SIGTERM  takes no more jobs and waits for those that are there, up to --drain-timeout, then ends those that are left, then the node; SIGUSR1 is the same
  SIGINT   does not wait; a second signal ends the node at once
  SIGHUP   reads the identity and the log level again

Exit codes:
  0  stopped
  1  failed
  2  wrong arguments or settings
  3  revoked by an administrator

Examples:
  kolo-node --head 10.0.0.1:7700 --token-file node.token --state-dir /var/lib/kolo-node
  kolo-node --head head:7700 --state-dir /var/lib/kolo-node --cpus 16 --gpus 2 --resource fpga=1";

/// Exit code of a node that was put out of the cluster: to start it again would change nothing.
const REVOKED: u8 = 3;

/// A node of a kolo cluster: it offers its resources to jobs and runs their workers.
// A field for each option.
#[derive(Debug, Parser)]
#[command(name = "kolo-node", version, after_help = EXAMPLE)]
struct Args {
    /// Where the head listens
    #[arg(long, value_name = "HOST:PORT", env = "KOLO_HEAD", value_parser = host_and_port)]
    head: String,

    /// File with a token for nodes; needed only as long as the node has no identity in its state folder
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,

    /// Folder for the node's identity (in identity/) and for programs (in programs/). Without it the node joins
    /// anew at every start and keeps programs in memory
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,

    /// Where drivers connect (QUIC, so UDP). Port 0 takes a free one [default: a free port, on the loopback if the
    /// head is there and on all interfaces otherwise]
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    listen: Option<SocketAddr>,

    /// The address that others are told [default: where it listens, as seen from the head]
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    advertise: Option<SocketAddr>,

    /// CPUs that it offers, in steps of 0.001 [default: those that it may use]
    #[arg(long, value_name = "NUMBER", value_parser = amount, allow_negative_numbers = true)]
    cpus: Option<Milli>,

    /// GPUs that it offers: the first NUMBER of CUDA_VISIBLE_DEVICES, or else devices 0 to NUMBER-1 [default: all of
    /// CUDA_VISIBLE_DEVICES, or /dev/nvidia*]
    #[arg(long, value_name = "NUMBER", value_parser = number, allow_negative_numbers = true)]
    gpus: Option<u32>,

    /// Another resource that it offers; may be given many times
    #[arg(long = "resource", value_name = "NAME=AMOUNT", value_parser = resource)]
    resources: Vec<(String, f64)>,

    /// The name that others see; need not be unique [default: the system's]
    #[arg(long, value_name = "NAME")]
    hostname: Option<String>,

    /// How long to try to reach the head at the start
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration)]
    join_timeout: Duration,

    /// When a job's driver and the head have both been gone for so long, its workers are ended; as long as one of them
    /// is there they live on
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration)]
    orphan_timeout: Duration,

    /// How long jobs may go on after SIGTERM before they are ended; no new ones come
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration)]
    drain_timeout: Duration,

    /// How long to wait for jobs to end when they are ended, before they are killed
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration)]
    stop_timeout: Duration,

    /// The most memory for the output of all jobs that it keeps. Jobs that ended make room first, the oldest first
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = memory)]
    output_memory: usize,

    /// The most that all programs take. Those not used for longest make room, here and on a full disk; none that runs
    #[arg(long, value_name = "SIZE", default_value = "16GiB", value_parser = size)]
    program_cache_size: u64,

    #[command(flatten)]
    log: LogArgs,

    /// How to print the line with the node's id and address
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

fn resource(text: &str) -> Result<(String, f64), String> {
    text.split_once('=')
        .filter(|(name, _)| !name.is_empty())
        .ok_or_else(|| "expected NAME=AMOUNT, such as fpga=2".to_owned())
        .and_then(|(name, given)| Ok((name.to_owned(), amount(given)?.as_f64())))
}

/// The line that is printed when the node is registered.
#[derive(Serialize)]
struct ReadyLine<'a> {
    node: String,
    address: SocketAddr,
    head: SocketAddr,
    hostname: &'a str,
    pid: u32,
}

impl Display for ReadyLine<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "node={} address={} head={} hostname={} pid={}",
            self.node, self.address, self.head, self.hostname, self.pid
        )
    }
}

fn main() -> ExitCode {
    // Wardens are this program again.
    kolo_process::run_if_warden();
    // What a warden that is killed leaves comes here.
    if let Err(error) = kolo_process::adopt_orphans() {
        return complain(Args::DAEMON, &format!("orphans can't be adopted: {error}"));
    }
    // `kolo up` runs `kolo-node launched` on its hosts.
    if let Some(code) = kolo_runtime::ssh::run_if_launched() {
        return code;
    }
    let (args, log) = match begin::<Args>() {
        Ok(begun) => begun,
        Err(code) => return code,
    };
    match run(args, &log) {
        Ok(code) => code,
        Err(error) => {
            let code = complain(Args::DAEMON, &format!("{error:#}"));
            let revoked = error
                .downcast_ref::<NodeError>()
                .is_some_and(NodeError::is_revoked);
            if revoked {
                ExitCode::from(REVOKED)
            } else {
                code
            }
        }
    }
}

impl DaemonArgs for Args {
    const DAEMON: Daemon = Daemon {
        name: "kolo-node",
        prefix: "KOLO_NODE",
    };

    fn log(&self) -> &LogArgs {
        &self.log
    }

    fn check(&self) -> Result<(), String> {
        let mut names = BTreeSet::new();
        for (name, _) in &self.resources {
            if !names.insert(name) {
                return Err(format!("the resource `{name}` is given twice"));
            }
        }
        if self
            .hostname
            .as_ref()
            .is_some_and(|name| name.trim().is_empty())
        {
            return Err(
                "the hostname is empty; give a name, or leave it to the system's".to_owned(),
            );
        }
        Ok(())
    }
}

#[tokio::main(flavor = "current_thread")]
async fn run(args: Args, log: &Log) -> Result<ExitCode> {
    let mut service = Service::new(&[
        SignalKind::terminate(),
        SignalKind::interrupt(),
        // Some schedulers tell of a preemption so.
        SignalKind::user_defined1(),
    ])?;
    let _lock = args.state_dir.as_deref().map(lock).transpose()?;
    let (format, limit) = (args.format, args.drain_timeout);
    let identity = args.state_dir.as_deref().map(identity_dir);
    let (node, head) = tokio::select! {
        started = start(args) => started?,
        _ = service.ends.next() => return Ok(ExitCode::SUCCESS),
    };
    let ready = ReadyLine {
        node: node.id().to_string(),
        address: node.address(),
        head,
        hostname: node.hostname(),
        pid: std::process::id(),
    };
    let status = format!("{} with the head at {head}", node.id());
    let line = format.line(Args::DAEMON, &ready)?;
    service.ready(&line, status, node.health())?;
    let (signal, revoked) = tokio::select! {
        signal = service.end(|| reload(&node, identity.as_deref(), log)) => (Some(signal), None),
        reason = node.revoked() => (None, Some(reason)),
    };
    let drains = signal.filter(|signal| *signal != SignalKind::interrupt().as_raw_value());
    ensure!(
        service.stop(node, drains, limit).await,
        "ended by a second signal; jobs were killed"
    );
    let Some(reason) = revoked else {
        return Ok(ExitCode::SUCCESS);
    };
    let message = format!(
        "the head has revoked this node ({reason}); an administrator may let it in again with `kolo revoke --undo`, \
         or remove its folder `identity` and let it join with a token"
    );
    complain(Args::DAEMON, &message);
    Ok(ExitCode::from(REVOKED))
}

/// What a `SIGHUP` asks for. What can't be done is logged, and all is as it was.
fn reload(node: &Node, identity: Option<&Path>, log: &Log) {
    let loaded = identity.map(|dir| {
        Credentials::load(dir).and_then(|credentials| node.reload_credentials(credentials))
    });
    match loaded {
        None => {}
        Some(Ok(())) => tracing::info!("the identity is read again"),
        Some(Err(error)) => tracing::error!(%error, "the identity was not read again"),
    }
    reload_log::<Args>(log);
}

fn identity_dir(state: &Path) -> PathBuf {
    state.join("identity")
}

async fn start(args: Args) -> Result<(Node, SocketAddr)> {
    let head = resolve(&args.head, args.join_timeout).await?;
    let identity = args.state_dir.as_deref().map(identity_dir);
    let credentials = credentials(identity.as_deref(), args.token_file.as_deref())?;
    let custom: BTreeMap<_, _> = args.resources.into_iter().collect();
    let mut config = NodeConfig::new(head, credentials);
    config.identity_dir = identity;
    config.hostname = args.hostname;
    config.listen = args.listen.unwrap_or_else(|| default_listen(head));
    config.advertise = args.advertise;
    config.resources = NodeResources {
        cpus: args.cpus.map(Milli::as_f64),
        gpus: args.gpus,
        custom,
    };
    config.programs = ProgramSource {
        cache: args.state_dir.map(|dir| dir.join("programs")),
        max_total: args.program_cache_size,
        ..ProgramSource::default()
    };
    config.output_memory = args.output_memory;
    config.join_timeout = args.join_timeout;
    config.orphan_timeout = args.orphan_timeout;
    config.stop_timeout = args.stop_timeout;
    let node = Node::start(config).await.with_context(|| {
        format!(
            "the node can't start with the head at {} ({head})",
            args.head
        )
    })?;
    Ok((node, head))
}

async fn resolve(head: &str, limit: Duration) -> Result<SocketAddr> {
    let addresses = tokio::time::timeout(limit, kolo_transport::names::resolve(head))
        .await
        .with_context(|| {
            format!(
                "the address of `{head}` was not found within {}",
                Span(limit)
            )
        })?
        .with_context(|| format!("the address of `{head}` was not found"))?;
    // There is one at least.
    Ok(addresses[0])
}

/// The identity of an earlier start, or the token to join with.
fn credentials(identity: Option<&Path>, token: Option<&Path>) -> Result<NodeCredentials> {
    if let Some(dir) = identity
        && dir.try_exists().unwrap_or(true)
    {
        let credentials = Credentials::load(dir).with_context(|| {
            format!(
                "the identity in {} is not usable; remove the folder to join anew with a token",
                dir.display()
            )
        })?;
        return Ok(credentials.into());
    }
    let Some(file) = token else {
        bail!(
            "the node has no identity yet, so it needs a token: give --token-file with a token for nodes, as \
             `kolo-head --node-token-file` writes it"
        );
    };
    let secret = secret::read(file)
        .with_context(|| format!("the token can't be read from {}", file.display()))?;
    if let Some(warning) = &secret.warning {
        tracing::warn!("{warning}");
    }
    let token: JoinToken = secret
        .text
        .parse()
        .with_context(|| format!("{} holds no token", file.display()))?;
    Ok(token.into())
}

/// Makes sure that one node at a time uses a state folder: two would be the same node for the head, and take the place
/// of each other. The kernel lets go of it with the process, however that ends.
fn lock(dir: &Path) -> Result<File> {
    let path = dir.join("lock");
    let failed = || format!("the state folder {} can't be used", dir.display());
    private_file::make_dir(dir).with_context(failed)?;
    private_file::lock(&path)
        .with_context(failed)?
        .with_context(|| {
            format!(
                "{} is in use by another node; stop that one, or use another state folder",
                dir.display()
            )
        })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_arguments_are_consistent_and_the_help_has_an_example() {
        Args::command().debug_assert();
        let help = Args::command().render_long_help().to_string();
        assert!(
            help.contains("Examples:") && help.contains("Exit codes:"),
            "{help}"
        );
    }

    #[test]
    fn resources_are_a_name_and_an_amount() {
        assert_eq!(resource("fpga=0.5"), Ok(("fpga".to_owned(), 0.5)));
        for bad in ["", "fpga", "=1", "fpga=", "fpga=x"] {
            assert!(resource(bad).unwrap_err().starts_with("expected "), "{bad}");
        }
    }

    #[test]
    fn the_line_for_programs_is_one_json_object() {
        let line = ReadyLine {
            node: "node-1".to_owned(),
            address: "127.0.0.1:1".parse().unwrap(),
            head: "127.0.0.1:2".parse().unwrap(),
            hostname: "here",
            pid: 7,
        };
        assert_eq!(
            Format::Json.line(Args::DAEMON, &line).unwrap(),
            r#"{"node":"node-1","address":"127.0.0.1:1","head":"127.0.0.1:2","hostname":"here","pid":7}"#
        );
        assert_eq!(
            Format::Text.line(Args::DAEMON, &line).unwrap(),
            "kolo-node: node=node-1 address=127.0.0.1:1 head=127.0.0.1:2 hostname=here pid=7"
        );
    }

    #[test]
    fn one_node_at_a_time_uses_a_folder() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("new");
        let first = lock(&dir).unwrap();
        let error = lock(&dir).unwrap_err().to_string();
        assert!(error.contains("in use by another node"), "{error}");
        drop(first);
        lock(&dir).unwrap();
        let file = dir.join("lock");
        let error = lock(&file).unwrap_err().to_string();
        assert!(error.contains("can't be used"), "{error}");
    }

    #[test]
    fn without_identity_and_token_the_error_says_what_to_do() {
        let missing = Path::new("/no/such/folder");
        let error = credentials(Some(missing), None).unwrap_err().to_string();
        assert!(error.contains("--token-file"), "{error}");
        let error = credentials(None, Some(missing)).unwrap_err().to_string();
        assert!(error.contains("/no/such/folder"), "{error}");
    }
}
