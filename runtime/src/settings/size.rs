//! Amounts of memory and of disk, as settings write them.

/// Reads `64MiB`, `16GiB` or a number of bytes.
///
/// # Errors
///
/// If it is none, with what is expected.
pub fn size(text: &str) -> Result<u64, String> {
    let wrong = || {
        format!(
            "`{text}` is not a size; expected a whole number of bytes, or one with KiB, MiB, GiB or TiB, like 64MiB"
        )
    };
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let factor = match unit {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1_u64 << 40,
        _ => return Err(wrong()),
    };
    number
        .checked_mul(factor)
        // More than any machine has, and it can still be added up.
        .filter(|bytes| *bytes <= 1 << 60)
        .ok_or_else(wrong)
}

/// As [`size`], for memory of this process: at least 1 MiB.
///
/// # Errors
///
/// As [`size`].
pub fn memory(text: &str) -> Result<usize, String> {
    let bytes = size(text)?;
    usize::try_from(bytes)
        .ok()
        .filter(|bytes| *bytes >= 1 << 20)
        .ok_or_else(|| format!("`{text}` is too little; allowed is 1MiB or more"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_numbers_with_a_unit() {
        for (text, bytes) in [
            ("0", 0),
            ("17", 17),
            ("17B", 17),
            ("2KiB", 2048),
            ("64MiB", 64 << 20),
            ("16GiB", 16 << 30),
            ("1TiB", 1 << 40),
        ] {
            assert_eq!(size(text), Ok(bytes));
        }
        for bad in [
            "",
            "MiB",
            "1.5GiB",
            "-1",
            "5 MiB",
            "5MB",
            "5m",
            "99999999999999999999",
            "99999999TiB",
        ] {
            assert!(size(bad).unwrap_err().contains("like 64MiB"), "{bad}");
        }
        assert_eq!(memory("1MiB"), Ok(1 << 20));
        assert!(memory("1023KiB").unwrap_err().contains("1MiB or more"));
        assert!(memory("x").unwrap_err().contains("like 64MiB"));
    }
}
