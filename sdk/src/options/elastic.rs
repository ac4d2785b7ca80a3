//! How far a group may change while it runs.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use kolo_transport::wire::{Cooldown, Elastic, GroupFilter, HealthCheck, OnChange, RestartWindow};

use super::{MAX_WORKERS, Options, OptionsError, millis};

/// How long a process that is ready waits for others that are on their way, so that they join together.
const JOIN_WINDOW: Duration = Duration::from_secs(1);

/// How long a member may take to take a generation.
const ACK_TIMEOUT: Duration = Duration::from_secs(10);

/// Restarts without a commit in between, by default.
const WITHOUT_PROGRESS: u32 = 3;

const RESTARTS_WITHIN: [Duration; 2] =
    [Duration::from_millis(1), Duration::from_secs(366 * 86_400)];
const COOLDOWN: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(3600)];

/// A number of workers or hosts: `4`, or bounds, `2..=8`, between which the group may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Count {
    pub(super) least: u32,
    pub(super) most: u32,
    is_bounds: bool,
}

impl From<u32> for Count {
    fn from(count: u32) -> Self {
        Self {
            least: count,
            most: count,
            is_bounds: false,
        }
    }
}

impl From<RangeInclusive<u32>> for Count {
    fn from(bounds: RangeInclusive<u32>) -> Self {
        Self {
            least: *bounds.start(),
            most: *bounds.end(),
            is_bounds: true,
        }
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_bounds {
            write!(f, "{}..=", self.least)?;
        }
        self.most.fmt(f)
    }
}

impl Count {
    pub(super) fn check(self, what: &'static str) -> Result<(), OptionsError> {
        match (self.is_bounds, self.least) {
            (false, 0) => Err(OptionsError::Zero { what }),
            (true, least) if least == 0 || self.most < least => {
                Err(OptionsError::Bounds { what, given: self })
            }
            _ => Ok(()),
        }
    }
}

/// The options of elastic groups alone, as they were given.
#[derive(Debug, Clone, Default)]
pub(crate) struct ElasticOptions {
    pub(crate) spares: Option<u32>,
    pub(crate) max_resets: Option<u32>,
    pub(crate) restarts: Option<(u32, Duration)>,
    pub(crate) restarts_without_progress: Option<u32>,
    pub(crate) cooldown: Option<RangeInclusive<Duration>>,
    pub(crate) filters: Vec<GroupFilter>,
    pub(crate) health_check: Option<(String, Vec<String>, Duration)>,
    /// Calls between two generations wait for the next.
    pub(crate) waits: bool,
}

impl ElasticOptions {
    /// Whether an option is given that makes sense in an elastic group alone.
    fn is_given(&self) -> bool {
        self.spares.is_some()
            || self.max_resets.is_some()
            || self.restarts.is_some()
            || self.restarts_without_progress.is_some()
            || self.cooldown.is_some()
            || !self.filters.is_empty()
            || self.health_check.is_some()
            || self.waits
    }
}

impl Options {
    /// How far the group may change. `None` if not at all.
    pub(super) fn elastic(&self) -> Result<Option<Elastic>, OptionsError> {
        let given = &self.elastic;
        let Some(count) = self.workers.or(self.hosts) else {
            return Ok(None);
        };
        if !count.is_bounds && !given.is_given() {
            return Ok(None);
        }
        let filters = given.filters.clone();
        // Members on each host, which take part together. The product of `most` is known to be small enough.
        let slots = self.hosts.map_or(1, |_| self.slots.unwrap_or(1));
        let (least, most) = (count.least * slots, count.most * slots);
        let spares = given.spares.unwrap_or(0);
        if !spares.is_multiple_of(slots) {
            return Err(OptionsError::PartOfHost { spares, slots });
        }
        if spares > 0 && given.max_resets == Some(0) {
            return Err(OptionsError::UselessSpares { spares });
        }
        if most.checked_add(spares).is_none_or(|all| all > MAX_WORKERS) {
            let given = u64::from(most) + u64::from(spares);
            return Err(OptionsError::TooMany { given });
        }
        if let Some(filter) = filters.iter().find(|filter| number(**filter) == 0) {
            return Err(OptionsError::EmptyFilter { filter: *filter });
        }
        let passes = |size: u32| {
            let all = filters.iter().all(|filter| passes(*filter, size));
            all && size.is_multiple_of(slots)
        };
        if !(least..=most).any(passes) {
            return Err(OptionsError::NoneFits {
                least,
                most,
                filters,
            });
        }
        Ok(Some(Elastic {
            min: least,
            max: most,
            spares,
            max_resets: given.max_resets,
            restarts_within: given.restarts.map(restarts_within).transpose()?,
            restarts_without_progress: given.restarts_without_progress.unwrap_or(WITHOUT_PROGRESS),
            cooldown: given.cooldown.clone().map(cooldown).transpose()?,
            join_window_ms: JOIN_WINDOW.as_millis() as u64,
            ack_timeout_ms: ACK_TIMEOUT.as_millis() as u64,
            filters,
            health_check: self.health_check()?,
            on_change: OnChange::InPlace,
            hosts: None,
        }))
    }

    fn health_check(&self) -> Result<Option<HealthCheck>, OptionsError> {
        let Some((program, args, within)) = &self.elastic.health_check else {
            return Ok(None);
        };
        let bounds = [Duration::from_millis(1), self.start_timeout];
        let timeout_ms = millis("the time of the health check", *within, bounds)?;
        let reason = if program.is_empty() {
            "its program has no name"
        } else if args.iter().chain([program]).any(|text| text.contains('\0')) {
            "its program or an argument contains a NUL byte"
        } else {
            return Ok(Some(HealthCheck {
                program: program.clone(),
                args: args.clone(),
                timeout_ms,
            }));
        };
        Err(OptionsError::HealthCheck {
            program: program.clone(),
            reason,
        })
    }
}

fn restarts_within((restarts, within): (u32, Duration)) -> Result<RestartWindow, OptionsError> {
    let within_ms = millis("the time of restarts", within, RESTARTS_WITHIN)?;
    Ok(RestartWindow {
        restarts,
        within_ms,
    })
}

fn cooldown(range: RangeInclusive<Duration>) -> Result<Cooldown, OptionsError> {
    let (least, most) = (*range.start(), *range.end());
    let least_ms = millis("the lower bound of cooldown", least, COOLDOWN)?;
    let most_ms = millis("the upper bound of cooldown", most, [least, COOLDOWN[1]])?;
    Ok(Cooldown { least_ms, most_ms })
}

fn number(filter: GroupFilter) -> u32 {
    match filter {
        GroupFilter::DivisibleBy(count)
        | GroupFilter::WholeHosts(count)
        | GroupFilter::Max(count) => count,
    }
}

/// Whether a filter may leave a group of this size, on hosts that are as large as is needed.
fn passes(filter: GroupFilter, size: u32) -> bool {
    match filter {
        GroupFilter::DivisibleBy(count) | GroupFilter::WholeHosts(count) => {
            size.is_multiple_of(count)
        }
        GroupFilter::Max(count) => size <= count,
    }
}
