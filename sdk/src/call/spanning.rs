//! Calls that span the generations of an elastic group, without I/O and without a clock.
//!
//! Such a call goes to each process that becomes a member, once. A process that stays goes on with the one that it runs. A lost process
//! takes nothing away: the one in its place gets the call.
//!
//! The end is Horovod's. From the first rank that returns on no process gets the call any more. The call ends in the generation in which
//! that rank has returned, or in a later one if another rank returns there: with the results of all its ranks, or with an error that
//! names the ranks which were lost before they returned. An error of a rank's own ends the call at once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kolo_transport::ids::{CallId, Generation, Incarnation, Rank, Slot};
use kolo_transport::wire::{Exit, FailureKind, GenerationTable, Member, Outcome, RankFailure};

use super::entry::Completion;
use super::failure::{CallError, RankCause, RankError};
use super::request::Request;
use super::table::{ECHO_WAIT, End};

/// The name of one process of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Process {
    pub(crate) slot: Slot,
    pub(crate) incarnation: Incarnation,
}

impl Process {
    pub(crate) fn of(member: &Member) -> Self {
        Self {
            slot: member.slot,
            incarnation: member.incarnation,
        }
    }
}

/// The consequences of an event.
#[derive(Debug, PartialEq)]
pub(crate) struct SpanEffects<W> {
    /// Waiters to wake.
    pub(crate) completions: Vec<Completion<W>>,
    /// Calls to give to ranks of the newest generation.
    pub(crate) gives: Vec<(CallId, Vec<Rank>)>,
    /// Calls to cancel, on ranks of the generation in which they were given.
    pub(crate) cancels: Vec<(Generation, CallId, Rank)>,
}

impl<W> Default for SpanEffects<W> {
    fn default() -> Self {
        Self {
            completions: Vec::new(),
            gives: Vec::new(),
            cancels: Vec::new(),
        }
    }
}

/// A call at a process that has it.
#[derive(Debug)]
enum Place {
    Given {
        generation: Generation,
        rank: Rank,
    },
    Returned(Bytes),
    /// It has failed because of another rank, which may still say why.
    Echo {
        generation: Generation,
        error: RankError,
        until: Instant,
    },
    /// The process is lost.
    Lost(RankError),
}

#[derive(Debug)]
struct Span<W> {
    request: Request,
    deadline: Option<Instant>,
    waiter: W,
    places: BTreeMap<Process, Place>,
    /// The generation whose results count, since a rank has returned, and its members once they are known.
    ends_in: Option<(Generation, Option<Arc<GenerationTable>>)>,
}

/// All calls of an executor that span generations.
#[derive(Debug)]
pub(crate) struct SpanTable<W> {
    newest: Arc<GenerationTable>,
    /// Processes of the newest generation that are known to be lost.
    lost: BTreeMap<Process, RankFailure>,
    calls: BTreeMap<CallId, Span<W>>,
    /// The newest generation takes no calls any more, though nobody is lost.
    is_held: bool,
    end: Option<End>,
}

impl<W> SpanTable<W> {
    pub(crate) fn new(newest: Arc<GenerationTable>) -> Self {
        Self {
            newest,
            lost: BTreeMap::new(),
            calls: BTreeMap::new(),
            is_held: false,
            end: None,
        }
    }

    /// The request of a call, its deadline, and its waiter.
    pub(crate) fn request(&self, call: CallId) -> Option<(&Request, Option<Instant>, &W)> {
        let span = self.calls.get(&call)?;
        Some((&span.request, span.deadline, &span.waiter))
    }

    /// Why no more calls are taken, if none are.
    pub(crate) fn end(&self) -> Option<&End> {
        self.end.as_ref()
    }

    /// Whether some process has a call, or has returned from it. The others wait for the next generation.
    pub(crate) fn is_given(&self) -> bool {
        self.calls.values().any(|span| !span.places.is_empty())
    }

    /// Calls wait for the next generation from now on.
    pub(crate) fn hold(&mut self) {
        self.is_held = true;
    }

    /// Whether a process has a call that it was given in this generation.
    pub(crate) fn uses(&self, number: Generation) -> bool {
        let mut places = self.calls.values().flat_map(|span| span.places.values());
        places
            .any(|place| matches!(place, Place::Given { generation, .. } if *generation == number))
    }

    /// Takes a call. It is given to all members, or to those of the next generation if this one is over.
    pub(crate) fn begin(
        &mut self,
        now: Instant,
        call: CallId,
        request: Request,
        waiter: W,
    ) -> Result<SpanEffects<W>, CallError> {
        if let Some(end) = &self.end {
            return Err(end.of_elastic(&request.name));
        }
        let span = Span {
            // A deadline that the clock can't hold is none.
            deadline: request.deadline.and_then(|after| now.checked_add(after)),
            request,
            waiter,
            places: BTreeMap::new(),
            ends_in: None,
        };
        self.calls.insert(call, span);
        let mut effects = SpanEffects::default();
        self.give(call, &mut effects);
        Ok(effects)
    }

    /// Gives a call to the members that have not got it.
    fn give(&mut self, call: CallId, effects: &mut SpanEffects<W>) {
        let Some(span) = self.calls.get_mut(&call) else {
            return;
        };
        if self.is_held || !self.lost.is_empty() || span.ends_in.is_some() {
            return;
        }
        let generation = self.newest.generation;
        let mut ranks = Vec::new();
        for member in &self.newest.members {
            let rank = member.rank;
            span.places.entry(Process::of(member)).or_insert_with(|| {
                ranks.push(rank);
                Place::Given { generation, rank }
            });
        }
        if !ranks.is_empty() {
            effects.gives.push((call, ranks));
        }
    }

    /// A generation has begun.
    pub(crate) fn generation(&mut self, table: Arc<GenerationTable>) -> SpanEffects<W> {
        let mut effects = SpanEffects::default();
        self.newest = table;
        self.is_held = false;
        let lost = std::mem::take(&mut self.lost);
        let table = Arc::clone(&self.newest);
        let is_member =
            |process: &Process| table.members.iter().any(|m| Process::of(m) == *process);
        for call in self.calls.keys().copied().collect::<Vec<_>>() {
            let Some(span) = self.calls.get_mut(&call) else {
                continue;
            };
            match &mut span.ends_in {
                // Processes that are in the group no more take their calls with them.
                None => span.places.retain(|process, _| is_member(process)),
                Some((generation, known)) if known.is_none() && *generation <= table.generation => {
                    *generation = table.generation;
                    *known = Some(Arc::clone(&table));
                }
                Some((_, known)) => {
                    let members = known.iter().flat_map(|known| &known.members);
                    for member in members.filter(|member| !is_member(&Process::of(member))) {
                        let place = span.places.get_mut(&Process::of(member));
                        if let Some(place @ Place::Given { .. }) = place {
                            *place = Place::Lost(match lost.get(&Process::of(member)) {
                                Some(failure) => RankError::lost(failure.clone(), false),
                                None => left(member, &table),
                            });
                        }
                    }
                }
            }
            self.give(call, &mut effects);
            self.check(call, &mut effects);
        }
        effects
    }

    /// A process has answered. `generation` is the later one that its call has come to, or 0.
    pub(crate) fn result(
        &mut self,
        now: Instant,
        (call, process): (CallId, Process),
        generation: Generation,
        outcome: Outcome,
        body: Bytes,
    ) -> SpanEffects<W> {
        let mut effects = SpanEffects::default();
        let newest = Arc::clone(&self.newest);
        let Some(span) = self.calls.get_mut(&call) else {
            return effects;
        };
        let Some(place) = span.places.get_mut(&process) else {
            return effects;
        };
        let Place::Given {
            generation: given,
            rank,
        } = *place
        else {
            return effects;
        };
        let ended_in = generation.max(given);
        let failure = match outcome {
            Outcome::Returned => {
                *place = Place::Returned(body);
                let (last, known) = span.ends_in.get_or_insert((newest.generation, None));
                if ended_in > *last {
                    (*last, *known) = (ended_in, None);
                }
                if *last == newest.generation {
                    *known = Some(newest);
                }
                self.check(call, &mut effects);
                return effects;
            }
            Outcome::Failed(failure) => failure,
        };
        let member = newest.members.iter().find(|m| Process::of(m) == process);
        let counts = member.is_some() || span.ends_in.is_some();
        if failure.kind == FailureKind::Stale {
            // It is in a later generation already, and has not begun.
            span.places.remove(&process);
            if given < newest.generation {
                self.give(call, &mut effects);
            }
            return effects;
        }
        if !counts {
            span.places.remove(&process);
            return effects;
        }
        let hostname = member.map_or(String::new(), |member| member.hostname.clone());
        let rank = member.map_or(rank, |member| member.rank);
        let blamed = failure.caused_by.filter(|blamed| *blamed != rank);
        let mut lost = self.lost.values().map(|failure| failure.rank);
        let is_over = failure.kind == FailureKind::GenerationOver
            || (ended_in == newest.generation && lost.any(|lost| Some(lost) == blamed));
        let is_leaving = failure.stopping || failure.kind == FailureKind::Left;
        let error = RankError {
            rank,
            hostname,
            cause: RankCause::Call(failure),
        };
        if is_leaving {
            *place = Place::Lost(error);
            self.check(call, &mut effects);
        } else if is_over {
            self.over(call, ended_in, &error, &mut effects);
        } else if blamed.is_some() {
            *place = Place::Echo {
                generation: ended_in,
                error,
                until: now + ECHO_WAIT,
            };
        } else {
            *place = Place::Lost(error.clone());
            self.fail(call, error, &mut effects);
        }
        effects
    }

    /// The head says that a process is lost. Its results may still be on their way.
    pub(crate) fn reported_lost(&mut self, process: Process, failure: &RankFailure) {
        let mut members = self.newest.members.iter();
        if members.any(|member| Process::of(member) == process) {
            let failure = failure.clone();
            self.lost.entry(process).or_insert(failure);
        }
    }

    /// A process is lost, and no result of it can come any more; or none by the channel of the generation `by`.
    pub(crate) fn lost(
        &mut self,
        process: Process,
        failure: &RankFailure,
        by: Option<Generation>,
    ) -> SpanEffects<W> {
        let mut effects = SpanEffects::default();
        if by.is_none_or(|by| by == self.newest.generation) {
            self.reported_lost(process, failure);
        }
        for call in self.calls.keys().copied().collect::<Vec<_>>() {
            let Some(span) = self.calls.get_mut(&call) else {
                continue;
            };
            let Some(place) = span.places.get_mut(&process) else {
                continue;
            };
            let is_over = match place {
                Place::Given { generation, .. } => by.is_none_or(|by| by == *generation),
                // This says more than that it was about to end.
                Place::Lost(_) => by.is_none(),
                Place::Returned(_) | Place::Echo { .. } => false,
            };
            if is_over {
                *place = Place::Lost(RankError::lost(failure.clone(), false));
                self.check(call, &mut effects);
            }
        }
        effects
    }

    /// Ends a call if all ranks of its last generation have returned, or if one of them never will.
    fn check(&mut self, call: CallId, effects: &mut SpanEffects<W>) {
        let Some(span) = self.calls.get(&call) else {
            return;
        };
        let Some((_, Some(table))) = &span.ends_in else {
            return;
        };
        let (mut bodies, mut lost, mut waits) = (Vec::new(), None, false);
        for member in &table.members {
            match span.places.get(&Process::of(member)) {
                Some(Place::Returned(body)) => bodies.push(body.clone()),
                Some(Place::Lost(error)) => {
                    lost = lost.or_else(|| {
                        Some(RankError {
                            rank: member.rank,
                            ..error.clone()
                        })
                    });
                }
                Some(Place::Given { .. } | Place::Echo { .. }) => waits = true,
                // A process that came after the first had returned was never asked.
                None => {}
            }
        }
        match lost {
            Some(error) => self.fail(call, error, effects),
            None if waits => {}
            None => self.finish_call(call, Ok(bodies), effects),
        }
    }

    /// Ends a call that could not go on into the next generation.
    fn over(
        &mut self,
        call: CallId,
        generation: Generation,
        cause: &RankError,
        effects: &mut SpanEffects<W>,
    ) {
        let Some(span) = self.calls.get(&call) else {
            return;
        };
        let over = CallError::GenerationOver {
            call: span.request.name.clone(),
            generation,
            lost: self.lost.values().map(|failure| failure.rank).collect(),
            cause: cause.to_string(),
        };
        self.finish_call(call, Err(over), effects);
    }

    /// Ends a call with a failure and those that have come with it.
    fn fail(&mut self, call: CallId, first: RankError, effects: &mut SpanEffects<W>) {
        let Some(span) = self.calls.get(&call) else {
            return;
        };
        let counts = span.ends_in.is_some();
        let others = span.places.values().filter_map(|place| match place {
            Place::Lost(error) if counts && error.rank != first.rank => Some(error.clone()),
            Place::Echo { error, .. } if error.rank != first.rank => Some(error.clone()),
            _ => None,
        });
        let others = others.collect();
        let error = CallError::failed(&span.request.name, first, others);
        self.finish_call(call, Err(error), effects);
    }

    fn finish_call(
        &mut self,
        call: CallId,
        result: Result<Vec<Bytes>, CallError>,
        effects: &mut SpanEffects<W>,
    ) {
        if let Some(waiter) = self.take(call, effects) {
            effects.completions.push(Completion { waiter, result });
        }
    }

    /// Takes a call off the list, and cancels it where it runs.
    fn take(&mut self, call: CallId, effects: &mut SpanEffects<W>) -> Option<W> {
        let span = self.calls.remove(&call)?;
        for place in span.places.values() {
            if let Place::Given { generation, rank } = place {
                effects.cancels.push((*generation, call, *rank));
            }
        }
        Some(span.waiter)
    }

    /// Nobody waits for a call any more.
    pub(crate) fn cancel(&mut self, call: CallId) -> SpanEffects<W> {
        let mut effects = SpanEffects::default();
        drop(self.take(call, &mut effects));
        effects
    }

    /// No more calls are taken. The first reason is kept.
    pub(crate) fn close(&mut self, reason: &str) {
        self.end.get_or_insert_with(|| End {
            reason: reason.to_owned(),
            failure: None,
        });
    }

    /// The group has ended: so has every call.
    pub(crate) fn finish(&mut self, end: End) -> SpanEffects<W> {
        let mut effects = SpanEffects::default();
        for (_, span) in std::mem::take(&mut self.calls) {
            effects.completions.push(Completion {
                waiter: span.waiter,
                result: Err(end.of_elastic(&span.request.name)),
            });
        }
        self.end = Some(end);
        effects
    }

    /// When [`SpanTable::tick`] has something to do.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        let echoes = self.calls.values().flat_map(|span| span.places.values());
        let echoes = echoes.filter_map(|place| match place {
            Place::Echo { until, .. } => Some(*until),
            _ => None,
        });
        let deadlines = self.calls.values().filter_map(|span| span.deadline);
        deadlines.chain(echoes).min()
    }

    /// Time has passed.
    pub(crate) fn tick(&mut self, now: Instant) -> SpanEffects<W> {
        let mut effects = SpanEffects::default();
        for call in self.calls.keys().copied().collect::<Vec<_>>() {
            let Some(span) = self.calls.get(&call) else {
                continue;
            };
            let echo = span.places.values().find_map(|place| match place {
                Place::Echo {
                    generation,
                    error,
                    until,
                } if *until <= now => Some((*generation, error.clone())),
                _ => None,
            });
            if let Some((generation, error)) = echo {
                // Nobody has said more. A change of the members explains it.
                if generation < self.newest.generation || !self.lost.is_empty() {
                    self.over(call, generation, &error, &mut effects);
                } else {
                    self.fail(call, error, &mut effects);
                }
            } else if span.deadline.is_some_and(|at| at <= now) {
                let missing = (self.newest.members.iter())
                    .filter(|member| {
                        let place = span.places.get(&Process::of(member));
                        !matches!(place, Some(Place::Returned(_)))
                    })
                    .map(|member| member.rank);
                let late = CallError::Deadline {
                    call: span.request.name.clone(),
                    after: span.request.deadline.unwrap_or(Duration::ZERO),
                    missing: missing.collect(),
                    busy: Vec::new(),
                };
                self.finish_call(call, Err(late), &mut effects);
            }
        }
        effects
    }
}

/// The error of a member that is in a generation no more, if nothing else is known of it.
fn left(member: &Member, table: &GenerationTable) -> RankError {
    let failure = RankFailure {
        rank: member.rank,
        node: member.node,
        hostname: member.hostname.clone(),
        pid: 0,
        exit: Exit::Unknown,
        reason: Some(format!(
            "it had not returned, and is not in generation {}: {}",
            table.generation, table.cause
        )),
        stderr_tail: Vec::new(),
        account: None,
    };
    RankError::lost(failure, false)
}

#[cfg(test)]
pub(super) mod tests;
