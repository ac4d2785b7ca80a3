//! `kolo-head`: the head of a cluster as a daemon.

use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use kolo_runtime::head::held::end_unless_noted;
use kolo_runtime::head::replace_file;
use kolo_runtime::http::BearerSecret;
use kolo_runtime::notify::Notifier;
use kolo_runtime::secret;
use kolo_runtime::settings::logging::{Log, LogArgs};
use kolo_runtime::settings::size::memory;
use kolo_runtime::settings::{self, Daemon};
use kolo_runtime::signals::Ends;
use kolo_runtime::{Head, HeadConfig, HeadState};
use kolo_transport::descriptors;
use kolo_transport::identity::Role;
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};

const EXAMPLE: &str = "\
Example: a head for other machines, with a token file for its nodes
  kolo-head --state-dir /var/lib/kolo --listen 10.0.0.1:7700 --http-listen 10.0.0.1:7701 \\
      --node-token-file /etc/kolo/node.token

Example: the first token for a person, made on the head's machine
  kolo --head 127.0.0.1:7700 --credentials /var/lib/kolo/admin token create --role driver --uses 1

It prints one line with its addresses when it is ready. SIGTERM waits for jobs to end, up to --drain-timeout, then stops
those that are left, then the head; SIGINT does not wait; a second signal ends it at once. SIGHUP renews its
certificates and reads the log level again. Each flag is also an environment variable and a key of the file --config;
flags go before variables, and these before the file.
Exit codes: 0 stopped, 1 failed, 2 wrong arguments or settings.";

/// Descriptors that the daemon needs, some members included.
const DESCRIPTORS: u64 = 48;

const DAEMON: Daemon = Daemon {
    name: "kolo-head",
    prefix: "KOLO_HEAD",
};

/// The head of a kolo cluster: nodes register with it, drivers submit jobs to it.
#[derive(Debug, Parser)]
#[command(name = "kolo-head", version, after_help = EXAMPLE)]
struct Args {
    /// Folder for the authority of the cluster, tokens, and the credentials of an operator (in admin/)
    #[arg(long, value_name = "DIR")]
    state_dir: PathBuf,

    /// Where nodes and drivers connect (QUIC, so UDP). Port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:7700")]
    listen: SocketAddr,

    /// Where the HTTPS API listens. Without it there is none
    #[arg(long, value_name = "ADDRESS")]
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
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = duration)]
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// `kolo-head: cluster=.. address=.. http=.. admin=..`
    Text,
    /// One JSON object.
    Json,
}

/// Reads `250ms`, `3s`, `10m`, `24h` or `7d`.
fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || {
        format!(
            "`{text}` is not a duration; expected a whole number and ms, s, m, h or d, like 250ms or 3s"
        )
    };
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let factor = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(wrong()),
    };
    // A thousand years is more than any of these may be.
    let limit = 1000 * 366 * 86_400_000;
    number
        .checked_mul(factor)
        .filter(|ms| *ms <= limit)
        .map(Duration::from_millis)
        .ok_or_else(wrong)
}

/// The line that is printed when the head is ready.
#[derive(Serialize)]
struct ReadyLine<'a> {
    cluster: String,
    address: SocketAddr,
    http: Option<SocketAddr>,
    admin: Option<&'a Path>,
}

impl ReadyLine<'_> {
    fn text(&self, format: Format) -> Result<String> {
        Ok(match format {
            Format::Json => serde_json::to_string(self)?,
            Format::Text => {
                let http = self
                    .http
                    .map_or_else(|| "off".to_owned(), |http| http.to_string());
                let admin = self.admin.unwrap_or(Path::new("")).display();
                format!(
                    "kolo-head: cluster={} address={} http={http} admin={admin}",
                    self.cluster, self.address
                )
            }
        })
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
    let args = match settings::start(DAEMON, Args::check) {
        Ok(args) => args,
        Err(code) => return code,
    };
    let log = match args.log.start() {
        Ok(log) => log,
        Err(error) => {
            eprintln!("kolo-head: {error}");
            return ExitCode::FAILURE;
        }
    };
    descriptors::raise();
    if let Err(error) = descriptors::make_room("kolo-head", DESCRIPTORS) {
        eprintln!("kolo-head: {error}");
        return ExitCode::FAILURE;
    }
    match run(args, &log) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kolo-head: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn run(args: Args, log: &Log) -> Result<()> {
    // From here on the signals are not lost, also while the head starts.
    let mut ends = Ends::take(&[SignalKind::terminate(), SignalKind::interrupt()])?;
    let mut hangup = signal(SignalKind::hangup()).context("SIGHUP can't be watched")?;
    let notifier = Arc::new(Notifier::from_env());
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
            replace_file(file, format!("{token}\n").as_bytes()).with_context(|| {
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
    writeln!(std::io::stdout(), "{}", ready.text(args.format)?)
        .context("the line with the head's address can't be printed")?;
    let status = format!("{} at {}", ready.cluster, ready.address);
    notifier.ready(&status);
    let watchdog = {
        let (notifier, health) = (Arc::clone(&notifier), head.health());
        tokio::spawn(async move { notifier.watchdog(|limit| health.is_good(limit)).await })
    };
    let drain = loop {
        tokio::select! {
            signal = ends.next() => break signal == SignalKind::terminate().as_raw_value(),
            _ = hangup.recv() => {
                notifier.reloading();
                reload(&head, log);
                notifier.ready(&status);
            }
        }
    };
    let end = async {
        if drain {
            let limit = args.drain_timeout;
            tracing::info!(
                signal = "SIGTERM",
                ?limit,
                "waiting for jobs to end; a second signal ends the head at once"
            );
            notifier.stopping("waiting for jobs to end");
            if !head.drain(limit).await {
                tracing::warn!(
                    ?limit,
                    "not all jobs have ended by themselves; they are stopped"
                );
            }
        }
        tracing::info!("stopping; a second signal ends the head at once");
        notifier.stopping("stopping");
        head.stop().await;
    };
    let ended = tokio::select! {
        () = end => Ok(()),
        _ = ends.next() => Err(anyhow::anyhow!("ended by a second signal; jobs may not have ended well")),
    };
    watchdog.abort();
    ended
}

/// What a `SIGHUP` asks for. What can't be done is logged, and all is as it was.
fn reload(head: &Head, log: &Log) {
    match head.renew_certificates() {
        Ok(()) => tracing::info!("the certificates of the head and its operator are renewed"),
        Err(error) => tracing::error!(%error, "the certificates were not renewed"),
    }
    match settings::reload::<Args>(DAEMON).and_then(|loaded| {
        log.set(&loaded.args.log.log)?;
        Ok(loaded.args.log.log)
    }) {
        Ok(filter) => tracing::info!(filter, "the log level is read again"),
        Err(error) => tracing::error!(error, "the log level was not read again"),
    }
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
            help.contains("Example:") && help.contains("Exit codes:"),
            "{help}"
        );
    }

    #[test]
    fn durations_have_a_unit() {
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(duration("24h"), Ok(Duration::from_secs(86_400)));
        for wrong in [
            "",
            "3",
            "s",
            "-3s",
            "1.5s",
            "NaNs",
            "3 s",
            "99999999999999999999s",
            "9999999999d",
        ] {
            let error = duration(wrong).unwrap_err();
            assert!(error.contains("like 250ms or 3s"), "{wrong}: {error}");
        }
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
            line.text(Format::Json).unwrap(),
            r#"{"cluster":"cluster-1","address":"127.0.0.1:1","http":null,"admin":"/a"}"#
        );
        assert_eq!(
            line.text(Format::Text).unwrap(),
            "kolo-head: cluster=cluster-1 address=127.0.0.1:1 http=off admin=/a"
        );
    }
}
