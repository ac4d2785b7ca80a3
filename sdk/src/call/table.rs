//! The calls of one driver to one group, without I/O and without a clock.
//!
//! The table knows what is in flight, on which ranks, and who waits. Events go in (a result, a loss, time,
//! a cancellation), [`Effects`] come out: waiters to wake and ranks to tell that a result is not wanted.
//!
//! *First cause.* A failure that names another rank as its cause, and the loss of a worker whose job is being
//! stopped, are echoes. An echo waits [`ECHO_WAIT`] for the report that it is an echo of; any other failure
//! settles the call at once. If that report does not come and workers are being stopped, the stop is the cause:
//! the call fails with its reason, and so do later calls on those workers.
//!
//! An echo that blames a rank which is well is the cause itself, if that rank does not end within [`LEAVE_WAIT`].
//!
//! *Losses.* What a rank's own node says comes after the results that the node has sent, so it is final. The
//! head's word or the end of the channel may overtake results; it makes the rank a suspect,
//! and a loss after [`SUSPECT_WAIT`]. Calls to a suspect are refused from the start.
//!
//! *Elastic groups.* A table is for one generation. From the first loss on its generation is over: it takes no calls, and what fails
//! because of a loss fails with [`CallError::GenerationOver`].

mod busy;
mod causes;
mod ends;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kolo_transport::ids::{CallId, Generation, Rank};
use kolo_transport::wire::{Outcome, RankFailure};

use self::busy::Unwanted;
use self::causes::Chase;
pub(crate) use self::ends::End;
use super::entry::{Completion, Effects, Entry, Slot, Waiters};
use super::failure::{CallError, RankCause, RankError};

/// How long an echo waits for its cause.
pub(crate) const ECHO_WAIT: Duration = Duration::from_secs(2);

/// How long an echo waits that blames a rank which has returned, or in the end itself: a worker that is being
/// stopped closes its links a little before its node sees it end.
pub(crate) const LEAVE_WAIT: Duration = Duration::from_millis(500);

/// How long results of a rank may still come after others have told of its loss.
pub(crate) const SUSPECT_WAIT: Duration = Duration::from_secs(1);

/// How the reason of a worker's end begins, in its node's words, if it ended because its job was being stopped.
pub(crate) const STOPPED: &str = "the job was stopped";

/// A call that the table has taken.
#[derive(Debug)]
pub(crate) struct Registered<W> {
    pub(crate) call: CallId,
    /// The ranks to send it to.
    pub(crate) send_to: Vec<Rank>,
    /// Waiters of ranks that are lost already.
    pub(crate) completions: Vec<Completion<W>>,
}

#[derive(Debug, Clone)]
enum Health {
    Up,
    Suspect {
        until: Instant,
        error: RankError,
        unreachable: bool,
    },
    Lost(RankError),
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct CallTable<W> {
    hostnames: Vec<String>,
    health: Vec<Health>,
    calls: BTreeMap<CallId, Entry<W>>,
    unwanted: Unwanted,
    /// The user is not told of busy ranks before this time.
    quiet_until: Option<Instant>,
    next: u64,
    /// Set when no more calls are taken; those that are in flight may still be.
    end: Option<End>,
    /// Why workers are being stopped, as the first of them that ended tells.
    stop: Option<String>,
    /// The generation, if the group is elastic: then the next one may take what fails here.
    elastic: Option<Generation>,
    /// Why that generation is over, if it is.
    over: Option<String>,
    /// The head is gone.
    headless: bool,
}

impl<W> CallTable<W> {
    /// A table for a group whose rank `r` is on the node with hostname `hostnames[r]`.
    pub(crate) fn new(hostnames: Vec<String>) -> Self {
        let health = vec![Health::Up; hostnames.len()];
        Self {
            hostnames,
            health,
            calls: BTreeMap::new(),
            unwanted: Unwanted::default(),
            quiet_until: None,
            next: 0,
            end: None,
            stop: None,
            elastic: None,
            over: None,
            headless: false,
        }
    }

    pub(crate) fn world_size(&self) -> usize {
        self.health.len()
    }

    pub(crate) fn end(&self) -> Option<&End> {
        self.end.as_ref()
    }

    /// Calls that have somebody waiting.
    pub(crate) fn in_flight(&self) -> usize {
        self.calls.len()
    }

    /// A number for a call that nobody waits for.
    pub(crate) fn next_id(&mut self) -> CallId {
        self.next += 1;
        CallId(self.next)
    }

    /// The given ranks that can be reached.
    pub(crate) fn up(&self, ranks: impl IntoIterator<Item = Rank>) -> Vec<Rank> {
        ranks
            .into_iter()
            .filter(|rank| matches!(self.health.get(rank.index()), Some(Health::Up)))
            .collect()
    }

    fn loss(&self, rank: Rank) -> Option<&RankError> {
        match self.health.get(rank.index())? {
            Health::Up => None,
            Health::Suspect { error, .. } | Health::Lost(error) => Some(error),
        }
    }

    fn final_loss(&self, rank: Rank) -> Option<&RankError> {
        match self.health.get(rank.index())? {
            Health::Lost(error) => Some(error),
            _ => None,
        }
    }

    /// Takes a call. `ranks` ascend, each once. A call on a lost rank is refused, unless each rank has a waiter
    /// of its own: then only that rank's fails.
    pub(crate) fn register(
        &mut self,
        now: Instant,
        name: String,
        ranks: Vec<Rank>,
        deadline: Option<(Instant, Duration)>,
        waiters: Waiters<W>,
    ) -> Result<Registered<W>, CallError> {
        if ranks.is_empty() {
            return Err(CallError::NoRanks { call: name });
        }
        let world_size = self.world_size();
        if let Some(&rank) = ranks.iter().find(|rank| rank.index() >= world_size) {
            return Err(CallError::NoSuchRank { rank, world_size });
        }
        if let Some(end) = &self.end {
            return Err(self.ended(end, &name));
        }
        if self.over.is_some() {
            return Err(self.generation_over(&name));
        }
        if matches!(waiters, Waiters::Whole(_))
            && let Some(error) = ranks.iter().find_map(|rank| self.loss(*rank))
        {
            return Err(self.lost_before(&name, error));
        }
        let mut entry = Entry {
            slots: ranks.iter().map(|_| Slot::Waiting).collect(),
            failed: Vec::new(),
            missing: ranks.len(),
            sent: now,
            is_told: false,
            deadline,
            echo_until: None,
            waiters,
            name,
            ranks,
        };
        let mut send_to = Vec::with_capacity(entry.ranks.len());
        let mut completions = Vec::new();
        for index in 0..entry.ranks.len() {
            let rank = entry.ranks[index];
            match self.loss(rank).cloned() {
                None => send_to.push(rank),
                Some(error) => {
                    if let Waiters::Each(waiters) = &mut entry.waiters {
                        completions.extend(waiters[index].take().map(|waiter| Completion {
                            waiter,
                            result: Err(self.lost_before(&entry.name, &error)),
                        }));
                    }
                    entry.fail(index, error);
                }
            }
        }
        let call = self.next_id();
        if !send_to.is_empty() {
            self.calls.insert(call, entry);
        }
        Ok(Registered {
            call,
            send_to,
            completions,
        })
    }

    /// A rank's result. One that nobody waits for any more, or that comes twice, changes nothing.
    pub(crate) fn result(
        &mut self,
        now: Instant,
        call: CallId,
        rank: Rank,
        outcome: Outcome,
        body: Bytes,
    ) -> Effects<W> {
        let Some(entry) = self.calls.get_mut(&call) else {
            self.unwanted.answered(call, rank);
            return Effects::default();
        };
        let Some(index) = entry.waiting(rank) else {
            return Effects::default();
        };
        match outcome {
            Outcome::Returned => {
                entry.slots[index] = Slot::Returned(body);
                entry.missing -= 1;
                // Most results of a fan-out change nothing yet.
                if entry.missing > 0
                    && entry.failed.is_empty()
                    && matches!(entry.waiters, Waiters::Whole(_))
                {
                    return Effects::default();
                }
            }
            Outcome::Failed(failure) => {
                let hostname = self
                    .hostnames
                    .get(rank.index())
                    .cloned()
                    .unwrap_or_default();
                entry.fail(
                    index,
                    RankError {
                        rank,
                        hostname,
                        cause: RankCause::Call(failure),
                    },
                );
            }
        }
        let mut effects = Effects::default();
        self.settle(now, call, &mut effects);
        effects
    }

    /// A rank's own node says that its worker is gone.
    pub(crate) fn lost(
        &mut self,
        now: Instant,
        failure: RankFailure,
        stopping: bool,
    ) -> Effects<W> {
        let rank = failure.rank;
        if stopping && self.stop.is_none() {
            // A worker that did not end as it was told has a reason of its own.
            let reason = failure.reason.as_deref();
            let reason = reason.filter(|reason| reason.starts_with(STOPPED));
            self.stop = Some(reason.unwrap_or(STOPPED).to_owned());
        }
        let error = RankError::lost(failure, stopping);
        self.note_loss(&error);
        let mut effects = Effects::default();
        if self.final_loss(rank).is_none() {
            self.conclude(now, error, &mut effects);
        }
        effects
    }

    /// The head says that a worker is gone.
    pub(crate) fn reported_lost(&mut self, now: Instant, failure: RankFailure) -> Effects<W> {
        let rank = failure.rank;
        let new = RankError::lost(failure, false);
        self.note_loss(&new);
        let mut effects = Effects::default();
        match self.health.get_mut(rank.index()) {
            Some(health @ Health::Up) => {
                *health = Health::Suspect {
                    until: now + SUSPECT_WAIT,
                    error: new,
                    unreachable: false,
                };
            }
            // The channel said only that it ended; this says why, and nothing can come any more.
            Some(Health::Suspect {
                unreachable: true, ..
            }) => self.conclude(now, new, &mut effects),
            _ => {}
        }
        effects
    }

    /// No result of these ranks can come any more, for the channel to their node has ended. Each failure waits
    /// a little for a better word from the head.
    pub(crate) fn unreachable(&mut self, now: Instant, failures: Vec<RankFailure>) -> Effects<W> {
        let mut effects = Effects::default();
        for failure in failures {
            let rank = failure.rank;
            let new = RankError::lost(failure, false);
            self.note_loss(&new);
            match self.health.get_mut(rank.index()) {
                Some(health @ Health::Up) => {
                    *health = Health::Suspect {
                        until: now + ECHO_WAIT,
                        error: new,
                        unreachable: true,
                    };
                }
                Some(Health::Suspect { error, .. }) => {
                    let error = error.clone();
                    self.conclude(now, error, &mut effects);
                }
                _ => {}
            }
        }
        effects
    }

    /// No more calls are taken. Those that are in flight go on. The first reason is kept.
    pub(crate) fn close(&mut self, reason: &str) {
        self.end.get_or_insert_with(|| End {
            reason: reason.to_owned(),
            failure: None,
        });
    }

    /// The group has ended: so has every call.
    pub(crate) fn finish(&mut self, mut end: End) -> Effects<W> {
        let mut effects = Effects::default();
        // For the head a worker that its node stopped is the first cause; the node says why it did.
        let failure = end.failure.as_ref();
        if let (Some(stop), Some(loss)) =
            (&self.stop, failure.and_then(|f| self.final_loss(f.rank)))
            && loss.is_echo()
        {
            end = End {
                reason: stop.clone(),
                failure: None,
            };
        }
        for (_, entry) in std::mem::take(&mut self.calls) {
            let error = self.ended(&end, &entry.name);
            entry.complete_rest(&error, &mut effects);
        }
        self.end = Some(end);
        effects
    }

    /// Time has passed.
    pub(crate) fn tick(&mut self, now: Instant) -> Effects<W> {
        let mut effects = Effects::default();
        let due: Vec<RankError> = self
            .health
            .iter()
            .filter_map(|health| match health {
                Health::Suspect { until, error, .. } if *until <= now => Some(error.clone()),
                _ => None,
            })
            .collect();
        for error in due {
            self.conclude(now, error, &mut effects);
        }
        let due: Vec<(CallId, bool)> = self
            .calls
            .iter()
            .filter_map(|(call, entry)| {
                let late = entry.deadline.is_some_and(|(at, _)| at <= now);
                (late || entry.echo_until.is_some_and(|at| at <= now)).then_some((*call, late))
            })
            .collect();
        for (call, late) in due {
            self.settle(now, call, &mut effects);
            if late && let Some(entry) = self.calls.remove(&call) {
                let missing = entry.ranks_waiting();
                let after = entry.deadline.map_or(Duration::ZERO, |(_, after)| after);
                let error = match entry.failed.first() {
                    // Only echoes are left here. They say more than that time is up.
                    Some(&index) => self.unexplained(&entry, index),
                    None => CallError::Deadline {
                        call: entry.name.clone(),
                        after,
                        busy: self.busy(now, call, &missing),
                        missing: missing.clone(),
                    },
                };
                self.unwanted.add(call, &entry);
                entry.complete_rest(&error, &mut effects);
                if !missing.is_empty() {
                    effects.cancels.push((call, missing));
                }
            }
        }
        effects
    }

    /// When [`CallTable::tick`] has something to do.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        let suspects = self.health.iter().filter_map(|health| match health {
            Health::Suspect { until, .. } => Some(*until),
            _ => None,
        });
        let calls = self.calls.values().flat_map(|entry| {
            entry
                .deadline
                .map(|(at, _)| at)
                .into_iter()
                .chain(entry.echo_until)
        });
        suspects.chain(calls).min()
    }

    /// A waiter is gone: the only one, or the one of `rank`.
    pub(crate) fn cancel(&mut self, call: CallId, rank: Option<Rank>) -> Effects<W> {
        let mut effects = Effects::default();
        let Some(entry) = self.calls.get_mut(&call) else {
            return effects;
        };
        let (unwanted, done) = match rank {
            None => (entry.ranks_waiting(), true),
            Some(rank) => entry.forget(rank),
        };
        if done && let Some(entry) = self.calls.remove(&call) {
            self.unwanted.add(call, &entry);
        }
        if !unwanted.is_empty() {
            effects.cancels.push((call, unwanted));
        }
        effects
    }

    /// A rank is lost for good: every wait on it ends (F-1).
    fn conclude(&mut self, now: Instant, error: RankError, effects: &mut Effects<W>) {
        let rank = error.rank;
        let Some(health) = self.health.get_mut(rank.index()) else {
            return;
        };
        *health = Health::Lost(error.clone());
        let mut touched = Vec::new();
        for (call, entry) in &mut self.calls {
            if let Some(index) = entry.waiting(rank) {
                entry.fail(index, error.clone());
                touched.push(*call);
            } else if entry.echo_until.is_some() {
                touched.push(*call);
            }
        }
        for call in touched {
            self.settle(now, call, effects);
        }
    }

    /// Completes what can be completed of a call.
    fn settle(&mut self, now: Instant, call: CallId, effects: &mut Effects<W>) {
        let Some(mut entry) = self.calls.remove(&call) else {
            return;
        };
        let expired = entry.echo_until.is_some_and(|at| at <= now);
        let mut echo: Option<Duration> = None;
        match &entry.waiters {
            Waiters::Whole(_) => {
                if entry.failed.is_empty() {
                    if entry.missing == 0 {
                        entry.complete_whole(effects);
                        return;
                    }
                } else {
                    match self.whole_error(&entry, expired) {
                        Ok(error) => {
                            self.unwanted.add(call, &entry);
                            entry.complete_rest(&error, effects);
                            return;
                        }
                        Err(wait) => echo = Some(wait),
                    }
                }
            }
            Waiters::Each(_) => {
                for index in 0..entry.ranks.len() {
                    if !entry.has_waiter(index) {
                        continue;
                    }
                    let result = match &entry.slots[index] {
                        Slot::Waiting => continue,
                        Slot::Returned(body) => Ok(vec![body.clone()]),
                        Slot::Failed(_) => match self.chase(&entry, index) {
                            Chase::Root(first) => Err(entry.failed_on(index, first)),
                            Chase::Unknown if expired => Err(self.unexplained(&entry, index)),
                            Chase::Last(first) if expired => Err(entry.failed_on(index, first)),
                            chase => {
                                let wait = match chase {
                                    Chase::Last(_) => LEAVE_WAIT,
                                    _ => ECHO_WAIT,
                                };
                                echo = Some(echo.map_or(wait, |echo| echo.max(wait)));
                                continue;
                            }
                        },
                    };
                    if let Waiters::Each(waiters) = &mut entry.waiters {
                        let waiter = waiters[index].take();
                        effects
                            .completions
                            .extend(waiter.map(|waiter| Completion { waiter, result }));
                    }
                }
                if (0..entry.ranks.len()).all(|index| !entry.has_waiter(index)) {
                    self.unwanted.add(call, &entry);
                    return;
                }
            }
        }
        entry.echo_until = echo.map(|wait| {
            let at = now + wait;
            entry.echo_until.map_or(at, |set| set.min(at))
        });
        self.calls.insert(call, entry);
    }
}

#[cfg(test)]
mod tests;
