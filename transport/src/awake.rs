//! Time in which this side was awake.
//!
//! A peer counts as gone when it was silent for a while. That proves nothing if this side did not listen: a process that was
//! stopped, or that had no turn on a machine with too much to do, finds its timers over and the peer's answers unread. So
//! silence is measured on a clock that runs only while its owner has turns: the owner ticks, and of a pause between two ticks
//! no more counts than a set time.
//!
//! The time of such a clock is an [`Instant`] that lags behind the real one by all that did not count. The two must not be mixed.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::time::Sleep;

/// How often a clock ticks by which a few seconds of silence are judged.
pub const TICK: Duration = Duration::from_millis(100);

/// How much of a pause between two ticks counts of a clock that ticks so often. So in the 3 s of a lease a peer had twelve chances
/// to be heard, however rarely this side had a turn.
const fn most(tick: Duration) -> Duration {
    Duration::from_nanos((tick.as_nanos() * 5 / 2) as u64)
}

/// Longer limits count as this one: clocks end somewhere.
const FOREVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// A clock that stands still while its owner does. Pure: the time comes in.
///
/// ```
/// use std::time::{Duration, Instant};
/// use kolo_transport::awake::Awake;
///
/// let (start, second) = (Instant::now(), Duration::from_secs(1));
/// let mut awake = Awake::new(start, second);
/// // A turn soon after the last one: all of it counts.
/// assert_eq!(awake.tick(start + second), start + second);
/// // It was stopped for an hour.
/// let hour = Duration::from_secs(3600);
/// assert_eq!(awake.tick(start + second + hour), start + 2 * second);
/// assert_eq!(awake.lag(), hour - second);
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Awake {
    /// The last tick, by the real clock and by this one.
    real: Instant,
    counted: Instant,
    most: Duration,
}

impl Awake {
    /// A clock that agrees with the real one at this moment. Of a pause between two ticks it counts `most`.
    #[must_use]
    pub const fn new(now: Instant, most: Duration) -> Self {
        Self {
            real: now,
            counted: now,
            most,
        }
    }

    /// The last tick, by the real clock.
    #[must_use]
    pub const fn ticked(&self) -> Instant {
        self.real
    }

    /// How much did not count so far.
    #[must_use]
    pub fn lag(&self) -> Duration {
        self.real.saturating_duration_since(self.counted)
    }

    /// The time, at `now` by the real clock.
    #[must_use]
    pub fn at(&self, now: Instant) -> Instant {
        self.counted + now.saturating_duration_since(self.real).min(self.most)
    }

    /// As [`Awake::tick`]. Returns how much of the pause since the last tick does not count.
    pub fn stood_still(&mut self, now: Instant) -> Duration {
        let before = self.lag();
        self.tick(now);
        self.lag().saturating_sub(before)
    }

    /// The owner has a turn. Returns the time.
    pub fn tick(&mut self, now: Instant) -> Instant {
        self.counted = self.at(now);
        self.real = self.real.max(now);
        self.counted
    }
}

/// An [`Awake`] that a runtime ticks: it runs while that runtime has turns. Clones share it. Its futures may be awaited on any
/// executor.
#[derive(Debug, Clone)]
pub struct AwakeClock {
    awake: Arc<Mutex<Awake>>,
    /// Where it ticks, and where timers run.
    runtime: Handle,
}

fn lock(awake: &Mutex<Awake>) -> MutexGuard<'_, Awake> {
    // Nothing that runs under the lock panics.
    awake.lock().unwrap_or_else(PoisonError::into_inner)
}

impl AwakeClock {
    /// A clock of this runtime, which must have timers. It ticks so often, until its last clone is dropped; of a pause between
    /// two ticks it counts two and a half.
    #[must_use]
    pub fn start(runtime: &Handle, tick: Duration) -> Self {
        let tick = tick.max(Duration::from_millis(1));
        let awake = Arc::new(Mutex::new(Awake::new(Instant::now(), most(tick))));
        let ticked = Arc::downgrade(&awake);
        runtime.spawn(async move {
            loop {
                tokio::time::sleep(tick).await;
                let Some(awake) = ticked.upgrade() else {
                    return;
                };
                let now = Instant::now();
                lock(&awake).tick(now);
            }
        });
        Self {
            awake,
            runtime: runtime.clone(),
        }
    }

    /// The time.
    #[must_use]
    pub fn now(&self) -> Instant {
        // Not under the lock: a thread that loses its turn there would hold up all others.
        let now = Instant::now();
        lock(&self.awake).at(now)
    }

    /// How long it is until `at` by this clock if nothing stands still. For timers: who wakes up then asks again.
    #[must_use]
    pub fn until(&self, at: Instant) -> Duration {
        at.saturating_duration_since(self.now())
    }

    /// A timer of its runtime for `at` by this clock. It is early if something stands still meanwhile.
    pub(crate) fn sleep(&self, at: Instant) -> Sleep {
        let _entered = self.runtime.enter();
        tokio::time::sleep(self.until(at))
    }

    /// Waits until it is `at` by this clock. Cancel safe.
    pub async fn sleep_until(&self, at: Instant) {
        while self.now() < at {
            self.sleep(at).await;
        }
    }

    /// Waits for `future`, at most for `limit` by this clock. `None` if it was not done by then; it is dropped then. Cancel safe
    /// if `future` is.
    pub async fn timeout<F: Future>(&self, limit: Duration, future: F) -> Option<F::Output> {
        // Limits of years mean no limit.
        let until = self.now() + limit.min(FOREVER);
        tokio::select! {
            biased;
            output = future => Some(output),
            () = self.sleep_until(until) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = most(TICK);

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn pauses_count_up_to_a_bound_and_no_clock_goes_back() {
        // Pauses between ticks in ms, and how much of all of them counts.
        let most = MOST.as_millis() as u64;
        let cases: &[(&[u64], u64)] = &[
            (&[], 0),
            (&[100, 100, 100], 300),
            // Late ticks of a busy machine.
            (&[most, most, 0, most], 3 * most),
            (&[most + 1], most),
            // Stopped for ten minutes, and then for two days.
            (&[100, 600_000, 100, 172_800_000], 200 + 2 * most),
            // A machine on which a turn comes every two seconds: a lease of 3 s is twelve turns long.
            (&[2000; 12], 3000),
            (&[2000; 11], 3000 - most),
        ];
        for (pauses, counted) in cases {
            let start = Instant::now();
            let (mut awake, mut now) = (Awake::new(start, MOST), start);
            for pause in *pauses {
                now += ms(*pause);
                // Who asks before the tick hears the same.
                let asked = awake.at(now);
                assert_eq!(awake.tick(now), asked, "{pauses:?}");
            }
            assert_eq!(awake.at(now), start + ms(*counted), "{pauses:?}");
            let all: u64 = pauses.iter().sum();
            assert_eq!(awake.lag(), ms(all - counted), "{pauses:?}");
            // A moment that is over, from a thread that was slow.
            assert_eq!(awake.at(start), start + ms(*counted), "{pauses:?}");
            assert_eq!(awake.tick(start), start + ms(*counted), "{pauses:?}");
            assert_eq!(awake.at(now), start + ms(*counted), "{pauses:?}");
        }
    }

    #[test]
    fn who_asks_again_and_again_without_a_tick_sees_it_stand_still() {
        let start = Instant::now();
        let awake = Awake::new(start, MOST);
        let seen: Vec<_> = (0..1000).map(|s| awake.at(start + ms(s * 100))).collect();
        assert!(seen.is_sorted());
        assert_eq!(seen.last(), Some(&(start + MOST)));
    }

    /// A runtime whose only thread is blocked is not awake, whatever other threads do.
    #[test]
    fn a_clock_stands_still_with_its_runtime() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let clock = AwakeClock::start(runtime.handle(), TICK);
        let before = clock.now();
        // Nothing drives it.
        std::thread::sleep(2 * MOST);
        assert!(clock.now() <= before + MOST);
        runtime.block_on(async {
            let (real, until) = (Instant::now(), clock.now() + 2 * MOST);
            clock.sleep_until(until).await;
            assert!(clock.now() >= until && real.elapsed() >= 2 * MOST);
            // What is there at once is taken, though no time is left.
            assert_eq!(clock.timeout(Duration::ZERO, async { 1 }).await, Some(1));
            assert_eq!(
                clock.timeout(TICK, std::future::pending::<()>()).await,
                None
            );
        });
    }
}
