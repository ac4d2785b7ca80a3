//! Examples, rule by rule.

mod installed;
mod orders;
mod stopping;

use kolo_wire::worker::LOCAL_PROTOCOL;
use kolo_wire::{Exit, NodeEvent};

use super::*;
use crate::node::testing::{self, NODE};

const GRACE: Duration = Duration::from_secs(5);
const HELLO: Duration = Duration::from_secs(10);

fn here() -> Here {
    Here {
        cluster: ClusterId(5),
        node: NODE,
        hostname: "here".to_owned(),
    }
}

fn reserved() -> Colocator {
    Colocator::new(here(), JobId(7))
}

/// A job whose processes run: slot and rank n have process id 100 + n.
fn running(workers: u32, now: Instant) -> Colocator {
    let mut core = reserved();
    let spawns = core.start(testing::start(workers)).unwrap();
    assert_eq!(spawns.len(), workers as usize);
    for slot in 0..workers {
        let actions = core.worker(now, Slot(slot), WorkerEvent::Spawned { pid: 100 + slot });
        let last = slot + 1 == workers;
        assert_eq!(!actions.is_empty(), last, "answered when all are started");
    }
    core
}

fn hello(slot: u32) -> WorkerEvent {
    WorkerEvent::Hello {
        protocol: LOCAL_PROTOCOL,
        pid: 100 + slot,
        registry: 9,
        program: Ok(()),
    }
}

fn ready(workers: u32, now: Instant) -> Colocator {
    let mut core = running(workers, now);
    for slot in 0..workers {
        let actions = core.worker(now, Slot(slot), hello(slot));
        assert!(matches!(
            actions[..],
            [Action::Tell(_, ToWorker::Welcome { .. })]
        ));
        let actions = core.worker(now, Slot(slot), WorkerEvent::Ready { address: None });
        assert!(matches!(
            actions[..],
            [Action::Report(NodeEvent::WorkerReady { .. })]
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

/// The report of an exit among actions.
fn report(actions: &[Action]) -> (RankFailure, bool) {
    actions
        .iter()
        .find_map(|action| match action {
            Action::Report(NodeEvent::WorkerExited {
                failure, expected, ..
            }) => Some((failure.clone(), *expected)),
            _ => None,
        })
        .expect("the exit is reported")
}

fn killed_for(core: &mut Colocator, now: Instant, slot: u32, event: WorkerEvent) -> String {
    let actions = core.worker(now, Slot(slot), event);
    assert_eq!(actions, [Action::Kill(Slot(slot))]);
    let actions = core.worker(now, Slot(slot), exited(Exit::Signal(9)));
    let (failure, expected) = report(&actions);
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
            Action::Complete(table.clone()),
            Action::Tell(Slot(0), ToWorker::Membership(table.clone())),
            Action::Tell(Slot(1), ToWorker::Membership(table)),
        ]
    );
    let actions = core.stop(now, "done");
    assert_eq!(actions.len(), 2);
    assert!(
        actions
            .iter()
            .all(|action| matches!(action, Action::Tell(_, ToWorker::Stop { .. })))
    );
    assert!(core.stop(now, "again").is_empty());
    let actions = core.worker(now, Slot(0), exited(Exit::Code(0)));
    let (failure, expected) = report(&actions);
    assert!(expected);
    assert_eq!(failure.reason.as_deref(), Some("the job was stopped: done"));
    assert!(matches!(actions[0], Action::Lost { stopping: true, .. }));
    assert!(!actions.contains(&Action::Close));
    let actions = core.worker(now, Slot(1), exited(Exit::Code(0)));
    assert_eq!(actions.last(), Some(&Action::Close));
    assert_eq!(core.closed(), [Action::Gone { report: true }]);
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
        let refusal = core.start(start).unwrap_err();
        assert_eq!(refusal.kind, RefusalKind::Invalid);
        assert!(refusal.message.contains(text), "{}", refusal.message);
        // The reservation is still good.
        assert!(core.start(testing::start(2)).is_ok());
        let again = core.start(testing::start(2)).unwrap_err();
        assert_eq!(again.kind, RefusalKind::Invalid);
    }
}

#[test]
fn a_reservation_ends_by_release_or_by_its_lease() {
    let mut core = reserved();
    assert_eq!(core.stop(Instant::now(), "released"), [Action::Close]);
    assert_eq!(
        core.closed(),
        [Action::Gone { report: false }],
        "the head knows already"
    );
    let refusal = core.start(testing::start(1)).unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::Stopped);

    let mut core = reserved();
    assert_eq!(core.expire(), [Action::Close]);
    assert!(core.expire().is_empty());
    assert_eq!(core.closed(), [Action::Gone { report: true }]);

    let mut core = running(1, Instant::now());
    assert!(core.expire().is_empty(), "a committed one has no lease");
}

#[test]
fn a_worker_that_never_says_hello_is_killed() {
    let now = Instant::now();
    let mut core = running(2, now);
    assert_eq!(core.next_deadline(), Some(now + HELLO));
    core.worker(now, Slot(0), hello(0));
    assert!(core.tick(now + HELLO / 2).is_empty());
    assert_eq!(core.tick(now + HELLO), [Action::Kill(Slot(1))]);
    assert!(core.tick(now + HELLO).is_empty(), "once");
    assert_eq!(core.next_deadline(), None);
    assert!(
        core.worker(now, Slot(1), hello(1)).is_empty(),
        "too late does not count"
    );
    let actions = core.worker(now, Slot(1), exited(Exit::Signal(9)));
    let (failure, expected) = report(&actions);
    assert!(!expected);
    assert!(failure.reason.unwrap().contains("hello within 10s"));
    assert_eq!(failure.stderr_tail, ["last words"]);
}

#[test]
fn a_process_that_can_not_be_started_is_reported_and_the_start_is_answered() {
    let now = Instant::now();
    let mut core = reserved();
    core.start(testing::start(2)).unwrap();
    core.worker(now, Slot(1), WorkerEvent::Spawned { pid: 101 });
    let failed = WorkerEvent::SpawnFailed {
        exit: Exit::Code(127),
        reason: "no such file".to_owned(),
    };
    let actions = core.worker(now, Slot(0), failed);
    let (failure, _) = report(&actions);
    assert_eq!((failure.pid, failure.exit), (0, Exit::Code(127)));
    assert!(
        failure
            .to_string()
            .ends_with(" was not started: no such file")
    );
    assert_eq!(failure.reason.as_deref(), Some("no such file"));
    assert_eq!(
        actions.last(),
        Some(&Action::Started(vec![(Slot(0), 0), (Slot(1), 101)]))
    );
}

#[test]
fn a_process_that_ends_at_once_is_told_why_that_may_be() {
    let now = Instant::now();
    let mut core = running(1, now);
    let actions = core.worker(now, Slot(0), exited(Exit::Code(0)));
    let (failure, expected) = report(&actions);
    assert!(!expected);
    assert!(failure.reason.unwrap().contains("before it said hello"));
    assert!(core.worker(now, Slot(0), exited(Exit::Code(0))).is_empty());
}

#[test]
fn a_worker_of_another_program_is_refused() {
    let now = Instant::now();
    let with = |change: fn(&mut WorkerEvent)| {
        let mut core = running(2, now);
        core.worker(now, Slot(0), hello(0));
        let mut event = hello(1);
        change(&mut event);
        killed_for(&mut core, now, 1, event)
    };
    let reason = with(|event| {
        if let WorkerEvent::Hello { registry, .. } = event {
            *registry = 10;
        }
    });
    assert!(reason.contains("registers other functions"), "{reason}");
    let reason = with(|event| {
        if let WorkerEvent::Hello { program, .. } = event {
            *program = Err("it runs something else".to_owned());
        }
    });
    assert_eq!(reason, "it runs something else");
    let reason = with(|event| {
        if let WorkerEvent::Hello { protocol, .. } = event {
            *protocol = LOCAL_PROTOCOL + 1;
        }
    });
    assert!(
        reason.contains(&format!(
            "version {} of the local protocol",
            LOCAL_PROTOCOL + 1
        )),
        "{reason}"
    );
    let reason = with(|event| {
        if let WorkerEvent::Hello { pid, .. } = event {
            *pid = 4711;
        }
    });
    assert!(reason.contains("process 4711 said hello"), "{reason}");
}

#[test]
fn a_worker_may_renew_its_certificate_and_not_ask_for_one_after_the_other() {
    let mut now = Instant::now();
    let mut core = ready(1, now);
    let sign = || WorkerEvent::Sign { csr: vec![1] };
    for _ in 0..100 {
        now += Duration::from_secs(3);
        assert_eq!(
            core.worker(now, Slot(0), sign()),
            [Action::Sign(Slot(0), vec![1])]
        );
    }
    let mut core = ready(1, now);
    for _ in 0..8 {
        assert_eq!(
            core.worker(now, Slot(0), sign()),
            [Action::Sign(Slot(0), vec![1])]
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
        WorkerEvent::Sign { csr: Vec::new() },
        WorkerEvent::Ready { address: None },
        WorkerEvent::ConnectPeer {
            rank: Rank(0),
            generation: Generation(1),
        },
        WorkerEvent::RequestLink {
            rank: Rank(0),
            generation: Generation(1),
            group: 0,
        },
    ];
    for event in early {
        let mut core = running(1, now);
        assert!(killed_for(&mut core, now, 0, event).contains("out of turn"));
    }
    let mut core = ready(1, now);
    assert!(killed_for(&mut core, now, 0, hello(0)).contains("hello twice"));
    let mut core = ready(1, now);
    let again = WorkerEvent::Ready { address: None };
    assert!(killed_for(&mut core, now, 0, again).contains("out of turn"));
    let mut core = ready(1, now);
    let fault = WorkerEvent::Fault {
        reason: "garbage".to_owned(),
    };
    assert_eq!(killed_for(&mut core, now, 0, fault), "garbage");
}

#[test]
fn a_worker_that_hangs_up_must_go_unless_it_is_stopping() {
    let now = Instant::now();
    let closed = || WorkerEvent::Closed { socket: "call" };
    let mut core = ready(1, now);
    let reason = killed_for(&mut core, now, 0, closed());
    assert_eq!(reason, "it closed its call socket and went on running");
    let mut core = ready(1, now);
    core.stop(now, "done");
    assert!(core.worker(now, Slot(0), closed()).is_empty());
}

#[test]
fn a_signing_request_goes_to_the_head() {
    let now = Instant::now();
    let mut core = running(1, now);
    core.worker(now, Slot(0), hello(0));
    let csr = vec![1, 2, 3];
    assert_eq!(
        core.worker(now, Slot(0), WorkerEvent::Sign { csr: csr.clone() }),
        [Action::Sign(Slot(0), csr)]
    );
}

#[test]
fn a_loss_is_told_once_to_callers_and_to_the_workers_that_are_left() {
    let now = Instant::now();
    let mut core = ready(3, now);
    let actions = core.worker(now, Slot(1), exited(Exit::Signal(9)));
    let (own, _) = report(&actions);
    assert_eq!(own.pid, 101);
    assert_eq!(own.reason, None, "the process itself ended");
    let lost = Action::Lost {
        generation: Generation(1),
        failure: own.clone(),
        stopping: false,
    };
    assert_eq!(actions[0], lost);
    let told: Vec<Slot> = actions
        .iter()
        .filter_map(|action| match action {
            Action::Tell(slot, ToWorker::RankLost { .. }) => Some(*slot),
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
    let actions = core.worker(now, Slot(1), hello(1));
    assert!(matches!(
        actions[..],
        [
            Action::Tell(_, ToWorker::Welcome { .. }),
            Action::Tell(_, ToWorker::RankLost { .. })
        ]
    ));
}

/// A rank that waits for a link of a higher one has it told, if it can do something about it.
#[test]
fn a_request_for_a_link_reaches_who_is_to_make_it() {
    let now = Instant::now();
    let mut core = ready(3, now);
    let ask = |core: &mut Colocator, slot: u32, rank: u32, generation: u64| {
        let request = WorkerEvent::RequestLink {
            rank: Rank(rank),
            generation: Generation(generation),
            group: 7,
        };
        core.worker(now, Slot(slot), request)
    };
    assert_eq!(
        ask(&mut core, 0, 2, 1),
        [Action::Tell(
            Slot(2),
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
        [Action::Tell(Slot(0), ToWorker::RankLost { .. })]
    ));
    let stranger = WorkerEvent::RequestLink {
        rank: Rank(9),
        generation: Generation(1),
        group: 0,
    };
    assert!(killed_for(&mut core, now, 0, stranger).contains("no other rank of this node"));

    // Who has not begun to take calls has nothing to make links with.
    let mut core = running(3, now);
    core.worker(now, Slot(0), hello(0));
    core.worker(now, Slot(0), WorkerEvent::Ready { address: None });
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
            WorkerEvent::ConnectPeer {
                rank: Rank(rank),
                generation: Generation(generation),
            },
        )
    };
    assert_eq!(
        ask(&mut core, 2, 1, 1),
        [Action::Link {
            first: (Slot(2), Rank(2)),
            second: (Slot(1), Rank(1)),
            generation: Generation(1),
        }]
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
        [Action::Tell(Slot(1), ToWorker::RankLost { .. })]
    ));
    // Itself and ranks of other nodes are faults.
    assert_eq!(ask(&mut core, 1, 1, 2), [Action::Kill(Slot(1))]);
    assert_eq!(ask(&mut core, 2, 9, 2), [Action::Kill(Slot(2))]);
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
    let actions = core.worker(now, Slot(1), exited(Exit::Code(3)));
    assert_eq!(report(&actions).0.rank, Rank(0));
    assert!(matches!(
        actions[0],
        Action::Lost {
            generation: Generation(2),
            ..
        }
    ));
}
