//! What can be seen of the cluster from this host.

use std::time::{Duration, Instant, SystemTime};

use futures_util::future::join_all;
use kolo_transport::descriptors::make_room;
use kolo_transport::endpoint;
use kolo_transport::wire::{
    ClusterInfo, HeadReply, HeadRequest, InterfacesQuery, NodeInfo, NodeReply, NodeRequest,
    PlacedNode,
};
use kolo_transport::{CloseCode, ConnectError, Connection, RequestError};

use super::super::DESCRIPTORS;
use super::super::args::Connect;
use super::super::client::{Client, ClientConfig};
use super::super::error::{CREDENTIALS, CliError};
use super::super::interfaces::ask;
use super::super::output::human;
use super::host::certificate;
use super::surroundings::{Whose, judge};
use super::{Finding, Level};

/// More than this makes certificates look early or late, and logs hard to compare.
const SKEW: Duration = Duration::from_secs(2);
/// More than this breaks joining and renewing.
const LARGE_SKEW: Duration = Duration::from_secs(60);
/// What a QUIC packet needs to pass whole.
const LEAST_PAYLOAD: u16 = 1200;
/// How long a node may take to answer.
const ANSWER: Duration = Duration::from_secs(3);
/// How long the search for the largest packet may take.
const DISCOVERY: Duration = Duration::from_secs(1);
/// Nodes that are looked at one by one.
const MOST_NODES: usize = 64;

const PORTS: &str = "open the UDP port of the daemon for this host in all firewalls between, and look whether the daemon runs; \
                     give daemons a fixed port with --listen so that a firewall can name it";

pub(super) async fn examine(connect: &Connect) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Err(error) = make_room("a look at the cluster", DESCRIPTORS) {
        let remedy = "raise the limit of open files, or give --local";
        return vec![Finding::bad("cluster", error.to_string(), remedy)];
    }
    let config = connect.config();
    let connected = Client::connect(&config).await;
    if let Err(error @ (CliError::NoCredentials(_) | CliError::Usage(_))) = &connected {
        return vec![Finding::warning(
            "cluster",
            error.to_string(),
            "log in to look at a cluster as well, or give --local",
        )];
    }
    // Also if the head is not reached: it may be why.
    if let Ok(dir) = config.credentials_dir() {
        findings.push(certificate("certificate", &dir));
    }
    let client = match connected {
        Ok(client) => client,
        Err(error) => {
            let clock = match error.exit_code() {
                CREDENTIALS => clock_of_head(&config, &error).await,
                _ => None,
            };
            let to_do = match &clock {
                Some(clock) if clock.level != Level::Good => CLOCKS,
                _ => remedy(&error),
            };
            findings.push(Finding::bad("head", error.to_string(), to_do));
            findings.extend(clock);
            return findings;
        }
    };
    let head = client.address();
    let start = Instant::now();
    let before = SystemTime::now();
    match client.cluster().await {
        Ok(cluster) => {
            if cluster.time_ms > 0 {
                let ours = before + start.elapsed() / 2;
                findings.push(skew("the head", clock_of(cluster.time_ms), ours));
            }
            findings.push(Finding::good(
                "head",
                format!(
                    "{head} answers in {:.2} ms",
                    start.elapsed().as_secs_f64() * 1000.0
                ),
            ));
            let seen = client.request(&HeadRequest::Surroundings, ANSWER).await;
            // A head of another version does not say.
            if let Ok(HeadReply::Surroundings(seen)) = seen {
                findings.extend(judge(Whose::Head, &seen));
            }
            findings.extend(nodes(&client, &cluster).await);
            if cluster.nodes.iter().filter(|node| node.alive).count() > 1 {
                findings.push(network(&client).await);
            }
        }
        Err(error) => findings.push(Finding::bad("head", error.to_string(), remedy(&error))),
    }
    client.close().await;
    findings
}

/// What to do if the head is not reached, or does not talk to us.
fn remedy(error: &CliError) -> &'static str {
    match error {
        CliError::Address { .. } | CliError::Resolve { .. } => {
            "correct the name: --head, KOLO_HEAD, or the `kolo login` that remembers it; or the name server's entry"
        }
        error if error.exit_code() == CREDENTIALS => {
            "log in again with a new token (`kolo login`); if this driver was put out, `kolo revoke ID --undo` by an \
             administrator lets it in"
        }
        _ => PORTS,
    }
}

/// How far the clock of a head is from this one that does not take this side's certificate, or whose certificate this side does
/// not take. `None` if it has nothing to do with clocks, or is not to be learnt.
async fn clock_of_head(config: &ClientConfig, error: &CliError) -> Option<Finding> {
    let client = match Client::connect_undated(config).await {
        Ok(client) => client,
        Err(other) => return dated(&other).or_else(|| dated(error)),
    };
    let (start, before) = (Instant::now(), SystemTime::now());
    let answer = client.cluster().await;
    let ours = before + start.elapsed() / 2;
    client.close().await;
    match answer {
        Ok(cluster) if cluster.time_ms > 0 => {
            Some(skew("the head", clock_of(cluster.time_ms), ours))
        }
        _ => dated(error),
    }
}

/// What a refusal says of a clock: that of the peer if it has checked this side's certificate, and else how far this one is from
/// the life of the peer's, which is renewed for as long as the peer runs.
fn dated(error: &CliError) -> Option<Finding> {
    let CliError::Connect {
        what,
        error: ConnectError::Date { dated, whose, .. },
    } = error
    else {
        return None;
    };
    Some(match whose {
        endpoint::Whose::Own => {
            let theirs = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(dated.clock))?;
            skew(what, theirs, SystemTime::now())
        }
        endpoint::Whose::Theirs => Finding::bad(
            "clock",
            format!(
                "that of {what} is at least {} {} this one",
                human(dated.outside().saturating_mul(1000)),
                if dated.is_early() {
                    "ahead of"
                } else {
                    "behind"
                },
            ),
            CLOCKS,
        ),
    })
}

fn clock_of(time_ms: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH
        .checked_add(Duration::from_millis(time_ms))
        .unwrap_or(SystemTime::UNIX_EPOCH)
}

/// How the nodes reach each other.
async fn network(client: &Client) -> Finding {
    const CHECK: &str = "nodes among themselves";
    let query = InterfacesQuery {
        no_cache: true,
        ..InterfacesQuery::default()
    };
    match ask(client, query).await {
        Ok(report) => match report.problem {
            None => Finding::good(CHECK, format!("connected by {}", report.choice)),
            Some(problem) => Finding::bad(CHECK, problem.message, "see `kolo interfaces`"),
        },
        Err(error) => Finding::bad(CHECK, error.to_string(), "see `kolo interfaces`"),
    }
}

async fn nodes(client: &Client, cluster: &ClusterInfo) -> Vec<Finding> {
    let (alive, lost): (Vec<_>, Vec<_>) = cluster.nodes.iter().partition(|node| node.alive);
    let mut findings: Vec<Finding> = lost
        .iter()
        .map(|node| {
            Finding::warning(
                "node",
                format!(
                    "{} ({}) is lost since {}",
                    node.hostname,
                    node.node,
                    human(node.last_seen_ms)
                ),
                format!(
                    "look at kolo-node on {}, or at the network between it and the head",
                    node.hostname
                ),
            )
        })
        .collect();
    if alive.is_empty() {
        findings.push(Finding::warning(
            "node",
            "no node is there",
            "start one with `kolo-node --head HOST:PORT --token-file FILE`",
        ));
    }
    findings.extend(alive.iter().filter(|node| node.draining).map(|node| {
        Finding::warning(
            "node",
            format!(
                "{} ({}) is draining: it takes no more jobs, since it is being stopped",
                node.hostname, node.node
            ),
            format!(
                "if it is not to end, start kolo-node on {} again when it has: SIGTERM was sent to it",
                node.hostname
            ),
        )
    }));
    let looked = alive.iter().take(MOST_NODES).map(|node| one(client, node));
    findings.extend(join_all(looked).await.into_iter().flatten());
    if alive.len() > MOST_NODES {
        findings.push(Finding::good(
            "node",
            format!("{} more were not looked at", alive.len() - MOST_NODES),
        ));
    }
    findings
}

async fn one(client: &Client, node: &NodeInfo) -> Vec<Finding> {
    let at = format!("{} ({})", node.hostname, node.address);
    let placed = PlacedNode {
        node: node.node,
        hostname: node.hostname.clone(),
        address: node.address,
        ranks: Vec::new(),
        has_program: false,
    };
    let (_endpoint, connection) = match client.node(&placed).await {
        Ok(connected) => connected,
        Err(error) => return unreached(client, &placed, &at, &error).await,
    };
    let mut findings = Vec::new();
    let start = Instant::now();
    let before = SystemTime::now();
    match echo(&connection).await {
        Ok(NodeReply::Echo(echo)) => {
            let took = start.elapsed();
            let over = echo.interface.map(|name| format!(" over its {name}"));
            findings.push(Finding::good(
                "node",
                format!(
                    "{at} answers in {:.2} ms{}",
                    took.as_secs_f64() * 1000.0,
                    over.unwrap_or_default()
                ),
            ));
            if echo.time_ms > 0 {
                findings.push(skew(
                    &node.hostname,
                    clock_of(echo.time_ms),
                    before + took / 2,
                ));
            }
        }
        Ok(_) => findings.push(Finding::warning(
            "node",
            format!("{at} is of another version"),
            "use the same version of kolo on all hosts",
        )),
        Err(error) => findings.push(Finding::bad("node", format!("{at}: {error}"), PORTS)),
    }
    let seen = connection
        .request::<_, NodeReply>(&NodeRequest::Surroundings, ANSWER)
        .await;
    // A node of another version does not say.
    if let Ok(NodeReply::Surroundings(seen)) = seen {
        findings.extend(judge(Whose::Node(&node.hostname), &seen));
    }
    // The connection tries larger and larger packets, none in fragments.
    let deadline = Instant::now() + DISCOVERY;
    let mut payload = connection.path_mtu();
    while payload < EXPECTED_PAYLOAD && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(10)).await;
        payload = connection.path_mtu();
    }
    connection.close(CloseCode::Done, "");
    if payload <= LEAST_PAYLOAD {
        findings.push(Finding::warning(
            "mtu",
            format!("{at}: QUIC packets of more than {payload} bytes do not pass whole"),
            "a tunnel or a wrong MTU is on the way: set the same MTU on all hosts and switches of the network; it costs throughput",
        ));
    }
    findings
}

async fn echo(connection: &Connection) -> Result<NodeReply, RequestError> {
    connection.request(&NodeRequest::Echo, ANSWER).await
}

/// A node that is not reached, and how far its clock is from this one if that is why.
async fn unreached(client: &Client, node: &PlacedNode, at: &str, error: &CliError) -> Vec<Finding> {
    let clock = match dated(error) {
        None => None,
        known => match client.node_undated(node).await {
            Ok((_endpoint, connection)) => {
                let (start, before) = (Instant::now(), SystemTime::now());
                let answer = echo(&connection).await;
                let ours = before + start.elapsed() / 2;
                connection.close(CloseCode::Done, "");
                match answer {
                    Ok(NodeReply::Echo(echo)) if echo.time_ms > 0 => {
                        Some(skew(&node.hostname, clock_of(echo.time_ms), ours))
                    }
                    _ => known,
                }
            }
            Err(other) => dated(&other).or(known),
        },
    };
    let to_do = if clock.is_some() { CLOCKS } else { PORTS };
    let mut findings = vec![Finding::bad("node", format!("{at}: {error}"), to_do)];
    findings.extend(clock);
    findings
}

/// What Ethernet without jumbo frames carries.
const EXPECTED_PAYLOAD: u16 = 1452;

const CLOCKS: &str = "keep all clocks right: `timedatectl set-ntp true`, chrony or ntpd";

fn skew(hostname: &str, theirs: SystemTime, ours: SystemTime) -> Finding {
    let (apart, which) = match theirs.duration_since(ours) {
        Ok(ahead) => (ahead, "ahead of"),
        Err(behind) => (behind.duration(), "behind"),
    };
    let found = if apart < LARGE_SKEW {
        let seconds = apart.as_secs_f64();
        format!("that of {hostname} is {seconds:.3}s {which} this one")
    } else {
        // To the minute: two clocks are not read at the same moment.
        let span = human((apart.as_secs() + 30) / 60 * 60_000);
        format!("that of {hostname} is {span} {which} this one")
    };
    if apart > LARGE_SKEW {
        Finding::bad(
            "clock",
            found,
            format!("{CLOCKS}; certificates look early or ended"),
        )
    } else if apart > SKEW {
        Finding::warning("clock", found, CLOCKS)
    } else {
        Finding::good("clock", found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_to_be_done_fits_what_is_wrong() {
        let resolve = CliError::Resolve {
            head: "x:1".to_owned(),
            reason: "unknown".to_owned(),
        };
        assert!(remedy(&resolve).contains("correct the name"));
        let rejected = CliError::Connect {
            what: "the head".to_owned(),
            error: kolo_transport::ConnectError::Lost {
                address: ([127, 0, 0, 1], 1).into(),
                lost: kolo_transport::ConnectionLost::Closed {
                    code: CloseCode::Revoked,
                    reason: "driver-1 was revoked".to_owned(),
                },
            },
        };
        assert!(remedy(&rejected).contains("kolo login"));
        let unreachable = CliError::Unreachable {
            head: "x:1".to_owned(),
        };
        assert_eq!(remedy(&unreachable), PORTS);
        // Times from outside that no clock can show.
        assert!(clock_of(u64::MAX) > clock_of(5));
    }

    #[test]
    fn a_refusal_by_date_says_how_far_a_clock_is_off() {
        use endpoint::Whose::{Own, Theirs};
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap()
            .as_secs();
        let day = 86_400;
        let told = |clock: u64, limit: u64, whose| {
            dated(&CliError::Connect {
                what: "the head".to_owned(),
                error: ConnectError::Date {
                    address: ([127, 0, 0, 1], 1).into(),
                    dated: endpoint::Dated { clock, limit },
                    whose,
                },
            })
            .unwrap()
        };
        for (finding, part) in [
            // The head's clock is known.
            (told(now - 2 * day, now - day, Own), "2d behind this one"),
            (
                told(now + 2 * day + 60, now + day, Own),
                "2d ahead of this one",
            ),
            // Only that the head's certificate is good for the head.
            (
                told(now, now + 2 * day, Theirs),
                "at least 2d ahead of this one",
            ),
            (
                told(now, now - 2 * day, Theirs),
                "at least 2d behind this one",
            ),
        ] {
            assert_eq!(finding.level, Level::Bad);
            assert!(finding.found.contains(part), "{finding:?}");
            assert!(finding.remedy.unwrap().contains("set-ntp"));
        }
        // The certificate has ended by both clocks.
        assert_eq!(told(now, now - day, Own).level, Level::Good);
        let other = CliError::Unreachable {
            head: "x:1".to_owned(),
        };
        assert_eq!(dated(&other), None);
    }

    #[test]
    fn clocks_that_differ_are_told_with_the_direction() {
        let ours = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        for (theirs, level, part) in [
            (ours, Level::Good, "0.000s ahead of"),
            (
                ours - Duration::from_secs(5),
                Level::Warning,
                "5.000s behind",
            ),
            (ours + Duration::from_secs(120), Level::Bad, "2m ahead of"),
        ] {
            let finding = skew("b", theirs, ours);
            assert_eq!(finding.level, level, "{finding:?}");
            assert!(finding.found.contains(part), "{finding:?}");
        }
    }
}
