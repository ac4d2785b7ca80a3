//! Losses, and the end: undo on every node what was done there.

use std::time::Duration;

use kolo_wire::ids::NodeId;
use kolo_wire::{
    Followers, JobEvent, JobState, NodeReply, NodeRequest, RankFailure, Refusal, RefusalKind,
    WorkerState,
};

use crate::fence::Fence;

use super::{
    Action, Blame, Ending, Hold, Job, MAX_CAUSE, MAX_MESSAGE, MAX_REASON, MAX_TAIL, MAX_TAIL_BYTES,
    Manner, Phase, Push, Rendezvous, Reply, Seat,
};

impl Job {
    /// A worker of a job that never changes has ended or is lost, as is told to everybody who may wait for it (F-1).
    pub(super) fn exited(&mut self, failure: RankFailure, expected: bool) {
        self.gone += 1;
        if self.ending.is_some() {
            return self.fell_too(failure, expected);
        }
        // That a node was asked to stop a worker of a job that nobody stops is as bad as any other end, and so is any end before
        // all are there.
        let is_early = !self.is_installed() && self.phase < Phase::Up;
        let is_failure = expected || is_early || !failure.exit.is_success();
        if is_failure {
            self.fall.add(self.now, failure.clone());
        }
        if self.is_installed() {
            if is_failure {
                self.end_of_workers(String::new());
            }
            return;
        }
        if is_early {
            return self.end_of_workers("a worker ended before the group was ready: ".to_owned());
        }
        if expected {
            self.note(format!("{failure}; its node had been asked to stop it"));
        }
        self.actions.push(Action::Tell(JobEvent::RankLost {
            generation: self.generation,
            failure: failure.clone(),
        }));
        // Nodes pass it on to workers, which read no last words.
        let mut short = failure;
        short.stderr_tail.clear();
        for part in 0..self.parts.len() {
            let entry = &self.parts[part];
            if entry.hold == Hold::Running && entry.site.node != short.node {
                let request = NodeRequest::RankLost {
                    job: self.id,
                    generation: self.generation,
                    failure: short.clone(),
                };
                self.push(part, Push::order(request));
            }
        }
    }

    /// A worker has failed while the job ends because of others. The failure may have come before theirs. A worker that was stopped
    /// has failed only if the worker says so itself.
    pub(super) fn fell_too(&mut self, failure: RankFailure, expected: bool) {
        let is_blamed = self
            .ending
            .as_ref()
            .is_some_and(|ending| ending.blame.is_some());
        if let Some(failure) = own_failure(failure, expected).filter(|_| is_blamed) {
            self.fall.add(self.now, failure);
        }
    }

    /// The failure that has ended the job, or will; of an elastic job only once it ends.
    fn first_failure(&self) -> Option<&RankFailure> {
        let blame = self
            .ending
            .as_ref()
            .and_then(|ending| ending.blame.as_ref());
        let cause = self.fall.cause();
        cause.filter(|_| !self.is_elastic() || blame.is_some())
    }

    /// Ends the job because a worker has failed.
    fn end_of_workers(&mut self, before: String) {
        self.end(Ending {
            state: JobState::Failed,
            refusal: Some(Refusal::new(RefusalKind::Worker, "")),
            reason: String::new(),
            blame: Some(Blame {
                reason: Some(before.clone()),
                message: before,
            }),
        });
    }

    /// Ends the job if no worker is left.
    pub(super) fn all_gone(&mut self) {
        if self.ending.is_some() || self.gone < self.seats.len() {
            return;
        }
        if self.fall.cause().is_some() {
            return self.end_of_workers("all workers have ended; the first cause: ".to_owned());
        }
        self.end(Ending {
            state: JobState::Succeeded,
            refusal: None,
            reason: "all workers exited with code 0".to_owned(),
            blame: None,
        });
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

    pub(super) fn node_lost(&mut self, node: NodeId, reason: String, fence: Fence) {
        let Some(part) = self.part(node) else {
            return;
        };
        if self.parts[part].hold.is_over() {
            return;
        }
        if self.is_elastic() {
            return self.part_lost(part, reason, fence);
        }
        self.parts[part].hold = Hold::Lost;
        self.parts[part].pushes.queue.clear();
        let at = self.place_name(part);
        if self.phase < Phase::Up {
            self.fail(
                RefusalKind::NodeLost,
                format!("{at} was lost before the group was ready: {reason}"),
            );
        }
        self.lose_seats(part, &format!("its node was lost: {reason}"));
    }

    /// The node says that nothing is left of the job.
    pub(super) fn job_gone(&mut self, part: usize) {
        let at = self.place_name(part);
        match self.parts[part].hold {
            Hold::Reserved => {
                self.free(part);
                self.fail(
                    RefusalKind::Timeout,
                    format!("{at} gave up its reservation before the group was ready"),
                );
            }
            Hold::Running => {
                self.free(part);
                if self.phase < Phase::Up {
                    self.fail(
                        RefusalKind::Worker,
                        format!("{at} ended its workers before the group was ready"),
                    );
                }
                self.lose_seats(part, "its node has ended it");
            }
            Hold::Undoing => self.free(part),
            // Its answer is still to come, and says more; or it has none to give any more.
            Hold::Reserving | Hold::Starting | Hold::Free | Hold::Abandoned | Hold::Lost => {}
        }
    }

    fn lose_seats(&mut self, part: usize, reason: &str) {
        for slot in self.parts[part].slots.clone() {
            let seat = self.seats.get_mut(&slot);
            if let Some(failure) = seat.and_then(|seat| seat.lose(reason.to_owned())) {
                self.exited(failure, false);
            }
        }
        self.all_gone();
    }

    pub(super) fn fail(&mut self, kind: RefusalKind, message: String) {
        self.end(Ending {
            state: JobState::Failed,
            reason: message.clone(),
            refusal: Some(Refusal::new(kind, message)),
            blame: None,
        });
    }

    /// Ends the job because its driver has what it wanted. With a worker lost, or before the group was whole, that is
    /// a stop like any other.
    pub(super) fn done(&mut self) {
        let reason = "its driver has ended it".to_owned();
        if self.phase < Phase::Up || self.first_failure().is_some() {
            return self.stop(reason, true);
        }
        self.end(Ending {
            state: JobState::Succeeded,
            refusal: None,
            reason,
            blame: None,
        });
    }

    /// Ends the job because someone asks for it.
    pub(super) fn stop(&mut self, reason: String, own: bool) {
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
            state: JobState::Stopped,
            refusal,
            reason,
            blame: None,
        });
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

    pub(super) fn undo(&mut self, part: usize) {
        let grace = Duration::from_millis(self.spec.grace_ms);
        let entry = &mut self.parts[part];
        entry.hold = Hold::Undoing;
        if entry.started && self.manner == Manner::Kill {
            let request = NodeRequest::Kill { job: self.id };
            self.request(part, request, self.config.stop_margin);
        } else if entry.started {
            let going_on = || "the job goes on without this node".to_owned();
            let ending = self.ending.as_ref();
            let reason = ending.map_or_else(going_on, |ending| ending.reason.clone());
            let request = NodeRequest::Stop {
                job: self.id,
                reason,
                interrupt: self.manner == Manner::Interrupt,
            };
            self.request(part, request, grace * 2 + self.config.stop_margin);
        } else {
            let request = NodeRequest::Release { job: self.id };
            self.request(part, request, self.config.request_timeout);
        }
    }

    pub(super) fn undone(&mut self, part: usize, reply: Reply) {
        match reply {
            Reply::Answer(NodeReply::Done) => self.free(part),
            Reply::Refused(refusal) if refusal.kind == RefusalKind::NotFound => self.free(part),
            Reply::Answer(_) | Reply::Refused(_) | Reply::Unknown(_) => {
                self.parts[part].hold = Hold::Abandoned;
                self.mark_over();
                let node = self.parts[part].site.node;
                self.note(format!("{node} did not confirm the end: {reply:?}"));
                self.actions.push(Action::Abandon(node));
            }
        }
    }

    pub(super) fn free(&mut self, part: usize) {
        self.parts[part].hold = Hold::Free;
        self.mark_over();
        self.actions.push(Action::Free(self.parts[part].site.node));
    }

    /// Tells the end when nothing is under way any more.
    pub(super) fn finish(&mut self) {
        if self.ending.is_none()
            || self.finished
            || self.rendezvous == Rendezvous::Opening
            || !self.parts.iter().all(|part| part.hold.is_over())
        {
            return;
        }
        self.finished = true;
        self.word_end();
        let Some(ending) = &self.ending else {
            return;
        };
        let (state, refusal, reason) =
            (ending.state, ending.refusal.clone(), ending.reason.clone());
        self.state = state;
        for seat in self.seats.values_mut() {
            seat.state = WorkerState::Exited;
        }
        if matches!(self.rendezvous, Rendezvous::Open(_)) {
            self.actions.push(Action::CloseRendezvous);
        }
        let name = match state {
            JobState::Succeeded => "SUCCEEDED",
            JobState::Stopped => "STOPPED",
            _ => "FAILED",
        };
        self.tell_state(name, reason);
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

pub(super) fn first_line(failure: &RankFailure) -> String {
    let text = failure.to_string();
    text.lines().next().unwrap_or_default().to_owned()
}
