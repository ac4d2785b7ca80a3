//! Nodes on hosts that are reached by the system's `ssh`.
//!
//! [`bring_up`] logs in to all hosts at once, sends `kolo-node` where it is missing, and joins each host's node to the
//! head. [`BroughtUp`] holds them: the nodes live as long as it does, [`down`](BroughtUp::down) ends them with care, and
//! when the process that holds it dies, however that is, they end by themselves.
//!
//! ```no_run
//! # async fn example(head: &kolo_runtime::Head) -> Result<(), Box<dyn std::error::Error>> {
//! use kolo_runtime::hosts::parse_hosts;
//! use kolo_runtime::ssh::{HeadAccess, SshOptions, bring_up};
//!
//! let hosts = parse_hosts("a:4,b:4")?;
//! let up = bring_up(&hosts, &SshOptions::default(), &HeadAccess::to(head)).await?;
//! for node in up.nodes() {
//!     println!("{} is {}", node.host, node.node);
//! }
//! up.down(kolo_runtime::ssh::Ending::Graceful).await;
//! # Ok(()) }
//! ```
//!
//! # How
//!
//! One connection for each host does everything. ssh runs `/bin/sh`, whose script comes over standard input, as do the
//! program, if it is missing, and the order for the node with its join token, which is good for one use. Nothing that
//! is secret, and nothing that was given by a user, is on a command line or in an environment. Standard input then stays
//! open: its end tells the node that the launcher is gone. Where the network between them is cut nothing ends, so the
//! launcher also says every few seconds that it lives, and a node that has not heard it for the lease of the launch (30 s) leaves.

mod access;
mod agent;
mod binary;
mod carry;
mod error;
mod host;
mod options;
mod place;
mod protocol;
mod reach;
mod script;
pub mod state;

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use kolo_transport::RandomId as _;
use kolo_transport::ids::{ClusterId, DriverId, NodeId};
use tokio::process::Command;
use tokio::sync::{Semaphore, mpsc, watch};

pub use self::access::{HeadAccess, NodeAuthority};
pub use self::agent::run_if_launched;
pub(crate) use self::binary::find_program;
pub use self::error::{HostError, UpError};
pub use self::host::Stage;
pub use self::options::SshOptions;
pub(crate) use self::place::{Place, locate};
pub use self::protocol::ReadyNode;
pub(crate) use self::script::quote;

use self::binary::Binary;
use self::carry::{Carrier, Report, Wish};
use self::host::{Expected, Host};
use self::place::{Hands, platform};
use self::protocol::{Order, StopOrder, Task};
use self::script::Program;
use crate::hosts::{HostSlots, own_name};

/// The version of this program, as `kolo-node --version` prints it.
const VERSION: &str = concat!("kolo-node ", env!("CARGO_PKG_VERSION"));

/// How nodes are ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Their jobs get notice, TERM, and KILL after their grace; then the nodes leave the cluster.
    Graceful,
    /// Their jobs are killed, the nodes leave without a word.
    Forced,
}

/// A node of a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpNode {
    /// The host, as given.
    pub host: HostSlots,
    /// Its id in the cluster.
    pub node: NodeId,
    /// Where drivers reach it.
    pub address: SocketAddr,
    /// What it said when it was ready; nothing if it was up already, and so is not this launch's.
    pub started: Option<ReadyNode>,
}

/// Something that happens while hosts are brought up or kept.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum HostEvent {
    /// A host is at another stage.
    Stage {
        /// The host, as given.
        host: HostSlots,
        /// What goes on there.
        stage: Stage,
    },
    /// A host did not come up. The others go on, so that all that is wrong is told at once.
    Failed {
        /// The host, as given.
        host: HostSlots,
        /// Why.
        error: HostError,
    },
}

/// What became of each host when they were taken down, in order.
pub type DownReport = Vec<(HostSlots, Result<(), HostError>)>;

/// Nodes that are up, and the connections on which they live.
///
/// When it is dropped, the connections end, and the nodes end by themselves: they give their jobs the usual grace. To
/// wait for that, use [`down`](Self::down). Detached nodes run on in any case.
pub struct BroughtUp {
    nodes: Vec<UpNode>,
    /// The hosts that were started here, by the carriers' numbers.
    started: Vec<HostSlots>,
    /// Whether each of `started` is still there.
    live: Vec<bool>,
    reports: mpsc::Receiver<Report>,
    wishes: watch::Sender<Wish>,
    hands: Hands,
}

impl fmt::Debug for BroughtUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BroughtUp")
            .field("nodes", &self.nodes)
            .finish_non_exhaustive()
    }
}

/// As [`bring_up_with`], without anybody who watches.
///
/// # Errors
///
/// [`UpError`].
pub async fn bring_up<A: NodeAuthority>(
    hosts: &[HostSlots],
    options: &SshOptions,
    head: &HeadAccess<A>,
) -> Result<BroughtUp, UpError> {
    bring_up_with(hosts, options, head, |_| {}).await
}

/// Brings nodes up on all hosts, or on none: each offers as many CPUs as its host has slots, under the host's name as it
/// was given. A host whose node is alive in the cluster already is left as it is, and so is a host without slots.
///
/// Returns when all nodes are registered with the head. May be awaited on any executor. `watch` is told what happens.
///
/// # Errors
///
/// [`UpError`]. All hosts are tried before [`UpError::Hosts`] is returned, so it tells of all that are not right; those
/// that came up are taken down again.
///
/// # Cancel safety
///
/// When the future is dropped, all connections end, and with them what was started.
pub async fn bring_up_with<A: NodeAuthority>(
    hosts: &[HostSlots],
    options: &SshOptions,
    head: &HeadAccess<A>,
    watch: impl FnMut(HostEvent),
) -> Result<BroughtUp, UpError> {
    let mut places = locate(hosts, &own_name(), options).await?;
    places.retain(|place| place.host.slots > 0);
    bring_up_at(places, options, head, watch).await
}

/// As [`bring_up_with`], for hosts that were looked up already.
pub(crate) async fn bring_up_at<A: NodeAuthority>(
    places: Vec<Place>,
    options: &SshOptions,
    head: &HeadAccess<A>,
    mut watch: impl FnMut(HostEvent),
) -> Result<BroughtUp, UpError> {
    if places.is_empty() {
        return Err(UpError::NoHosts);
    }
    let hosts: Vec<HostSlots> = places.iter().map(|place| place.host.clone()).collect();
    let hands = Hands::start()?;
    if head.addresses.is_loopback_only()
        && let Some(far) = places.iter().find(|place| !place.shares_loopback)
    {
        return Err(UpError::HeadIsLocal {
            listen: head
                .addresses
                .here
                .map(|address| address.to_string())
                .unwrap_or_default(),
            host: far.host.destination(),
        });
    }
    let alive = head.authority.alive().await.map_err(UpError::Head)?;
    let (mut nodes, mut to_start) = (Vec::new(), Vec::new());
    for place in places {
        let known = alive.iter().find(|(name, ..)| place.host.is_called(name));
        match known {
            Some((_, node, address)) => nodes.push(UpNode {
                host: place.host,
                node: *node,
                address: *address,
                started: None,
            }),
            None => to_start.push(place),
        }
    }
    let (report, reports) = mpsc::channel(64 + 16 * to_start.len());
    let (wishes, wish) = watch::channel(Wish::Run);
    let mut up = BroughtUp {
        nodes,
        started: to_start.iter().map(|place| place.host.clone()).collect(),
        live: vec![false; to_start.len()],
        reports,
        wishes,
        hands,
    };
    up.start(&to_start, options, &report, &wish)?;
    drop((report, wish));
    let failed = up.gather(&to_start, options, head, &mut watch).await;
    if failed.is_empty() {
        // In the order of the list.
        up.nodes.sort_by_key(|node| {
            hosts
                .iter()
                .position(|host| *host == node.host)
                .unwrap_or(usize::MAX)
        });
        return Ok(up);
    }
    let detached = options.detach;
    let mut failed: Vec<(String, HostError)> = failed
        .into_iter()
        .map(|(index, error)| (up.started[index].destination(), error))
        .collect();
    let position = |name: &str| hosts.iter().position(|host| host.destination() == name);
    failed.sort_by_key(|(name, _)| position(name));
    let mut left = Vec::new();
    if detached {
        let started: Vec<HostSlots> = up
            .nodes
            .iter()
            .filter(|node| node.started.is_some())
            .map(|node| node.host.clone())
            .collect();
        left = match take_down(&started, options, head.cluster, Ending::Graceful).await {
            Ok(ended) => ended
                .into_iter()
                .filter(|(_, result)| result.is_err())
                .map(|(host, _)| host)
                .collect(),
            Err(_) => started,
        };
    } else {
        up.down(Ending::Graceful).await;
    }
    Err(UpError::of_hosts(failed, hosts.len(), left))
}

/// Ends detached nodes of a cluster on these hosts, all at once, and waits until they have ended. A host on which none
/// runs counts as done.
///
/// # Errors
///
/// [`UpError`] if nothing could be tried; what went wrong on a host is in the report.
pub async fn take_down(
    hosts: &[HostSlots],
    options: &SshOptions,
    cluster: ClusterId,
    how: Ending,
) -> Result<DownReport, UpError> {
    if hosts.is_empty() {
        return Ok(Vec::new());
    }
    let hands = Hands::start()?;
    let places = locate(hosts, &own_name(), options).await?;
    let (report, reports) = mpsc::channel(64 + 16 * places.len());
    let (wishes, wish) = watch::channel(Wish::Run);
    let mut going = BroughtUp {
        nodes: Vec::new(),
        started: hosts.to_vec(),
        live: vec![false; hosts.len()],
        reports,
        wishes,
        hands,
    };
    let options = SshOptions {
        // The host is silent while its jobs end.
        stall_timeout: options.stall_timeout
            + options.stop_timeout
            + options.drain_timeout.unwrap_or_default(),
        detach: true,
        ..options.clone()
    };
    going.start(&places, &options, &report, &wish)?;
    drop((report, wish));
    let mut results: Vec<Option<Result<(), HostError>>> = vec![None; hosts.len()];
    while results.iter().any(Option::is_none) {
        match going.reports.recv().await {
            Some(Report::WantsOrder(index, _, answer)) => {
                let order = Task::Stop(StopOrder {
                    cluster: cluster.to_string(),
                    hostname: hosts[index].host.clone(),
                    force: how == Ending::Forced,
                    drain_ms: millis(options.drain_timeout.unwrap_or_default()),
                    timeout_ms: millis(options.stop_timeout),
                });
                // The host may have ended meanwhile; that is reported next.
                let line = order.line().map_err(|text| HostError::Token { text });
                drop(answer.send(line));
            }
            Some(Report::Failed(index, error)) => results[index] = Some(Err(error)),
            Some(Report::Down(index)) => results[index] = Some(Ok(())),
            Some(Report::Stage(..) | Report::Up(..)) => {}
            None => break,
        }
    }
    Ok(hosts
        .iter()
        .cloned()
        .zip(
            results
                .into_iter()
                .map(|result| result.unwrap_or(Err(HostError::GivenUp))),
        )
        .collect())
}

impl BroughtUp {
    /// The nodes, in the order of the hosts, those included that were up before.
    pub fn nodes(&self) -> &[UpNode] {
        &self.nodes
    }

    fn start(
        &self,
        places: &[Place],
        options: &SshOptions,
        report: &mpsc::Sender<Report>,
        wish: &watch::Receiver<Wish>,
    ) -> Result<(), UpError> {
        let sends = options.remote_program.is_none();
        let binary = if sends && !places.is_empty() {
            Some(Binary::load(options.node_program.as_deref())?)
        } else {
            None
        };
        let turns = Arc::new(Semaphore::new(options.parallel.max(1)));
        for (index, place) in places.iter().enumerate() {
            let mut command;
            if place.here {
                command = Command::new("/bin/sh");
                command.env_remove("SSH_CONNECTION");
            } else {
                command = Command::new(&options.program);
                command.args(options.arguments(&place.host));
            }
            let nonce = format!("{:016x}", DriverId::random().0);
            let name;
            let program = match (&binary, &options.remote_program) {
                (Some(binary), _) if place.here => {
                    name = binary.path.to_string_lossy().into_owned();
                    Program::There(&name)
                }
                (Some(binary), _) => {
                    name = script::cached_name(env!("CARGO_PKG_VERSION"), &binary.sha256);
                    Program::Sent {
                        name: &name,
                        size: binary.bytes.len() as u64,
                        sha256: &binary.sha256,
                        nonce: &nonce,
                    }
                }
                (None, path) => Program::There(path.as_deref().unwrap_or_default()),
            };
            let expected = Expected {
                platform: matches!(program, Program::Sent { .. }).then(platform),
                version: VERSION.to_owned(),
            };
            let carrier = Carrier {
                index,
                command,
                script: script::script(&program),
                program: binary.as_ref().map(|binary| Arc::clone(&binary.bytes)),
                host: Host::new(expected, !place.here, options.detach),
                stall_timeout: options.stall_timeout,
                stop_timeout: options.stop_timeout,
                beat: (!options.detach).then(|| options.lease() / 5),
                turns: Arc::clone(&turns),
                reports: report.clone(),
                wishes: wish.clone(),
            };
            self.hands.spawn(carrier.run());
        }
        Ok(())
    }

    /// Waits until every host is up or is not going to be.
    async fn gather<A: NodeAuthority>(
        &mut self,
        places: &[Place],
        options: &SshOptions,
        head: &HeadAccess<A>,
        watch: &mut impl FnMut(HostEvent),
    ) -> Vec<(usize, HostError)> {
        let mut open = places.len();
        let mut failed = Vec::new();
        let mut machines = Machines::default();
        while open > 0 {
            let Some(report) = self.reports.recv().await else {
                break;
            };
            match report {
                Report::Stage(index, stage) => watch(HostEvent::Stage {
                    host: places[index].host.clone(),
                    stage,
                }),
                Report::WantsOrder(index, greeting, answer) => {
                    let order = match machines.same(index, &places[index].host, greeting.machine) {
                        Some(first) => Err(HostError::SameMachine {
                            first: places[first].host.destination(),
                        }),
                        None => order(&places[index], greeting.from, options, head)
                            .await
                            .map_err(|text| HostError::Token { text }),
                    };
                    // The host may have ended meanwhile; that is reported next.
                    drop(answer.send(order));
                }
                Report::Up(index, ready) => {
                    open -= 1;
                    self.live[index] = !options.detach;
                    self.nodes.push(UpNode {
                        host: places[index].host.clone(),
                        node: ready.node,
                        address: ready.address,
                        started: Some(ready),
                    });
                }
                Report::Failed(index, error) => {
                    // One that was up may be lost while others are on their way.
                    let was_up = std::mem::take(&mut self.live[index]);
                    if !was_up {
                        open -= 1;
                    }
                    watch(HostEvent::Failed {
                        host: places[index].host.clone(),
                        error: error.clone(),
                    });
                    failed.push((index, error));
                }
                Report::Down(_) => {}
            }
        }
        failed
    }

    /// The next node that is lost: its connection, its host or the node itself. Pends for ever when there is none left.
    /// Cancel safe.
    pub async fn lost(&mut self) -> (HostSlots, HostError) {
        while let Some(report) = self.reports.recv().await {
            if let Report::Failed(index, error) = report {
                self.live[index] = false;
                return (self.started[index].clone(), error);
            }
        }
        std::future::pending().await
    }

    /// Ends all nodes that this launch has started, and waits until they have ended. Detached ones are not touched, nor
    /// those that were up before. When the future is dropped, what is left ends as if `self` had been dropped.
    pub async fn down(mut self, how: Ending) -> DownReport {
        let wish = match how {
            Ending::Graceful => Wish::Stop,
            Ending::Forced => Wish::Kill,
        };
        let mut open = self.live.iter().filter(|live| **live).count();
        // Carriers that have ended need not know.
        self.wishes.send_replace(wish);
        let mut results: DownReport = Vec::new();
        while open > 0 {
            let (index, result) = match self.reports.recv().await {
                Some(Report::Down(index)) => (index, Ok(())),
                Some(Report::Failed(index, error)) => (index, Err(error)),
                Some(_) => continue,
                None => break,
            };
            if std::mem::take(&mut self.live[index]) {
                open -= 1;
                results.push((self.started[index].clone(), result));
            }
        }
        results
    }
}

/// What hosts say of themselves, by their places in the list.
#[derive(Default)]
struct Machines(HashMap<String, usize>);

impl Machines {
    /// Which other host is the same machine. Whoever names an address such as `127.0.0.2` wants another host.
    fn same(&mut self, index: usize, host: &HostSlots, says: String) -> Option<usize> {
        if says.is_empty() || host.machine("").is_host_by_wish() {
            return None;
        }
        let first = *self.0.entry(says).or_insert(index);
        (first != index).then_some(first)
    }
}

fn millis(time: Duration) -> u64 {
    time.as_millis().try_into().unwrap_or(u64::MAX)
}

async fn order<A: NodeAuthority>(
    place: &Place,
    from: Option<IpAddr>,
    options: &SshOptions,
    head: &HeadAccess<A>,
) -> Result<Vec<u8>, String> {
    let token = head.authority.node_token().await?;
    Task::Start(Order {
        token: token.to_string(),
        heads: head.addresses.candidates(from, place.here),
        hostname: place.host.host.clone(),
        cluster: head.cluster.to_string(),
        cpus: f64::from(place.host.slots),
        gpus_for_all: options.gpus_for_all,
        lease_ms: (!options.detach).then(|| millis(options.lease())),
        // Its own error comes before the launcher loses patience.
        join_timeout_ms: millis(options.stall_timeout * 2 / 3),
        stop_timeout_ms: millis(options.stop_timeout),
    })
    .line()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hosts::parse_hosts;

    #[test]
    fn hosts_that_say_the_same_of_themselves_are_one_machine() {
        let hosts =
            parse_hosts("a:1,a.example:1,b:1,127.0.0.2:1,127.0.0.3:1,old:1,older:1").unwrap();
        let mut machines = Machines::default();
        let says = ["x", "x", "y", "x", "x", "", ""];
        let same: Vec<_> = (0..)
            .zip(hosts.iter().zip(says))
            .map(|(index, (host, says))| machines.same(index, host, says.to_owned()))
            .collect();
        assert_eq!(same, [None, Some(0), None, None, None, None, None]);
        let again = machines.same(0, &hosts[0], "x".to_owned());
        assert_eq!(again, None, "it is asked again");
    }
}
