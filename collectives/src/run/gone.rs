//! Asking whether those that a rank waits for are gone, where no link would tell.

use std::time::{Duration, Instant};

use kolo_transport::ids::Rank;

use super::{Mode, Run};

/// A rank that waits for so long and hears nothing asks.
const ASK: Duration = Duration::from_millis(100);

/// What is to be asked when.
#[derive(Debug)]
pub(super) struct Questions {
    at: Option<Instant>,
    /// It is being asked of some.
    asked: bool,
    /// Something came, or a link came or went, since that was looked at last.
    stirred: bool,
}

impl Questions {
    pub(super) fn new(started: Instant) -> Self {
        Self {
            at: Some(started + ASK),
            asked: false,
            stirred: false,
        }
    }

    /// Something has come, or a link has come or gone.
    pub(super) fn stir(&mut self) {
        self.stirred = true;
    }

    /// When to look next.
    pub(super) fn next(&self) -> Option<Instant> {
        self.at
    }
}

impl Run<'_> {
    /// Has it asked whether those are gone of whom nothing is heard, and no more when something is heard again.
    pub(super) fn look_who_is_gone(&mut self, now: Instant) {
        if self.mode != Mode::Links {
            self.questions.at = None;
            return;
        }
        // Looked at rarely: something comes all the time.
        if self.questions.at.is_some_and(|at| now < at) {
            return;
        }
        let was_due = self.questions.at.take().is_some();
        if std::mem::take(&mut self.questions.stirred) {
            self.end_questions();
            self.questions.at = Some(now + ASK);
        } else if was_due {
            let late = self.waited_for();
            // Who gave up an operation before this one because of another rank is not likely to come.
            let culprits: Vec<Rank> = late
                .iter()
                .filter_map(|rank| self.culprit_of(*rank))
                .collect();
            for rank in late.into_iter().chain(culprits) {
                if self.engine.links[rank.index()].is_silent() {
                    self.questions.asked = true;
                    (self.ask_whether_gone)(rank.0);
                }
            }
        }
    }

    pub(super) fn end_questions(&mut self) {
        if std::mem::take(&mut self.questions.asked) {
            self.signals.lock().unwatch();
        }
    }
}
