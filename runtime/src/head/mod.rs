//! The head: nodes register with it, drivers submit jobs to it.
//!
//! [`Head::start`] runs it on a thread of its own, with an actix `System` for its actors and for HTTP; QUIC runs on a
//! [`TransportRuntime`]. A process may run several heads, one for each cluster.

mod api;
mod config;
mod error;
pub mod held;
mod join;
mod link;
mod members;
mod rendezvous;
mod serve;
mod shared;
mod state;
mod submit;
#[cfg(test)]
mod tests;
mod trust;

use std::fmt;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use actix::Actor;
use kolo_actors::head::{Coordinator, ask};
use kolo_core::head::messages::{Caller, Question, Settings};
use kolo_transport::descriptors::make_room;
use kolo_transport::identity::{HEAD_NAME, Role};
use kolo_transport::ids::ClusterId;
use kolo_transport::obituary::WAITING;
use kolo_transport::wire::{HeadReply, HeadRequest};
use kolo_transport::{
    Authority, BindError, CloseCode, Endpoint, EndpointConfig, JoinToken, LiveCredentials,
    TransportRuntime,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;

pub use self::config::{HeadConfig, HeadState};
pub use self::error::HeadError;
use self::shared::Shared;
use self::state::Store;
use self::trust::{Lives, Trust};
use crate::health::Health;
use crate::http::{Connections, HttpConfig, HttpHandle, HttpStartError};
use crate::limiter::Attempts;

/// Descriptors that a head needs to start; members and jobs need more.
const DESCRIPTORS: u64 = 24;

/// How long drivers have to read the last events of their jobs when the head stops.
const FAREWELL: Duration = Duration::from_secs(2);

/// A running head. Dropping it stops it in the background, as [`Head::stop`] does.
pub struct Head {
    address: SocketAddr,
    http_address: Option<SocketAddr>,
    store: Arc<Store>,
    shared: Arc<Shared>,
    runtime: TransportRuntime,
    /// Dropped to stop it.
    stop: Option<oneshot::Sender<()>>,
    /// Ends when it has stopped.
    stopped: Option<oneshot::Receiver<()>>,
}

impl fmt::Debug for Head {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Head")
            .field("cluster", &self.cluster())
            .field("address", &self.address)
            .field("http_address", &self.http_address)
            .finish_non_exhaustive()
    }
}

/// What the thread reports when all of it runs.
struct Ready {
    address: SocketAddr,
    http_address: Option<SocketAddr>,
    store: Arc<Store>,
    shared: Arc<Shared>,
    runtime: TransportRuntime,
}

impl Head {
    /// Starts a head and returns when it listens. May be awaited on any executor.
    ///
    /// # Errors
    ///
    /// [`HeadError`]; nothing is left running then.
    pub async fn start(config: HeadConfig) -> Result<Self, HeadError> {
        config.check()?;
        make_room("the head", DESCRIPTORS)?;
        let (ready, is_ready) = oneshot::channel();
        let (stop, stopping) = oneshot::channel();
        let (stopped, is_stopped) = oneshot::channel::<()>();
        std::thread::Builder::new()
            .name("kolo-head".to_owned())
            .spawn(move || {
                actix::System::new().block_on(run(config, ready, stopping));
                drop(stopped);
            })
            .map_err(HeadError::Thread)?;
        let ready = is_ready.await.map_err(|_| HeadError::Crashed)??;
        Ok(Self {
            address: ready.address,
            http_address: ready.http_address,
            store: ready.store,
            shared: ready.shared,
            runtime: ready.runtime,
            stop: Some(stop),
            stopped: Some(is_stopped),
        })
    }

    /// Where nodes and drivers connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where HTTPS listens, if it does.
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http_address
    }

    /// The cluster.
    pub fn cluster(&self) -> ClusterId {
        self.authority().cluster()
    }

    /// The cluster's certificate authority.
    pub fn authority(&self) -> &Authority {
        self.store.authority()
    }

    /// The runtime on which its connections run, for other members in this process.
    pub fn runtime(&self) -> &TransportRuntime {
        &self.runtime
    }

    /// The folder with the credentials of an operator, if the head has a state folder.
    pub fn admin_dir(&self) -> Option<&Path> {
        self.store.admin_dir()
    }

    /// Makes a token with which nodes or drivers join, valid for `ttl`, for `uses` joins or any number of them.
    ///
    /// If it can't be stored, that is logged, and it holds for as long as this head runs; see
    /// [`Head::store_token`].
    pub fn create_token(&self, role: Role, ttl: Duration, uses: Option<u32>) -> JoinToken {
        let (token, stored) = self.store.create_token(role, ttl, uses);
        if let Err(error) = stored {
            tracing::error!(%error, "a join token is not stored; it ends with this head");
        }
        token
    }

    /// As [`Head::create_token`], for a token that must outlive this process.
    ///
    /// # Errors
    ///
    /// [`HeadError::Store`] if it can't be stored.
    pub fn store_token(
        &self,
        role: Role,
        ttl: Duration,
        uses: Option<u32>,
    ) -> Result<JoinToken, HeadError> {
        let (token, stored) = self.store.create_token(role, ttl, uses);
        stored?;
        Ok(token)
    }

    /// Renews the certificates of the head and of its operator now; else that happens by itself in time.
    ///
    /// # Errors
    ///
    /// [`HeadError::Identity`].
    pub fn renew_certificates(&self) -> Result<(), HeadError> {
        self.shared.trust.renew_now().map_err(HeadError::Identity)
    }

    /// Tells whether the head does its work.
    pub fn health(&self) -> Health {
        let shared = Arc::clone(&self.shared);
        Health::new(self.runtime.clone(), move || {
            let shared = Arc::clone(&shared);
            async move {
                let reply = shared.ask(Caller::Http, HeadRequest::Cluster).await;
                matches!(reply, HeadReply::Cluster(_))
            }
        })
    }

    /// Takes no more jobs and waits until those that run have ended by themselves, at most for `limit`. Whether they have.
    /// Cancel safe; there is no way back but a new start.
    pub async fn drain(&self, limit: Duration) -> bool {
        self.shared.ready.store(false, Ordering::Release);
        let reason = "the head is stopping and takes no more jobs".to_owned();
        let drained = ask(&self.shared.actor, Question::Drain { reason });
        self.runtime.timeout(limit, drained).await == Some(HeadReply::Done)
    }

    /// Stops all jobs, tells their drivers, closes all connections and waits until that is done. Takes as long as the
    /// jobs' grace periods, at most [`HeadConfig::stop_timeout`] and a few seconds.
    ///
    /// When the future is dropped, the head stops in the background.
    pub async fn stop(mut self) {
        self.stop = None;
        if let Some(stopped) = self.stopped.take() {
            // Ends with an error, since nothing is sent: the thread has dropped its end.
            stopped.await.ok();
        }
    }
}

/// The head's whole life, on its own thread.
async fn run(
    config: HeadConfig,
    ready: oneshot::Sender<Result<Ready, HeadError>>,
    stopping: oneshot::Receiver<()>,
) {
    let stop_timeout = config.stop_timeout;
    let (parts, report) = match Parts::start(config) {
        Ok(started) => started,
        Err(error) => {
            if ready.send(Err(error)).is_err() {
                tracing::debug!("nobody waits for the head any more");
            }
            return;
        }
    };
    // If nobody waits any more, `stopping` has ended, too.
    ready.send(Ok(report)).ok();
    stopping.await.ok();
    parts.stop(stop_timeout).await;
}

/// Before there is a state folder: where its head can't start, no new cluster is left behind.
fn check_addresses(config: &HeadConfig) -> Result<(), HeadError> {
    let address = config.listen;
    match &config.state {
        HeadState::Dir(path) if !path.exists() => {}
        _ => return Ok(()),
    }
    if let Err(error) = UdpSocket::bind(address) {
        return Err(BindError::Socket { address, error }.into());
    }
    if let Some(address) = config.http
        && let Err(error) = TcpListener::bind(address)
    {
        return Err(HttpStartError::Bind { address, error }.into());
    }
    Ok(())
}

/// All that runs.
struct Parts {
    endpoint: Endpoint,
    shared: Arc<Shared>,
    /// Keep certificates renewed.
    renewals: Vec<AbortHandle>,
    http: Option<HttpHandle>,
    /// Ends when the last job's driver has been told.
    farewells: mpsc::Receiver<()>,
}

impl Parts {
    fn start(config: HeadConfig) -> Result<(Self, Ready), HeadError> {
        check_addresses(&config)?;
        let store = Arc::new(Store::open(&config.state, config.certificate_life)?);
        let runtime = match config.runtime {
            Some(runtime) => runtime,
            None => TransportRuntime::new(config.threads).map_err(HeadError::Thread)?,
        };
        let credentials = store
            .authority()
            .issue_for(Role::Head, HEAD_NAME, config.certificate_life)
            .map_err(HeadError::Identity)?;
        let credentials = LiveCredentials::new(credentials);
        let attempts = Attempts::default();
        let connections = Connections::of_this_process();
        let (obituaries, heard) = mpsc::channel(WAITING);
        // Nodes are missed by their heartbeats. Drivers send none, and may stand still for longer.
        let idle_timeout = config.lease.max(EndpointConfig::default().idle_timeout);
        let endpoint = Endpoint::bind(
            &runtime,
            credentials.clone(),
            EndpointConfig {
                listen: config.listen,
                idle_timeout,
                keep_alive: idle_timeout / 6,
                join: Some(Arc::new(join::Joins::new(
                    Arc::clone(&store),
                    config.certificate_life,
                    attempts.clone(),
                ))),
                obituaries: Some(obituaries),
                ..EndpointConfig::default()
            },
        )?;
        let lives = Lives {
            member: config.certificate_life,
            worker: config.worker_certificate_life,
        };
        let trust = Trust::new(
            Arc::clone(&store),
            lives,
            credentials.clone(),
            endpoint.clone(),
        )?;
        let settings = Settings {
            cluster: store.authority().cluster(),
            lease: config.lease,
            heartbeat: config.heartbeat,
            job: config.job,
        };
        let rendezvous = rendezvous::Servers::new(
            config.listen.ip(),
            connections.clone(),
            config.rendezvous_memory,
        );
        let coordinator = Coordinator::new(settings, Arc::new(rendezvous), watch::Sender::new(0));
        let beats = coordinator.beats();
        let actor = coordinator.start();
        let (farewell, farewells) = mpsc::channel(1);
        let shared = Arc::new(Shared {
            actor,
            beats,
            trust,
            runtime: runtime.clone(),
            ready: AtomicBool::new(false),
            sessions: AtomicU64::new(0),
            lease: config.lease,
            state: match &config.state {
                HeadState::Dir(path) => Some(path.clone()),
                HeadState::Memory => None,
            },
            read_timeout: config.read_timeout,
            farewell: Mutex::new(Some(farewell)),
            metrics: Mutex::default(),
        });
        let http = config
            .http
            .map(|listen| {
                crate::http::serve(
                    Arc::new(api::Api::new(Arc::clone(&shared))),
                    HttpConfig {
                        listen,
                        credentials,
                        bearer: config.bearer,
                        attempts,
                        connections,
                    },
                )
            })
            .transpose()?;
        runtime
            .handle()
            .spawn(serve::accept(Arc::clone(&shared), endpoint.clone()));
        runtime
            .handle()
            .spawn(serve::listen(shared.actor.clone(), heard));
        shared.ready.store(true, Ordering::Release);
        let report = Ready {
            address: endpoint.local_addr(),
            http_address: http.as_ref().map(HttpHandle::address),
            store,
            shared: Arc::clone(&shared),
            runtime,
        };
        kolo_actors::news!(
            cluster = %report.store.authority().cluster(),
            address = %report.address,
            http = ?report.http_address,
            "the head listens"
        );
        let parts = Self {
            endpoint,
            renewals: shared.trust.keep_renewed(),
            shared,
            http,
            farewells,
        };
        Ok((parts, report))
    }

    async fn stop(mut self, limit: Duration) {
        kolo_actors::news!("the head stops");
        self.shared.ready.store(false, Ordering::Release);
        let reason = "the head is stopping".to_owned();
        let ended = ask(&self.shared.actor, Question::Shutdown { reason });
        if tokio::time::timeout(limit, ended).await.is_err() {
            tracing::warn!(?limit, "not all jobs have ended in time");
        }
        self.shared.no_more_farewells();
        if tokio::time::timeout(FAREWELL, self.farewells.recv())
            .await
            .is_err()
        {
            tracing::warn!("not all drivers have read the end of their jobs");
        }
        if let Some(http) = self.http {
            http.stop().await;
        }
        for renewal in self.renewals {
            renewal.abort();
        }
        self.endpoint
            .close(CloseCode::Shutdown, "the head is stopping");
        if tokio::time::timeout(FAREWELL, self.endpoint.drained())
            .await
            .is_err()
        {
            tracing::debug!("not all peers have confirmed the end");
        }
    }
}

/// Where the state folder keeps the credentials of an operator.
fn admin_path(dir: &Path) -> PathBuf {
    dir.join("admin")
}
