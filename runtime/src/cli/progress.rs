//! What is shown while hosts come up: a line for each change.

use std::io::Write as _;

use super::output::printable;
use crate::hosts::HostSlots;
use crate::ssh::{HostEvent, Stage};

/// Shows on standard error how far each host is.
pub(super) struct Progress {
    /// What was last said of each host.
    hosts: Vec<(String, String)>,
    /// Nothing is shown but failures.
    quiet: bool,
}

impl Progress {
    pub(super) fn new(hosts: &[HostSlots], quiet: bool) -> Self {
        Self {
            hosts: hosts
                .iter()
                .map(|host| (host.destination(), String::new()))
                .collect(),
            quiet,
        }
    }

    /// Something happened.
    pub(super) fn on(&mut self, event: &HostEvent) {
        if let Some(text) = self.change(event) {
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
        let (_, said) = self.hosts.iter_mut().find(|(known, _)| *known == name)?;
        if *said == text {
            return None;
        }
        said.clone_from(&text);
        (failed || !self.quiet).then(|| format!("kolo: {name}: {}\n", printable(&text)))
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

    #[test]
    fn there_is_a_line_for_each_change_or_for_failures_only() {
        let hosts = parse_hosts("a:1,me@b:1").unwrap();
        let sending = HostEvent::Stage {
            host: hosts[1].clone(),
            stage: Stage::Sending,
        };
        let failed = HostEvent::Failed {
            host: hosts[0].clone(),
            error: HostError::Ssh {
                text: "no\x1b[2J".to_owned(),
            },
        };
        for (quiet, line) in [
            (false, Some("kolo: me@b: sending kolo-node\n")),
            (true, None),
        ] {
            let mut progress = Progress::new(&hosts, quiet);
            assert_eq!(progress.change(&sending).as_deref(), line);
            assert_eq!(progress.change(&sending), None, "it is no change");
            let text = progress.change(&failed).unwrap();
            assert!(
                text.starts_with("kolo: a: failed: ssh: no\\u{1b}"),
                "{text}"
            );
        }
    }
}
