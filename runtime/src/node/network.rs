//! The node's network interfaces: what the head and other nodes are told of them, and the probe of other nodes'.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use futures_util::future::join_all;
use kolo_transport::interfaces;
use kolo_transport::wire::span::Span;
use kolo_transport::wire::{
    Echo, NodeNetwork, NodeReply, NodeRequest, Probe, ProbeFailure, ProbeResult, ProbeTarget,
};
use kolo_transport::{CloseCode, ConnectError, Connection, Endpoint, Expect};
use tokio::sync::{Semaphore, watch};

use crate::hosts::own_name;
use crate::surroundings::{addresses, problem_of_name};

/// Round trips on each address, at least and at most; the shortest counts.
const ROUNDS: [usize; 2] = [3, 8];

/// A shorter one is no accident of a busy host: it needs no more to compare with.
const SHORT: Duration = Duration::from_millis(1);

/// How long to go on for a shorter one.
const PATIENCE: Duration = Duration::from_millis(100);

/// Links that change come in bursts; the list is read when nothing has changed for so long.
const SETTLE: Duration = Duration::from_millis(20);

/// The pause before the kernel is asked again if it does not tell.
const RETRY: Duration = Duration::from_secs(10);

/// The longest wait for one address that a prober may ask for.
const MAX_LIMIT: Duration = Duration::from_secs(60);

/// What this node knows of its interfaces.
#[derive(Debug)]
pub(super) struct Network {
    listen: SocketAddr,
    host: String,
    current: watch::Sender<Option<NodeNetwork>>,
    /// What the head was told last.
    told: Mutex<Option<NodeNetwork>>,
}

impl Network {
    /// The interfaces as they are now, for a daemon that listens at `listen`.
    pub(super) fn new(listen: SocketAddr) -> Arc<Self> {
        let network = Self {
            listen,
            host: interfaces::host(),
            current: watch::Sender::new(None),
            told: Mutex::default(),
        };
        network.look();
        Arc::new(network)
    }

    /// Reads the kernel's list.
    fn look(&self) {
        let now = match interfaces::here() {
            Ok(interfaces) => NodeNetwork {
                listen: self.listen,
                host: self.host.clone(),
                interfaces,
            },
            Err(error) => {
                tracing::warn!(%error, "the network interfaces are not known; jobs use the address that is advertised");
                return;
            }
        };
        self.current.send_if_modified(|current| {
            if current.as_ref() == Some(&now) {
                return false;
            }
            if current.is_some() {
                tracing::info!("the network interfaces have changed");
            }
            *current = Some(now);
            true
        });
    }

    /// Keeps the list as the kernel has it, until it is dropped.
    pub(super) async fn watch(self: Arc<Self>) {
        loop {
            let failed = match interfaces::Changes::new() {
                Ok(changes) => self.follow(changes).await,
                Err(error) => error,
            };
            tracing::debug!(error = %failed, "changes of network interfaces are not told");
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn follow(&self, mut changes: interfaces::Changes) -> std::io::Error {
        loop {
            // What changed before there was somebody to be told.
            self.look();
            if let Err(error) = changes.next().await {
                return error;
            }
            while let Ok(more) = tokio::time::timeout(SETTLE, changes.next()).await {
                if let Err(error) = more {
                    return error;
                }
            }
        }
    }

    /// What a registration says.
    pub(super) fn for_registration(&self) -> Option<NodeNetwork> {
        let current = self.current.borrow().clone();
        self.told().clone_from(&current);
        current
    }

    fn told(&self) -> MutexGuard<'_, Option<NodeNetwork>> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for something that the head was not told. Cancel safe.
    pub(super) async fn news(&self) -> NodeNetwork {
        let mut current = self.current.subscribe();
        loop {
            let now = current.borrow_and_update().clone();
            if now != *self.told()
                && let Some(now) = now
            {
                return now;
            }
            if current.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// The head knows this now.
    pub(super) fn was_told(&self, network: &NodeNetwork) {
        *self.told() = Some(network.clone());
    }

    /// How this node sees a connection.
    pub(super) fn echo(&self, connection: &Connection) -> Echo {
        let local = connection.local_ip();
        let current = self.current.borrow();
        let interface = local
            .zip(current.as_ref())
            .and_then(|(ip, network)| network.interface_of(ip))
            .map(|interface| interface.name.clone());
        Echo {
            seen: connection.remote_addr(),
            local,
            interface,
            time_ms: SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .map_or(0, |since| {
                    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
                }),
        }
    }
}

/// Tries all addresses of a probe at once; at most [`Probe::AT_ONCE`] at a time. The results are in the order of the
/// targets.
pub(super) async fn probe(endpoint: &Endpoint, probe: &Probe) -> Vec<ProbeResult> {
    /// For the first probe of other hosts.
    static TOLD: Once = Once::new();
    if probe
        .targets
        .iter()
        .any(|target| !target.address.ip().is_loopback())
    {
        TOLD.call_once(|| {
            endpoint.runtime().handle().spawn(tell_of_own_name());
        });
    }
    let limit = Duration::from_millis(probe.limit_ms).clamp(Duration::from_millis(1), MAX_LIMIT);
    let places = Semaphore::new(Probe::AT_ONCE);
    let all = probe.targets.iter().map(|target| async {
        let _place = places.acquire().await;
        try_one(endpoint, target, limit).await
    });
    join_all(all).await
}

/// Says so if programs of jobs can't find this host by its name.
async fn tell_of_own_name() {
    let name = own_name();
    if let Some((found, to_do)) = problem_of_name(&name, &addresses(&name).await) {
        tracing::warn!(to_do, "{found}");
    }
}

async fn try_one(endpoint: &Endpoint, target: &ProbeTarget, limit: Duration) -> ProbeResult {
    let no_route = |error: std::io::Error| ProbeResult::Failed {
        kind: ProbeFailure::NoRoute,
        reason: error.to_string(),
    };
    let address = match interfaces::scoped(target.address, target.scope.as_deref()) {
        Ok(address) => address,
        Err(error) => return no_route(error),
    };
    // The socket would keep trying to send in vain for the whole time.
    if let Err(error) = interfaces::source_towards(address) {
        return no_route(error);
    }
    let trying = exchange(endpoint, address, target, limit);
    let tried = endpoint.runtime().timeout(limit, trying).await;
    tried.unwrap_or_else(|| silent(limit))
}

fn silent(limit: Duration) -> ProbeResult {
    ProbeResult::Failed {
        kind: ProbeFailure::Silent,
        reason: format!("no answer within {}", Span(limit)),
    }
}

async fn exchange(
    endpoint: &Endpoint,
    address: SocketAddr,
    target: &ProbeTarget,
    limit: Duration,
) -> ProbeResult {
    let failed = |kind, reason: String| ProbeResult::Failed { kind, reason };
    let connection = match endpoint.connect(address, Expect::node(target.node)).await {
        Ok(connection) => connection,
        Err(ConnectError::TimedOut { .. }) => return silent(limit),
        Err(ConnectError::WrongPeer { found, .. }) => {
            let own = endpoint.identity();
            let who = if *found == *own {
                "this node itself answers there".to_owned()
            } else {
                format!("{} {} answers there", found.role, found.name)
            };
            return failed(ProbeFailure::WrongPeer, who);
        }
        Err(error) => return failed(ProbeFailure::Refused, error.to_string()),
    };
    let mut best: Option<(Duration, Echo)> = None;
    let begun = Instant::now();
    for round in 0..ROUNDS[1] {
        let enough = best.as_ref().is_some_and(|(least, _)| *least < SHORT);
        if round >= ROUNDS[0] && (enough || begun.elapsed() > PATIENCE) {
            break;
        }
        let start = Instant::now();
        match connection.request(&NodeRequest::Echo, limit).await {
            Ok(NodeReply::Echo(echo)) => {
                let took = start.elapsed();
                if best.as_ref().is_none_or(|(least, _)| took < *least) {
                    best = Some((took, echo));
                }
            }
            Ok(NodeReply::Refused(refusal)) => {
                return failed(ProbeFailure::Refused, refusal.message);
            }
            Ok(_) => {
                return failed(
                    ProbeFailure::Refused,
                    "the answer is none to a probe; use the same version of kolo on all hosts"
                        .to_owned(),
                );
            }
            Err(error) => return failed(ProbeFailure::Refused, error.to_string()),
        }
    }
    connection.close(CloseCode::Done, "probed");
    match best {
        Some((rtt, echo)) => ProbeResult::Reached {
            rtt_us: u64::try_from(rtt.as_micros()).unwrap_or(u64::MAX),
            echo,
        },
        None => silent(limit),
    }
}
