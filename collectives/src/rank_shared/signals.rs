//! What comes to a communicator from outside an operation: new lanes, losses, aborts, settings.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};
use std::time::Duration;

use kolo_transport::ids::{CallId, Rank};
use kolo_transport::wire::GenerationTable;

use crate::error::CollectiveError;
use crate::lane::LaneError;
use crate::link::Link;
use crate::operation::Tag;
use crate::schedule::{Layout, Tuning};
use crate::times::TIMEOUT;
use crate::verdict::Lost;

/// Operations before the last that failed, of which peers are told that are linked late.
const OLDER: usize = 8;

/// A lane that came or did not come.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) rank: u32,
    pub(crate) lane: Result<Box<Link>, LaneError>,
    /// It is the peer that has tried.
    pub(crate) theirs: bool,
}

impl Arrival {
    /// That a peer can't make a link ends the operation that needs it. What this rank could not make is made again then.
    fn is_for_an_operation(&self) -> bool {
        self.theirs && self.lane.is_err()
    }
}

#[derive(Debug)]
pub(crate) struct Signals {
    state: Mutex<State>,
    /// Operations that wait for their turn: the attendant makes room for them.
    waiting: AtomicUsize,
    /// A rank is lost, all is revoked, or the present call has failed, by the last [change](Signals::change): threads that look for
    /// peers in shared memory see this.
    is_over: Arc<AtomicBool>,
}

/// What peers are told that are linked from now on. A peer that is past it takes no notice.
#[derive(Debug, Default)]
pub(crate) struct Notices {
    /// The frame that says that this rank shares no memory, if it was asked.
    pub(crate) refusal: Option<Vec<u8>>,
    /// The frame that says that this rank failed in a call, and which call.
    pub(crate) call: Option<(u64, Vec<u8>)>,
    /// That one is not yet with the links that are there.
    pub(crate) is_call_pending: bool,
    /// The same for the operations that this rank gave up, or at whose deadline it asks its peers, oldest first: a peer that is
    /// linked late may still be in one of them.
    operations: VecDeque<Vec<u8>>,
}

impl Notices {
    /// All of them.
    pub(crate) fn frames(&self) -> Vec<u8> {
        let mut frames = self.refusal.clone().unwrap_or_default();
        if let Some((_, frame)) = &self.call {
            frames.extend_from_slice(frame);
        }
        frames.extend_from_slice(&self.of_operations());
        frames
    }

    pub(crate) fn of_operations(&self) -> Vec<u8> {
        self.operations.iter().flatten().copied().collect()
    }

    pub(crate) fn put(&mut self, notice: Vec<u8>) {
        self.operations.push_back(notice);
        self.forget_but(OLDER + 1);
    }

    /// The operation that was told of last ended well after all.
    pub(crate) fn take_back(&mut self) {
        self.operations.pop_back();
    }

    fn forget_but(&mut self, last: usize) {
        let old = self.operations.len().saturating_sub(last);
        self.operations.drain(..old);
    }

    fn are_there(&self) -> bool {
        self.call.is_some() || !self.operations.is_empty()
    }
}

/// What algorithms are chosen by.
#[derive(Debug, Clone)]
pub(crate) struct Choice {
    pub(crate) tuning: Tuning,
    pub(crate) layout: Arc<Layout>,
    /// Another one for other settings.
    pub(crate) version: u64,
}

/// What a group is told. The fields are many because everything that comes from outside its operations comes here.
#[derive(Debug)]
pub(crate) struct State {
    /// The present call and the number of its next operation.
    pub(crate) call: u64,
    pub(crate) next: u64,
    /// Operations of the present call that were given up before their turn.
    pub(crate) cancelled: Vec<&'static str>,
    /// Those of them that have their numbers already.
    passed: Vec<(Tag, &'static str)>,
    /// Why operations of the present call fail from now on.
    pub(crate) call_failed: Option<CollectiveError>,
    /// The last operation of the present call that failed.
    pub(crate) last_failure: Option<CollectiveError>,
    pub(crate) notices: Notices,
    /// A task is there that sends what waits between operations.
    pub(crate) attended: bool,
    pub(crate) arrivals: Vec<Arrival>,
    /// Lower peers that ask for their links.
    pub(crate) requests: Vec<u32>,
    /// Whether all ranks are on this host, once that is known.
    pub(crate) one_host: Option<bool>,
    pub(crate) lost: Lost,
    pub(crate) table: Option<Arc<GenerationTable>>,
    pub(crate) timeout: Duration,
    pub(crate) choice: Choice,
    /// Of a group, its members by their ranks among all.
    members: Option<Arc<[u32]>>,
    waker: Option<Waker>,
}

impl State {
    fn new(world: u32, members: Option<Arc<[u32]>>) -> Self {
        Self {
            members,
            call: 0,
            next: 0,
            cancelled: Vec::new(),
            passed: Vec::new(),
            call_failed: None,
            last_failure: None,
            notices: Notices::default(),
            attended: false,
            arrivals: Vec::new(),
            requests: Vec::new(),
            one_host: None,
            lost: Lost::default(),
            table: None,
            timeout: TIMEOUT,
            choice: Choice {
                tuning: Tuning::default(),
                layout: Arc::new(Layout::single(world)),
                version: 0,
            },
            waker: None,
        }
    }

    /// A lane has come, or will not. The last one counts, and any more than none.
    pub(crate) fn arrive(&mut self, arrival: Arrival) {
        let before = self
            .arrivals
            .iter()
            .position(|before| before.rank == arrival.rank);
        match before {
            Some(before) if arrival.lane.is_ok() => self.arrivals[before] = arrival,
            // What the peer says of its link counts more than what this rank could not do.
            Some(before) if self.arrivals[before].lane.is_err() => {
                if arrival.theirs || !self.arrivals[before].theirs {
                    self.arrivals[before] = arrival;
                }
            }
            Some(_) => {}
            None => self.arrivals.push(arrival),
        }
    }

    /// The lanes that have come or will not.
    pub(crate) fn take_arrivals(&mut self) -> Vec<Arrival> {
        std::mem::take(&mut self.arrivals)
    }

    /// As [`State::take_arrivals`], for who is in no operation.
    pub(crate) fn take_links(&mut self) -> Vec<Arrival> {
        let arrivals = self.take_arrivals();
        let (left, taken) = arrivals.into_iter().partition(Arrival::is_for_an_operation);
        self.arrivals = left;
        taken
    }

    /// Whom to wake when something changes: who has the engine.
    pub(crate) fn register(&mut self, cx: &Context<'_>) {
        match &mut self.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
    }

    /// Whether nothing stands in the way of an operation, and nothing is new.
    pub(crate) fn is_calm(&self, settings: u64) -> bool {
        self.choice.version == settings
            && self.call_failed.is_none()
            && self.lost.is_empty()
            && self.cancelled.is_empty()
            && self.passed.is_empty()
            && self.arrivals.is_empty()
            && !self.notices.is_call_pending
    }

    /// From here on algorithms are chosen by these.
    pub(crate) fn choose_by(&mut self, tuning: Tuning, layout: Arc<Layout>) {
        self.choice = Choice {
            tuning,
            layout,
            version: self.choice.version + 1,
        };
    }

    /// The number of the next operation, which is taken by it.
    pub(crate) fn take_number(&mut self) -> Tag {
        let tag = self.next_tag();
        self.next += 1;
        tag
    }

    /// Gives what was given up before its turn its numbers, and takes it.
    pub(crate) fn take_cancelled(&mut self) -> Vec<(Tag, &'static str)> {
        self.number_cancelled();
        std::mem::take(&mut self.passed)
    }

    fn number_cancelled(&mut self) {
        for operation in std::mem::take(&mut self.cancelled) {
            let tag = self.take_number();
            self.passed.push((tag, operation));
        }
    }

    /// Whether there is nothing for the operation that is under way.
    pub(crate) fn is_nothing_new(&self) -> bool {
        self.arrivals.is_empty() && self.requests.is_empty()
    }

    /// The number of the next operation.
    pub(crate) fn next_tag(&self) -> Tag {
        Tag::new(self.call, self.next)
    }

    /// Whether there is something to say that no operation will say.
    pub(crate) fn needs_attendant(&self) -> bool {
        let links = || !self.arrivals.iter().all(Arrival::is_for_an_operation);
        self.notices.is_call_pending
            || !self.cancelled.is_empty()
            || !self.passed.is_empty()
            || !self.requests.is_empty()
            || (self.notices.are_there() && links())
    }

    /// Why an operation with this tag can't go on, if so.
    pub(crate) fn obstacle(&self, tag: Tag) -> Option<CollectiveError> {
        if let Some(error) = self.lost.error() {
            return Some(error);
        }
        if tag.call != self.call {
            return Some(CollectiveError::Aborted {
                reason: format!(
                    "call {} has begun while this operation of call {} was under way",
                    self.call, tag.call
                ),
            });
        }
        self.call_failed.clone()
    }

    /// The number of a member among all ranks.
    pub(crate) fn job_rank(&self, member: u32) -> u32 {
        match &self.members {
            Some(members) => members.get(member as usize).copied().unwrap_or(member),
            None => member,
        }
    }

    /// The host of a rank, for people.
    pub(crate) fn host_of(&self, rank: u32) -> Option<&str> {
        let rank = match &self.members {
            Some(members) => *members.get(rank as usize)?,
            None => rank,
        };
        let member = self.table.as_ref()?.members.get(rank as usize)?;
        Some(&member.hostname)
    }
}

impl Signals {
    pub(crate) fn new(world: u32, members: Option<Arc<[u32]>>) -> Self {
        Self {
            state: Mutex::new(State::new(world, members)),
            waiting: AtomicUsize::new(0),
            is_over: Arc::default(),
        }
    }

    /// A new group begins with what holds for the one that it is made of. `position` is a rank's number in the new one.
    pub(crate) fn copy_to(&self, group: &Self, position: impl Fn(u32) -> Option<u32>) {
        let old = self.lock();
        let mut new = group.lock();
        let job_rank = |rank: u32| match &old.members {
            Some(members) => members[rank as usize],
            None => rank,
        };
        new.call = old.call;
        new.call_failed = old.call_failed.as_ref().and_then(|error| match error {
            // A group without the rank is not concerned.
            CollectiveError::PeerLost { rank, reason } => {
                position(job_rank(rank.0)).map(|rank| CollectiveError::PeerLost {
                    rank: Rank(rank),
                    reason: reason.clone(),
                })
            }
            error => Some(CollectiveError::Aborted {
                reason: error.to_string(),
            }),
        });
        new.table.clone_from(&old.table);
        new.timeout = old.timeout;
        new.choice.tuning = old.choice.tuning;
        new.lost = old.lost.map(|rank| position(job_rank(rank)));
        let hosts: Vec<u32> = new
            .members
            .iter()
            .flat_map(|members| members.iter())
            .map(|member| {
                let old_rank = match &old.members {
                    Some(members) => members
                        .iter()
                        .position(|other| other == member)
                        .unwrap_or(0) as u32,
                    None => *member,
                };
                old.choice.layout.host_of(old_rank)
            })
            .collect();
        if !hosts.is_empty() {
            new.choice.layout = Arc::new(Layout::of_hosts(&hosts));
            new.choice.version += 1;
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that runs under the lock panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes something and wakes who has the engine.
    pub(crate) fn change<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.lock();
        let result = change(&mut state);
        let waker = state.waker.take();
        let is_over = !state.lost.is_empty() || state.call_failed.is_some();
        self.is_over.store(is_over, Ordering::Relaxed);
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
        result
    }

    /// A flag that is set while a rank is lost, all is revoked, or the present call has failed.
    pub(crate) fn is_over(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_over)
    }

    /// Whether an operation waits for its turn.
    pub(crate) fn is_wanted(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// The next operation has this tag, if its call is the present one, which is returned.
    pub(crate) fn go_to(&self, tag: Tag) -> bool {
        let mut state = self.lock();
        let present = state.call == tag.call;
        if present {
            // What was given up before its turn had the number before, and not this one.
            state.number_cancelled();
            state.next = tag.operation;
        }
        present
    }

    /// Counts as waiting until the guard is dropped.
    pub(crate) fn want(&self) -> Wanted<'_> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        self.change(|_| ());
        Wanted(self)
    }

    /// Notes a failure of an operation, and what peers are told of it.
    pub(crate) fn failed(&self, tag: Tag, error: &CollectiveError, notice: Vec<u8>) {
        let mut state = self.lock();
        state.notices.put(notice);
        if state.call == tag.call {
            state.last_failure = Some(error.clone());
        }
    }

    /// A peer failed in a call: nothing more of it can work. What links to come are told of it.
    pub(crate) fn call_failed(&self, call: u64, error: &CollectiveError, notice: &[u8]) {
        let mut state = self.lock();
        if state.call == call {
            state.call_failed.get_or_insert_with(|| error.clone());
            state.notices.call = Some((call, notice.to_vec()));
        }
    }

    pub(crate) fn begin_call(&self, call: CallId) {
        self.change(|state| {
            state.call = call.0;
            state.next = 0;
            state.cancelled.clear();
            state.passed.clear();
            state.call_failed = None;
            state.last_failure = None;
            state.notices.forget_but(1);
        });
    }
}

#[derive(Debug)]
pub(crate) struct Wanted<'a>(&'a Signals);

impl Drop for Wanted<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}
