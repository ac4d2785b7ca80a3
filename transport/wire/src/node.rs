//! What the head and drivers ask of a node.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::daemon::DaemonState;
use super::elastic::OnChange;
use super::network::{Echo, Probe, ProbeResult};
use super::trust::RevocationList;
use super::{
    GenerationTable, HealthCheck, Installed, InstalledHere, Member, Program, ProgramHash,
    RankFailure, Refusal, Resources, WorkerSignal,
};
use crate::ids::{DriverId, Generation, Incarnation, JobId, Rank, Slot};

/// A worker to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotStart {
    /// Which process it is, its ranks and place. Ranks of an elastic job come with its generations; until then they tell the
    /// workers apart, and no more.
    pub member: Member,
    /// Variables for this worker alone.
    pub env: BTreeMap<String, String>,
}

/// Everything that a node needs to start its part of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartWorkers {
    /// The job.
    pub job: JobId,
    /// The generation that is being formed; 0 for an elastic job that forms one of those that are ready.
    pub generation: Generation,
    /// The driver that may call the workers.
    pub owner: DriverId,
    /// What to run.
    pub program: Program,
    /// Its arguments.
    pub args: Vec<String>,
    /// Variables for every worker, under those of the slot.
    pub env: BTreeMap<String, String>,
    /// The user's variables, over all others but `KOLO_*`.
    pub user_env: BTreeMap<String, String>,
    /// The workers of this node.
    pub slots: Vec<SlotStart>,
    /// Members of the whole job.
    pub world_size: u32,
    /// Whether members on other nodes exist, so that workers need a certificate and a listener.
    pub needs_data_plane: bool,
    /// How long a worker may take to say hello, in milliseconds.
    pub hello_timeout_ms: u64,
    /// From notice to TERM, and from TERM to KILL, in milliseconds.
    pub grace_ms: u64,
    /// Run this in place of `program`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub installed: Option<Installed>,
    /// How long a worker that can't go on waits for the next generation, in milliseconds. Elastic jobs have it, others don't:
    /// see [`StartWorkers::is_elastic`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_within_ms: Option<u64>,
    /// What happens to the processes of an elastic job when its members change.
    #[serde(default, skip_serializing_if = "OnChange::is_in_place")]
    pub on_change: OnChange,
}

impl StartWorkers {
    /// Whether members come and go while the job runs: see [`NodeRequest::Start`].
    #[must_use]
    pub fn is_elastic(&self) -> bool {
        self.next_within_ms.is_some()
    }

    /// Whether all processes are stopped at a change, and the next ones started.
    #[must_use]
    pub fn starts_anew(&self) -> bool {
        self.on_change == OnChange::Restart
    }
}

/// First frame of a stream to a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeRequest {
    /// Head: hold resources for `workers` workers of a job, all or nothing.
    Reserve {
        /// The job.
        job: JobId,
        /// What each worker holds.
        per_worker: Resources,
        /// How many of its workers come here.
        workers: u32,
        /// When to release them again if [`NodeRequest::Start`] does not come, in milliseconds.
        lease_ms: u64,
        /// The program, to learn whether it is here already.
        program: ProgramHash,
        /// A program that must be installed here.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        installed: Option<InstalledHere>,
        /// A command that must succeed here first. The answer waits for its end.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        health_check: Option<HealthCheck>,
    },
    /// Head: give back what is reserved for a job. Unknown jobs are fine.
    Release {
        /// The job.
        job: JobId,
    },
    /// Head: commit the reservation and start the workers. Answered when they are being started.
    ///
    /// Of an elastic job, it may be for more or fewer workers than were reserved, and more may come later: the node finds
    /// room for them itself. A process that was started before, as
    /// slot and incarnation tell, is not started again. An older process of the same slot is ended first.
    Start(StartWorkers),
    /// Head: which TCP port is free now? For the `MASTER_PORT` of a group that is started anew.
    FreePort {
        /// The job.
        job: JobId,
    },
    /// Head: a generation is complete; pass it to the workers.
    Membership(Arc<GenerationTable>),
    /// Head: a rank of this generation is lost; end every wait on it.
    RankLost {
        /// The job.
        job: JobId,
        /// The generation.
        generation: Generation,
        /// What is known, without last words.
        failure: RankFailure,
    },
    /// Head: this generation of an elastic job is over. End every wait in it, with an error that has the cause; of workers of Horovod, their
    /// connections to each other.
    Revoke {
        /// The job.
        job: JobId,
        /// The generation.
        generation: Generation,
        /// The ranks of it that are lost.
        lost: Vec<Rank>,
        /// Why.
        cause: String,
    },
    /// Head: the members of this generation are to hold at their next commit, and to say
    /// [`NodeEvent::Holding`](super::NodeEvent::Holding).
    Hold {
        /// The job.
        job: JobId,
        /// The generation.
        generation: Generation,
        /// Why.
        why: String,
    },
    /// Head: end one worker of an elastic job: notice, TERM, KILL. Answered at once; its end is an event. A process that is
    /// not there is fine.
    StopWorker {
        /// The job.
        job: JobId,
        /// Its slot.
        slot: Slot,
        /// The how-manieth process of the slot it is.
        incarnation: Incarnation,
        /// Why, for the log and the worker.
        why: String,
    },
    /// Head: end the job's workers here: notice, TERM, KILL. Answered when nothing is left.
    Stop {
        /// The job.
        job: JobId,
        /// Why, for the log and the workers.
        reason: String,
        /// Workers that run an installed program hear `SIGINT` before `SIGTERM`.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        interrupt: bool,
    },
    /// Head: send a signal to the workers of a job whose program is installed.
    Signal {
        /// The job.
        job: JobId,
        /// Which.
        signal: WorkerSignal,
        /// Counts up from 1. One that came already comes again if its answer was lost, and is not sent twice.
        seq: u64,
    },
    /// Head: kill the job's workers here at once. Answered when nothing is left.
    Kill {
        /// The job.
        job: JobId,
    },
    /// Head: who was put out of the cluster. The node closes their connections and refuses them.
    Revocations(RevocationList),
    /// Driver: is a program here?
    HasProgram {
        /// Its hash.
        hash: ProgramHash,
    },
    /// Driver: here is a program. Frames with an empty header object follow whose bodies make up the file.
    PutProgram {
        /// What comes.
        program: Program,
    },
    /// Driver that owns the job: turn this stream into a channel of calls. [`CallFrame`](super::CallFrame)s follow.
    Attach {
        /// The job.
        job: JobId,
        /// The generation that the driver knows.
        generation: Generation,
    },
    /// Driver: output of a job's workers. [`LogBatch`]es follow.
    Logs {
        /// The job.
        job: JobId,
        /// Only these ranks; all if empty.
        ranks: Vec<Rank>,
        /// At most so many kept lines per rank; all that are kept if `None`.
        tail: Option<u32>,
        /// Stay and send what comes, until the job's workers have ended here.
        follow: bool,
    },
    /// Driver that owns a job whose [`Installed::stream_output`] is set: all output of its workers here, from the first byte,
    /// each byte once. After [`NodeReply::Output`] come frames with an [`OutputChunk`] and the bytes as their body, until
    /// everything has come. The driver sends frames with a [`StdinChunk`] and bytes for rank 0 if it is here, and
    /// finishes its side at the end of the input.
    Output {
        /// The job.
        job: JobId,
        /// Not these ranks: their output is read and thrown away.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        without: Vec<Rank>,
    },
    /// Head: try to reach other nodes.
    Probe(Probe),
    /// Node, driver or head: how do you see this connection?
    Echo,
    /// Driver: what do you see around you?
    Surroundings,
}

/// The node's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeReply {
    /// Done.
    Done,
    /// Reserved.
    Reserved {
        /// Whether the program is here.
        has_program: bool,
        /// A TCP port that was free just now, for `MASTER_PORT`.
        free_port: u16,
        /// Why nothing can be started here: an installed program can't run, or the health check has failed. The reservation holds
        /// all the same.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        problem: Option<Refusal>,
    },
    /// Started.
    Started {
        /// Process ids in the order of the request's slots; 0 for one that could not be started.
        pids: Vec<(Slot, u32)>,
    },
    /// Answer to [`NodeRequest::FreePort`].
    FreePort(u16),
    /// Answer to [`NodeRequest::HasProgram`].
    HasProgram(bool),
    /// The stream is a channel of calls now.
    Attached {
        /// The ranks that can be called over it.
        ranks: Vec<Rank>,
    },
    /// [`LogBatch`]es follow.
    Logs,
    /// [`OutputChunk`]s follow.
    Output,
    /// Answer to [`NodeRequest::Probe`], in the order of its targets.
    Probed(Vec<ProbeResult>),
    /// Answer to [`NodeRequest::Echo`].
    Echo(Echo),
    /// Answer to [`NodeRequest::Surroundings`].
    Surroundings(DaemonState),
    /// No.
    Refused(Refusal),
}

/// A worker's standard stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stdio {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// One line of a worker's output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLine {
    /// Whose, at that time. A process of an elastic job that is in no generation has the number of its slot.
    pub rank: Rank,
    /// Which stream.
    pub stream: Stdio,
    /// Counts the lines of its slot, both streams, from 0: those of a rank in a static job. Gaps are lines that are no longer kept.
    pub seq: u64,
    /// Wall clock at the node when the line was complete, in milliseconds since 1970.
    pub time_ms: u64,
    /// The line without its end. Any bytes.
    #[serde(with = "serde_bytes")]
    pub text: Vec<u8>,
}

/// Lines of output, in the order in which they came.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogBatch {
    /// The lines.
    pub lines: Vec<LogLine>,
}

/// Output of one rank on one of its streams, as it was read. The frame's body holds the bytes: whole lines as far as
/// possible, which end with LF or CR. No bytes at all say that no more come from this rank on this stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputChunk {
    /// Whose.
    pub rank: Rank,
    /// Of which generation.
    pub generation: Generation,
    /// Which stream.
    pub stream: Stdio,
    /// Wall clock at the node when it was read, in milliseconds since 1970.
    pub time_ms: u64,
}

/// Bytes for the standard input of rank 0, in the frame's body.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StdinChunk {}
