//! Log lines that people from outside can cause: a few, and a count of the others.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The time in which lines are counted.
const WINDOW: Duration = Duration::from_secs(10);

/// What becomes of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// It is written, behind the count of those that were left out before, if nobody has told it yet.
    Write(u64),
    /// It is the first that is left out. The count is to be told after this time.
    Count(Duration),
    /// It is one more of those.
    LeaveOut,
}

#[derive(Debug)]
struct Lines {
    most: u32,
    window: Duration,
    since: Option<Instant>,
    written: u32,
    left_out: u64,
}

impl Lines {
    fn step(&mut self, now: Instant) -> Step {
        let passed = self.since.map(|since| now.saturating_duration_since(since));
        let before = match passed {
            Some(passed) if passed < self.window => 0,
            _ => {
                self.since = Some(now);
                self.written = 0;
                self.take()
            }
        };
        if self.written < self.most {
            self.written += 1;
            return Step::Write(before);
        }
        self.left_out += 1;
        if self.left_out == 1 {
            Step::Count(self.window.saturating_sub(passed.unwrap_or_default()))
        } else {
            Step::LeaveOut
        }
    }

    fn take(&mut self) -> u64 {
        std::mem::take(&mut self.left_out)
    }
}

/// Lets a few log lines of a kind through in ten seconds, counts the others, and tells their number at the end of these. A clone
/// counts with it.
///
/// ```
/// let refused = kolo_transport::Flood::new("a peer was refused", 3);
/// for port in 0..1000 {
///     refused.line(|| println!("port {port} was refused"));
/// }
/// ```
#[derive(Clone)]
pub struct Flood {
    what: &'static str,
    lines: Arc<Mutex<Lines>>,
}

impl Flood {
    /// At most so many lines in ten seconds, of a kind that `what` says.
    #[must_use]
    pub fn new(what: &'static str, most: u32) -> Self {
        Self::within(WINDOW, what, most)
    }

    /// As [`Flood::new`], in another time.
    #[must_use]
    pub fn within(window: Duration, what: &'static str, most: u32) -> Self {
        let lines = Lines {
            most: most.max(1),
            window,
            since: None,
            written: 0,
            left_out: 0,
        };
        Self {
            what,
            lines: Arc::new(Mutex::new(lines)),
        }
    }

    /// Writes a line, or counts it. The count is told by a task of the current tokio runtime; without one, before the next line.
    pub fn line(&self, write: impl FnOnce()) {
        if self.allows() {
            write();
        }
    }

    /// Whether a line is to be written; else it is counted. As [`Flood::line`].
    #[must_use]
    pub fn allows(&self) -> bool {
        let step = self.step(Instant::now());
        match step {
            Step::Write(before) => {
                self.tell(before);
                true
            }
            Step::Count(rest) => {
                if let Ok(runtime) = tokio::runtime::Handle::try_current() {
                    let later = self.clone();
                    runtime.spawn(async move {
                        tokio::time::sleep(rest).await;
                        let count = later.lock().take();
                        later.tell(count);
                    });
                }
                false
            }
            Step::LeaveOut => false,
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn step(&self, now: Instant) -> Step {
        self.lock().step(now)
    }

    fn tell(&self, count: u64) {
        if count > 0 {
            let seconds = self.lock().window.as_secs_f64();
            tracing::warn!("{}: and {count} more in the last {seconds} s", self.what);
        }
    }
}

impl fmt::Debug for Flood {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flood")
            .field("what", &self.what)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(most: u32) -> Lines {
        Lines {
            most,
            window: WINDOW,
            since: None,
            written: 0,
            left_out: 0,
        }
    }

    #[test]
    fn a_flood_is_a_few_lines_and_a_count() {
        let start = Instant::now();
        let mut lines = lines(2);
        assert_eq!(lines.step(start), Step::Write(0));
        let second = Duration::from_secs(1);
        assert_eq!(lines.step(start + second), Step::Write(0));
        assert_eq!(
            lines.step(start + second),
            Step::Count(Duration::from_secs(9))
        );
        for _ in 0..4998 {
            assert_eq!(lines.step(start + 9 * second), Step::LeaveOut);
        }
        // Told by the task.
        assert_eq!(lines.take(), 4999);
        assert_eq!(lines.step(start + WINDOW), Step::Write(0));
    }

    #[test]
    fn a_count_that_nobody_told_comes_before_the_next_line() {
        let start = Instant::now();
        let mut lines = lines(1);
        assert_eq!(lines.step(start), Step::Write(0));
        for _ in 0..7 {
            lines.step(start);
        }
        assert_eq!(lines.step(start + WINDOW), Step::Write(7));
        assert_eq!(lines.step(start + WINDOW), Step::Count(WINDOW));
        // A clock that goes back does no harm.
        assert_eq!(lines.step(start), Step::LeaveOut);
        assert_eq!(lines.take(), 2);
    }

    #[tokio::test]
    async fn the_count_is_taken_at_the_end_of_the_time_by_itself() {
        let flood = Flood::within(Duration::from_millis(500), "knocking", 1);
        assert!(flood.allows());
        for _ in 0..100 {
            assert!(!flood.clone().allows());
        }
        let began = Instant::now();
        while flood.lock().left_out > 0 {
            assert!(began.elapsed() < WINDOW);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
