//! What the clones of a communicator share, and how an operation gets its turn.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::{Arc, OnceLock, PoisonError};
use std::task::Poll;
use std::time::Instant;

use kolo_transport::ids::{Generation, JobId, Rank};
use tokio::sync::Mutex;
use tokio::time::Sleep;

use crate::blocking::Alarm;
use crate::cause::Cause;
use crate::driver::engine::Engine;
use crate::driver::{Place, TimeLimit};
use crate::error::CollectiveError;
use crate::handle::Progress;
use crate::lane::LaneError;
use crate::link::Link;
use crate::operation::{Operation, OperationKind, Tag};
use crate::rank_shared::listener::Listener;
use crate::rank_shared::signals::{Arrival, Signals};
use crate::rank_shared::{GroupId, Kind, RankShared};
use crate::record::ShortName;
use crate::times::{ATTENDED, FOREVER};

mod member;
mod op_guard;
mod shared_memory;
#[cfg(test)]
mod tests;
mod waiting;

pub(crate) use op_guard::OpGuard;
use op_guard::drive;
pub(crate) use shared_memory::{Quick, Shared};
use waiting::Waiting;

/// So many operations that were given up before their turn are told of before the links are written to.
const AT_ONCE: usize = 64;

/// What runs the operations of a group that are told apart by name. It uses groups, so that they know of it no more than this.
pub(crate) trait Named: Any + Send + Sync {
    /// The group in which it runs them.
    fn data(&self) -> &GroupCore;
    /// A rank (one of all) is lost, as an operation without a name has found.
    fn lost(&self, rank: u32, reason: &str);
}

/// Starts what runs the named operations of a group.
pub(crate) type StartNamed = fn(&GroupCore) -> Arc<dyn Named>;

/// A group on this rank. The fields are many because the clones of a communicator share all of it: who they are, what comes from
/// outside, the engine, and what runs operations.
pub(crate) struct GroupCore {
    pub(crate) me: u32,
    pub(crate) world: u32,
    pub(crate) generation: Generation,
    pub(crate) job: JobId,
    pub(crate) id: GroupId,
    /// The members by their ranks among all; `None` if these are all.
    pub(crate) members: Option<Arc<[u32]>>,
    pub(crate) signals: Signals,
    /// Fair: operations get it in the order in which they asked.
    pub(crate) engine: Mutex<Engine>,
    pub(crate) listener: Arc<Listener>,
    /// What runs handles.
    pub(crate) progress: OnceLock<Progress>,
    start_named: StartNamed,
    /// Operations that are told apart by name, once there was one.
    named: OnceLock<Arc<dyn Named>>,
    /// How many groups were made out of this one of the same members.
    made: std::sync::Mutex<HashMap<GroupId, u64>>,
    /// For what one rank sends to one other, by sender and receiver.
    pub(crate) pairs: std::sync::Mutex<HashMap<(u32, u32), Arc<GroupCore>>>,
    /// Dropped last: with the connector the runtime may end, which delivers what is in dropped lanes.
    pub(crate) rank_shared: Arc<RankShared>,
}

impl fmt::Debug for GroupCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupCore")
            .field("me", &self.me)
            .finish_non_exhaustive()
    }
}

impl GroupCore {
    /// The group of all ranks.
    pub(crate) fn root(rank_shared: RankShared, start_named: StartNamed) -> Arc<Self> {
        let (me, world) = (rank_shared.me, rank_shared.world);
        let rank_shared = Arc::new(rank_shared);
        Self::make(rank_shared, start_named, GroupId::WORLD, None, (me, world))
    }

    /// A group; this rank is the one at `me` in `members`.
    pub(crate) fn group(&self, id: GroupId, members: Vec<u32>, me: u32) -> Arc<Self> {
        let world = members.len() as u32;
        let members: Arc<[u32]> = members.into();
        let inner = {
            let _still = self.rank_shared.still();
            let inner = Self::make(
                Arc::clone(&self.rank_shared),
                self.start_named,
                id,
                Some(members),
                (me, world),
            );
            self.signals
                .copy_to(&inner.signals, |member| inner.position(member));
            inner
        };
        self.rank_shared.offer(&inner);
        inner
    }

    fn make(
        rank_shared: Arc<RankShared>,
        start_named: StartNamed,
        id: GroupId,
        members: Option<Arc<[u32]>>,
        (me, world): (u32, u32),
    ) -> Arc<Self> {
        let inner = Arc::new(Self {
            me,
            world,
            generation: rank_shared.generation,
            job: rank_shared.job,
            id,
            signals: Signals::new(world, members.clone()),
            engine: Mutex::new(Engine::new(
                me,
                world,
                rank_shared.generation,
                members.clone(),
            )),
            members,
            rank_shared,
            listener: Arc::default(),
            progress: OnceLock::new(),
            start_named,
            named: OnceLock::new(),
            made: std::sync::Mutex::default(),
            pairs: std::sync::Mutex::default(),
        });
        inner.rank_shared.join(id, &inner);
        if world > 1 {
            inner.listener.start(&inner, &inner.rank_shared.handle);
        }
        inner
    }

    /// What runs named operations; made at first use.
    pub(crate) fn named(&self) -> &Arc<dyn Named> {
        if let Some(named) = self.named.get() {
            return named;
        }
        let named = self.named.get_or_init(|| (self.start_named)(self));
        // The settings may have changed while it started.
        self.retune();
        named
    }

    /// Named operations need all ranks: those that wait for a rank of which this error says that it is lost end with it, on all ranks.
    fn tell_named(&self, error: &CollectiveError) {
        if let CollectiveError::PeerLost { rank, reason } = error
            && let Some(named) = self.named.get()
            && self.signals.lock().lost.has(rank.0)
        {
            named.lost(self.job_rank(rank.0), reason);
        }
    }

    /// The reserved group of what runs named operations.
    pub(crate) fn named_id(&self) -> GroupId {
        self.id.child(Kind::Negotiation, 0, &self.job_ranks())
    }

    /// What algorithms are chosen by has changed: the groups that this one has made for itself do the same.
    pub(crate) fn retune(&self) {
        let (tuning, layout) = {
            let state = self.signals.lock();
            (state.choice.tuning, Arc::clone(&state.choice.layout))
        };
        if let Some(named) = self.named.get() {
            let data = named.data();
            data.signals.lock().choose_by(tuning, layout);
        }
        let pairs = self.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        for pair in pairs.values() {
            let mut state = pair.signals.lock();
            let layout = Arc::clone(&state.choice.layout);
            state.choose_by(tuning, layout);
        }
    }

    /// The group for what one rank sends to another, of which this is one.
    pub(crate) fn pair(self: &Arc<Self>, from: u32, to: u32) -> Arc<Self> {
        let mut pairs = self.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        let pair = pairs.entry((from, to)).or_insert_with(|| {
            let members = [self.job_rank(from), self.job_rank(to)];
            let id = self.pair_id(members);
            self.rank_shared.name_pair(id, members[0], members[1]);
            self.group(id, members.to_vec(), u32::from(from != self.me))
        });
        Arc::clone(pair)
    }

    fn pair_id(&self, members: [u32; 2]) -> GroupId {
        self.id.child(Kind::Pair, 0, &members)
    }

    /// The id of the next group with these members.
    pub(crate) fn next_id(&self, members: &[u32]) -> GroupId {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let count = made
            .entry(self.id.child(Kind::Members, 0, members))
            .or_default();
        *count += 1;
        self.id.child(Kind::Members, *count, members)
    }

    /// The rank that a member has among all.
    pub(crate) fn job_rank(&self, member: u32) -> u32 {
        match &self.members {
            Some(members) => members.get(member as usize).copied().unwrap_or(member),
            None => member,
        }
    }

    /// The members by their ranks among all.
    pub(crate) fn job_ranks(&self) -> Vec<u32> {
        (0..self.world)
            .map(|member| self.job_rank(member))
            .collect()
    }

    /// The rank that one of all has here.
    pub(crate) fn position(&self, job_rank: u32) -> Option<u32> {
        match &self.members {
            Some(members) => members
                .iter()
                .position(|member| *member == job_rank)
                .map(|position| position as u32),
            None => (job_rank < self.world).then_some(job_rank),
        }
    }

    /// An error for the caller, who knows ranks by their numbers among all.
    pub(crate) fn outward(&self, error: CollectiveError) -> CollectiveError {
        self.rank_shared.add_who_waits(self.with_job_ranks(error))
    }

    fn with_job_ranks(&self, error: CollectiveError) -> CollectiveError {
        match &self.members {
            Some(members) => {
                let error = error.with_ranks(|rank| Rank(self.job_rank(rank.0)));
                let send = OperationKind::SendReceive.name();
                match members[..] {
                    [from, to] => error.with_operations(|operation| {
                        // Only the two ranks of a pair do that.
                        if operation.starts_with(send) {
                            format!("{operation} from rank {from} to rank {to}")
                        } else {
                            operation
                        }
                    }),
                    _ => error,
                }
            }
            None => error,
        }
    }

    /// The other way round, if all the ranks that it names are members.
    pub(crate) fn inward(&self, error: CollectiveError) -> Option<CollectiveError> {
        let mut error = error;
        if let CollectiveError::Deadline { doing, .. } = &mut error {
            doing.retain(|missing| self.position(missing.rank.0).is_some());
        }
        let strangers = std::cell::Cell::new(false);
        let error = error.with_ranks(|rank| {
            Rank(self.position(rank.0).unwrap_or_else(|| {
                strangers.set(true);
                self.me
            }))
        });
        (!strangers.get()).then_some(error)
    }

    /// A timer of the communicator's own runtime, for async operations on any executor.
    pub(crate) fn sleep(&self) -> Sleep {
        let _context = self.rank_shared.handle.enter();
        tokio::time::sleep(FOREVER)
    }

    /// Waits until no other operation is under way, and takes the number of the next one.
    pub(crate) async fn turn<A: Alarm>(
        self: &Arc<Self>,
        alarm: &mut A,
        started: Instant,
        operation: &'static str,
    ) -> Result<(OpGuard<'_>, Tag), CollectiveError> {
        let waiting = Waiting::new(self, operation);
        let turn = self.turn_without_number(alarm, started, operation).await?;
        waiting.end();
        let tag = self.signals.lock().take_number();
        Ok((turn, tag))
    }

    /// As [`GroupCore::turn`], for what has a number already.
    pub(crate) async fn turn_without_number<A: Alarm>(
        self: &Arc<Self>,
        alarm: &mut A,
        started: Instant,
        operation: &'static str,
    ) -> Result<OpGuard<'_>, CollectiveError> {
        let timeout = self.signals.lock().timeout.min(FOREVER);
        let mut limit = TimeLimit::new(started, started + timeout);
        let handles = self.progress.get().and_then(Progress::ahead);
        let free = match &handles {
            None => self.engine.try_lock().ok(),
            Some(_) => None,
        };
        let engine = if let Some(engine) = free {
            engine
        } else {
            let mut lock = pin!(async {
                // What was given to handles before comes first.
                if let Some(handles) = handles {
                    handles.done().await;
                }
                let _wanted = self.signals.want();
                self.engine.lock().await
            });
            let engine = poll_fn(|cx| {
                if let Poll::Ready(engine) = lock.as_mut().poll(cx) {
                    return Poll::Ready(Ok(engine));
                }
                // What has the turn has more time, too, if this process stood still.
                while alarm
                    .poll_at(limit.deadline.min(limit.next_turn()), cx)
                    .is_ready()
                {
                    let now = Instant::now();
                    limit.move_on(now);
                    if now >= limit.deadline {
                        return Poll::Ready(Err(CollectiveError::Deadline {
                            operation: operation.to_owned(),
                            waited: timeout,
                            late: Vec::new(),
                            doing: Vec::new(),
                        }));
                    }
                }
                Poll::Pending
            });
            engine.await?
        };
        let mut turn = OpGuard {
            inner: self,
            engine,
            operation: Operation::BARRIER,
            name: ShortName::default(),
            asked: started,
            recorded: None,
            limit,
            timeout,
            in_packed: false,
            quick: false,
        };
        self.listener.disturb();
        self.settle(&mut turn.engine);
        Ok(turn)
    }

    /// Takes the numbers of the operations that were given up before their turn, and tells the peers.
    fn settle(&self, engine: &mut Engine) {
        let mut state = self.signals.lock();
        for (index, (tag, operation)) in (1..).zip(state.take_cancelled()) {
            let error = CollectiveError::Aborted {
                reason: format!("{operation} was cancelled before its turn"),
            };
            tracing::debug!(rank = self.me, %tag, %error, "gave up");
            engine.previous = None;
            let notice = engine.tell(tag, &Cause::of(&error, Rank(self.me)));
            state.notices.put(notice);
            if index % AT_ONCE == 0 {
                // A peer that reads hears of all of them: more do not wait on a link than it has room for.
                engine.flush_now();
            }
        }
    }

    /// Where an operation runs; `connect` is [`GroupCore::connect`] of this group.
    fn place<'a>(&'a self, connect: &'a (dyn Fn(u32) + Sync)) -> Place<'a> {
        Place {
            signals: &self.signals,
            stalls: &self.rank_shared.stalls,
            connect,
            id: self.id,
            job: self.job,
            patience: self.rank_shared.patience(),
        }
    }

    /// Starts making a link; the lane comes by [`GroupCore::arrive`]. One that is the peer's to make is asked for.
    fn connect(self: &Arc<Self>, peer: u32) {
        let rank = self.job_rank(peer);
        if rank > self.rank_shared.me {
            self.rank_shared.request(self.id, rank);
            return;
        }
        let connecting = self.rank_shared.connect(self.id, rank);
        let inner = Arc::downgrade(self);
        self.rank_shared.handle.spawn(async move {
            let lane = connecting.await;
            if let Some(inner) = inner.upgrade() {
                inner.arrive(peer, lane.map(Link::over).map(Box::new), false);
            }
        });
    }

    /// A lane has come, or will not; `theirs` says that the peer has made it.
    pub(crate) fn arrive(
        self: &Arc<Self>,
        rank: u32,
        lane: Result<Box<Link>, LaneError>,
        theirs: bool,
    ) {
        let failed = self.signals.change(|state| {
            state.arrive(Arrival { rank, lane, theirs });
            state.needs_attendant()
        });
        // The next operation takes it in, or who listens meanwhile. But after a failure the peer, which waits, must hear of it now.
        if failed {
            self.attend();
        } else {
            self.listener.freed();
        }
    }

    pub(crate) fn abort_call(self: &Arc<Self>, call: u64, reason: &str) {
        let news = self.signals.change(|state| {
            if state.call != call
                || matches!(state.notices.call, Some((noticed, _)) if noticed == call)
            {
                return false;
            }
            let echo = state
                .last_failure
                .clone()
                .or_else(|| self.inward(self.rank_shared.last_failure(call)?))
                .filter(|error| error.culprit_rank().is_some());
            let own = CollectiveError::Aborted {
                reason: reason.to_owned(),
            };
            let cause = Cause::of(echo.as_ref().unwrap_or(&own), Rank(self.me));
            state.notices.call = Some((call, cause.call_notice(self.generation, call)));
            state.notices.is_call_pending = true;
            state.call_failed.get_or_insert(own);
            true
        });
        if !news || self.world == 1 {
            return;
        }
        let Ok(mut engine) = self.engine.try_lock() else {
            // The operation that is under way ends now; then the attendant sends the notice.
            self.attend();
            return;
        };
        self.give_notice(&mut engine);
        engine.flush_now();
        if engine.has_backlog() {
            self.attend();
        }
    }

    /// Puts the notice of a failed call on all links, and makes links to some of the ranks that may wait for
    /// this one to make them. Those tell the others.
    fn give_notice(self: &Arc<Self>, engine: &mut Engine) {
        let (arrivals, notice, old) = {
            let mut state = self.signals.lock();
            if !std::mem::take(&mut state.notices.is_call_pending) {
                return;
            }
            let notice = state.notices.call.as_ref().map(|(_, frame)| frame.clone());
            (state.take_links(), notice, state.notices.of_operations())
        };
        for arrival in arrivals {
            // One that this rank could not make is made again when it is needed.
            drop(engine.arrive(arrival, &old));
        }
        engine.notify_all(&notice.unwrap_or_default());
        for peer in engine.unlinked_neighbours() {
            self.connect(peer);
        }
    }

    /// Makes sure that what a failed operation or call left to be said is said, without an operation to do it.
    pub(crate) fn attend(self: &Arc<Self>) {
        {
            let mut state = self.signals.lock();
            if std::mem::replace(&mut state.attended, true) {
                return;
            }
        }
        let inner = Arc::clone(self);
        self.rank_shared
            .handle
            .spawn(async move { inner.attend_until_done().await });
    }

    async fn attend_until_done(self: &Arc<Self>) {
        let mut engine = self.engine.lock().await;
        let timeout = self.signals.lock().timeout.clamp(ATTENDED, FOREVER);
        let mut sleep = pin!(tokio::time::sleep(timeout));
        poll_fn(|cx| {
            self.settle(&mut engine);
            // Before the arrivals, because it is for the links that are there.
            self.give_notice(&mut engine);
            let (arrivals, requests, notices) = {
                let mut state = self.signals.lock();
                state.register(cx);
                let requests = std::mem::take(&mut state.requests);
                (state.take_links(), requests, state.notices.frames())
            };
            for arrival in arrivals {
                drop(engine.arrive(arrival, &notices));
            }
            // After that: what is asked for may just have come.
            for peer in requests {
                if engine.is_asked_by(peer) {
                    self.connect(peer);
                }
            }
            for peer in engine.poll_renewals(cx) {
                self.connect(peer);
            }
            let flushed = engine.poll_flush(cx).is_ready();
            // A peer that does not read is late, and nothing worse. The listener goes on when it reads: the communicator is not
            // kept for that, nor the right to run operations.
            let late = !flushed && sleep.as_mut().poll(cx).is_ready();
            let mut state = self.signals.lock();
            // An operation that waits sends the rest itself, and asks for the attendant again if it must.
            if flushed || late || self.signals.is_wanted() {
                if !state.needs_attendant() || self.signals.is_wanted() {
                    state.attended = false;
                    return Poll::Ready(());
                }
                cx.waker().wake_by_ref();
            }
            Poll::Pending
        })
        .await;
        drop(engine);
        self.listener.freed();
    }
}

impl Drop for GroupCore {
    fn drop(&mut self) {
        self.rank_shared.leave(self.id);
        self.listener.end();
        // Pairs know nothing of each other.
        self.pairs
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
    }
}
