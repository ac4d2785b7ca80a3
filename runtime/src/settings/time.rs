//! Times, as settings write them.

use std::time::Duration;

/// The longest time, in milliseconds: a thousand years are more than any setting may be.
const LONGEST: u64 = 1000 * 366 * 86_400_000;

/// Reads `250ms`, `3s`, `10m`, `24h` or `7d`.
///
/// # Errors
///
/// If it is none, with what is expected.
pub fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || {
        format!(
            "`{text}` is not a duration; expected a whole number and ms, s, m, h or d, like 250ms or 3s"
        )
    };
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let factor = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(wrong()),
    };
    number
        .checked_mul(factor)
        .filter(|ms| *ms <= LONGEST)
        .map(Duration::from_millis)
        .ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_unit() {
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(duration("24h"), Ok(Duration::from_secs(86_400)));
        for wrong in [
            "",
            "3",
            "s",
            "-3s",
            "1.5s",
            "NaNs",
            "3 s",
            "99999999999999999999s",
            "9999999999d",
        ] {
            let error = duration(wrong).unwrap_err();
            assert!(error.contains("like 250ms or 3s"), "{wrong}: {error}");
        }
    }
}
