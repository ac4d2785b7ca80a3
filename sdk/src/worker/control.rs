//! What a worker says and hears while user code runs: on a thread of its own, over the control socket.

use std::net::{Shutdown, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use kolo_collectives::{CollectiveError, Communicator, GroupId, Layout, LinkHello};
use kolo_transport::endpoint::BindError;
use kolo_transport::frame::{FrameError, InvalidFrame};
use kolo_transport::identity::IdentityError;
use kolo_transport::ids::{ClusterId, Generation, JobId};
use kolo_transport::local::ControlSocket;
use kolo_transport::wire::worker::LOCAL_PROTOCOL;
use kolo_transport::wire::{FromWorker, GenerationTable, Member, RankFailure, ToWorker};
use kolo_transport::{CertificateRequest, TransportRuntime};
use tokio::sync::watch;

use super::links::{LinkConnector, Links};
use super::plane::Plane;
use super::renewals::Renewals;
use crate::context::Context;

/// For every step of the introduction, and of making a link.
const STEP: Duration = Duration::from_secs(60);

/// How long the end waits for the data plane's peers.
const CLOSE: Duration = Duration::from_millis(100);

/// Why a worker can't work.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    #[error("the control socket can't be used: {0}")]
    Socket(std::io::Error),
    #[error("the control socket brought what is no message: {0}")]
    Frame(FrameError),
    #[error("the node closed the control socket")]
    NodeGone,
    #[error("the node sent no {what} within {} s", STEP.as_secs())]
    Late { what: &'static str },
    #[error("the node sent {what} at the wrong time")]
    OutOfTurn { what: &'static str },
    #[error(
        "the data plane is to listen on `{given}`, which is no list of addresses; KOLO_LISTEN and KOLO_NODE_IP are set by kolo's node daemon"
    )]
    NodeIp { given: String },
    #[error("no certificate for the data plane: {0}")]
    Certificate(IdentityError),
    #[error("the data plane can't listen: {0}")]
    Bind(BindError),
    #[error("the node's introduction makes no sense: {0}")]
    Group(CollectiveError),
}

impl From<IdentityError> for ControlError {
    fn from(error: IdentityError) -> Self {
        Self::Certificate(error)
    }
}

impl From<BindError> for ControlError {
    fn from(error: BindError) -> Self {
        Self::Bind(error)
    }
}

impl From<CollectiveError> for ControlError {
    fn from(error: CollectiveError) -> Self {
        Self::Group(error)
    }
}

impl From<FrameError> for ControlError {
    fn from(error: FrameError) -> Self {
        match error {
            // A daemon that is killed may do so in the middle of a message, in both directions.
            FrameError::Io(_) | FrameError::Truncated { .. } => Self::NodeGone,
            other => Self::Frame(other),
        }
    }
}

/// How the conversation with the node ended.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// The node asked the worker to stop.
    Stop,
    /// There is nobody to work for, or nobody to be understood by.
    Failed(ControlError),
}

/// What the main thread and the control thread share.
#[derive(Debug)]
pub(crate) struct Control {
    /// The worker was asked to stop.
    pub(crate) stopping: Arc<AtomicBool>,
    /// Gives the context once, when the worker is ready.
    pub(crate) ready: mpsc::Receiver<Ready>,
    /// Why the conversation ended.
    pub(crate) verdict: mpsc::Receiver<Verdict>,
}

/// A worker that can take calls.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) context: Context,
    links: Arc<Links>,
}

impl Ready {
    /// Ends the data plane.
    pub(crate) fn close(&self, runtime: &TransportRuntime) {
        runtime.handle().block_on(self.links.close(CLOSE));
    }
}

/// Starts the conversation on `runtime`. `calls` is shut down for reading when the node says stop, so that the
/// main thread sees it. `lost` is called when the node is gone or breaks the protocol: user code may run for ever, so
/// it must end the process.
pub(crate) fn start(
    runtime: &TransportRuntime,
    socket: OwnedFd,
    calls: UnixStream,
    registry: u64,
    lost: fn(&ControlError),
) -> Control {
    let stopping = Arc::new(AtomicBool::new(false));
    let (ready_sender, ready) = mpsc::sync_channel(1);
    let (verdict_sender, verdict) = mpsc::sync_channel(1);
    let mut conversation = Conversation {
        runtime: runtime.clone(),
        calls,
        stopping: Arc::clone(&stopping),
        ready: Some(ready_sender),
        verdict: verdict_sender.clone(),
        me: None,
        request: None,
        renewals: Arc::default(),
    };
    runtime.handle().spawn(async move {
        let error = match conversation.run(socket, registry).await {
            Ok(never) => match never {},
            Err(error) => error,
        };
        lost(&error);
        // `lost` returns in tests only. A receiver that is gone does not wait.
        drop(verdict_sender.try_send(Verdict::Failed(error)));
    });
    Control {
        stopping,
        ready,
        verdict,
    }
}

/// Who this worker is, from the node's welcome.
struct Me {
    context: Context,
    comm: Communicator,
    links: Arc<Links>,
    table: watch::Sender<Option<Arc<GenerationTable>>>,
}

struct Conversation {
    runtime: TransportRuntime,
    calls: UnixStream,
    stopping: Arc<AtomicBool>,
    ready: Option<mpsc::SyncSender<Ready>>,
    verdict: mpsc::SyncSender<Verdict>,
    me: Option<Me>,
    /// The request whose certificate is awaited.
    request: Option<CertificateRequest>,
    renewals: Arc<Renewals>,
}

enum Never {}

impl Conversation {
    async fn run(&mut self, socket: OwnedFd, registry: u64) -> Result<Never, ControlError> {
        let control = Arc::new(ControlSocket::from_fd(socket).map_err(ControlError::Socket)?);
        let hello = FromWorker::Hello {
            protocol: LOCAL_PROTOCOL,
            pid: std::process::id(),
            registry,
        };
        control.send(&hello, &[]).await?;
        loop {
            let received = if self.ready.is_some() {
                let what = if self.me.is_none() {
                    "welcome"
                } else {
                    "certificate"
                };
                tokio::time::timeout(STEP, control.recv())
                    .await
                    .map_err(|_| ControlError::Late { what })?
            } else {
                control.recv().await
            };
            let (message, fds) = match received {
                Ok(received) => received.ok_or(ControlError::NodeGone)?,
                // A message of a later version. It was for something that this one does not have.
                Err(error @ FrameError::Invalid(InvalidFrame::Malformed { .. }))
                    if self.me.is_some() =>
                {
                    tracing::warn!(%error, "a message of the node is not understood");
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            self.hear(&control, message, fds).await?;
        }
    }

    async fn hear(
        &mut self,
        control: &Arc<ControlSocket>,
        message: ToWorker,
        mut fds: Vec<OwnedFd>,
    ) -> Result<(), ControlError> {
        let me = match (&self.me, message) {
            (
                None,
                ToWorker::Welcome {
                    cluster,
                    job,
                    generation,
                    member,
                    world_size,
                    needs_data_plane,
                },
            ) => {
                self.welcome(control, (cluster, job, generation), member, world_size)?;
                return if needs_data_plane {
                    let request = CertificateRequest::generate()?;
                    let csr = request.der().to_vec();
                    self.request = Some(request);
                    Ok(control.send(&FromWorker::Sign { csr }, &[]).await?)
                } else {
                    self.is_ready(control, None).await
                };
            }
            // A notice may come before the welcome.
            (_, ToWorker::Stop { reason }) => {
                self.stop(&reason);
                return Ok(());
            }
            (None, _) => return Err(ControlError::OutOfTurn { what: "a message" }),
            (Some(me), message) => (me, message),
        };
        let (me, message) = me;
        match message {
            ToWorker::Welcome { .. } => {
                return Err(ControlError::OutOfTurn {
                    what: "a second welcome",
                });
            }
            ToWorker::Certificate {
                certificate,
                authority,
            } => {
                let Some(request) = self.request.take() else {
                    if self.ready.is_some() || !self.renewals.has_begun() {
                        return Err(ControlError::OutOfTurn {
                            what: "a certificate",
                        });
                    }
                    self.renewals.came(certificate);
                    return Ok(());
                };
                let credentials = request.finish(&certificate, &authority)?;
                let plane = Plane::open(&self.runtime, credentials)?;
                let address = plane.first().local_addr();
                self.renewals.start(plane.first(), control);
                me.links.listen(plane, &me.comm.acceptor());
                return self.is_ready(control, Some(address)).await;
            }
            ToWorker::Membership(table) => {
                let table = Arc::new(table);
                let nodes: Vec<_> = table.members.iter().map(|member| member.node).collect();
                let known = me
                    .comm
                    .set_table(Arc::clone(&table))
                    .and_then(|()| me.comm.set_layout(Layout::of_hosts(&nodes)));
                match known {
                    Ok(()) => {
                        me.table.send_replace(Some(table));
                        me.context.members_known();
                    }
                    // This worker is of one generation and ends with it.
                    Err(error) => {
                        tracing::warn!(%error, "a table of members is not for this worker");
                    }
                }
            }
            ToWorker::RankLost {
                generation,
                failure,
            } => {
                if generation == me.context.generation()
                    && failure.rank.index() != me.context.rank()
                {
                    me.comm.rank_lost(failure.rank, told(&failure));
                }
            }
            ToWorker::Peer { rank, generation } => match fds.pop() {
                Some(socket) if generation == me.context.generation() => {
                    me.links.socket(rank, socket, &me.comm.acceptor());
                }
                // Closed: the peer sees that, and nobody here waits for it.
                _ => {
                    tracing::warn!(%rank, %generation, "a socket to a rank came without itself or of another generation");
                }
            },
            ToWorker::LinkRequested {
                rank,
                generation,
                group,
            } => {
                if generation == me.context.generation()
                    && let Err(error) = me.comm.acceptor().requested(GroupId(group), rank)
                {
                    tracing::debug!(%rank, group, %error, "a link that a rank asks for is not made");
                }
            }
            ToWorker::Cancel { call } => me.context.running().cancel(call),
            // Handled above.
            ToWorker::Stop { reason } => self.stop(&reason),
        }
        Ok(())
    }

    fn welcome(
        &mut self,
        control: &Arc<ControlSocket>,
        (_, job, generation): (ClusterId, JobId, Generation),
        member: Member,
        world_size: u32,
    ) -> Result<(), ControlError> {
        let own = LinkHello::new(job, generation, member.rank).of_world(world_size);
        let (table, known) = watch::channel(None);
        let links = Arc::new(Links::new(own, Arc::clone(control), known, STEP));
        let connector = Arc::new(LinkConnector(Arc::clone(&links)));
        let handle = self.runtime.handle().clone();
        let comm = Communicator::new(member.rank, world_size, generation, job, connector, handle)?;
        let context = Context::new(member, comm.clone(), job);
        self.me = Some(Me {
            context,
            comm,
            links,
            table,
        });
        Ok(())
    }

    async fn is_ready(
        &mut self,
        control: &Arc<ControlSocket>,
        address: Option<SocketAddr>,
    ) -> Result<(), ControlError> {
        if let (Some(ready), Some(me)) = (self.ready.take(), &self.me) {
            // The main thread first: calls come as soon as the node knows.
            let told = ready.try_send(Ready {
                context: me.context.clone(),
                links: Arc::clone(&me.links),
            });
            if told.is_err() {
                tracing::debug!("the main thread does not wait for calls any more");
            }
        }
        Ok(control.send(&FromWorker::Ready { address }, &[]).await?)
    }

    fn stop(&self, reason: &str) {
        tracing::info!(reason, "the worker is asked to stop");
        self.stopping.store(true, Ordering::Release);
        if let Some(me) = &self.me {
            // Others have stopped, or will: what waits for them would wait until this process is killed.
            me.comm.revoke(&format!("the job ends: {reason}"));
            // Nor are members waited for that nobody tells any more.
            me.context.members_known();
        }
        // The main thread may wait for a call, or for this worker to be ready.
        if let Err(error) = self.calls.shutdown(Shutdown::Read) {
            tracing::debug!(%error, "the call socket is closed already");
        }
        // Full if this is not the first notice.
        drop(self.verdict.try_send(Verdict::Stop));
    }
}

/// What is known of a loss, for a message that names the rank already.
fn told(failure: &RankFailure) -> String {
    let mut text = format!(
        "its process on {} (pid {}) ended with {}",
        failure.hostname, failure.pid, failure.exit
    );
    if let Some(reason) = &failure.reason {
        text.push_str(": ");
        text.push_str(reason);
    }
    text
}
