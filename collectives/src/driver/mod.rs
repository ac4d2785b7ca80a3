//! One operation under way: drives all links together until the schedule is done or something ends it.
//!
//! No task reads a link besides the operation: whoever runs it polls all links, so that a failure is seen on whichever link it
//! comes. What is not for the present step stays in its link, and between operations nobody takes what is for the next one.

mod agreement;
pub(crate) mod engine;
mod frames;
mod place;
mod shared_memory;
mod waiting;

use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use kolo_transport::awake::Awake;
use kolo_transport::ids::{JobId, Rank};

use crate::cause::Cause;
use crate::error::CollectiveError;
use crate::group_id::GroupId;
use crate::header::{Data, HEADER, Header};
use crate::link::Present;
use crate::operation::{Operation, Tag};
use crate::rank_shared::signals::Signals;
use crate::stall::Stalls;
use crate::times::{LOOK, MOST_OF_TURN, TURN};
use crate::verdict::{Verdict, Watch};
use agreement::Agreement;
use engine::{Engine, Progress};

pub(crate) use place::InPlace;
pub(crate) use shared_memory::Mode;

/// How long an operation may take. All parts of the operation have the same limit.
#[derive(Debug)]
pub(crate) struct TimeLimit {
    started: Instant,
    /// It moves on by the time in which this rank stood still.
    pub(crate) deadline: Instant,
    awake: Awake,
}

impl TimeLimit {
    pub(crate) fn new(started: Instant, deadline: Instant) -> Self {
        Self {
            started,
            deadline,
            awake: Awake::new(started, MOST_OF_TURN),
        }
    }

    /// When this rank has a turn next.
    pub(crate) fn next_turn(&self) -> Instant {
        self.awake.ticked() + TURN
    }

    /// Time in which this rank stood still does not count.
    pub(crate) fn move_on(&mut self, now: Instant) {
        // Not more often: what wakes this rank next stays the same meanwhile.
        if now >= self.next_turn() {
            self.deadline += self.awake.stood_still(now);
        }
    }
}

/// Whether the operation has its links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Linked {
    All,
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
    pub(crate) job: JobId,
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
///
/// Its fields are many because they are all the state of an operation; what answers one question has a type of its own.
pub(crate) struct Driver<'a> {
    engine: &'a mut Engine,
    place: Place<'a>,
    request: Operation,
    tag: Tag,
    limit: &'a mut TimeLimit,
    step: usize,
    agreement: Agreement,
    /// When to say what, and to report.
    watch: Watch,
    /// Who is to blame.
    verdict: Verdict,
    /// Something was put on links that may have been written to already.
    unsaid: bool,
    linked: Linked,
    /// A peer failed in the call, not only in this operation.
    ends_call: bool,
    finished: bool,
    mode: Mode,
    in_memory: InMemory<'a>,
    /// Where it works, if not in the engine's own buffer.
    in_place: Option<InPlace<'a>>,
}

impl<'a> Driver<'a> {
    /// The engine has the schedule and the input.
    pub(crate) fn new(
        engine: &'a mut Engine,
        place: Place<'a>,
        request: Operation,
        tag: Tag,
        limit: &'a mut TimeLimit,
    ) -> Self {
        let me = Rank(engine.me);
        let mut verdict = Verdict::new(me, (tag, request), limit.started, place.patience);
        for (peer, link) in (0..).zip(&mut engine.links) {
            link.present = Present::default();
            link.look_again();
            if link.said.stalled_in == Some(tag) {
                // This rank may have been in it already, without data.
                verdict.is_here(Rank(peer));
            }
        }
        let agreement = Agreement::on(&request, engine.me, engine.world);
        let mut run = Self {
            engine,
            watch: Watch::new(limit.started, place.stalls.after()),
            place,
            verdict,
            agreement,
            request,
            tag,
            limit,
            step: 0,
            unsaid: false,
            linked: Linked::Unknown,
            ends_call: false,
            finished: false,
            mode: Mode::Links,
            in_memory: InMemory::default(),
            in_place: None,
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
        self.agreement.await_receiver();
        self
    }

    /// Agrees on whether memory is shared.
    pub(crate) fn forming(mut self) -> Self {
        self.mode = Mode::Form;
        self.agreement.settle();
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
        self.agreement.settle();
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
            return self.limit.deadline.min(Instant::now() + LOOK);
        }
        let limit = match self.mode {
            // The flags say who is late: there is no roll call.
            Mode::Shared => self.verdict.next_suspicion(self.limit.deadline),
            Mode::Links | Mode::Form => self.verdict.next(self.limit.deadline),
        };
        let limit = if self.verdict.is_calling_the_roll() {
            limit
        } else {
            limit.min(self.limit.next_turn())
        };
        [self.watch.next(), self.in_memory.left_at]
            .into_iter()
            .flatten()
            .fold(limit, Instant::min)
    }

    /// Goes on as far as it can. `fired` says that the time of [`Driver::wake_at`] has come.
    pub(crate) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        fired: bool,
    ) -> Poll<Result<Option<Operation>, CollectiveError>> {
        match self.advance(cx, fired) {
            Ok(false) => Poll::Pending,
            Ok(true) if self.agreement.learned.is_some() => {
                // Not a failure: this rank comes back with what the others ask for.
                self.finished = true;
                self.engine.abandon();
                Poll::Ready(Ok(self.agreement.learned))
            }
            Ok(true) => {
                self.finished = true;
                if self.mode != Mode::Form {
                    self.engine.passes(self.tag, self.request);
                }
                if self.verdict.is_calling_the_roll() {
                    // It ended well after all: peers to come need not hear of it.
                    self.place.signals.lock().notices.take_back();
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
                self.limit.move_on(now);
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
            if self.linked != Linked::All {
                self.want_links()?;
            }
            if !self.agreement.is_complete() {
                let asks = self.as_data();
                self.agreement.give(&mut self.engine.links, asks);
            }
            let has_learned = self.agreement.learned.is_some();
            if has_learned
                || self.step == self.engine.schedule.len() && self.agreement.is_complete()
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
            if self.agreement.learned.is_some() {
                return Ok(true);
            }
            if self.agreement.can_go_on() {
                continue;
            }
            if self.step < self.engine.schedule.len() && self.transfers_done() {
                let Engine {
                    schedule,
                    work,
                    world,
                    ..
                } = &mut *self.engine;
                let step = schedule.step(self.step);
                place::act(step, &self.request, *world, &mut self.in_place, work);
                self.step += 1;
                self.enter_step();
                continue;
            }
            if !self.check_time(std::mem::take(&mut fired))?
                && !self.look_ahead(cx)?
                && !std::mem::take(&mut self.unsaid)
                && self.linked != Linked::Unknown
            {
                return Ok(false);
            }
        }
    }

    fn transfers_done(&self) -> bool {
        self.engine.progress.iter().all(|progress| progress.done)
    }

    fn enter_step(&mut self) {
        let Engine {
            schedule, progress, ..
        } = &mut *self.engine;
        progress.clear();
        progress.extend(schedule.step(self.step).iter().map(|action| Progress {
            bytes: 0,
            done: action.transfer().is_none(),
        }));
        self.keep();
        self.watch.stir();
    }

    /// Keeps what the present step may overwrite in the caller's buffer.
    fn keep(&mut self) {
        if let Some(place) = &mut self.in_place {
            let Engine { schedule, work, .. } = &mut *self.engine;
            place.keep(work, schedule.step(self.step), &self.request);
        }
    }

    /// What this rank asks for, in a frame without elements.
    fn as_data(&self) -> Data {
        Data {
            generation: self.engine.generation,
            tag: self.tag,
            operation: self.request,
            step: 0,
            offset: 0,
            length: 0,
        }
    }

    /// The frame that says what this rank asks for.
    fn ask_frame(&self) -> [u8; HEADER] {
        Header::Ask(self.as_data()).encode()
    }

    /// Tells a peer that has no data what is asked for.
    fn peer_has_joined(&mut self, peer: u32) {
        let frame = self.ask_frame();
        let link = &mut self.engine.links[peer as usize];
        link.said.joined_in = Some(self.tag);
        if !self.request.is_join() {
            link.notify(&frame);
        }
    }

    /// Answers peers that said that they have no data while this rank had none either, and knew nothing to tell them.
    fn answer_joined(&mut self) {
        if self.request.is_join() {
            return;
        }
        let frame = self.ask_frame();
        for link in &mut self.engine.links {
            if link.said.joined_in == Some(self.tag) {
                link.notify(&frame);
            }
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
            // Nothing works any more on this rank.
            self.place.signals.lock().lost.add(rank.0, reason);
            self.ends_call = true;
        }
        if self.ends_call {
            // This rank takes part in nothing more of the call either; peers may be ahead of this operation.
            let notice = cause.call_notice(self.engine.generation, self.tag.call);
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
        self.engine.flush_notices();
    }
}

impl Drop for Driver<'_> {
    fn drop(&mut self) {
        if !self.finished {
            self.give_up(&CollectiveError::Aborted {
                reason: format!("{} was cancelled", self.request),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_stood_still_has_its_time_also_if_that_was_before_its_first_turn() {
        let second = Duration::from_secs(1);
        // The operation was asked for ten seconds ago, and begins only now.
        let started = Instant::now().checked_sub(10 * second).unwrap();
        let mut limit = TimeLimit::new(started, started + 8 * second);
        limit.move_on(started + 10 * second);
        let credit = (10 * second).saturating_sub(MOST_OF_TURN);
        assert_eq!(limit.deadline, started + 8 * second + credit);
        // It has turns again, and what counted once stays.
        for turn in 11..30 {
            limit.move_on(started + turn * second);
        }
        assert_eq!(limit.deadline, started + 16 * second);
    }
}
