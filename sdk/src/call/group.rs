//! The calls of one executor: the table, the channels to its nodes and what wakes whom.

mod channels;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use kolo_transport::frame;
use kolo_transport::ids::{CallId, Generation, NodeId, ObjectId, Rank, Slot};
use kolo_transport::runtime::Sends;
use kolo_transport::wire::{CallFrame, CallOp, GenerationTable, Outcome, RankFailure};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};

use super::entry::{Completion, Effects, Waiters};
use super::failure::CallError;
use super::outbox::{Outbox, Permit, Sink};
use super::request::{Bodies, Request};
use super::spanning::Process;
use super::table::{CallTable, End};

/// Bodies up to this length are copied behind their head; longer ones are sent as they are.
const COPY_BELOW: usize = 16 * 1024;

/// Wakes a future, and counts as in flight until then.
pub(crate) struct Waiter {
    sender: oneshot::Sender<Bodies>,
    permit: Permit,
}

impl Waiter {
    pub(crate) fn new(sender: oneshot::Sender<Bodies>, permit: Permit) -> Self {
        Self { sender, permit }
    }

    pub(crate) fn permit(&self) -> &Permit {
        &self.permit
    }
}

/// A node of the group.
#[derive(Debug, Clone)]
pub(crate) struct GroupNode {
    pub(crate) node: NodeId,
    pub(crate) hostname: String,
    pub(crate) ranks: Vec<Rank>,
}

/// How many calls an executor may have in flight, all its generations together.
#[derive(Debug, Clone)]
pub(crate) struct InFlight {
    limit: usize,
    permits: Arc<Semaphore>,
}

impl InFlight {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            limit,
            permits: Arc::new(Semaphore::new(limit)),
        }
    }
}

/// Why a generation takes no more calls that has lost nobody.
pub(super) const CHANGES: &str = "the group is about to change";

/// What the other generations of an elastic group hear from one of them.
pub(crate) trait Listener: Send + Sync {
    /// A generation takes no calls any more. It is `idle` if none is in flight there.
    fn is_over(&self, generation: Generation, idle: bool);

    /// Perhaps no call is under way.
    fn between_calls(&self);

    /// A result of a call that is not one generation's own.
    fn result(
        &self,
        now: Instant,
        call: (CallId, Process),
        generation: Generation,
        outcome: Outcome,
        body: Bytes,
    );

    /// As [`SpanTable::lost`](super::spanning::SpanTable::lost).
    fn lost(&self, process: Process, failure: &RankFailure, by: Option<Generation>);

    /// A node with members of a generation is not reached.
    fn note_unreachable(&self, generation: Generation, why: String);

    /// The future of a call that spans generations is gone.
    fn cancel(&self, call: CallId);
}

/// Calls to one generation of a group. Shared by its executor, handles, futures and the tasks of its channels.
pub(crate) struct Group {
    members: Arc<GenerationTable>,
    nodes: Vec<GroupNode>,
    /// The index of each rank's node.
    routes: Vec<usize>,
    /// The rank of each slot, by slot. Slots `0..n` are at their own index.
    slots: Vec<(Slot, Rank)>,
    in_flight: InFlight,
    /// All generations of an elastic group.
    elastic: Option<Weak<dyn Listener>>,
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
    /// A group of these members, with one stream per node in `sinks`. Every rank is on exactly one node.
    pub(crate) fn new(
        members: GenerationTable,
        nodes: Vec<GroupNode>,
        sinks: Vec<impl Sink>,
        in_flight: InFlight,
        elastic: Option<Weak<dyn Listener>>,
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
        let mut slots: Vec<(Slot, Rank)> = (members.members.iter())
            .map(|member| (member.slot, member.rank))
            .collect();
        slots.sort_unstable();
        let mut table = CallTable::new(hostnames);
        let mut objects = 0;
        if elastic.is_some() {
            table = table.elastic(members.generation);
            objects = table.first_id().0;
        }
        Self {
            members: Arc::new(members),
            nodes,
            routes,
            slots,
            in_flight,
            elastic,
            objects: AtomicU64::new(objects),
            state: Mutex::new(State {
                table,
                outboxes: sinks.into_iter().map(Outbox::new).collect(),
                armed: None,
            }),
            timer: Notify::new(),
        }
    }

    pub(crate) fn world_size(&self) -> usize {
        self.routes.len()
    }

    pub(crate) fn generation(&self) -> Generation {
        self.members.generation
    }

    pub(crate) fn members(&self) -> &Arc<GenerationTable> {
        &self.members
    }

    /// The rank of a slot's process.
    fn rank_of(&self, slot: Slot) -> Option<Rank> {
        let at_its_place = self.slots.get(slot.0 as usize);
        if let Some((_, rank)) = at_its_place.filter(|(there, _)| *there == slot) {
            return Some(*rank);
        }
        let index = self.slots.binary_search_by_key(&slot, |(slot, _)| *slot);
        index.ok().map(|index| self.slots[index].1)
    }

    fn elastic(&self) -> Option<Arc<dyn Listener>> {
        self.elastic.as_ref()?.upgrade()
    }

    pub(crate) fn new_object(&self) -> ObjectId {
        ObjectId(self.objects.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Room for one more call, if there is some now.
    pub(crate) fn try_permit(&self, name: &str) -> Result<Permit, CallError> {
        Arc::clone(&self.in_flight.permits)
            .try_acquire_owned()
            .map(Arc::new)
            .map_err(|_| CallError::Busy {
                call: name.to_owned(),
                limit: self.in_flight.limit,
            })
    }

    /// Room for a call of kolo's own, which counts as none.
    pub(super) fn permit_beside() -> Permit {
        let one = Arc::new(Semaphore::new(1));
        Arc::new(one.try_acquire_owned().expect("nobody else has it"))
    }

    /// Waits for room for one more call. First come, first served.
    pub(crate) fn permit(
        &self,
    ) -> impl Future<Output = Option<OwnedSemaphorePermit>> + Send + use<> {
        let acquire = Arc::clone(&self.in_flight.permits).acquire_owned();
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
        request.check()?;
        let count = if each { ranks.len() } else { 1 };
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..count).map(|_| oneshot::channel()).unzip();
        let mut waiters = senders.into_iter().map(|sender| Waiter {
            sender,
            permit: Arc::clone(&permit),
        });
        let waiters = match (each, waiters.next()) {
            (false, Some(waiter)) => Waiters::Whole(waiter),
            (_, first) => Waiters::Each(first.into_iter().chain(waiters).map(Some).collect()),
        };
        let now = Instant::now();
        // A deadline that the clock can't hold is none.
        let deadline = (request.deadline).and_then(|after| Some((now.checked_add(after)?, after)));
        // Before the lock, so that it always ends after it: then results may be read, which takes the lock.
        let turn;
        let mut state = self.lock();
        let taken = state
            .table
            .register(now, request.name, ranks, deadline, waiters)?;
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

    /// A number for a call that spans generations.
    pub(crate) fn next_id(&self) -> CallId {
        self.lock().table.next_id()
    }

    /// Gives a call that spans generations to some ranks.
    pub(crate) fn give(
        &self,
        call: CallId,
        ranks: &[Rank],
        request: &Request,
        left: Option<Duration>,
        permit: &Permit,
    ) {
        let op = request.op.clone();
        let mut state = self.lock();
        self.write(
            &mut state,
            call,
            ranks,
            left,
            op,
            &request.body,
            Some(permit),
        );
    }

    /// Cancels a call that spans generations.
    pub(crate) fn withdraw(&self, call: CallId, ranks: Vec<Rank>) {
        self.cancel_on_nodes(&mut self.lock(), vec![(call, ranks)]);
    }

    /// The calling task awaits a call that was sent some time ago.
    pub(crate) fn awaited(&self) {
        if let Some(outbox) = self.lock().outboxes.first() {
            outbox.awaited();
        }
    }

    /// Has all ranks do something. Nobody waits for it.
    pub(crate) fn tell(&self, op: CallOp, body: &Bytes) {
        let mut state = self.lock();
        if state.table.end().is_some() {
            return;
        }
        let ranks = state.table.up((0..self.world_size() as u32).map(Rank));
        let call = state.table.next_id();
        self.write(&mut state, call, &ranks, None, op, body, None);
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
            generation: self.members.generation,
            ranks: Vec::new(),
            deadline_ms,
            op,
        };
        for (index, here) in self.by_node(ranks) {
            if let CallFrame::Call { ranks, .. } = &mut frame {
                *ranks = here;
            }
            if let Some(chunks) = encode(&frame, body)
                && let Some(outbox) = state.outboxes.get_mut(index)
            {
                outbox.push(chunks, permit);
            }
        }
    }

    fn cancel_on_nodes(&self, state: &mut State, cancels: Vec<(CallId, Vec<Rank>)>) {
        for (call, ranks) in cancels {
            for (index, ranks) in self.by_node(&ranks) {
                if let Some([chunk, _]) = encode(&CallFrame::Cancel { call, ranks }, &Bytes::new())
                    && let Some(outbox) = state.outboxes.get_mut(index)
                {
                    outbox.push_advice(chunk);
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

    pub(super) fn complete(completions: impl IntoIterator<Item = Completion<Waiter>>) {
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
        let mut effects = event(&mut state.table);
        self.cancel_on_nodes(&mut state, effects.cancels);
        if self.elastic.is_some() {
            for completion in &mut effects.completions {
                let result = std::mem::replace(&mut completion.result, Ok(Vec::new()));
                completion.result = result.map_err(|error| state.table.explain(error));
            }
            let (is_over, is_idle) = (state.table.is_over(), state.table.in_flight() == 0);
            drop(state);
            if (is_over || is_idle)
                && let Some(generations) = self.elastic()
            {
                if is_over {
                    generations.is_over(self.generation(), is_idle);
                }
                generations.between_calls();
            }
        }
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

    /// The next generation has begun, or this one can't go on.
    pub(crate) fn supersede(&self, cause: &str) {
        self.lock().table.supersede(cause);
    }

    /// Takes no more calls, if none is under way.
    pub(super) fn rest(&self) -> bool {
        let table = &mut self.lock().table;
        let is_idle = table.in_flight() == 0;
        if is_idle {
            table.supersede(CHANGES);
        }
        is_idle
    }

    /// Whether it takes no calls any more.
    pub(super) fn is_over(&self) -> bool {
        self.lock().table.is_over()
    }

    /// Whether nobody waits for a call here, but for such that span generations.
    pub(crate) fn is_idle(&self) -> bool {
        self.lock().table.in_flight() == 0
    }

    /// Ends the channels to the nodes.
    pub(crate) fn hang_up(&self) {
        self.lock().outboxes.clear();
    }

    /// The head is gone, and says nothing of losses any more.
    pub(crate) fn without_head(&self) {
        self.apply(CallTable::without_head);
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
