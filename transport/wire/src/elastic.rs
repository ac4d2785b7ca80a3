//! A job whose members come and go while it runs.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What happens to the processes of a job when its members change.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnChange {
    /// Survivors keep their process, and take the next generation in it. The program must know how.
    #[default]
    InPlace,
    /// As in place, for an [installed](super::Installed) program whose workers speak Horovod's elastic protocol.
    Horovod,
    /// The whole group is stopped and started anew, with the ranks of the next generation. For any
    /// [installed](super::Installed) program.
    Restart,
}

impl OnChange {
    #[allow(clippy::trivially_copy_pass_by_ref)] // serde asks for it
    pub(crate) fn is_in_place(&self) -> bool {
        *self == Self::InPlace
    }
}

/// How far a group may change while it runs. A job without it never changes its members.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Elastic {
    /// The fewest members of a generation.
    pub min: u32,
    /// The most members of a generation.
    pub max: u32,
    /// Processes that are kept ready beside the members, to replace lost ones at once.
    #[serde(default)]
    pub spares: u32,
    /// How often the membership may change, for any reason. No limit if `None`.
    #[serde(default)]
    pub max_resets: Option<u32>,
    /// How many processes may fail within a time. No limit if `None`.
    #[serde(default)]
    pub restarts_within: Option<RestartWindow>,
    /// How many processes may fail without a commit in between. A group that is restarted never commits: so many failures cost a
    /// restart each, and one more ends the job.
    pub restarts_without_progress: u32,
    /// How long a host gets no new process after one has failed there. Not at all if `None`.
    #[serde(default)]
    pub cooldown: Option<Cooldown>,
    /// How long a process that is ready waits for others that are on their way, in milliseconds.
    pub join_window_ms: u64,
    /// How long a member may take to take a generation, in milliseconds.
    pub ack_timeout_ms: u64,
    /// Which sizes and shapes of a group are wanted. Applied in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub filters: Vec<GroupFilter>,
    /// A command that must succeed on a node before the job starts workers there. None if `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health_check: Option<HealthCheck>,
    /// What happens to the processes at a change.
    #[serde(default, skip_serializing_if = "OnChange::is_in_place")]
    pub on_change: OnChange,
    /// The only hosts that the job may use. All if `None`. See [`SubmitFrame::Hosts`](super::SubmitFrame::Hosts).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hosts: Option<Vec<JobHost>>,
}

/// A host that an elastic job may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobHost {
    /// The hostname or id of its node. There need be no such node yet.
    pub name: String,
    /// The most workers of the job there. A host without any is not used.
    pub slots: u32,
}

/// A command that must succeed on a node before an elastic job starts workers there: once in each stay of the job on the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HealthCheck {
    /// A path, or a name without `/`, which each node looks for in the `PATH` of its daemon.
    pub program: String,
    /// Arguments of the program, without its name.
    #[serde(default)]
    pub args: Vec<String>,
    /// How long the command may take, in milliseconds. Then it is killed, and has failed.
    pub timeout_ms: u64,
}

/// At most so many restarts within such a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartWindow {
    /// The most restarts.
    pub restarts: u32,
    /// The time, in milliseconds.
    pub within_ms: u64,
}

/// The shortest and the longest time in which a host gets no new process after one has failed there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cooldown {
    /// The shortest, in milliseconds.
    pub least_ms: u64,
    /// The longest, in milliseconds.
    pub most_ms: u64,
}

/// One wish about the members of a generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupFilter {
    /// The number of members is a multiple of this.
    DivisibleBy(u32),
    /// Each host takes part with exactly this many members, or with none.
    WholeHosts(u32),
    /// At most this many members.
    Max(u32),
}

impl GroupFilter {
    /// The number in it. 0 makes no sense.
    #[must_use]
    pub fn count(self) -> u32 {
        match self {
            Self::DivisibleBy(count) | Self::WholeHosts(count) | Self::Max(count) => count,
        }
    }

    /// A group of this size passes, on hosts that are as large as is needed. The number is at least 1.
    #[must_use]
    pub fn passes(self, size: u32) -> bool {
        match self {
            Self::DivisibleBy(count) | Self::WholeHosts(count) => size.is_multiple_of(count),
            Self::Max(count) => size <= count,
        }
    }
}

impl fmt::Display for GroupFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DivisibleBy(count) => write!(f, "divisible_by({count})"),
            Self::WholeHosts(count) => write!(f, "whole_hosts({count})"),
            Self::Max(count) => write!(f, "max({count})"),
        }
    }
}

/// Why the members of an elastic job are these, for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MembershipInfo {
    /// Why the current generation came about; `None` before the first.
    #[serde(default)]
    pub cause: Option<String>,
    /// What the head decided last about the members, and why.
    pub decision: String,
    /// The hosts that get no new worker now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<LeftOut>,
}

/// A host that gets no new worker of an elastic job now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Its hostname.
    pub hostname: String,
    /// For how long still, in milliseconds.
    pub for_ms: u64,
    /// Why.
    pub why: String,
}

/// What the members of a new generation do about the state of the one before. All of them read the same here, so that
/// nobody waits in a synchronisation that others skip.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Handover {
    /// Nothing: each member has the last commit, or there is none.
    #[default]
    None,
    /// Rank 0 has the last commit. It hands it to all others.
    Sync,
    /// No member has the last commit. Rank 0 reads it from where it outlives all members, then hands it to all others.
    Restore,
}

impl Handover {
    #[allow(clippy::trivially_copy_pass_by_ref)] // serde asks for it
    pub(crate) fn is_none(&self) -> bool {
        *self == Self::None
    }
}
