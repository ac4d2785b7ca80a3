//! Ids as people read and give them: by their first digits.

use std::collections::{BTreeSet, HashMap};

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
    if digits.is_empty() || kind.starts_with(&text.to_ascii_lowercase()) {
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

/// Nodes by what they are called.
pub(super) struct Called<'a> {
    nodes: Vec<&'a NodeInfo>,
    by_name: HashMap<Machine, Vec<&'a NodeInfo>>,
}

impl<'a> Called<'a> {
    pub(super) fn of(nodes: impl IntoIterator<Item = &'a NodeInfo>) -> Self {
        let nodes: Vec<&NodeInfo> = nodes.into_iter().collect();
        let mut by_name = HashMap::<Machine, Vec<&NodeInfo>>::new();
        for node in &nodes {
            let machine = Machine::new(&node.hostname, "");
            by_name.entry(machine).or_default().push(node);
        }
        Self { nodes, by_name }
    }

    /// The node that is meant by a hostname, of which those that are there count more, or by an id: `node-` and four digits or more, so
    /// that hostnames such as `node-1` are no ids.
    ///
    /// # Errors
    ///
    /// [`CliError::Usage`] if several nodes are called so.
    pub(super) fn find(&self, text: &str) -> Result<Option<&'a NodeInfo>, CliError> {
        let named = self.by_name.get(&Machine::new(text, ""));
        let mut found = named.cloned().unwrap_or_default();
        let is_there = |node: &&NodeInfo| node.alive;
        if found.iter().any(is_there) {
            found.retain(is_there);
        } else if let Some(node) = self.by_id(text)? {
            found = vec![node];
        }
        if found.len() < 2 {
            return Ok(found.pop());
        }
        let short = Short::of(self.nodes.iter().map(|node| node.node.to_string()));
        let ids: Vec<String> = found.iter().map(|node| short.show(node.node)).collect();
        Err(CliError::Usage(format!(
            "{} nodes of the cluster are called `{}`: give the id in place of the name, which is one of {}",
            ids.len(),
            text.escape_debug(),
            listed(&ids)
        )))
    }

    fn by_id(&self, text: &str) -> Result<Option<&'a NodeInfo>, CliError> {
        let Some(digits) = text.strip_prefix("node-") else {
            return Ok(None);
        };
        let is_short = digits.len() < DIGITS && !digits.is_empty();
        if is_short || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Ok(None);
        }
        let ids = self.nodes.iter().map(|node| node.node.to_string());
        let id = pick("node", text, ids, "kolo status")?;
        let mut nodes = self.nodes.iter();
        Ok(nodes
            .find(|node| Some(node.node.to_string()) == id)
            .copied())
    }
}

/// The first few of them.
pub(super) fn listed(names: &[String]) -> String {
    const SHOWN: usize = 8;
    match names {
        [] => "none".to_owned(),
        names if names.len() > SHOWN => {
            format!(
                "{} and {} more",
                names[..SHOWN].join(", "),
                names.len() - SHOWN
            )
        }
        names => names.join(", "),
    }
}

/// A text for people, with the ids in it as short as they are told apart there. What is quoted stays, and so do paths.
pub(super) fn shortened(text: &str) -> String {
    let ids = text.split(char::is_whitespace).filter_map(id_in);
    Short::of(ids.map(str::to_owned)).within(text)
}

/// The id that a word is, with punctuation around it or not.
fn id_in(word: &str) -> Option<&str> {
    let id = word.trim_matches(|c| "()«»,;:.".contains(c));
    let digits = ["job-", "node-", "driver-"]
        .iter()
        .find_map(|kind| id.strip_prefix(kind))?;
    let is_id = digits.len() == 16 && digits.bytes().all(|c| c.is_ascii_hexdigit());
    is_id.then_some(id)
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
        let words = text.split_inclusive(char::is_whitespace);
        let short = words.map(|part| match id_in(part.trim_end()) {
            Some(id) => part.replacen(id, &self.show(id), 1),
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
        assert_eq!(
            shortened(
                "one of node-00f3a9c2d4e5b687,\n  node-00f3a8c2d4e5b687; job-ab00000000000000."
            ),
            "one of node-00f3a9,\n  node-00f3a8; job-ab0000."
        );
        for stays in [
            "there is no job `job-00f3a9c2d4e5b687`",
            "KeyError: 'job-00f3a9c2d4e5b687'",
            "/tmp/job-00f3a9c2d4e5b687/0 and /tmp/a:job-00f3a9c2d4e5b687",
            "https://h/x?job=job-00f3a9c2d4e5b687",
        ] {
            assert_eq!(shortened(stays), stays);
        }
    }
}
