//! Sizes as people write them.

/// Parses `4`, `64K`, `1M`, `2G`, also with `B` or `iB` behind the letter: powers of 1024.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let wrong = || {
        format!(
            "`{text}` is no size; write a whole number of bytes, or one with K, M or G (powers of 1024): 4, 64K, 32M"
        )
    };
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let number: u64 = text[..digits].parse().map_err(|_| wrong())?;
    let shift = match text[digits..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        _ => return Err(wrong()),
    };
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

/// As people read them.
pub(crate) fn show(bytes: u64) -> String {
    for (shift, unit) in [(30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes >= 1 << shift && bytes.is_multiple_of(1 << shift) {
            return format!("{} {unit}", bytes >> shift);
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_shown() {
        for (text, bytes, shown) in [
            ("4", 4, "4 B"),
            ("64K", 65_536, "64 KiB"),
            ("1MiB", 1 << 20, "1 MiB"),
            ("3gb", 3 << 30, "3 GiB"),
            ("1025", 1025, "1025 B"),
        ] {
            assert_eq!(parse(text), Ok(bytes));
            assert_eq!(show(bytes), shown);
        }
        for text in ["", "K", "-1", "1.5M", "4X", "99999999999999G"] {
            assert!(parse(text).unwrap_err().contains("is no size"), "{text}");
        }
    }
}
