//! `kolo-head`: the head of a cluster as a daemon.

use std::fmt::{self, Display, Formatter};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use kolo_runtime::daemon::{DaemonArgs, Format, Service, begin, complain, reload_log};
use kolo_runtime::head::held::end_unless_noted;
use kolo_runtime::http::BearerSecret;
use kolo_runtime::settings::Daemon;
use kolo_runtime::settings::logging::{Log, LogArgs};
use kolo_runtime::settings::size::memory;
use kolo_runtime::settings::values::{address, token_life};
use kolo_runtime::{Head, HeadConfig, HeadState};
use kolo_runtime::{private_file, secret};
use kolo_transport::identity::Role;
use kolo_transport::wire::span::duration;
use serde::Serialize;
use tokio::signal::unix::SignalKind;

const EXAMPLE: &str = "\
The head prints one line with its addresses when it is ready. Each flag is also an environment variable and a key of the \
file --config; flags go before variables, and these before the file.

Signals:
  SIGTERM  waits for jobs to end, up to --drain-timeout, then stops those that are left, then the head
  SIGINT   does not wait; a second signal ends the head at once
  SIGHUP   renews the certificates and reads the log level again

Exit codes:
  0  stopped
  1  failed
  2  wrong arguments or settings

Examples:
  kolo-head --state-dir /var/lib/kolo --listen 10.0.0.1:7700 --node-token-file node.token

  # The first token for a person, made on the head's machine
  kolo --head 127.0.0.1:7700 --credentials /var/lib/kolo/admin token create --role driver";

/// The head of a kolo cluster: nodes register with it, drivers submit jobs to it.
// A field for each option.
#[derive(Debug, Parser)]
#[command(name = "kolo-head", version, after_help = EXAMPLE)]
struct Args {
    /// Folder for the authority of the cluster, tokens, and the credentials of an operator (in admin/)
    #[arg(long, value_name = "DIR")]
    state_dir: PathBuf,

    /// Where nodes and drivers connect (QUIC, so UDP). Port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:7700", value_parser = address)]
    listen: SocketAddr,

    /// Where the HTTPS API listens. Without it there is none
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    http_listen: Option<SocketAddr>,

    /// File with a secret that gives the rights of a driver over HTTPS; needs --http-listen
    #[arg(long, value_name = "FILE")]
    bearer_file: Option<PathBuf>,

    /// Write a new token for nodes to this file (mode 0600)
    #[arg(long, value_name = "FILE")]
    node_token_file: Option<PathBuf>,

    /// Write a new token for drivers to this file (mode 0600)
    #[arg(long, value_name = "FILE")]
    driver_token_file: Option<PathBuf>,

    /// How long these tokens are valid
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = token_life)]
    token_ttl: Duration,

    /// A node that is not heard for so long counts as lost; up to 2.4s in a cluster of more than 4000 nodes
    #[arg(long, value_name = "DURATION", default_value = "1250ms", value_parser = duration)]
    lease: Duration,

    /// How often nodes send heartbeats; at most a quarter of the lease; up to 600ms in a cluster of more than 2500 nodes
    #[arg(long, value_name = "DURATION", default_value = "250ms", value_parser = duration)]
    heartbeat: Duration,

    /// How long certificates of nodes, drivers and the head are valid; they are renewed in time
    #[arg(long, value_name = "DURATION", default_value = "90d", value_parser = duration)]
    certificate_life: Duration,

    /// How long certificates of workers are valid; they are renewed in time
    #[arg(long, value_name = "DURATION", default_value = "1d", value_parser = duration)]
    worker_certificate_life: Duration,

    /// How long jobs may go on after SIGTERM before they are stopped; new ones are refused
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration)]
    drain_timeout: Duration,

    /// How long to wait for jobs to end when they are stopped
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration)]
    stop_timeout: Duration,

    /// The most memory for the values of all jobs' rendezvous; Horovod's takes 136 bytes for each pair of ranks (1,400 ranks: 267 MB)
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = memory)]
    rendezvous_memory: usize,

    #[command(flatten)]
    log: LogArgs,

    /// How to print the line with the addresses
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

/// The line that is printed when the head is ready.
#[derive(Serialize)]
struct ReadyLine<'a> {
    cluster: String,
    address: SocketAddr,
    http: Option<SocketAddr>,
    admin: Option<&'a Path>,
}

impl Display for ReadyLine<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "cluster={} address={}", self.cluster, self.address)?;
        match self.http {
            Some(http) => write!(f, " http={http}")?,
            None => f.write_str(" http=off")?,
        }
        write!(
            f,
            " admin={}",
            self.admin.unwrap_or(Path::new("")).display()
        )
    }
}

impl Args {
    fn config(&self) -> HeadConfig {
        HeadConfig {
            state: HeadState::Dir(self.state_dir.clone()),
            listen: self.listen,
            http: self.http_listen,
            rendezvous_memory: self.rendezvous_memory,
            lease: self.lease,
            heartbeat: self.heartbeat,
            certificate_life: self.certificate_life,
            worker_certificate_life: self.worker_certificate_life,
            stop_timeout: self.stop_timeout,
            ..HeadConfig::default()
        }
    }
}

impl DaemonArgs for Args {
    const DAEMON: Daemon = Daemon {
        name: "kolo-head",
        prefix: "KOLO_HEAD",
    };

    fn log(&self) -> &LogArgs {
        &self.log
    }

    fn check(&self) -> Result<(), String> {
        if self.bearer_file.is_some() && self.http_listen.is_none() {
            return Err(
                "--bearer-file is for the HTTPS API, which is off: give --http-listen, too"
                    .to_owned(),
            );
        }
        self.config().check().map_err(|error| error.to_string())
    }
}

fn main() -> ExitCode {
    let (args, log) = match begin::<Args>() {
        Ok(begun) => begun,
        Err(code) => return code,
    };
    match run(args, &log) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => complain(Args::DAEMON, &format!("{error:#}")),
    }
}

#[tokio::main(flavor = "current_thread")]
async fn run(args: Args, log: &Log) -> Result<()> {
    let mut service = Service::new(&[SignalKind::terminate(), SignalKind::interrupt()])?;
    end_unless_noted(&args.state_dir);
    let bearer = args.bearer_file.as_deref().map(read_bearer).transpose()?;
    let head = Head::start(HeadConfig {
        bearer,
        ..args.config()
    })
    .await
    .context("the head can't start")?;
    for (role, file) in [
        (Role::Node, &args.node_token_file),
        (Role::Driver, &args.driver_token_file),
    ] {
        if let Some(file) = file {
            let token = head.store_token(role, args.token_ttl, None)?;
            private_file::replace(file, format!("{token}\n").as_bytes()).with_context(|| {
                format!("the {role} token can't be written to {}", file.display())
            })?;
        }
    }
    let ready = ReadyLine {
        cluster: head.cluster().to_string(),
        address: head.address(),
        http: head.http_address(),
        admin: head.admin_dir(),
    };
    let status = format!("{} at {}", ready.cluster, ready.address);
    let line = args.format.line(Args::DAEMON, &ready)?;
    service.ready(&line, status, head.health())?;
    let signal = service.end(|| reload(&head, log)).await;
    let drains = signal == SignalKind::terminate().as_raw_value();
    let stopped = service.stop(head, drains.then_some(signal), args.drain_timeout);
    ensure!(
        stopped.await,
        "ended by a second signal; jobs may not have ended well"
    );
    Ok(())
}

/// What a `SIGHUP` asks for. What can't be done is logged, and all is as it was.
fn reload(head: &Head, log: &Log) {
    match head.renew_certificates() {
        Ok(()) => tracing::info!("the certificates of the head and its operator are renewed"),
        Err(error) => tracing::error!(%error, "the certificates were not renewed"),
    }
    reload_log::<Args>(log);
}

fn read_bearer(file: &Path) -> Result<BearerSecret> {
    let secret = secret::read(file)
        .with_context(|| format!("the bearer secret can't be read from {}", file.display()))?;
    if let Some(warning) = &secret.warning {
        tracing::warn!("{warning}");
    }
    BearerSecret::new(&secret.text).with_context(|| format!("{} is not usable", file.display()))
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
    fn the_line_for_programs_is_one_json_object() {
        let line = ReadyLine {
            cluster: "cluster-1".to_owned(),
            address: "127.0.0.1:1".parse().unwrap(),
            http: None,
            admin: Some(Path::new("/a")),
        };
        assert_eq!(
            Format::Json.line(Args::DAEMON, &line).unwrap(),
            r#"{"cluster":"cluster-1","address":"127.0.0.1:1","http":null,"admin":"/a"}"#
        );
        assert_eq!(
            Format::Text.line(Args::DAEMON, &line).unwrap(),
            "kolo-head: cluster=cluster-1 address=127.0.0.1:1 http=off admin=/a"
        );
    }
}
