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

    /// Adds one that is in microseconds already.
    pub(crate) fn push_micros(&mut self, time: f64) {
        self.0.push(time);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::float_cmp)] // nothing is computed with them
    fn quantiles_and_medians_of_few_and_many() {
        let mut times = Times::default();
        assert_eq!((times.quantile(0.5), median(&[])), (0.0, 0.0));
        for micros in [9.0, 1.0, 5.0] {
            times.push_micros(micros);
        }
        times.push(Duration::from_micros(7));
        assert_eq!((times.quantile(0.0), times.quantile(0.5)), (1.0, 7.0));
        assert_eq!((times.quantile(0.99), times.quantile(1.0)), (9.0, 9.0));
        let mut many = Times::default();
        (0..1000).for_each(|i| many.push_micros(f64::from(i)));
        assert_eq!(many.quantile(0.99), 990.0);
        assert_eq!(many.len(), 1000);
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
    }
}
