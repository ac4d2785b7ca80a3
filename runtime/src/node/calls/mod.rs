//! Calls between drivers and workers. Runs on the transport runtime and not through mailboxes: a call
//! costs two wake-ups here, one each way, and those that come together share them.
//!
//! ```text
//! driver --- channel (one QUIC stream) ---> Job ---> Link (call socket) ---> worker
//!        <-- Channel (results, losses) <----------- Incoming <-------------
//! ```
//!
//! Calls of one channel reach each rank in the order in which they came (C-2), and at most once (C-1):
//! nothing is ever sent again. A worker that does not read holds up the channels that call it once its
//! queue is full; a driver that does not read holds up the workers that answer it.

mod channel;
mod link;
mod queue;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use bytes::{Bytes, BytesMut};
use dashmap::DashMap;
use kolo_actors::node::{CallPlane, CallsEnd, ControlSender};
use kolo_core::node::messages::{Loss as LostRank, WorkerId};
use kolo_core::node::orphans::Present as PresentJob;
use kolo_transport::ids::{CallId, DriverId, Generation, JobId, Rank, Slot};
use kolo_transport::wire::{
    CallFailure, CallFrame, CallOp, CallReply, FailureKind, GenerationTable, NodeReply, Outcome,
    RankFailure, Refusal, RefusalKind, StartWorkers, WorkerCall,
};
use kolo_transport::{CloseCode, Connection, Frame, FrameError, FrameReceiver, Stream, frame};
use tokio::runtime::Handle;
use tokio::sync::watch;

use self::channel::Channel;
use self::link::{Link, Sent};

/// All jobs whose workers can be called here.
#[derive(Debug)]
pub(crate) struct Calls {
    runtime: Handle,
    jobs: DashMap<JobId, Arc<Job>>,
    /// Counts the changes of [`Calls::present_jobs`].
    changes: watch::Sender<u64>,
}

/// What an admitted [`NodeRequest::Attach`](kolo_transport::wire::NodeRequest::Attach) says, and who said it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attach {
    pub(crate) driver: DriverId,
    pub(crate) job: JobId,
    pub(crate) generation: Generation,
}

/// As long as it lives, the driver of a job counts as being there.
#[derive(Debug)]
pub(crate) struct Present<'a> {
    calls: &'a Calls,
    job: Arc<Job>,
}

impl Drop for Present<'_> {
    fn drop(&mut self) {
        self.job.present.fetch_sub(1, Ordering::AcqRel);
        self.calls.changed();
    }
}

impl Calls {
    /// Calls that are carried on `runtime`.
    pub(crate) fn new(runtime: Handle) -> Arc<Self> {
        Arc::new(Self {
            runtime,
            jobs: DashMap::new(),
            changes: watch::Sender::new(0),
        })
    }

    fn changed(&self) {
        self.changes
            .send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Changes whenever [`Calls::present_jobs`] does.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// The jobs with workers here.
    pub(crate) fn present_jobs(&self) -> Vec<PresentJob> {
        let jobs = self.jobs.iter();
        jobs.map(|entry| PresentJob {
            job: *entry.key(),
            driver: entry.present.load(Ordering::Acquire) > 0,
            elastic: entry.elastic,
        })
        .collect()
    }

    /// The driver of the job is there; `None` if it is another one's job, or not here.
    pub(crate) fn present(&self, job: JobId, driver: DriverId) -> Option<Present<'_>> {
        let job = self.job(job).filter(|job| job.owner == driver)?;
        job.present.fetch_add(1, Ordering::AcqRel);
        self.changed();
        Some(Present { calls: self, job })
    }

    fn job(&self, job: JobId) -> Option<Arc<Job>> {
        self.jobs.get(&job).map(|entry| entry.value().clone())
    }

    /// Turns a stream of `connection` into a channel of calls, and serves it until it ends. A refusal is sent on the
    /// stream.
    pub(crate) async fn attach(
        &self,
        mut stream: Stream,
        connection: &Connection,
        attach: Attach,
    ) -> Result<(), FrameError> {
        let Attach {
            driver,
            job,
            generation,
        } = attach;
        let admitted = self
            .job(job)
            .ok_or_else(|| {
                Refusal::new(
                    RefusalKind::NotFound,
                    format!("{job} has no workers on this node"),
                )
            })
            .and_then(|job| job.admit(driver, generation).map(|ranks| (job, ranks)));
        let (job, ranks) = match admitted {
            Ok(admitted) => admitted,
            Err(refusal) => {
                stream.send.send(&NodeReply::Refused(refusal), &[]).await?;
                stream.send.finish();
                return Ok(());
            }
        };
        let present = self.present(job.id, driver);
        stream
            .send
            .send(&NodeReply::Attached { ranks }, &[])
            .await?;
        let channel = Channel::new(stream.send);
        if job.add(&channel) {
            channel.flush();
            let mut router = Router {
                job: &job,
                channel: &channel,
                connection,
                touched: Vec::new(),
                head: BytesMut::new(),
            };
            router.run(&mut stream.recv).await;
            job.remove(&channel);
        }
        drop(present);
        stream.recv.stop(CloseCode::Done);
        channel.finish().await;
        Ok(())
    }
}

impl CallPlane for Calls {
    fn open(&self, start: &StartWorkers) {
        let job = Job {
            id: start.job,
            owner: start.owner,
            elastic: start.elastic,
            present: AtomicUsize::new(0),
            table: RwLock::new(Table {
                generation: start.generation,
                ..Table::default()
            }),
        };
        // Programs that are not kolo's take no calls. Their job is known here all the same: whether its driver is there decides
        // whether it is an orphan.
        let slots = start.slots.iter().filter(|_| start.installed.is_none());
        for slot in slots {
            job.table_mut().places.insert(
                slot.member.rank,
                Place {
                    slot: slot.member.slot,
                    link: None,
                },
            );
        }
        self.jobs.insert(start.job, Arc::new(job));
        self.changed();
    }

    fn connect(
        &self,
        worker: WorkerId,
        socket: StdUnixStream,
        control: ControlSender,
    ) -> std::io::Result<CallsEnd> {
        let (job, slot) = (worker.stay.job, worker.slot);
        let job = self
            .job(job)
            .ok_or_else(|| std::io::Error::other(format!("{job} takes no calls here")))?;
        let (link, incoming) = {
            let _entered = self.runtime.enter();
            Link::new(slot, socket, control)?
        };
        let rank = Arc::new(AtomicU32::new(0));
        job.put(&link, &rank);
        self.runtime.spawn(link.clone().serve());
        let task = self.runtime.spawn(async move {
            let result = incoming.run(|| Rank(rank.load(Ordering::Relaxed))).await;
            link.close();
            result
        });
        Ok(Box::pin(async move {
            task.await
                .unwrap_or_else(|error| Err(format!("its results could not be read: {error}")))
        }))
    }

    fn complete(&self, table: &GenerationTable) {
        if let Some(job) = self.job(table.job) {
            job.complete(table);
        }
    }

    fn lost(&self, lost: &LostRank) {
        let LostRank {
            job,
            generation,
            failure,
            stopping,
        } = lost;
        tracing::info!(%job, %generation, stopping, %failure, "a rank is gone");
        let Some(job) = self.job(*job) else { return };
        let loss = Loss {
            failure: failure.clone(),
            stopping: *stopping,
        };
        for channel in job.lose(*generation, loss) {
            let _entered = self.runtime.enter();
            channel.flush();
        }
    }

    fn close(&self, job: JobId) {
        let Some((_, job)) = self.jobs.remove(&job) else {
            return;
        };
        self.changed();
        for channel in job.close() {
            self.runtime.spawn(async move { channel.finish().await });
        }
    }
}

/// A rank of this node.
#[derive(Debug)]
struct Place {
    slot: Slot,
    /// The worker; `None` before its process runs.
    link: Option<(Arc<Link>, Arc<AtomicU32>)>,
}

/// A rank that is gone.
#[derive(Debug)]
struct Loss {
    failure: RankFailure,
    /// Whether it ended because the job is being stopped.
    stopping: bool,
}

#[derive(Debug, Default)]
struct Table {
    generation: Generation,
    places: BTreeMap<Rank, Place>,
    /// Ranks of the generation that are gone, on any node.
    losses: BTreeMap<Rank, Loss>,
    channels: Vec<Arc<Channel>>,
    closed: bool,
}

/// A job's workers on this node, and the channels to them.
#[derive(Debug)]
struct Job {
    id: JobId,
    owner: DriverId,
    elastic: bool,
    /// Streams of the driver: channels of calls, and logs that it follows.
    present: AtomicUsize,
    table: RwLock<Table>,
}

impl Job {
    fn table(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn table_mut(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The ranks that a driver may call here.
    fn admit(&self, driver: DriverId, generation: Generation) -> Result<Vec<Rank>, Refusal> {
        if driver != self.owner {
            return Err(Refusal::new(
                RefusalKind::Forbidden,
                format!(
                    "{} belongs to another driver; only the one that submitted it may call its workers",
                    self.id
                ),
            ));
        }
        let table = self.table();
        if generation != table.generation {
            return Err(Refusal::new(
                RefusalKind::Stale,
                format!(
                    "generation {generation} of {} is not the current one, {}",
                    self.id, table.generation
                ),
            ));
        }
        Ok(table.places.keys().copied().collect())
    }

    /// Whether the job takes one more channel. It learns of all losses so far.
    fn add(&self, channel: &Arc<Channel>) -> bool {
        let mut table = self.table_mut();
        if table.closed {
            return false;
        }
        for loss in table.losses.values() {
            push_loss(channel, table.generation, loss);
        }
        table.channels.push(channel.clone());
        true
    }

    fn remove(&self, channel: &Arc<Channel>) {
        let mut table = self.table_mut();
        table.channels.retain(|other| !Arc::ptr_eq(other, channel));
        // Nobody waits for what it called.
        for (link, _) in table
            .places
            .values()
            .filter_map(|place| place.link.as_ref())
        {
            link.cancel_all(channel);
        }
    }

    fn put(&self, link: &Arc<Link>, number: &Arc<AtomicU32>) {
        let mut table = self.table_mut();
        for (rank, place) in &mut table.places {
            if place.slot == link.slot() {
                number.store(rank.0, Ordering::Relaxed);
                place.link = Some((link.clone(), number.clone()));
            }
        }
    }

    fn complete(&self, new: &GenerationTable) {
        let mut table = self.table_mut();
        if new.generation > table.generation {
            table.generation = new.generation;
            table.losses.clear();
        }
        let mut by_slot: BTreeMap<Slot, Place> = std::mem::take(&mut table.places)
            .into_values()
            .map(|place| (place.slot, place))
            .collect();
        for member in &new.members {
            if let Some(place) = by_slot.remove(&member.slot) {
                if let Some((_, number)) = &place.link {
                    number.store(member.rank.0, Ordering::Relaxed);
                }
                table.places.insert(member.rank, place);
            }
        }
    }

    /// Notes a loss, and gives the channels that must learn of it.
    fn lose(&self, generation: Generation, loss: Loss) -> Vec<Arc<Channel>> {
        let mut table = self.table_mut();
        if generation != table.generation {
            return Vec::new();
        }
        if let Some((link, _)) = table
            .places
            .get(&loss.failure.rank)
            .and_then(|place| place.link.as_ref())
        {
            link.close();
        }
        for channel in &table.channels {
            push_loss(channel, generation, &loss);
        }
        table.losses.insert(loss.failure.rank, loss);
        table.channels.clone()
    }

    /// Ends all channels and links; gives the channels, to be finished.
    fn close(&self) -> Vec<Arc<Channel>> {
        let mut table = self.table_mut();
        table.closed = true;
        for (link, _) in table
            .places
            .values()
            .filter_map(|place| place.link.as_ref())
        {
            link.close();
        }
        std::mem::take(&mut table.channels)
    }
}

fn push_loss(channel: &Channel, generation: Generation, loss: &Loss) {
    let reply = CallReply::Lost {
        generation,
        failure: loss.failure.clone(),
        stopping: loss.stopping,
    };
    channel.push(&reply, &Bytes::new());
}

/// Takes calls from a driver's stream to the workers.
struct Router<'a> {
    job: &'a Job,
    channel: &'a Arc<Channel>,
    /// What the channel is a stream of.
    connection: &'a Connection,
    /// Workers with calls that are not on their sockets yet.
    touched: Vec<Arc<Link>>,
    head: BytesMut,
}

impl Router<'_> {
    /// Until the driver or the job ends the channel.
    async fn run(&mut self, stream: &mut FrameReceiver) {
        let mut over = self.channel.over();
        loop {
            let frame = tokio::select! {
                biased;
                frame = stream.next::<CallFrame>() => frame,
                _ = over.wait_for(|over| *over) => return,
            };
            match frame {
                Ok(Some(frame)) => self.route(frame),
                Ok(None) => return,
                Err(error) => {
                    tracing::debug!(job = %self.job.id, %error, "a channel of calls failed");
                    return;
                }
            }
            // What came with one read goes out with one write per worker.
            if !stream.is_ready() && !self.flush().await {
                return;
            }
        }
    }

    fn route(&mut self, frame: Frame<CallFrame>) {
        match frame.head {
            CallFrame::Call {
                call,
                generation,
                ranks,
                deadline_ms,
                op,
            } => self.call(call, generation, &ranks, deadline_ms, op, &frame.body),
            CallFrame::Cancel { call, ranks } => {
                let table = self.job.table();
                for (rank, place) in &table.places {
                    if let Some((link, _)) = &place.link
                        && (ranks.is_empty() || ranks.contains(rank))
                    {
                        link.cancel(call, self.channel);
                    }
                }
            }
        }
    }

    fn call(
        &mut self,
        call: CallId,
        generation: Generation,
        ranks: &[Rank],
        deadline_ms: Option<u64>,
        op: CallOp,
        body: &Bytes,
    ) {
        let table = self.job.table();
        if generation != table.generation {
            let message = format!(
                "the call is for generation {generation}, the current one is {}",
                table.generation
            );
            for rank in ranks {
                self.fail(call, *rank, FailureKind::Stale, message.clone());
            }
            return;
        }
        // The same for every rank.
        self.head.clear();
        let request = WorkerCall {
            call,
            generation,
            deadline_ms,
            op,
        };
        if let Err(error) = frame::encode_head(&mut self.head, &request, body.len()) {
            for rank in ranks {
                self.fail(call, *rank, FailureKind::Arguments, error.to_string());
            }
            return;
        }
        // Once on each rank, also if it is named twice (C-1).
        let ranks = distinct(ranks);
        for rank in &*ranks {
            if let Some(loss) = table.losses.get(rank) {
                push_loss(self.channel, generation, loss);
                continue;
            }
            let link = table
                .places
                .get(rank)
                .and_then(|place| place.link.as_ref())
                .map(|(link, _)| link);
            let sent = link.map(|link| link.send(call, self.channel, &self.head, body));
            match (link, sent) {
                (Some(link), Some(Sent::Queued)) => {
                    if !self.touched.iter().any(|other| Arc::ptr_eq(other, link)) {
                        self.touched.push(link.clone());
                    }
                }
                // Its socket is closed, so its loss follows.
                (_, Some(Sent::Closed)) => {}
                _ => self.fail(
                    call,
                    *rank,
                    FailureKind::NoSuchRank,
                    format!("rank {rank} of {} is not on this node", self.job.id),
                ),
            }
        }
    }

    fn fail(&self, call: CallId, rank: Rank, kind: FailureKind, message: String) {
        let reply = CallReply::Result {
            call,
            rank,
            outcome: Outcome::Failed(CallFailure::new(kind, message)),
        };
        self.channel.push(&reply, &Bytes::new());
    }

    /// Puts calls on the workers' sockets and answers on the stream; waits while a queue is full, that of answers
    /// included: nobody who sends calls and reads no answers makes it grow. `false` if the channel is over.
    async fn flush(&mut self) -> bool {
        for link in &self.touched {
            link.flush();
        }
        self.channel.flush();
        for link in self.touched.drain(..) {
            if link.has_room() {
                continue;
            }
            let mut over = self.channel.over();
            tokio::select! {
                biased;
                () = link.room() => {}
                _ = over.wait_for(|over| *over) => return false,
                // While it waits nobody reads the stream, and would notice that the driver is gone.
                _ = self.connection.closed() => return false,
            }
        }
        self.channel.room().await;
        !self.channel.is_over()
    }
}

/// The ranks, each once. Drivers name them in order, so that there is nothing to do most of the time.
fn distinct(ranks: &[Rank]) -> Cow<'_, [Rank]> {
    if ranks.is_sorted_by(|one, next| one < next) {
        return Cow::Borrowed(ranks);
    }
    let mut ranks = ranks.to_vec();
    ranks.sort_unstable();
    ranks.dedup();
    Cow::Owned(ranks)
}
