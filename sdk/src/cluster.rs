//! A cluster, as a driver sees it.

#[cfg(feature = "local")]
mod local;
mod renewal;

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kolo_transport::LiveCredentials;
use kolo_transport::descriptors::make_room;
use kolo_transport::endpoint::{ConnectError as TransportError, Endpoint, EndpointConfig, Expect};
use kolo_transport::identity::Role;
use kolo_transport::ids::{ClusterId, JobId, NodeId};
use kolo_transport::runtime::TransportRuntime;
use kolo_transport::session::Connection;
use kolo_transport::wire::{ClusterInfo, HeadReply, HeadRequest, JobInfo};

use crate::credentials::{self, Credentials, Source};
use crate::error::{ClusterError, ConnectError, CredentialsError};
use crate::program;
#[cfg(feature = "local")]
pub use local::{LocalCluster, LocalClusterBuilder};

/// Descriptors that the links to a head and a node need.
const DESCRIPTORS: u64 = 16;

/// How long the head may take for an answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the head may take to stop a job: notice, TERM and KILL come one after the other.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// A handle of a cluster: of a head and, through it, of its nodes. Clones share it.
///
/// A process may use several clusters at once. When the last clone and the last
/// [`Executor`](crate::Executor) on it are dropped, the connections are closed, and a [local](Cluster::local) cluster ends.
///
/// ```no_run
/// use kolo::{Cluster, Credentials};
///
/// # async fn example() -> kolo::Result<()> {
/// let credentials = Credentials::load("/home/me/.config/kolo")?;
/// let cluster = Cluster::connect("head.example.org:7700", credentials).await?;
/// for node in cluster.status().await?.nodes {
///     println!("{}: {} of {} free", node.hostname, node.available, node.total);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Cluster {
    inner: Arc<Inner>,
}

struct Inner {
    head: SocketAddr,
    credentials: LiveCredentials,
    /// By the address that they are bound to: a socket on the loopback reaches nothing else.
    endpoints: Mutex<HashMap<IpAddr, Endpoint>>,
    head_connection: tokio::sync::Mutex<Option<Connection>>,
    nodes: Mutex<HashMap<NodeId, Connection>>,
    /// Keeps the certificate renewed.
    renewal: Mutex<Option<AbortOnDrop<()>>>,
    runtime: TransportRuntime,
    /// A cluster that lives inside this process.
    #[cfg(feature = "local")]
    local: Option<local::Members>,
}

impl Cluster {
    /// Connects to a cluster as a driver. `head` is `HOST:PORT` or a socket address.
    ///
    /// `credentials` are a driver's certificate or a token; see [`Credentials`]. Takes at most some seconds. May be
    /// awaited on any executor.
    ///
    /// The cluster's links have a thread of their own, so that nothing the program does can hold up their
    /// heartbeats. While calls are awaited on a tokio runtime with I/O enabled, that runtime drives the links itself, which saves
    /// each call two hand-overs between threads; the thread takes over within milliseconds when the runtime is blocked.
    /// (In a runtime without I/O, tokio prints once that it is disabled. Calls work, with the hand-overs, as they do
    /// on other executors and in programs that are built with `panic = "abort"`.)
    ///
    /// # Errors
    ///
    /// [`ConnectError`].
    pub async fn connect(
        head: impl fmt::Display,
        credentials: impl Into<Credentials>,
    ) -> Result<Self, ConnectError> {
        Self::connect_with(new_runtime()?, head.to_string(), credentials.into()).await
    }

    /// As [`Cluster::connect`], with all links on a runtime of the caller's.
    ///
    /// There is no other thread then that could take over. The program must leave that runtime free: code that
    /// blocks it for longer than the idle timeout (3 s) loses the cluster. Calls are not faster than with
    /// [`Cluster::connect`]; it is for programs that count their threads.
    ///
    /// `runtime` needs tokio's timers and I/O, and must outlive the cluster.
    ///
    /// # Errors
    ///
    /// [`ConnectError`].
    pub async fn connect_on(
        runtime: tokio::runtime::Handle,
        head: impl fmt::Display,
        credentials: impl Into<Credentials>,
    ) -> Result<Self, ConnectError> {
        let runtime = TransportRuntime::from_handle(runtime);
        Self::connect_with(runtime, head.to_string(), credentials.into()).await
    }

    async fn connect_with(
        runtime: TransportRuntime,
        head: String,
        credentials: Credentials,
    ) -> Result<Self, ConnectError> {
        crate::entry::may_connect()?;
        // Names are looked up, and timers run, on our own runtime: the caller's may be any.
        let task = runtime.clone();
        let connected = runtime.handle().spawn(async move {
            let head = resolve(&head).await?;
            let (credentials, dir) = certificate(&task, head, credentials).await?;
            let cluster = Self {
                inner: Arc::new(Inner::new(task, head, credentials)),
            };
            cluster.head_connection().await?;
            renewal::start(&cluster.inner, dir);
            Ok(cluster)
        });
        AbortOnDrop(connected)
            .join()
            .await
            .unwrap_or_else(|reason| Err(ConnectError::Endpoint { reason }))
    }

    /// Connects to the cluster that the environment names: `KOLO_HEAD` is its head's `HOST:PORT`, and
    /// [`Credentials::from_env`] says where credentials are looked for. `None` if `KOLO_HEAD` is not set.
    ///
    /// # Errors
    ///
    /// [`ConnectError`].
    pub async fn connect_from_env() -> Result<Option<Self>, ConnectError> {
        match credentials::head_from_env()? {
            Some(head) => Self::connect(head, Credentials::from_env()?)
                .await
                .map(Some),
            None => Ok(None),
        }
    }

    /// Connects to the cluster that the environment names (see [`Cluster::connect_from_env`]), or starts a
    /// [local](Cluster::local) one if it names none.
    ///
    /// # Errors
    ///
    /// [`ConnectError`]. A `KOLO_HEAD` that can't be reached is an error, not a reason for a local cluster.
    #[cfg(feature = "local")]
    pub async fn connect_or_local() -> Result<Self, ConnectError> {
        match Self::connect_from_env().await? {
            Some(cluster) => Ok(cluster),
            None => Self::local().await,
        }
    }

    /// Starts a head and one node inside this process, with as many slots as the machine has CPUs, but at least 4, so that
    /// programs for a few workers run on small machines too. See [`LocalCluster`](crate::LocalCluster) for other shapes.
    ///
    /// # Errors
    ///
    /// [`ConnectError::Local`].
    #[cfg(feature = "local")]
    pub async fn local() -> Result<Self, ConnectError> {
        crate::LocalCluster::builder().start().await
    }

    /// A cluster whose members live in this process, on the same runtime.
    #[cfg(feature = "local")]
    pub(crate) async fn with_members(
        runtime: TransportRuntime,
        head: SocketAddr,
        credentials: kolo_transport::Credentials,
        members: local::Members,
    ) -> Result<Self, ConnectError> {
        let inner = Inner {
            local: Some(members),
            ..Inner::new(runtime, head, credentials)
        };
        let cluster = Self {
            inner: Arc::new(inner),
        };
        cluster.head_connection().await?;
        Ok(cluster)
    }

    /// The members that live in this process.
    #[cfg(feature = "local")]
    pub(crate) fn local_members(&self) -> Option<&local::Members> {
        self.inner.local.as_ref()
    }

    /// The cluster's identity, from its certificates.
    pub fn id(&self) -> ClusterId {
        self.inner.credentials.identity().cluster
    }

    /// The head's address.
    pub fn head(&self) -> SocketAddr {
        self.inner.head
    }

    /// The cluster as the head sees it now: its nodes and what is free on them.
    ///
    /// # Errors
    ///
    /// [`ClusterError`].
    pub async fn status(&self) -> Result<ClusterInfo, ClusterError> {
        match self.ask(HeadRequest::Cluster, REQUEST_TIMEOUT).await? {
            HeadReply::Cluster(info) => Ok(info),
            other => Err(unexpected(other)),
        }
    }

    /// All jobs, the newest first; ended ones for as long as the head remembers them.
    ///
    /// # Errors
    ///
    /// [`ClusterError`].
    pub async fn jobs(&self) -> Result<Vec<JobInfo>, ClusterError> {
        match self.ask(HeadRequest::Jobs, REQUEST_TIMEOUT).await? {
            HeadReply::Jobs(jobs) => Ok(jobs),
            other => Err(unexpected(other)),
        }
    }

    /// One job.
    ///
    /// # Errors
    ///
    /// [`ClusterError`].
    pub async fn job(&self, job: JobId) -> Result<JobInfo, ClusterError> {
        match self.ask(HeadRequest::Job { job }, REQUEST_TIMEOUT).await? {
            HeadReply::Job(info) => Ok(info),
            other => Err(unexpected(other)),
        }
    }

    /// Stops a job, whoever started it; returns when it has ended.
    ///
    /// # Errors
    ///
    /// [`ClusterError`].
    pub async fn stop_job(&self, job: JobId) -> Result<(), ClusterError> {
        match self.ask(HeadRequest::Stop { job }, STOP_TIMEOUT).await? {
            HeadReply::Done | HeadReply::Job(_) => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    async fn ask(
        &self,
        request: HeadRequest,
        deadline: Duration,
    ) -> Result<HeadReply, ClusterError> {
        let connection = self.head_connection().await?;
        let reply = connection.request(&request, deadline).await;
        reply.map_err(|error| ClusterError::Request {
            head: self.inner.head,
            error,
        })
    }

    pub(crate) fn runtime(&self) -> &TransportRuntime {
        &self.inner.runtime
    }

    /// The connection to the head; a new one if the last has ended.
    pub(crate) async fn head_connection(&self) -> Result<Connection, ConnectError> {
        let mut slot = self.inner.head_connection.lock().await;
        if let Some(connection) = slot.as_ref().filter(|connection| !connection.is_closed()) {
            return Ok(connection.clone());
        }
        let head = self.inner.head;
        let connection = self.endpoint(head)?.connect(head, Expect::head()).await;
        Ok(slot.insert(connection.map_err(ConnectError::Head)?).clone())
    }

    /// The connection to a node; a new one if the last has ended.
    pub(crate) async fn node_connection(
        &self,
        node: NodeId,
        address: SocketAddr,
    ) -> Result<Connection, NodeConnectError> {
        let known = lock(&self.inner.nodes).get(&node).cloned();
        if let Some(connection) =
            known.filter(|known| !known.is_closed() && known.remote_addr() == address)
        {
            return Ok(connection);
        }
        let endpoint = self.endpoint(address)?;
        let connection = endpoint.connect(address, Expect::node(node)).await?;
        let mut nodes = lock(&self.inner.nodes);
        nodes.retain(|_, connection| !connection.is_closed());
        nodes.insert(node, connection.clone());
        Ok(connection)
    }

    fn endpoint(&self, peer: SocketAddr) -> Result<Endpoint, ConnectError> {
        let config = self.inner.endpoint_config(peer);
        let mut endpoints = lock(&self.inner.endpoints);
        if let Some(endpoint) = endpoints.get(&config.listen.ip()) {
            return Ok(endpoint.clone());
        }
        let listen = config.listen.ip();
        let endpoint = Endpoint::bind(&self.inner.runtime, self.inner.credentials.clone(), config)?;
        endpoints.insert(listen, endpoint.clone());
        Ok(endpoint)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    fn new(
        runtime: TransportRuntime,
        head: SocketAddr,
        credentials: kolo_transport::Credentials,
    ) -> Self {
        // The first start needs it: by then it is there.
        runtime.handle().spawn_blocking(program::own);
        Self {
            head,
            credentials: credentials.into(),
            endpoints: Mutex::default(),
            head_connection: tokio::sync::Mutex::default(),
            nodes: Mutex::default(),
            renewal: Mutex::default(),
            runtime,
            #[cfg(feature = "local")]
            local: None,
        }
    }

    #[cfg_attr(not(feature = "local"), allow(clippy::unused_self))]
    fn endpoint_config(&self, peer: SocketAddr) -> EndpointConfig {
        let config = EndpointConfig::towards(peer);
        #[cfg(feature = "local")]
        if self.local.is_some() {
            let idle_timeout = kolo_runtime::local::PATIENCE;
            return EndpointConfig {
                idle_timeout,
                keep_alive: idle_timeout / 6,
                ..config
            };
        }
        config
    }
}

/// Why a node can't be reached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NodeConnectError {
    #[error(transparent)]
    Endpoint(#[from] ConnectError),
    #[error(transparent)]
    Node(#[from] TransportError),
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster")
            .field("id", &self.id())
            .field("head", &self.inner.head)
            .finish_non_exhaustive()
    }
}

fn new_runtime() -> Result<TransportRuntime, ConnectError> {
    let failed = |reason: String| ConnectError::Endpoint { reason };
    make_room("a connection to a cluster", DESCRIPTORS).map_err(|few| failed(few.to_string()))?;
    TransportRuntime::lent().map_err(|error| failed(error.to_string()))
}

async fn resolve(head: &str) -> Result<SocketAddr, ConnectError> {
    let failed = |reason: String| ConnectError::Address {
        given: head.to_owned(),
        reason,
    };
    let addresses = kolo_transport::names::resolve(head)
        .await
        .map_err(|error| failed(error.to_string()))?;
    // There is one at least.
    Ok(addresses[0])
}

/// The certificate of a driver: as it was given, or for a token.
async fn certificate(
    runtime: &TransportRuntime,
    head: SocketAddr,
    credentials: Credentials,
) -> Result<(kolo_transport::Credentials, Option<PathBuf>), ConnectError> {
    let (certificate, dir) = match credentials.0 {
        Source::Certificate { certificate, dir } => (certificate, dir),
        Source::Token { token, save_to } => {
            let certificate = kolo_transport::join(runtime, head, &token).await?;
            if let Some(dir) = &save_to {
                certificate
                    .save(dir)
                    .map_err(|error| CredentialsError::Directory {
                        dir: dir.clone(),
                        error,
                    })?;
            }
            (certificate, save_to)
        }
    };
    let identity = certificate.identity();
    if identity.role != Role::Driver {
        return Err(ConnectError::NotDriver {
            given: identity.to_string(),
        });
    }
    Ok((certificate, dir))
}

fn unexpected(reply: HeadReply) -> ClusterError {
    match reply {
        HeadReply::Refused(refusal) => refusal.into(),
        other => ClusterError::Unexpected {
            reply: format!("{other:?}"),
        },
    }
}

/// A task that ends when nobody waits for it any more.
pub(crate) struct AbortOnDrop<T>(pub(crate) tokio::task::JoinHandle<T>);

impl<T> AbortOnDrop<T> {
    /// Its output, or why there is none.
    pub(crate) async fn join(mut self) -> Result<T, String> {
        (&mut self.0).await.map_err(|error| error.to_string())
    }
}

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kolo_transport::identity::HEAD_NAME;
    use kolo_transport::ids::DriverId;
    use kolo_transport::token::{TokenBook, random_secret};
    use kolo_transport::wire::{JoinReply, JoinRequest, Refusal, RefusalKind};
    use kolo_transport::{Authority, JoinHandler, JoinToken, RandomId as _};

    use super::*;

    struct Door {
        authority: Authority,
        book: Mutex<TokenBook>,
    }

    impl JoinHandler for Door {
        fn join(&self, request: JoinRequest, _peer: SocketAddr) -> JoinReply {
            if lock(&self.book)
                .redeem(request.role, &request.secret, 1)
                .is_err()
            {
                return JoinReply::Refused(Refusal::new(RefusalKind::Token, "used up"));
            }
            let name = DriverId::random().to_string();
            let day = Duration::from_secs(24 * 3600);
            let certificate = self
                .authority
                .sign(&request.csr, request.role, &name, day)
                .unwrap();
            let cluster = self.authority.cluster();
            JoinReply::Joined {
                cluster,
                name,
                certificate: certificate.to_vec(),
            }
        }
    }

    fn head() -> (TransportRuntime, Endpoint, JoinToken) {
        let runtime = TransportRuntime::new(1).unwrap();
        let authority = Authority::create(ClusterId::random()).unwrap();
        let credentials = authority.issue(Role::Head, HEAD_NAME).unwrap();
        let mut book = TokenBook::new();
        let token = book.create(
            Role::Driver,
            Duration::from_secs(60),
            Some(1),
            authority.fingerprint(),
            0,
            random_secret(),
        );
        let door = Arc::new(Door {
            authority,
            book: Mutex::new(book),
        });
        let config = EndpointConfig {
            join: Some(door),
            ..EndpointConfig::default()
        };
        let endpoint = Endpoint::bind(&runtime, credentials, config).unwrap();
        (runtime, endpoint, token)
    }

    #[tokio::test]
    async fn a_token_is_used_once_and_its_certificate_can_be_kept() {
        let (_runtime, endpoint, token) = head();
        let dir = tempfile::tempdir().unwrap();
        let keep = dir.path().join("credentials");
        let credentials = Credentials(Source::Token {
            token: token.clone(),
            save_to: Some(keep.clone()),
        });
        let cluster = Cluster::connect(endpoint.local_addr(), credentials)
            .await
            .unwrap();
        assert_eq!(cluster.id(), endpoint.identity().cluster);
        let again =
            Cluster::connect(endpoint.local_addr(), Credentials::load(&keep).unwrap()).await;
        assert_eq!(again.unwrap().head(), cluster.head());
        let error = Cluster::connect(endpoint.local_addr(), token)
            .await
            .unwrap_err();
        assert!(error.to_string().contains("used up"), "{error}");
    }

    #[tokio::test]
    async fn what_can_not_be_a_driver_or_an_address_is_refused() {
        let authority = Authority::create(ClusterId::random()).unwrap();
        let node = authority
            .issue(Role::Node, &NodeId::random().to_string())
            .unwrap();
        let error = Cluster::connect("127.0.0.1:1", node).await.unwrap_err();
        assert!(matches!(error, ConnectError::NotDriver { .. }), "{error}");
        let driver = authority
            .issue(Role::Driver, &DriverId::random().to_string())
            .unwrap();
        for bad in ["", "host-without-port", "127.0.0.1:99999", ":", "::1"] {
            let error = Cluster::connect(bad, driver.clone()).await.unwrap_err();
            assert!(
                matches!(error, ConnectError::Address { .. }),
                "{bad}: {error}"
            );
            assert!(!error.is_retryable());
        }
        let (_runtime, endpoint, _) = head();
        let error = Cluster::connect(endpoint.local_addr(), driver)
            .await
            .unwrap_err();
        assert!(
            matches!(error, ConnectError::Head(_)),
            "credentials of another cluster: {error}"
        );
    }
}
