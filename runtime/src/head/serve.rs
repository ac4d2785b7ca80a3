//! Connections to the head: every request is checked against the caller's role (S-2).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use actix::Addr;
use kolo_actors::head::Coordinator;
use kolo_actors::head::messages::{Happened, Way};
use kolo_core::fence::Fence;
use kolo_core::head::messages::{Caller, Input};
use kolo_core::head::registry::Session;
use kolo_transport::frame::{InvalidFrame, Limits};
use kolo_transport::identity::{Identity, Role};
use kolo_transport::ids::{DriverId, JobId, Slot};
use kolo_transport::wire::head::Beat;
use kolo_transport::wire::{HeadReply, HeadRequest, Obituary, Refusal, RefusalKind};
use kolo_transport::{CloseCode, Connection, ConnectionLost, Endpoint, FrameError, Stream};
use tokio::sync::mpsc;

use super::link::Link;
use super::shared::{REPLY_TIMEOUT, Shared};
use super::submit;
use super::trust::signing;
use crate::surroundings;

/// Heartbeats go before everything else.
const HEARTBEAT_PRIORITY: i32 = 100;

/// Serves connections until the endpoint is closed.
pub(super) async fn accept(shared: Arc<Shared>, endpoint: Endpoint) {
    while let Some(connection) = endpoint.accept().await {
        tokio::spawn(Peer::serve(Arc::clone(&shared), connection));
    }
}

/// Passes on obituaries until the endpoint is gone, which may outlive the head: its state is not held here.
pub(super) async fn listen(actor: Addr<Coordinator>, mut obituaries: mpsc::Receiver<Obituary>) {
    while let Some(obituary) = obituaries.recv().await {
        tell(&actor, Input::Obituary(obituary)).await;
    }
}

async fn tell(actor: &Addr<Coordinator>, input: Input) {
    if actor.send(Happened::from(input)).await.is_err() {
        tracing::debug!("the head stops");
    }
}

/// What the end of a node's connection says of its workers.
fn fence(lost: &ConnectionLost) -> Fence {
    match lost {
        ConnectionLost::Closed {
            code: CloseCode::Dead,
            ..
        } => Fence::Ended,
        ConnectionLost::Closed {
            code: CloseCode::Shutdown,
            ..
        } => Fence::Left,
        _ => Fence::Lease,
    }
}

/// One connection.
struct Peer {
    shared: Arc<Shared>,
    connection: Connection,
    session: Session,
}

impl Peer {
    async fn serve(shared: Arc<Shared>, connection: Connection) {
        tracing::debug!(peer = %connection.peer(), address = %connection.remote_addr(), "connected");
        let number = shared.sessions.fetch_add(1, Ordering::Relaxed) + 1;
        let session = Session(number);
        let peer = Arc::new(Self {
            shared,
            connection,
            session,
        });
        let connection = &peer.connection;
        let connected = Happened {
            input: Input::Connected {
                session,
                peer: connection.peer().clone(),
                remote: connection.remote_addr().ip(),
                local: connection.local_ip(),
            },
            way: Some(Way::Link(session, Arc::new(Link(connection.clone())))),
        };
        if peer.shared.actor.send(connected).await.is_err() {
            tracing::debug!("the head stops");
        }
        let lost = loop {
            match connection.accept(Limits::CONTROL).await {
                Ok(stream) => {
                    tokio::spawn(Arc::clone(&peer).answer(stream));
                }
                Err(lost) => break lost,
            }
        };
        tracing::debug!(peer = %connection.peer(), reason = %lost, "disconnected");
        let reason = if peer.shared.trust.is_revoked(connection.peer()) {
            "it was revoked".to_owned()
        } else {
            lost.to_string()
        };
        let disconnected = Input::Disconnected {
            session,
            reason,
            fence: fence(&lost),
        };
        tell(&peer.shared.actor, disconnected).await;
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
            HeadRequest::Submit(spec) => {
                submit::serve(&self.shared, self.session, spec, stream).await;
            }
            HeadRequest::Heartbeats => self.heartbeats(stream).await,
            // Never cut off, or the node would not hear of those that are put out.
            HeadRequest::Register(_) => {
                let reply = self.register(request).await;
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

    async fn ask(&self, request: HeadRequest) -> HeadReply {
        self.shared.ask(Caller::Peer(self.session), request).await
    }

    async fn decide(&self, request: HeadRequest) -> Result<HeadReply, Refusal> {
        match request {
            HeadRequest::DryRun(spec) => submit::dry_run(&self.shared, self.session, spec).await,
            HeadRequest::SignWorker { job, slot, csr } => self.sign(job, slot, csr).await,
            HeadRequest::Surroundings => {
                self.driver()?;
                let state = self.shared.state.iter().cloned().collect();
                Ok(HeadReply::Surroundings(surroundings::look(state).await))
            }
            HeadRequest::Metrics(metrics) => {
                // Whether the node may.
                let reply = self.ask(HeadRequest::Metrics(Vec::new())).await;
                if reply == HeadReply::Done {
                    let mut all = self.shared.metrics();
                    for sum in &metrics {
                        all.add(sum);
                    }
                }
                Ok(reply)
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
            request @ (HeadRequest::DrainNode { .. } | HeadRequest::UndrainNode { .. }) => {
                self.shared.trust.administrator(self.connection.peer())?;
                Ok(self.ask(request).await)
            }
            request => Ok(self.ask(request).await),
        }
    }

    async fn register(&self, request: HeadRequest) -> HeadReply {
        let mut reply = self.ask(request).await;
        if let HeadReply::Registered { revoked, .. } = &mut reply
            && let Some(node) = self.connection.peer().node()
        {
            *revoked = self.shared.trust.registered(node, &self.connection);
        }
        reply
    }

    async fn heartbeats(&self, mut stream: Stream) {
        let opened = self.ask(HeadRequest::Heartbeats).await;
        if opened != HeadReply::Done {
            return self.reply(&mut stream, &opened).await;
        }
        stream.send.set_priority(HEARTBEAT_PRIORITY);
        let limit = self.shared.lease * 2;
        loop {
            // The registry's lease is shorter; this only ends a stream that nobody uses.
            let beat = match stream.recv.expect_within::<Beat>(limit).await {
                Ok(frame) => frame.head,
                Err(error) => {
                    let peer = self.connection.peer();
                    tracing::debug!(%peer, %error, "no more heartbeats on this stream");
                    return stream.abort(CloseCode::Done);
                }
            };
            if !self.shared.actor.connected() {
                return stream.abort(CloseCode::Shutdown);
            }
            // The end of a stay closes the connection.
            self.shared.beats.heard(self.session);
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

    async fn sign(&self, job: JobId, slot: Slot, csr: Vec<u8>) -> Result<HeadReply, Refusal> {
        let question = HeadRequest::SignWorker {
            job,
            slot,
            csr: Vec::new(),
        };
        let mut reply = self.ask(question).await;
        if let HeadReply::Signed { certificate, .. } = &mut reply {
            let name = Identity::worker_name(job, slot);
            let life = self.shared.trust.lives.worker;
            let authority = self.shared.trust.store.authority();
            *certificate = authority
                .sign(&csr, Role::Worker, &name, life)
                .map_err(signing)?
                .to_vec();
        }
        Ok(reply)
    }

    fn driver(&self) -> Result<DriverId, Refusal> {
        let peer = self.connection.peer();
        peer.driver().ok_or_else(|| {
            Refusal::new(
                RefusalKind::Forbidden,
                format!("only a driver may ask for this, and {peer} is none"),
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
