//! One operation under way: drives all links together until the schedule is done or something ends it.
//!
//! No task reads a link besides the operation: whoever runs it polls all links, so that a failure is seen on whichever link it
//! comes. What is not for the present step stays in its link, and between operations nobody takes what is for the next one.

mod ahead;
mod consent;
mod frames;
mod needs;
mod place;
mod share;
mod transfer;
mod waiting;

use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use kolo_transport::awake::Awake;
use kolo_transport::ids::{CallId, JobId, Rank};

use crate::cause::Cause;
use crate::engine::{Engine, call_notice, element_size};
use crate::error::CollectiveError;
use crate::group::GroupId;
use crate::lane::LaneError;
use crate::operation::{Operation, Tag};
use crate::signals::Signals;
use crate::stall::Stalls;
use crate::verdict::{Event, Verdict, Watch};
use consent::Consent;

pub(crate) use place::InPlace;
pub(crate) use share::Mode;
pub(crate) use waiting::{MOST, TURN};

/// Whether the operation lacks a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Missing {
    No,
    /// One is being made.
    Awaited,
    /// One may have to be made.
    Unknown,
}

/// Where an operation runs.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) signals: &'a Signals,
    pub(crate) stalls: &'a Stalls,
    /// Starts making a link, or asks the peer to, whose it is to make.
    pub(crate) connect: &'a (dyn Fn(u32) + Sync),
    pub(crate) id: GroupId,
    /// How long after the end of a link the word of the authority may take to come.
    pub(crate) patience: Duration,
}

/// An operation that has begun in shared memory.
#[derive(Default)]
struct InMemory<'a> {
    /// A thread waits, and not a task.
    blocking: bool,
    /// What the operation began with.
    input: &'a [u8],
    result: &'a mut [u8],
    /// Until then this rank waits for the word of a rank that has left the operation.
    left_at: Option<Instant>,
}

/// One operation. Dropped before its end, it gives up and tells the peers.
pub(crate) struct Run<'a> {
    engine: &'a mut Engine,
    place: Place<'a>,
    request: Operation,
    tag: Tag,
    size: usize,
    started: Instant,
    /// It moves on by the time in which this rank stood still.
    deadline: Instant,
    awake: Awake,
    step: usize,
    /// The word of the others that they ask for the same, while it is not complete.
    consent: Option<Consent>,
    /// The rounds of it in which this rank has given its own.
    words: u64,
    /// When to say what, and to report.
    watch: Watch,
    /// What others know of the ranks that do not come.
    missing_ranks: Vec<(u32, String)>,
    /// For a rank without data: what the others ask for.
    learned: Option<Operation>,
    /// Who is to blame.
    verdict: Verdict,
    /// Something was put on links that may have been written to already.
    unsaid: bool,
    missing: Missing,
    /// A peer failed in the call, not only in this operation.
    ends_call: bool,
    finished: bool,
    mode: Mode,
    in_memory: InMemory<'a>,
    /// Where it works, if not in the engine's own buffer.
    in_place: Option<InPlace<'a>>,
    job: JobId,
}

impl<'a> Run<'a> {
    /// The engine has the schedule and the input.
    pub(crate) fn new(
        engine: &'a mut Engine,
        place: Place<'a>,
        request: Operation,
        tag: Tag,
        (started, deadline): (Instant, Instant),
    ) -> Self {
        let me = Rank(engine.me);
        let mut verdict = Verdict::new(me, (tag, request), started, place.patience);
        for (peer, link) in (0..).zip(&mut engine.links) {
            (link.used, link.relinked, link.begun) = (false, false, false);
            link.search_again();
            if link.stalled_in == Some(tag) {
                // This rank may have been in it already, without data.
                verdict.is_here(Rank(peer));
            }
        }
        let consent = Consent::of(&request, engine.me, engine.world);
        let mut run = Self {
            engine,
            watch: Watch::new(started, place.stalls.after()),
            missing_ranks: Vec::new(),
            place,
            verdict,
            consent,
            words: 0,
            learned: None,
            request,
            tag,
            size: element_size(&request),
            started,
            deadline,
            awake: Awake::new(Instant::now(), MOST),
            step: 0,
            unsaid: false,
            missing: Missing::Unknown,
            ends_call: false,
            finished: false,
            mode: Mode::Links,
            in_memory: InMemory::default(),
            in_place: None,
            job: JobId(0),
        };
        run.enter_step();
        run.answer_joined();
        run
    }

    /// Works in a buffer of the caller's.
    pub(crate) fn in_place(mut self, place: InPlace<'a>) -> Self {
        self.in_place = Some(place);
        self.keep();
        self
    }

    /// Is not done before the receiver has [taken](Engine::give_word) what is sent.
    pub(crate) fn until_taken(mut self) -> Self {
        self.consent = Some(Consent::of_receiver());
        self
    }

    /// Agrees on whether memory is shared.
    pub(crate) fn forming(mut self, job: JobId) -> Self {
        (self.mode, self.job, self.consent) = (Mode::Form, job, None);
        self
    }

    /// Waits for an operation that has begun in shared memory.
    pub(crate) fn shared_memory(
        mut self,
        blocking: bool,
        input: &'a [u8],
        result: &'a mut [u8],
    ) -> Self {
        self.mode = Mode::Shared;
        self.in_memory = InMemory {
            blocking,
            input,
            result,
            left_at: None,
        };
        // The flags are everybody's word.
        self.consent = None;
        self
    }

    /// Runs an operation in shared memory to its end on this thread, which sleeps in the memory.
    pub(crate) fn wait(mut self) -> Result<Option<Operation>, CollectiveError> {
        let waker = self.engine.shared_waker();
        let mut cx = Context::from_waker(&waker);
        let mut fired = false;
        loop {
            if let Poll::Ready(result) = self.poll(&mut cx, fired) {
                return result;
            }
            let at = self.wake_at();
            self.engine.sleep_shared(at);
            fired = Instant::now() >= at;
        }
    }

    /// When to poll again if nothing else happens.
    pub(crate) fn wake_at(&self) -> Instant {
        if self.mode == Mode::Shared && self.engine.must_poll() {
            return self.deadline.min(Instant::now() + Duration::from_millis(1));
        }
        let limit = match self.mode {
            // The flags say who is late: there is no roll call.
            Mode::Shared => self.verdict.next_suspicion(self.deadline),
            Mode::Links | Mode::Form => self.verdict.next(self.deadline),
        };
        let limit = if self.verdict.is_calling_the_roll() {
            limit
        } else {
            limit.min(self.awake.ticked() + TURN)
        };
        [self.watch.next(), self.in_memory.left_at]
            .into_iter()
            .flatten()
            .fold(limit, Instant::min)
    }

    /// Goes on as far as it can. `fired` says that the time of [`Run::wake_at`] has come.
    pub(crate) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        fired: bool,
    ) -> Poll<Result<Option<Operation>, CollectiveError>> {
        match self.advance(cx, fired) {
            Ok(false) => Poll::Pending,
            Ok(true) if self.learned.is_some() => {
                // Not a failure: this rank comes back with what the others ask for.
                self.finished = true;
                self.engine.abandon();
                Poll::Ready(Ok(self.learned))
            }
            Ok(true) => {
                self.finished = true;
                if self.mode != Mode::Form {
                    self.engine.passes(self.tag, self.request);
                }
                if self.verdict.is_calling_the_roll() {
                    // It ended well after all: peers to come need not hear of it.
                    self.place.signals.lock().operation_notice = None;
                }
                Poll::Ready(Ok(None))
            }
            Err(error) => {
                // The word of a peer that was revoked as well may be seen first.
                let revoked = self.place.signals.lock().lost.when_revoked();
                let error = revoked.unwrap_or(error);
                if let CollectiveError::Deadline { late, .. } = &error {
                    self.report_before_the_end(late);
                }
                self.give_up(&error);
                Poll::Ready(Err(error))
            }
        }
    }

    fn advance(&mut self, cx: &mut Context<'_>, mut fired: bool) -> Result<bool, CollectiveError> {
        match self.mode {
            Mode::Links => {}
            Mode::Form | Mode::Shared => {
                let now = Instant::now();
                self.move_deadline(now);
                self.look(now);
                let advanced = match self.mode {
                    Mode::Form => self.advance_form(cx),
                    _ => self.advance_shared(cx),
                };
                if std::mem::take(&mut self.unsaid) {
                    // Nothing else is sent here. What does not go now has asked to be woken.
                    let _later = self.engine.poll_flush(cx);
                }
                return advanced;
            }
        }
        self.take_signals(cx)?;
        loop {
            if self.missing != Missing::No {
                self.want_links()?;
            }
            self.give_consent();
            if self.learned.is_some()
                || self.step == self.engine.schedule.len() && self.consent.is_none()
            {
                // This rank's last word may not be with the others yet.
                if self.engine.has_backlog() {
                    self.engine.flush_now();
                }
                return Ok(true);
            }
            for peer in 0..self.engine.world {
                if peer != self.engine.me && self.engine.links[peer as usize].is_up() {
                    self.write(peer, cx);
                    self.read(peer, cx)?;
                }
            }
            if self.learned.is_some() {
                return Ok(true);
            }
            if self.consent.as_ref().is_some_and(Consent::can_go_on) {
                continue;
            }
            if self.step < self.engine.schedule.len() && self.transfers_done() {
                self.do_local_actions();
                self.step += 1;
                self.enter_step();
                continue;
            }
            if !self.check_time(std::mem::take(&mut fired))?
                && !self.look_ahead(cx)?
                && !std::mem::take(&mut self.unsaid)
                && self.missing != Missing::Unknown
            {
                return Ok(false);
            }
        }
    }

    fn take_signals(&mut self, cx: &Context<'_>) -> Result<(), CollectiveError> {
        let (arrivals, requests, notices) = {
            let mut state = self.place.signals.lock();
            state.register(cx);
            if let Some(error) = state.obstacle(self.tag) {
                return self.verdict.hear(Event::Word(error));
            }
            if state.is_nothing_new() {
                return Ok(());
            }
            let requests = std::mem::take(&mut state.requests);
            (state.take_arrivals(), requests, state.notices())
        };
        if !arrivals.is_empty() {
            self.watch.stir();
        }
        // All are taken in before any of them ends the operation.
        let mut failure = None;
        for arrival in arrivals {
            let peer = arrival.rank;
            let link = &self.engine.links[peer as usize];
            let replaces = link.is_up() && link.used;
            // Begun for another operation, or for a peer that had asked for it: it may be the time of that which has passed.
            let is_old = !arrival.theirs && !link.begun;
            match self.engine.arrive(arrival, &notices) {
                Ok(()) => {
                    let made = Event::LinkMade {
                        rank: Rank(peer),
                        replaces: replaces && self.needs(peer),
                    };
                    match self.verdict.hear(made) {
                        Ok(()) if !replaces => {
                            self.repeat_words(peer);
                            self.tell_newcomer(peer);
                        }
                        Ok(()) => {}
                        Err(error) => failure = Some(error),
                    }
                }
                Err(_) if is_old => self.missing = Missing::Unknown,
                // A link that has come all the same will do.
                Err(error) if self.needs(peer) && !self.engine.links[peer as usize].is_up() => {
                    failure = self.lack(peer, &error).err().or(failure);
                }
                Err(_) => {}
            }
        }
        // After that: what is asked for may just have come.
        for peer in requests {
            if self.engine.may_begin_link(peer) {
                (self.place.connect)(peer);
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// There is no link to a peer that this rank needs.
    fn lack(&mut self, peer: u32, error: &LaneError) -> Result<(), CollectiveError> {
        let numbers = {
            let state = self.place.signals.lock();
            move |rank: u32| (Rank(rank), Rank(state.job_rank(rank)))
        };
        let me = self.engine.me;
        let ((me, own), peer, dials) = (numbers(me), numbers(peer), self.engine.dials(peer));
        let cause = Cause::unlinked(error, own, peer, dials);
        let error = cause.into_own_error(me, CallId(self.tag.call), &self.request.to_string());
        self.verdict.hear(Event::NoLink {
            rank: peer.0,
            at: Instant::now(),
            error,
        })
    }

    /// The link to a peer that this rank needs has ended.
    fn lack_link(&mut self, peer: u32) -> Result<(), CollectiveError> {
        if self.verdict.suspects(Rank(peer)) {
            return Ok(());
        }
        let link = &self.engine.links[peer as usize];
        let (reason, at) = match &link.ended {
            Some(ended) => (ended.reason.as_str(), ended.at),
            None => ("its link ended", Instant::now()),
        };
        let state = self.place.signals.lock();
        let host = state
            .host_of(peer)
            .map_or_else(String::new, |host| format!("on host {host}: "));
        let reason = if self.place.patience.is_zero() {
            format!("{host}{reason}")
        } else {
            format!(
                "link lost to rank {}: {host}{reason}; nothing else was heard of the rank's end within {:.1} s",
                state.job_rank(peer),
                self.place.patience.as_secs_f64()
            )
        };
        drop(state);
        self.verdict.hear(Event::LinkEnded {
            rank: Rank(peer),
            at,
            reason,
            is_used: link.used,
        })
    }

    /// Starts making all links that the operation will use and that are this rank's to make.
    fn want_links(&mut self) -> Result<(), CollectiveError> {
        let Self {
            engine,
            place,
            verdict,
            ..
        } = self;
        self.missing = Missing::No;
        // A peer that has all that it needs from this step may be gone.
        let mut gone = Vec::new();
        let consenting = self
            .consent
            .iter()
            .flat_map(|consent| consent.peers(engine.me, engine.world));
        for peer in engine.schedule.peers_from(self.step).chain(consenting) {
            let dials = engine.dials(peer);
            let link = &mut engine.links[peer as usize];
            if link.is_up() {
                continue;
            }
            if !link.connecting && link.is_over() {
                gone.push(peer);
                continue;
            }
            self.missing = Missing::Awaited;
            if dials && !link.connecting && !verdict.suspects(Rank(peer)) {
                (link.connecting, link.begun) = (true, true);
                (place.connect)(peer);
            }
        }
        match gone.into_iter().find(|peer| self.needs(*peer)) {
            Some(peer) => self.lack_link(peer),
            None => Ok(()),
        }
    }

    /// Leaves the operation and tells every linked peer why, so that they leave it too.
    fn give_up(&mut self, error: &CollectiveError) {
        self.finished = true;
        self.engine.previous = None;
        tracing::debug!(rank = self.engine.me, operation = %self.request, tag = %self.tag, %error, "gave up");
        match &mut self.in_place {
            None => self.engine.abandon(),
            Some(place) => {
                self.engine.abandon_with(place.bytes());
                place.restore(&self.engine.work);
            }
        }
        match self.mode {
            Mode::Links => {}
            Mode::Form => self.give_up_form(),
            Mode::Shared => self.engine.leave_shared(self.in_memory.result),
        }
        let cause = Cause::of(error, Rank(self.engine.me));
        if let CollectiveError::PeerLost { rank, reason } = error
            && self.engine.links[rank.index()].is_over()
        {
            // Nothing that needs the rank works any more.
            self.place.signals.lock().lost.add(rank.0, reason);
        }
        if self.ends_call {
            // This rank takes part in nothing more of the call either; peers may be ahead of this operation.
            let notice = call_notice(self.engine.generation, self.tag.call, &cause);
            self.engine.notify_all(&notice);
            self.place
                .signals
                .call_failed(self.tag.call, error, &notice);
        }
        let notice = self.engine.tell(self.tag, &cause);
        self.place.signals.failed(self.tag, error, notice);
        for peer in self.engine.broken_links() {
            // It may wait for the link, and hears on it that this rank gave up.
            (self.place.connect)(peer);
        }
        if matches!(error, CollectiveError::Mismatch { .. }) {
            // Who asked for the other thing may wait for a link that this rank's schedule does not have.
            self.link_neighbours();
        }
        // What does not go now is sent by whoever attends to the links.
        self.engine.flush_now();
    }

    fn link_neighbours(&mut self) {
        for peer in self.engine.unlinked_neighbours() {
            (self.place.connect)(peer);
        }
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        if !self.finished {
            self.give_up(&CollectiveError::Aborted {
                reason: format!("{} was cancelled", self.request),
            });
        }
    }
}
