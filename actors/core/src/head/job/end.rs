//! The end of a job: undo on every node what was done there.

use std::fmt::Write as _;
use std::time::Duration;

use kolo_wire::span::Span;
use kolo_wire::{
    Followers, JobEvent, JobState, NodeRequest, RankFailure, Refusal, RefusalKind, SubmitFrame,
    WorkerState,
};

use super::messages::{Action, Event};
use super::parts::{Hold, Part};
use super::seat::Seat;
use super::{Base, Phase, Rendezvous};

/// Lines of a dead worker's output that are kept.
pub(super) const MAX_TAIL: usize = 200;
/// Bytes of a dead worker's output that are kept.
pub(super) const MAX_TAIL_BYTES: usize = 256 << 10;
/// Longest reason of a failure, as a node tells it, in bytes.
const MAX_CAUSE: usize = 4 << 10;
/// Longest reason of a job's end, in bytes: a list of all jobs has one of each, and is one frame.
pub(in crate::head) const MAX_REASON: usize = 1 << 10;
/// Longest message to a driver, in bytes. With a failure beside it, it fits into a frame.
const MAX_MESSAGE: usize = 1 << 20;
/// How many culprits a message lists.
const LISTED: usize = 16;

/// With what the end begins where workers run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Manner {
    /// A notice, or `SIGTERM`.
    Careful,
    /// `SIGINT`.
    Interrupt,
    /// `SIGKILL`.
    Kill,
}

/// Why and how the job ends.
#[derive(Debug)]
pub(super) struct Ending {
    state: JobState,
    refusal: Option<Refusal>,
    pub(super) reason: String,
    /// Workers have ended it. Which failed first may be known better when all have ended.
    blame: Option<Blame>,
    pub(super) manner: Manner,
    /// The driver was told.
    pub(super) is_told: bool,
}

/// What stands before the first cause in the words for an end.
#[derive(Debug)]
struct Blame {
    message: String,
    /// Nothing if the reason has no first cause.
    reason: Option<String>,
}

impl Ending {
    pub(super) fn new(state: JobState, refusal: Option<Refusal>, reason: String) -> Self {
        Self {
            state,
            refusal,
            reason,
            blame: None,
            manner: Manner::Careful,
            is_told: false,
        }
    }

    pub(super) fn success(reason: &str) -> Self {
        Self::new(JobState::Succeeded, None, reason.to_owned())
    }

    /// A failure for which workers are blamed. The first cause follows these words in the message, and those in the reason.
    pub(super) fn blame(self, message: String, reason: Option<String>) -> Self {
        Self {
            blame: Some(Blame { message, reason }),
            ..self
        }
    }
}

impl Base {
    /// Something has happened that is the same for all jobs. What is left has no meaning for any.
    pub(super) fn hear(&mut self, event: Event) {
        match event {
            Event::DriverGone => self.stop("its driver is gone".to_owned(), false),
            Event::Stop { reason } => self.stop(reason, false),
            Event::Driver(frame) => self.driver_says(frame),
            Event::Placed { .. } => self.note("nodes were found that nobody asked for".to_owned()),
            Event::Rendezvous(_) => {
                self.note("a rendezvous was opened that nobody asked for".to_owned());
            }
            _ => {}
        }
    }

    fn driver_says(&mut self, frame: SubmitFrame) {
        match frame {
            SubmitFrame::Stop => self.stop("its driver has ended it".to_owned(), true),
            SubmitFrame::Overran { limit_ms } => {
                let limit = Span(Duration::from_millis(limit_ms));
                let reason = format!("it has run for {limit}, which is its --timeout");
                self.stop(reason, true);
            }
            SubmitFrame::Interrupt => {
                let manner = if self.is_installed() {
                    Manner::Interrupt
                } else {
                    Manner::Careful
                };
                self.stop_by(manner, "its driver was interrupted".to_owned(), true);
            }
            SubmitFrame::Signal(signal) => self.signal(signal),
            SubmitFrame::Kill => self.kill(),
            SubmitFrame::Done => self.done(),
            SubmitFrame::Hosts(_) => {
                self.note("ignored: a list of hosts for a job that never changes".to_owned());
            }
            SubmitFrame::ProgramReady
            | SubmitFrame::Unreachable { .. }
            | SubmitFrame::Holding { .. } => {}
        }
    }

    /// A worker has failed while the job ends because of others. The failure may have come before theirs. A worker that was stopped
    /// has failed only if the worker says so itself.
    pub(super) fn fell_too(&mut self, failure: RankFailure, expected: bool) {
        if let Some(failure) = own_failure(failure, expected).filter(|_| self.is_blamed()) {
            self.fall.add(self.now, failure);
        }
    }

    fn is_blamed(&self) -> bool {
        let ending = self.ending.as_ref();
        ending.is_some_and(|ending| ending.blame.is_some())
    }

    /// The failure that has ended the job, or will; of an elastic job only once it ends.
    fn first_failure(&self) -> Option<&RankFailure> {
        let cause = self.fall.cause();
        cause.filter(|_| !self.is_elastic() || self.is_blamed())
    }

    /// Workers that ran and were ended with the job. What a node has ended and not told of one by one is gone, too.
    fn stopped(&self) -> u32 {
        let cause = self.first_failure().map(|failure| failure.rank);
        let was_stopped = |seat: &&Seat| {
            let told = seat.exit.is_some();
            Some(seat.member.rank) != cause && (seat.stopped || (!told && seat.pid > 0))
        };
        self.seats.values().filter(was_stopped).count() as u32
    }

    pub(super) fn fail(&mut self, kind: RefusalKind, message: String) {
        let reason = message.clone();
        let refusal = Some(Refusal::new(kind, message));
        self.end(Ending::new(JobState::Failed, refusal, reason));
    }

    /// Ends the job if its program can't run on some of the hosts. All have answered.
    pub(super) fn check_installed(&mut self) {
        let mut problems: Vec<(&Refusal, Vec<String>)> = Vec::new();
        for part in self.parts.iter() {
            let Some(problem) = &part.problem else {
                continue;
            };
            let at = part.site.hostname.clone();
            match problems.iter_mut().find(|(known, _)| *known == problem) {
                Some((_, hosts)) => hosts.push(at),
                None => problems.push((problem, vec![at])),
            }
        }
        let Some((first, _)) = problems.first() else {
            return;
        };
        let kind = first.kind;
        let texts: Vec<String> = problems
            .iter()
            .map(|(problem, hosts)| format!("{} (on {})", problem.message, listed(hosts)))
            .collect();
        self.fail(kind, texts.join("; "));
    }

    /// Ends the job because its driver has what it wanted. With a worker lost, or before the group was whole, that is
    /// a stop like any other.
    fn done(&mut self) {
        let reason = "its driver has ended it";
        if self.phase < Phase::Up || self.first_failure().is_some() {
            return self.stop(reason.to_owned(), true);
        }
        self.end(Ending::success(reason));
    }

    /// Ends the job because someone asks for it.
    pub(super) fn stop(&mut self, reason: String, own: bool) {
        self.stop_by(Manner::Careful, reason, own);
    }

    fn stop_by(&mut self, manner: Manner, reason: String, own: bool) {
        // A driver that ends its own healthy job knows why.
        let refusal = (!own || self.phase < Phase::Up).then(|| {
            Refusal::new(
                RefusalKind::Stopped,
                format!("the job was stopped: {reason}"),
            )
        });
        let reason = match self.first_failure() {
            Some(failure) => format!("{reason}; before that, {}", first_line(failure)),
            None => reason,
        };
        self.end(Ending {
            manner,
            ..Ending::new(JobState::Stopped, refusal, reason)
        });
    }

    /// Ends what is left without any grace.
    fn kill(&mut self) {
        let is_stopping = |part: &Part| part.hold == Hold::Undoing && part.started;
        let parts = (0..).zip(self.parts.iter());
        let stopping = parts.filter(|(_, part)| is_stopping(part));
        let stopping: Vec<usize> = stopping.map(|(part, _)| part).collect();
        match &mut self.ending {
            Some(ending) if ending.manner == Manner::Kill => return,
            Some(ending) => ending.manner = Manner::Kill,
            None => {
                let reason = "its driver has ended it at once".to_owned();
                self.stop_by(Manner::Kill, reason, true);
            }
        }
        for part in stopping {
            self.deliver(part, NodeRequest::Kill { job: self.id });
        }
    }

    /// Begins the end, unless it has begun.
    pub(super) fn end(&mut self, ending: Ending) {
        if self.ending.is_some() {
            return;
        }
        self.ending = Some(ending);
        self.word_end();
        let reason = self.ending.as_ref().map(|ending| ending.reason.clone());
        self.note(format!("the job ends: {}", reason.unwrap_or_default()));
        for seat in self.seats.values_mut() {
            if seat.exit.is_none() && self.phase >= Phase::Boot {
                seat.state = WorkerState::Stopping;
            }
        }
        for part in 0..self.parts.len() {
            // A node that has not answered yet is released when it has: a release must not overtake a reserve.
            if matches!(self.parts[part].hold, Hold::Reserved | Hold::Running) {
                self.undo(part);
            }
        }
    }

    /// Says of the end which failure came first, as far as that is known now.
    fn word_end(&mut self) {
        let Some(ending) = &mut self.ending else {
            return;
        };
        if let (Some(blame), Some(cause)) = (&ending.blame, self.fall.cause()) {
            if let Some(refusal) = &mut ending.refusal {
                refusal.message = format!("{}{cause}", blame.message);
            }
            if let Some(before) = &blame.reason {
                ending.reason = format!("{before}{}", first_line(cause));
            }
        }
        // What a worker said at last is in the message and the failure.
        let line = ending.reason.find('\n').unwrap_or(ending.reason.len());
        cut(&mut ending.reason, line.min(MAX_REASON));
        if let Some(refusal) = &mut ending.refusal {
            cut(&mut refusal.message, MAX_MESSAGE);
        }
    }

    pub(super) fn is_finished(&self) -> bool {
        self.ending.as_ref().is_some_and(|ending| ending.is_told)
    }

    /// Once nothing is under way any more, how the job has ended, and why.
    pub(super) fn finish(&mut self) -> Option<(JobState, String)> {
        let is_over = !self.is_finished()
            && self.rendezvous != Rendezvous::Opening
            && self.parts.iter().all(|part| part.hold.is_over());
        self.ending.as_ref().filter(|_| is_over)?;
        self.word_end();
        let ending = self.ending.as_mut()?;
        ending.is_told = true;
        self.state = ending.state;
        for seat in self.seats.values_mut() {
            seat.state = WorkerState::Exited;
        }
        Some((ending.state, ending.reason.clone()))
    }

    /// Tells the end, which nothing follows.
    pub(super) fn tell_end(&mut self) {
        let Some(ending) = &self.ending else {
            return;
        };
        let (state, refusal) = (ending.state, ending.refusal.clone());
        if matches!(self.rendezvous, Rendezvous::Open(_)) {
            self.actions.push(Action::CloseRendezvous);
        }
        let failure = self.first_failure().cloned();
        self.actions.push(Action::Tell(JobEvent::Ended {
            state,
            refusal,
            followers: match failure {
                Some(_) => self.fall.followers(),
                None => Followers::default(),
            },
            failure,
            stopped: Some(self.stopped()),
        }));
        self.actions.push(Action::Finished);
    }
}

/// The failure of a worker that has failed by itself. A worker that was stopped has only if the worker says so, and then the stop is
/// not why.
pub(super) fn own_failure(mut failure: RankFailure, expected: bool) -> Option<RankFailure> {
    if failure.exit.is_success() || (expected && failure.error().is_none()) {
        return None;
    }
    if expected {
        failure.reason = None;
    }
    Some(failure)
}

/// What a node tells of a worker's end, without what is too long of it.
pub(super) fn bounded(mut failure: RankFailure) -> RankFailure {
    if let Some(reason) = &mut failure.reason {
        cut(reason, MAX_CAUSE);
    }
    cut_tail(&mut failure.stderr_tail);
    let account = failure.account.as_mut();
    if let Some(error) = account.and_then(|account| account.error.as_mut()) {
        cut(&mut error.message, MAX_CAUSE);
        if let Some(place) = &mut error.place {
            cut(place, MAX_CAUSE);
        }
        cut_tail(&mut error.callstack);
    }
    failure
}

/// Takes off what is over `limit` bytes, and no half of a character.
pub(super) fn cut(text: &mut String, limit: usize) {
    let end = (0..=limit.min(text.len()))
        .rev()
        .find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or(0));
}

/// Keeps the last lines, and of a line that is too long by itself the start.
fn cut_tail(tail: &mut Vec<String>) {
    let mut left = MAX_TAIL_BYTES;
    let mut kept = 0;
    for line in tail.iter_mut().rev().take(MAX_TAIL) {
        if kept == 0 {
            cut(line, left);
        }
        let Some(rest) = left.checked_sub(line.len()) else {
            break;
        };
        left = rest;
        kept += 1;
    }
    tail.drain(..tail.len() - kept);
}

fn first_line(failure: &RankFailure) -> String {
    let text = failure.to_string();
    text.lines().next().unwrap_or_default().to_owned()
}

pub(super) fn listed(names: &[String]) -> String {
    let mut text = names[..names.len().min(LISTED)].join(", ");
    if names.len() > LISTED {
        let _ = write!(text, " and {} more", names.len() - LISTED);
    }
    text
}
