//! The calls of one executor: the table, the channels to its nodes and what wakes whom.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use kolo_transport::frame::{self, FrameError, InvalidFrame, Limits};
use kolo_transport::ids::{CallId, Generation, NodeId, ObjectId, Rank};
use kolo_transport::runtime::Sends;
use kolo_transport::session::FrameReceiver;
use kolo_transport::wire::{CallFrame, CallOp, CallReply, Exit, RankFailure};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};

use super::entry::{Completion, Effects, Waiters};
use super::failure::CallError;
use super::outbox::{Outbox, Permit, Sink};
use super::table::{CallTable, End};
use crate::codec::CodecError;

/// Longest arguments and results, in bytes.
pub(crate) const MAX_BODY: usize = Limits::CALLS.body as usize;

/// Bodies up to this length are copied behind their head; longer ones are sent as they are.
const COPY_BELOW: usize = 16 * 1024;

/// Results that wake their callers together, at most.
const MOST_TOGETHER: usize = 64;

/// What a waiting future gets: one body for each of its ranks.
pub(crate) type Bodies = Result<Vec<Bytes>, CallError>;

/// Wakes a future, and counts as in flight until then.
pub(crate) struct Waiter {
    sender: oneshot::Sender<Bodies>,
    permit: Permit,
}

/// A node of the group.
#[derive(Debug, Clone)]
pub(crate) struct GroupNode {
    pub(crate) node: NodeId,
    pub(crate) hostname: String,
    pub(crate) ranks: Vec<Rank>,
}

/// What is to be run.
#[derive(Debug)]
pub(crate) struct Request {
    /// For error messages.
    pub(crate) name: String,
    pub(crate) op: CallOp,
    pub(crate) body: Bytes,
    pub(crate) deadline: Option<Duration>,
}

/// Calls to a group. Shared by its executor, handles, futures and the tasks of its channels.
pub(crate) struct Group {
    generation: Generation,
    nodes: Vec<GroupNode>,
    /// The index of each rank's node.
    routes: Vec<usize>,
    limit: usize,
    permits: Arc<Semaphore>,
    objects: AtomicU64,
    state: Mutex<State>,
    /// Wakes the timer when there is something earlier to wait for.
    timer: Notify,
}

struct State {
    table: CallTable<Waiter>,
    outboxes: Vec<Outbox>,
    /// When the timer wakes up by itself.
    armed: Option<Instant>,
}

impl Group {
    /// A group of this generation, with one stream per node in `sinks`. Every rank is on exactly one node.
    pub(crate) fn new(
        generation: Generation,
        nodes: Vec<GroupNode>,
        sinks: Vec<impl Sink>,
        limit: usize,
    ) -> Self {
        let world_size = nodes.iter().map(|node| node.ranks.len()).sum();
        let mut routes = vec![0; world_size];
        let mut hostnames = vec![String::new(); world_size];
        for (index, node) in nodes.iter().enumerate() {
            for rank in &node.ranks {
                if let Some(route) = routes.get_mut(rank.index()) {
                    *route = index;
                    hostnames[rank.index()].clone_from(&node.hostname);
                }
            }
        }
        Self {
            generation,
            nodes,
            routes,
            limit,
            permits: Arc::new(Semaphore::new(limit)),
            objects: AtomicU64::new(0),
            state: Mutex::new(State {
                table: CallTable::new(hostnames),
                outboxes: sinks.into_iter().map(Outbox::new).collect(),
                armed: None,
            }),
            timer: Notify::new(),
        }
    }

    pub(crate) fn world_size(&self) -> usize {
        self.routes.len()
    }

    pub(crate) fn new_object(&self) -> ObjectId {
        ObjectId(self.objects.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Room for one more call, if there is some now.
    pub(crate) fn try_permit(&self, name: &str) -> Result<Permit, CallError> {
        Arc::clone(&self.permits)
            .try_acquire_owned()
            .map(Arc::new)
            .map_err(|_| CallError::Busy {
                call: name.to_owned(),
                limit: self.limit,
            })
    }

    /// Waits for room for one more call. First come, first served.
    pub(crate) fn permit(
        &self,
    ) -> impl Future<Output = Option<OwnedSemaphorePermit>> + Send + use<> {
        let acquire = Arc::clone(&self.permits).acquire_owned();
        async move { acquire.await.ok() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in here leaves the state half changed by a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a call to some ranks, for one waiter or for one waiter per rank.
    ///
    /// All nodes get it under one lock, so that two calls come in the same order everywhere: else two
    /// collectives could wait for each other.
    pub(crate) fn send(
        &self,
        request: Request,
        ranks: Vec<Rank>,
        each: bool,
        permit: Permit,
    ) -> Result<(CallId, Vec<oneshot::Receiver<Bodies>>), CallError> {
        if request.body.len() > MAX_BODY {
            return Err(CallError::Arguments {
                call: request.name,
                reason: CodecError::TooLong {
                    type_name: "arguments",
                    limit: MAX_BODY,
                },
            });
        }
        let count = if each { ranks.len() } else { 1 };
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..count).map(|_| oneshot::channel()).unzip();
        let mut waiters = senders.into_iter().map(|sender| Waiter {
            sender,
            permit: Arc::clone(&permit),
        });
        let waiters = match (each, waiters.next()) {
            (false, Some(waiter)) => Waiters::Whole(waiter),
            (_, first) => Waiters::Each(first.into_iter().chain(waiters).collect()),
        };
        let deadline = request.deadline.and_then(|after| {
            // A deadline that the clock can't hold is none.
            Some((Instant::now().checked_add(after)?, after))
        });
        // Before the lock, so that it always ends after it: then results may be read, which takes the lock.
        let turn;
        let mut state = self.lock();
        let taken = state
            .table
            .register(request.name, ranks, deadline, waiters)?;
        // What comes alone goes out at once, what is one of many with the others. Who waits for the whole call is about to
        // yield. Who gets a future per rank may go on to other things.
        let sends = match (state.table.in_flight() <= 1, each) {
            (true, _) => Some(Sends::Now { awaited: !each }),
            (false, false) => Some(Sends::WithOthers),
            (false, true) => None,
        };
        let outbox = state.outboxes.first();
        turn = sends.and_then(|sends| outbox?.turn(sends));
        if !taken.send_to.is_empty() {
            let (op, body) = (request.op, &request.body);
            self.write(
                &mut state,
                taken.call,
                &taken.send_to,
                request.deadline,
                op,
                body,
                Some(&permit),
            );
        }
        let timer = deadline.is_some_and(|(at, _)| state.armed.is_none_or(|armed| at < armed));
        drop(state);
        drop(turn);
        if timer {
            self.timer.notify_one();
        }
        Self::complete(taken.completions);
        Ok((taken.call, receivers))
    }

    /// The calling task awaits a call that was sent some time ago.
    pub(crate) fn awaited(&self) {
        if let Some(outbox) = self.lock().outboxes.first() {
            outbox.awaited();
        }
    }

    /// Drops an executable everywhere. Nobody waits for it.
    pub(crate) fn drop_object(&self, object: ObjectId) {
        let mut state = self.lock();
        if state.table.end().is_some() {
            return;
        }
        let ranks = state.table.up((0..self.world_size() as u32).map(Rank));
        let call = state.table.next_id();
        self.write(
            &mut state,
            call,
            &ranks,
            None,
            CallOp::Drop { object },
            &Bytes::new(),
            None,
        );
    }

    #[allow(clippy::too_many_arguments)] // the fields of a frame
    fn write(
        &self,
        state: &mut State,
        call: CallId,
        ranks: &[Rank],
        deadline: Option<Duration>,
        op: CallOp,
        body: &Bytes,
        permit: Option<&Permit>,
    ) {
        let deadline_ms =
            deadline.map(|after| u64::try_from(after.as_millis()).unwrap_or(u64::MAX).max(1));
        let mut frame = CallFrame::Call {
            call,
            generation: self.generation,
            ranks: Vec::new(),
            deadline_ms,
            op,
        };
        for (index, here) in self.by_node(ranks) {
            if let CallFrame::Call { ranks, .. } = &mut frame {
                *ranks = here;
            }
            if let Some(chunks) = encode(&frame, body) {
                state.outboxes[index].push(chunks, permit);
            }
        }
    }

    fn cancel_on_nodes(&self, state: &mut State, cancels: Vec<(CallId, Vec<Rank>)>) {
        for (call, ranks) in cancels {
            for (index, ranks) in self.by_node(&ranks) {
                if let Some([chunk, _]) = encode(&CallFrame::Cancel { call, ranks }, &Bytes::new())
                {
                    state.outboxes[index].push_advice(chunk);
                }
            }
        }
    }

    /// The ranks by the index of their node.
    fn by_node(&self, ranks: &[Rank]) -> Vec<(usize, Vec<Rank>)> {
        let mut nodes: Vec<(usize, Vec<Rank>)> =
            Vec::with_capacity(self.nodes.len().min(ranks.len()));
        for &rank in ranks {
            let Some(&route) = self.routes.get(rank.index()) else {
                continue;
            };
            match nodes.iter_mut().rev().find(|(index, _)| *index == route) {
                Some((_, here)) => here.push(rank),
                None => nodes.push((route, vec![rank])),
            }
        }
        nodes
    }

    fn complete(completions: impl IntoIterator<Item = Completion<Waiter>>) {
        for Completion { waiter, result } in completions {
            // A waker is the caller's. One that panics must not end the task that reads the results of all.
            let told = catch_unwind(AssertUnwindSafe(|| {
                // The future may have gone a moment ago.
                drop(waiter.sender.send(result));
                drop(waiter.permit);
            }));
            if told.is_err() {
                tracing::error!("who waits for a call panicked when it was woken");
            }
        }
    }

    /// Applies an event to the table and does what follows from it.
    fn apply(&self, event: impl FnOnce(&mut CallTable<Waiter>) -> Effects<Waiter>) {
        Self::complete(self.apply_only(event));
    }

    /// As [`Group::apply`], and leaves it to the caller to wake who waits.
    fn apply_only(
        &self,
        event: impl FnOnce(&mut CallTable<Waiter>) -> Effects<Waiter>,
    ) -> Vec<Completion<Waiter>> {
        let mut state = self.lock();
        let effects = event(&mut state.table);
        self.cancel_on_nodes(&mut state, effects.cancels);
        effects.completions
    }

    /// As [`Group::apply`], for events that may have set a timer.
    fn apply_timed(&self, event: impl FnOnce(&mut CallTable<Waiter>) -> Effects<Waiter>) {
        self.apply(event);
        self.timer.notify_one();
    }

    /// A future is gone. `rank` is for one of several.
    pub(crate) fn cancel(&self, call: CallId, rank: Option<Rank>) {
        self.apply(|table| table.cancel(call, rank));
    }

    /// The head says that a rank is lost.
    pub(crate) fn reported_lost(&self, failure: RankFailure) {
        self.apply_timed(|table| table.reported_lost(Instant::now(), failure));
    }

    /// Whether no worker is known to be lost.
    pub(crate) fn is_whole(&self) -> bool {
        let all = (0..self.world_size() as u32).map(Rank);
        self.lock().table.up(all).len() == self.world_size()
    }

    /// No more calls are taken; those that are in flight go on.
    pub(crate) fn close(&self, reason: &str) {
        self.lock().table.close(reason);
    }

    /// The group has ended: so has every call.
    pub(crate) fn finish(&self, reason: &str, failure: Option<RankFailure>) {
        self.apply(|table| {
            table.finish(End {
                reason: reason.to_owned(),
                failure,
            })
        });
    }

    /// Takes a reply. Who waited for it goes to `done`, to be woken with others.
    fn reply(
        &self,
        index: usize,
        reply: CallReply,
        body: Bytes,
        done: &mut Vec<Completion<Waiter>>,
    ) {
        let now = Instant::now();
        match reply {
            CallReply::Result {
                call,
                rank,
                outcome,
            } => {
                let failed = !matches!(outcome, kolo_transport::wire::Outcome::Returned);
                if self.routes.get(rank.index()) != Some(&index) {
                    tracing::warn!(%call, %rank, "a node sent a result for a rank of another node");
                    return;
                }
                done.extend(self.apply_only(|table| table.result(now, call, rank, outcome, body)));
                if failed {
                    self.timer.notify_one();
                }
            }
            CallReply::Lost { generation, .. } if generation != self.generation => {
                tracing::debug!(%generation, "a loss in another generation");
            }
            CallReply::Lost {
                failure, stopping, ..
            } => {
                let own = self.routes.get(failure.rank.index()) == Some(&index);
                self.apply_timed(|table| {
                    if own {
                        table.lost(now, failure, stopping)
                    } else if stopping {
                        // Its own node will say so too.
                        Effects::default()
                    } else {
                        table.reported_lost(now, failure)
                    }
                });
            }
        }
    }

    /// Reads what a node sends until its channel ends.
    pub(crate) async fn read(self: Arc<Self>, index: usize, mut replies: FrameReceiver) {
        let mut done = Vec::new();
        let reason = loop {
            // Results that came together wake who waits for them together: it would else go to sleep between two of them.
            if !replies.is_ready() || done.len() >= MOST_TOGETHER {
                Self::complete(done.drain(..));
            }
            match replies.next::<CallReply>().await {
                Ok(Some(frame)) => self.reply(index, frame.head, frame.body, &mut done),
                Ok(None) => break "the node ended the channel".to_owned(),
                Err(error @ FrameError::Invalid(InvalidFrame::Malformed { .. })) => {
                    tracing::warn!(%error, "a node sent a reply that is not known here");
                }
                Err(error) => break error.to_string(),
            }
        };
        Self::complete(done);
        self.unreachable(index, &reason);
    }

    fn unreachable(&self, index: usize, reason: &str) {
        let node = &self.nodes[index];
        let failures = node.ranks.iter().map(|rank| RankFailure {
            rank: *rank,
            node: node.node,
            hostname: node.hostname.clone(),
            pid: 0,
            exit: Exit::Unknown,
            reason: Some(format!(
                "the driver's channel to {} is gone: {reason}",
                node.node
            )),
            stderr_tail: Vec::new(),
        });
        let failures = failures.collect();
        self.apply_timed(|table| table.unreachable(Instant::now(), failures));
    }

    /// Writes to a node what its stream had no room for, until the stream fails.
    pub(crate) async fn flush(self: Arc<Self>, index: usize) {
        let wake = self.lock().outboxes[index].wake();
        loop {
            wake.notified().await;
            let flushed = poll_fn(|cx| self.lock().outboxes[index].poll_flush(cx)).await;
            if let Err(error) = flushed {
                return self.unreachable(index, &error.to_string());
            }
        }
    }

    /// Ends calls whose deadlines pass. Never ends by itself.
    pub(crate) async fn keep_time(self: Arc<Self>) {
        loop {
            let next = {
                let mut state = self.lock();
                state.armed = state.table.next_wake();
                state.armed
            };
            let sleep = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = sleep => self.apply(|table| table.tick(Instant::now())),
                () = self.timer.notified() => {}
            }
        }
    }
}

/// A frame as head and body, or in one piece if it is short.
fn encode(head: &CallFrame, body: &Bytes) -> Option<[Bytes; 2]> {
    let mut out = BytesMut::with_capacity(
        128 + if body.len() < COPY_BELOW {
            body.len()
        } else {
            0
        },
    );
    if let Err(error) = frame::encode_head(&mut out, head, body.len()) {
        // Bodies are checked, and every wire message can be encoded.
        tracing::error!(%error, "a call could not be encoded");
        return None;
    }
    if body.len() < COPY_BELOW {
        out.extend_from_slice(body);
        return Some([out.freeze(), Bytes::new()]);
    }
    Some([out.freeze(), body.clone()])
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Group")
            .field("generation", &self.generation)
            .field("nodes", &self.nodes)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Waiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiter").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Wake};

    use super::*;

    #[test]
    fn a_waker_that_panics_keeps_no_result_from_others() {
        struct Panics;
        impl Wake for Panics {
            fn wake(self: Arc<Self>) {
                panic!("this panic is part of a test");
            }
        }
        let permits = Arc::new(Semaphore::new(1));
        let permit = Arc::new(Arc::clone(&permits).try_acquire_owned().unwrap());
        let (completions, answers): (Vec<_>, Vec<_>) = (0..2)
            .map(|_| {
                let (sender, answer) = oneshot::channel();
                let permit = Arc::clone(&permit);
                let waiter = Waiter { sender, permit };
                let result = Ok(Vec::new());
                (Completion { waiter, result }, answer)
            })
            .unzip();
        drop(permit);
        let mut answers = answers.into_iter();
        let mut first = pin!(answers.next().unwrap());
        let waker = Arc::new(Panics).into();
        let polled = first.as_mut().poll(&mut Context::from_waker(&waker));
        assert!(polled.is_pending());
        Group::complete(completions);
        assert!(first.try_recv().unwrap().is_ok());
        assert!(answers.next().unwrap().try_recv().unwrap().is_ok());
        assert_eq!(permits.available_permits(), 1);
    }
}
