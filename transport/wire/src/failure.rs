//! Failures of workers: what is known of one, and which belong together.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Exit;
use crate::ids::{NodeId, Rank};

/// A worker that is gone, and what is known of its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankFailure {
    /// Its rank in the generation it belonged to.
    pub rank: Rank,
    /// Its node.
    pub node: NodeId,
    /// Its node's hostname.
    pub hostname: String,
    /// Its process id there; 0 if it never had one.
    pub pid: u32,
    /// How its process ended.
    pub exit: Exit,
    /// Why, where it was not the process itself that ended.
    #[serde(default)]
    pub reason: Option<String>,
    /// Its last lines of standard error, oldest first.
    #[serde(default)]
    pub stderr_tail: Vec<String>,
    /// When its process ended, and its own word on the error; nothing if its node saw no end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub account: Option<Box<Account>>,
}

impl RankFailure {
    /// Whether its process could not be started; the reason says why. It counts as ended as a shell says it: with exit code
    /// 127 if the program is not there, 126 if it can't be executed, and 1 if something else is missing.
    #[must_use]
    pub fn was_not_started(&self) -> bool {
        self.pid == 0 && self.reason.is_some() && matches!(self.exit, Exit::Code(_))
    }

    /// The worker's own word on the error, if the worker has left any.
    #[must_use]
    pub fn error(&self) -> Option<&WorkerError> {
        self.account.as_ref()?.error.as_ref()
    }

    /// The reason and the worker's own word, each behind a colon, on one line.
    #[must_use]
    pub fn why(&self) -> String {
        let mut why = String::new();
        if let Some(reason) = &self.reason {
            why.push_str(": ");
            why.push_str(reason);
        }
        if let Some(error) = self.error() {
            why.push_str(": ");
            why.push_str(&error.to_string());
        }
        why
    }

    /// The first line of a report: the rank, its end and the reason. `is_first`: it is the first of several failures.
    #[must_use]
    pub fn headline(&self, is_first: bool) -> String {
        let (rank, hostname, pid, why) = (self.rank, &self.hostname, self.pid, self.why());
        if self.was_not_started() {
            return format!("rank {rank} on {hostname} was not started{why}");
        }
        let how = match (self.exit, is_first) {
            // Nobody has seen the end: the node is lost, or the worker's warden.
            (Exit::Unknown, false) => "is lost".to_owned(),
            (Exit::Unknown, true) => "was lost first".to_owned(),
            (exit, false) => format!("ended with {exit}"),
            (exit, true) => format!("failed first, with {exit}"),
        };
        format!("rank {rank} on {hostname} (pid {pid}) {how}{why}")
    }

    /// The last lines of the worker's call stack, or else of its standard error, each as a line of a report.
    #[must_use]
    pub fn last_words(&self) -> Vec<String> {
        let (stream, lines) = match self.error() {
            Some(error) if !error.callstack.is_empty() => ("callstack", &error.callstack),
            _ => ("stderr", &self.stderr_tail),
        };
        let line = |line: &String| format!("  [{}]<{stream}>:{line}", self.rank);
        lines.iter().map(line).collect()
    }
}

impl fmt::Display for RankFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.headline(false))?;
        for line in self.last_words() {
            write!(f, "\n{line}")?;
        }
        Ok(())
    }
}

/// The end of a worker's process, as its node has seen it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    /// When the process ended: milliseconds since 1970 by the clock of its host.
    pub at_ms: u64,
    /// How long before the node's message that was, in milliseconds by the same clock.
    #[serde(default)]
    pub age_ms: u64,
    /// The worker's own word on the error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<WorkerError>,
}

/// An error in a worker's own words, from the file that `TORCHELASTIC_ERROR_FILE` names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerError {
    /// Kind and text of the error: `ValueError: no such file`.
    pub message: String,
    /// File and line where the error was raised: `train.py:12`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<String>,
    /// The last lines of the call stack, the innermost last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub callstack: Vec<String>,
    /// The second in which the error was written down: seconds since 1970 by the clock of the worker's host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_s: Option<u64>,
}

impl fmt::Display for WorkerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.place {
            Some(place) => write!(f, " ({place})"),
            None => Ok(()),
        }
    }
}

/// Failures that belong together: the first, and those that it took along.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fall {
    /// The first cause.
    pub cause: RankFailure,
    /// The failures that came after the first cause.
    #[serde(default, skip_serializing_if = "Followers::is_empty")]
    pub followers: Followers,
}

/// The failures that came after a first cause, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Followers {
    /// The first of them.
    pub first: Vec<Follower>,
    /// How many others there are.
    #[serde(default)]
    pub more: u32,
}

impl Followers {
    /// Whether nothing has failed after the first cause.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.first.is_empty() && self.more == 0
    }
}

/// A failure that came after a first cause.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Follower {
    /// How long after the first cause, in milliseconds.
    pub after_ms: u64,
    /// The failure, without last lines.
    pub failure: RankFailure,
}
