//! `kolo down`.

use std::time::{Duration, Instant};

use clap::Args;
use kolo_transport::ids::ClusterId;
use kolo_transport::wire::span::Span;
use serde::Serialize;

use super::args::{Connect, Format, time};
use super::client::Client;
use super::down_exclusion::Exclusion;
use super::error::CliError;
use super::host_args::{HostArgs, SshArgs};
use super::output::{Cell, Output, Tone};
use super::up::eprintln_or_ignore;
use super::up_head::{heads_dir, stop_head, sweep};
use crate::hosts::HostSlots;
use crate::private_file::is_locked;
use crate::ssh::state::{Launch, SshRecord};
use crate::ssh::{Ending, HostError, SshOptions, take_down};

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
    /// Hosts that can't be reached: revoke their nodes, so that these can't come back, and forget them. What runs there may be
    /// left
    #[arg(long)]
    pub(super) give_up: bool,
    /// How long running jobs may go on before they are stopped; new ones are not taken [default: they are stopped at once]
    #[arg(long, value_name = "DURATION", value_parser = time, conflicts_with = "force")]
    pub(super) drain_timeout: Option<Duration>,
    /// How long a node may then take to end
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = time)]
    pub(super) stop_timeout: Duration,
    #[command(flatten)]
    pub(super) ssh: SshArgs,
}

#[derive(Serialize)]
struct Ended {
    host: String,
    down: bool,
    error: Option<String>,
    /// What may be left there, if the host was given up.
    given_up: Option<String>,
}

impl Ended {
    fn new(host: String, result: Result<(), String>) -> Self {
        Self {
            host,
            down: result.is_ok(),
            error: result.err(),
            given_up: None,
        }
    }
}

pub(super) async fn run(
    options: &Down,
    connect: &Connect,
    format: Format,
    out: &mut Output<'_>,
) -> Result<u8, CliError> {
    let given = options.hosts.read_names()?;
    // What launches have left that were killed.
    if let Ok(heads) = heads_dir() {
        sweep(&heads);
    }
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
    let hosts = match (&given, launch) {
        (Some(given), _) => given.clone(),
        (None, Some(launch)) => launch.slots().map_err(CliError::Hosts)?,
        (None, None) => Vec::new(),
    };
    if let Some(given) = &given {
        let known = launch.map_or(Ok(Vec::new()), Launch::slots);
        let known = known.map_err(CliError::Hosts)?;
        let is_new = |host: &&HostSlots| {
            !known
                .iter()
                .any(|it| it.destination() == host.destination())
        };
        let new: Vec<String> = given
            .iter()
            .filter(is_new)
            .map(HostSlots::destination)
            .collect();
        if !new.is_empty() {
            eprintln_or_ignore(&format!(
                "kolo: not on record here: {}; looking there, over ssh, for nodes of {cluster}",
                new.join(", ")
            ));
        }
    }
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
    let (mut rows, mut over) = (Vec::new(), Vec::new());
    let mut exclusion = options.give_up.then(|| Exclusion::new(launch, connect));
    for (host, result) in report {
        let mut row = Ended::new(
            host.destination(),
            result.as_ref().copied().map_err(ToString::to_string),
        );
        if let (Some(exclusion), Err(error)) = (&mut exclusion, &result)
            && is_out_of_reach(error)
        {
            match exclusion.put_out(&host).await {
                Ok(left) => row.given_up = Some(left),
                Err(why) => {
                    row.error = Some(format!("{error}; it can't be given up, since {why}"));
                }
            }
        }
        if row.down || row.given_up.is_some() {
            over.push(host);
        }
        rows.push(row);
    }
    if let Some(exclusion) = exclusion {
        exclusion.end().await;
    }
    let ended = launch.map_or(Ok(None), |launch| settle(launch, &over))?;
    let head_is_gone = ended.as_ref().is_some_and(|head| head.down);
    rows.extend(ended);
    show(&rows, format, out)?;
    out.flush()?;
    if let (Some(launch), true) = (launch, head_is_gone)
        && std::env::var("KOLO_HEAD").is_ok_and(|head| head.trim() == launch.head)
    {
        eprintln_or_ignore(
            "kolo: KOLO_HEAD still names the head that has ended: unset KOLO_HEAD KOLO_CREDENTIALS",
        );
    }
    let left = rows.iter().filter(|row| !row.is_over()).count();
    if left > 0 && launch.is_some() && !options.give_up {
        eprintln_or_ignore(
            "kolo: what is not down stays on record: try again later, kill it with --force, or, if a host can't be \
             reached any more, forget it with --give-up",
        );
    }
    Ok(u8::from(left > 0))
}

impl Ended {
    /// Whether nothing is left to do.
    fn is_over(&self) -> bool {
        self.down || self.given_up.is_some()
    }
}

/// Strikes hosts off the record, and ends the head when none is left.
fn settle(launch: &Launch, over: &[HostSlots]) -> Result<Option<Ended>, CliError> {
    let strike = |before: Option<Launch>| {
        let mut launch = before?;
        launch.remove(over);
        Some(launch)
    };
    let after = Launch::change(&launch.cluster, strike).map_err(CliError::Hosts)?;
    if after.is_none_or(|after| !after.hosts.is_empty()) {
        return Ok(None);
    }
    let head = end_head(launch);
    if head.as_ref().is_none_or(|head| head.down) {
        // Unless somebody has brought up hosts meanwhile.
        let forget = |before: Option<Launch>| before.filter(|launch| !launch.hosts.is_empty());
        Launch::change(&launch.cluster, forget).map_err(CliError::Hosts)?;
    }
    Ok(head)
}

/// Whether nothing can be done there. A host that says itself why its node has not ended is reached.
fn is_out_of_reach(error: &HostError) -> bool {
    !matches!(error, HostError::Node { .. })
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
    if is_locked(&state.join("lock")) {
        stop_head(pid);
        let deadline = Instant::now() + HEAD_END;
        while is_locked(&state.join("lock")) {
            if Instant::now() > deadline {
                error = Some(format!("process {pid} has not ended in {}", Span(HEAD_END)));
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
    Some(Ended::new("head".to_owned(), error.map_or(Ok(()), Err)))
}

fn show(rows: &[Ended], format: Format, out: &mut Output<'_>) -> Result<(), CliError> {
    if format == Format::Json {
        return out.json(rows);
    }
    let rows: Vec<[Cell; 2]> = rows
        .iter()
        .map(|row| {
            let state = match (&row.given_up, &row.error) {
                (Some(left), _) => Cell::toned(format!("given up: {left}"), Tone::Bad),
                (None, Some(error)) => Cell::toned(error.as_str(), Tone::Bad),
                (None, None) => Cell::toned("down", Tone::Good),
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
            nodes: Vec::new(),
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
    fn only_a_host_that_does_not_answer_is_given_up() {
        let text = String::new;
        assert!(is_out_of_reach(&HostError::Ssh { text: text() }));
        assert!(is_out_of_reach(&HostError::CannotRun {
            code: 127,
            text: text()
        }));
        assert!(!is_out_of_reach(&HostError::Node { text: text() }));
    }
}
