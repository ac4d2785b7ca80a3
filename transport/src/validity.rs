//! The life of a certificate, and when to renew it. Pure: the clock is an argument.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use x509_parser::certificate::X509Certificate;

/// How far back certificates start, for members whose clocks are behind.
pub(crate) const CLOCK_SKEW: Duration = Duration::from_secs(3600);

/// The shortest pause between two attempts.
pub(crate) const MIN_PAUSE: Duration = Duration::from_millis(100);

/// The longest pause between two attempts.
const MAX_PAUSE: Duration = Duration::from_secs(3600);

/// The life of a certificate, by the wall clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// When it was issued.
    pub start: SystemTime,
    /// When it ends.
    pub end: SystemTime,
}

fn at(unix: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(u64::try_from(unix).unwrap_or(0))
}

impl Validity {
    pub(crate) fn of(certificate: &X509Certificate<'_>) -> Self {
        let validity = certificate.validity();
        let end = at(validity.not_after.timestamp());
        // Certificates begin before they were issued, for those whose clocks are behind.
        let start = at(validity.not_before.timestamp()) + CLOCK_SKEW;
        Self {
            start: start.min(end),
            end,
        }
    }

    /// How long it lasts in all.
    #[must_use]
    pub fn life(&self) -> Duration {
        self.end.duration_since(self.start).unwrap_or_default()
    }

    /// When to renew it first: at two thirds of its life, less up to a tenth of its life by `jitter` (from 0 to 1), so that
    /// members that joined together don't all come at once.
    #[must_use]
    pub fn renew_at(&self, jitter: f64) -> SystemTime {
        let share = 2.0 / 3.0 - 0.1 * jitter.clamp(0.0, 1.0);
        self.start + self.life().mul_f64(share)
    }

    /// Whether it has ended.
    #[must_use]
    pub fn has_ended(&self, now: SystemTime) -> bool {
        now > self.end
    }

    /// How long to wait at `now` before the next attempt to renew it, after `failures` of them; nothing when it is time.
    ///
    /// After a failure: an eighth of what is left, so that there are many attempts before the end, and always some pause.
    /// A certificate that has ended is still tried, for a connection that was made before its end goes on.
    #[must_use]
    pub fn wait(&self, now: SystemTime, jitter: f64, failures: u32) -> Duration {
        if failures == 0 {
            return self
                .renew_at(jitter)
                .duration_since(now)
                .unwrap_or_default();
        }
        let left = self.end.duration_since(now).unwrap_or_default();
        let pause = if left.is_zero() {
            // It can only get worse slowly from here.
            MIN_PAUSE * 2_u32.saturating_pow(failures.min(10))
        } else {
            left / 8
        };
        pause.clamp(MIN_PAUSE, MAX_PAUSE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn validity(life: Duration) -> Validity {
        let start = UNIX_EPOCH + DAY * 365;
        Validity {
            start,
            end: start + life,
        }
    }

    #[test]
    fn it_is_renewed_at_two_thirds_of_its_life_less_the_jitter() {
        for life in [Duration::from_secs(3), DAY, DAY * 365] {
            let validity = validity(life);
            for jitter in [0.0, 0.3, 1.0, 7.0, -1.0] {
                let share = validity
                    .renew_at(jitter)
                    .duration_since(validity.start)
                    .unwrap()
                    .as_secs_f64()
                    / life.as_secs_f64();
                let expected = 2.0 / 3.0 - 0.1 * f64::clamp(jitter, 0.0, 1.0);
                assert!((share - expected).abs() < 1e-6, "{share} at {jitter}");
            }
            let due = validity.renew_at(0.0);
            assert_eq!(validity.wait(due, 0.0, 0), Duration::ZERO);
            let second = Duration::from_millis(100);
            assert_eq!(validity.wait(due - second, 0.0, 0), second);
            assert_eq!(validity.wait(due + DAY * 1000, 0.0, 0), Duration::ZERO);
        }
    }

    #[test]
    fn failures_leave_many_attempts_before_the_end_and_never_a_busy_loop() {
        let validity = validity(DAY * 30);
        let mut now = validity.renew_at(0.5);
        let mut failures = 0;
        while !validity.has_ended(now) {
            failures += 1;
            let wait = validity.wait(now, 0.5, failures);
            assert!((MIN_PAUSE..=MAX_PAUSE).contains(&wait), "{wait:?}");
            now += wait;
        }
        assert!(failures > 100, "{failures} attempts");
        for failures in [1, 2, 30, u32::MAX] {
            let wait = validity.wait(now + DAY, 0.5, failures);
            assert!((MIN_PAUSE..=MAX_PAUSE).contains(&wait), "{wait:?}");
        }
    }
}
