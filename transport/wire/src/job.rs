//! A job: what it runs, where its members are, what becomes of it.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::elastic::{Elastic, Handover, MembershipInfo};
use super::failure::{Fall, Followers, RankFailure};
use super::network::{InterfaceSelection, NetworkReport};
use super::{Refusal, Resources};
use crate::ids::{
    CrossRank, DriverId, Generation, Incarnation, JobId, LocalRank, NodeId, Rank, Slot,
};

/// The BLAKE3 hash of a program file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ProgramHash(pub [u8; 32]);

impl fmt::Display for ProgramHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ProgramHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The program that a job's workers run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Identity of the file's content.
    pub hash: ProgramHash,
    /// Length of the file in bytes.
    pub size: u64,
    /// File name for people; the workers' `argv[0]`.
    pub name: String,
}

/// A program that is installed on the hosts: any executable, in place of one that is sent to them.
///
/// Its workers say no hello and take no calls. Each is ready when it runs; the job succeeds when all have exited with
/// code 0, and the first that ends otherwise ends the group.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Installed {
    /// A path, or a name without `/`, which each host looks for in `PATH`. A relative path counts from `cwd`.
    pub program: String,
    /// Where a name is looked for, as `PATH` is written; the node daemon's own `PATH` if `None`.
    #[serde(default)]
    pub search: Option<String>,
    /// The directory that the workers start in; the node daemon's own if `None`.
    #[serde(default)]
    pub cwd: Option<String>,
    /// Output goes to the job's driver without loss: what the driver has not taken yet holds the worker up. Otherwise it is
    /// only kept as far as a node keeps output.
    #[serde(default)]
    pub stream_output: bool,
    /// Standard input of rank 0 comes from the driver; `/dev/null` otherwise, as for all others.
    #[serde(default)]
    pub stdin: bool,
}

/// A signal that workers get without being ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerSignal {
    /// `SIGUSR1`.
    User1,
    /// `SIGUSR2`.
    User2,
    /// `SIGSTOP`: stand still.
    Stop,
    /// `SIGCONT`: go on.
    Continue,
}

/// An installed program, as a node hears of it first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstalledHere {
    /// The driver that may have the workers' output.
    pub owner: DriverId,
    /// The program.
    pub program: Installed,
}

/// So many workers on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeShare {
    /// The node.
    pub node: NodeId,
    /// How many workers it gets.
    pub workers: u32,
}

/// How a group is laid over the nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Placement {
    /// `workers` in all, on as few nodes as possible.
    Pack {
        /// Number of workers.
        workers: u32,
    },
    /// `slots` workers on each of `hosts` distinct nodes.
    Spread {
        /// Number of distinct nodes.
        hosts: u32,
        /// Workers on each.
        slots: u32,
    },
}

impl Placement {
    /// Number of workers in all; `None` if it does not fit in a rank.
    #[must_use]
    pub fn workers(self) -> Option<u32> {
        match self {
            Self::Pack { workers } => Some(workers),
            Self::Spread { hosts, slots } => hosts.checked_mul(slots),
        }
    }
}

/// What a driver asks the head to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSpec {
    /// A name for people. Need not be unique.
    pub name: String,
    /// The program of every worker.
    pub program: Program,
    /// Arguments of the program, without `argv[0]`.
    #[serde(default)]
    pub args: Vec<String>,
    /// How many workers, and how they are laid out.
    pub placement: Placement,
    /// What each worker holds.
    pub per_worker: Resources,
    /// Variables set in every worker, over those that kolo sets (but not over `KOLO_*`).
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// From submit to all workers ready, in milliseconds.
    pub start_timeout_ms: u64,
    /// From notice to TERM, and from TERM to KILL, in milliseconds.
    pub grace_ms: u64,
    /// Open the plain HTTP rendezvous that workers of other systems need.
    #[serde(default)]
    pub rendezvous: bool,
    /// The workers run this in place of `program`, of which only the name counts then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub installed: Option<Installed>,
    /// Which nodes take how many workers, in rank order. It must add up to the workers of `placement`, which decides alone if
    /// this is empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layout: Vec<NodeShare>,
    /// The network interfaces that it may use; all if empty.
    #[serde(default, skip_serializing_if = "InterfaceSelection::is_empty")]
    pub interfaces: InterfaceSelection,
    /// Probe the interfaces even if what connects the nodes is known from before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_cache: bool,
    /// Members may come and go while it runs. `placement` asks for the most of them then, and gets as many as there is room
    /// for; if it spreads them, in whole hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elastic: Option<Box<Elastic>>,
}

/// One member of a generation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// World rank.
    pub rank: Rank,
    /// Rank on its node.
    pub local_rank: LocalRank,
    /// Members on its node.
    pub local_size: u32,
    /// Number of its node among those that have this local rank.
    pub cross_rank: CrossRank,
    /// Number of nodes that have this local rank.
    pub cross_size: u32,
    /// The slot it fills: its identity across generations and in its certificate.
    pub slot: Slot,
    /// The how-manieth process of the slot it is. Slot and incarnation name one process for ever.
    #[serde(
        default = "Incarnation::first",
        skip_serializing_if = "Incarnation::is_first"
    )]
    pub incarnation: Incarnation,
    /// Where it runs.
    pub node: NodeId,
    /// The node's hostname, for people.
    pub hostname: String,
    /// Where its data plane listens; `None` while it has none (a job on one node needs none).
    #[serde(default)]
    pub address: Option<SocketAddr>,
}

/// One committed membership of a job, in rank order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GenerationTable {
    /// The job.
    pub job: JobId,
    /// Its generation.
    pub generation: Generation,
    /// The members; the index is the world rank.
    pub members: Vec<Member>,
    /// Why it came about, in plain words. Empty for a job that never changes its members.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub cause: String,
    /// What its members do about the state of the generation before.
    #[serde(default, skip_serializing_if = "Handover::is_none")]
    pub handover: Handover,
}

impl GenerationTable {
    /// Number of members.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        self.members.len() as u32
    }
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Exit {
    /// By itself, with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
    /// Its supervisor was lost before it could tell.
    Unknown,
}

impl Exit {
    /// Whether it is a success: code 0.
    #[must_use]
    pub fn is_success(self) -> bool {
        self == Self::Code(0)
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => match signal_name(*signal) {
                Some(name) => write!(f, "signal {signal} ({name})"),
                None => write!(f, "signal {signal}"),
            },
            Self::Unknown => f.write_str("unknown exit status"),
        }
    }
}

/// The name of a signal that ends a process.
#[must_use]
pub fn signal_name(signal: i32) -> Option<&'static str> {
    Some(match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        5 => "SIGTRAP",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        10 => "SIGUSR1",
        11 => "SIGSEGV",
        12 => "SIGUSR2",
        13 => "SIGPIPE",
        14 => "SIGALRM",
        15 => "SIGTERM",
        16 => "SIGSTKFLT",
        24 => "SIGXCPU",
        25 => "SIGXFSZ",
        26 => "SIGVTALRM",
        27 => "SIGPROF",
        29 => "SIGIO",
        30 => "SIGPWR",
        31 => "SIGSYS",
        _ => return None,
    })
}

/// The states of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Accepted, nothing done yet.
    Pending,
    /// Reserving on nodes.
    Placing,
    /// Finding the interfaces that connect its nodes.
    Probing,
    /// Workers boot.
    Starting,
    /// All members are there.
    Healthy,
    /// A member was lost; a new generation is being made.
    Recovering,
    /// Ended well.
    Succeeded,
    /// Ended by a failure.
    Failed,
    /// Ended because someone asked for it.
    Stopped,
}

impl JobState {
    /// Whether nothing follows this state.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Stopped)
    }
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Pending => "pending",
            Self::Placing => "placing",
            Self::Probing => "probing",
            Self::Starting => "starting",
            Self::Healthy => "healthy",
            Self::Recovering => "recovering",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Stopped => "stopped",
        })
    }
}

/// A node that holds a part of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedNode {
    /// The node.
    pub node: NodeId,
    /// Its hostname.
    pub hostname: String,
    /// Where its daemon listens.
    pub address: SocketAddr,
    /// The ranks that will run there.
    pub ranks: Vec<Rank>,
    /// Whether it holds the job's program already.
    pub has_program: bool,
}

/// What the head tells the driver of a job, in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobEvent {
    /// All nodes have reserved. Programs that are missing must be sent now.
    ///
    /// It comes again with the nodes that join an elastic job later. The driver of an elastic job answers each with one
    /// [`SubmitFrame::ProgramReady`](super::SubmitFrame::ProgramReady), in their order.
    Placed {
        /// The job's id.
        job: JobId,
        /// Its nodes.
        nodes: Vec<PlacedNode>,
    },
    /// A generation is complete.
    Healthy {
        /// Its members.
        table: GenerationTable,
        /// The job's nodes.
        nodes: Vec<PlacedNode>,
    },
    /// An elastic job has a generation, the first or the next one: all its members have taken it.
    Generation {
        /// Its members, and why it came about.
        table: GenerationTable,
        /// The job's nodes.
        nodes: Vec<PlacedNode>,
        /// The failures that have ended the generation before, of a group that is started anew.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        fall: Option<Box<Fall>>,
    },
    /// A group that is started anew at each change is over: its workers are being stopped. The next group is a
    /// [`JobEvent::Generation`].
    Fell {
        /// The reason, as in the cause of the next generation.
        why: String,
        /// The failure, if a worker has failed, without its last lines.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        failure: Option<Box<RankFailure>>,
        /// Workers that are being stopped.
        stopped: u32,
        /// If a worker has failed: the restart that this uses up, if there is one left and no lost node is behind the failure; and
        /// the restarts that are allowed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        restart: Option<(u32, u32)>,
    },
    /// There is room for too few workers of a job that is started anew at each change: the job waits for more.
    Waits {
        /// For how many there is room.
        room: u32,
        /// How many are needed.
        needed: u32,
        /// How long the job waits.
        for_ms: u64,
    },
    /// A change of an elastic group waits, and loses no work if no call is under way: hold as soon as that is so, and say
    /// [`SubmitFrame::Holding`](super::SubmitFrame::Holding). The members hold at a commit of their elastic loop, if there is one.
    Hold {
        /// The generation that ends then.
        generation: Generation,
    },
    /// A member was lost, or a process that was started to become one.
    RankLost {
        /// The generation it was lost from; a later one than the members are in if the process was on its way there.
        generation: Generation,
        /// What is known.
        failure: RankFailure,
    },
    /// The job ended. Last event.
    Ended {
        /// A final state.
        state: JobState,
        /// Why it did not start or did not end well.
        refusal: Option<Refusal>,
        /// The first cause, if it was a worker.
        failure: Option<RankFailure>,
        /// How many workers were ended with the job, those not counted that had ended by themselves; `None` if the head
        /// does not say.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stopped: Option<u32>,
        /// The failures that came after the first cause.
        #[serde(default, skip_serializing_if = "Followers::is_empty")]
        followers: Followers,
    },
}

/// The states of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerState {
    /// Its process is being started.
    Starting,
    /// It said hello and takes calls.
    Ready,
    /// It said hello and is no member of the generation. It may become one.
    Spare,
    /// It is being stopped.
    Stopping,
    /// Its process is gone.
    Exited,
}

impl fmt::Display for WorkerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Spare => "spare",
            Self::Stopping => "stopping",
            Self::Exited => "exited",
        })
    }
}

/// A worker, as the API and `kolo` show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerInfo {
    /// Its ranks and place.
    pub member: Member,
    /// Its state.
    pub state: WorkerState,
    /// Its process id; 0 before it has one.
    pub pid: u32,
    /// How it ended.
    #[serde(default)]
    pub exit: Option<Exit>,
}

/// A job, as the API and `kolo` show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobInfo {
    /// Its id.
    pub job: JobId,
    /// Its name.
    pub name: String,
    /// Who submitted it.
    pub owner: DriverId,
    /// Its state.
    pub state: JobState,
    /// The current generation; 0 before the first.
    pub generation: Generation,
    /// Its workers in rank order.
    pub workers: Vec<WorkerInfo>,
    /// Its nodes, with the addresses of their daemons.
    pub nodes: Vec<PlacedNode>,
    /// Milliseconds since it was submitted; for a job that has ended, how long it lasted.
    pub age_ms: u64,
    /// Milliseconds since it ended, if it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_ms: Option<u64>,
    /// Why it ended.
    #[serde(default)]
    pub reason: Option<String>,
    /// `ADDR:PORT` of its plain HTTP rendezvous, if it asked for one.
    #[serde(default)]
    pub rendezvous: Option<SocketAddr>,
    /// The interfaces that connect its nodes, once that is known. Not in lists of jobs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkReport>,
    /// Why its members are these. Only of elastic jobs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub membership: Option<Box<MembershipInfo>>,
}

impl JobInfo {
    /// A job that has nothing yet but a name and an owner.
    #[must_use]
    pub fn new(job: JobId, name: impl Into<String>, owner: DriverId) -> Self {
        Self {
            job,
            name: name.into(),
            owner,
            state: JobState::Pending,
            generation: Generation(0),
            workers: Vec::new(),
            nodes: Vec::new(),
            age_ms: 0,
            ended_ms: None,
            reason: None,
            rendezvous: None,
            network: None,
            membership: None,
        }
    }

    /// The job without all that grows with the number of workers and nodes.
    #[must_use]
    pub fn outline(&self) -> Self {
        Self {
            name: self.name.clone(),
            reason: self.reason.clone(),
            workers: Vec::new(),
            nodes: Vec::new(),
            network: None,
            membership: None,
            ..*self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_are_told_as_people_say_them() {
        assert_eq!(Exit::Code(3).to_string(), "exit code 3");
        assert_eq!(Exit::Signal(9).to_string(), "signal 9 (SIGKILL)");
        assert_eq!(Exit::Signal(64).to_string(), "signal 64");
    }

    #[test]
    fn spread_of_too_many_has_no_count() {
        assert_eq!(Placement::Spread { hosts: 3, slots: 2 }.workers(), Some(6));
        assert_eq!(
            Placement::Spread {
                hosts: u32::MAX,
                slots: 2
            }
            .workers(),
            None
        );
    }
}
