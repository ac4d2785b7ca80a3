//! Jobs that nobody is there for any more: neither their driver nor the head.
//!
//! Workers live on while the head is away (D-2), and as long as the head is there it ends the job of a driver that is
//! gone. If both are gone nobody is left to end it, so the node does after a while. No clock of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kolo_wire::ids::JobId;

/// Finds the jobs whose driver and head have both been gone for too long.
#[derive(Debug)]
pub struct Orphans {
    timeout: Duration,
    /// Since when both have been gone.
    since: BTreeMap<JobId, Instant>,
    /// Those that were named already and are still here.
    named: BTreeSet<JobId>,
}

impl Orphans {
    /// Jobs are given up when both have been gone for `timeout`.
    #[must_use]
    pub fn new(timeout: Duration) -> Self {
        Self {
            timeout,
            since: BTreeMap::new(),
            named: BTreeSet::new(),
        }
    }

    /// What is the case now: whether the head is there, and for each job on this node whether its driver is. Names the
    /// jobs that are to be ended, each once.
    ///
    /// Call it at every change and at [`Orphans::next_deadline`].
    pub fn step(
        &mut self,
        now: Instant,
        head_is_there: bool,
        jobs: impl IntoIterator<Item = (JobId, bool)>,
    ) -> Vec<JobId> {
        let mut alone = BTreeMap::new();
        let mut here = BTreeSet::new();
        for (job, driver_is_there) in jobs {
            here.insert(job);
            if !head_is_there && !driver_is_there {
                alone.insert(job, *self.since.get(&job).unwrap_or(&now));
            }
        }
        self.since = alone;
        self.named.retain(|job| here.contains(job));
        let over: Vec<JobId> = self
            .since
            .iter()
            .filter(|(_, since)| now.saturating_duration_since(**since) >= self.timeout)
            .map(|(job, _)| *job)
            .collect();
        over.into_iter()
            .filter(|job| self.named.insert(*job))
            .collect()
    }

    /// When the next job is to be ended, if nobody comes back.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.since
            .iter()
            .filter(|(job, _)| !self.named.contains(job))
            // A time that no clock reaches is none.
            .filter_map(|(_, since)| since.checked_add(self.timeout))
            .min()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);
    const JOB: JobId = JobId(1);

    #[test]
    fn a_job_is_ended_when_both_have_been_gone_for_the_time() {
        let start = Instant::now();
        let mut orphans = Orphans::new(TIMEOUT);
        assert!(orphans.step(start, true, [(JOB, true)]).is_empty());
        assert_eq!(orphans.next_deadline(), None);
        // The head first, the driver 10 s later: the later counts.
        assert!(orphans.step(start, false, [(JOB, true)]).is_empty());
        assert_eq!(orphans.next_deadline(), None);
        let both = start + Duration::from_secs(10);
        assert!(orphans.step(both, false, [(JOB, false)]).is_empty());
        assert_eq!(orphans.next_deadline(), Some(both + TIMEOUT));
        let early = both + Duration::from_millis(59_999);
        assert!(orphans.step(early, false, [(JOB, false)]).is_empty());
        assert_eq!(orphans.step(both + TIMEOUT, false, [(JOB, false)]), [JOB]);
        // Once.
        assert!(
            orphans
                .step(both + TIMEOUT, false, [(JOB, false)])
                .is_empty()
        );
        assert_eq!(orphans.next_deadline(), None);
        // A job of the same id later is another one.
        assert!(orphans.step(both + TIMEOUT, false, []).is_empty());
        let again = both + TIMEOUT * 2;
        assert!(orphans.step(again, false, [(JOB, false)]).is_empty());
        assert_eq!(orphans.step(again + TIMEOUT, false, [(JOB, false)]), [JOB]);
    }

    #[test]
    fn d2_who_comes_back_in_time_saves_it() {
        let start = Instant::now();
        for (head, driver) in [(true, false), (false, true)] {
            let mut orphans = Orphans::new(TIMEOUT);
            assert!(orphans.step(start, false, [(JOB, false)]).is_empty());
            let late = start + Duration::from_secs(59);
            assert!(orphans.step(late, head, [(JOB, driver)]).is_empty());
            assert_eq!(orphans.next_deadline(), None);
            // The time begins anew.
            assert!(orphans.step(late, false, [(JOB, false)]).is_empty());
            let over = start + TIMEOUT;
            assert!(orphans.step(over, false, [(JOB, false)]).is_empty());
            assert_eq!(orphans.next_deadline(), Some(late + TIMEOUT));
        }
    }

    #[test]
    fn a_time_without_end_is_never_over() {
        let start = Instant::now();
        let mut orphans = Orphans::new(Duration::MAX);
        assert!(orphans.step(start, false, [(JOB, false)]).is_empty());
        assert_eq!(orphans.next_deadline(), None);
        let late = start + Duration::from_secs(1 << 30);
        assert!(orphans.step(late, false, [(JOB, false)]).is_empty());
    }

    proptest! {
        /// A job is named exactly when neither was seen for the whole of the time before.
        #[test]
        fn d2_never_while_one_of_them_is_there(
            steps in proptest::collection::vec((0_u64..40, any::<bool>(), any::<bool>()), 1..60),
        ) {
            let mut orphans = Orphans::new(TIMEOUT);
            let mut now = Instant::now();
            let mut last_seen = None;
            for (seconds, head, driver) in steps {
                now += Duration::from_secs(seconds);
                if head || driver {
                    last_seen = None;
                } else {
                    last_seen.get_or_insert(now);
                }
                let named = orphans.step(now, head, [(JOB, driver)]);
                let alone = last_seen.is_some_and(|since| now - since >= TIMEOUT);
                if !named.is_empty() {
                    prop_assert!(alone);
                    return Ok(());
                }
                prop_assert!(!alone);
            }
        }
    }
}
