//! Metrics by torchelastic's names.

use std::collections::BTreeMap;
use std::time::Duration;

use kolo_wire::MetricSum;

use super::outcome::RunResult;

/// The group of all metrics of agents.
pub const METRICS_GROUP: &str = "torchelastic";

/// One number with a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Metric {
    /// The name, such as `workers.default.healthy`.
    pub name: String,
    /// The number.
    pub value: i64,
}

impl Metric {
    /// A number with a name.
    #[must_use]
    pub fn new(name: impl Into<String>, value: i64) -> Self {
        let name = name.into();
        Self { name, value }
    }
}

/// Takes the metrics of agents, and what they say. `()` takes none.
pub trait MetricHandler {
    /// Takes a number. `group` is [`METRICS_GROUP`] for those of agents.
    fn put_metric(&mut self, group: &str, metric: &Metric);

    /// Takes a line for the log.
    fn log(&mut self, line: &str) {
        let _ = line;
    }
}

impl MetricHandler for () {
    fn put_metric(&mut self, _: &str, _: &Metric) {}
}

/// Most names that are told apart. Names have roles in them, which users choose.
const MAX_NAMES: usize = 256;

/// Longest name, in bytes.
const MAX_NAME: usize = 128;

/// Stands for all names beyond the bounds.
const OTHER: &str = "other";

/// The metrics of many agents, added up by their names, as daemons export them: bounded, whatever the names are.
///
/// ```
/// use kolo_core::agent::{METRICS_GROUP, Metric, MetricHandler, MetricSums};
///
/// let mut sums = MetricSums::default();
/// for took in [3, 5] {
///     let metric = Metric::new("LocalElasticAgent._stop_workers.duration.ms", took);
///     sums.put_metric(METRICS_GROUP, &metric);
/// }
/// let [sum] = &sums.take()[..] else { panic!() };
/// assert_eq!((sum.count, sum.sum), (2, 8));
/// assert!(sums.take().is_empty());
/// ```
#[derive(Debug, Clone, Default)]
pub struct MetricSums(BTreeMap<String, (u64, i64)>);

impl MetricSums {
    /// Adds the values of a metric to those that are there.
    pub fn add(&mut self, more: &MetricSum) {
        let has_room = self.0.len() < MAX_NAMES || self.0.contains_key(&more.name);
        let name = match &more.name {
            name if has_room && name.len() <= MAX_NAME => name,
            _ => OTHER,
        };
        let (count, sum) = self.0.entry(name.to_owned()).or_default();
        *count = count.saturating_add(more.count);
        *sum = sum.saturating_add(more.sum);
    }

    /// All sums, by name. Nothing is left.
    pub fn take(&mut self) -> Vec<MetricSum> {
        let all = std::mem::take(&mut self.0).into_iter();
        all.map(|(name, (count, sum))| MetricSum { name, count, sum })
            .collect()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl MetricHandler for MetricSums {
    fn put_metric(&mut self, _: &str, metric: &Metric) {
        self.add(&MetricSum {
            name: metric.name.clone(),
            count: 1,
            sum: metric.value,
        });
    }
}

/// Whether a step has succeeded, and how long it took: `NAME.success` or `NAME.failure`, and `NAME.duration.ms`.
///
/// ```
/// use std::time::Duration;
///
/// use kolo_core::agent::prof;
///
/// let [ended, took] = prof("LocalElasticAgent._stop_workers", Duration::from_millis(12), true);
/// assert_eq!((ended.name.as_str(), ended.value), ("LocalElasticAgent._stop_workers.success", 1));
/// assert_eq!((took.name.as_str(), took.value), ("LocalElasticAgent._stop_workers.duration.ms", 12));
/// ```
#[must_use]
pub fn prof(name: &str, took: Duration, is_success: bool) -> [Metric; 2] {
    let end = if is_success { "success" } else { "failure" };
    let ms = i64::try_from(took.as_millis()).unwrap_or(i64::MAX);
    [
        Metric::new(format!("{name}.{end}"), 1),
        Metric::new(format!("{name}.duration.ms"), ms),
    ]
}

/// How much of its restarts a job has used up, in percent: 100 for a failed job.
///
/// `max_restarts` and one first start are all the starts that a job has; `remaining_restarts` of them are left.
#[must_use]
pub fn flakiness(max_restarts: u32, remaining_restarts: u32, is_failed: bool) -> i64 {
    if is_failed {
        return 100;
    }
    let all = u64::from(max_restarts) + 1;
    let left = (u64::from(remaining_restarts) + 1).min(all);
    (100 * (all - left) / all) as i64
}

/// The metrics at the end of the workers of a role.
#[must_use]
pub fn record_metrics(
    role: &str,
    result: &RunResult,
    max_restarts: u32,
    remaining_restarts: u32,
) -> Vec<Metric> {
    let failed = result.is_failed();
    let retried = remaining_restarts != max_restarts;
    let count = |name: &str, is: bool| Metric::new(format!("workers.{role}.{name}"), is.into());
    vec![
        count("run_total", true),
        count("run_success_with_retries", !failed && retried),
        count("run_success_no_retries", !failed && !retried),
        count("run_failed_with_retries", failed && retried),
        count("run_failed_no_retries", failed && !retried),
        Metric::new(
            format!("workers.{role}.flakiness"),
            flakiness(max_restarts, remaining_restarts, failed),
        ),
    ]
}
