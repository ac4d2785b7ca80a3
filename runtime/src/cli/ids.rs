//! Ids as people read and give them: by their first digits.

use std::collections::BTreeSet;

use super::error::CliError;

/// The fewest digits of a short id.
const DIGITS: usize = 4;

/// Candidates that a message lists.
const LISTED: usize = 5;

/// The one id of `known` that begins with `text`, with or without `KIND-` before it; `None` if none does.
///
/// # Errors
///
/// [`CliError::Usage`] if the text has no digits, or several ids begin so. `list` is the command that shows the ids.
pub(super) fn pick(
    kind: &str,
    text: &str,
    known: impl IntoIterator<Item = String>,
    list: &str,
) -> Result<Option<String>, CliError> {
    let text = text.trim();
    let rest = text.strip_prefix(kind);
    let digits = rest.and_then(|rest| rest.strip_prefix('-')).unwrap_or(text);
    let digits = digits.to_ascii_lowercase();
    if digits.is_empty() {
        return Err(CliError::Usage(format!(
            "`{}` is the start of every id of a {kind}; give some of the digits that `{list}` shows",
            text.escape_debug()
        )));
    }
    let whole = format!("{kind}-{digits}");
    let found: BTreeSet<String> = known
        .into_iter()
        .filter(|id| id.starts_with(&whole))
        .collect();
    if found.len() < 2 {
        return Ok(found.into_iter().next());
    }
    let mut listed: Vec<&str> = found.iter().map(String::as_str).take(LISTED).collect();
    if found.len() > LISTED {
        listed.push("…");
    }
    Err(CliError::Usage(format!(
        "`{}` is the start of {} {kind}s: {}; give more of the id",
        text.escape_debug(),
        found.len(),
        listed.join(", ")
    )))
}

/// How ids are shown that stand in one list: as short as they are told apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct Short {
    digits: usize,
}

impl Short {
    pub(super) fn of(ids: impl IntoIterator<Item = String>) -> Self {
        let ids: BTreeSet<String> = ids.into_iter().collect();
        let alike = ids.iter().zip(ids.iter().skip(1)).map(|(one, next)| {
            let same = one.bytes().zip(next.bytes()).take_while(|(a, b)| a == b);
            same.count() - one.find('-').map_or(0, |at| at + 1)
        });
        let digits = alike.max().map_or(DIGITS, |alike| DIGITS.max(alike + 1));
        Self { digits }
    }

    pub(super) fn show(self, id: impl ToString) -> String {
        let mut id = id.to_string();
        let end = id.find('-').map_or(0, |at| at + 1) + self.digits;
        id.truncate(end);
        id
    }

    /// A text whose ids are as short.
    pub(super) fn within(self, text: &str) -> String {
        let is_other = |c: char| !(c.is_ascii_alphanumeric() || c == '-');
        let parts = text.split_inclusive(is_other).map(|part| {
            let id = part.trim_end_matches(is_other);
            match id.split_once('-') {
                Some(("job" | "node" | "driver", digits))
                    if digits.len() == 16 && digits.bytes().all(|c| c.is_ascii_hexdigit()) =>
                {
                    self.show(id) + &part[id.len()..]
                }
                _ => part.to_owned(),
            }
        });
        parts.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> Vec<String> {
        ["job-1234000000000000", "job-1250000000000000"]
            .map(str::to_owned)
            .to_vec()
    }

    #[test]
    fn an_id_is_found_by_its_first_digits() {
        for text in ["job-1234", "1234", "job-1234000000000000", "123"] {
            let found = pick("job", text, known(), "kolo jobs").unwrap();
            assert_eq!(found.as_deref(), Some("job-1234000000000000"), "{text}");
        }
        for text in ["job-9", "node-1234", "12340000000000001"] {
            assert_eq!(pick("job", text, known(), "kolo jobs").unwrap(), None);
        }
        for (text, message) in [
            (
                "job-12",
                "`job-12` is the start of 2 jobs: job-1234000000000000, job-1250000000000000; give more of the id",
            ),
            (
                "job-",
                "`job-` is the start of every id of a job; give some of the digits that `kolo jobs` shows",
            ),
            (
                "",
                "`` is the start of every id of a job; give some of the digits that `kolo jobs` shows",
            ),
        ] {
            let error = pick("job", text, known(), "kolo jobs").unwrap_err();
            assert_eq!(error.to_string(), message);
            assert_eq!(error.exit_code(), 2);
        }
    }

    #[test]
    fn short_ids_are_told_apart() {
        assert_eq!(Short::of(known()).show("job-1234000000000000"), "job-1234");
        let close = ["job-1234000000000000", "job-1234010000000000"].map(str::to_owned);
        assert_eq!(Short::of(close.clone()).show(&close[1]), "job-123401");
        assert_eq!(Short::of([]).show("node-00f3a9c2d4e5b687"), "node-00f3");
        let text =
            "«a» (node-00f3a9c2d4e5b687): job-1, node-00f3a9c2d4e5b687x, driver-00f3a9c2d4e5b687";
        assert_eq!(
            Short::of([]).within(text),
            "«a» (node-00f3): job-1, node-00f3a9c2d4e5b687x, driver-00f3"
        );
    }
}
