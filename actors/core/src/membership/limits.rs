//! What a job allows: sizes, times, and how often it may fail.

use std::ops::RangeInclusive;
use std::time::Duration;

use kolo_wire::{GroupFilter, OnChange};

use super::filter;
use crate::ranks::MAX_WORLD_SIZE;

/// The most filters of a job.
const MAX_FILTERS: usize = 16;
/// The shortest and the longest cool-down of a host that can be asked for.
const COOLDOWN: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(3600);

/// The limits of a job. [`Limits::check`] says what is wrong with them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// The fewest members of a generation. At least 1.
    pub min: u32,
    /// The most members of a generation.
    pub max: u32,
    /// The job takes room for so many members at once, on a node where it has no other ones, and these are in a generation together
    /// or not at all. `min`, `max` and `spares` are multiples. 1 by default: then a node may have any number of members.
    pub per_host: u32,
    /// Processes that are kept ready beside the members, to replace lost ones at once. 0 by default.
    pub spares: u32,
    /// How long a process that is ready waits for others that are on their way, so that they join together. 1 s by default.
    pub join_window: Duration,
    /// How long a process may take from its start until it is ready, and how long the job waits without a group for
    /// `min` processes. 30 s by default.
    pub start_timeout: Duration,
    /// How long a member may take to take a generation. A member that is later is stopped. 10 s by default.
    pub ack_timeout: Duration,
    /// How often the membership may change, for any reason. No limit by default.
    pub max_resets: Option<u32>,
    /// At most so many restarts within such a time. A restart is used up by each failure of a process; failures that
    /// come with it use up none. No limit by default.
    pub restarts_within: Option<(u32, Duration)>,
    /// Restarts without a commit in between. 3 by default.
    pub restarts_without_progress: u32,
    /// The shortest and the longest time in which a host gets no new process after one has failed there. See
    /// [`cooldown`]. None by default. Other processes of the host are not touched.
    pub cooldown: Option<RangeInclusive<Duration>>,
    /// Which sizes and shapes of a group are wanted. Applied in order.
    pub filters: Vec<GroupFilter>,
    /// What happens to processes at a change. They keep running by default.
    pub on_change: OnChange,
    /// How long a process may take to end once it was told to, if its seat is used again. 20 s by default.
    pub stop_timeout: Duration,
}

/// Why limits make no sense.
///
/// The names of settings are those of Horovod's `RayExecutor`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LimitsError {
    /// A group of nobody is allowed. Ask for at least 1.
    #[error("min_workers=0 is given; a group has at least 1 worker")]
    Zero,
    /// The limits exclude each other. Give a maximum that is at least the minimum.
    #[error(
        "min_workers={min} and max_workers={max} are given; max_workers must be at least min_workers"
    )]
    Order {
        /// The minimum.
        min: u32,
        /// The maximum.
        max: u32,
    },
    /// More members and spares than a group may have. Ask for fewer.
    #[error(
        "max_workers={max} and spares={spares} are given; allowed are {MAX_WORLD_SIZE} workers in all"
    )]
    TooMany {
        /// The maximum.
        max: u32,
        /// The spares.
        spares: u32,
    },
    /// A number that is not a multiple of the members on each node. Ask for whole nodes.
    #[error(
        "{name}={given} is given; it must be a multiple of the {per_host} workers on each node"
    )]
    PartOfHost {
        /// The setting.
        name: &'static str,
        /// The number.
        given: u32,
        /// Members on each node.
        per_host: u32,
    },
    /// Spares for a group whose processes are started with their ranks. Give no spares: hosts that have room wait without a process.
    #[error(
        "spares={spares} is given for processes that are started with their ranks, so that none can wait without: give no spares"
    )]
    NoSpare {
        /// The number of spares.
        spares: u32,
    },
    /// A time is 0. Give a longer one.
    #[error("{name}=0 is given; it must be longer than 0")]
    NoTime {
        /// The setting.
        name: &'static str,
    },
    /// The cool-down is too short, too long, or upside down. Give a range within the bounds.
    #[error(
        "cooldown_range=({}, {}) s is given; allowed are {} to {} s, the lower bound first",
        .lo.as_secs_f64(), .hi.as_secs_f64(), COOLDOWN.start().as_secs(), COOLDOWN.end().as_secs()
    )]
    Cooldown {
        /// The lower bound.
        lo: Duration,
        /// The upper bound.
        hi: Duration,
    },
    /// More filters than a job may have. Leave those out that others imply.
    #[error("{count} filters are given; allowed are {MAX_FILTERS}")]
    Filters {
        /// The number of filters.
        count: usize,
    },
    /// A filter of 0. Give at least 1.
    #[error("the filter {filter} is given; its number must be at least 1")]
    EmptyFilter {
        /// The filter.
        filter: GroupFilter,
    },
    /// No size from the minimum to the maximum passes the filters. Change the bounds or the filters.
    #[error("no number of workers from min_workers={min} to max_workers={max} passes {filters}")]
    NoSize {
        /// The minimum.
        min: u32,
        /// The maximum.
        max: u32,
        /// The filters.
        filters: String,
    },
}

impl Limits {
    /// A job that shrinks and grows between these bounds, with the default of everything else.
    #[must_use]
    pub fn elastic(min: u32, max: u32) -> Self {
        Self {
            min,
            max,
            per_host: 1,
            spares: 0,
            join_window: Duration::from_secs(1),
            start_timeout: Duration::from_secs(30),
            ack_timeout: Duration::from_secs(10),
            max_resets: None,
            restarts_within: None,
            restarts_without_progress: 3,
            cooldown: None,
            filters: Vec::new(),
            on_change: OnChange::InPlace,
            stop_timeout: Duration::from_secs(20),
        }
    }

    /// Members and spares.
    #[must_use]
    pub(super) fn all(&self) -> usize {
        self.max as usize + self.spares as usize
    }

    /// The units of members and spares.
    #[must_use]
    pub(super) fn units(&self) -> usize {
        self.all() / self.per_host as usize
    }

    /// How long a process that was told to end may take, before its seat is used again; nothing if the seat is not.
    #[must_use]
    pub fn stop_timeout(&self) -> Option<Duration> {
        self.holds_seats().then_some(self.stop_timeout)
    }

    /// All processes are stopped at a change, and the next ones started.
    #[must_use]
    pub fn starts_anew(&self) -> bool {
        self.on_change == OnChange::Restart
    }

    /// A seat that a node holds has no process until a generation is made that has one there.
    #[must_use]
    pub fn holds_seats(&self) -> bool {
        self.on_change != OnChange::InPlace
    }

    /// Survivors keep their process. A new process is started for one generation and is told its ranks at the start, so that the
    /// process can be a member of no other generation before that one.
    #[must_use]
    pub fn is_planned(&self) -> bool {
        self.on_change == OnChange::Horovod
    }

    /// Looks for limits that make no sense.
    ///
    /// # Errors
    ///
    /// [`LimitsError`]: the first that is found.
    pub fn check(&self) -> Result<(), LimitsError> {
        let (min, max) = (self.min, self.max);
        if min == 0 {
            return Err(LimitsError::Zero);
        }
        if max < min {
            return Err(LimitsError::Order { min, max });
        }
        // These bounds come first: the last check takes as many steps as they allow.
        if max.saturating_add(self.spares) > MAX_WORLD_SIZE {
            let spares = self.spares;
            return Err(LimitsError::TooMany { max, spares });
        }
        for (name, given) in [
            ("min_workers", min),
            ("max_workers", max),
            ("spares", self.spares),
        ] {
            // Of 0, 0 alone is a multiple.
            if !given.is_multiple_of(self.per_host) {
                let per_host = self.per_host;
                return Err(LimitsError::PartOfHost {
                    name,
                    given,
                    per_host,
                });
            }
        }
        let count = self.filters.len();
        if count > MAX_FILTERS {
            return Err(LimitsError::Filters { count });
        }
        if self.spares > 0 && self.holds_seats() {
            let spares = self.spares;
            return Err(LimitsError::NoSpare { spares });
        }
        let window = self.restarts_within.map(|(_, window)| window);
        for (name, time) in [
            ("stop_timeout", self.stop_timeout()),
            ("start_timeout", Some(self.start_timeout)),
            ("ack_timeout", Some(self.ack_timeout)),
            ("restarts_within", window),
        ] {
            if time.is_some_and(|time| time.is_zero()) {
                return Err(LimitsError::NoTime { name });
            }
        }
        if let Some(range) = &self.cooldown {
            let (lo, hi) = (*range.start(), *range.end());
            if lo < *COOLDOWN.start() || hi > *COOLDOWN.end() || lo > hi {
                return Err(LimitsError::Cooldown { lo, hi });
            }
        }
        if let Some(filter) = self.filters.iter().find(|filter| filter.count() == 0) {
            return Err(LimitsError::EmptyFilter { filter: *filter });
        }
        let sizes = (min..=max).filter(|size| size.is_multiple_of(self.per_host));
        if !filter::has_size(&self.filters, sizes) {
            let filters: Vec<_> = self.filters.iter().map(ToString::to_string).collect();
            return Err(LimitsError::NoSize {
                min,
                max,
                filters: filters.join(", "),
            });
        }
        Ok(())
    }
}

/// How long a host cools down when a process has failed there for the `times`-th time, counted from 1.
///
/// Horovod's rule: `lo * 2^times + fraction * lo`, within `lo..=hi`. `fraction` is random in `0.0..1.0`, so that hosts that
/// fail together do not come back together.
#[must_use]
pub fn cooldown(range: &RangeInclusive<Duration>, times: u32, fraction: f64) -> Duration {
    let (lo, hi) = (*range.start(), *range.end());
    let doubled = lo.saturating_mul(2_u32.saturating_pow(times));
    let delay = doubled.saturating_add(lo.mul_f64(fraction.clamp(0.0, 1.0)));
    delay.min(hi).max(lo)
}
