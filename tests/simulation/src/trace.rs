//! The story of a run, for people, and its hash.

use crate::knobs::Time;
use crate::random::mix;

/// Lines, if somebody wants them.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    lines: Option<Vec<String>>,
    hash: u64,
}

impl Trace {
    pub(crate) fn new(wanted: bool) -> Self {
        Self {
            lines: wanted.then(Vec::new),
            hash: 0,
        }
    }

    /// Adds a line. The text is not made if nobody wants it.
    pub(crate) fn note(&mut self, now: Time, text: impl FnOnce() -> String) {
        self.hash = mix(self.hash ^ now);
        if let Some(lines) = &mut self.lines {
            let line = format!("{:>10.3} ms  {}", now as f64 / 1000.0, text());
            for byte in line.bytes() {
                self.hash = mix(self.hash ^ u64::from(byte));
            }
            lines.push(line);
        }
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    pub(crate) fn into_lines(self) -> Vec<String> {
        self.lines.unwrap_or_default()
    }
}
