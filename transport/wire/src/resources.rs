//! Amounts of resources, exact in thousandths.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// An amount in thousandths: `Milli(1500)` is 1.5.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Milli(pub u64);

/// An amount that can't be a resource.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{what} is {given}; allowed is a finite number from 0 to 1000000 with at most 3 decimals")]
pub struct ResourceError {
    what: String,
    given: f64,
}

impl Milli {
    /// The largest amount that [`Milli::from_f64`] takes, in whole units.
    pub const MAX_UNITS: f64 = 1e6;

    /// An exact amount from a number.
    ///
    /// # Errors
    ///
    /// If `value` is NaN, infinite, negative, over [`Milli::MAX_UNITS`] or finer than a thousandth.
    /// `what` names the resource in the message.
    pub fn from_f64(what: &str, value: f64) -> Result<Self, ResourceError> {
        let milli = (value * 1000.0).round();
        if !(0.0..=Self::MAX_UNITS).contains(&value) || (milli / 1000.0 - value).abs() > 1e-9 {
            return Err(ResourceError {
                what: what.to_owned(),
                given: value,
            });
        }
        #[allow(clippy::cast_sign_loss)] // checked above
        Ok(Self(milli as u64))
    }

    /// Whole units.
    #[must_use]
    pub const fn units(units: u64) -> Self {
        Self(units * 1000)
    }

    /// The amount as a number of units.
    #[must_use]
    pub fn as_f64(self) -> f64 {
        self.0 as f64 / 1000.0
    }
}

impl fmt::Display for Milli {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.as_f64(), f)
    }
}

/// CPUs, GPUs and named resources: what a node has, or what a worker needs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// Logical CPUs.
    #[serde(default)]
    pub cpus: Milli,
    /// Whole GPUs.
    #[serde(default)]
    pub gpus: u32,
    /// Everything else, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub custom: BTreeMap<String, Milli>,
}

/// One resource of which there is too little.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shortage {
    /// `cpus`, `gpus` or the name of a custom resource.
    pub resource: String,
    /// How much is asked for.
    pub requested: Milli,
    /// How much is free.
    pub available: Milli,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: requested {}, available {}",
            self.resource, self.requested, self.available
        )
    }
}

impl Resources {
    /// `count` times these resources, saturating.
    #[must_use]
    pub fn times(&self, count: u32) -> Self {
        Self {
            cpus: Milli(self.cpus.0.saturating_mul(u64::from(count))),
            gpus: self.gpus.saturating_mul(count),
            custom: self
                .custom
                .iter()
                .map(|(name, amount)| {
                    (
                        name.clone(),
                        Milli(amount.0.saturating_mul(u64::from(count))),
                    )
                })
                .collect(),
        }
    }

    /// What `request` lacks here; empty if it fits.
    #[must_use]
    pub fn shortages(&self, request: &Self) -> Vec<Shortage> {
        let gpus = |count: u32| Milli::units(u64::from(count));
        let mut pairs = vec![
            ("cpus", request.cpus, self.cpus),
            ("gpus", gpus(request.gpus), gpus(self.gpus)),
        ];
        pairs.extend(request.custom.iter().map(|(name, amount)| {
            (
                name.as_str(),
                *amount,
                self.custom.get(name).copied().unwrap_or_default(),
            )
        }));
        pairs
            .into_iter()
            .filter(|(_, requested, available)| requested > available)
            .map(|(resource, requested, available)| Shortage {
                resource: resource.to_owned(),
                requested,
                available,
            })
            .collect()
    }

    /// Whether `request` fits in here.
    #[must_use]
    pub fn fits(&self, request: &Self) -> bool {
        self.shortages(request).is_empty()
    }

    /// How often `request` fits in here; `u32::MAX` if it asks for nothing.
    #[must_use]
    pub fn count(&self, request: &Self) -> u32 {
        let mut count = u64::from(u32::MAX);
        let mut limit = |available: u64, requested: u64| {
            if let Some(times) = available.checked_div(requested) {
                count = count.min(times);
            }
        };
        limit(self.cpus.0, request.cpus.0);
        limit(u64::from(self.gpus), u64::from(request.gpus));
        for (name, amount) in &request.custom {
            limit(self.custom.get(name).map_or(0, |amount| amount.0), amount.0);
        }
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    /// These resources less `taken`; `None` if there is not enough.
    #[must_use]
    pub fn minus(&self, taken: &Self) -> Option<Self> {
        if !self.fits(taken) {
            return None;
        }
        let mut rest = self.clone();
        rest.cpus.0 -= taken.cpus.0;
        rest.gpus -= taken.gpus;
        for (name, amount) in &taken.custom {
            if let Some(have) = rest.custom.get_mut(name) {
                have.0 -= amount.0;
            }
        }
        Some(rest)
    }

    /// These resources and `more`, saturating.
    #[must_use]
    pub fn plus(&self, more: &Self) -> Self {
        let mut sum = self.clone();
        sum.cpus.0 = sum.cpus.0.saturating_add(more.cpus.0);
        sum.gpus = sum.gpus.saturating_add(more.gpus);
        for (name, amount) in &more.custom {
            let have = sum.custom.entry(name.clone()).or_default();
            have.0 = have.0.saturating_add(amount.0);
        }
        sum
    }
}

impl fmt::Display for Resources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = |is_one: bool| if is_one { "" } else { "s" };
        let is_one = self.cpus == Milli::units(1);
        write!(f, "{} cpu{}", self.cpus, plural(is_one))?;
        if self.gpus > 0 {
            write!(f, ", {} gpu{}", self.gpus, plural(self.gpus == 1))?;
        }
        for (name, amount) in &self.custom {
            write!(f, ", {amount} {name}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn with(cpus: u64, gpus: u32, fpga: u64) -> Resources {
        let custom = BTreeMap::from([("fpga".to_owned(), Milli(fpga))]);
        Resources {
            cpus: Milli(cpus),
            gpus,
            custom,
        }
    }

    #[test]
    fn amounts_are_exact_or_refused() {
        assert_eq!(Milli::from_f64("cpus", 0.5), Ok(Milli(500)));
        assert_eq!(Milli::from_f64("cpus", 0.001), Ok(Milli(1)));
        for bad in [
            f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
            -1.0,
            -0.001,
            1e6 + 1.0,
            0.0005,
        ] {
            let error = Milli::from_f64("cpus per worker", bad)
                .unwrap_err()
                .to_string();
            assert!(error.starts_with("cpus per worker is "), "{error}");
        }
    }

    #[test]
    fn shortages_name_the_resource() {
        let short = with(1000, 0, 0).shortages(&with(2000, 1, 0));
        assert_eq!(short.len(), 2);
        assert_eq!(short[0].to_string(), "cpus: requested 2, available 1");
        assert_eq!(short[1].to_string(), "gpus: requested 1, available 0");
        let unknown = Resources::default().shortages(&with(0, 0, 1));
        assert_eq!(unknown[0].to_string(), "fpga: requested 0.001, available 0");
    }

    proptest! {
        #[test]
        fn count_is_the_largest_multiple_that_fits(
            have in (0_u64..9000, 0_u32..9, 0_u64..9000),
            need in (1_u64..3000, 0_u32..3, 0_u64..3000),
        ) {
            let have = with(have.0, have.1, have.2);
            let need = with(need.0, need.1, need.2);
            let count = have.count(&need);
            prop_assert!(have.fits(&need.times(count)));
            prop_assert!(!have.fits(&need.times(count + 1)));
        }

        #[test]
        fn minus_then_plus_gives_it_back(
            have in (0_u64..9000, 0_u32..9, 0_u64..9000),
            need in (0_u64..9000, 0_u32..9, 0_u64..9000),
        ) {
            let have = with(have.0, have.1, have.2);
            let need = with(need.0, need.1, need.2);
            match have.minus(&need) {
                Some(rest) => prop_assert_eq!(rest.plus(&need), have),
                None => prop_assert!(!have.shortages(&need).is_empty()),
            }
        }
    }
}
