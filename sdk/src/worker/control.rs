//! What a worker says and hears while user code runs: on a thread of its own, over the control socket.

use std::net::{Shutdown, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use kolo_collectives::{CollectiveError, Communicator, GroupId, Layout, LinkHello};
use kolo_transport::frame::{FrameError, InvalidFrame};
use kolo_transport::ids::{Generation, JobId, Rank, Slot};
use kolo_transport::local::ControlSocket;
use kolo_transport::wire::worker::LOCAL_PROTOCOL;
use kolo_transport::wire::{FromWorker, GenerationTable, Handover, Member, RankFailure, ToWorker};
use kolo_transport::{CertificateRequest, TransportRuntime};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::watch;

use super::failure::{ControlError, STEP};
use super::links::{LinkConnector, Links};
use super::listener::Listener;
use super::plane::Plane;
use super::renewals::Renewals;
use crate::context::{Context, Session};

/// How long the end waits for the data plane's peers.
const CLOSE: Duration = Duration::from_millis(100);

/// How long a collective operation waits before a line on standard error, and so on the driver's screen, says for whom.
const STALL: Duration = Duration::from_secs(10);

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
    pub(crate) session: Arc<Session>,
    /// Says once that the worker can take calls.
    pub(crate) ready: mpsc::Receiver<()>,
    /// Why the conversation ended.
    pub(crate) verdict: mpsc::Receiver<Verdict>,
    listener: Arc<Listener>,
}

impl Control {
    /// Ends the data plane.
    pub(crate) fn close(&self, runtime: &TransportRuntime) {
        runtime.handle().block_on(self.listener.close(CLOSE));
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
    let (node, told) = unbounded_channel();
    let session = Session::new(node);
    let listener = Arc::<Listener>::default();
    let (ready_sender, ready) = mpsc::sync_channel(1);
    let (verdict_sender, verdict) = mpsc::sync_channel(1);
    let mut conversation = Conversation {
        runtime: runtime.clone(),
        calls,
        session: Arc::clone(&session),
        ready: Some(ready_sender),
        verdict: verdict_sender.clone(),
        me: None,
        epoch: None,
        listener: Arc::clone(&listener),
        request: None,
        renewals: Arc::default(),
    };
    runtime.handle().spawn(async move {
        let error = match conversation.run(socket, registry, told).await {
            Ok(never) => match never {},
            Err(error) => error,
        };
        lost(&error);
        // `lost` returns in tests only. A receiver that is gone does not wait.
        drop(verdict_sender.try_send(Verdict::Failed(error)));
    });
    Control {
        session,
        ready,
        verdict,
        listener,
    }
}

/// What stays the same of this worker, from the node's welcome.
struct Me {
    job: JobId,
    slot: Slot,
}

/// One generation that this worker is in. It is made when the generation is heard of, and dropped with it.
struct Epoch {
    context: Context,
    comm: Communicator,
    links: Arc<Links>,
    table: watch::Sender<Option<Arc<GenerationTable>>>,
}

struct Conversation {
    runtime: TransportRuntime,
    calls: UnixStream,
    session: Arc<Session>,
    ready: Option<mpsc::SyncSender<()>>,
    verdict: mpsc::SyncSender<Verdict>,
    me: Option<Me>,
    epoch: Option<Epoch>,
    listener: Arc<Listener>,
    /// The request whose certificate is awaited.
    request: Option<CertificateRequest>,
    renewals: Arc<Renewals>,
}

enum Never {}

impl Conversation {
    async fn run(
        &mut self,
        socket: OwnedFd,
        registry: u64,
        told: UnboundedReceiver<FromWorker>,
    ) -> Result<Never, ControlError> {
        let control = Arc::new(ControlSocket::from_fd(socket).map_err(ControlError::Socket)?);
        let hello = FromWorker::Hello {
            protocol: LOCAL_PROTOCOL,
            pid: std::process::id(),
            registry,
        };
        control.send(&hello, &[]).await?;
        tokio::spawn(pass_on(told, Arc::clone(&control)));
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
        let (me, message) = match (&self.me, message) {
            (
                None,
                ToWorker::Welcome {
                    job,
                    generation,
                    member,
                    world_size,
                    needs_data_plane,
                    next_within_ms,
                    ..
                },
            ) => {
                if let Some(limit) = next_within_ms {
                    self.session.set_elastic(Duration::from_millis(limit));
                }
                let slot = member.slot;
                if generation > Generation::default() {
                    let epoch = self.make(control, (job, generation), member, world_size)?;
                    self.enter(epoch);
                }
                self.me = Some(Me { job, slot });
                return if needs_data_plane {
                    self.ask_to_sign(control).await
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
                self.listener.open(plane, STEP);
                return self.is_ready(control, Some(address)).await;
            }
            ToWorker::Membership(table) => {
                let generation = table.generation;
                if table.job != me.job || generation < self.session.newest() {
                    tracing::debug!(%generation, "a table of members is not for this worker, or late");
                    return Ok(());
                }
                let slot = me.slot;
                match self.take(control, slot, table) {
                    Ok(()) => control.send(&FromWorker::Taken { generation }, &[]).await?,
                    Err(error) => {
                        tracing::warn!(%error, "a table of members is not for this worker");
                    }
                }
            }
            ToWorker::Revoke {
                generation,
                cause,
                lost,
            } => {
                if let Some(epoch) = self.epoch_of(generation) {
                    for rank in lost {
                        epoch.lose(rank, cause.clone());
                    }
                    epoch.context.revoke(&cause);
                }
            }
            ToWorker::Hold { generation, why } => {
                if let Some(epoch) = self.epoch_of(generation) {
                    tracing::info!(%generation, why, "elastic loops hold at their next commit");
                    epoch.context.interrupt().raise();
                }
            }
            ToWorker::RankLost {
                generation,
                failure,
            } => {
                if let Some(epoch) = self.epoch_of(generation) {
                    epoch.lose(failure.rank, told(&failure));
                }
            }
            ToWorker::Peer { rank, generation } => {
                // Without an epoch it is closed: the peer sees that, and nobody here waits for it.
                if let Some(epoch) = self.epoch_of(generation) {
                    let Some(socket) = fds.pop() else {
                        tracing::warn!(%rank, "a socket to a rank came without itself");
                        return Ok(());
                    };
                    epoch.links.socket(rank, socket, &epoch.comm.acceptor());
                }
            }
            ToWorker::LinkRequested {
                rank,
                generation,
                group,
            } => {
                if let Some(epoch) = self.epoch_of(generation)
                    && let Err(error) = epoch.comm.acceptor().requested(GroupId(group), rank)
                {
                    tracing::debug!(%rank, group, %error, "a link that a rank asks for is not made");
                }
            }
            ToWorker::Cancel { call } => self.session.cancel(call),
            // Handled above.
            ToWorker::Stop { reason } => self.stop(&reason),
        }
        Ok(())
    }

    /// The epoch that a message is for (G-1). One of an older generation is late. There is none of a later one that would have to be
    /// kept: the node tells all its workers of a generation before anything else of it, and its messages come in order.
    fn epoch_of(&self, generation: Generation) -> Option<&Epoch> {
        let present = self.session.newest();
        if generation != present {
            tracing::debug!(%generation, %present, "a message of another generation is refused");
            return None;
        }
        self.epoch.as_ref()
    }

    /// Takes a generation that is complete: a new one, or the one that is present.
    fn take(
        &mut self,
        control: &Arc<ControlSocket>,
        slot: Slot,
        table: Arc<GenerationTable>,
    ) -> Result<(), CollectiveError> {
        let generation = table.generation;
        if generation == self.session.newest() {
            return (self.epoch.as_ref()).map_or(Ok(()), |epoch| epoch.know(table));
        }
        let own = table.members.iter().find(|member| member.slot == slot);
        if let Some(member) = own.cloned() {
            let place = (table.job, generation);
            let epoch = self.make(control, place, member, table.world_size())?;
            epoch.know(table)?;
            self.enter(epoch);
        } else {
            self.listener.pause();
            self.session.leave(generation);
            self.epoch = None;
        }
        Ok(())
    }

    fn make(
        &self,
        control: &Arc<ControlSocket>,
        (job, generation): (JobId, Generation),
        member: Member,
        world_size: u32,
    ) -> Result<Epoch, CollectiveError> {
        let own = LinkHello::new(job, generation, member.rank).of_world(world_size);
        let (table, known) = watch::channel(None);
        let ways = (Arc::clone(control), Arc::clone(self.listener.plane()));
        let links = Arc::new(Links::new(own, ways, known, STEP));
        let connector = Arc::new(LinkConnector(Arc::clone(&links)));
        let handle = self.runtime.handle().clone();
        let comm = Communicator::new(member.rank, world_size, generation, job, connector, handle)?;
        comm.set_stall_after(STALL);
        let context = Context::new(member, comm.clone(), job, Some(&self.session));
        Ok(Epoch {
            context,
            comm,
            links,
            table,
        })
    }

    fn enter(&mut self, epoch: Epoch) {
        self.listener.serve(&epoch.links, epoch.comm.acceptor());
        self.session.enter(epoch.context.clone());
        self.epoch = Some(epoch);
    }

    async fn ask_to_sign(&mut self, control: &ControlSocket) -> Result<(), ControlError> {
        let request = CertificateRequest::generate()?;
        let csr = request.der().to_vec();
        self.request = Some(request);
        Ok(control.send(&FromWorker::Sign { csr }, &[]).await?)
    }

    async fn is_ready(
        &mut self,
        control: &Arc<ControlSocket>,
        address: Option<SocketAddr>,
    ) -> Result<(), ControlError> {
        // The main thread first: calls come as soon as the node knows.
        if let Some(ready) = self.ready.take()
            && ready.try_send(()).is_err()
        {
            tracing::debug!("the main thread does not wait for calls any more");
        }
        Ok(control.send(&FromWorker::Ready { address }, &[]).await?)
    }

    fn stop(&self, reason: &str) {
        tracing::info!(reason, "the worker is asked to stop");
        // Others have stopped, or will: what waits for them would wait until this process is killed.
        self.session.stop(reason);
        // The main thread may wait for a call, or for this worker to be ready.
        if let Err(error) = self.calls.shutdown(Shutdown::Read) {
            tracing::debug!(%error, "the call socket is closed already");
        }
        // Full if this is not the first notice.
        drop(self.verdict.try_send(Verdict::Stop));
    }
}

impl Epoch {
    /// The members are known, perhaps not for the first time: a node that hears nothing tells them again.
    fn know(&self, table: Arc<GenerationTable>) -> Result<(), CollectiveError> {
        let nodes: Vec<_> = table.members.iter().map(|member| member.node).collect();
        self.comm.set_table(Arc::clone(&table))?;
        self.comm.set_layout(Layout::of_hosts(&nodes))?;
        if table.handover == Handover::Restore && self.table.borrow().is_none() {
            self.context.must_restore();
        }
        self.context.members_known(&table.cause);
        self.table.send_replace(Some(table));
        Ok(())
    }

    /// A rank is lost. What is said of this one is for others.
    fn lose(&self, rank: Rank, reason: String) {
        if rank != self.comm.rank() {
            self.comm.rank_lost(rank, reason);
        }
    }
}

/// Tells the node what other threads have to say, in order.
async fn pass_on(mut told: UnboundedReceiver<FromWorker>, control: Arc<ControlSocket>) {
    while let Some(message) = told.recv().await {
        if let Err(error) = control.send(&message, &[]).await {
            // The conversation ends, too.
            tracing::debug!(%error, "the node is not told any more");
            return;
        }
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
