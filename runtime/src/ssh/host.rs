//! One host from nothing to a node and back: decisions only.

use std::net::IpAddr;
use std::time::Duration;

use super::error::HostError;
use super::protocol::{Answer, ReadyNode};

/// How much of standard error is kept for messages.
const KEPT_LINES: usize = 12;

/// What ssh says about a changed key that is the same for all of them; the message has its own advice.
const ALWAYS_THE_SAME: [&str; 4] = [
    "IT IS POSSIBLE THAT SOMEONE",
    "Someone could be eavesdropping",
    "It is also possible that a host key",
    "Please contact your system administrator",
];

/// How far a host is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// It waits for its turn.
    Waiting,
    /// ssh connects.
    Connecting,
    /// The shell there looks for the program.
    Checking,
    /// The program is being sent.
    Sending,
    /// The node joins and registers.
    Starting,
    /// The node runs.
    Up,
    /// The node ends its jobs and leaves.
    Stopping,
    /// It is over.
    Ended,
}

impl Stage {
    /// In words: "it was silent while …".
    pub fn doing(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Connecting => "connecting",
            Self::Checking => "looking for kolo-node there",
            Self::Sending => "sending kolo-node",
            Self::Starting => "starting the node",
            Self::Up => "the node was up",
            Self::Stopping => "stopping the node",
            Self::Ended => "ended",
        }
    }
}

/// How a process of this machine ended: ssh, or the node itself where no ssh is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    Code(i32),
    Signal(i32),
}

/// What happens to a host.
#[derive(Debug)]
pub(super) enum Event<'a> {
    /// ssh was started.
    Spawned,
    /// A line of standard output.
    Line(&'a str),
    /// A line of standard error.
    Complaint(&'a str),
    /// The order could not be made.
    NoOrder(HostError),
    /// The node is to stop.
    StopAsked,
    /// Nothing was heard for so long.
    Silent(Duration),
    /// ssh ended, and both streams.
    Exited(Ended),
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    /// Tell whoever watches.
    Show(Stage),
    /// Write the program to its standard input.
    SendProgram,
    /// Get a token and write the order. With the launcher's address as the host sees it, and what the machine says of itself.
    SendOrder(Option<IpAddr>, String),
    /// The node is registered.
    Up(ReadyNode),
    /// It is over; ssh is to be ended if it runs.
    Failed(HostError),
    /// The node has stopped as it was told.
    Down,
}

/// What the program here is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Expected {
    /// `Linux x86_64`; nothing if the program is not sent.
    pub(super) platform: Option<String>,
    /// `kolo-node 0.1.0`
    pub(super) version: String,
}

/// One host.
#[derive(Debug)]
pub(super) struct Host {
    expected: Expected,
    /// ssh is in between, so that its errors are to be told from the node's.
    over_ssh: bool,
    /// The process here may end with success once the node is up.
    detached: bool,
    stage: Stage,
    from: Option<IpAddr>,
    complaints: Vec<String>,
    /// Output that was no answer: what the host said instead.
    noise: Option<String>,
}

impl Host {
    pub(super) fn new(expected: Expected, over_ssh: bool, detached: bool) -> Self {
        Self {
            expected,
            over_ssh,
            detached,
            stage: Stage::Waiting,
            from: None,
            complaints: Vec::new(),
            noise: None,
        }
    }

    pub(super) fn stage(&self) -> Stage {
        self.stage
    }

    /// What was last written to standard error, on one line.
    fn text(&self) -> String {
        self.complaints.join(" ")
    }

    fn enter(&mut self, stage: Stage) -> Action {
        self.stage = stage;
        Action::Show(stage)
    }

    fn fail(&mut self, error: HostError) -> Vec<Action> {
        self.stage = Stage::Ended;
        vec![Action::Failed(error)]
    }

    pub(super) fn on(&mut self, event: Event<'_>) -> Vec<Action> {
        if self.stage == Stage::Ended {
            return Vec::new();
        }
        match event {
            Event::Spawned => vec![self.enter(Stage::Connecting)],
            Event::Line(line) => {
                if let Some(answer) = Answer::parse(line) {
                    return self.answer(answer);
                }
                if !line.trim().is_empty() {
                    self.noise = Some(line.trim().chars().take(200).collect());
                }
                Vec::new()
            }
            Event::Complaint(line) => {
                let line: String = line.trim().chars().take(500).collect();
                // Rulers of `@@@@` around ssh's warnings say nothing.
                let line = line.trim_matches(['@', ' ']).to_owned();
                let known = ALWAYS_THE_SAME.iter().any(|start| line.starts_with(start));
                if !line.is_empty() && !known {
                    if self.complaints.len() == KEPT_LINES {
                        self.complaints.remove(0);
                    }
                    self.complaints.push(line);
                }
                Vec::new()
            }
            Event::NoOrder(error) => self.fail(error),
            Event::StopAsked => vec![self.enter(Stage::Stopping)],
            Event::Silent(after) => {
                let (stage, text) = (self.stage.doing(), self.text());
                self.fail(HostError::Stalled { stage, after, text })
            }
            Event::Exited(ended) => self.exited(ended),
        }
    }

    fn answer(&mut self, answer: Answer) -> Vec<Action> {
        match (self.stage, answer) {
            (
                Stage::Connecting,
                Answer::Hello {
                    system,
                    machine,
                    from,
                },
            ) => {
                self.from = from;
                let found = format!("{system} {machine}");
                match &self.expected.platform {
                    Some(wanted) if *wanted != found => {
                        let wanted = wanted.clone();
                        self.fail(HostError::Platform { found, wanted })
                    }
                    _ => vec![self.enter(Stage::Checking)],
                }
            }
            (Stage::Checking, Answer::Need) => {
                vec![self.enter(Stage::Sending), Action::SendProgram]
            }
            (Stage::Sending, Answer::Stored) => vec![self.enter(Stage::Checking)],
            (Stage::Checking | Stage::Sending, Answer::CannotStore(text)) => {
                self.fail(HostError::CannotStore { text })
            }
            (Stage::Checking, Answer::CannotRun { code, text }) => {
                self.fail(HostError::CannotRun { code, text })
            }
            (Stage::Checking, Answer::Version(found)) => {
                let wanted = &self.expected.version;
                if found == *wanted {
                    return vec![self.enter(Stage::Starting)];
                }
                let wanted = wanted.clone();
                self.fail(HostError::Version { found, wanted })
            }
            (Stage::Starting, Answer::Order(machine)) => {
                vec![Action::SendOrder(self.from, machine)]
            }
            (Stage::Starting, Answer::Ready(node)) => {
                vec![self.enter(Stage::Up), Action::Up(node)]
            }
            (Stage::Starting, Answer::Failed(text)) => self.fail(HostError::Node { text }),
            (Stage::Starting, Answer::Running(pid)) => self.fail(HostError::Running { pid }),
            (Stage::Starting | Stage::Stopping, Answer::Stopped) => {
                self.stage = Stage::Ended;
                vec![Action::Down]
            }
            // Said at another time than it makes sense: an echo of an earlier step.
            _ => Vec::new(),
        }
    }

    fn exited(&mut self, ended: Ended) -> Vec<Action> {
        let text = self.text();
        match (self.stage, ended) {
            // ssh says 255 for its own failures, and for the loss of a connection.
            (Stage::Connecting, Ended::Code(255)) if self.over_ssh => {
                let text = if text.is_empty() {
                    "it ended with exit code 255 and said nothing".to_owned()
                } else {
                    text
                };
                self.fail(HostError::Ssh { text })
            }
            (Stage::Connecting, _) => {
                let noise = self.noise.take();
                let text = match noise {
                    Some(noise) if text.is_empty() => noise,
                    Some(noise) => format!("{noise} {text}"),
                    None => text,
                };
                self.fail(HostError::NoShell { text })
            }
            (Stage::Up, Ended::Code(0)) if self.detached => {
                self.stage = Stage::Ended;
                Vec::new()
            }
            (stage, ended) => {
                let how = match ended {
                    Ended::Code(255) if self.over_ssh => "the connection was lost".to_owned(),
                    Ended::Code(code) => format!("exit code {code}"),
                    Ended::Signal(signal) => format!("signal {signal}"),
                };
                let stage = stage.doing();
                self.fail(HostError::Lost { stage, how, text })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Host {
        Host::new(
            Expected {
                platform: Some("Linux x86_64".to_owned()),
                version: "kolo-node 0.1.0".to_owned(),
            },
            true,
            false,
        )
    }

    fn ready() -> ReadyNode {
        ReadyNode {
            node: kolo_transport::ids::NodeId(7),
            address: "10.0.0.2:1".parse().unwrap(),
            head: "10.0.0.1:7700".parse().unwrap(),
            pid: 12,
            state: "/s".to_owned(),
        }
    }

    fn lines(host: &mut Host, lines: &[&str]) -> Vec<Action> {
        lines
            .iter()
            .flat_map(|line| host.on(Event::Line(&format!("kolo-up/1 {line}"))))
            .collect()
    }

    /// A host of which `said` was heard after the connection was begun.
    fn after(said: &[&str]) -> Host {
        let mut host = host();
        host.on(Event::Spawned);
        lines(&mut host, said);
        host
    }

    const HELLO: &str = "hello Linux x86_64 10.0.0.9";
    const VERSION: &str = "version kolo-node 0.1.0";

    fn only_failure(actions: Vec<Action>) -> HostError {
        match <[Action; 1]>::try_from(actions) {
            Ok([Action::Failed(error)]) => error,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_host_without_the_program_gets_it_and_comes_up() {
        let mut host = host();
        assert_eq!(host.on(Event::Spawned), [Action::Show(Stage::Connecting)]);
        assert_eq!(host.on(Event::Line("Welcome!")), []);
        assert_eq!(
            lines(&mut host, &[HELLO, "need"]),
            [
                Action::Show(Stage::Checking),
                Action::Show(Stage::Sending),
                Action::SendProgram
            ]
        );
        assert_eq!(
            lines(&mut host, &["stored", VERSION, "order ab12"]),
            [
                Action::Show(Stage::Checking),
                Action::Show(Stage::Starting),
                Action::SendOrder("10.0.0.9".parse().ok(), "ab12".to_owned())
            ]
        );
        let line = Answer::Ready(ready()).line();
        assert_eq!(
            host.on(Event::Line(&line)),
            [Action::Show(Stage::Up), Action::Up(ready())]
        );
        assert_eq!(host.on(Event::StopAsked), [Action::Show(Stage::Stopping)]);
        assert_eq!(lines(&mut host, &["stopped"]), [Action::Down]);
        assert_eq!(host.on(Event::Exited(Ended::Code(0))), []);
    }

    #[test]
    fn a_host_that_has_the_program_is_sent_nothing() {
        let actions = lines(&mut after(&[HELLO]), &["have", VERSION, "order"]);
        assert!(!actions.contains(&Action::SendProgram), "{actions:?}");
        assert!(matches!(actions.last(), Some(Action::SendOrder(..))));
    }

    #[test]
    fn errors_of_ssh_are_told_in_its_words() {
        let mut host = after(&[]);
        host.on(Event::Complaint(
            "@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@",
        ));
        host.on(Event::Complaint(
            "ssh: connect to host b port 22: Connection refused\r",
        ));
        let error = only_failure(host.on(Event::Exited(Ended::Code(255))));
        assert_eq!(
            error.to_string(),
            "ssh: connect to host b port 22: Connection refused"
        );
        let error = only_failure(after(&[]).on(Event::Exited(Ended::Code(255))));
        assert!(error.to_string().contains("said nothing"), "{error}");
    }

    #[test]
    fn an_account_without_a_shell_is_told_from_a_host_that_is_not_there() {
        let mut host = after(&[]);
        host.on(Event::Line("This account is currently not available."));
        let error = only_failure(host.on(Event::Exited(Ended::Code(1))));
        assert!(
            error.to_string().contains("it said: This account is"),
            "{error}"
        );
    }

    #[test]
    fn another_kind_of_machine_is_sent_nothing() {
        let error = only_failure(lines(&mut after(&[]), &["hello Linux aarch64 none"]));
        let text = error.to_string();
        assert!(
            text.contains("a Linux aarch64 machine") && text.contains("Linux x86_64"),
            "{text}"
        );
        let mut any = Host::new(
            Expected {
                platform: None,
                version: "kolo-node 0.1.0".to_owned(),
            },
            true,
            false,
        );
        any.on(Event::Spawned);
        assert_eq!(
            lines(&mut any, &["hello Linux aarch64 none"]),
            [Action::Show(Stage::Checking)]
        );
    }

    #[test]
    fn what_can_not_run_or_be_stored_and_other_versions_end_it() {
        let cases: [(&[&str], &str, &str); 6] = [
            (
                &[HELLO, "have"],
                "cannot-run 126 Exec format error",
                "exit code 126); it said: Exec format error",
            ),
            (
                &[HELLO, "need"],
                "cannot-store No space left",
                "could not be stored there: No space left",
            ),
            (
                &[HELLO],
                "cannot-store mkdir: no",
                "could not be stored there: mkdir: no",
            ),
            (
                &[HELLO, "have"],
                "version kolo-node 0.2.0",
                "`kolo-node 0.2.0`, needed is `kolo-node 0.1.0`",
            ),
            (
                &[HELLO, "have", VERSION],
                "failed the token is used up",
                "could not start there: the token is used up",
            ),
            (&[HELLO, "have", VERSION], "running 17", "process 17"),
        ];
        for (before, line, part) in cases {
            let error = only_failure(lines(&mut after(before), &[line])).to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn silence_and_ends_name_what_was_going_on() {
        let mut host = after(&[HELLO, "need"]);
        host.on(Event::Complaint("a word"));
        let error = only_failure(host.on(Event::Silent(Duration::from_secs(30))));
        assert_eq!(
            error.to_string(),
            "nothing was heard for 30s while sending kolo-node; it said: a word"
        );
        let mut host = after(&[HELLO, "have", VERSION]);
        lines(
            &mut host,
            &[Answer::Ready(ready())
                .line()
                .strip_prefix("kolo-up/1 ")
                .unwrap()],
        );
        let error = only_failure(host.on(Event::Exited(Ended::Code(255))));
        assert_eq!(
            error.to_string(),
            "it ended while the node was up: the connection was lost"
        );
        let error = only_failure(after(&[HELLO]).on(Event::Exited(Ended::Signal(9))));
        assert!(error.to_string().contains("signal 9"), "{error}");
    }

    #[test]
    fn a_detached_node_outlives_its_connection() {
        let expected = host().expected;
        let mut host = Host::new(expected, true, true);
        host.on(Event::Spawned);
        lines(&mut host, &[HELLO, "have", VERSION]);
        host.on(Event::Line(&Answer::Ready(ready()).line()));
        assert_eq!(host.on(Event::Exited(Ended::Code(0))), []);
        assert_eq!(host.stage(), Stage::Ended);
    }

    #[test]
    fn what_is_said_at_the_wrong_time_changes_nothing() {
        let mut host = after(&[]);
        assert_eq!(lines(&mut host, &["order", "have", "stopped", "need"]), []);
        assert_eq!(host.stage(), Stage::Connecting);
        let mut host = after(&[HELLO, "need"]);
        assert_eq!(lines(&mut host, &["order", VERSION]), []);
    }
}
