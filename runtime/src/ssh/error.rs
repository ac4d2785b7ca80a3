//! What can go wrong with hosts.

use kolo_transport::wire::counted::Counted;
use kolo_transport::wire::span::Span;
use std::fmt::Write as _;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::hosts::HostSlots;

/// Why one host did not come up, or was lost.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// ssh itself could not be started. Install it, or give its path.
    #[error("`{program}` could not be started: {reason}; is the ssh client installed?")]
    NoSsh {
        /// The program.
        program: String,
        /// What the operating system said.
        reason: String,
    },
    /// ssh did not get in: the host is not there, its key is not known, or it lets nobody in. The text is ssh's own.
    #[error("ssh: {}{}", .text.trim_start_matches("ssh: "), hint(.text))]
    Ssh {
        /// What ssh wrote to standard error.
        text: String,
    },
    /// ssh got in, but no POSIX shell answered. Look at the account's login shell and `ForceCommand`.
    #[error("no shell answered there{}; the account must allow commands (`ssh HOST true`)", said(.text))]
    NoShell {
        /// What was written instead.
        text: String,
    },
    /// The host is another kind of machine. Install kolo there and name its `kolo-node` with `--remote-program`.
    #[error(
        "it is a {found} machine, and the kolo-node here is for {wanted}; install kolo there and give the path of its \
         kolo-node by --remote-program"
    )]
    Platform {
        /// What the host is.
        found: String,
        /// What the program is for.
        wanted: String,
    },
    /// The program does not run there: another processor, an older C library, or a folder without the right to execute.
    #[error(
        "kolo-node can't run there (exit code {code}){}; install kolo there and give the path of its kolo-node by \
         --remote-program",
        said(.text)
    )]
    CannotRun {
        /// Exit code of `kolo-node --version`; 126 and 127 are the shell's.
        code: i32,
        /// What it or the shell wrote.
        text: String,
    },
    /// The program there is of another version.
    #[error(
        "the program there is `{found}`, needed is `{wanted}`; install the same version of kolo there"
    )]
    Version {
        /// What it calls itself.
        found: String,
        /// What it should be.
        wanted: String,
    },
    /// The program could not be stored in the user's cache folder.
    #[error("kolo-node could not be stored there: {text}")]
    CannotStore {
        /// What the host said.
        text: String,
    },
    /// No join token could be had from the head.
    #[error("no join token could be had: {text}")]
    Token {
        /// Why.
        text: String,
    },
    /// The node did not start. The text is its own.
    #[error("the node could not start there: {text}")]
    Node {
        /// What it said.
        text: String,
    },
    /// A node of this cluster runs there already, but the head does not know it as alive.
    #[error(
        "a node of this cluster runs there already (process {pid}) that the head does not see; look at it, or end it by \
         `kolo down --force`"
    )]
    Running {
        /// Its process id on the host.
        pid: u32,
    },
    /// It is a machine that has another name in the list. Write it once.
    #[error("it is the same machine as {first}; write each machine once, with all its slots")]
    SameMachine {
        /// The other name.
        first: String,
    },
    /// Nothing came from the host for too long.
    #[error("nothing was heard for {} while {stage}{}", Span(*.after), said(.text))]
    Stalled {
        /// What was going on.
        stage: &'static str,
        /// How long.
        after: Duration,
        /// What was last written to standard error.
        text: String,
    },
    /// The node ended, or the connection to it.
    #[error("it ended while {stage}: {how}{}", said(.text))]
    Lost {
        /// What was going on.
        stage: &'static str,
        /// How ssh or the node ended.
        how: String,
        /// What was last written to standard error.
        text: String,
    },
    /// The launch was given up because of other hosts.
    #[error("it was given up, since other hosts did not come up")]
    GivenUp,
}

fn said(text: &str) -> String {
    if text.is_empty() {
        String::new()
    } else {
        format!("; it said: {text}")
    }
}

/// What to do about the errors of ssh that everybody meets.
fn hint(text: &str) -> &'static str {
    let has = |part| text.contains(part);
    if has("REMOTE HOST IDENTIFICATION HAS CHANGED") {
        "; its key is not the one in known_hosts: make sure that it is the right host, then remove the old key with \
         `ssh-keygen -R HOST`"
    } else if has("Host key verification failed") {
        "; its key is not known yet: connect once by hand with `ssh HOST` and compare the key, or add it to known_hosts"
    } else if has("Permission denied") {
        "; kolo never asks for passwords: give a key by --ssh-identity-file, or load it into ssh-agent"
    } else {
        ""
    }
}

/// Why hosts could not be brought up. Nothing that was started is left then, on any host, but for what [`UpError::Hosts`] tells.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UpError {
    /// No host was given.
    #[error("there are no hosts; give at least one")]
    NoHosts,
    /// Two entries are one machine, as is seen when names are resolved or hosts are reached. Write it once.
    #[error(
        "`{first}` and `{second}` are one machine; write each machine once, with all its slots"
    )]
    SameMachine {
        /// The first entry.
        first: String,
        /// The second one.
        second: String,
    },
    /// `kolo-node` is not installed here, so it can't be sent.
    #[error(
        "there is no `{name}` beside this program or in PATH; install it, or give its path by --node-program"
    )]
    NoProgram {
        /// Its name.
        name: String,
    },
    /// `kolo-node` can't be read.
    #[error("{}: {error}; it is the program that hosts are to run", .path.display())]
    Program {
        /// Which file.
        path: PathBuf,
        /// What the operating system said.
        error: io::Error,
    },
    /// The head does not answer.
    #[error("the head can't be asked: {0}")]
    Head(String),
    /// The head listens on the loopback only, so no other machine reaches it.
    #[error(
        "the head listens on {listen} only, which {host} can't reach; let it listen on an address of this machine, or \
         give one by --head-address"
    )]
    HeadIsLocal {
        /// Where it listens.
        listen: String,
        /// The first host that is another machine.
        host: String,
    },
    /// Threads could not be started here.
    #[error("the launch can't start: {0}")]
    Start(io::Error),
    /// Some hosts did not come up. Of those that did, detached nodes are left where they could not be ended again.
    #[error("{}", hosts(.failed, *.of, .left))]
    Hosts {
        /// The hosts and what was wrong with each, in the order of the list.
        failed: Vec<(String, HostError)>,
        /// How many hosts there were.
        of: usize,
        /// Where nodes may be left.
        left: Vec<HostSlots>,
    },
}

impl UpError {
    /// Two entries that are one machine.
    pub(super) fn same_machine(first: &HostSlots, second: &HostSlots) -> Self {
        Self::SameMachine {
            first: first.destination(),
            second: second.destination(),
        }
    }

    /// The hosts that did not come up. If nothing is wrong but names of one machine, that is all there is to say.
    pub(super) fn of_hosts(
        failed: Vec<(String, HostError)>,
        of: usize,
        left: Vec<HostSlots>,
    ) -> Self {
        match failed.as_slice() {
            [(second, HostError::SameMachine { first })] if left.is_empty() => Self::SameMachine {
                first: first.clone(),
                second: second.clone(),
            },
            _ => Self::Hosts { failed, of, left },
        }
    }
}

fn hosts(failed: &[(String, HostError)], of: usize, left: &[HostSlots]) -> String {
    let mut text = format!(
        "{} of {} did not come up",
        failed.len(),
        Counted(of, "host")
    );
    for (host, error) in failed {
        let _ = write!(text, "\n  {host}: {error}");
    }
    for host in left {
        let host = host.destination();
        let _ = write!(
            text,
            "\n  {host}: it came up, and could not be ended again; `kolo down` ends it"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_errors_of_ssh_come_with_what_to_do() {
        let told = |text: &str| {
            HostError::Ssh {
                text: text.to_owned(),
            }
            .to_string()
        };
        let refused = "ssh: connect to host b port 22: Connection refused";
        assert_eq!(told(refused), refused);
        for (text, part) in [
            ("Host key verification failed.", "connect once by hand"),
            (
                "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @ Host key verification failed.",
                "ssh-keygen -R",
            ),
            (
                "me@b: Permission denied (publickey).",
                "--ssh-identity-file",
            ),
        ] {
            assert!(told(text).contains(part), "{}", told(text));
            assert!(told(text).contains(text));
        }
    }

    #[test]
    fn every_host_has_its_line() {
        let error = UpError::Hosts {
            failed: vec![
                ("b".to_owned(), HostError::GivenUp),
                (
                    "c".to_owned(),
                    HostError::Ssh {
                        text: "no route".to_owned(),
                    },
                ),
            ],
            of: 3,
            left: crate::hosts::parse_hosts("me@a:2").unwrap(),
        };
        let text = error.to_string();
        assert!(
            text.starts_with("2 of 3 hosts did not come up\n  b: "),
            "{text}"
        );
        assert!(text.contains("\n  c: ssh: no route"), "{text}");
        assert!(
            text.ends_with(
                "\n  me@a: it came up, and could not be ended again; `kolo down` ends it"
            ),
            "{text}"
        );
    }
}
