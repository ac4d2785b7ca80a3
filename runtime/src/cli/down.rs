//! `kolo down`.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use kolo_transport::ids::ClusterId;
use rustix::fs::{FlockOperation, flock};
use serde::Serialize;

use super::args::{Connect, Format, seconds};
use super::client::Client;
use super::error::CliError;
use super::host_args::{HostArgs, SshArgs};
use super::output::{Cell, Output, Tone};
use super::up_head::stop_head;
use crate::hosts::{HostSlots, parse_hosts};
use crate::ssh::state::{Launch, SshRecord};
use crate::ssh::{Ending, SshOptions, take_down};

/// How long a head may take to end.
const HEAD_END: Duration = Duration::from_secs(60);

#[derive(Debug, Args)]
pub(super) struct Down {
    /// Only these hosts [default: all that `kolo up --detach` has started]
    #[command(flatten)]
    pub(super) hosts: HostArgs,
    /// Kill jobs and nodes at once
    #[arg(long, short)]
    pub(super) force: bool,
    /// Seconds in which running jobs may end by themselves before they are stopped; new ones are not taken [default: they
    /// are stopped at once]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, conflicts_with = "force")]
    pub(super) drain_timeout: Option<Duration>,
    /// Seconds that a node may then take to end
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub(super) stop_timeout: Duration,
    #[command(flatten)]
    pub(super) ssh: SshArgs,
}

#[derive(Serialize)]
struct Ended {
    host: String,
    down: bool,
    error: Option<String>,
}

pub(super) async fn run(
    options: &Down,
    connect: &Connect,
    format: Format,
    out: &mut Output<'_>,
) -> Result<u8, CliError> {
    let given = options.hosts.read()?;
    let launches = Launch::all().map_err(CliError::Hosts)?;
    let head = connect.config().head;
    let launch = choose(&launches, head.as_deref(), given.is_some())?;
    let cluster: ClusterId = if let Some(launch) = launch {
        launch
            .cluster
            .parse()
            .map_err(|_| CliError::Hosts(format!("`{}` is no id of a cluster", launch.cluster)))?
    } else {
        // Started from another machine: the head knows which cluster it is.
        let client = Client::connect(&connect.config()).await?;
        let cluster = client.cluster().await?.cluster;
        client.close().await;
        cluster
    };
    let none = SshRecord::default();
    let ssh = SshOptions {
        stop_timeout: options.stop_timeout,
        drain_timeout: options.drain_timeout,
        ..options
            .ssh
            .options_or(launch.map_or(&none, |launch| &launch.ssh))
    };
    let recorded = match launch {
        Some(launch) => recorded(launch)?,
        None => Vec::new(),
    };
    let hosts = given.clone().unwrap_or_else(|| recorded.clone());
    let how = if options.force {
        Ending::Forced
    } else {
        Ending::Graceful
    };
    let report = if hosts.is_empty() {
        Vec::new()
    } else {
        take_down(&hosts, &ssh, cluster, how).await?
    };
    let mut rows: Vec<Ended> = report
        .iter()
        .map(|(host, result)| Ended {
            host: host.destination(),
            down: result.is_ok(),
            error: result.as_ref().err().map(ToString::to_string),
        })
        .collect();
    if let Some(launch) = launch {
        let left: Vec<String> = recorded
            .iter()
            .filter(|host| {
                let ended = report.iter().find(|(ended, _)| ended.host == host.host);
                !ended.is_some_and(|(_, result)| result.is_ok())
            })
            .map(ToString::to_string)
            .collect();
        if left.is_empty() {
            if let Some(row) = end_head(launch) {
                rows.push(row);
            }
            launch.forget().map_err(CliError::Hosts)?;
        } else {
            Launch {
                hosts: left,
                ..launch.clone()
            }
            .save()
            .map_err(CliError::Hosts)?;
        }
    }
    show(&rows, format, out)?;
    Ok(u8::from(rows.iter().any(|row| !row.down)))
}

fn recorded(launch: &Launch) -> Result<Vec<HostSlots>, CliError> {
    if launch.hosts.is_empty() {
        return Ok(Vec::new());
    }
    parse_hosts(&launch.hosts.join(",")).map_err(|error| {
        CliError::Hosts(format!("the record of the launch is not readable: {error}"))
    })
}

/// The launch that is meant: the one of the head that is given, or else the only one.
fn choose<'a>(
    launches: &'a [Launch],
    head: Option<&str>,
    has_hosts: bool,
) -> Result<Option<&'a Launch>, CliError> {
    let of_head: Vec<&Launch> = launches
        .iter()
        .filter(|launch| head.is_none_or(|head| launch.head == head.trim()))
        .collect();
    match of_head.as_slice() {
        [one] => Ok(Some(one)),
        [] if has_hosts => Ok(None),
        [] => Err(CliError::Usage(match head {
            Some(head) => format!(
                "nothing is on record here for the head at {head}; give --hosts if it was started from elsewhere"
            ),
            None => "nothing is up: `kolo up --detach` has started nothing from here; give --hosts if it was started \
                     from elsewhere"
                .to_owned(),
        })),
        many => {
            let heads: Vec<&str> = many.iter().map(|launch| launch.head.as_str()).collect();
            Err(CliError::Usage(format!(
                "{} launches are on record, with the heads {}; say which by --head",
                many.len(),
                heads.join(", ")
            )))
        }
    }
}

/// Ends the head that the launch has started, and removes its folder.
fn end_head(launch: &Launch) -> Option<Ended> {
    let (pid, state) = (launch.head_pid?, launch.head_state.as_ref()?);
    let mut error = None;
    // Its lock says whether it runs; its number alone could be another process's by now.
    if is_locked(state) {
        stop_head(pid);
        let deadline = Instant::now() + HEAD_END;
        while is_locked(state) {
            if Instant::now() > deadline {
                error = Some(format!("process {pid} has not ended in {HEAD_END:?}"));
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    if error.is_none()
        && let Err(failed) = std::fs::remove_dir_all(state)
        && failed.kind() != std::io::ErrorKind::NotFound
    {
        error = Some(format!("{}: {failed}", state.display()));
    }
    Some(Ended {
        host: "head".to_owned(),
        down: error.is_none(),
        error,
    })
}

fn is_locked(state: &Path) -> bool {
    File::open(state.join("lock")).is_ok_and(|lock| {
        flock(&lock, FlockOperation::NonBlockingLockExclusive) == Err(rustix::io::Errno::WOULDBLOCK)
    })
}

fn show(rows: &[Ended], format: Format, out: &mut Output<'_>) -> Result<(), CliError> {
    if format == Format::Json {
        return out.json(rows);
    }
    let rows: Vec<[Cell; 2]> = rows
        .iter()
        .map(|row| {
            let state = match &row.error {
                None => Cell::toned("down", Tone::Good),
                Some(error) => Cell::toned(error.as_str(), Tone::Bad),
            };
            [row.host.clone().into(), state]
        })
        .collect();
    out.table(["HOST", "STATE"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(head: &str) -> Launch {
        Launch {
            cluster: "cluster-0000000000000001".to_owned(),
            head: head.to_owned(),
            credentials: "/c".into(),
            head_pid: None,
            head_state: None,
            hosts: vec!["a:1".to_owned(), "me@[fd00::2]:2".to_owned()],
            ssh: SshRecord::default(),
        }
    }

    #[test]
    fn the_launch_is_that_of_the_head_or_the_only_one() {
        let both = [launch("h:1"), launch("h:2")];
        assert_eq!(choose(&both[..1], None, false).unwrap(), Some(&both[0]));
        assert_eq!(choose(&both, Some("h:2"), false).unwrap(), Some(&both[1]));
        let error = choose(&both, None, false).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("h:1, h:2"), "{error}");
        assert!(
            choose(&[], None, false)
                .unwrap_err()
                .to_string()
                .contains("nothing is up")
        );
        assert!(
            choose(&both, Some("x:1"), false)
                .unwrap_err()
                .to_string()
                .contains("x:1")
        );
        assert_eq!(choose(&[], None, true).unwrap(), None);
    }

    #[test]
    fn jobs_are_waited_for_only_if_that_is_asked_for() {
        #[derive(Debug, clap::Parser)]
        struct Line {
            #[command(flatten)]
            down: Down,
        }
        let drain = |line: &str| {
            let words = std::iter::once("x").chain(line.split_whitespace());
            let line = <Line as clap::Parser>::try_parse_from(words);
            line.map(|line| line.down.drain_timeout).ok()
        };
        assert_eq!(drain(""), Some(None));
        let asked = Some(Some(Duration::from_secs(90)));
        assert_eq!(drain("--drain-timeout 90"), asked);
        assert_eq!(drain("--force --drain-timeout 90"), None);
    }

    #[test]
    fn hosts_on_record_are_read_as_they_were_written() {
        let hosts = recorded(&launch("h:1")).unwrap();
        assert_eq!(hosts[1].to_string(), "me@[fd00::2]:2");
    }
}
