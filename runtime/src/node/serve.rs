//! Requests of the head and of drivers.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use actix::Addr;
use bytes::Bytes;
use kolo_actors::node::{Ask, NodeColocator, NodeContext, Snapshot};
use kolo_transport::frame::InvalidFrame;
use kolo_transport::ids::{JobId, Rank};
use kolo_transport::wire::{NodeRegistration, NodeReply, NodeRequest, Refusal, RefusalKind};
use kolo_transport::{
    CloseCode, Connection, Endpoint, Flood, FrameError, FrameReceiver, Limits, Role, Stream,
};

use super::NodeError;
use super::calls::{Attach, Calls};
use super::network::{self, Network};
use super::programs::{MAX_PIECE, Pieces, Programs};
use crate::surroundings;

/// How long the first frame of a stream may take.
const FIRST_FRAME: Duration = Duration::from_secs(10);

/// Output goes out in batches of about this many bytes.
const LOG_BATCH: usize = 256 * 1024;

/// Streams for pieces of a program.
const UPLOADS: Limits = Limits {
    head: 64 << 10,
    body: MAX_PIECE,
};

/// Everything that answers requests.
pub(super) struct Server {
    pub(super) head: SocketAddr,
    pub(super) context: Arc<NodeContext>,
    pub(super) node: Addr<NodeColocator>,
    pub(super) endpoint: Endpoint,
    pub(super) calls: Arc<Calls>,
    pub(super) programs: Arc<Programs>,
    pub(super) address: SocketAddr,
    pub(super) network: Arc<Network>,
    /// Where it keeps its identity and programs.
    pub(super) state: Vec<PathBuf>,
    /// Tells this daemon from others with the same identity.
    pub(super) instance: u64,
    /// For the log of refused requests, which anybody can cause.
    pub(super) refusals: Flood,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("head", &self.head)
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

/// Who may ask for what (S-2).
fn may(role: Role, request: &NodeRequest) -> Result<(), Refusal> {
    let allowed: &[Role] = match request {
        NodeRequest::Echo => &[Role::Node, Role::Driver, Role::Head],
        NodeRequest::Reserve { .. }
        | NodeRequest::Release { .. }
        | NodeRequest::Start(_)
        | NodeRequest::Membership(_)
        | NodeRequest::RankLost { .. }
        | NodeRequest::Revoke { .. }
        | NodeRequest::Hold { .. }
        | NodeRequest::StopWorker { .. }
        | NodeRequest::FreePort { .. }
        | NodeRequest::Revocations(_)
        | NodeRequest::Stop { .. }
        | NodeRequest::Signal { .. }
        | NodeRequest::Probe(_)
        | NodeRequest::Kill { .. } => &[Role::Head],
        NodeRequest::HasProgram { .. }
        | NodeRequest::PutProgram { .. }
        | NodeRequest::Attach { .. }
        | NodeRequest::Surroundings
        | NodeRequest::Logs { .. }
        | NodeRequest::Output { .. } => &[Role::Driver],
    };
    if allowed.contains(&role) {
        Ok(())
    } else {
        let allowed: Vec<String> = allowed.iter().map(ToString::to_string).collect();
        let allowed = allowed.join(" or ");
        Err(Refusal::new(
            RefusalKind::Forbidden,
            format!("only a {allowed} may ask a node for this, and the caller is a {role}"),
        ))
    }
}

fn stopping() -> Refusal {
    Refusal::new(RefusalKind::Stopped, "this node is stopping")
}

impl Server {
    /// What the node tells the head of itself.
    pub(super) async fn registration(&self) -> Result<NodeRegistration, NodeError> {
        let snapshot = self
            .node
            .send(Snapshot)
            .await
            .map_err(|_| NodeError::Refused(stopping()))?;
        Ok(NodeRegistration {
            node: self.context.here.node,
            hostname: self.context.here.hostname.clone(),
            address: self.address,
            resources: snapshot.total,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            jobs: snapshot.jobs,
            network: self.network.for_registration(),
            instance: self.instance,
            seal: Some(self.context.obituary.seal()),
            draining: snapshot.leaving,
        })
    }

    /// Accepts drivers and nodes until the endpoint is closed.
    pub(super) async fn accept(self: Arc<Self>, endpoint: Endpoint) {
        while let Some(connection) = endpoint.accept().await {
            // Nodes come to see whether they reach each other.
            if matches!(connection.peer().role, Role::Driver | Role::Node) {
                tokio::spawn(self.clone().connection(connection));
            } else {
                self.refusals.line(
                    || tracing::warn!(peer = %connection.peer(), "only drivers and nodes connect to a node"),
                );
                connection.close(
                    CloseCode::Forbidden,
                    "only drivers and nodes connect to a node",
                );
            }
        }
    }

    async fn connection(self: Arc<Self>, connection: Connection) {
        loop {
            match connection.accept(Limits::CONTROL).await {
                Ok(stream) => {
                    tokio::spawn(self.clone().serve(stream, connection.clone()));
                }
                Err(lost) => {
                    tracing::debug!(peer = %connection.peer(), %lost, "a peer is gone");
                    return;
                }
            }
        }
    }

    /// Serves one stream.
    pub(super) async fn serve(self: Arc<Self>, mut stream: Stream, connection: Connection) {
        let peer = connection.peer();
        let served = match self.answer(&mut stream, &connection).await {
            Ok(None) => return,
            Ok(Some(attach)) => self.calls.attach(stream, &connection, attach).await,
            Err(error) => {
                stream.abort(match error {
                    FrameError::Invalid(InvalidFrame::TooLong { .. }) => CloseCode::TooLarge,
                    FrameError::Invalid(InvalidFrame::Malformed { .. }) => CloseCode::Protocol,
                    FrameError::TimedOut { .. } => CloseCode::Deadline,
                    _ => CloseCode::Done,
                });
                Err(error)
            }
        };
        if let Err(error) = served {
            tracing::debug!(%peer, %error, "a stream failed");
        }
    }

    /// Answers a request, unless it turns the stream into something else.
    async fn answer(
        &self,
        stream: &mut Stream,
        connection: &Connection,
    ) -> Result<Option<Attach>, FrameError> {
        let peer = connection.peer();
        let request = match stream.recv.expect_within::<NodeRequest>(FIRST_FRAME).await {
            Ok(frame) => frame.head,
            Err(FrameError::Invalid(InvalidFrame::Malformed { reason, .. })) => {
                let refusal = Refusal::new(
                    RefusalKind::UnknownRequest,
                    format!(
                        "this is no request to a node that version {} knows: {reason}",
                        env!("CARGO_PKG_VERSION")
                    ),
                );
                return reply(stream, &NodeReply::Refused(refusal)).await;
            }
            Err(error) => return Err(error),
        };
        if let Err(refusal) = may(peer.role, &request) {
            self.refusals
                .line(|| tracing::warn!(%peer, %refusal, "a request was refused"));
            return reply(stream, &NodeReply::Refused(refusal)).await;
        }
        match request {
            NodeRequest::Attach { job, generation } => {
                stream.recv.set_limits(Limits::CALLS);
                Ok(peer.driver().map(|driver| Attach {
                    driver,
                    job,
                    generation,
                }))
            }
            NodeRequest::Logs {
                job,
                ranks,
                tail,
                follow,
            } => {
                // Its driver is there as long as it listens.
                let driver = peer.driver().filter(|_| follow);
                let _present = driver.and_then(|driver| self.calls.present(job, driver));
                self.logs(stream, job, &ranks, tail, follow).await
            }
            NodeRequest::Output { job, without } => {
                let driver = peer.driver();
                let _present = driver.and_then(|driver| self.calls.present(job, driver));
                self.output(stream, driver, job, &without).await?;
                Ok(None)
            }
            NodeRequest::PutProgram { program } => {
                stream.recv.set_limits(UPLOADS);
                let mut pieces = Upload(&mut stream.recv);
                let stored = self.programs.put(&program, &mut pieces).await;
                stream.recv.stop(CloseCode::Done);
                reply(stream, &done(stored)).await
            }
            NodeRequest::Echo => {
                let echo = NodeReply::Echo(self.network.echo(connection));
                reply(stream, &echo).await
            }
            NodeRequest::Surroundings => {
                let seen = surroundings::look(self.state.clone()).await;
                reply(stream, &NodeReply::Surroundings(seen)).await
            }
            NodeRequest::Probe(probe) => {
                let results = network::probe(&self.endpoint, &probe).await;
                reply(stream, &NodeReply::Probed(results)).await
            }
            NodeRequest::HasProgram { hash } => {
                let has = self.programs.get(hash).await.is_some();
                reply(stream, &NodeReply::HasProgram(has)).await
            }
            NodeRequest::Revocations(list) => {
                // A newer one may have come first, which is as good.
                self.endpoint.revoke(&list);
                reply(stream, &NodeReply::Done).await
            }
            order => {
                let answer = self.node.send(Ask::Order(Box::new(order))).await;
                let answer = answer.unwrap_or_else(|_| NodeReply::Refused(stopping()));
                reply(stream, &answer).await
            }
        }
    }

    async fn logs(
        &self,
        stream: &mut Stream,
        job: JobId,
        ranks: &[Rank],
        tail: Option<u32>,
        follow: bool,
    ) -> Result<Option<Attach>, FrameError> {
        let Some(output) = self.context.outputs.get(job) else {
            let refusal = Refusal::new(
                RefusalKind::NotFound,
                format!("there is no output of {job} on this node"),
            );
            return reply(stream, &NodeReply::Refused(refusal)).await;
        };
        stream.send.send(&NodeReply::Logs, &[]).await?;
        let mut changes = output.changes();
        let mut cursor = output.cursor(ranks, tail);
        let stopped = stream.send.stopped();
        tokio::pin!(stopped);
        loop {
            changes.mark_unchanged();
            let (batch, more) = output.read(&mut cursor, LOG_BATCH);
            if !batch.lines.is_empty() {
                stream.send.send(&batch, &[]).await?;
            } else if more && follow {
                tokio::select! {
                    changed = changes.changed() => if changed.is_err() {
                        break;
                    },
                    _ = &mut stopped => return Ok(None),
                }
            } else {
                break;
            }
        }
        stream.send.finish();
        Ok(None)
    }
}

pub(super) async fn reply(
    stream: &mut Stream,
    reply: &NodeReply,
) -> Result<Option<Attach>, FrameError> {
    stream.send.send(reply, &[]).await?;
    stream.send.finish();
    Ok(None)
}

fn done(result: Result<(), Refusal>) -> NodeReply {
    match result {
        Ok(()) => NodeReply::Done,
        Err(refusal) => NodeReply::Refused(refusal),
    }
}

/// The pieces of a program on a stream.
struct Upload<'a>(&'a mut FrameReceiver);

impl Pieces for Upload<'_> {
    async fn next(&mut self) -> Result<Option<Bytes>, String> {
        match self.0.next_raw().await {
            Ok(Some(frame)) => Ok(Some(frame.body)),
            Ok(None) => Ok(None),
            Err(error) => Err(format!("the program did not come whole: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use kolo_transport::ids::Generation;
    use kolo_transport::wire::{Probe, Program, ProgramHash, WorkerSignal};

    use super::*;

    #[test]
    fn every_request_has_its_roles() {
        let job = JobId(1);
        let hash = ProgramHash([0; 32]);
        let of_drivers = [
            NodeRequest::HasProgram { hash },
            NodeRequest::PutProgram {
                program: Program {
                    hash,
                    size: 1,
                    name: String::new(),
                },
            },
            NodeRequest::Attach {
                job,
                generation: Generation(1),
            },
            NodeRequest::Logs {
                job,
                ranks: Vec::new(),
                tail: None,
                follow: false,
            },
        ];
        let of_the_head = [
            NodeRequest::Probe(Probe {
                targets: Vec::new(),
                limit_ms: 1,
            }),
            NodeRequest::Release { job },
            NodeRequest::Stop {
                job,
                reason: String::new(),
                interrupt: false,
            },
            NodeRequest::Signal {
                job,
                signal: WorkerSignal::User1,
                seq: 1,
            },
        ];
        for role in [Role::Driver, Role::Head, Role::Node] {
            assert_eq!(may(role, &NodeRequest::Echo), Ok(()));
        }
        assert!(may(Role::Worker, &NodeRequest::Echo).is_err());
        for (role, allowed, forbidden) in [
            (Role::Driver, &of_drivers[..], &of_the_head[..]),
            (Role::Head, &of_the_head[..], &of_drivers[..]),
            (Role::Node, &[][..], &of_drivers[..]),
            (Role::Node, &[][..], &of_the_head[..]),
            (Role::Worker, &[][..], &of_the_head[..]),
        ] {
            for request in allowed {
                assert_eq!(may(role, request), Ok(()));
            }
            for request in forbidden {
                let refusal = may(role, request).unwrap_err();
                assert_eq!(refusal.kind, RefusalKind::Forbidden);
                assert!(refusal.message.contains("the caller is a"), "{refusal}");
            }
        }
    }
}
