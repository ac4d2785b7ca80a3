//! What can be seen of the cluster from this host.

use std::time::{Duration, Instant, SystemTime};

use futures_util::future::join_all;
use kolo_transport::descriptors::make_room;
use kolo_transport::endpoint;
use kolo_transport::wire::span::Span;
use kolo_transport::wire::{
    ClusterInfo, HeadReply, HeadRequest, InterfacesQuery, NodeInfo, NodeReply, NodeRequest,
    PlacedNode,
};
use kolo_transport::{CloseCode, ConnectError, Connection, RequestError};

use super::super::DESCRIPTORS;
use super::super::args::Connect;
use super::super::client::{Client, ClientConfig};
use super::super::error::{CREDENTIALS, CliError};
use super::super::ids::Short;
use super::super::interfaces::ask;
use super::super::output::human;
use super::host::certificate;
use super::surroundings::{Whose, judge};
use super::{Finding, Level};
use crate::http::dto::NodeState;

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

const HEAD: &str = "head";
const CLUSTER: &str = "cluster";

/// Whether a daemon answers.
const ANSWERS: &str = "connection";

const PORTS: &str = "open the UDP port of the daemon for this host in all firewalls between, and look whether the daemon runs; \
                     give daemons a fixed port with --listen so that a firewall can name it";

pub(super) async fn examine(connect: &Connect) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Err(error) = make_room("a look at the cluster", DESCRIPTORS) {
        let remedy = "raise the limit of open files, or give --local";
        return vec![Finding::bad("descriptors", error.to_string(), remedy).at(CLUSTER)];
    }
    let config = connect.config();
    let connected = Client::connect(&config).await;
    if let Err(error @ (CliError::NoCredentials(_) | CliError::NoHead | CliError::Usage(_))) =
        &connected
    {
        let (cause, _) = error.cause_and_remedy();
        let finding = match error {
            // A head is given.
            CliError::NoCredentials(_) => Finding::bad,
            _ => Finding::warning,
        };
        let remedy = "log in to look at a cluster as well (`kolo login --head HOST:PORT --token-file FILE`), or give --local";
        return vec![finding("login", cause, remedy).at(CLUSTER)];
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
            let is_of_clocks = matches!(&clock, Some(clock) if clock.level != Level::Good);
            findings.push(no_answer(&error, is_of_clocks.then_some(CLOCKS)));
            findings.extend(clock.map(|clock| clock.at(HEAD)));
            return findings;
        }
    };
    let head = client.address();
    let asked = Asked::now();
    match client.cluster().await {
        Ok(cluster) => {
            let took = asked.start.elapsed().as_secs_f64() * 1000.0;
            let clock = asked.clock("the head", cluster.time_ms);
            findings.extend(clock.map(|clock| clock.at(HEAD)));
            let text = format!("{head} answers in {took:.2} ms");
            findings.push(Finding::good(ANSWERS, text).at(HEAD));
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
        Err(error) => findings.push(no_answer(&error, None)),
    }
    client.close().await;
    findings
}

/// A head that is not reached, or does not talk to us.
fn no_answer(error: &CliError, known: Option<&str>) -> Finding {
    let (cause, told) = error.cause_and_remedy();
    let remedy = match (known, error) {
        (Some(known), _) => known,
        (None, CliError::Connect { .. }) if error.exit_code() == CREDENTIALS => {
            "log in again with a new token (`kolo login`); if this driver was put out, `kolo revoke ID --undo` by an \
             administrator lets it in"
        }
        _ => told.as_deref().unwrap_or(PORTS),
    };
    Finding::bad(ANSWERS, cause, remedy).at(HEAD)
}

/// How far the clock of a head is from this one that does not take this side's certificate, or whose certificate this side does
/// not take. `None` if it has nothing to do with clocks, or is not to be learnt.
async fn clock_of_head(config: &ClientConfig, error: &CliError) -> Option<Finding> {
    let client = match Client::connect_undated(config).await {
        Ok(client) => client,
        Err(other) => return dated(&other).or_else(|| dated(error)),
    };
    let asked = Asked::now();
    let answer = client.cluster().await;
    let clock = answer.map_or(None, |cluster| asked.clock("the head", cluster.time_ms));
    client.close().await;
    clock.or_else(|| dated(error))
}

/// When a daemon was asked for its time.
struct Asked {
    start: Instant,
    at: SystemTime,
}

impl Asked {
    fn now() -> Self {
        Self {
            start: Instant::now(),
            at: SystemTime::now(),
        }
    }

    /// What its answer, which has just come, says of its clock. A daemon of another version does not say.
    fn clock(&self, name: &str, time_ms: u64) -> Option<Finding> {
        let ours = self.at + self.start.elapsed() / 2;
        (time_ms > 0).then(|| skew(name, clock_of(time_ms), ours))
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
    const CHECK: &str = "network";
    let query = InterfacesQuery {
        no_cache: true,
        ..InterfacesQuery::default()
    };
    let found = match ask(client, query).await {
        Ok(report) => match report.problem {
            None => Finding::good(
                CHECK,
                format!("the nodes are connected by {}", report.choice),
            ),
            Some(problem) => Finding::bad(CHECK, problem.message, "see `kolo interfaces`"),
        },
        Err(error) => Finding::bad(CHECK, error.to_string(), "see `kolo interfaces`"),
    };
    found.at(CLUSTER)
}

async fn nodes(client: &Client, cluster: &ClusterInfo) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut alive = Vec::new();
    let ids = Short::of(cluster.nodes.iter().map(|node| node.node.to_string()));
    for node in &cluster.nodes {
        let namesakes = cluster
            .nodes
            .iter()
            .filter(|other| other.hostname == node.hostname);
        let name = match namesakes.count() {
            1 => node.hostname.clone(),
            _ => format!("{} ({})", node.hostname, ids.show(node.node)),
        };
        let told = match NodeState::of(node, &cluster.revoked) {
            NodeState::Alive => None,
            // That is as somebody wants it.
            NodeState::Revoked | NodeState::Left => continue,
            NodeState::Lost => Some((
                format!("it is lost since {}", human(node.last_seen_ms)),
                format!(
                    "look at kolo-node on {}, or at the network between it and the head",
                    node.hostname
                ),
            )),
            NodeState::Draining | NodeState::Drained => Some((
                "it takes no new work: it is drained, or its daemon is being stopped".to_owned(),
                format!(
                    "`kolo node undrain {0}`, or start kolo-node on {0} again when it has ended",
                    node.hostname
                ),
            )),
        };
        let told = told.map(|(found, to_do)| Finding::warning("state", found, to_do).at(&name));
        findings.extend(told);
        if node.alive {
            alive.push((name, node));
        }
    }
    if alive.is_empty() {
        let start = "start one with `kolo-node --head HOST:PORT --token-file FILE`";
        findings.push(Finding::warning("nodes", "no node is there", start).at(CLUSTER));
    }
    let looked = alive.iter().take(MOST_NODES);
    let looked = join_all(looked.map(|(name, node)| one(client, name, node))).await;
    findings.extend(looked.into_iter().flatten());
    if alive.len() > MOST_NODES {
        let text = format!("{} more were not looked at", alive.len() - MOST_NODES);
        findings.push(Finding::good("nodes", text).at(CLUSTER));
    }
    findings
}

async fn one(client: &Client, name: &str, node: &NodeInfo) -> Vec<Finding> {
    let found = look_at(client, name, node).await.into_iter();
    found.map(|finding| finding.at(name)).collect()
}

async fn look_at(client: &Client, name: &str, node: &NodeInfo) -> Vec<Finding> {
    let placed = PlacedNode {
        node: node.node,
        hostname: node.hostname.clone(),
        address: node.address,
        ranks: Vec::new(),
        has_program: false,
    };
    let (_endpoint, connection) = match client.node(&placed, true).await {
        Ok(connected) => connected,
        Err(error) => return unreached(client, &placed, &error).await,
    };
    let mut findings = Vec::new();
    let asked = Asked::now();
    match echo(&connection).await {
        Ok(NodeReply::Echo(echo)) => {
            let took = asked.start.elapsed().as_secs_f64() * 1000.0;
            let clock = asked.clock(&node.hostname, echo.time_ms);
            let over = echo.interface.map(|name| format!(" over its {name}"));
            let over = over.unwrap_or_default();
            let text = format!("{} answers in {took:.2} ms{over}", node.address);
            findings.push(Finding::good(ANSWERS, text));
            findings.extend(clock);
        }
        Ok(_) => findings.push(Finding::warning(
            ANSWERS,
            "it is of another version",
            "use the same version of kolo on all hosts",
        )),
        Err(error) => findings.push(Finding::bad(ANSWERS, error.to_string(), PORTS)),
    }
    let seen = connection
        .request::<_, NodeReply>(&NodeRequest::Surroundings, ANSWER)
        .await;
    // A node of another version does not say.
    if let Ok(NodeReply::Surroundings(seen)) = seen {
        findings.extend(judge(Whose::Node(name), &seen));
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
            format!("QUIC packets of more than {payload} bytes do not pass whole"),
            "a tunnel or a wrong MTU is on the way: set the same MTU on all hosts and switches of the network; it costs throughput",
        ));
    }
    findings
}

async fn echo(connection: &Connection) -> Result<NodeReply, RequestError> {
    connection.request(&NodeRequest::Echo, ANSWER).await
}

/// A node that is not reached, and how far its clock is from this one if that is why.
async fn unreached(client: &Client, node: &PlacedNode, error: &CliError) -> Vec<Finding> {
    let clock = match dated(error) {
        None => None,
        known => match client.node(node, false).await {
            Ok((_endpoint, connection)) => {
                let asked = Asked::now();
                let clock = match echo(&connection).await {
                    Ok(NodeReply::Echo(echo)) => asked.clock(&node.hostname, echo.time_ms),
                    _ => None,
                };
                connection.close(CloseCode::Done, "");
                clock.or(known)
            }
            Err(other) => dated(&other).or(known),
        },
    };
    let to_do = if clock.is_some() { CLOCKS } else { PORTS };
    let (cause, _) = error.cause_and_remedy();
    let mut findings = vec![Finding::bad(ANSWERS, cause, to_do)];
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
    let found = if apart < Duration::from_millis(10) {
        format!("that of {hostname} agrees with this one")
    } else if apart < LARGE_SKEW {
        let apart = Span(apart);
        format!("that of {hostname} is {apart} {which} this one")
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
        let remedy = |error| no_answer(error, None).remedy.unwrap();
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
        assert!(remedy(&unreachable).contains("kolo-head runs there"));
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
            (ours, Level::Good, "that of b agrees with this one"),
            (ours - Duration::from_secs(5), Level::Warning, "5s behind"),
            (ours + Duration::from_secs(120), Level::Bad, "2m ahead of"),
        ] {
            let finding = skew("b", theirs, ours);
            assert_eq!(finding.level, level, "{finding:?}");
            assert!(finding.found.contains(part), "{finding:?}");
        }
    }
}
