//! `kolo-head`: the head of a cluster as a daemon.

mod daemon;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use kolo_runtime::head::replace_file;
use kolo_runtime::http::BearerSecret;
use kolo_runtime::{Head, HeadConfig, HeadState};
use kolo_transport::identity::Role;
use serde::Serialize;

use self::daemon::{Format, Reporting, Signals, duration};

const EXAMPLE: &str = "\
Example: a head for other machines, with a token file for its nodes
  kolo-head --state-dir /var/lib/kolo --listen 10.0.0.1:7700 --http-listen 10.0.0.1:7701 \\
      --node-token-file /etc/kolo/node.token

It prints one line with its addresses when it is ready. SIGTERM and SIGINT stop all jobs, then the head.
Exit codes: 0 stopped, 1 failed, 2 wrong arguments.";

/// The head of a kolo cluster: nodes register with it, drivers submit jobs to it.
#[derive(Debug, Parser)]
#[command(name = "kolo-head", version, after_help = EXAMPLE)]
struct Args {
    /// Folder for the authority of the cluster, tokens, and the credentials of an operator (in admin/)
    #[arg(long, value_name = "DIR", env = "KOLO_HEAD_STATE")]
    state_dir: PathBuf,

    /// Where nodes and drivers connect (QUIC, so UDP). Port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:7700")]
    listen: SocketAddr,

    /// Where the HTTPS API listens. Without it there is none
    #[arg(long, value_name = "ADDRESS")]
    http_listen: Option<SocketAddr>,

    /// File with a secret that gives the rights of a driver over HTTPS
    #[arg(long, value_name = "FILE", requires = "http_listen")]
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

    /// A node that is not heard for so long counts as lost
    #[arg(long, value_name = "DURATION", default_value = "3s", value_parser = duration)]
    lease: Duration,

    /// How often nodes send heartbeats; at most a quarter of the lease
    #[arg(long, value_name = "DURATION", default_value = "250ms", value_parser = duration)]
    heartbeat: Duration,

    /// How long to wait for jobs to end when the head is stopped
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration)]
    stop_timeout: Duration,

    #[command(flatten)]
    reporting: Reporting,
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

fn main() -> ExitCode {
    let args = Args::parse();
    args.reporting.start();
    daemon::end("kolo-head", run(args))
}

#[tokio::main(flavor = "current_thread")]
async fn run(args: Args) -> Result<()> {
    // From here on the signals are not lost, also while the head starts.
    let mut signals = Signals::watch()?;
    let bearer = args.bearer_file.as_deref().map(read_bearer).transpose()?;
    let head = Head::start(HeadConfig {
        state: HeadState::Dir(args.state_dir),
        listen: args.listen,
        http: args.http_listen,
        bearer,
        lease: args.lease,
        heartbeat: args.heartbeat,
        stop_timeout: args.stop_timeout,
        ..HeadConfig::default()
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
    let line = ReadyLine {
        cluster: head.cluster().to_string(),
        address: head.address(),
        http: head.http_address(),
        admin: head.admin_dir(),
    }
    .text(args.reporting.format)?;
    daemon::print(&line)?;
    let signal = signals.next().await;
    tracing::info!(signal, "stopping; a second signal ends the head at once");
    tokio::select! {
        () = head.stop() => Ok(()),
        _ = signals.next() => anyhow::bail!("ended by a second signal; jobs may not have ended well"),
    }
}

fn read_bearer(file: &Path) -> Result<BearerSecret> {
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("the bearer secret can't be read from {}", file.display()))?;
    BearerSecret::new(&text).with_context(|| format!("{} is not usable", file.display()))
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
