//! The order of names that people have in mind: `host2` before `host10`.

use std::cmp::Ordering;

/// Compares names in which numbers count as numbers, and large letters as small ones. Equal only for names that are the same but
/// for case and leading zeros.
pub(super) fn natural(left: &str, right: &str) -> Ordering {
    let (mut left, mut right) = (left.as_bytes(), right.as_bytes());
    loop {
        let (number, other) = (digits(left), digits(right));
        let order = if number > 0 && other > 0 {
            let (one, two) = (significant(&left[..number]), significant(&right[..other]));
            one.len().cmp(&two.len()).then_with(|| one.cmp(two))
        } else {
            let first = |name: &[u8]| name.first().map(u8::to_ascii_lowercase);
            first(left).cmp(&first(right))
        };
        if order != Ordering::Equal || left.is_empty() {
            return order;
        }
        left = &left[number.max(1)..];
        right = &right[other.max(1)..];
    }
}

/// How many digits a name begins with.
fn digits(name: &[u8]) -> usize {
    name.iter().take_while(|byte| byte.is_ascii_digit()).count()
}

/// A number without leading zeros.
fn significant(number: &[u8]) -> &[u8] {
    let zeros = number.iter().take_while(|byte| **byte == b'0').count();
    &number[zeros..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_are_numbers() {
        let sorted = [
            "",
            "10.0.0.9",
            "10.0.0.10",
            "a",
            "a0",
            "A1",
            "a2",
            "a2-1",
            "a10",
            "a99999999999999999999998",
            "a99999999999999999999999",
            "ab",
            "b1.rack2",
            "b1.rack11",
            "b02",
        ];
        for (at, left) in sorted.iter().enumerate() {
            for (other, right) in sorted.iter().enumerate() {
                assert_eq!(natural(left, right), at.cmp(&other), "{left} {right}");
            }
        }
        assert_eq!(natural("Host07", "host7"), Ordering::Equal);
        assert_eq!(natural("h00", "h0"), Ordering::Equal);
    }
}
