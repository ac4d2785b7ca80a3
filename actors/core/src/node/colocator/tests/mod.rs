//! Examples, rule by rule.

mod installed;
mod orders;
mod stopping;

use kolo_wire::worker::LOCAL_PROTOCOL;
use kolo_wire::{Exit, FromWorker, NodeEvent, NodeReply};

use super::workers::HANG_UP;
use super::*;
use crate::node::messages::{Link, Signal, WorkerEvent};
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
    core.start(AskId(1), start, Vec::new())
}

/// A job whose processes run: slot and rank n have process id 100 + n.
fn running(workers: u32, now: Instant) -> Colocator {
    let mut core = reserved();
    let spawns = begin(&mut core, testing::start(workers)).unwrap();
    assert_eq!(spawns.len(), 1 + workers as usize);
    for slot in 0..workers {
        let outputs = core.worker(now, Slot(slot), WorkerEvent::Spawned { pid: 100 + slot });
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
        let outputs = core.worker(now, Slot(slot), hello(slot));
        assert!(matches!(
            outputs[..],
            [Output::Tell(_, ToWorker::Welcome { .. })]
        ));
        let ready = WorkerEvent::Said(FromWorker::Ready { address: None });
        assert_eq!(core.worker(now, Slot(slot), ready), []);
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
    }
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
    let outputs = core.worker(now, Slot(slot), event);
    assert_eq!(outputs, [signal(slot, Signal::Kill)]);
    core.worker(now, Slot(slot), exited(Exit::Signal(9)));
    let (failure, expected) = report(core);
    assert!(!expected);
    failure.reason.expect("why it was killed")
}

#[test]
fn a_job_goes_from_reservation_to_gone() {
    let now = Instant::now();
    let mut core = ready(2, now);
    let table = testing::table(2, 1);
    assert_eq!(
        core.membership(table.clone()).unwrap(),
        [
            Output::Complete(table.clone()),
            Output::Tell(at(0), ToWorker::Membership(table.clone())),
            Output::Tell(at(1), ToWorker::Membership(table)),
        ]
    );
    let outputs = core.stop(now, "done");
    assert_eq!(outputs.len(), 2);
    assert!(
        outputs
            .iter()
            .all(|output| matches!(output, Output::Tell(_, ToWorker::Stop { .. })))
    );
    assert!(core.stop(now, "again").is_empty());
    let outputs = core.worker(now, Slot(0), exited(Exit::Code(0)));
    let (failure, expected) = report(&mut core);
    assert!(expected);
    assert_eq!(failure.reason.as_deref(), Some("the job was stopped: done"));
    assert!(matches!(
        outputs[0],
        Output::Lost(Loss { stopping: true, .. })
    ));
    assert!(!outputs.contains(&Output::CloseWarden(STAY)));
    let outputs = core.worker(now, Slot(1), exited(Exit::Code(0)));
    assert_eq!(outputs.last(), Some(&Output::CloseWarden(STAY)));
    assert_eq!(core.closed(), [Output::EndOutput(STAY.job)]);
    assert_eq!(
        core.take_reports().last(),
        Some(&NodeEvent::JobGone { job: STAY.job })
    );
    assert!(core.is_gone());
    assert!(core.closed().is_empty());
    assert_eq!(core.next_deadline(), None);
}

#[test]
fn what_contradicts_itself_is_not_started() {
    type Change = fn(&mut StartWorkers);
    let changes: [(Change, &str); 9] = [
        (|start| start.job = JobId(8), "is not job-"),
        (|start| start.slots.clear(), "starts no worker"),
        (|start| start.generation = Generation(0), "generation 0"),
        (
            |start| start.slots[1].member.node = NodeId(2),
            "is for node-",
        ),
        (|start| start.world_size = 1, "not below the world size 1"),
        (|start| start.slots[1].member.rank = Rank(0), "twice"),
        (|start| start.slots[1].member.slot = Slot(0), "twice"),
        (|start| start.args.push("a\0b".to_owned()), "NUL"),
        (
            |start| {
                start.user_env.insert("a=b".to_owned(), String::new());
            },
            "contains `=`",
        ),
    ];
    for (change, text) in changes {
        let mut start = testing::start(2);
        change(&mut start);
        let mut core = reserved();
        let refusal = begin(&mut core, start).unwrap_err();
        assert_eq!(refusal.kind, RefusalKind::Invalid);
        assert!(refusal.message.contains(text), "{}", refusal.message);
        // The reservation is still good.
        assert!(begin(&mut core, testing::start(2)).is_ok());
        let again = begin(&mut core, testing::start(2)).unwrap_err();
        assert_eq!(again.kind, RefusalKind::Invalid);
    }
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
fn workers_wait_for_their_warden() {
    let now = Instant::now();
    let starting = || {
        let mut core = Colocator::new(Arc::new(testing::here()), STAY);
        let outputs = begin(&mut core, testing::start(2)).unwrap();
        assert!(matches!(outputs[..], [Output::Open(_)]));
        core
    };
    let spawns = [Output::Spawn(at(0)), Output::Spawn(at(1))];
    assert_eq!(starting().warden(Ok(())), spawns);

    let mut core = starting();
    let outputs = core.warden(Err("no memory".to_owned()));
    assert!(matches!(
        outputs.last(),
        Some(Output::Answer {
            reply: NodeReply::Started { .. },
            ..
        })
    ));
    let reports = core.take_reports();
    assert_eq!(reports.len(), 2);
    assert!(reports.iter().all(|event| matches!(
        event,
        NodeEvent::WorkerExited { failure, expected: false, .. }
            if failure.was_not_started() && failure.reason.as_deref() == Some("no memory")
    )));
    assert_eq!(core.stop(now, "over"), CLOSE);

    // A job that is stopped before starts nothing.
    let mut core = starting();
    let outputs = core.stop(now, "never mind");
    assert!(matches!(
        &outputs[..],
        [Output::Answer { reply: NodeReply::Refused(refusal), .. }]
            if refusal.message.contains("stopped while it started: never mind")
    ));
    let outputs = core.warden(Ok(()));
    assert_eq!(outputs[outputs.len() - 2..], CLOSE);
    assert_eq!(core.take_reports().len(), 2);

    // One that is over before its warden runs closes that when it does.
    let mut core = Colocator::new(Arc::new(testing::here()), STAY);
    assert_eq!(core.stop(now, "unused"), CLOSE[..1]);
    assert_eq!(core.warden(Ok(())), CLOSE[1..]);
    let mut core = Colocator::new(Arc::new(testing::here()), STAY);
    core.stop(now, "unused");
    assert_eq!(core.warden(Err("no memory".to_owned())), CLOSE[1..]);
    // One that is known to have no warden starts as badly.
    let mut core = Colocator::new(Arc::new(testing::here()), STAY);
    assert_eq!(core.warden(Err("no memory".to_owned())), []);
    begin(&mut core, testing::start(1)).unwrap();
    assert_eq!(report(&mut core).0.reason.as_deref(), Some("no memory"));
}

#[test]
fn a_worker_that_never_says_hello_is_killed() {
    let now = Instant::now();
    let mut core = running(2, now);
    assert_eq!(core.next_deadline(), Some(now + HELLO));
    core.worker(now, Slot(0), hello(0));
    assert!(core.tick(now + HELLO / 2).is_empty());
    assert_eq!(core.tick(now + HELLO), [signal(1, Signal::Kill)]);
    assert!(core.tick(now + HELLO).is_empty(), "once");
    assert_eq!(core.next_deadline(), None);
    assert!(
        core.worker(now, Slot(1), hello(1)).is_empty(),
        "too late does not count"
    );
    core.worker(now, Slot(1), exited(Exit::Signal(9)));
    let (failure, expected) = report(&mut core);
    assert!(!expected);
    assert!(failure.reason.unwrap().contains("hello within 10s"));
    assert_eq!(failure.stderr_tail, ["last words"]);
}

#[test]
fn a_process_that_can_not_be_started_is_reported_and_the_start_is_answered() {
    let now = Instant::now();
    let mut core = reserved();
    begin(&mut core, testing::start(2)).unwrap();
    core.worker(now, Slot(1), WorkerEvent::Spawned { pid: 101 });
    let failed = WorkerEvent::SpawnFailed {
        exit: Exit::Code(127),
        reason: "no such file".to_owned(),
    };
    let outputs = core.worker(now, Slot(0), failed);
    let (failure, _) = report(&mut core);
    assert_eq!((failure.pid, failure.exit), (0, Exit::Code(127)));
    assert!(
        failure
            .to_string()
            .ends_with(" was not started: no such file")
    );
    assert_eq!(failure.reason.as_deref(), Some("no such file"));
    assert_eq!(
        outputs.last(),
        Some(&Output::Answer {
            ask: AskId(1),
            reply: NodeReply::Started {
                pids: vec![(Slot(0), 0), (Slot(1), 101)]
            }
        })
    );
}

#[test]
fn a_process_that_ends_at_once_is_told_why_that_may_be() {
    let now = Instant::now();
    let mut core = running(1, now);
    core.worker(now, Slot(0), exited(Exit::Code(0)));
    let (failure, expected) = report(&mut core);
    assert!(!expected);
    assert!(failure.reason.unwrap().contains("before it said hello"));
    assert!(core.worker(now, Slot(0), exited(Exit::Code(0))).is_empty());
}

#[test]
fn a_worker_of_another_program_is_refused() {
    let now = Instant::now();
    let with = |event| {
        let mut core = running(2, now);
        core.worker(now, Slot(0), hello(0));
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
            core.worker(now, Slot(0), sign()),
            [Output::Sign(at(0), vec![1])]
        );
    }
    let mut core = ready(1, now);
    for _ in 0..8 {
        assert_eq!(
            core.worker(now, Slot(0), sign()),
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
        for (socket, at) in [("call", now), ("control", later)] {
            let closed = WorkerEvent::Closed { socket };
            assert_eq!(core.worker(at, Slot(0), closed), []);
        }
        assert_eq!(core.next_deadline(), Some(later));
        core
    };
    let mut core = hung_up();
    assert_eq!(core.tick(later), [signal(0, Signal::Kill)]);
    assert_eq!(core.next_deadline(), None, "once");
    core.worker(later, Slot(0), exited(Exit::Signal(9)));
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
    assert_eq!(core.worker(now, Slot(0), WorkerEvent::Ended), []);
    assert_eq!(core.next_deadline(), None);
    assert_eq!(core.tick(later), []);
    core.worker(later, Slot(0), exited(Exit::Code(0)));
    assert_eq!(report(&mut core).0.reason, None);
}

#[test]
fn a_signing_request_goes_to_the_head() {
    let now = Instant::now();
    let mut core = running(1, now);
    core.worker(now, Slot(0), hello(0));
    let csr = vec![1, 2, 3];
    assert_eq!(
        core.worker(
            now,
            Slot(0),
            WorkerEvent::Said(FromWorker::Sign { csr: csr.clone() })
        ),
        [Output::Sign(at(0), csr)]
    );
    let certificate = ToWorker::Certificate {
        certificate: vec![4],
        authority: vec![9],
    };
    assert_eq!(
        core.signed(now, Slot(0), Ok(vec![4])),
        [Output::Tell(at(0), certificate)]
    );
    let refusal = Refusal::new(RefusalKind::Timeout, "no head");
    assert_eq!(
        core.signed(now, Slot(0), Err(refusal.clone())),
        [signal(0, Signal::Kill)]
    );
    // One that has a certificate can wait.
    let mut core = ready(1, now);
    let outputs = core.signed(now, Slot(0), Err(refusal));
    assert!(matches!(&outputs[..], [Output::Warn(text)] if text.contains("no head")));
}

#[test]
fn a_loss_is_told_once_to_callers_and_to_the_workers_that_are_left() {
    let now = Instant::now();
    let mut core = ready(3, now);
    let outputs = core.worker(now, Slot(1), exited(Exit::Signal(9)));
    let (own, _) = report(&mut core);
    assert_eq!(own.pid, 101);
    assert_eq!(own.reason, None, "the process itself ended");
    let lost = Output::Lost(Loss {
        job: STAY.job,
        generation: Generation(1),
        failure: own.clone(),
        stopping: false,
    });
    assert_eq!(outputs[0], lost);
    let told: Vec<Slot> = outputs
        .iter()
        .filter_map(|output| match output {
            Output::Tell(worker, ToWorker::RankLost { .. }) => Some(worker.slot),
            _ => None,
        })
        .collect();
    assert_eq!(told, [Slot(0), Slot(2)]);
    // The head says the same later.
    assert!(core.rank_lost(Generation(1), own).unwrap().is_empty());
    // Ranks of other nodes.
    assert_eq!(core.rank_lost(Generation(1), failure(7)).unwrap().len(), 3);
    let stale = core.rank_lost(Generation(2), failure(8)).unwrap_err();
    assert_eq!(stale.kind, RefusalKind::Stale);
}

#[test]
fn a_worker_that_comes_after_a_loss_learns_of_it() {
    let now = Instant::now();
    let mut core = running(2, now);
    core.worker(now, Slot(0), exited(Exit::Code(1)));
    let outputs = core.worker(now, Slot(1), hello(1));
    assert!(matches!(
        outputs[..],
        [
            Output::Tell(_, ToWorker::Welcome { .. }),
            Output::Tell(_, ToWorker::RankLost { .. })
        ]
    ));
}

/// A rank that waits for a link of a higher one has it told, if it can do something about it.
#[test]
fn a_request_for_a_link_reaches_who_is_to_make_it() {
    let now = Instant::now();
    let mut core = ready(3, now);
    let ask = |core: &mut Colocator, slot: u32, rank: u32, generation: u64| {
        let request = WorkerEvent::Said(FromWorker::RequestLink {
            rank: Rank(rank),
            generation: Generation(generation),
            group: 7,
        });
        core.worker(now, Slot(slot), request)
    };
    assert_eq!(
        ask(&mut core, 0, 2, 1),
        [Output::Tell(
            at(2),
            ToWorker::LinkRequested {
                rank: Rank(0),
                generation: Generation(1),
                group: 7,
            }
        )]
    );
    assert!(ask(&mut core, 0, 2, 2).is_empty(), "another generation");
    core.worker(now, Slot(2), exited(Exit::Signal(9)));
    assert!(matches!(
        ask(&mut core, 0, 2, 1)[..],
        [Output::Tell(_, ToWorker::RankLost { .. })]
    ));
    let stranger = WorkerEvent::Said(FromWorker::RequestLink {
        rank: Rank(9),
        generation: Generation(1),
        group: 0,
    });
    assert!(killed_for(&mut core, now, 0, stranger).contains("no other rank of this node"));

    // Who has not begun to take calls has nothing to make links with.
    let mut core = running(3, now);
    core.worker(now, Slot(0), hello(0));
    core.worker(
        now,
        Slot(0),
        WorkerEvent::Said(FromWorker::Ready { address: None }),
    );
    assert!(ask(&mut core, 0, 2, 1).is_empty());
}

#[test]
fn two_workers_are_linked_as_often_as_they_ask() {
    let now = Instant::now();
    let mut core = ready(3, now);
    let ask = |core: &mut Colocator, slot: u32, rank: u32, generation: u64| {
        core.worker(
            now,
            Slot(slot),
            WorkerEvent::Said(FromWorker::ConnectPeer {
                rank: Rank(rank),
                generation: Generation(generation),
            }),
        )
    };
    assert_eq!(
        ask(&mut core, 2, 1, 1),
        [Output::Link(Link {
            first: (at(2), Rank(2)),
            second: (at(1), Rank(1)),
            generation: Generation(1),
        })]
    );
    // For another group.
    assert_eq!(ask(&mut core, 2, 1, 1).len(), 1);
    assert!(ask(&mut core, 0, 1, 2).is_empty(), "another generation");
    // A new generation starts anew.
    core.membership(testing::table(3, 2)).unwrap();
    assert!(ask(&mut core, 1, 2, 1).is_empty(), "stale");
    assert_eq!(ask(&mut core, 1, 2, 2).len(), 1);
    // One that is gone is answered with its loss.
    core.worker(now, Slot(0), exited(Exit::Signal(9)));
    assert!(matches!(
        ask(&mut core, 1, 0, 2)[..],
        [Output::Tell(_, ToWorker::RankLost { .. })]
    ));
    // Itself and ranks of other nodes are faults.
    assert_eq!(ask(&mut core, 1, 1, 2), [signal(1, Signal::Kill)]);
    assert_eq!(ask(&mut core, 2, 9, 2), [signal(2, Signal::Kill)]);
}

#[test]
fn tables_that_do_not_fit_are_refused() {
    let now = Instant::now();
    let mut core = ready(2, now);
    core.membership(testing::table(2, 3)).unwrap();
    let stale = core.membership(testing::table(2, 2)).unwrap_err();
    assert_eq!(stale.kind, RefusalKind::Stale);
    assert!(
        core.membership(testing::table(2, 3)).is_ok(),
        "again is fine"
    );
    let mut other = testing::table(2, 4);
    other.job = JobId(8);
    assert_eq!(
        core.membership(other).unwrap_err().kind,
        RefusalKind::Invalid
    );
    let unknown = testing::table(3, 4);
    assert_eq!(
        core.membership(unknown).unwrap_err().kind,
        RefusalKind::Invalid
    );
    let mut wrong = testing::table(2, 4);
    wrong.members.swap(0, 1);
    assert_eq!(
        core.membership(wrong).unwrap_err().kind,
        RefusalKind::Invalid
    );
    core.stop(now, "done");
    let late = core.membership(testing::table(2, 4)).unwrap_err();
    assert_eq!(late.kind, RefusalKind::Stopped);
}

#[test]
fn a_new_generation_gives_new_ranks() {
    let now = Instant::now();
    let mut core = ready(2, now);
    let mut table = testing::table(2, 2);
    table.members[0].slot = Slot(1);
    table.members[1].slot = Slot(0);
    core.membership(table).unwrap();
    let outputs = core.worker(now, Slot(1), exited(Exit::Code(3)));
    assert_eq!(report(&mut core).0.rank, Rank(0));
    assert!(matches!(
        outputs[0],
        Output::Lost(Loss {
            generation: Generation(2),
            ..
        })
    ));
}
