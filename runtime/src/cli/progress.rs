//! What goes on, on standard error: on a terminal one line at its foot that changes, elsewhere a line for each change.

use std::io::IsTerminal as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::output::{printable, write_if_read};
use crate::hosts::HostSlots;
use crate::ssh::{HostEvent, Stage};

/// What is over sooner is not shown.
const SOON: Duration = Duration::from_millis(500);

/// How often the line is drawn.
const TICK: Duration = Duration::from_millis(120);

const FRAMES: [char; 4] = ['|', '/', '-', '\\'];

/// Takes the line away.
const WIPE: &[u8] = b"\r\x1b[K";

/// The line at the foot of the terminal.
struct Line {
    text: String,
    since: Instant,
    ticks: usize,
    is_shown: bool,
}

static LINE: Mutex<Option<Line>> = Mutex::new(None);

fn line() -> MutexGuard<'static, Option<Line>> {
    LINE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Shows what goes on, in place of what was shown, until [`end`]. Nothing where standard error is no terminal.
pub(super) fn show(text: String) {
    if !std::io::stderr().is_terminal() {
        return;
    }
    if let Some(line) = &mut *line() {
        line.text = text;
        return;
    }
    let new = Line {
        text,
        since: Instant::now(),
        ticks: 0,
        is_shown: false,
    };
    *line() = Some(new);
    let drawing = std::thread::Builder::new().name("kolo-progress".to_owned());
    // Without the thread nothing is shown, which is a courtesy.
    drawing.spawn(draw).ok();
}

fn draw() {
    loop {
        std::thread::sleep(TICK);
        let mut line = line();
        let Some(line) = &mut *line else { return };
        if line.since.elapsed() < SOON {
            continue;
        }
        line.ticks += 1;
        line.is_shown = true;
        let size = rustix::termios::tcgetwinsize(rustix::stdio::stderr());
        let columns = size.map_or(80, |size| usize::from(size.ws_col.max(20)));
        let frame = FRAMES[line.ticks % FRAMES.len()];
        let text: String = line.text.chars().take(columns - 3).collect();
        let text = format!("\r\x1b[K{frame} {text}");
        write_if_read(rustix::stdio::stderr(), text.as_bytes());
    }
}

/// Says something above the line.
pub(super) fn above(say: impl FnOnce()) {
    let mut line = line();
    if let Some(line) = &mut *line
        && std::mem::take(&mut line.is_shown)
    {
        write_if_read(rustix::stdio::stderr(), WIPE);
    }
    say();
}

/// Takes the line away.
pub(super) fn end() {
    if let Some(line) = line().take()
        && line.is_shown
    {
        write_if_read(rustix::stdio::stderr(), WIPE);
    }
}

/// Shows how far each host is.
pub(super) struct Progress {
    /// What was last said of each host, and whether it is up.
    hosts: Vec<(String, String, bool)>,
    /// Nothing is shown but failures.
    quiet: bool,
    is_terminal: bool,
}

impl Progress {
    pub(super) fn new(hosts: &[HostSlots], quiet: bool) -> Self {
        Self {
            hosts: hosts
                .iter()
                .map(|host| (host.destination(), String::new(), false))
                .collect(),
            quiet,
            is_terminal: std::io::stderr().is_terminal(),
        }
    }

    /// Something happened.
    pub(super) fn on(&mut self, event: &HostEvent) {
        let told = self.change(event);
        if self.is_terminal && !self.quiet {
            show(self.summary());
        }
        if let Some(text) = told {
            above(|| write_if_read(rustix::stdio::stderr(), text.as_bytes()));
        }
    }

    /// Something happened of which only the line at the foot of a terminal tells.
    pub(super) fn watch(&mut self, event: &HostEvent) {
        self.change(event);
        show(self.summary());
    }

    /// What to write: of changes only failures where a line shows the rest.
    fn change(&mut self, event: &HostEvent) -> Option<String> {
        let (host, text, failed) = match event {
            HostEvent::Stage { host, stage } => (host, in_words(*stage).to_owned(), false),
            HostEvent::Failed { host, error } => (host, format!("failed: {error}"), true),
        };
        let name = host.destination();
        let (_, said, is_up) = self.hosts.iter_mut().find(|(known, ..)| *known == name)?;
        *is_up = text == in_words(Stage::Up);
        if *said == text {
            return None;
        }
        said.clone_from(&text);
        let is_told = failed || !(self.quiet || self.is_terminal);
        is_told.then(|| format!("kolo: {name}: {}\n", printable(&text)))
    }

    /// All hosts in one line: `2 of 3 hosts are up [######....]  b: sending kolo-node`.
    fn summary(&self) -> String {
        const BAR: usize = 10;
        let (up, all) = (
            self.hosts.iter().filter(|(.., is_up)| *is_up).count(),
            self.hosts.len(),
        );
        let full = up * BAR / all.max(1);
        let bar = "#".repeat(full) + &".".repeat(BAR - full);
        let under_way = self
            .hosts
            .iter()
            .find(|(_, said, is_up)| !(*is_up || said.is_empty()));
        let rest = under_way.map_or_else(String::new, |(name, said, _)| {
            format!("  {name}: {}", printable(said))
        });
        format!("{up} of {all} hosts are up [{bar}]{rest}")
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
        let stage = |host: &HostSlots, stage| HostEvent::Stage {
            host: host.clone(),
            stage,
        };
        let failed = HostEvent::Failed {
            host: hosts[0].clone(),
            error: HostError::Ssh {
                text: "no\x1b[2J".to_owned(),
            },
        };
        for (quiet, is_terminal, line) in [
            (false, false, Some("kolo: me@b: sending kolo-node\n")),
            (true, false, None),
            (false, true, None),
        ] {
            let mut progress = Progress::new(&hosts, quiet);
            progress.is_terminal = is_terminal;
            let sending = stage(&hosts[1], Stage::Sending);
            assert_eq!(progress.change(&sending).as_deref(), line);
            assert_eq!(progress.change(&sending), None, "it is no change");
            progress.change(&stage(&hosts[0], Stage::Up));
            assert_eq!(
                progress.summary(),
                "1 of 2 hosts are up [#####.....]  me@b: sending kolo-node"
            );
            let text = progress.change(&failed).unwrap();
            assert!(
                text.starts_with("kolo: a: failed: ssh: no\\u{1b}"),
                "{text}"
            );
        }
    }
}
