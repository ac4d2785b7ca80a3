//! Examples, rule by rule.

mod anew;
mod elastic;
mod installed;
mod links;
mod losses;
mod orders;
mod starts;
mod stopping;

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

/// A job with a reservation and a warden.
fn reserved() -> Colocator {
    let mut core = Colocator::new(Arc::new(testing::here()), STAY);
    assert_eq!(core.warden(Ok(())), []);
    core
}

fn begin(core: &mut Colocator, start: StartWorkers) -> Result<Vec<Output>, Refusal> {
    core.start(Instant::now(), AskId(1), start, Vec::new())
}

/// A job whose processes run: slot and rank n have process id 100 + n.
fn running(workers: u32, now: Instant) -> Colocator {
    let mut core = reserved();
    let spawns = begin(&mut core, testing::start(workers)).unwrap();
    assert_eq!(spawns.len(), 1 + workers as usize);
    for slot in 0..workers {
        let outputs = core.worker(now, at(slot), WorkerEvent::Spawned { pid: 100 + slot });
        let last = slot + 1 == workers;
        assert_eq!(!outputs.is_empty(), last, "answered when all are started");
    }
    core
}

fn hello(slot: u32) -> WorkerEvent {
    hello_of(LOCAL_PROTOCOL, 100 + slot, 9)
}

fn hello_of(protocol: u32, pid: u32, registry: u64) -> WorkerEvent {
    WorkerEvent::Said(FromWorker::Hello {
        protocol,
        pid,
        registry,
    })
}

fn ready(workers: u32, now: Instant) -> Colocator {
    let mut core = running(workers, now);
    for slot in 0..workers {
        let outputs = core.worker(now, at(slot), hello(slot));
        assert!(matches!(
            outputs[..],
            [Output::Tell(_, ToWorker::Welcome { .. })]
        ));
        let ready = WorkerEvent::Said(FromWorker::Ready { address: None });
        assert_eq!(core.worker(now, at(slot), ready), []);
        assert!(matches!(
            core.take_reports()[..],
            [NodeEvent::WorkerReady { .. }]
        ));
    }
    core
}

fn exited(exit: Exit) -> WorkerEvent {
    WorkerEvent::Exited {
        exit,
        stderr_tail: vec!["last words".to_owned()],
    }
}

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

/// The exits that are reported: slot, incarnation, generation, and whether it was expected.
fn exits(core: &mut Colocator) -> Vec<(u32, u64, u64, bool)> {
    let reports = core.take_reports().into_iter();
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

/// The last report, which is of an exit.
fn report(core: &mut Colocator) -> (RankFailure, bool) {
    match core.take_reports().pop() {
        Some(NodeEvent::WorkerExited {
            failure, expected, ..
        }) => (failure, expected),
        other => panic!("{other:?}"),
    }
}

fn killed_for(core: &mut Colocator, now: Instant, slot: u32, event: WorkerEvent) -> String {
    let outputs = core.worker(now, at(slot), event);
    assert_eq!(outputs, [signal(slot, Signal::Kill)]);
    core.worker(now, at(slot), exited(Exit::Signal(9)));
    let (failure, expected) = report(core);
    assert!(!expected);
    failure.reason.expect("why it was killed")
}

#[test]
fn a_reservation_ends_by_release_or_by_its_lease() {
    let mut core = reserved();
    assert_eq!(core.stop(Instant::now(), "released"), CLOSE);
    assert_eq!(core.closed(), [Output::EndOutput(STAY.job)]);
    assert_eq!(core.take_reports(), [], "the head knows already");
    let refusal = begin(&mut core, testing::start(1)).unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::Stopped);

    let mut core = reserved();
    assert_eq!(core.expire()[0], Output::EndOutput(STAY.job));
    assert!(core.is_expired());
    assert_eq!(core.closed(), [], "its output may be that of a new stay");
    assert_eq!(core.take_reports(), [NodeEvent::JobGone { job: STAY.job }]);
}

#[test]
fn a_worker_that_never_says_hello_is_killed() {
    let now = Instant::now();
    let mut core = running(2, now);
    assert_eq!(core.next_deadline(), Some(now + HELLO));
    core.worker(now, at(0), hello(0));
    assert!(core.tick(now + HELLO / 2).is_empty());
    assert_eq!(core.tick(now + HELLO), [signal(1, Signal::Kill)]);
    assert!(core.tick(now + HELLO).is_empty(), "once");
    assert_eq!(core.next_deadline(), Some(now + HELLO + KILLED));
    assert!(
        core.worker(now, at(1), hello(1)).is_empty(),
        "too late does not count"
    );
    core.worker(now, at(1), exited(Exit::Signal(9)));
    let (failure, expected) = report(&mut core);
    assert!(!expected);
    assert!(failure.reason.unwrap().contains("hello within 10s"));
    assert_eq!(failure.stderr_tail, ["last words"]);
}

#[test]
fn a_process_that_ends_at_once_is_told_why_that_may_be() {
    let now = Instant::now();
    let mut core = running(1, now);
    core.worker(now, at(0), exited(Exit::Code(0)));
    let (failure, expected) = report(&mut core);
    assert!(!expected);
    assert!(failure.reason.unwrap().contains("before it said hello"));
    assert!(core.worker(now, at(0), exited(Exit::Code(0))).is_empty());
}

#[test]
fn a_worker_of_another_program_is_refused() {
    let now = Instant::now();
    let with = |event| {
        let mut core = running(2, now);
        core.worker(now, at(0), hello(0));
        killed_for(&mut core, now, 1, event)
    };
    let reason = with(hello_of(LOCAL_PROTOCOL, 101, 10));
    assert!(reason.contains("registers other functions"), "{reason}");
    let reason = with(hello_of(LOCAL_PROTOCOL + 1, 101, 9));
    assert!(
        reason.contains(&format!(
            "version {} of the local protocol",
            LOCAL_PROTOCOL + 1
        )),
        "{reason}"
    );
    let reason = with(hello_of(LOCAL_PROTOCOL, 4711, 9));
    assert!(reason.contains("process 4711 said hello"), "{reason}");
}

#[test]
fn a_worker_may_renew_its_certificate_and_not_ask_for_one_after_the_other() {
    let mut now = Instant::now();
    let mut core = ready(1, now);
    let sign = || WorkerEvent::Said(FromWorker::Sign { csr: vec![1] });
    for _ in 0..100 {
        now += Duration::from_secs(3);
        assert_eq!(
            core.worker(now, at(0), sign()),
            [Output::Sign(at(0), vec![1])]
        );
    }
    let mut core = ready(1, now);
    for _ in 0..8 {
        assert_eq!(
            core.worker(now, at(0), sign()),
            [Output::Sign(at(0), vec![1])]
        );
    }
    let reason = killed_for(&mut core, now, 0, sign());
    assert!(
        reason.contains("one certificate after the other"),
        "{reason}"
    );
}

#[test]
fn messages_out_of_turn_end_a_worker() {
    let now = Instant::now();
    let early = [
        WorkerEvent::Said(FromWorker::Sign { csr: Vec::new() }),
        WorkerEvent::Said(FromWorker::Ready { address: None }),
        WorkerEvent::Said(FromWorker::ConnectPeer {
            rank: Rank(0),
            generation: Generation(1),
        }),
        WorkerEvent::Said(FromWorker::RequestLink {
            rank: Rank(0),
            generation: Generation(1),
            group: 0,
        }),
    ];
    for event in early {
        let mut core = running(1, now);
        assert!(killed_for(&mut core, now, 0, event).contains("out of turn"));
    }
    let mut core = ready(1, now);
    assert!(killed_for(&mut core, now, 0, hello(0)).contains("hello twice"));
    let mut core = ready(1, now);
    let again = WorkerEvent::Said(FromWorker::Ready { address: None });
    assert!(killed_for(&mut core, now, 0, again).contains("out of turn"));
    let mut core = ready(1, now);
    let fault = WorkerEvent::Fault {
        reason: "garbage".to_owned(),
    };
    assert_eq!(killed_for(&mut core, now, 0, fault), "garbage");
}

#[test]
fn a_worker_that_hangs_up_must_go_soon_unless_it_is_stopping() {
    let now = Instant::now();
    let later = now + HANG_UP;
    let hung_up = || {
        let mut core = ready(1, now);
        for (socket, when) in [("call", now), ("control", later)] {
            let closed = WorkerEvent::Closed { socket };
            assert_eq!(core.worker(when, at(0), closed), []);
        }
        assert_eq!(core.next_deadline(), Some(later));
        core
    };
    let mut core = hung_up();
    assert_eq!(core.tick(later), [signal(0, Signal::Kill)]);
    assert_eq!(core.tick(later), [], "once");
    assert_eq!(core.next_deadline(), Some(later + KILLED));
    core.worker(later, at(0), exited(Exit::Signal(9)));
    let reason = report(&mut core).0.reason;
    assert_eq!(
        reason.as_deref(),
        Some("it closed its call socket and went on running")
    );
    let mut core = hung_up();
    core.stop(now, "done");
    assert_eq!(core.tick(later), []);
    // The last output of a process may take longer than that.
    let mut core = hung_up();
    assert_eq!(core.worker(now, at(0), WorkerEvent::Ended), []);
    assert_eq!(core.next_deadline(), None);
    assert_eq!(core.tick(later), []);
    core.worker(later, at(0), exited(Exit::Code(0)));
    assert_eq!(report(&mut core).0.reason, None);
}

#[test]
fn a_signing_request_goes_to_the_head() {
    let now = Instant::now();
    let mut core = running(1, now);
    core.worker(now, at(0), hello(0));
    let csr = vec![1, 2, 3];
    assert_eq!(
        core.worker(
            now,
            at(0),
            WorkerEvent::Said(FromWorker::Sign { csr: csr.clone() })
        ),
        [Output::Sign(at(0), csr)]
    );
    let certificate = ToWorker::Certificate {
        certificate: vec![4],
        authority: vec![9],
    };
    assert_eq!(
        core.signed(now, at(0), Ok(vec![4])),
        [Output::Tell(at(0), certificate)]
    );
    let refusal = Refusal::new(RefusalKind::Timeout, "no head");
    assert_eq!(
        core.signed(now, at(0), Err(refusal.clone())),
        [signal(0, Signal::Kill)]
    );
    // One that has a certificate can wait.
    let mut core = ready(1, now);
    let outputs = core.signed(now, at(0), Err(refusal));
    assert!(matches!(&outputs[..], [Output::Warn(text)] if text.contains("no head")));
}
