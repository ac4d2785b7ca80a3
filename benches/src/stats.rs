//! Medians and percentiles.

use std::time::{Duration, Instant};

/// Times of single operations.
#[derive(Debug, Default)]
pub(crate) struct Times(Vec<f64>);

impl Times {
    /// Adds one, in microseconds.
    pub(crate) fn push(&mut self, time: Duration) {
        self.0.push(time.as_secs_f64() * 1e6);
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The value below which a share of all lies (nearest rank); 0 if there are none.
    pub(crate) fn quantile(&mut self, share: f64) -> f64 {
        self.0.sort_by(f64::total_cmp);
        #[allow(clippy::cast_sign_loss)] // a length and a share are not negative
        let index = ((self.0.len() as f64 * share) as usize).min(self.0.len().saturating_sub(1));
        self.0.get(index).copied().unwrap_or_default()
    }
}

/// The median of some figures.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

/// For how long one measurement runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    end: Instant,
}

impl Window {
    pub(crate) fn new(length: Duration) -> Self {
        Self {
            end: Instant::now() + length,
        }
    }

    pub(crate) fn is_open(self) -> bool {
        Instant::now() < self.end
    }
}
