//! What is shown while hosts come up: a line for each host that changes in place on a terminal, lines as they come elsewhere.

use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _};

use super::output::printable;
use crate::hosts::HostSlots;
use crate::ssh::{HostEvent, Stage};

/// More hosts than this scroll.
const MOST_IN_PLACE: usize = 32;

/// The longest line that is surely not broken by a terminal.
const WIDTH: usize = 79;

/// Shows on standard error how far each host is.
pub(super) struct Progress {
    hosts: Vec<(String, String)>,
    in_place: bool,
    drawn: bool,
    /// Nothing is shown but failures.
    quiet: bool,
}

impl Progress {
    pub(super) fn new(hosts: &[HostSlots], quiet: bool) -> Self {
        let terminal = std::io::stderr().is_terminal()
            && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        Self {
            hosts: hosts
                .iter()
                .map(|host| (host.destination(), "waiting".to_owned()))
                .collect(),
            in_place: terminal && hosts.len() <= MOST_IN_PLACE,
            drawn: false,
            quiet,
        }
    }

    /// Something happened.
    pub(super) fn on(&mut self, event: &HostEvent) {
        let text = self.change(event);
        if let Some(text) = text {
            // Progress is a courtesy: what nobody can read is not worth an error.
            drop(std::io::stderr().write_all(text.as_bytes()));
        }
    }

    /// What to write.
    fn change(&mut self, event: &HostEvent) -> Option<String> {
        let (host, text, failed) = match event {
            HostEvent::Stage { host, stage } => (host, in_words(*stage).to_owned(), false),
            HostEvent::Failed { host, error } => (host, format!("failed: {error}"), true),
        };
        let name = host.destination();
        let entry = self.hosts.iter_mut().find(|(known, _)| *known == name)?;
        if entry.1 == text {
            return None;
        }
        entry.1.clone_from(&text);
        if self.quiet && !failed {
            return None;
        }
        if !self.in_place || self.quiet {
            return Some(format!("kolo: {}: {}\n", name, printable(&text)));
        }
        let mut screen = String::new();
        if self.drawn {
            let _ = write!(screen, "\x1b[{}A", self.hosts.len());
        }
        self.drawn = true;
        for (name, text) in &self.hosts {
            let line: String = format!("  {name}: {}", printable(text))
                .chars()
                .take(WIDTH)
                .collect();
            screen.push_str(&line);
            screen.push_str("\x1b[K\n");
        }
        Some(screen)
    }
}

fn in_words(stage: Stage) -> &'static str {
    match stage {
        Stage::Up => "up",
        Stage::Stopping => "stopping",
        other => other.doing(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hosts::parse_hosts;
    use crate::ssh::HostError;

    fn progress(in_place: bool, quiet: bool) -> (Vec<HostSlots>, Progress) {
        let hosts = parse_hosts("a:1,me@b:1").unwrap();
        let mut progress = Progress::new(&hosts, quiet);
        progress.in_place = in_place;
        (hosts, progress)
    }

    fn stage(host: &HostSlots, stage: Stage) -> HostEvent {
        HostEvent::Stage {
            host: host.clone(),
            stage,
        }
    }

    #[test]
    fn off_a_terminal_there_is_a_line_for_each_change() {
        let (hosts, mut progress) = progress(false, false);
        let event = stage(&hosts[1], Stage::Sending);
        assert_eq!(
            progress.change(&event).as_deref(),
            Some("kolo: me@b: sending kolo-node\n")
        );
        assert_eq!(progress.change(&event), None);
        let failed = HostEvent::Failed {
            host: hosts[0].clone(),
            error: HostError::Ssh {
                text: "no\x1b[2J".to_owned(),
            },
        };
        let text = progress.change(&failed).unwrap();
        assert!(
            text.starts_with("kolo: a: failed: ssh: no\\u{1b}"),
            "{text}"
        );
    }

    #[test]
    fn on_a_terminal_lines_change_in_place() {
        let (hosts, mut progress) = progress(true, false);
        let first = progress.change(&stage(&hosts[0], Stage::Up)).unwrap();
        assert_eq!(first, "  a: up\x1b[K\n  me@b: waiting\x1b[K\n");
        let second = progress.change(&stage(&hosts[1], Stage::Up)).unwrap();
        assert_eq!(second, "\x1b[2A  a: up\x1b[K\n  me@b: up\x1b[K\n");
    }

    #[test]
    fn what_is_quiet_tells_failures_only() {
        let (hosts, mut progress) = progress(true, true);
        assert_eq!(progress.change(&stage(&hosts[0], Stage::Up)), None);
        let failed = HostEvent::Failed {
            host: hosts[0].clone(),
            error: HostError::GivenUp,
        };
        assert!(
            progress
                .change(&failed)
                .unwrap()
                .starts_with("kolo: a: failed")
        );
    }
}
