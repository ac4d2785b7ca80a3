//! What a rank says while it waits for long, and when: what it asks for, so that those who ask for something else hear of it, and
//! to people who did not come.

use std::time::{Duration, Instant};

use crate::times::{ASK, COLLECT, REPEAT};

/// What it is time for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Due {
    /// To say what this rank asks for.
    pub(crate) say: bool,
    /// To ask for the links that are missing.
    pub(crate) links: bool,
    pub(crate) report: Option<Report>,
}

/// What it is time for, of a report to people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Report {
    /// To ask what the others know of those that did not come.
    Collect,
    Make,
}

/// When all that is due.
#[derive(Debug)]
pub(crate) struct Watch {
    started: Instant,
    repeat_at: Option<Instant>,
    /// When to look whether something has come.
    look_at: Option<Instant>,
    has_said: bool,
    /// Nothing has come for a while.
    is_quiet: bool,
    /// Something has come since that was looked at.
    has_moved: bool,
    collect_at: Option<Instant>,
    report_at: Option<Instant>,
    /// What is known of the ranks that do not come.
    pub(crate) missing: Vec<(u32, String)>,
}

impl Watch {
    /// `report_after` is how long an operation waits before that is reported.
    pub(crate) fn new(started: Instant, report_after: Duration) -> Self {
        Self {
            started,
            repeat_at: Some(started + REPEAT),
            look_at: Some(started + ASK),
            has_said: false,
            is_quiet: false,
            has_moved: false,
            collect_at: started.checked_add(report_after),
            report_at: None,
            missing: Vec::new(),
        }
    }

    /// Something has come.
    pub(crate) fn stir(&mut self) {
        self.has_moved = true;
    }

    /// Whether nothing has come for a while.
    pub(crate) fn is_quiet(&self) -> bool {
        self.is_quiet && !self.has_moved
    }

    pub(crate) fn has_said(&self) -> bool {
        self.has_said
    }

    /// Others are asked what they know of those that did not come.
    pub(crate) fn is_collecting(&self) -> bool {
        self.collect_at.is_none()
    }

    /// When to look next.
    pub(crate) fn next(&self) -> Option<Instant> {
        [
            self.repeat_at,
            self.look_at,
            self.collect_at,
            self.report_at,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// What it is time for. Each thing once.
    pub(crate) fn due(&mut self, now: Instant, deadline: Instant) -> Due {
        let is_due = |at: &mut Option<Instant>| at.take_if(|at| now >= *at).is_some();
        let mut due = Due::default();
        if self.is_quiet && std::mem::take(&mut self.has_moved) {
            self.is_quiet = false;
            self.look_at = Some(now + ASK);
        }
        if is_due(&mut self.look_at) {
            if std::mem::take(&mut self.has_moved) {
                self.look_at = Some(now + ASK);
            } else {
                self.is_quiet = true;
                due.say = !std::mem::replace(&mut self.has_said, true);
            }
        }
        if is_due(&mut self.repeat_at) {
            let waited = now.saturating_duration_since(self.started);
            let is_early = now + waited + waited / 2 <= deadline;
            self.repeat_at = is_early.then(|| now + waited);
            due.links = true;
            due.say |= self.has_said;
        }
        if is_due(&mut self.collect_at) {
            self.report_at = Some(now + COLLECT);
            (due.report, due.say) = (Some(Report::Collect), true);
        } else if is_due(&mut self.report_at) {
            due.report = Some(Report::Make);
        }
        due
    }

    /// The operation ends: a report that is due by then, or just after, is made now. Returns whether there is one.
    pub(crate) fn report_before_the_end(&mut self, now: Instant) -> bool {
        if self.collect_at.is_some_and(|at| at > now + COLLECT) {
            return false;
        }
        let due = [self.collect_at.take(), self.report_at.take()];
        due.iter().any(Option::is_some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_when() {
        let (start, ms) = (Instant::now(), Duration::from_millis);
        let at = |millis| start + ms(millis);
        let mut watch = Watch::new(start, ms(5000));
        let deadline = at(60_000);
        let due = |say, links, report| Due { say, links, report };
        let nothing = Due::default();
        // When, whether something came before, and what is due then.
        let table = [
            (50, false, nothing),
            (100, true, nothing),
            (150, false, nothing),
            (200, false, due(true, false, None)),
            (1000, false, due(true, true, None)),
            (1999, true, nothing),
            (2000, false, due(true, true, None)),
            (4000, false, due(true, true, None)),
            (5000, false, due(true, false, Some(Report::Collect))),
            (5300, false, due(false, false, Some(Report::Make))),
            (6000, false, nothing),
        ];
        for (millis, moved, expected) in table {
            if moved {
                watch.stir();
            }
            assert_eq!(watch.due(at(millis), deadline), expected, "at {millis} ms");
        }
        assert!(watch.is_quiet() && watch.has_said() && watch.is_collecting());
        assert!(!watch.report_before_the_end(at(6000)));
        // Just before the deadline nothing is repeated.
        let mut watch = Watch::new(start, ms(5000));
        assert!(watch.due(at(1000), at(2400)).links);
        assert!(!watch.due(at(2000), at(2400)).links);
        assert!(!watch.report_before_the_end(at(4699)));
        assert!(watch.report_before_the_end(at(4700)));
        assert!(!watch.report_before_the_end(at(4700)));
    }
}
