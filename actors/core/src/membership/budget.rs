//! What a job has used up of its limits, and how far it has come.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use kolo_wire::span::Span;
use kolo_wire::{Kept, ids};

use super::end::End;
use super::limits::{Limits, cooldown};
use super::seat::Host;
use crate::pace::Backoff;

/// The last commit of a job. A later generation has later commits, whatever the numbers: they are lower than before if all members
/// were lost, and others went on from a commit that is on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Commit {
    generation: ids::Generation,
    number: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Cooling {
    /// Failures of the host so far. They never expire, as in Horovod.
    times: u32,
    until: Instant,
    /// The failure that began it.
    why: String,
}

/// How long a host is left out after a failed health check, if the job does not say how long hosts cool down.
const UNHEALTHY: RangeInclusive<Duration> = Duration::from_secs(10)..=Duration::from_secs(600);

/// A group that is started anew and fails earlier lives short.
const SHORT_LIFE: Duration = Duration::from_secs(1);

/// The pause between the second and the third of groups that live short.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// The longest pause between groups that live short.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// What a job has used up: resets, restarts, cool-downs, and time without a group.
#[derive(Debug, Clone)]
pub struct Budget {
    /// The source of the random parts of cool-downs.
    seed: u64,
    /// Since when no generation is active.
    idle_since: Option<Instant>,
    /// Why the last generation is over. Empty while one is active, and before the first.
    idle_why: String,
    /// Generations that became active.
    formed: u32,
    /// When restarts were used up, as far back as the limit looks.
    restarts: VecDeque<Instant>,
    /// Restarts that were used up since the last commit.
    without_progress: u32,
    /// The first failure since the last commit, in words.
    cause: Option<String>,
    /// Why the members of the last generation could not go on, if none was lost.
    broken: Option<String>,
    commit: Option<Commit>,
    /// The last generation in which members made a commit that was progress.
    progress: ids::Generation,
    /// Commits up to this number are made again, as all members were lost that had them: that is no progress.
    redone: u64,
    /// A commit outlives all members, the last one or one before.
    durable: bool,
    hosts: BTreeMap<Host, Cooling>,
    /// Of a group that is started anew, if the last one lived short: the pauses to come.
    short_lived: Option<Backoff>,
    not_before: Option<Instant>,
}

impl Budget {
    /// Nothing is used up. The job waits for its first group from `now` on. `seed` is random.
    #[must_use]
    pub fn new(now: Instant, seed: u64) -> Self {
        Self {
            seed,
            idle_since: Some(now),
            idle_why: String::new(),
            formed: 0,
            restarts: VecDeque::new(),
            without_progress: 0,
            cause: None,
            broken: None,
            commit: None,
            progress: ids::Generation::default(),
            redone: 0,
            durable: false,
            hosts: BTreeMap::new(),
            short_lived: None,
            not_before: None,
        }
    }

    /// The generation is over, or its members hold; this is `why`. The first reason counts.
    pub fn idle(&mut self, now: Instant, why: &str) {
        self.idle_since.get_or_insert(now);
        if self.idle_why.is_empty() {
            why.clone_into(&mut self.idle_why);
        }
    }

    /// Why the generation is over is known better.
    pub fn explained(&mut self, why: &str) {
        if self.idle_since.is_some() {
            why.clone_into(&mut self.idle_why);
        }
    }

    /// A group that is started anew has failed after so long, and nothing of it is left. The first restart comes at once. As long as
    /// groups live short there are pauses before the next ones, which grow.
    pub fn fell(&mut self, now: Instant, lived: Duration) {
        if lived >= SHORT_LIFE {
            self.short_lived = None;
        } else if let Some(backoff) = &mut self.short_lived {
            self.not_before = Some(now + backoff.failed());
        } else {
            self.short_lived = Some(Backoff::new(FIRST_PAUSE, LONGEST_PAUSE));
        }
    }

    /// No group is started before this time, if it is to come.
    #[must_use]
    pub fn pause(&self, now: Instant) -> Option<Instant> {
        self.not_before.filter(|at| *at > now)
    }

    /// No process of the generation before is left: the wait for the next one begins now.
    pub fn emptied(&mut self, now: Instant) {
        if self.idle_since.is_some() {
            self.idle_since = Some(now);
        }
    }

    /// A generation is active. `restores` says that no member had the state, so that they go on from an earlier commit, perhaps.
    pub fn formed(&mut self, restores: bool) {
        self.idle_since = None;
        self.broken = None;
        self.idle_why.clear();
        if restores {
            self.redone = self.redone.max(self.commit().unwrap_or_default());
        }
        self.formed = self.formed.saturating_add(1);
    }

    /// All members of a generation have the state of this commit. It is progress if they made the commit, and not again.
    ///
    /// Members made it after the last commit of the generation before, whatever the number: each state of a program counts
    /// its own commits.
    pub fn committed(&mut self, generation: ids::Generation, number: u64, kept: Kept) {
        self.durable |= kept == Kept::Durable;
        if kept != Kept::Received && generation > self.progress && number > self.redone {
            self.progress = generation;
            self.redone = 0;
            self.without_progress = 0;
            self.cause = None;
        }
        self.commit = self.commit.max(Some(Commit { generation, number }));
    }

    /// A process that was there since `since` has failed, and this is `why`. It uses up one restart, and its host cools
    /// down, if the host is to blame.
    ///
    /// A process that was there already at the last failure fails because of it, more often than not. It uses up nothing, and its
    /// host stays warm.
    pub fn failed(
        &mut self,
        now: Instant,
        limits: &Limits,
        since: Instant,
        host: Option<&Host>,
        why: &str,
    ) {
        if self.restarts.back().is_some_and(|last| since < *last) {
            return;
        }
        self.without_progress = self.without_progress.saturating_add(1);
        self.cause.get_or_insert_with(|| why.to_owned());
        self.restarts.push_back(now);
        // The last one stays: it tells which failures come with it.
        let window = limits.restarts_within.map(|(_, window)| window);
        while self.restarts.len() > 1
            && self.restarts.front().is_some_and(|at| {
                window.is_none_or(|window| now.saturating_duration_since(*at) >= window)
            })
        {
            self.restarts.pop_front();
        }
        if let (Some(host), Some(range)) = (host, &limits.cooldown) {
            self.cool(now, range, host, why);
        }
    }

    /// The health check of a host has failed. The host cools down; no restart is used up.
    pub fn unhealthy(&mut self, now: Instant, limits: &Limits, host: &Host, why: &str) {
        let range = limits.cooldown.as_ref().unwrap_or(&UNHEALTHY);
        self.cool(now, range, host, why);
    }

    fn cool(&mut self, now: Instant, range: &RangeInclusive<Duration>, host: &Host, why: &str) {
        let fraction = self.fraction();
        let cooling = self.hosts.entry(host.clone()).or_insert(Cooling {
            times: 0,
            until: now,
            why: String::new(),
        });
        if cooling.times == 0 || cooling.until <= now {
            cooling.times = cooling.times.saturating_add(1);
            cooling.until = now + cooldown(range, cooling.times, fraction);
            why.clone_into(&mut cooling.why);
        }
    }

    /// The members could not go on, though none is lost. That uses up one restart of those without progress: they may fail so for ever.
    pub fn broke(&mut self, why: &str) {
        self.without_progress = self.without_progress.saturating_add(1);
        self.cause.get_or_insert_with(|| why.to_owned());
        self.broken = Some(why.to_owned());
    }

    /// Why the members of the last generation could not go on, if none was lost, until the next one is active.
    #[must_use]
    pub fn broken(&self) -> Option<&str> {
        self.broken.as_deref()
    }

    /// The next random number in `0.0..1.0` (splitmix64).
    fn fraction(&mut self) -> f64 {
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Since when no generation is active. Nothing while one is.
    #[must_use]
    pub fn idle_since(&self) -> Option<Instant> {
        self.idle_since
    }

    /// Why the last generation is over, in words. Empty while one is active, and before the first.
    #[must_use]
    pub fn idle_why(&self) -> &str {
        &self.idle_why
    }

    /// A generation has been active.
    #[must_use]
    pub fn has_formed(&self) -> bool {
        self.formed > 0
    }

    /// How often the membership has changed: each generation that became active counts, but for the first.
    #[must_use]
    pub fn resets(&self) -> u32 {
        self.formed.saturating_sub(1)
    }

    /// The membership may change once more.
    #[must_use]
    pub fn has_resets(&self, limits: &Limits) -> bool {
        let change = u32::from(self.has_formed());
        limits
            .max_resets
            .is_none_or(|max| self.resets() + change <= max)
    }

    /// Restarts that were used up since the last commit: all of them if nobody sees the commits of the program.
    #[must_use]
    pub fn without_progress(&self) -> u32 {
        self.without_progress
    }

    /// The number of the last commit.
    #[must_use]
    pub fn commit(&self) -> Option<u64> {
        self.commit.map(|commit| commit.number)
    }

    /// The last generation all members of which are known to have the last commit, or 0.
    #[must_use]
    pub fn committed_in(&self) -> ids::Generation {
        self.commit
            .map_or_else(ids::Generation::default, |commit| commit.generation)
    }

    /// A commit outlives all members: the last one, or one before.
    #[must_use]
    pub fn is_durable(&self) -> bool {
        self.durable
    }

    /// The hosts that get no new process now.
    #[must_use]
    pub fn cooling(&self, now: Instant) -> BTreeSet<Host> {
        let cooling = self.hosts.iter().filter(|(_, host)| host.until > now);
        cooling.map(|(name, _)| name.clone()).collect()
    }

    /// The hosts that get no new process now: until when, and why.
    pub fn left_out(&self, now: Instant) -> impl Iterator<Item = (&Host, Instant, &str)> {
        let cooling = self.hosts.iter().filter(move |(_, host)| host.until > now);
        cooling.map(|(name, host)| (name, host.until, host.why.as_str()))
    }

    /// When the next cool-down ends.
    #[must_use]
    pub fn next_warm(&self, now: Instant) -> Option<Instant> {
        let ends = self.hosts.values().map(|host| host.until);
        ends.filter(|until| *until > now).min()
    }

    /// A cool-down has ended after `then`, and not after `now`.
    #[must_use]
    pub fn has_warmed(&self, then: Instant, now: Instant) -> bool {
        let mut ends = self.hosts.values().map(|host| host.until);
        ends.any(|until| until > then && until <= now)
    }

    /// The first of the failures that count.
    #[must_use]
    pub fn cause(&self) -> Option<&str> {
        self.cause.as_deref()
    }

    /// Which limit of restarts is exceeded, and in words why.
    #[must_use]
    pub fn exceeded(&self, now: Instant, limits: &Limits) -> Option<(End, String)> {
        let cause = self.cause.as_deref().unwrap_or("unknown");
        let most = limits.restarts_without_progress;
        if limits.holds_seats() && self.without_progress > most {
            let text = match self.without_progress {
                1 => "a worker has failed, and no restart is allowed (--max-restarts 0)".to_owned(),
                failures => format!(
                    "{failures} failures, allowed restarts: {most} (--max-restarts); the first: {cause}"
                ),
            };
            return Some((End::TooManyRestarts, text));
        }
        if self.without_progress > most {
            let since = match self.commit() {
                Some(commit) => format!("since commit {commit}"),
                None => "before the first commit".to_owned(),
            };
            let failures = self.without_progress;
            return Some((
                End::NoProgress,
                format!(
                    "{failures} failures {since}, allowed are {most} (restarts_without_progress); the first: {cause}"
                ),
            ));
        }
        let (most, window) = limits.restarts_within?;
        let recent = |at: &&Instant| now.saturating_duration_since(**at) < window;
        let failures = self.restarts.iter().filter(recent).count();
        (failures > most as usize).then(|| {
            let window = Span(window);
            (
                End::TooManyRestarts,
                format!(
                    "{failures} failures within {window}, allowed are {most} (restarts_within); the first since the \
                     last commit: {cause}"
                ),
            )
        })
    }
}
