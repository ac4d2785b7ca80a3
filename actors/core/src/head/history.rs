//! The jobs that have ended, as many as the head remembers.

use std::collections::VecDeque;
use std::time::Instant;

use kolo_wire::JobInfo;
use kolo_wire::ids::JobId;

use crate::ranks::MAX_WORLD_SIZE;

/// Jobs at one time.
pub const MAX_JOBS: usize = 1024;
/// Workers and nodes in a list of jobs, so that it fits into a frame with the names and reasons of all.
pub const MAX_LISTED: usize = MAX_WORLD_SIZE as usize / 2;
/// Ended jobs that are remembered.
const MAX_HISTORY: usize = 256;
/// Workers and nodes of all ended jobs that are remembered.
const MAX_REMEMBERED: usize = 4 * MAX_WORLD_SIZE as usize;

/// Ended jobs with their numbers. Bounded: the oldest are forgotten, and before that their workers and nodes.
#[derive(Debug, Default)]
pub struct History {
    /// The oldest first.
    jobs: VecDeque<Remembered>,
}

/// An ended job.
#[derive(Debug)]
pub struct Remembered {
    /// Counts all jobs.
    pub number: u64,
    at: Instant,
    job: JobInfo,
}

impl Remembered {
    /// The job as people see it, with its workers and nodes or without.
    #[must_use]
    pub fn info(&self, now: Instant, whole: bool) -> JobInfo {
        let since = now.saturating_duration_since(self.at);
        JobInfo {
            ended_ms: Some(since.as_millis() as u64),
            ..if whole {
                self.job.clone()
            } else {
                self.job.outline()
            }
        }
    }

    /// How many workers and nodes it lists.
    #[must_use]
    pub fn size(&self) -> usize {
        size(&self.job)
    }
}

impl History {
    /// Remembers one more, which has ended now, and whose number is above all others.
    pub fn push(&mut self, number: u64, at: Instant, job: JobInfo) {
        if self.jobs.len() == MAX_HISTORY {
            self.jobs.pop_front();
        }
        self.jobs.push_back(Remembered { number, at, job });
        let newest_first = self.jobs.iter_mut().rev().map(|ended| &mut ended.job);
        shorten(newest_first, MAX_REMEMBERED);
    }

    /// The job, if it is remembered.
    #[must_use]
    pub fn find(&self, job: JobId) -> Option<&Remembered> {
        self.jobs.iter().find(|ended| ended.job.job == job)
    }

    /// All, the oldest first.
    pub fn all(&self) -> impl Iterator<Item = &Remembered> {
        self.jobs.iter()
    }
}

/// How many workers and nodes a job lists.
fn size(job: &JobInfo) -> usize {
    job.workers.len() + job.nodes.len()
}

/// Takes room for workers and nodes, if so much is left.
pub fn take(left: &mut usize, size: usize) -> bool {
    let rest = left.checked_sub(size);
    *left = rest.unwrap_or(*left);
    rest.is_some()
}

/// Keeps jobs, the newest first, to so many workers and nodes in all: the older ones go without.
fn shorten<'a>(jobs: impl IntoIterator<Item = &'a mut JobInfo>, limit: usize) {
    let mut left = limit;
    for job in jobs {
        if !take(&mut left, size(job)) {
            job.workers.clear();
            job.nodes.clear();
            job.network = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use kolo_wire::frame::{Limits, encode_head};
    use kolo_wire::ids::{DriverId, Generation, NodeId, Rank};
    use kolo_wire::{HeadReply, JobState, PlacedNode};

    use super::*;
    use crate::head::job::MAX_REASON;
    use crate::head::validate::MAX_NAME;

    /// A job of which all that is shown is as long as can be.
    fn job(id: u64, ranks: u32) -> JobInfo {
        JobInfo {
            state: JobState::Recovering,
            generation: Generation(u64::MAX),
            nodes: (0..ranks)
                .map(|rank| PlacedNode {
                    node: NodeId(u64::MAX),
                    hostname: "h".repeat(64),
                    address: "[2001:db8:ffff:ffff:ffff:ffff:ffff:ffff]:65535"
                        .parse()
                        .unwrap(),
                    ranks: vec![Rank(rank)],
                    has_program: true,
                })
                .collect(),
            age_ms: u64::MAX,
            ended_ms: Some(u64::MAX),
            reason: Some("x".repeat(MAX_REASON)),
            ..JobInfo::new(
                JobId(u64::MAX - id),
                "x".repeat(MAX_NAME),
                DriverId(u64::MAX),
            )
        }
    }

    #[test]
    fn the_oldest_are_forgotten_part_by_part() {
        const NODES: u32 = MAX_WORLD_SIZE / 16;
        let mut history = History::default();
        let at = Instant::now();
        for number in 0..=MAX_HISTORY as u64 {
            history.push(number, at, job(number, NODES));
        }
        let all: Vec<_> = history.all().collect();
        assert_eq!(all.len(), MAX_HISTORY);
        assert!(history.find(job(0, 0).job).is_none());
        assert!(history.find(job(1, 0).job).is_some());
        let whole = all.iter().filter(|ended| ended.size() > 0).count();
        assert_eq!(whole * NODES as usize, MAX_REMEMBERED);
        assert!(all.last().unwrap().size() > 0);
        let later = all[7].info(at + std::time::Duration::from_secs(3), true);
        assert_eq!(later.ended_ms, Some(3000));
    }

    #[test]
    fn a_list_of_all_jobs_fits_into_a_frame() {
        let mut jobs: Vec<_> = (0..(MAX_JOBS + MAX_HISTORY) as u64)
            .map(|id| job(id, 64))
            .collect();
        shorten(&mut jobs, MAX_LISTED);
        let mut frame = bytes::BytesMut::new();
        encode_head(&mut frame, &HeadReply::Jobs(jobs), 0).unwrap();
        assert!(
            frame.len() <= Limits::CONTROL.head as usize,
            "{}",
            frame.len()
        );
    }
}
