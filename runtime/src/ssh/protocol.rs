//! What launcher and host say to each other over ssh: lines, of which each side reads those with the mark only.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use kolo_transport::ids::NodeId;
use serde::{Deserialize, Serialize};

use super::script::MARK;

/// The longest line that either side reads.
pub(super) const LONGEST_LINE: usize = 64 << 10;

/// What the node is told, as one line of JSON on its standard input. It holds a secret: it is never on a command line, in
/// an environment or in a file.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Order {
    /// The join token, for one use.
    pub(super) token: String,
    /// Where the head may be reached, best first.
    pub(super) heads: Vec<String>,
    /// The host as the launcher calls it.
    pub(super) hostname: String,
    /// The cluster, for the name of the state folder.
    pub(super) cluster: String,
    /// CPUs that the node offers: one for each slot.
    pub(super) cpus: f64,
    /// Whether a job that asks for no GPU may use all: the node is there for one job.
    #[serde(default)]
    pub(super) gpus_for_all: bool,
    /// How long the node lives without a word from the launcher. `None` lets it run on by itself.
    #[serde(default)]
    pub(super) lease_ms: Option<u64>,
    /// How long it may take to reach the head.
    pub(super) join_timeout_ms: u64,
    /// How long its jobs have to end when it stops.
    pub(super) stop_timeout_ms: u64,
}

impl fmt::Debug for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Order")
            .field("heads", &self.heads)
            .field("hostname", &self.hostname)
            .field("lease_ms", &self.lease_ms)
            .finish_non_exhaustive()
    }
}

/// What `kolo-node` is to do on a host.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Task {
    /// Be a node.
    Start(Order),
    /// End the one that runs there.
    Stop(StopOrder),
}

impl Task {
    /// As one line.
    pub(super) fn line(&self) -> Result<Vec<u8>, String> {
        let mut line = serde_json::to_vec(self).map_err(|error| error.to_string())?;
        line.push(b'\n');
        Ok(line)
    }
}

/// Which node to end, and how.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct StopOrder {
    /// Its cluster.
    pub(super) cluster: String,
    /// Its host, as the launcher calls it.
    pub(super) hostname: String,
    /// At once.
    pub(super) force: bool,
    /// How long its jobs may take to end by themselves.
    pub(super) drain_ms: u64,
    /// How long to wait for its end after that.
    pub(super) timeout_ms: u64,
}

/// What is asked of a node after its order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Word {
    /// The launcher lives.
    Beat,
    /// End the jobs with their grace, then leave.
    Stop,
    /// End at once.
    Kill,
}

impl Word {
    pub(super) fn line(self) -> &'static [u8] {
        match self {
            Self::Beat => b"beat\n",
            Self::Stop => b"stop\n",
            Self::Kill => b"kill\n",
        }
    }

    /// Any line is a sign of life.
    pub(super) fn parse(line: &str) -> Self {
        match line.trim() {
            "stop" => Self::Stop,
            "kill" => Self::Kill,
            _ => Self::Beat,
        }
    }
}

/// A node that runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadyNode {
    /// Its id in the cluster.
    pub node: NodeId,
    /// Where drivers reach it.
    pub address: SocketAddr,
    /// By which address it reaches the head.
    pub head: SocketAddr,
    /// Its process on its host.
    pub pid: u32,
    /// Its folder on its host, with its log if it was detached.
    pub state: String,
}

/// A line from a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    /// A shell runs there.
    Hello {
        system: String,
        machine: String,
        /// The launcher's address as the host sees it.
        from: Option<IpAddr>,
    },
    /// The program is in the cache.
    Have,
    /// The program is not there; its bytes are expected.
    Need,
    /// The program is in the cache now.
    Stored,
    /// It could not be stored.
    CannotStore(String),
    /// The program does not run there.
    CannotRun { code: i32, text: String },
    /// What the program calls itself.
    Version(String),
    /// `kolo-node` waits for its order, on this machine: see [`machine`](kolo_transport::interfaces::machine).
    Order(String),
    /// The node is registered.
    Ready(ReadyNode),
    /// It could not start.
    Failed(String),
    /// A node of the cluster runs there already, under this process id.
    Running(u32),
    /// It stopped, as it was told.
    Stopped,
}

impl Answer {
    /// Reads a line; `None` for one that is not meant for the launcher, or not understood.
    pub(super) fn parse(line: &str) -> Option<Self> {
        let rest = line.trim_end().strip_prefix(MARK)?;
        let (word, rest) = rest.split_once(' ').unwrap_or((rest, ""));
        let text = || rest.trim().to_owned();
        Some(match word {
            "hello" => {
                let mut parts = rest.split(' ');
                Self::Hello {
                    system: parts.next()?.to_owned(),
                    machine: parts.next()?.to_owned(),
                    from: parts.next().and_then(|ip| ip.parse().ok()),
                }
            }
            "have" => Self::Have,
            "need" => Self::Need,
            "stored" => Self::Stored,
            "cannot-store" => Self::CannotStore(text()),
            "cannot-run" => {
                let (code, text) = rest.split_once(' ').unwrap_or((rest, ""));
                Self::CannotRun {
                    code: code.parse().ok()?,
                    text: text.trim().to_owned(),
                }
            }
            "version" => Self::Version(text()),
            "order" => Self::Order(text()),
            "ready" => Self::Ready(serde_json::from_str(rest).ok()?),
            "failed" => Self::Failed(text()),
            "running" => Self::Running(rest.trim().parse().ok()?),
            "stopped" => Self::Stopped,
            _ => return None,
        })
    }

    /// The line of a node's answer.
    pub(super) fn line(&self) -> String {
        let one_line = |text: &str| text.replace(['\n', '\r'], " ");
        let rest = match self {
            Self::Order(machine) => format!("order {machine}"),
            Self::Ready(node) => {
                format!("ready {}", serde_json::to_string(node).unwrap_or_default())
            }
            Self::Failed(text) => format!("failed {}", one_line(text)),
            Self::Running(pid) => format!("running {pid}"),
            Self::Stopped => "stopped".to_owned(),
            Self::Have => "have".to_owned(),
            Self::Need => "need".to_owned(),
            Self::Stored => "stored".to_owned(),
            Self::CannotStore(text) => format!("cannot-store {}", one_line(text)),
            Self::CannotRun { code, text } => format!("cannot-run {code} {}", one_line(text)),
            Self::Version(text) => format!("version {}", one_line(text)),
            Self::Hello {
                system,
                machine,
                from,
            } => {
                let from = from.map_or_else(|| "none".to_owned(), |ip| ip.to_string());
                format!("hello {system} {machine} {from}")
            }
        };
        format!("{MARK}{rest}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_as_they_are_written() {
        let ready = ReadyNode {
            node: NodeId(7),
            address: "10.0.0.2:1".parse().unwrap(),
            head: "10.0.0.1:7700".parse().unwrap(),
            pid: 12,
            state: "/home/it's me/x y".to_owned(),
        };
        for answer in [
            Answer::Hello {
                system: "Linux".to_owned(),
                machine: "x86_64".to_owned(),
                from: "fd00::1".parse().ok(),
            },
            Answer::Hello {
                system: "Linux".to_owned(),
                machine: "aarch64".to_owned(),
                from: None,
            },
            Answer::Have,
            Answer::Need,
            Answer::Stored,
            Answer::CannotStore("No space left".to_owned()),
            Answer::CannotRun {
                code: 126,
                text: "Exec format error".to_owned(),
            },
            Answer::Version("kolo-node 0.1.0".to_owned()),
            Answer::Order("0123abcd".to_owned()),
            Answer::Ready(ready),
            Answer::Failed("the head could not be reached".to_owned()),
            Answer::Running(4),
            Answer::Stopped,
        ] {
            let line = answer.line();
            assert_eq!(line.lines().count(), 1);
            assert_eq!(Answer::parse(&line), Some(answer));
        }
        assert_eq!(
            Answer::Failed("a\nb".to_owned()).line(),
            "kolo-up/1 failed a b\n"
        );
    }

    #[test]
    fn what_login_shells_and_others_say_is_no_answer() {
        for line in [
            "",
            "Welcome to host b",
            "hello Linux x86_64",
            "kolo-up/1 ",
            "kolo-up/1 hello",
            "kolo-up/2 have",
            "kolo-up/1 ready {}",
            "kolo-up/1 ready",
            "kolo-up/1 running x",
            "kolo-up/1 whatever",
        ] {
            assert_eq!(Answer::parse(line), None, "{line}");
        }
    }

    #[test]
    fn an_order_does_not_show_its_token() {
        let order = Order {
            token: "kolo1.node.secret".to_owned(),
            heads: Vec::new(),
            hostname: "a".to_owned(),
            cluster: "c".to_owned(),
            cpus: 1.0,
            gpus_for_all: false,
            lease_ms: None,
            join_timeout_ms: 1,
            stop_timeout_ms: 1,
        };
        assert!(!format!("{order:?}").contains("secret"));
    }
}
