//! Examples, rule by rule.

mod anew;
mod elastic;
mod installed;
mod links;
mod losses;
mod orders;
mod starts;
mod stopping;

use kolo_wire::ids::{Incarnation, Rank};
use kolo_wire::worker::LOCAL_PROTOCOL;
use kolo_wire::{Exit, FromWorker, NodeEvent, NodeReply};

use super::workers::HANG_UP;
use super::*;
use crate::node::messages::{AskId, Loss, Signal, WorkerEvent, WorkerId};
use crate::node::testing::{self, STAY, at, signal};

const GRACE: Duration = Duration::from_secs(5);
const HELLO: Duration = Duration::from_secs(10);

/// What ends a stay when no worker is left.
const CLOSE: [Output; 2] = [Output::CloseCalls(STAY.job), Output::CloseWarden(STAY)];

/// The first generation.
const FIRST: Generation = Generation(1);

/// A job on the node, and the time there.
struct Job {
    core: Colocator,
    now: Instant,
    asks: u64,
}

impl Job {
    /// A job whose warden is being started.
    fn new() -> Self {
        Self {
            core: Colocator::new(Arc::new(testing::here()), STAY),
            now: Instant::now(),
            asks: 0,
        }
    }

    /// A job with a reservation and a warden.
    fn reserved() -> Self {
        let mut job = Self::new();
        assert_eq!(job.core.warden(Ok(())), []);
        job
    }

    /// A job whose processes run.
    fn of(start: StartWorkers) -> Self {
        let mut job = Self::reserved();
        job.starts(start);
        job
    }

    fn running(workers: u32) -> Self {
        Self::of(testing::start(workers))
    }

    /// A job whose workers take calls.
    fn ready(workers: u32) -> Self {
        let mut job = Self::running(workers);
        for slot in 0..workers {
            job.greets(at(slot));
            assert_eq!(job.readies(at(slot)), []);
        }
        job.core.take_reports();
        job
    }

    fn begin(&mut self, start: StartWorkers) -> Result<Vec<Output>, Refusal> {
        self.asks += 1;
        let ask = AskId(self.asks);
        self.core.start(self.now, ask, start, Vec::new())
    }

    /// Workers are started, and their processes run.
    fn starts(&mut self, start: StartWorkers) {
        let spawned = spawned(&self.begin(start).unwrap());
        for worker in &spawned {
            let outputs = self.runs(*worker);
            let is_answered = !answered(&outputs).is_empty();
            assert_eq!(is_answered, Some(worker) == spawned.last());
        }
    }

    fn has(&mut self, worker: WorkerId, event: WorkerEvent) -> Vec<Output> {
        self.core.worker(self.now, worker, event)
    }

    fn runs(&mut self, worker: WorkerId) -> Vec<Output> {
        let pid = pid(worker);
        self.has(worker, WorkerEvent::Spawned { pid })
    }

    fn says(&mut self, worker: WorkerId, message: FromWorker) -> Vec<Output> {
        self.has(worker, WorkerEvent::Said(message))
    }

    fn greets(&mut self, worker: WorkerId) -> Vec<Output> {
        self.says(worker, hello_of(LOCAL_PROTOCOL, pid(worker), 9))
    }

    fn readies(&mut self, worker: WorkerId) -> Vec<Output> {
        self.says(worker, FromWorker::Ready { address: None })
    }

    fn ends(&mut self, worker: WorkerId, exit: Exit) -> Vec<Output> {
        let stderr_tail = vec!["last words".to_owned()];
        self.has(worker, WorkerEvent::Exited { exit, stderr_tail })
    }

    /// Time passes, in one step.
    fn pass(&mut self, time: Duration) -> Vec<Output> {
        self.now += time;
        self.core.tick(self.now)
    }

    /// When time is to be looked at next.
    fn due(&self) -> Option<Duration> {
        let deadline = self.core.next_deadline();
        deadline.map(|deadline| deadline - self.now)
    }

    fn stop(&mut self) -> Vec<Output> {
        self.core.stop(self.now, "done")
    }

    fn stop_worker(&mut self, worker: WorkerId, why: &str) -> Vec<Output> {
        let name = (worker.slot, worker.incarnation);
        self.core.stop_worker(self.now, name, why)
    }

    /// The exits that are reported: slot, incarnation, generation, and whether it was expected.
    fn exits(&mut self) -> Vec<(u32, u64, u64, bool)> {
        let reports = self.core.take_reports().into_iter();
        let exits = reports.filter_map(|event| match event {
            NodeEvent::WorkerExited {
                slot,
                incarnation,
                generation,
                expected,
                ..
            } => Some((slot.0, incarnation.0, generation.0, expected)),
            _ => None,
        });
        exits.collect()
    }

    /// The last report, which is of an exit, and whether it was expected.
    fn report(&mut self) -> (RankFailure, bool) {
        match self.core.take_reports().pop() {
            Some(NodeEvent::WorkerExited {
                failure, expected, ..
            }) => (failure, expected),
            other => panic!("{other:?}"),
        }
    }

    /// Why a worker is killed that does this.
    fn killed_for(&mut self, worker: WorkerId, event: WorkerEvent) -> String {
        let killed = [Output::Signal(worker, Signal::Kill)];
        assert_eq!(self.has(worker, event), killed);
        self.ends(worker, Exit::Signal(9));
        let (failure, expected) = self.report();
        assert!(!expected);
        failure.reason.expect("why it was killed")
    }
}

/// The process ids of the tests.
fn pid(worker: WorkerId) -> u32 {
    100 * worker.incarnation.0 as u32 + worker.slot.0
}

fn hello_of(protocol: u32, pid: u32, registry: u64) -> FromWorker {
    FromWorker::Hello {
        protocol,
        pid,
        registry,
    }
}

/// The loss of a rank on another node.
fn failure(rank: u32) -> RankFailure {
    RankFailure {
        rank: Rank(rank),
        node: NodeId(99),
        hostname: "there".to_owned(),
        pid: 1,
        exit: Exit::Signal(9),
        reason: None,
        stderr_tail: Vec::new(),
        account: None,
    }
}

/// The processes that are to be started.
fn spawned(outputs: &[Output]) -> Vec<WorkerId> {
    let spawns = outputs.iter().filter_map(|output| match output {
        Output::Spawn(spawning) => Some(spawning.worker),
        _ => None,
    });
    spawns.collect()
}

/// The starts that are answered: each with slots and process ids.
fn answered(outputs: &[Output]) -> Vec<(u64, Vec<(u32, u32)>)> {
    let answers = outputs.iter().filter_map(|output| match output {
        Output::Answer {
            ask,
            reply: NodeReply::Started { pids },
        } => {
            let pids = pids.iter().map(|(slot, pid)| (slot.0, *pid));
            Some((ask.0, pids.collect()))
        }
        _ => None,
    });
    answers.collect()
}

/// The workers that are told something, and what.
fn told(outputs: &[Output]) -> Vec<(WorkerId, ToWorker)> {
    let told = outputs.iter().filter_map(|output| match output {
        Output::Tell(worker, message) => Some((*worker, message.clone())),
        _ => None,
    });
    told.collect()
}

/// The workers that hear of a loss, where nothing else is done.
fn hear_of_a_loss(outputs: &[Output]) -> Vec<WorkerId> {
    let told = outputs.iter().map(|output| match output {
        Output::Tell(worker, ToWorker::RankLost { .. }) => *worker,
        other => panic!("{other:?}"),
    });
    told.collect()
}

#[test]
fn a_reservation_ends_by_release_or_by_its_lease() {
    let mut job = Job::reserved();
    assert_eq!(job.stop(), CLOSE);
    assert_eq!(job.core.closed(), [Output::EndOutput(STAY.job)]);
    assert_eq!(job.core.take_reports(), [], "the head knows already");
    let refusal = job.begin(testing::start(1)).unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::Stopped);

    let mut core = Job::reserved().core;
    assert_eq!(core.expire()[0], Output::EndOutput(STAY.job));
    assert!(core.is_expired());
    assert_eq!(core.closed(), [], "its output may be that of a new stay");
    assert_eq!(core.take_reports(), [NodeEvent::JobGone { job: STAY.job }]);
}

#[test]
fn a_worker_that_never_says_hello_is_killed() {
    let mut job = Job::running(2);
    assert_eq!(job.due(), Some(HELLO));
    job.greets(at(0));
    assert_eq!(job.pass(HELLO / 2), []);
    assert_eq!(job.pass(HELLO / 2), [signal(1, Signal::Kill)]);
    assert_eq!(job.pass(Duration::ZERO), [], "once");
    assert_eq!(job.due(), Some(KILLED));
    assert_eq!(job.greets(at(1)), [], "too late does not count");
    job.ends(at(1), Exit::Signal(9));
    let (failure, expected) = job.report();
    assert!(!expected);
    assert!(failure.reason.unwrap().contains("hello within 10s"));
    assert_eq!(failure.stderr_tail, ["last words"]);

    // One that ends at once is told why that may be.
    let mut job = Job::running(1);
    job.ends(at(0), Exit::Code(0));
    let (failure, expected) = job.report();
    assert!(!expected);
    assert!(failure.reason.unwrap().contains("before it said hello"));
    assert_eq!(job.ends(at(0), Exit::Code(0)), []);
}

#[test]
fn a_worker_of_another_program_is_refused() {
    let next = LOCAL_PROTOCOL + 1;
    let version = format!("version {next} of the local protocol");
    for (hello, why) in [
        (
            hello_of(LOCAL_PROTOCOL, 101, 10),
            "registers other functions",
        ),
        (hello_of(next, 101, 9), version.as_str()),
        (hello_of(LOCAL_PROTOCOL, 4711, 9), "process 4711 said hello"),
    ] {
        let mut job = Job::running(2);
        job.greets(at(0));
        let reason = job.killed_for(at(1), WorkerEvent::Said(hello));
        assert!(reason.contains(why), "{reason}");
    }
}

#[test]
fn a_worker_may_renew_its_certificate_and_not_ask_for_one_after_the_other() {
    let sign = || FromWorker::Sign { csr: vec![1] };
    for (times, pause) in [(100, Duration::from_secs(3)), (8, Duration::ZERO)] {
        let mut job = Job::ready(1);
        for _ in 0..times {
            job.now += pause;
            assert_eq!(job.says(at(0), sign()), [Output::Sign(at(0), vec![1])]);
        }
        if pause.is_zero() {
            let reason = job.killed_for(at(0), WorkerEvent::Said(sign()));
            let why = "one certificate after the other";
            assert!(reason.contains(why), "{reason}");
        }
    }
}

#[test]
fn messages_out_of_turn_end_a_worker() {
    let (rank, generation) = (Rank(0), FIRST);
    let again = || FromWorker::Ready { address: None };
    for early in [
        FromWorker::Sign { csr: Vec::new() },
        again(),
        FromWorker::ConnectPeer { rank, generation },
        FromWorker::RequestLink {
            rank,
            generation,
            group: 0,
        },
    ] {
        let reason = Job::running(1).killed_for(at(0), WorkerEvent::Said(early));
        assert!(reason.contains("out of turn"), "{reason}");
    }
    let fault = "garbage".to_owned();
    for (late, why) in [
        (
            WorkerEvent::Said(hello_of(LOCAL_PROTOCOL, 100, 9)),
            "hello twice",
        ),
        (WorkerEvent::Said(again()), "out of turn"),
        (WorkerEvent::Fault { reason: fault }, "garbage"),
    ] {
        let reason = Job::ready(1).killed_for(at(0), late);
        assert!(reason.contains(why), "{reason}");
    }
}

#[test]
fn a_worker_that_hangs_up_must_go_soon_unless_it_is_stopping() {
    let hung_up = || {
        let mut job = Job::ready(1);
        for (socket, pause) in [("call", Duration::ZERO), ("control", HANG_UP / 2)] {
            job.now += pause;
            let closed = WorkerEvent::Closed { socket };
            assert_eq!(job.has(at(0), closed), []);
        }
        assert_eq!(job.due(), Some(HANG_UP / 2));
        job
    };
    let mut job = hung_up();
    assert_eq!(job.pass(HANG_UP / 2), [signal(0, Signal::Kill)]);
    assert_eq!(job.pass(Duration::ZERO), [], "once");
    assert_eq!(job.due(), Some(KILLED));
    job.ends(at(0), Exit::Signal(9));
    let why = "it closed its call socket and went on running";
    assert_eq!(job.report().0.reason.as_deref(), Some(why));
    let mut job = hung_up();
    job.stop();
    assert_eq!(job.pass(HANG_UP), []);
    // The last output of a process may take longer than that.
    let mut job = hung_up();
    assert_eq!(job.has(at(0), WorkerEvent::Ended), []);
    assert_eq!(job.due(), None);
    assert_eq!(job.pass(HANG_UP), []);
    job.ends(at(0), Exit::Code(0));
    assert_eq!(job.report().0.reason, None);
}

#[test]
fn a_signing_request_goes_to_the_head() {
    let mut job = Job::running(1);
    job.greets(at(0));
    let csr = vec![1, 2, 3];
    let sign = FromWorker::Sign { csr: csr.clone() };
    assert_eq!(job.says(at(0), sign), [Output::Sign(at(0), csr)]);
    let certificate = ToWorker::Certificate {
        certificate: vec![4],
        authority: vec![9],
    };
    let signed = job.core.signed(job.now, at(0), Ok(vec![4]));
    assert_eq!(signed, [Output::Tell(at(0), certificate)]);
    let refused = || Err(Refusal::new(RefusalKind::Timeout, "no head"));
    let killed = job.core.signed(job.now, at(0), refused());
    assert_eq!(killed, [signal(0, Signal::Kill)]);
    // One that has a certificate can wait.
    let mut job = Job::ready(1);
    let outputs = job.core.signed(job.now, at(0), refused());
    assert!(matches!(&outputs[..], [Output::Warn(text)] if text.contains("no head")));
}
