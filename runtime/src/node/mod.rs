//! A node daemon: it holds resources for jobs, runs their workers and carries calls to them.
//!
//! The actors of [`kolo_actors::node`] run on an actix `System` of their own thread and decide about the
//! lives of jobs and workers. What has to be fast, or waits for the network, runs on the transport
//! runtime: calls, output, programs, the connection to the head.

mod calls;
mod config;
mod error;
mod finder;
mod host;
mod installed;
mod network;
mod orphans;
mod output;
mod ports;
mod programs;
mod serve;
mod uplink;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use actix::{Actor, Addr, System};
use kolo_actors::node::{Ask, NodeColocator, NodeContext, Outputs, Snapshot};
use kolo_core::node::NodeCore;
use kolo_core::node::colocator::Here;
use kolo_core::node::inventory::Inventory;
use kolo_core::pace::Backoff;
use kolo_transport::descriptors::make_room;
use kolo_transport::ids::{JobId, NodeId};
use kolo_transport::renewal::keep_renewed;
use kolo_transport::wire::RefusalKind;
use kolo_transport::{
    CloseCode, Connection, Credentials, Endpoint, EndpointConfig, Flood, LiveCredentials,
    ObituarySecret, RandomId as _, TransportRuntime,
};
use tokio::sync::{oneshot, watch};
use tokio::task::AbortHandle;

use self::calls::Calls;
pub(crate) use self::config::whence_gpus;
pub use self::config::{NodeConfig, NodeCredentials, NodeResources, ResourcesError};
pub use self::error::NodeError;
use self::finder::Finder;
pub use self::host::default_listen;
use self::programs::Programs;
pub use self::programs::{ProgramSource, ProgramsError};
use self::serve::Server;
use self::uplink::{Registered, Session, Uplink};
use crate::health::Health;

/// Descriptors that a node needs to start; workers need more.
const DESCRIPTORS: u64 = 24;

/// How long the last events may take to reach the head when a node stops.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// The pause after the first refused attempt to join or to register; it doubles.
const JOIN_PAUSE: Duration = Duration::from_millis(100);

/// How long [`Node::kill`] waits for the end of workers.
const DYING: Duration = Duration::from_secs(1);

/// The longest pause while another daemon with this identity is there.
const MAX_DUPLICATE_PAUSE: Duration = Duration::from_millis(500);

/// The thread that the actors live on.
struct Actors {
    node: Addr<NodeColocator>,
    system: System,
    thread: JoinHandle<()>,
}

/// A running node.
///
/// When it is dropped its workers are killed, as by [`Node::kill`], without waiting for it.
pub struct Node {
    id: NodeId,
    address: SocketAddr,
    hostname: String,
    endpoint: Endpoint,
    uplink: Arc<Uplink>,
    stop_timeout: Duration,
    runtime: TransportRuntime,
    tasks: Vec<AbortHandle>,
    /// Taken by the end.
    actors: Option<Actors>,
    /// How many there are.
    wardens: watch::Receiver<usize>,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node")
            .field("id", &self.id)
            .field("address", &self.address)
            .field("hostname", &self.hostname)
            .finish_non_exhaustive()
    }
}

impl Node {
    /// Starts a node on threads of its own; returns when the head has registered it. May be awaited on any
    /// executor, and called many times in one process.
    ///
    /// Takes at most [`NodeConfig::join_timeout`] and the time of one request. If it is dropped before it is
    /// done, nothing of the node is left.
    ///
    /// # Errors
    ///
    /// [`NodeError`].
    pub async fn start(config: NodeConfig) -> Result<Self, NodeError> {
        make_room("the node", DESCRIPTORS)?;
        let runtime = match &config.transport {
            Some(runtime) => runtime.clone(),
            None => TransportRuntime::new(1).map_err(NodeError::Threads)?,
        };
        let starting = runtime.handle().spawn(start(config, runtime.clone()));
        let abort = AbortOnDrop(starting.abort_handle());
        let started = starting
            .await
            .map_err(|error| NodeError::Threads(std::io::Error::other(error)))?;
        drop(abort);
        started
    }

    /// Its id.
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// Where drivers reach it.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its hostname, as others are told.
    pub fn hostname(&self) -> &str {
        &self.hostname
    }

    /// Its identity, to [keep](Credentials::save) for the next start.
    pub fn credentials(&self) -> Credentials {
        self.endpoint.credentials()
    }

    /// Takes credentials that were put into its folder: newer ones of the same identity.
    ///
    /// # Errors
    ///
    /// [`IdentityError`](kolo_transport::IdentityError) if they are of another.
    pub fn reload_credentials(
        &self,
        credentials: Credentials,
    ) -> Result<(), kolo_transport::IdentityError> {
        self.endpoint.live_credentials().replace(credentials)
    }

    /// Waits until the head has put this node out of the cluster; the reason that it gives. The node's jobs are ended
    /// then, and it can do nothing but stop. Cancel safe.
    pub async fn revoked(&self) -> String {
        self.uplink.revoked().await
    }

    /// Takes no more jobs and waits until those that are here have ended by themselves, at most for `limit`, also while the head is
    /// away. Whether they have. Cancel safe.
    pub async fn drain(&self, limit: Duration) -> bool {
        let Some(actors) = &self.actors else {
            return true;
        };
        let asked = actors.node.send(Ask::Drain);
        // An actor that is gone has no jobs.
        let idle = async { drop(asked.await) };
        let drained = self.uplink.drain(limit, idle);
        self.runtime.timeout(limit, drained).await.is_some()
    }

    /// Tells whether the node does its work.
    pub fn health(&self) -> Health {
        let actor = self.actors.as_ref().map(|actors| actors.node.clone());
        Health::new(self.runtime.clone(), move || {
            let asked = actor.as_ref().map(|actor| actor.send(Snapshot));
            async {
                match asked {
                    Some(asked) => asked.await.is_ok(),
                    None => false,
                }
            }
        })
    }

    /// Stops: takes no more jobs, ends those that are here with their grace, tells the head, closes all
    /// connections. Returns when nothing is left.
    ///
    /// Jobs that have not ended after [`NodeConfig::stop_timeout`] are killed. If the future is dropped before it
    /// is done, the node is dropped with it, and all jobs are killed at once.
    pub async fn stop(mut self) {
        let Some(actors) = &self.actors else {
            return;
        };
        let runtime = self.runtime.clone();
        let stop = actors.node.send(Ask::StopAll {
            reason: "the node is stopping".to_owned(),
        });
        match runtime.timeout(self.stop_timeout, stop).await {
            Some(Ok(_)) => {}
            Some(Err(error)) => tracing::error!(%error, "the node's actor is gone"),
            None => tracing::warn!("jobs did not end in time and are killed"),
        }
        if runtime
            .timeout(LAST_WORDS, actors.node.send(Ask::Flush))
            .await
            .is_none()
        {
            tracing::warn!("the head did not take the last events");
        }
        self.end(CloseCode::Shutdown, "the node is stopping");
        if runtime
            .timeout(LAST_WORDS, self.endpoint.drained())
            .await
            .is_none()
        {
            tracing::debug!("a peer did not confirm the end of its connection");
        }
        let Some(actors) = self.actors.take() else {
            return;
        };
        actors.system.stop();
        let joined = runtime
            .handle()
            .spawn_blocking(move || actors.thread.join())
            .await;
        if !matches!(joined, Ok(Ok(()))) {
            tracing::error!("the node's thread ended badly");
        }
    }

    /// Ends at once, as a crash would: workers are killed, connections closed, nobody is told why, but the head, that the workers
    /// have ended. Blocks for the moment that this takes, at most for a second if one can't be killed.
    pub fn kill(mut self) {
        self.abort();
        if let Some(actors) = self.actors.take() {
            actors.system.stop();
            if actors.thread.join().is_err() {
                tracing::error!("the node's thread panicked");
            }
        }
        let code = if self.has_no_worker() {
            CloseCode::Dead
        } else {
            CloseCode::Internal
        };
        self.endpoint.close(code, "");
    }

    /// Waits for the end of all wardens that were dropped, and so of all workers. Whether it came.
    fn has_no_worker(&self) -> bool {
        let mut wardens = self.wardens.clone();
        let (sender, over) = std::sync::mpsc::channel();
        // Not here, for this thread may be in a runtime already.
        let waiting = self.runtime.handle().spawn(async move {
            let none = wardens.wait_for(|wardens| *wardens == 0).await;
            sender.send(none.is_ok()).ok();
        });
        let none = over.recv_timeout(DYING) == Ok(true);
        waiting.abort();
        none
    }

    fn end(&mut self, code: CloseCode, reason: &str) {
        self.abort();
        self.endpoint.close(code, reason);
    }

    fn abort(&mut self) {
        for task in self.tasks.drain(..) {
            task.abort();
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(actors) = self.actors.take() {
            self.end(CloseCode::Internal, "");
            // Its thread drops the actors, and with them the wardens.
            actors.system.stop();
        }
    }
}

struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Runs on the transport runtime.
async fn start(config: NodeConfig, runtime: TransportRuntime) -> Result<Node, NodeError> {
    let deadline = Instant::now() + config.join_timeout;
    let state = config.state_dirs();
    let found = config.resources.find()?;
    let programs = Arc::new(Programs::open(
        config.programs.clone(),
        runtime.handle().clone(),
    )?);
    let credentials = match config.credentials {
        NodeCredentials::Have(credentials) => credentials,
        // Not used up, and nothing is kept of it.
        NodeCredentials::Token(ref token) if token.role() != kolo_transport::Role::Node => {
            return Err(NodeError::Identity(token.role()));
        }
        NodeCredentials::Token(ref token) => {
            let joined = join(&runtime, &config, token, deadline).await?;
            // At once: the token may be used up, and whatever comes next may fail.
            if let Some(dir) = &config.identity_dir {
                joined.save(dir).map_err(NodeError::Keep)?;
            }
            joined
        }
    };
    let identity = credentials.identity().clone();
    let id = identity.node().ok_or(NodeError::Identity(identity.role))?;
    let authority = credentials.authority().to_vec();
    let live = LiveCredentials::new(credentials);
    let endpoint = Endpoint::bind(
        &runtime,
        live.clone(),
        EndpointConfig {
            listen: config.listen,
            idle_timeout: config.idle_timeout,
            keep_alive: config.keep_alive,
            ..EndpointConfig::default()
        },
    )?;
    let mut guard = CloseOnDrop(Some(endpoint.clone()));
    let connection = uplink::connect(&endpoint, config.head, deadline)
        .await
        .map_err(NodeError::Connect)?;
    let address = config
        .advertise
        .unwrap_or_else(|| advertised(endpoint.local_addr(), connection.local_ip()));
    let hostname = config.hostname.clone().unwrap_or_else(config::hostname);
    let uplink = Uplink::new();
    let orphan_timeout = config.orphan_timeout;
    let calls = Calls::new(runtime.handle().clone());
    let wardens = watch::Sender::new(0);
    let context = Arc::new(NodeContext {
        here: Here {
            cluster: identity.cluster,
            node: id,
            hostname: hostname.clone(),
            authority,
        },
        ip: address.ip(),
        hides_gpus: found.has_gpus && !config.gpus_for_all,
        warden_exe: config
            .warden_exe
            .clone()
            .unwrap_or_else(|| PathBuf::from("/proc/self/exe")),
        runtime: runtime.handle().clone(),
        head: uplink.clone(),
        head_address: config.head,
        obituary: ObituarySecret::random(),
        wardens: wardens.clone(),
        calls: calls.clone(),
        programs: Arc::new(Finder {
            programs: programs.clone(),
            ports: ports::Ports::default(),
        }),
        outputs: Arc::new(Outputs::new(config.logs, config.output_memory)),
    });
    let inventory = Inventory::new(found.resources, found.devices);
    let core = NodeCore::new(context.here.clone(), inventory);
    let actors = Actors::start(context.clone(), core).await?;
    let network = network::Network::new(endpoint.local_addr());
    let server = Arc::new(Server {
        head: config.head,
        context,
        node: actors.node.clone(),
        endpoint: endpoint.clone(),
        calls,
        programs,
        address,
        network: network.clone(),
        state,
        // Odd, and so never 0.
        instance: JobId::random().0 | 1,
        refusals: Flood::new("requests were refused", 1),
    });
    // From here on dropping it ends everything.
    let mut node = Node {
        id,
        address,
        hostname,
        endpoint: endpoint.clone(),
        uplink: uplink.clone(),
        stop_timeout: config.stop_timeout,
        runtime,
        tasks: Vec::new(),
        actors: Some(actors),
        wardens: wardens.subscribe(),
    };
    guard.0 = None;
    let registered = register(&connection, &server, deadline).await?;
    endpoint.revoke(&registered.revoked);
    if config.identity_dir.is_some() {
        sweep(id).await;
    }
    kolo_actors::news!(%id, %address, head = %config.head, "registered");
    let first = Session {
        connection,
        registered,
    };
    let renewal = {
        let uplink = uplink.clone();
        let dir = config.identity_dir;
        keep_renewed(
            live,
            move |csr| {
                let uplink = uplink.clone();
                async move { uplink.renew(csr).await }
            },
            move |new| store_renewed(dir.as_deref(), new),
        )
    };
    node.tasks = vec![
        tokio::spawn(renewal).abort_handle(),
        tokio::spawn(network.watch()).abort_handle(),
        tokio::spawn(server.clone().accept(endpoint.clone())).abort_handle(),
        tokio::spawn(orphans::watch(
            (orphan_timeout, node.runtime.clock().clone()),
            uplink.clone(),
            server.calls.clone(),
            server.node.clone(),
        ))
        .abort_handle(),
        tokio::spawn(uplink.run(endpoint, server, first)).abort_handle(),
    ];
    Ok(node)
}

/// Kills what an earlier daemon of this identity has left on this host. The head has registered this one, so the earlier one
/// is gone; and nothing is served yet, so nothing of this one is there.
async fn sweep(id: NodeId) {
    let owner = id.to_string();
    let swept = tokio::task::spawn_blocking(move || kolo_process::sweep_left_by(&owner)).await;
    match swept {
        Ok(0) => {}
        Ok(processes) => tracing::warn!(
            processes,
            "an earlier daemon has left processes; they are killed"
        ),
        Err(error) => tracing::error!(%error, "what an earlier daemon has left was not looked for"),
    }
}

fn store_renewed(dir: Option<&std::path::Path>, credentials: &Credentials) {
    let Some(dir) = dir else { return };
    match credentials.save_renewed(dir) {
        Ok(true) => {}
        Ok(false) => {
            tracing::warn!(dir = %dir.display(), "the folder holds another identity now; it is left alone");
        }
        Err(error) => tracing::error!(%error, "the new certificate could not be stored"),
    }
}

/// Registers for the first time. While another daemon with this identity is there it is tried until `deadline`: it may
/// be this one's last life, of which the head does not know yet that it is over.
async fn register(
    connection: &Connection,
    server: &Server,
    deadline: Instant,
) -> Result<Registered, NodeError> {
    let mut backoff = Backoff::new(JOIN_PAUSE, MAX_DUPLICATE_PAUSE);
    loop {
        let registration = server.registration().await?;
        let error = match uplink::register(connection, registration).await {
            Err(NodeError::Refused(refusal)) if refusal.kind == RefusalKind::Duplicate => refusal,
            other => return other,
        };
        let first = backoff.failures() == 0;
        let pause = backoff.failed();
        if Instant::now() + pause >= deadline {
            return Err(NodeError::Refused(error));
        }
        if first {
            tracing::warn!(%error, "not registered yet; trying until the join timeout");
        }
        tokio::time::sleep(pause).await;
    }
}

struct CloseOnDrop(Option<Endpoint>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        if let Some(endpoint) = self.0.take() {
            endpoint.close(CloseCode::Done, "");
        }
    }
}

async fn join(
    runtime: &TransportRuntime,
    config: &NodeConfig,
    token: &kolo_transport::JoinToken,
    deadline: Instant,
) -> Result<Credentials, NodeError> {
    let mut pause = JOIN_PAUSE;
    loop {
        match kolo_transport::join(runtime, config.head, token).await {
            Ok(credentials) => return Ok(credentials),
            Err(error) if !error.is_retryable() || Instant::now() + pause >= deadline => {
                return Err(error.into());
            }
            Err(error) => tracing::debug!(head = %config.head, %error, "not joined yet"),
        }
        tokio::time::sleep(pause).await;
        pause *= 2;
    }
}

/// The address to tell others: where the node listens, or, if that is everywhere, where the head sees it.
fn advertised(listen: SocketAddr, facing_head: Option<IpAddr>) -> SocketAddr {
    match facing_head {
        Some(ip) if listen.ip().is_unspecified() => {
            SocketAddr::new(ip.to_canonical(), listen.port())
        }
        _ => listen,
    }
}

impl Actors {
    async fn start(context: Arc<NodeContext>, core: NodeCore) -> Result<Self, NodeError> {
        let (sender, receiver) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("kolo-node".to_owned())
            .spawn(move || {
                let runner = System::new();
                let node = runner.block_on(async { NodeColocator::new(context, core).start() });
                if sender.send((node, System::current())).is_err() {
                    // The start was given up.
                    return;
                }
                if let Err(error) = runner.run() {
                    tracing::error!(%error, "the node's actors ended badly");
                }
            })
            .map_err(NodeError::Threads)?;
        match receiver.await {
            Ok((node, system)) => Ok(Self {
                node,
                system,
                thread,
            }),
            Err(_) => Err(NodeError::Threads(std::io::Error::other(
                "the actors' thread ended at once",
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_listens_everywhere_is_told_as_what_faces_the_head() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        let ip = |text: &str| Some(text.parse::<IpAddr>().unwrap());
        let told = advertised(address("0.0.0.0:7"), ip("10.0.0.2"));
        assert_eq!(told, address("10.0.0.2:7"));
        let told = advertised(address("[::]:7"), ip("::ffff:10.0.0.2"));
        assert_eq!(told, address("10.0.0.2:7"));
        let told = advertised(address("10.0.0.3:7"), ip("10.0.0.2"));
        assert_eq!(told, address("10.0.0.3:7"));
        assert_eq!(advertised(address("0.0.0.0:7"), None), address("0.0.0.0:7"));
    }
}
