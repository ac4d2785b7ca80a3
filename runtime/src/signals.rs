//! Signals that end something, and which of them is the second.

use std::io;
use std::time::{Duration, Instant};

use kolo_transport::awake::{AwakeClock, TICK};
use kolo_transport::wire::signal_name;
use tokio::runtime::Handle;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// How long the same signal again is an echo of the first: `timeout`, `npm`, `make` and shells signal a child and its
/// group, and a terminal that is closed does it twice.
pub const ECHO: Duration = Duration::from_secs(1);

/// What a signal means that asks for an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// End with care.
    First,
    /// Nothing: it has been heard.
    Echo,
    /// End at once.
    Second,
}

const SIGHUP: i32 = 1;
const SIGTERM: i32 = 15;

/// Whether two signals are one wish: the same, or TERM and HUP, which a session that ends gets together (systemd's
/// `SendSIGHUP=`).
fn are_one(one: i32, other: i32) -> bool {
    let is_of_session = |number| matches!(number, SIGHUP | SIGTERM);
    one == other || is_of_session(one) && is_of_session(other)
}

/// Counts signals that ask for an end. The same one within [`ECHO`] of the first is the first; any other, or the same one
/// later, is the second. HUP with TERM counts as the same. The time is best that in which this process was
/// [awake](kolo_transport::awake): signals that came together stay together.
#[derive(Debug, Clone, Copy, Default)]
pub struct Turns {
    first: Option<(i32, Instant)>,
}

impl Turns {
    /// A signal came.
    pub fn hear(&mut self, number: i32, now: Instant) -> Turn {
        match self.first {
            None => {
                self.first = Some((number, now));
                Turn::First
            }
            Some((first, at))
                if are_one(first, number) && now.saturating_duration_since(at) < ECHO =>
            {
                Turn::Echo
            }
            Some(_) => Turn::Second,
        }
    }
}

/// The name of a signal.
#[must_use]
pub fn name(number: i32) -> String {
    signal_name(number).map_or_else(|| format!("signal {number}"), str::to_owned)
}

/// Signals that ask for an end, from the moment they are taken: one that comes between two waits is not lost.
#[derive(Debug)]
pub struct Ends {
    all: Vec<(i32, Signal)>,
    turns: Turns,
    clock: AwakeClock,
}

impl Ends {
    /// Takes signals of this process.
    ///
    /// # Errors
    ///
    /// If the system refuses.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime with I/O and time.
    pub fn take(kinds: &[SignalKind]) -> io::Result<Self> {
        let taken = |kind: &SignalKind| {
            let number = kind.as_raw_value();
            signal(*kind)
                .map(|signal| (number, signal))
                .map_err(|error| {
                    let text = format!("{} can't be watched: {error}", name(number));
                    io::Error::new(error.kind(), text)
                })
        };
        Ok(Self {
            all: kinds.iter().map(taken).collect::<io::Result<_>>()?,
            turns: Turns::default(),
            clock: AwakeClock::start(&Handle::current(), TICK),
        })
    }

    /// The next one that counts: the first, then any that is a second. Cancel safe.
    pub async fn next(&mut self) -> i32 {
        loop {
            let waits = self.all.iter_mut().map(|(number, signal)| {
                Box::pin(async move {
                    if signal.recv().await.is_none() {
                        std::future::pending::<()>().await;
                    }
                    *number
                })
            });
            let waits: Vec<_> = waits.collect();
            if waits.is_empty() {
                std::future::pending::<()>().await;
            }
            let number = futures_util::future::select_all(waits).await.0;
            if self.turns.hear(number, self.clock.now()) != Turn::Echo {
                return number;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_signal_within_a_second_is_not_the_second() {
        use Turn::{Echo, First, Second};
        const TERM: i32 = 15;
        const INT: i32 = 2;
        let begin = Instant::now();
        // Milliseconds, signals and what they are.
        let table: [&[(u64, i32, Turn)]; 9] = [
            // A session that ends.
            &[(0, TERM, First), (0, 1, Echo), (1, TERM, Echo)],
            &[(0, 1, First), (1, TERM, Echo), (1500, TERM, Second)],
            &[(0, TERM, First), (0, TERM, Echo), (999, TERM, Echo)],
            &[(0, TERM, First), (1000, TERM, Second)],
            // An echo does not make the second longer.
            &[(0, TERM, First), (700, TERM, Echo), (1300, TERM, Second)],
            &[(0, TERM, First), (1, INT, Second)],
            &[(0, INT, First), (5, INT, Echo), (6, TERM, Second)],
            // Whatever comes after the second is in a hurry as well, but for echoes of the first.
            &[
                (0, INT, First),
                (2, TERM, Second),
                (3, TERM, Second),
                (4, INT, Echo),
            ],
            &[(9000, 34, First), (9000, 34, Echo), (20_000, 34, Second)],
        ];
        for row in table {
            let mut turns = Turns::default();
            for (ms, number, turn) in row {
                let now = begin + Duration::from_millis(*ms);
                assert_eq!(turns.hear(*number, now), *turn, "{row:?}");
            }
        }
        // Two readings of a clock that come in the wrong order.
        let mut turns = Turns::default();
        let late = begin + Duration::from_secs(5);
        assert_eq!(turns.hear(TERM, late), First);
        assert_eq!(turns.hear(TERM, begin), Echo);
    }

    #[test]
    fn signals_have_names() {
        assert_eq!(name(15), "SIGTERM");
        assert_eq!(name(24), "SIGXCPU");
        assert_eq!(name(34), "signal 34");
    }
}
