//! Operations that wait for long: who did not come, and what they do instead.

use std::collections::VecDeque;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kolo_transport::ids::Rank;
use kolo_transport::wire::span::Span;
use serde::{Deserialize, Serialize};

use crate::group_id::GroupId;
use crate::operation::Tag;
use crate::times::STALL;

/// Reports that are kept.
const KEPT: usize = 64;

/// A rank that others wait for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Missing {
    /// Which, of all ranks of the job.
    pub rank: Rank,
    /// What is known of it.
    pub doing: String,
}

/// An operation of this rank has waited for long.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StallReport {
    /// What this rank asked for. Of named operations their names, too.
    pub operation: String,
    /// In which group.
    pub group: GroupId,
    /// Which operation of which call; for named operations, which have no number, the first of the call.
    pub tag: Tag,
    /// How long it has waited.
    pub waited: Duration,
    /// The ranks that did not come, with what they do instead.
    pub missing: Vec<Missing>,
}

impl fmt::Display for StallReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({}, {}) has waited {}",
            self.operation,
            self.tag,
            self.group,
            Span::rough(self.waited)
        )?;
        for (index, missing) in self.missing.iter().enumerate() {
            let before = if index == 0 { " for" } else { ";" };
            write!(f, "{before} rank {}: {}", missing.rank, missing.doing)?;
        }
        Ok(())
    }
}

/// What a rank said that it does. The times in it are from then.
pub(crate) fn as_said(doing: &str, ago: Duration) -> String {
    if ago < Duration::from_secs(1) {
        return doing.to_owned();
    }
    format!("{doing} (as it said {} ago)", Span::rough(ago))
}

type Callback = Arc<dyn Fn(&StallReport) + Send + Sync>;

/// Who is told, and when.
#[derive(Default)]
pub(crate) struct Stalls {
    state: Mutex<State>,
}

struct State {
    after: Duration,
    callback: Option<Callback>,
    reports: VecDeque<StallReport>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            after: STALL,
            callback: None,
            reports: VecDeque::new(),
        }
    }
}

impl fmt::Debug for Stalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stalls").finish_non_exhaustive()
    }
}

impl Stalls {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that runs under the lock panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn after(&self) -> Duration {
        self.lock().after
    }

    pub(crate) fn set_after(&self, after: Duration) {
        self.lock().after = after;
    }

    pub(crate) fn set_callback(&self, callback: Option<Callback>) {
        self.lock().callback = callback;
    }

    pub(crate) fn reports(&self) -> Vec<StallReport> {
        self.lock().reports.iter().cloned().collect()
    }

    pub(crate) fn report(&self, report: StallReport) {
        tracing::warn!(stall = %report, "an operation waits for ranks that did not come");
        let callback = {
            let mut state = self.lock();
            if state.reports.len() == KEPT {
                state.reports.pop_front();
            }
            state.reports.push_back(report.clone());
            state.callback.clone()
        };
        if let Some(callback) = callback {
            // The operation is not the callback's to break.
            let called = AssertUnwindSafe(|| callback(&report));
            if std::panic::catch_unwind(called).is_err() {
                tracing::error!("the function that is called with reports of waiting panicked");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_reads_like_a_sentence_and_reaches_its_listener() {
        let report = StallReport {
            operation: "barrier".to_owned(),
            group: GroupId::WORLD,
            tag: Tag::default(),
            waited: Duration::from_millis(1500),
            missing: [(1, "it sleeps"), (4, "nothing was heard from it")]
                .map(|(rank, doing)| Missing {
                    rank: Rank(rank),
                    doing: doing.to_owned(),
                })
                .to_vec(),
        };
        assert_eq!(
            report.to_string(),
            "barrier (operation 0 of call 0, all ranks) has waited 1.5s for rank 1: it sleeps; rank 4: nothing was \
             heard from it"
        );
        let stalls = Stalls::default();
        assert_eq!(stalls.after(), Duration::from_secs(60));
        let heard = Arc::new(Mutex::new(0));
        let count = Arc::clone(&heard);
        stalls.set_callback(Some(Arc::new(move |_| *count.lock().unwrap() += 1)));
        for _ in 0..=KEPT {
            stalls.report(report.clone());
        }
        assert_eq!(*heard.lock().unwrap(), KEPT + 1);
        // What waits is not to fail because the listener does.
        stalls.set_callback(Some(Arc::new(|_| panic!("it is the listener's fault"))));
        stalls.report(report.clone());
        assert_eq!(stalls.reports(), vec![report; KEPT]);
    }

    #[test]
    fn what_a_rank_said_long_ago_is_told_with_its_age() {
        let doing = "it is in no operation; its last was barrier, which ended 1s ago";
        let said = |millis| as_said(doing, Duration::from_millis(millis));
        assert_eq!(said(999), doing);
        assert_eq!(said(59_040), format!("{doing} (as it said 59s ago)"));
    }
}
