//! One operation under way: drives all links together until the schedule is done or something ends it.
//!
//! No task reads a link besides the operation: whoever runs it polls all links, so that a failure is seen on whichever link it
//! comes. What is not for the present step stays in its link, and between operations nobody takes what is for the next one.

mod ahead;
mod consent;
mod deadline;
mod elsewhere;
mod gone;
mod judge;
mod late;
mod needs;
mod parting;
mod place;
mod share;
mod stall;
mod transfer;

use std::collections::{BTreeMap, BTreeSet};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use kolo_transport::awake::Awake;
use kolo_transport::ids::{CallId, JobId, Rank};

use crate::cause::{Cause, Excuse};
use crate::engine::{Engine, LastWords, call_notice, element_size};
use crate::error::CollectiveError;
use crate::group::{GroupId, Saying};
use crate::lane::LaneError;
use crate::operation::{Operation, Tag};
use crate::signals::Signals;
use crate::stall::Stalls;
use consent::Consent;
use deadline::Stall;
pub(crate) use deadline::{MOST, TURN};
use elsewhere::Postponed;
use gone::Questions;
use parting::Parting;
use stall::Watch;

pub(crate) use place::InPlace;
pub(crate) use share::Mode;

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
    /// Begins to ask whether a peer is gone, who is waited for or not. Returns whether it can be asked.
    pub(crate) watch: &'a (dyn Fn(u32, bool) -> bool + Sync),
    /// A peer that is gone counts as lost, in all groups.
    pub(crate) lose: &'a (dyn Fn(u32, &str) + Sync),
    /// The other groups hear of a loss because of which this rank gives up.
    pub(crate) tell_elsewhere: &'a (dyn Fn(&CollectiveError) -> Vec<Saying> + Sync),
    pub(crate) id: GroupId,
}

/// One operation. Dropped before its end, it gives up and tells the peers.
// None of them says anything about another one.
#[allow(clippy::struct_excessive_bools)]
pub(crate) struct Run<'a> {
    engine: &'a mut Engine,
    signals: &'a Signals,
    stalls: &'a Stalls,
    connect: &'a (dyn Fn(u32) + Sync),
    ask_whether_gone: &'a (dyn Fn(u32, bool) -> bool + Sync),
    lose: &'a (dyn Fn(u32, &str) + Sync),
    tell_elsewhere: &'a (dyn Fn(&CollectiveError) -> Vec<Saying> + Sync),
    /// Peers that are gone, as was found out, and how. What they have sent is read first.
    found_gone: Vec<(u32, String)>,
    id: GroupId,
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
    watch: Watch,
    questions: Questions,
    /// For a rank without data: what the others ask for.
    learned: Option<Operation>,
    /// The deadline of this rank or of another one has passed.
    stall: Option<Stall>,
    /// A peer's deadline has passed.
    asked: bool,
    /// Late ranks that others miss.
    missed: BTreeSet<Rank>,
    /// Those that do not come because of others that are late, and how that is known.
    excused: BTreeMap<Rank, Excuse>,
    /// In the order in which their links ended.
    postponed: Vec<Postponed>,
    /// Something was put on links that may have been written to already.
    unsaid: bool,
    missing: Missing,
    /// A peer failed in the call, not only in this operation.
    ends_call: bool,
    /// Who has said why this operation is over.
    told_by: Option<u32>,
    finished: bool,
    mode: Mode,
    /// A thread waits, and not a task.
    blocking: bool,
    /// For an operation in shared memory.
    input: &'a [u8],
    result: &'a mut [u8],
    /// Where it works, if not in the engine's own buffer.
    in_place: Option<InPlace<'a>>,
    /// Until then this rank waits for the word of one that has left the operation.
    left_at: Option<Instant>,
    /// This rank has given up, and tells the others.
    parting: Option<Parting>,
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
        // This rank may have been in it already, without data.
        let mut asked = false;
        for link in &mut engine.links {
            (link.used, link.relinked, link.begun) = (false, false, false);
            link.search_again();
            asked |= link.stalled_in == Some(tag);
        }
        let consent = Consent::of(&request, engine.me, engine.world);
        let mut run = Self {
            engine,
            signals: place.signals,
            stalls: place.stalls,
            connect: place.connect,
            ask_whether_gone: place.watch,
            lose: place.lose,
            tell_elsewhere: place.tell_elsewhere,
            found_gone: Vec::new(),
            id: place.id,
            watch: Watch::new(started, place.stalls.after()),
            questions: Questions::new(started),
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
            stall: None,
            asked,
            missed: BTreeSet::new(),
            excused: BTreeMap::new(),
            postponed: Vec::new(),
            unsaid: false,
            missing: Missing::Unknown,
            ends_call: false,
            told_by: None,
            finished: false,
            mode: Mode::Links,
            blocking: false,
            input: &[],
            result: &mut [],
            in_place: None,
            left_at: None,
            parting: None,
            job: JobId(0),
        };
        run.enter_step();
        run.questions = Questions::new(started);
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
        (self.mode, self.blocking) = (Mode::Shared, blocking);
        (self.input, self.result) = (input, result);
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
            if self.parting.is_some() {
                // In the memory nothing is awaited any more, and links that come wake nobody there.
                let left = at.saturating_duration_since(Instant::now());
                std::thread::park_timeout(left.min(Duration::from_millis(1)));
            } else {
                self.engine.sleep_shared(at);
            }
            fired = Instant::now() >= at;
        }
    }

    /// When to poll again if nothing else happens.
    pub(crate) fn wake_at(&self) -> Instant {
        if let Some(parting) = &self.parting {
            return parting.next();
        }
        if self.mode == Mode::Shared && self.engine.must_poll() {
            return self.deadline.min(Instant::now() + Duration::from_millis(1));
        }
        let limit = self.deadline.min(self.awake.ticked() + TURN);
        let limit = self.stall.as_ref().map_or(limit, Stall::next);
        let limit = self.left_at.map_or(limit, |at| limit.min(at));
        let postponed = self.postponed.first().map(|postponed| postponed.until);
        [self.watch.next(), self.questions.next(), postponed]
            .into_iter()
            .flatten()
            .fold(limit, Instant::min)
    }

    /// Something has come.
    fn stir(&mut self) {
        self.watch.moved = true;
        self.questions.stir();
    }

    /// Goes on as far as it can. `fired` says that the time of [`Run::wake_at`] has come.
    pub(crate) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        fired: bool,
    ) -> Poll<Result<Option<Operation>, CollectiveError>> {
        if self.parting.is_some() {
            return self.part(cx);
        }
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
                if self.stall.is_some() {
                    // It ended well after all: peers to come need not hear of it.
                    self.signals.lock().operation_notice = None;
                }
                Poll::Ready(Ok(None))
            }
            Err(error) => {
                // The word of a peer that was revoked as well may be seen first.
                let revoked = self.signals.lock().lost.when_revoked();
                let error = revoked.unwrap_or(error);
                if let CollectiveError::Deadline { late, .. } = &error {
                    self.report_with_others(late);
                }
                let words = self.give_up(&error);
                let elsewhere = (self.tell_elsewhere)(&error);
                // Nobody else is told: it is about this operation, and a moment.
                let error = self.with_what_it_did(error);
                self.parting = Some(Parting::new(error, words, elsewhere));
                self.part(cx)
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
            self.judge_postponed(cx)?;
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
            self.judge_the_gone()?;
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
        let (arrivals, requests, gone, notices, unsaid) = {
            let mut state = self.signals.lock();
            state.register(cx);
            if let Some(error) = state.obstacle(self.tag) {
                return Err(error);
            }
            if state.is_nothing_new() {
                return Ok(());
            }
            let gone = std::mem::take(&mut state.gone);
            let requests = std::mem::take(&mut state.requests);
            let unsaid = std::mem::take(&mut state.unsaid);
            let arrivals = state.take_arrivals();
            (arrivals, requests, gone, state.notices(), unsaid)
        };
        if !unsaid.is_empty() {
            self.engine.notify_all(&unsaid);
            self.unsaid = true;
        }
        if !arrivals.is_empty() {
            self.questions.stir();
        }
        // All are taken in before any of them ends the operation.
        let mut failure = None;
        for arrival in arrivals {
            let peer = arrival.rank;
            let link = &self.engine.links[peer as usize];
            let replaces = link.is_up() && link.used || self.is_postponed(peer);
            // Begun for another operation, or for a peer that had asked for it: it may be the time of that which has passed.
            let is_old = !arrival.theirs && !link.begun;
            match self.engine.arrive(arrival, &notices) {
                Ok(()) if !replaces => {
                    self.repeat_words(peer);
                    self.tell_newcomer(peer);
                }
                Ok(()) if self.needs(peer) => {
                    failure = Some(CollectiveError::PeerLost {
                        rank: Rank(peer),
                        reason: "its link was replaced while it was in use".to_owned(),
                    });
                }
                Err(_) if is_old => self.missing = Missing::Unknown,
                // A link that has come all the same will do.
                Err(error) if self.needs(peer) && !self.engine.links[peer as usize].is_up() => {
                    failure = self.lack(peer, &error).err().or(failure);
                }
                Ok(()) | Err(_) => {}
            }
        }
        // After that: what is asked for may just have come.
        for peer in requests {
            if self.engine.may_begin_link(peer) {
                (self.connect)(peer);
            }
        }
        self.found_gone.extend(gone);
        failure.map_or(Ok(()), Err)
    }

    /// There is no link to a peer that this rank needs.
    fn lack(&mut self, peer: u32, error: &LaneError) -> Result<(), CollectiveError> {
        let unlinked = self.unlinked(peer, error);
        self.lack_peer(peer, unlinked)
    }

    /// What it means that there is no link to a peer.
    fn unlinked(&self, peer: u32, error: &LaneError) -> CollectiveError {
        let numbers = {
            let state = self.signals.lock();
            move |rank: u32| (Rank(rank), Rank(state.job_rank(rank)))
        };
        let me = self.engine.me;
        let ((me, own), dials) = (numbers(me), self.engine.dials(peer));
        let cause = Cause::unlinked(error, own, numbers(peer), dials);
        cause.into_own_error(me, CallId(self.tag.call), &self.request.to_string())
    }

    /// Starts making all links that the operation will use and that are this rank's to make.
    fn want_links(&mut self) -> Result<(), CollectiveError> {
        let Self {
            engine,
            connect,
            postponed,
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
            if link.connecting || postponed.iter().any(|one| one.is_of(peer)) {
                continue;
            }
            if dials {
                (link.connecting, link.begun) = (true, true);
                connect(peer);
            }
        }
        match gone.into_iter().find(|peer| self.needs(*peer)) {
            Some(peer) => self.lose_peer(peer),
            None => Ok(()),
        }
    }

    /// Whether an error is the loss of a rank that is gone, and not of its link.
    fn is_for_good(&self, error: &CollectiveError) -> bool {
        let CollectiveError::PeerLost { rank, .. } = error else {
            return false;
        };
        self.engine.links[rank.index()].is_over() || self.signals.lock().lost.has(rank.0)
    }

    /// Leaves the operation and tells every linked peer why, so that they leave it too.
    fn give_up(&mut self, error: &CollectiveError) -> LastWords {
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
            Mode::Shared => self.engine.leave_shared(self.result),
        }
        let mut cause = Cause::of(error, Rank(self.engine.me));
        if let Cause::Lost {
            rank,
            reason,
            for_good,
        } = &mut cause
            && self.is_for_good(error)
        {
            *for_good = true;
            self.signals.lock().lost.add(rank.0, reason);
        }
        if self.ends_call {
            // This rank takes part in nothing more of the call either; peers may be ahead of this operation.
            let notice = call_notice(self.engine.generation, self.tag.call, &cause);
            self.engine.notify_all(&notice);
            self.signals.call_failed(self.tag.call, error, &notice);
        }
        let notice = self.engine.tell(self.tag, &cause);
        let words = self.engine.last_words(cause.absent());
        self.signals.failed(self.tag, error, notice);
        for peer in self.engine.broken_links() {
            // It may wait for the link, and hears on it that this rank gave up.
            (self.connect)(peer);
        }
        if matches!(error, CollectiveError::Mismatch { .. }) {
            // Who asked for the other thing may wait for a link that this rank's schedule does not have.
            self.link_neighbours();
        }
        words
    }

    fn link_neighbours(&mut self) {
        for peer in self.engine.unlinked_neighbours() {
            (self.connect)(peer);
        }
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        self.end_questions();
        if self.parting.is_some() {
            self.engine.see_off();
        }
        if !self.finished {
            self.give_up(&CollectiveError::Aborted {
                reason: format!("{} was cancelled", self.request),
            });
            self.engine.see_off();
        }
    }
}
