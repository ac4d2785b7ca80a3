//! Jobs whose workers a node ends by itself while the head is away. No clock of its own.
//!
//! Workers live on while the head is away (D-2), and as long as the head is there it ends the job of a driver that is
//! gone. If both are gone nobody is left to end it, so the node does after a while.
//!
//! An elastic job goes on without a node that the head has lost. Its workers there must end even if the driver still
//! reaches them, or there would be two groups (G-3): see [`fence`].

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kolo_wire::ids::JobId;

use crate::fence;

/// The head, as the node sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// Whether the node is registered.
    pub is_there: bool,
    /// The lease that the head gave at the last registration.
    pub lease: Duration,
}

/// A job with workers on the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Present {
    /// The job.
    pub job: JobId,
    /// Whether its driver is there.
    pub driver: bool,
    /// Whether the job may change its members.
    pub elastic: bool,
}

/// Why a node ends the workers of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Driver and head have been gone for so long.
    Alone(Duration),
    /// The head has been gone for so long, and the job goes on elsewhere.
    CutOff(Duration),
}

impl Cause {
    fn limit(self) -> Duration {
        match self {
            Self::Alone(limit) | Self::CutOff(limit) => limit,
        }
    }
}

/// Finds the jobs whose workers are to be ended because the head is away.
#[derive(Debug)]
pub struct Orphans {
    timeout: Duration,
    /// Since when the head has been away.
    away: Option<Instant>,
    /// Since when nobody has been there, and what follows from it.
    since: BTreeMap<JobId, (Instant, Cause)>,
    /// Those that were named already and are still here.
    named: BTreeSet<JobId>,
}

impl Orphans {
    /// Jobs that never change their members are given up when both have been gone for `timeout`.
    #[must_use]
    pub fn new(timeout: Duration) -> Self {
        Self {
            timeout,
            away: None,
            since: BTreeMap::new(),
            named: BTreeSet::new(),
        }
    }

    /// What is the case now. Names the jobs that are to be ended, each once.
    ///
    /// Call it at every change and at [`Orphans::next_deadline`].
    pub fn step(
        &mut self,
        now: Instant,
        head: Head,
        jobs: impl IntoIterator<Item = Present>,
    ) -> Vec<(JobId, Cause)> {
        let away = *self.away.get_or_insert(now);
        if head.is_there {
            self.away = None;
        }
        let mut alone = BTreeMap::new();
        let mut here = BTreeSet::new();
        for Present {
            job,
            driver,
            elastic,
        } in jobs
        {
            here.insert(job);
            let cause = if elastic {
                Cause::CutOff(fence::of_node(head.lease))
            } else {
                Cause::Alone(self.timeout)
            };
            if !head.is_there && (elastic || !driver) {
                let known = self.since.get(&job).map(|(since, _)| *since);
                // The head counts from its own loss, also on workers that came after it.
                let new = if elastic { away } else { now };
                alone.insert(job, (known.unwrap_or(new), cause));
            }
        }
        self.since = alone;
        self.named.retain(|job| here.contains(job));
        let over = self
            .since
            .iter()
            .filter(|(_, (since, cause))| now.saturating_duration_since(*since) >= cause.limit());
        over.map(|(job, (_, cause))| (*job, *cause))
            .filter(|(job, _)| self.named.insert(*job))
            .collect()
    }

    /// When the next job is to be ended, if nobody comes back.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.since
            .iter()
            .filter(|(job, _)| !self.named.contains(job))
            // A time that no clock reaches is none.
            .filter_map(|(_, (since, cause))| since.checked_add(cause.limit()))
            .min()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);
    const JOB: JobId = JobId(1);
    const LEASE: Duration = Duration::from_secs(3);
    const THERE: Head = Head {
        is_there: true,
        lease: LEASE,
    };
    const AWAY: Head = Head {
        is_there: false,
        lease: LEASE,
    };

    fn fixed(driver: bool) -> [Present; 1] {
        [Present {
            job: JOB,
            driver,
            elastic: false,
        }]
    }

    #[test]
    fn g3_an_elastic_job_ends_without_a_head_also_if_its_driver_is_there() {
        let start = Instant::now();
        let mut orphans = Orphans::new(TIMEOUT);
        let elastic = |driver| Present {
            elastic: true,
            ..fixed(driver)[0]
        };
        let other = Present {
            job: JobId(2),
            ..fixed(true)[0]
        };
        assert!(orphans.step(start, THERE, [elastic(false)]).is_empty());
        assert!(orphans.step(start, AWAY, [elastic(true), other]).is_empty());
        // The head counts on this time.
        let fence = fence::of_node(LEASE);
        assert_eq!(orphans.next_deadline(), Some(start + fence));
        let early = start + fence / 2;
        assert!(
            orphans
                .step(early, AWAY, [elastic(false), other])
                .is_empty()
        );
        let over = start + fence;
        let named = orphans.step(over, AWAY, [elastic(true), other]);
        assert_eq!(named, [(JOB, Cause::CutOff(fence))]);
        assert_eq!(orphans.next_deadline(), None);
        // A head that comes back in time stops the clock.
        let mut orphans = Orphans::new(TIMEOUT);
        assert!(orphans.step(start, AWAY, [elastic(true)]).is_empty());
        assert!(orphans.step(early, THERE, [elastic(true)]).is_empty());
        assert!(orphans.step(over, AWAY, [elastic(true)]).is_empty());
        assert_eq!(orphans.next_deadline(), Some(over + fence));
        // A start that was on its way when the head went gives no more time.
        let mut orphans = Orphans::new(TIMEOUT);
        assert!(orphans.step(start, AWAY, []).is_empty());
        assert!(orphans.step(early, AWAY, [elastic(true)]).is_empty());
        assert_eq!(orphans.next_deadline(), Some(start + fence));
    }

    #[test]
    fn g3_the_head_waits_longer_than_any_node_takes() {
        let heartbeat = Duration::from_millis(250);
        // The node misses an answer, waits, and kills what has not ended after its notice.
        let node = LEASE + heartbeat + fence::of_node(LEASE) + fence::NOTICE;
        let head = fence::of_head(LEASE, heartbeat);
        assert!(node < head && head <= Duration::from_secs(10), "{head:?}");
        assert_eq!(fence::of_head(Duration::MAX, heartbeat), Duration::MAX);
    }

    #[test]
    fn a_job_is_ended_once_and_one_of_the_same_id_later_is_another_one() {
        let start = Instant::now();
        let mut orphans = Orphans::new(TIMEOUT);
        for begin in [start, start + TIMEOUT * 2] {
            assert!(orphans.step(begin, AWAY, fixed(false)).is_empty());
            let over = begin + TIMEOUT;
            let early = over.checked_sub(Duration::from_millis(1)).unwrap();
            assert!(orphans.step(early, AWAY, fixed(false)).is_empty());
            let ended = [(JOB, Cause::Alone(TIMEOUT))];
            assert_eq!(orphans.step(over, AWAY, fixed(false)), ended);
            assert!(orphans.step(over, AWAY, fixed(false)).is_empty());
            assert_eq!(orphans.next_deadline(), None);
            assert!(orphans.step(over, AWAY, []).is_empty());
        }
    }

    #[test]
    fn a_time_without_end_is_never_over() {
        let start = Instant::now();
        let mut orphans = Orphans::new(Duration::MAX);
        assert!(orphans.step(start, AWAY, fixed(false)).is_empty());
        assert_eq!(orphans.next_deadline(), None);
        let late = start + Duration::from_secs(1 << 30);
        assert!(orphans.step(late, AWAY, fixed(false)).is_empty());
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
                let named = orphans.step(now, Head { is_there: head, ..AWAY }, fixed(driver));
                let alone = last_seen.is_some_and(|since| now - since >= TIMEOUT);
                if !named.is_empty() {
                    prop_assert!(alone);
                    return Ok(());
                }
                prop_assert!(!alone);
                let by = last_seen.map(|since| since + TIMEOUT);
                prop_assert_eq!(orphans.next_deadline(), by);
            }
        }
    }
}
