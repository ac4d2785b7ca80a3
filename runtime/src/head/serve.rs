//! Connections to the head: every request is checked against the caller's role (S-2).

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use actix::{Addr, MailboxError};
use kolo_actors::head::HeadActor;
use kolo_actors::head::messages::{
    DrainNode, GetCluster, GetInterfaces, GetJob, GetJobs, Gone, Heard, MaySign, NetworkChanged,
    Register, Report, StopJob,
};
use kolo_core::head::registry::Session;
use kolo_transport::frame::{InvalidFrame, Limits};
use kolo_transport::identity::{Identity, Role};
use kolo_transport::ids::{DriverId, JobId, NodeId, Slot};
use kolo_transport::wire::head::Beat;
use kolo_transport::wire::{HeadReply, HeadRequest, NodeRegistration, Refusal, RefusalKind};
use kolo_transport::{CloseCode, Connection, Endpoint, FrameError, Stream, TransportRuntime};
use tokio::sync::mpsc;

use super::link::Link;
use super::submit;
use super::trust::{Trust, signing};
use crate::surroundings;

/// How long a peer may take to read its answer.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// Heartbeats go before everything else.
const HEARTBEAT_PRIORITY: i32 = 100;

/// What all connections share.
pub(super) struct Shared {
    pub(super) actor: Addr<HeadActor>,
    pub(super) trust: Arc<Trust>,
    pub(super) runtime: TransportRuntime,
    /// Whether jobs are taken.
    pub(super) ready: AtomicBool,
    pub(super) lease: Duration,
    pub(super) heartbeat: Duration,
    /// Its state folder.
    pub(super) state: Option<PathBuf>,
    /// How long a peer may take to send its request after it has opened the stream.
    pub(super) read_timeout: Duration,
    pub(super) farewell: Mutex<Option<mpsc::Sender<()>>>,
}

impl Shared {
    /// Held by whoever has still something to tell a driver.
    pub(super) fn farewell(&self) -> Option<mpsc::Sender<()>> {
        self.farewell
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// From now on the farewells that are still held are waited for.
    pub(super) fn no_more_farewells(&self) {
        *self.farewell.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// The actor is gone, which it is only when the head stops.
pub(super) fn stopped(_: MailboxError) -> Refusal {
    Refusal::new(RefusalKind::Stopped, "the head is stopping")
}

/// Serves connections until the endpoint is closed.
pub(super) async fn accept(shared: Arc<Shared>, endpoint: Endpoint) {
    while let Some(connection) = endpoint.accept().await {
        tokio::spawn(Peer::serve(Arc::clone(&shared), connection));
    }
}

/// One connection.
struct Peer {
    shared: Arc<Shared>,
    connection: Connection,
    /// Who it is in the registry, once a node has registered.
    registered: OnceLock<(NodeId, Session)>,
}

impl Peer {
    async fn serve(shared: Arc<Shared>, connection: Connection) {
        tracing::debug!(peer = %connection.peer(), address = %connection.remote_addr(), "connected");
        let peer = Arc::new(Self {
            shared,
            connection,
            registered: OnceLock::new(),
        });
        let lost = loop {
            match peer.connection.accept(Limits::CONTROL).await {
                Ok(stream) => {
                    tokio::spawn(Arc::clone(&peer).answer(stream));
                }
                Err(lost) => break lost,
            }
        };
        tracing::debug!(peer = %peer.connection.peer(), reason = %lost, "disconnected");
        let reason = if peer.shared.trust.is_revoked(peer.connection.peer()) {
            "it was revoked".to_owned()
        } else {
            lost.to_string()
        };
        peer.gone(&reason).await;
    }

    /// Tells the registry that the connection has ended.
    async fn gone(&self, reason: &str) {
        if let Some((node, session)) = self.registered.get().copied() {
            let gone = Gone {
                node,
                session,
                reason: reason.to_owned(),
            };
            if self.shared.actor.send(gone).await.is_err() {
                tracing::debug!(%node, "the head stops");
            }
        }
    }

    /// One request.
    async fn answer(self: Arc<Self>, mut stream: Stream) {
        let request = match stream.recv.expect_within(self.shared.read_timeout).await {
            Ok(frame) => frame.head,
            Err(error) => {
                if let Some(refusal) = unreadable(&error) {
                    self.reply(&mut stream, &HeadReply::Refused(refusal)).await;
                } else {
                    stream.abort(CloseCode::Deadline);
                }
                return;
            }
        };
        match request {
            HeadRequest::Submit(spec) => match self.driver() {
                Ok(owner) => submit::serve(&self.shared, owner, spec, stream).await,
                Err(refusal) => submit::refuse(&self.shared, stream, refusal).await,
            },
            HeadRequest::Heartbeats => self.heartbeats(stream).await,
            // Never cut off, or the registry would know a session that this connection does not.
            HeadRequest::Register(registration) => {
                let reply = self.register(registration).await;
                let reply = reply.unwrap_or_else(HeadReply::Refused);
                self.reply(&mut stream, &reply).await;
            }
            request => {
                // Whoever does not want the answer any more has reset the stream.
                let cancelled = stream.send.stopped();
                let reply = tokio::select! {
                    biased;
                    reply = self.decide(request) => reply.unwrap_or_else(HeadReply::Refused),
                    _ = cancelled => return,
                };
                self.reply(&mut stream, &reply).await;
            }
        }
    }

    async fn reply(&self, stream: &mut Stream, reply: &HeadReply) {
        let sent = self
            .shared
            .runtime
            .timeout(REPLY_TIMEOUT, stream.send.send(reply, &[]))
            .await;
        if let Some(Ok(())) = sent {
            stream.send.finish();
        } else {
            tracing::debug!(peer = %self.connection.peer(), ?sent, "an answer was not taken");
            stream.abort(CloseCode::Deadline);
        }
    }

    async fn decide(&self, request: HeadRequest) -> Result<HeadReply, Refusal> {
        let actor = &self.shared.actor;
        match request {
            HeadRequest::Events(events) => {
                let (node, session) = self.session()?;
                let report = Report {
                    node,
                    session,
                    events,
                };
                actor.send(report).await.map_err(stopped)??;
                Ok(HeadReply::Done)
            }
            HeadRequest::SignWorker { job, slot, csr } => self.sign(job, slot, &csr).await,
            HeadRequest::Cluster => {
                self.driver()?;
                let mut cluster = actor.send(GetCluster).await.map_err(stopped)?;
                cluster.revoked = self.shared.trust.revoked();
                Ok(HeadReply::Cluster(cluster))
            }
            HeadRequest::Surroundings => {
                self.driver()?;
                let state = self.shared.state.iter().cloned().collect();
                Ok(HeadReply::Surroundings(surroundings::look(state).await))
            }
            HeadRequest::Jobs => {
                self.driver()?;
                let jobs = actor.send(GetJobs).await.map_err(stopped)?;
                Ok(HeadReply::Jobs(jobs))
            }
            HeadRequest::Job { job } => {
                self.driver()?;
                let info = actor.send(GetJob(job)).await.map_err(stopped)??;
                Ok(HeadReply::Job(info))
            }
            HeadRequest::Network(network) => {
                let (node, session) = self.session()?;
                let changed = NetworkChanged {
                    node,
                    session,
                    network,
                };
                actor.send(changed).await.map_err(stopped)??;
                Ok(HeadReply::Done)
            }
            HeadRequest::Interfaces(query) => {
                self.driver()?;
                let report = actor.send(GetInterfaces(query)).await.map_err(stopped)??;
                Ok(HeadReply::Interfaces(report))
            }
            HeadRequest::Stop { job } => {
                let driver = self.driver()?;
                let reason = format!("{driver} asked for it");
                let end = actor
                    .send(StopJob { job, reason })
                    .await
                    .map_err(stopped)??;
                end.wait().await;
                Ok(HeadReply::Done)
            }
            HeadRequest::Drain => {
                let (node, session) = self.session()?;
                let drain = DrainNode { node, session };
                actor.send(drain).await.map_err(stopped)??;
                Ok(HeadReply::Done)
            }
            request @ (HeadRequest::Renew { .. }
            | HeadRequest::CreateToken { .. }
            | HeadRequest::Tokens
            | HeadRequest::RevokeToken { .. }
            | HeadRequest::Revoke { .. }
            | HeadRequest::Reinstate { .. }) => {
                let peer = self.connection.peer();
                self.shared.trust.answer(peer, request).await
            }
            // These have streams of their own.
            HeadRequest::Register(_) | HeadRequest::Submit(_) | HeadRequest::Heartbeats => Err(
                Refusal::new(RefusalKind::Internal, "the request was routed wrongly"),
            ),
        }
    }

    async fn register(&self, mut registration: NodeRegistration) -> Result<HeadReply, Refusal> {
        let node = self.node()?;
        if registration.node != node {
            return Err(Refusal::new(
                RefusalKind::Forbidden,
                format!(
                    "a certificate for {node} can't register {}",
                    registration.node
                ),
            ));
        }
        if self.registered.get().is_some() {
            return Err(Refusal::new(
                RefusalKind::Invalid,
                format!("{node} is registered over this connection already"),
            ));
        }
        // A daemon that listens on all interfaces is reached where it comes from.
        if registration.address.ip().is_unspecified() {
            registration
                .address
                .set_ip(self.connection.remote_addr().ip().to_canonical());
        }
        let register = Register {
            registration,
            link: Arc::new(Link(self.connection.clone())),
        };
        let session = self.shared.actor.send(register).await.map_err(stopped)??;
        if self.registered.set((node, session)).is_err() {
            // Two registrations at once: the registry has kept the later one, which ends with this.
            self.connection
                .close(CloseCode::Duplicate, "registered twice over one connection");
        }
        // It may have ended before there was a session to end.
        if self.connection.is_closed() {
            self.gone("the connection ended at once").await;
        }
        Ok(HeadReply::Registered {
            heartbeat_ms: self.shared.heartbeat.as_millis() as u64,
            lease_ms: self.shared.lease.as_millis() as u64,
            revoked: self.shared.trust.registered(node, &self.connection),
        })
    }

    async fn heartbeats(&self, mut stream: Stream) {
        let (node, session) = match self.session() {
            Ok(registered) => registered,
            Err(refusal) => {
                return self.reply(&mut stream, &HeadReply::Refused(refusal)).await;
            }
        };
        stream.send.set_priority(HEARTBEAT_PRIORITY);
        let limit = self.shared.lease * 2;
        loop {
            // The registry's lease is shorter; this only ends a stream that nobody uses.
            let beat = match stream.recv.expect_within::<Beat>(limit).await {
                Ok(frame) => frame.head,
                Err(error) => {
                    tracing::debug!(%node, %error, "no more heartbeats on this stream");
                    return stream.abort(CloseCode::Done);
                }
            };
            if !matches!(
                self.shared.actor.send(Heard { node, session }).await,
                Ok(true)
            ) {
                return stream.abort(CloseCode::LeaseExpired);
            }
            let sent = self
                .shared
                .runtime
                .timeout(limit, stream.send.send(&beat, &[]))
                .await;
            if !matches!(sent, Some(Ok(()))) {
                return stream.abort(CloseCode::Deadline);
            }
        }
    }

    async fn sign(&self, job: JobId, slot: Slot, csr: &[u8]) -> Result<HeadReply, Refusal> {
        let (node, session) = self.session()?;
        let question = MaySign {
            node,
            session,
            job,
            slot,
        };
        let generation = self.shared.actor.send(question).await.map_err(stopped)??;
        let name = Identity::worker_name(job, slot);
        let certificate = self
            .shared
            .trust
            .store
            .authority()
            .sign(csr, Role::Worker, &name, self.shared.trust.lives.worker)
            .map_err(signing)?;
        Ok(HeadReply::Signed {
            certificate: certificate.to_vec(),
            generation,
        })
    }

    fn forbidden(&self, needed: &str) -> Refusal {
        Refusal::new(
            RefusalKind::Forbidden,
            format!(
                "only a {needed} may ask for this, and {} is none",
                self.connection.peer()
            ),
        )
    }

    fn driver(&self) -> Result<DriverId, Refusal> {
        self.connection
            .peer()
            .driver()
            .ok_or_else(|| self.forbidden("driver"))
    }

    fn node(&self) -> Result<NodeId, Refusal> {
        self.connection
            .peer()
            .node()
            .ok_or_else(|| self.forbidden("node"))
    }

    fn session(&self) -> Result<(NodeId, Session), Refusal> {
        let node = self.node()?;
        self.registered.get().copied().ok_or_else(|| {
            Refusal::new(
                RefusalKind::Forbidden,
                format!("{node} must register over this connection first"),
            )
        })
    }
}

/// What to answer to a request that can't be read; nothing if the peer is not there to read it.
fn unreadable(error: &FrameError) -> Option<Refusal> {
    match error {
        FrameError::Invalid(InvalidFrame::Malformed { .. }) => Some(Refusal::new(
            RefusalKind::UnknownRequest,
            format!(
                "version {} does not know this request: {error}",
                env!("CARGO_PKG_VERSION")
            ),
        )),
        FrameError::Invalid(InvalidFrame::TooLong { .. }) => {
            Some(Refusal::new(RefusalKind::TooLarge, error.to_string()))
        }
        _ => None,
    }
}
