//! Ids as people read and give them: by their first digits.

use std::collections::BTreeSet;

use kolo_transport::wire::NodeInfo;

use super::error::CliError;
use crate::hosts::Machine;

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
    if digits.is_empty() || kind.starts_with(&digits) {
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

/// The nodes that are meant by a hostname, of which those that are there count more, or by the start of an id, `node-` and digits.
///
/// # Errors
///
/// As [`pick`].
pub(super) fn nodes_meant<'a>(
    text: &str,
    nodes: &'a [NodeInfo],
) -> Result<Vec<&'a NodeInfo>, CliError> {
    let machine = Machine::new(text, "");
    let called = |node: &&NodeInfo| Machine::new(&node.hostname, "") == machine;
    let mut found: Vec<&NodeInfo> = nodes.iter().filter(called).collect();
    if found.iter().any(|node| node.alive) {
        found.retain(|node| node.alive);
    }
    if found.is_empty() && text.starts_with("node-") {
        let ids = nodes.iter().map(|node| node.node.to_string());
        let id = pick("node", text, ids, "kolo status")?;
        found.extend(
            nodes
                .iter()
                .filter(|node| Some(node.node.to_string()) == id),
        );
    }
    Ok(found)
}

/// A text for people, with the ids in it as short as they are told apart there. Those in paths stay.
pub(super) fn shortened(text: &str) -> String {
    let ids = parts(text).filter_map(|(id, _)| id);
    Short::of(ids.map(str::to_owned)).within(text)
}

/// The words of a text with what follows them, and which of them are ids.
fn parts(text: &str) -> impl Iterator<Item = (Option<&str>, &str)> {
    let is_other = |c: char| !(c.is_ascii_alphanumeric() || "-/.".contains(c));
    text.split_inclusive(is_other).map(move |part| {
        let word = part.trim_end_matches(|c| is_other(c) || c == '.');
        let is_id = match word.split_once('-') {
            Some(("job" | "node" | "driver", digits)) => {
                digits.len() == 16 && digits.bytes().all(|c| c.is_ascii_hexdigit())
            }
            _ => false,
        };
        (is_id.then_some(word), part)
    })
}

/// How ids are shown that stand in one list: as short as they are told apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct Short {
    digits: usize,
}

impl Short {
    pub(super) fn of(ids: impl IntoIterator<Item = String>) -> Self {
        let digits = |id: String| match id.split_once('-') {
            Some((_, digits)) => digits.to_owned(),
            None => id,
        };
        let ids: BTreeSet<String> = ids.into_iter().map(digits).collect();
        let alike = ids.iter().zip(ids.iter().skip(1)).map(|(one, next)| {
            let same = one.bytes().zip(next.bytes());
            same.take_while(|(a, b)| a == b).count()
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
        let short = parts(text).map(|(id, part)| match id {
            Some(id) => self.show(id) + &part[id.len()..],
            None => part.to_owned(),
        });
        short.collect()
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
                "J",
                "`J` is the start of every id of a job; give some of the digits that `kolo jobs` shows",
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
        let text = "one of node-00f3a9c2d4e5b687, node-00f3a8c2d4e5b687. See /tmp/job-00f3a9c2d4e5b687/0 of job-00f3a9c2d4e5b687.";
        assert_eq!(
            shortened(text),
            "one of node-00f3a9, node-00f3a8. See /tmp/job-00f3a9c2d4e5b687/0 of job-00f3a9."
        );
    }
}
