//! The first cause of a call's failure, from what has been reported.

use std::time::Duration;

use kolo_transport::ids::Rank;

use super::super::entry::{Entry, Slot};
use super::super::failure::{CallError, CallErrorKind, RankError};
use super::{CallTable, ECHO_WAIT, LEAVE_WAIT};

/// Where the chain of causes of a failure ends.
pub(super) enum Chase<'a> {
    Root(&'a RankError),
    /// As above, if the rank that is blamed does not turn out to be leaving.
    Last(&'a RankError),
    Unknown,
}

impl<W> CallTable<W> {
    /// The error of a call that has failed on some rank, or how long the first cause may still take to come.
    pub(super) fn whole_error(
        &self,
        entry: &Entry<W>,
        expired: bool,
    ) -> Result<CallError, Duration> {
        let (mut last, mut unknown) = (None, None);
        for &index in &entry.failed {
            match self.chase(entry, index) {
                Chase::Root(first) => return Ok(entry.error(first)),
                Chase::Last(first) => last = last.or(Some(first)),
                Chase::Unknown => unknown = unknown.or(Some(index)),
            }
        }
        match (last, unknown) {
            (None, Some(index)) if expired => Ok(self.unexplained(entry, index)),
            (Some(first), _) if expired => Ok(unknown
                .and_then(|_| self.stopped(&entry.name))
                .unwrap_or_else(|| entry.error(first))),
            (Some(_), _) => Err(LEAVE_WAIT),
            (None, _) => Err(ECHO_WAIT),
        }
    }

    /// The error of an echo whose cause has not been reported in time.
    pub(super) fn unexplained(&self, entry: &Entry<W>, index: usize) -> CallError {
        self.stopped(&entry.name)
            .unwrap_or_else(|| entry.failed_by(index))
    }

    /// The error of a call on a rank that was lost before.
    pub(super) fn lost_before(&self, name: &str, loss: &RankError) -> CallError {
        let stopped = loss.is_echo().then(|| self.stopped(name)).flatten();
        stopped.unwrap_or_else(|| CallError::failed(name, loss.clone(), Vec::new()))
    }

    /// The error of a call that fails because workers are being stopped, if they are.
    fn stopped(&self, name: &str) -> Option<CallError> {
        let stop = self.stop.as_ref()?;
        // A driver that ends the group itself has said why.
        let reason = self.end.as_ref().map_or(stop, |end| &end.reason);
        Some(CallError::ended(name, reason))
    }

    /// Follows a failure to its cause, and that to its own, as far as they have been reported.
    pub(super) fn chase<'a>(&'a self, entry: &'a Entry<W>, index: usize) -> Chase<'a> {
        let Slot::Failed(failed) = &entry.slots[index] else {
            return Chase::Unknown;
        };
        let mut error = failed;
        // A chain is no longer than there are ranks; a longer one goes in a circle.
        for _ in 0..=self.world_size() {
            if self.elastic.is_some() && error.kind() == CallErrorKind::GenerationOver {
                // Whichever rank is lost: the next generation takes the call.
                return Chase::Root(error);
            }
            let Some(cause) = error.caused_by() else {
                return if error.is_echo() {
                    Chase::Unknown
                } else {
                    Chase::Root(error)
                };
            };
            match entry.index(cause).map(|at| &entry.slots[at]) {
                Some(Slot::Failed(next)) => error = next,
                // The rank that is blamed is well: then this is where it began, unless that rank is leaving.
                Some(Slot::Returned(_)) => {
                    return if self.is_stopped(cause) {
                        Chase::Unknown
                    } else {
                        Chase::Last(error)
                    };
                }
                Some(Slot::Waiting) | None => match self.final_loss(cause) {
                    Some(loss) if loss.is_echo() => return Chase::Unknown,
                    Some(loss) => return Chase::Root(loss),
                    None => return Chase::Unknown,
                },
            }
        }
        if self.is_stopped(error.rank) {
            Chase::Unknown
        } else {
            Chase::Last(error)
        }
    }

    /// Whether a rank's worker ended because it was being stopped.
    fn is_stopped(&self, rank: Rank) -> bool {
        self.final_loss(rank).is_some_and(RankError::is_echo)
    }
}
