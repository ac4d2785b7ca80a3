//! Spans of time, in the one form in which people write and read them: `250ms`, `5s`, `1m 30s`, `2h`, `7d`.

use std::fmt::{self, Display, Formatter};
use std::time::Duration;

/// The units, the largest first, in milliseconds.
const UNITS: [(&str, u64); 5] = [
    ("d", 86_400_000),
    ("h", 3_600_000),
    ("m", 60_000),
    ("s", 1000),
    ("ms", 1),
];

/// The longest span that is read, in milliseconds: a thousand years are more than any setting may be.
const LONGEST: f64 = 1000.0 * 366.0 * 86_400_000.0;

/// Reads a span: `250ms`, `5s`, `1.5h`, `1m30s`. A number alone is in seconds.
///
/// # Errors
///
/// If the text is no span, with what is expected.
pub fn duration(text: &str) -> Result<Duration, String> {
    read(text).ok_or_else(|| {
        format!(
            "`{}` is not a duration; expected numbers with ms, s, m, h or d, such as 250ms, 5s or 1h30m",
            text.escape_debug()
        )
    })
}

fn read(text: &str) -> Option<Duration> {
    let mut rest = text;
    let mut ms = 0.0;
    while !rest.is_empty() || text.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.');
        let (number, after) = rest.split_at(end.unwrap_or(rest.len()));
        let end = after.find(|c: char| !c.is_ascii_alphabetic());
        let (unit, after) = after.split_at(end.unwrap_or(after.len()));
        let factor = match unit {
            "" if number.len() == text.len() => 1000,
            _ => UNITS.iter().find(|(name, _)| *name == unit)?.1,
        };
        ms += number.parse::<f64>().ok()? * factor as f64;
        rest = after.strip_prefix(' ').unwrap_or(after);
    }
    let seconds = ms.round() / 1000.0;
    Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|_| ms <= LONGEST)
}

/// Shows a span: from a minute on in two units at most, whole seconds; below that to the millisecond.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span(pub Duration);

impl Span {
    /// What was measured, and is of interest to a tenth of a second: of more than a second, the rest is left out.
    #[must_use]
    pub fn rough(span: Duration) -> Self {
        let ms = u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        let shown = if ms < 1000 { ms } else { ms / 100 * 100 };
        Self(Duration::from_millis(shown))
    }
}

impl Display for Span {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let ms = u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX);
        match ms {
            1..1000 => write!(f, "{ms}ms"),
            0..60_000 => write!(f, "{}s", ms as f64 / 1000.0),
            _ => {
                let largest = UNITS.iter().position(|(_, unit)| ms >= *unit);
                let at = largest.unwrap_or_default();
                let [(name, unit), (part_name, part)] = [UNITS[at], UNITS[at + 1]];
                write!(f, "{}{name}", ms / unit)?;
                match ms % unit / part {
                    0 => Ok(()),
                    parts => write!(f, " {parts}{part_name}"),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_is_read_again() {
        for (ms, text) in [
            (0, "0s"),
            (250, "250ms"),
            (1250, "1.25s"),
            (5000, "5s"),
            (59_999, "59.999s"),
            (60_000, "1m"),
            (90_000, "1m 30s"),
            (7_500_000, "2h 5m"),
            (86_400_000, "1d"),
            (187_200_000, "2d 4h"),
        ] {
            let span = Duration::from_millis(ms);
            assert_eq!(Span(span).to_string(), text);
            assert_eq!(duration(text), Ok(span), "{text}");
        }
        assert_eq!(Span(Duration::from_secs(3661)).to_string(), "1h 1m");
    }

    #[test]
    fn spans_are_numbers_with_units_or_seconds() {
        for (text, ms) in [
            ("3", 3000),
            ("0.3", 300),
            ("1.5h", 5_400_000),
            ("1h30m", 5_400_000),
            ("24h", 86_400_000),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for wrong in [
            "",
            "s",
            "-3s",
            "1.2.3s",
            "NaNs",
            "inf",
            "3 s",
            "3x",
            "5s 3",
            "1e9",
            "99999999999999999999s",
            "9999999999d",
            "1ä",
        ] {
            let error = duration(wrong).unwrap_err();
            assert!(error.contains("such as 250ms, 5s"), "{wrong}: {error}");
        }
    }
}
