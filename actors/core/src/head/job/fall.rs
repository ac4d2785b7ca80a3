//! Failures that belong together: which came first, and which it took along.
//!
//! Each failure gets the time at which its error can have come at the latest, on the head's clock: the exit, or the end of the
//! second in which the worker has written its error down, if that was earlier. The earliest is the first cause. No clock of a
//! host is compared with that of another: a node says how long ago an exit was, and the distance between the error and the exit
//! is taken on the host where both happened.

use std::time::{Duration, Instant};

use kolo_wire::{Fall as Told, Follower, Followers, RankFailure};

/// Most failures beside the first cause that are kept.
const MOST: usize = 16;

/// The longest time before now at which a node or a worker can have seen something.
const LONGEST: Duration = Duration::from_secs(3600);

/// A failure, and when it came.
#[derive(Debug, Clone)]
struct Failed {
    /// When the error can have come at the latest, and then when the process ended.
    came: (Instant, Instant),
    failure: RankFailure,
}

/// The failures of one fall.
#[derive(Debug, Clone, Default)]
pub(super) struct Fall {
    /// In order. All but the first have no last lines.
    failures: Vec<Failed>,
    /// Failures beyond [`MOST`].
    more: u32,
    /// What comes next is another fall.
    is_over: bool,
    /// The fall after which the group is started anew, until the driver is told.
    untold: Option<Box<Told>>,
}

impl Fall {
    /// A failure that is heard of now. True if it is the first cause, in place of another.
    pub(super) fn add(&mut self, now: Instant, failure: RankFailure) -> bool {
        if self.is_over {
            self.clear();
        }
        let came = came(now, &failure);
        let place = self.failures.partition_point(|other| other.came <= came);
        let replaces = place == 0 && !self.failures.is_empty();
        self.failures.insert(place, Failed { came, failure });
        for follower in self.failures.iter_mut().skip(1) {
            follower.failure.stderr_tail.clear();
            if let Some(error) = follower
                .failure
                .account
                .as_mut()
                .and_then(|it| it.error.as_mut())
            {
                error.callstack.clear();
            }
        }
        if self.failures.len() > MOST + 1 {
            self.failures.pop();
            self.more = self.more.saturating_add(1);
        }
        replaces
    }

    /// The group has gone on: what comes next is another fall. This one is remembered until then.
    pub(super) fn close(&mut self) {
        self.is_over = true;
    }

    fn clear(&mut self) {
        self.failures.clear();
        (self.more, self.is_over) = (0, false);
    }

    /// The group is started anew, and the driver is told of this fall when it is up.
    pub(super) fn hand_over(&mut self) {
        if let Some(told) = self.told() {
            self.untold = Some(Box::new(told));
        }
        self.clear();
    }

    /// The fall of which the driver is to be told.
    pub(super) fn take_untold(&mut self) -> Option<Box<Told>> {
        self.untold.take()
    }

    /// The first cause, if anything has failed.
    pub(super) fn cause(&self) -> Option<&RankFailure> {
        self.failures.first().map(|first| &first.failure)
    }

    /// Something has failed, and the group has not gone on since.
    pub(super) fn is_open(&self) -> bool {
        !self.is_over && !self.failures.is_empty()
    }

    /// What has failed after the first cause.
    pub(super) fn followers(&self) -> Followers {
        let Some((cause, others)) = self.failures.split_first() else {
            return Followers::default();
        };
        let follower = |other: &Failed| Follower {
            after_ms: (other.came.0 - cause.came.0).as_millis() as u64,
            failure: other.failure.clone(),
        };
        Followers {
            first: others.iter().map(follower).collect(),
            more: self.more,
        }
    }

    /// The fall, as a driver is told of it.
    fn told(&self) -> Option<Told> {
        Some(Told {
            cause: self.cause()?.clone(),
            followers: self.followers(),
        })
    }
}

/// When an error that is heard of now can have come at the latest, and when its process ended.
fn came(now: Instant, failure: &RankFailure) -> (Instant, Instant) {
    let Some(account) = &failure.account else {
        return (now, now);
    };
    let ago = |time: Instant, ms: u64| {
        let before = Duration::from_millis(ms).min(LONGEST);
        time.checked_sub(before).unwrap_or(time)
    };
    let exit = ago(now, account.age_ms);
    let second = account.error.as_ref().and_then(|error| error.at_s);
    // A file has whole seconds: the error may have come at the end of its second.
    let over = second.map(|second| second.saturating_add(1).saturating_mul(1000));
    let before = over.map_or(0, |over| account.at_ms.saturating_sub(over));
    (ago(exit, before), exit)
}

#[cfg(test)]
mod tests {
    use kolo_wire::ids::Rank;
    use kolo_wire::{Account, Exit, WorkerError};

    use super::super::fixtures;
    use super::*;

    /// A failure of a rank: heard at this time, so long after the exit. The clock of its host, and the second of its error file.
    #[derive(Debug, Clone, Copy)]
    struct Case {
        rank: u32,
        heard: u64,
        age: u64,
        clock: u64,
        file: Option<u64>,
    }

    const fn exit(rank: u32, heard: u64, age: u64) -> Case {
        let (clock, file) = (5_000_000, None);
        Case {
            rank,
            heard,
            age,
            clock,
            file,
        }
    }

    const fn file(rank: u32, heard: u64, clock: u64, second: u64) -> Case {
        Case {
            rank,
            heard,
            age: 0,
            clock,
            file: Some(second),
        }
    }

    fn failure(case: Case) -> RankFailure {
        let error = case.file.map(|second| WorkerError {
            message: "Error: x".to_owned(),
            callstack: vec!["line".to_owned()],
            at_s: Some(second),
            place: None,
        });
        RankFailure {
            rank: Rank(case.rank),
            account: Some(Box::new(Account {
                at_ms: case.clock,
                age_ms: case.age,
                error,
            })),
            ..fixtures::failure(Exit::Code(1))
        }
    }

    /// The ranks in order, each with its time after the first.
    fn order(cases: &[Case]) -> Vec<(u32, u64)> {
        let start = Instant::now() + Duration::from_secs(10_000);
        let mut fall = Fall::default();
        for case in cases {
            fall.add(start + Duration::from_millis(case.heard), failure(*case));
        }
        let told = fall.told().unwrap();
        let first = (told.cause.rank.0, 0);
        let others = told.followers.first.iter();
        let others = others.map(|follower| (follower.failure.rank.0, follower.after_ms));
        std::iter::once(first).chain(others).collect()
    }

    #[test]
    fn the_first_cause_is_the_error_that_came_first() {
        // Clocks of hosts differ by hours: only what is on one host is compared.
        const A: u64 = 7_000_000_500;
        const B: u64 = 3_000_000_900;
        for (cases, expected) in [
            // By order of hearing where nothing else is known.
            (
                &[exit(2, 100, 0), exit(0, 150, 0)][..],
                &[(2, 0), (0, 50)][..],
            ),
            // News that was under way for longer is of an earlier exit.
            (&[exit(0, 100, 0), exit(2, 150, 90)], &[(2, 0), (0, 40)]),
            // A worker that took two seconds to end after its error, and whose peers ended at once.
            (
                &[exit(0, 3000, 0), file(1, 3900, A, A / 1000 - 3)],
                &[(1, 0), (0, 1600)],
            ),
            // The same the other way round on the clock of the other host.
            (
                &[file(0, 3000, B, B / 1000), file(1, 3900, A, A / 1000 - 3)],
                &[(1, 0), (0, 1600)],
            ),
            // Within the second of the file nothing is known: the exit counts.
            (
                &[exit(0, 3000, 0), file(1, 3400, A, A / 1000)],
                &[(0, 0), (1, 400)],
            ),
            // An echo with a file does not overtake the worker that was killed.
            (
                &[exit(2, 1000, 0), file(0, 1800, A, A / 1000 - 1)],
                &[(2, 0), (0, 300)],
            ),
            // A file from after the exit, or from 1970, is of a clock that was set: bounded, and no panic.
            (
                &[file(0, 1000, A, u64::MAX), exit(1, 1001, 0)],
                &[(0, 0), (1, 1)],
            ),
            (
                &[exit(1, 1000, 0), file(0, 2000, A, 0)],
                &[(0, 0), (1, 3_599_000)],
            ),
            (
                &[exit(1, 1000, 0), exit(0, 1000, u64::MAX)],
                &[(0, 0), (1, 3_600_000)],
            ),
        ] {
            assert_eq!(order(cases), expected, "{cases:?}");
            let mut turned = cases.to_vec();
            turned.reverse();
            assert_eq!(order(&turned), expected, "in whatever order they are heard");
        }
    }

    #[test]
    fn only_the_first_cause_keeps_its_last_words_and_the_number_of_others_is_bounded() {
        let start = Instant::now() + Duration::from_secs(10_000);
        let mut fall = Fall::default();
        for rank in 0..100 {
            let replaces = fall.add(start, failure(exit(rank, 0, u64::from(rank))));
            assert_eq!(replaces, rank > 0, "each was earlier than those before");
        }
        let told = fall.told().unwrap();
        assert_eq!(told.cause.rank, Rank(99));
        assert!(!told.cause.stderr_tail.is_empty());
        assert_eq!((told.followers.first.len(), told.followers.more), (16, 83));
        let tails = told.followers.first.iter();
        assert!(tails.clone().all(|it| it.failure.stderr_tail.is_empty()));
        assert_eq!(told.followers.first[0].failure.rank, Rank(98));

        fall.close();
        assert!(!fall.is_open());
        assert_eq!(fall.cause().unwrap().rank, Rank(99), "until the next one");
        assert!(!fall.add(start, failure(exit(7, 0, 0))));
        assert!(fall.is_open());
        assert_eq!(fall.cause().unwrap().rank, Rank(7));
        assert!(fall.followers().is_empty());
    }
}
