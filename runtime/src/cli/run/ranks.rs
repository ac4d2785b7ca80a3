//! Which ranks are shown: `0,4-7`.

use std::fmt;

/// Some ranks, or all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Ranks {
    /// Inclusive, in the order given; `None` are all.
    ranges: Option<Vec<(u32, u32)>>,
}

impl Ranks {
    /// Reads a list such as `0,4-7`; `all` are all.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let refuse = |part: &str, reason: &str| {
            Err(format!(
                "`{}` {reason}; ranks are written as 0,4-7, or as all",
                part.escape_debug()
            ))
        };
        if text.trim() == "all" {
            return Ok(Self::default());
        }
        let mut ranges = Vec::new();
        for part in text.split(',') {
            let part = part.trim();
            let (from, to) = part.split_once('-').unwrap_or((part, part));
            let (Ok(from), Ok(to)) = (from.trim().parse(), to.trim().parse()) else {
                return refuse(part, "is no rank and no range of ranks");
            };
            if from > to {
                return refuse(part, "is a range that ends before it begins");
            }
            ranges.push((from, to));
        }
        Ok(Self {
            ranges: Some(ranges),
        })
    }

    /// Whether a rank is among them.
    pub(crate) fn contains(&self, rank: u32) -> bool {
        self.ranges.as_ref().is_none_or(|ranges| {
            ranges
                .iter()
                .any(|(from, to)| (*from..=*to).contains(&rank))
        })
    }

    /// The first rank that a job of `workers` does not have.
    pub(crate) fn beyond(&self, workers: u32) -> Option<u32> {
        let ranges = self.ranges.as_ref()?;
        ranges
            .iter()
            .map(|(from, to)| if *from >= workers { *from } else { *to })
            .find(|rank| *rank >= workers)
    }
}

impl fmt::Display for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(ranges) = &self.ranges else {
            return f.write_str("all");
        };
        for (index, (from, to)) in ranges.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            if from == to {
                write!(f, "{comma}{from}")?;
            } else {
                write!(f, "{comma}{from}-{to}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_ranges_are_read() {
        let ranks = Ranks::parse("0, 4-7,12").unwrap();
        let chosen: Vec<u32> = (0..20).filter(|rank| ranks.contains(*rank)).collect();
        assert_eq!(chosen, [0, 4, 5, 6, 7, 12]);
        assert_eq!(ranks.to_string(), "0,4-7,12");
        assert_eq!(ranks.beyond(13), None);
        assert_eq!(ranks.beyond(6), Some(7));
        assert_eq!(ranks.beyond(4), Some(4));
        let all = Ranks::parse("all").unwrap();
        assert!(all.contains(9999) && all.beyond(1).is_none());
        assert_eq!(all, Ranks::default());
    }

    #[test]
    fn what_is_no_list_is_refused_with_its_part() {
        for (text, part) in [
            ("", "``"),
            ("1,,2", "``"),
            ("x", "`x`"),
            ("1,3-", "`3-`"),
            ("-1", "`-1`"),
            ("7-4", "`7-4`"),
            ("99999999999", "`99999999999`"),
        ] {
            let error = Ranks::parse(text).unwrap_err();
            assert!(error.starts_with(part), "{text}: {error}");
        }
    }
}
