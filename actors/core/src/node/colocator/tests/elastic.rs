//! A job whose members come and go.

use kolo_wire::Kept;
use kolo_wire::ids::Incarnation;

use super::*;
use crate::node::testing::{NEXT_WITHIN, of, start_of, table_of};

/// The process ids of the tests.
fn pid(worker: WorkerId) -> u32 {
    100 * worker.incarnation.0 as u32 + worker.slot.0
}

fn order(core: &mut Colocator, ask: u64, processes: &[(u32, u64)]) -> Vec<Output> {
    let now = Instant::now();
    let start = start_of(processes);
    core.start(now, AskId(ask), start, Vec::new()).unwrap()
}

fn answered(outputs: &[Output]) -> Vec<(u64, Vec<(u32, u32)>)> {
    let answers = outputs.iter().filter_map(|output| match output {
        Output::Answer {
            ask,
            reply: NodeReply::Started { pids },
        } => Some((
            ask.0,
            pids.iter().map(|(slot, pid)| (slot.0, *pid)).collect(),
        )),
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

fn runs(core: &mut Colocator, worker: WorkerId) -> Vec<Output> {
    let pid = pid(worker);
    core.worker(Instant::now(), worker, WorkerEvent::Spawned { pid })
}

fn greets(core: &mut Colocator, worker: WorkerId) -> Vec<Output> {
    let hello = hello_of(LOCAL_PROTOCOL, pid(worker), 9);
    core.worker(Instant::now(), worker, hello)
}

fn says(core: &mut Colocator, worker: WorkerId, message: FromWorker) -> Vec<Output> {
    core.worker(Instant::now(), worker, WorkerEvent::Said(message))
}

fn takes(core: &mut Colocator, worker: WorkerId, generation: u64) -> Vec<Output> {
    let generation = Generation(generation);
    says(core, worker, FromWorker::Taken { generation })
}

/// A job with these processes, which take calls.
fn up(processes: &[(u32, u64)]) -> Colocator {
    let mut core = reserved();
    order(&mut core, 1, processes);
    for (slot, incarnation) in processes {
        let worker = of(*slot, *incarnation);
        runs(&mut core, worker);
        greets(&mut core, worker);
        let address = Some("10.0.0.1:5".parse().unwrap());
        assert_eq!(says(&mut core, worker, FromWorker::Ready { address }), []);
    }
    core.take_reports();
    core
}

#[test]
fn workers_are_welcomed_into_no_generation_and_get_the_one_that_is_there() {
    let mut core = reserved();
    order(&mut core, 1, &[(0, 1), (1, 1)]);
    runs(&mut core, of(0, 1));
    let outputs = runs(&mut core, of(1, 1));
    assert_eq!(answered(&outputs), [(1, vec![(0, 100), (1, 101)])]);
    let welcome = greets(&mut core, of(0, 1));
    assert!(matches!(
        welcome[..],
        [Output::Tell(
            _,
            ToWorker::Welcome {
                generation: Generation(0),
                next_within_ms: Some(NEXT_WITHIN),
                ..
            }
        )]
    ));
    says(&mut core, of(0, 1), FromWorker::Ready { address: None });
    assert!(matches!(
        core.take_reports()[..],
        [NodeEvent::WorkerReady {
            slot: Slot(0),
            incarnation: Incarnation(1),
            ..
        }]
    ));
    let table = table_of(1, &[(0, 1)]);
    let outputs = core.membership(table.clone()).unwrap();
    assert_eq!(outputs[0], Output::Complete(table.clone().into()));
    let message = ToWorker::Membership(table.into());
    assert_eq!(told(&outputs), [(of(0, 1), message.clone())]);
    // One that comes later hears of it before anything else.
    let outputs = told(&greets(&mut core, of(1, 1)));
    assert!(matches!(outputs[0].1, ToWorker::Welcome { .. }));
    assert_eq!(outputs[1..], [(of(1, 1), message)]);
}

#[test]
fn a_table_goes_to_all_workers_until_they_have_taken_it() {
    let mut core = up(&[(0, 1), (1, 1), (2, 1)]);
    let table = table_of(1, &[(2, 1), (0, 1)]);
    let all = core.membership(table.clone()).unwrap();
    assert_eq!(told(&all).len(), 3, "spares, too");
    assert_eq!(takes(&mut core, of(2, 1), 1), []);
    assert_eq!(
        core.take_reports(),
        [NodeEvent::Taken {
            job: STAY.job,
            slot: Slot(2),
            incarnation: Incarnation(1),
            generation: Generation(1)
        }]
    );
    let again = core.membership(table).unwrap();
    let workers: Vec<_> = told(&again).into_iter().map(|(worker, _)| worker).collect();
    assert_eq!(workers, [of(0, 1), of(1, 1)]);
    // Word of an older one that comes late counts for that one.
    core.membership(table_of(2, &[(0, 1)])).unwrap();
    assert_eq!(takes(&mut core, of(1, 1), 1), []);
    assert!(matches!(
        core.take_reports()[..],
        [NodeEvent::Taken {
            generation: Generation(1),
            ..
        }]
    ));
    let stale = core.membership(table_of(1, &[(0, 1)])).unwrap_err();
    assert_eq!(stale.kind, RefusalKind::Stale);
    assert_eq!(
        takes(&mut core, of(1, 1), 3),
        [Output::Signal(of(1, 1), Signal::Kill)]
    );
}

#[test]
fn commits_and_holds_are_passed_on_with_the_name_of_the_process() {
    let mut core = up(&[(4, 2)]);
    core.membership(table_of(3, &[(4, 2)])).unwrap();
    let generation = Generation(3);
    let commit = 7;
    says(
        &mut core,
        of(4, 2),
        FromWorker::Committed {
            generation,
            commit,
            kept: Kept::Durable,
        },
    );
    says(
        &mut core,
        of(4, 2),
        FromWorker::Holding {
            generation,
            commit,
            failed: None,
        },
    );
    let (job, slot, incarnation) = (STAY.job, Slot(4), Incarnation(2));
    let events = [
        NodeEvent::Committed {
            job,
            slot,
            incarnation,
            generation,
            commit,
            kept: Kept::Durable,
        },
        NodeEvent::Holding {
            job,
            slot,
            incarnation,
            generation,
            commit,
            failed: None,
        },
    ];
    assert_eq!(core.take_reports(), events);
    let unknown = FromWorker::Committed {
        generation: Generation(4),
        commit,
        kept: Kept::Made,
    };
    assert_eq!(
        says(&mut core, of(4, 2), unknown),
        [Output::Signal(of(4, 2), Signal::Kill)]
    );
}

#[test]
fn a_revocation_and_a_hold_reach_the_members_of_the_newest_generation_alone() {
    let mut core = up(&[(0, 1), (1, 1), (2, 1)]);
    core.membership(table_of(2, &[(0, 1), (2, 1)])).unwrap();
    let message = |generation| ToWorker::Hold {
        generation,
        why: "room".to_owned(),
    };
    let outputs = core.tell_members(Generation(2), &message(Generation(2)));
    let members = [of(0, 1), of(2, 1)];
    assert_eq!(
        outputs,
        members.map(|worker| Output::Tell(worker, message(Generation(2))))
    );
    for stale in [1, 3] {
        let stale = Generation(stale);
        assert_eq!(core.tell_members(stale, &message(stale)), []);
    }
}

#[test]
fn a_process_is_started_once() {
    let mut core = reserved();
    let outputs = order(&mut core, 1, &[(0, 1), (1, 1)]);
    assert_eq!(spawned(&outputs), [of(0, 1), of(1, 1)]);
    runs(&mut core, of(0, 1));
    // Again, with one more, before all have a process.
    let outputs = order(&mut core, 2, &[(0, 1), (1, 1), (2, 1)]);
    assert_eq!(spawned(&outputs), [of(2, 1)]);
    assert_eq!(
        answered(&runs(&mut core, of(1, 1))),
        [(1, vec![(0, 100), (1, 101)])]
    );
    assert_eq!(
        answered(&runs(&mut core, of(2, 1))),
        [(2, vec![(0, 100), (1, 101), (2, 102)])]
    );
    // One that has ended is not started again either.
    core.worker(Instant::now(), of(1, 1), exited(Exit::Code(1)));
    let outputs = order(&mut core, 3, &[(1, 1)]);
    assert_eq!(spawned(&outputs), []);
    assert_eq!(answered(&outputs), [(3, vec![(1, 101)])]);
    // The next one is, in the room that the slot had.
    let outputs = order(&mut core, 4, &[(1, 2)]);
    assert_eq!(spawned(&outputs), [of(1, 2)]);
    let late = order(&mut core, 5, &[(1, 1)]);
    assert_eq!(spawned(&late), []);
    assert_eq!(
        answered(&late),
        [(5, vec![(1, 0)])],
        "an older one is not there"
    );
}

#[test]
fn an_older_process_of_a_slot_is_killed_and_the_next_one_waits_for_its_end() {
    let now = Instant::now();
    let mut core = up(&[(0, 1), (1, 1)]);
    core.membership(table_of(1, &[(0, 1), (1, 1)])).unwrap();
    takes(&mut core, of(1, 1), 1);
    core.take_reports();
    let outputs = order(&mut core, 2, &[(1, 2)]);
    assert_eq!(spawned(&outputs), []);
    assert!(outputs.contains(&Output::Signal(of(1, 1), Signal::Kill)));
    // Another one comes before the first has ended. The one in between never runs.
    let outputs = order(&mut core, 3, &[(1, 3)]);
    assert_eq!(spawned(&outputs), []);
    assert_eq!(answered(&outputs), [(2, vec![(1, 0)])]);
    assert_eq!(exits(&mut core), [(1, 2, 0, true)]);
    let outputs = core.worker(now, of(1, 1), exited(Exit::Signal(9)));
    assert_eq!(spawned(&outputs), [of(1, 3)]);
    assert!(matches!(
        told(&outputs)[..],
        [(worker, ToWorker::RankLost { .. })] if worker == of(0, 1)
    ));
    assert_eq!(exits(&mut core), [(1, 1, 1, true)]);
    assert_eq!(core.take_freed(), Vec::<Vec<String>>::new());
    // What the old one would still say is nothing to the new one.
    assert_eq!(greets(&mut core, of(1, 1)), []);
    assert_eq!(core.worker(now, of(1, 1), exited(Exit::Code(0))), []);
    assert_eq!(answered(&runs(&mut core, of(1, 3))), [(3, vec![(1, 301)])]);
    // The rank of the old one is not the new one's.
    let stale = core.membership(table_of(2, &[(0, 1), (1, 1)])).unwrap_err();
    assert_eq!(stale.kind, RefusalKind::Stale);
    let outputs = core.worker(now, of(1, 3), exited(Exit::Code(1)));
    assert_eq!(told(&outputs), [], "it was no rank");
    assert_eq!(core.take_freed().len(), 1);
}

#[test]
fn an_old_process_whose_end_is_not_seen_does_not_hold_the_next_one_up_for_ever() {
    let now = Instant::now();
    let mut core = up(&[(0, 1)]);
    order(&mut core, 2, &[(0, 2)]);
    let by = core.next_deadline().unwrap();
    assert!(by >= now + KILLED);
    assert_eq!(spawned(&core.tick(by)), [of(0, 2)]);
    assert_eq!(exits(&mut core), [(0, 1, 0, true)]);
}

#[test]
fn one_worker_is_stopped_with_notice_term_and_kill() {
    let now = Instant::now();
    let mut core = up(&[(0, 1), (1, 1)]);
    let name = |slot, incarnation| (Slot(slot), Incarnation(incarnation));
    for unknown in [name(0, 2), name(7, 1)] {
        assert_eq!(core.stop_worker(now, unknown, "it leaves"), []);
    }
    let outputs = core.stop_worker(now, name(1, 1), "it leaves");
    let reason = "it leaves".to_owned();
    assert_eq!(told(&outputs), [(of(1, 1), ToWorker::Stop { reason })]);
    assert_eq!(core.stop_worker(now, name(1, 1), "again"), []);
    assert_eq!(core.next_deadline(), Some(now + GRACE));
    let signal = |signal| [Output::Signal(of(1, 1), signal)];
    assert_eq!(core.tick(now + GRACE), signal(Signal::Terminate));
    assert_eq!(core.tick(now + GRACE * 2), signal(Signal::Kill));
    core.worker(now, of(1, 1), exited(Exit::Signal(9)));
    let (failure, expected) = report(&mut core);
    assert!(expected);
    assert_eq!(failure.reason.as_deref(), Some("it was stopped: it leaves"));
    assert_eq!(core.next_deadline(), None);
    assert_eq!(core.slot(Slot(0)), Some(SlotState::Ready), "the other one");
    assert_eq!(core.stop_worker(now, name(1, 1), "it has ended"), []);
    // The job's stop takes up one that has begun.
    core.stop_worker(now, name(0, 1), "it leaves");
    core.stop(now + GRACE / 2, "done");
    assert_eq!(core.next_deadline(), Some(now + GRACE));
}

#[test]
fn a_process_that_is_stopped_before_it_runs_is_started_or_not_but_ends() {
    let now = Instant::now();
    let name = (Slot(0), Incarnation(1));
    let mut core = reserved();
    order(&mut core, 1, &[(0, 1)]);
    assert_eq!(core.stop_worker(now, name, "never mind"), []);
    // However long its start takes, it is not forgotten.
    core.tick(now + GRACE * 20);
    let outputs = runs(&mut core, of(0, 1));
    assert_eq!(outputs[0], Output::Signal(of(0, 1), Signal::Terminate));
    assert_eq!(answered(&outputs), [(1, vec![(0, 100)])]);
    // One that is killed as soon as it runs has its time to end.
    let mut core = reserved();
    order(&mut core, 1, &[(0, 1)]);
    order(&mut core, 2, &[(0, 2)]);
    let later = now + KILLED * 2;
    core.tick(later);
    let spawn = WorkerEvent::Spawned { pid: 100 };
    let outputs = core.worker(later, of(0, 1), spawn);
    assert_eq!(outputs[0], Output::Signal(of(0, 1), Signal::Kill));
    assert_eq!(core.tick(later), []);
    assert_eq!(core.next_deadline(), Some(later + KILLED));
    // Without a warden there is nothing to start.
    let mut core = Colocator::new(Arc::new(testing::here()), STAY);
    order(&mut core, 1, &[(0, 1)]);
    core.stop_worker(now, name, "never mind");
    let outputs = core.warden(Ok(()));
    assert_eq!(spawned(&outputs), []);
    assert_eq!(answered(&outputs), [(1, vec![(0, 0)])]);
    assert_eq!(exits(&mut core), [(0, 1, 0, true)]);
    // One that waits for an older one.
    let mut core = up(&[(0, 1)]);
    order(&mut core, 2, &[(0, 2)]);
    let outputs = core.stop_worker(now, (Slot(0), Incarnation(2)), "never mind");
    assert_eq!(answered(&outputs), [(2, vec![(0, 0)])]);
    assert_eq!(exits(&mut core), [(0, 2, 0, true)]);
    let outputs = core.worker(now, of(0, 1), exited(Exit::Signal(9)));
    assert_eq!(spawned(&outputs), []);
    assert_eq!(core.take_freed().len(), 1);
}

#[test]
fn an_exit_has_the_last_generation_that_was_taken() {
    let now = Instant::now();
    let mut core = up(&[(0, 1), (1, 1)]);
    core.membership(table_of(5, &[(0, 1), (1, 1)])).unwrap();
    takes(&mut core, of(0, 1), 5);
    core.take_reports();
    let outputs = core.worker(now, of(0, 1), exited(Exit::Code(0)));
    assert!(matches!(
        &outputs[..],
        [Output::Lost(lost), Output::Tell(_, ToWorker::RankLost { .. })]
            if lost.slot == Slot(0) && !lost.stopping
    ));
    assert_eq!(exits(&mut core), [(0, 1, 5, false)]);
    core.worker(now, of(1, 1), exited(Exit::Code(0)));
    assert_eq!(exits(&mut core), [(1, 1, 0, false)]);
    assert!(!core.is_gone(), "the head decides");
}

#[test]
fn a_node_that_leaves_gives_the_head_the_grace_to_take_the_job_away() {
    let now = Instant::now();
    let mut core = up(&[(0, 1), (1, 1)]);
    assert_eq!(core.leave(now, "maintenance", true), []);
    assert_eq!(core.next_deadline(), Some(now + GRACE));
    let start = start_of(&[(2, 1)]);
    let refusal = core.start(now, AskId(2), start, Vec::new()).unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::Stopped);
    assert!(refusal.message.contains("maintenance"));
    // The head takes one away in time.
    core.stop_worker(now, (Slot(0), Incarnation(1)), "it leaves");
    core.worker(now, of(0, 1), exited(Exit::Code(0)));
    let outputs = core.tick(now + GRACE);
    assert!(matches!(
        told(&outputs)[..],
        [(worker, ToWorker::Stop { .. })] if worker == of(1, 1)
    ));
    // Nobody would take it away.
    let mut core = up(&[(0, 1)]);
    assert_eq!(told(&core.leave(now, "maintenance", false)).len(), 1);
    // Members of a static job don't come and go.
    let mut core = ready(1, now);
    assert_eq!(told(&core.leave(now, "maintenance", true)).len(), 1);
}

#[test]
fn what_can_not_be_elastic_is_refused_and_changes_nothing() {
    type Change = fn(&mut StartWorkers);
    let changes: [(Change, &str); 2] = [
        (
            |start| start.installed = Some(kolo_wire::Installed::default()),
            // It is started for a generation, which needs a number.
            "generation 0",
        ),
        (|start| start.next_within_ms = None, "generation 0"),
    ];
    for (change, text) in changes {
        let mut start = start_of(&[(0, 1)]);
        change(&mut start);
        let mut core = reserved();
        let refusal = begin(&mut core, start).unwrap_err();
        assert!(refusal.message.contains(text), "{}", refusal.message);
        assert!(begin(&mut core, start_of(&[(0, 1)])).is_ok());
    }
    let mut core = up(&[(0, 1)]);
    let refusal = begin(&mut core, testing::start(1)).unwrap_err();
    assert!(refusal.message.contains("started on this node already"));
}
