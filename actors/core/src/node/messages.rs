//! All that goes into a [`NodeCore`](super::NodeCore), and all that comes out.

use std::sync::Arc;

use kolo_wire::ids::{DriverId, Generation, Incarnation, JobId, Rank, Slot};
use kolo_wire::{
    Account, Exit, FromWorker, GenerationTable, HealthCheck, Installed, NodeEvent, NodeReply,
    NodeRequest, ProgramHash, RankFailure, Refusal, StartWorkers, ToWorker, WorkerSignal,
};

use crate::agent::Metric;

/// A number for one question, so that its [`Output::Answer`] finds back. Never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct AskId(pub u64);

/// One stay of a job on this node, from its reservation until nothing of it is left. A job whose lease has ended may come
/// again while its former stay is still being cleaned up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stay {
    /// The job.
    pub job: JobId,
    /// Counts the stays of all jobs on this node, from 1.
    pub number: u64,
}

impl Stay {
    /// A process in a slot.
    #[must_use]
    pub const fn worker(self, slot: Slot, incarnation: Incarnation) -> WorkerId {
        WorkerId {
            stay: self,
            slot,
            incarnation,
        }
    }
}

/// One worker process of a job on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct WorkerId {
    /// The job's stay.
    pub stay: Stay,
    /// The worker's slot.
    pub slot: Slot,
    /// The how-manieth process of the slot the worker is. Always the first one in a static job.
    pub incarnation: Incarnation,
}

/// A program to look for on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// A program that drivers send to nodes.
    Sent(ProgramHash),
    /// A program that is installed on the host.
    Installed(Installed),
}

/// The result of looking for a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// The program is here and can run.
    Here,
    /// The program has not been sent here.
    NotSent,
    /// The installed program can't run here.
    Unusable(Refusal),
}

/// An event in the life of one worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerEvent {
    /// Its process runs.
    Spawned {
        /// The process id.
        pid: u32,
    },
    /// Its process could not be started.
    SpawnFailed {
        /// The exit that this counts as.
        exit: Exit,
        /// Why.
        reason: String,
    },
    /// A message on its control socket.
    Said(FromWorker),
    /// It closed a socket to the node.
    Closed {
        /// `call` or `control`.
        socket: &'static str,
    },
    /// It broke a rule of the protocol or can't be served; it has to go.
    Fault {
        /// The fault.
        reason: String,
    },
    /// Its process ended; its last output is still being read.
    Ended,
    /// Its process ended at a time, perhaps with a word of its own on the error. Comes before [`WorkerEvent::Exited`].
    Accounted(Account),
    /// Its process ended, and its last output is read.
    Exited {
        /// How.
        exit: Exit,
        /// Its last lines of standard error.
        stderr_tail: Vec<String>,
    },
}

/// The fate of events that were sent to the head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delivery {
    /// The head has acknowledged them.
    Taken,
    /// The head does not want them and would not the next time.
    Unwanted(String),
    /// The head did not answer in time.
    Late,
    /// The session is of no use any more; why. They are for the time after the next registration.
    Failed(String),
}

/// An event for the core.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// A request of the head that concerns a job.
    Order {
        /// For the answer.
        ask: AskId,
        /// The request, as it came over the network.
        request: Box<NodeRequest>,
    },
    /// The answer to [`Output::Find`], and to [`Output::FindPort`].
    Found {
        /// The order that needs the program.
        ask: AskId,
        /// The result.
        program: Found,
        /// A TCP port that is free; 0 if none was asked for or none was found.
        free_port: u16,
    },
    /// The answer to [`Output::Check`].
    Checked {
        /// The reservation that waits for it.
        ask: AskId,
        /// The failure in words, if the check has failed.
        checked: Result<(), String>,
    },
    /// The node stops: it ends all jobs and takes no more. Answered when nothing of them is left.
    StopAll {
        /// For the answer.
        ask: AskId,
        /// Why, for the log and the workers.
        reason: String,
    },
    /// The node is to stop when its jobs have ended, and says so whenever it registers. Answered when no worker is here, nor about
    /// to be started.
    Drain {
        /// For the answer.
        ask: AskId,
    },
    /// Answered when the head has acknowledged all events up to now.
    Flush {
        /// For the answer.
        ask: AskId,
    },
    /// The answer to [`Output::StartWarden`].
    Warden {
        /// The stay that it is for.
        stay: Stay,
        /// Why it does not run, if it does not.
        started: Result<(), String>,
    },
    /// An event of a worker.
    Worker {
        /// The worker.
        worker: WorkerId,
        /// The event.
        event: WorkerEvent,
    },
    /// The answer to [`Output::Sign`].
    Signed {
        /// The worker.
        worker: WorkerId,
        /// The certificate in DER.
        signed: Result<Vec<u8>, Refusal>,
    },
    /// The answer to [`Output::CloseWarden`]: nothing of the stay is left.
    Closed(Stay),
    /// The node is registered with the head, over a new connection; or its connection is lost.
    Head {
        /// Whether it is registered.
        registered: bool,
    },
    /// The answer to [`Output::Send`].
    Delivered {
        /// The session of the events.
        session: u64,
        /// Their fate.
        delivery: Delivery,
    },
    /// Time has passed: [`NodeCore::deadline`](super::NodeCore::deadline) is over.
    Tick,
}

/// A signal for a worker and everything below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// INT: end.
    Interrupt,
    /// TERM: end.
    Terminate,
    /// KILL.
    Kill,
    /// One that does not end it.
    Pass(WorkerSignal),
}

/// The start of a job, or of more workers of an elastic job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opening {
    /// The job's stay.
    pub stay: Stay,
    /// The order, for which the program was found.
    pub ask: AskId,
    /// The head's request.
    pub start: Arc<StartWorkers>,
}

/// A process to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spawning {
    /// Its name.
    pub worker: WorkerId,
    /// The head's request that has its slot.
    pub start: Arc<StartWorkers>,
    /// The ids of the GPUs that it may use: those of all workers of a static job here, its own in an elastic job.
    pub devices: Vec<String>,
}

/// A pair of workers of one job that are to be connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// One of them.
    pub first: (WorkerId, Rank),
    /// The other.
    pub second: (WorkerId, Rank),
    /// For which generation.
    pub generation: Generation,
}

/// A worker of this node that is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loss {
    /// The job.
    pub job: JobId,
    /// The worker's slot.
    pub slot: Slot,
    /// The how-manieth process of the slot the worker was.
    pub incarnation: Incarnation,
    /// The circumstances. The rank is that of the last generation that had the worker.
    pub failure: RankFailure,
    /// Whether the job is being stopped here.
    pub stopping: bool,
}

/// An act for the shell. Those of one step are done in their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Answer a question.
    Answer {
        /// Which.
        ask: AskId,
        /// The answer.
        reply: NodeReply,
    },
    /// Look for a program, and say [`Input::Found`]. A program that is found is kept until the order is answered.
    Find {
        /// The order that needs it.
        ask: AskId,
        /// The program.
        program: Wanted,
        /// Whether to look for a free TCP port too.
        port: bool,
    },
    /// Run a health check below the stay's warden, which was started or has failed, and say [`Input::Checked`].
    Check {
        /// The reservation that waits for it.
        ask: AskId,
        /// The stay.
        stay: Stay,
        /// The command.
        check: HealthCheck,
    },
    /// Look for a free TCP port alone, and say [`Input::Found`].
    FindPort {
        /// The order that asks for the port.
        ask: AskId,
    },
    /// Start a warden for a job, and say [`Input::Warden`]. Whatever needs a warden later has another one started, if there is none.
    StartWarden(Stay),
    /// Kill whatever is left below a job's warden, if it has one, end that, and say [`Input::Closed`].
    CloseWarden(Stay),
    /// All output of a job is for its driver, who may come for it from now on.
    OpenOutput {
        /// The job.
        job: JobId,
        /// Its driver.
        owner: DriverId,
        /// Whether the driver has input for rank 0.
        stdin: bool,
    },
    /// No worker of the job writes any more.
    EndOutput(JobId),
    /// A job starts: calls and output of its workers are taken from now on. Each start of an elastic job opens its workers.
    Open(Opening),
    /// Start the process of a worker.
    Spawn(Spawning),
    /// Send a message over a worker's control socket.
    Tell(WorkerId, ToWorker),
    /// Connect two workers with a socket pair and send each its end with [`ToWorker::Peer`].
    Link(Link),
    /// Have a worker's signing request signed by the head, and say [`Input::Signed`].
    Sign(WorkerId, Vec<u8>),
    /// Signal a worker.
    Signal(WorkerId, Signal),
    /// End the connections that Horovod has in these processes and what is below them. Done before what follows: an answer says that
    /// they are ended.
    HangUp {
        /// The processes.
        pids: Vec<u32>,
    },
    /// A generation is complete: calls are for it from now on.
    Complete(Arc<GenerationTable>),
    /// Callers must learn that a worker of this node is gone. They hear of other nodes' workers from these.
    Lost(Loss),
    /// A job takes no more calls.
    CloseCalls(JobId),
    /// Send events to the head, and say [`Input::Delivered`].
    Send {
        /// The session that they are for.
        session: u64,
        /// The events, in order.
        events: Vec<NodeEvent>,
    },
    /// The session with the head is of no use any more: register again.
    Leave {
        /// Why, for the log.
        reason: String,
    },
    /// What the agent of a job that is started anew at each change has to tell.
    Agent {
        /// The job.
        job: JobId,
        /// Its metrics.
        metrics: Vec<Metric>,
        /// Lines for the log.
        log: Vec<String>,
    },
    /// A warning for the log.
    Warn(String),
}
