//! The ends of all calls of a group at once: the job's end, and in an elastic group the end of its generation.

use kolo_transport::ids::{CallId, Generation, Rank};
use kolo_transport::wire::RankFailure;

use super::super::failure::{CallError, CallErrorKind, RankError};
use super::{CallTable, Effects, Health};

/// The bits of a call's number that count within a generation: numbers are unique across the generations of a job.
const IN_GENERATION: u32 = 40;

/// Why a group takes no calls any more.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct End {
    pub(crate) reason: String,
    /// The worker whose loss was the first cause, if it was one.
    pub(crate) failure: Option<RankFailure>,
}

impl End {
    /// The error of a call of an elastic group. The reason says why losses could not be made good.
    pub(crate) fn of_elastic(&self, call: &str) -> CallError {
        let first = self.failure.clone();
        CallError::Ended {
            call: call.to_owned(),
            reason: self.reason.clone(),
            first: first.map(|failure| Box::new(RankError::lost(failure, false))),
        }
    }
}

impl<W> CallTable<W> {
    /// A table for one generation of an elastic group.
    pub(crate) fn elastic(mut self, generation: Generation) -> Self {
        self.elastic = Some(generation);
        self.next = generation.0.saturating_sub(1) << IN_GENERATION;
        self
    }

    /// The number before the first call of the generation.
    pub(crate) fn first_id(&self) -> CallId {
        CallId(self.next)
    }

    /// Whether a call is still in flight here.
    pub(crate) fn has(&self, call: CallId) -> bool {
        self.calls.contains_key(&call)
    }

    /// The generation is over. Calls that are in flight go on, new ones are refused.
    pub(crate) fn supersede(&mut self, cause: &str) {
        self.over.get_or_insert_with(|| cause.to_owned());
    }

    /// Whether the generation is over: a rank is lost, or another generation has begun.
    pub(crate) fn is_over(&self) -> bool {
        self.over.is_some()
    }

    /// A loss ends the generation of an elastic group. Of a worker that was told to stop the head says more; without a head nobody
    /// does.
    pub(super) fn note_loss(&mut self, loss: &RankError) {
        if self.elastic.is_some() && (self.headless || !loss.is_echo()) {
            self.over.get_or_insert_with(|| loss.to_string());
        }
    }

    /// The head is gone: nobody replaces a worker that is lost, or says more about a loss.
    pub(crate) fn without_head(&mut self) -> Effects<W> {
        self.headless = true;
        if self.elastic.is_some() && !self.lost_ranks().is_empty() {
            self.supersede("a rank was lost with the head");
        }
        Effects::default()
    }

    /// The ranks that are lost, or seem to be.
    fn lost_ranks(&self) -> Vec<Rank> {
        let lost = (0..).zip(&self.health);
        lost.filter(|(_, health)| !matches!(health, Health::Up))
            .map(|(rank, _)| Rank(rank))
            .collect()
    }

    /// The error of a call that the next generation may take.
    pub(super) fn generation_over(&self, call: &str) -> CallError {
        CallError::GenerationOver {
            call: call.to_owned(),
            generation: self.elastic.unwrap_or_default(),
            lost: self.lost_ranks(),
            cause: self.over.clone().unwrap_or_default(),
        }
    }

    /// The meaning of a failure in an elastic group: a failure that comes from a change of its members is none of the call. It also
    /// ends the generation.
    pub(crate) fn explain(&mut self, error: CallError) -> CallError {
        let CallError::Failed(failed) = &error else {
            return error;
        };
        let comes_from_a_change = match failed.first.kind() {
            CallErrorKind::Lost => !failed.first.is_echo(),
            CallErrorKind::Stale | CallErrorKind::GenerationOver => true,
            _ => false,
        };
        if self.elastic.is_none() || !comes_from_a_change {
            return error;
        }
        self.over.get_or_insert_with(|| failed.first.to_string());
        self.generation_over(&failed.call)
    }

    /// The error of a call that has ended with the group.
    pub(super) fn ended(&self, end: &End, name: &str) -> CallError {
        match &end.failure {
            _ if self.elastic.is_some() => end.of_elastic(name),
            Some(failure) => {
                let mut first = RankError::lost(failure.clone(), false);
                if let Some(hostname) = self.hostnames.get(failure.rank.index()) {
                    first.hostname.clone_from(hostname);
                }
                CallError::failed(name, first, Vec::new())
            }
            None => CallError::ended(name, &end.reason),
        }
    }
}
