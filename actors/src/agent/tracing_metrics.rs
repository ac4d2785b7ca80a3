//! Metrics as events of `tracing`.

use kolo_core::agent::{Metric, MetricHandler};

/// Tells `tracing` of each metric, at the level `DEBUG`, and of what agents say, at `INFO`.
#[derive(Debug, Clone, Copy, Default)]
pub struct TracingMetrics;

impl MetricHandler for TracingMetrics {
    fn put_metric(&mut self, group: &str, metric: &Metric) {
        tracing::debug!(group, name = metric.name, value = metric.value, "metric");
    }

    fn log(&mut self, line: &str) {
        tracing::info!("{line}");
    }
}
