//! Command lines that are wrong: what may have been meant.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory as _};
use kolo_transport::wire::span::duration;

use super::command::Args;
use super::run::join_negative;
use crate::settings::nearest;

/// Commands of other tools, and what does the same here.
const GUESSES: &[(&[&str], &str)] = &[
    (&["top", "watch"], "kolo jobs --watch"),
    (&["ps", "ls", "list", "queue"], "kolo jobs"),
    (&["describe", "get", "show"], "kolo jobs JOB"),
    (&["nodes", "cluster", "hosts", "info"], "kolo status"),
    (&["kill", "cancel", "delete", "rm"], "kolo stop JOB"),
    (
        &["exec", "start", "submit", "launch", "mpirun", "torchrun"],
        "kolo run -n 4 PROGRAM",
    ),
    (&["attach", "tail", "follow"], "kolo logs --follow JOB"),
    (&["drain", "cordon"], "kolo node drain NODE"),
    (&["undrain", "uncordon"], "kolo node undrain NODE"),
    (&["head"], "kolo-head --state-dir DIR"),
    (&["init"], "kolo up"),
    (&["version"], "kolo --version"),
    (&["check", "diagnose", "debug"], "kolo doctor"),
];

/// The fewest digits by which a job is shown. What is shorter and a duration is meant as that.
const SHORTEST_ID: usize = 4;

/// `--watch 1s` as `--watch=1s`: a word behind it is the id of a job only if it can be no duration. And options with their numbers.
pub(super) fn joined(mut line: Vec<OsString>) -> Vec<OsString> {
    let is_time = |word: &OsString| {
        let word = word.to_str().unwrap_or_default();
        let is_id = |word: &str| word.chars().all(|char| char.is_ascii_hexdigit());
        duration(word).is_ok() && (word.len() < SHORTEST_ID || !is_id(word))
    };
    let at = line.windows(2).position(|pair| match pair {
        [flag, word] => flag == "--watch" && is_time(word),
        _ => false,
    });
    if let Some(at) = at {
        let word = line.remove(at + 1);
        line[at].push("=");
        line[at].push(word);
    }
    let mut at = 1;
    while at < line.len() && line[at] != "--" {
        if line[at].to_str().is_some_and(|word| word.starts_with("--")) {
            join_negative(&mut line, at);
        }
        at += 1;
    }
    line
}

/// An error with what may have been meant, and with a usage that does not depend on what the environment sets. Of an unknown option
/// clap says how to pass it on as a value, which nobody wants.
pub(super) fn explained(mut error: clap::Error) -> clap::Error {
    error.remove(ContextKind::TrailingArg);
    let passes_on = |value: &ContextValue| match value {
        ContextValue::StyledStrs(tips) => tips
            .iter()
            .any(|tip| tip.to_string().contains("as a value")),
        _ => false,
    };
    if error.get(ContextKind::Suggested).is_some_and(passes_on) {
        error.remove(ContextKind::Suggested);
    }
    let mut root = Args::command();
    root.build();
    if let Some(usage) = error.get(ContextKind::Usage) {
        let usage = usage.to_string();
        let words = usage.split_whitespace().skip(2);
        let mut command = &root;
        for word in words {
            match command.find_subcommand(word) {
                Some(found) => command = found,
                None => break,
            }
        }
        let usage = ContextValue::StyledStr(command.clone().render_usage());
        error.insert(ContextKind::Usage, usage);
    }
    let is_of_nodes = |error: &clap::Error| {
        let usage = error.get(ContextKind::Usage);
        usage.is_some_and(|usage| usage.to_string().contains("kolo node "))
    };
    if error.kind() == ErrorKind::InvalidSubcommand
        && let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand)
    {
        let known = GUESSES.iter().find(|(words, _)| words.contains(&&**word));
        if let Some((_, meant)) = known {
            let lists = ["kolo jobs", "kolo jobs JOB"].contains(meant);
            let meant = if lists && is_of_nodes(&error) {
                "kolo status"
            } else {
                meant
            };
            error.remove(ContextKind::SuggestedSubcommand);
            let tip = ContextValue::StyledStrs(vec![format!("write `{meant}`").into()]);
            error.insert(ContextKind::Suggested, tip);
        } else if error.get(ContextKind::SuggestedSubcommand).is_none()
            && let Some(name) = nearest(word, root.get_subcommands().map(Command::get_name))
        {
            let names = ContextValue::Strings(vec![name.to_owned()]);
            error.insert(ContextKind::SuggestedSubcommand, names);
        }
    }
    error
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    fn told(line: &str) -> String {
        let line = line.split(' ').map(OsString::from).collect();
        let error = Args::try_parse_from(joined(line)).unwrap_err();
        explained(error).to_string()
    }

    #[test]
    fn what_is_wrong_is_told_with_what_was_meant_and_the_same_usage_everywhere() {
        for (line, parts) in [
            ("kolo top", &["tip: write `kolo jobs --watch`"][..]),
            ("kolo node list", &["tip: write `kolo status`"]),
            ("kolo kill x", &["tip: write `kolo stop JOB`"]),
            ("kolo rnu", &["'run'"]),
            (
                "kolo logs x --tail -1",
                &["'-1' for '--tail <N>': expected a whole number from 0 to"],
            ),
            (
                "kolo stop --timeout -5s x",
                &["'-5s' for '--timeout <DURATION>': "],
            ),
            (
                "kolo logs --follow",
                &["\nUsage: kolo logs [OPTIONS] <JOB>\n"],
            ),
            (
                "kolo --head h:1 token create --rol node",
                &["'--role'", "\nUsage: kolo token create [OPTIONS]\n"],
            ),
        ] {
            let told = told(line);
            for part in parts {
                assert!(told.contains(part), "{line}: {part} is not in {told}");
            }
        }
    }

    #[test]
    fn guesses_are_no_commands_and_lead_to_some() {
        let root = Args::command();
        for (words, meant) in GUESSES {
            for word in *words {
                assert!(root.find_subcommand(word).is_none(), "{word}");
            }
            let Some(command) = meant.strip_prefix("kolo ") else {
                continue;
            };
            let name = command.split(' ').next().unwrap();
            assert!(name.starts_with('-') || root.find_subcommand(name).is_some());
        }
    }

    #[test]
    fn a_time_may_follow_watch_as_a_word() {
        for (line, expected) in [
            ("jobs --watch 1s", "jobs --watch=1s"),
            ("jobs --watch 2 job-3f0a", "jobs --watch=2 job-3f0a"),
            ("status --watch 500ms", "status --watch=500ms"),
            ("jobs --watch 1234", "jobs --watch 1234"),
            ("jobs --watch job-1", "jobs --watch job-1"),
            ("jobs --watch", "jobs --watch"),
        ] {
            let words = line.split(' ').map(OsString::from).collect();
            let line: Vec<String> = joined(words)
                .into_iter()
                .map(|word| word.into_string().unwrap())
                .collect();
            assert_eq!(line.join(" "), expected);
        }
    }
}
