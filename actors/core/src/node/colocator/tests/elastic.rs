//! A job whose members come and go.

use kolo_wire::Kept;

use super::*;
use crate::node::testing::{NEXT_WITHIN, of, start_of, table_of};

impl Job {
    fn order(&mut self, processes: &[(u32, u64)]) -> Vec<Output> {
        self.begin(start_of(processes)).unwrap()
    }

    fn table(&mut self, generation: u64, processes: &[(u32, u64)]) -> Vec<Output> {
        let table = table_of(generation, processes);
        self.core.membership(table).unwrap()
    }

    fn takes(&mut self, worker: WorkerId, generation: u64) -> Vec<Output> {
        let generation = Generation(generation);
        self.says(worker, FromWorker::Taken { generation })
    }

    /// A job with these processes, which take calls.
    fn elastic(processes: &[(u32, u64)]) -> Self {
        let mut job = Self::of(start_of(processes));
        for (slot, incarnation) in processes {
            let worker = of(*slot, *incarnation);
            job.greets(worker);
            let address = Some("10.0.0.1:5".parse().unwrap());
            assert_eq!(job.says(worker, FromWorker::Ready { address }), []);
        }
        job.core.take_reports();
        job
    }
}

fn taken(slot: u32, generation: u64) -> NodeEvent {
    NodeEvent::Taken {
        job: STAY.job,
        slot: Slot(slot),
        incarnation: Incarnation(1),
        generation: Generation(generation),
    }
}

#[test]
fn workers_are_welcomed_into_no_generation_and_get_the_one_that_is_there() {
    let mut job = Job::of(start_of(&[(0, 1), (1, 1)]));
    let welcome = told(&job.greets(of(0, 1)));
    assert!(matches!(
        welcome[..],
        [(
            _,
            ToWorker::Welcome {
                generation: Generation(0),
                next_within_ms: Some(NEXT_WITHIN),
                ..
            }
        )]
    ));
    job.readies(of(0, 1));
    let ready = NodeEvent::WorkerReady {
        job: STAY.job,
        slot: Slot(0),
        address: None,
        incarnation: Incarnation(1),
    };
    assert_eq!(job.core.take_reports(), [ready]);
    let table = table_of(1, &[(0, 1)]);
    let outputs = job.core.membership(table.clone()).unwrap();
    assert_eq!(outputs[0], Output::Complete(table.clone().into()));
    let message = ToWorker::Membership(table.into());
    assert_eq!(told(&outputs), [(of(0, 1), message.clone())]);
    // One that comes later hears of it before anything else.
    let outputs = told(&job.greets(of(1, 1)));
    assert!(matches!(outputs[0].1, ToWorker::Welcome { .. }));
    assert_eq!(outputs[1..], [(of(1, 1), message)]);
}

#[test]
fn a_table_goes_to_all_workers_until_they_have_taken_it() {
    let mut job = Job::elastic(&[(0, 1), (1, 1), (2, 1)]);
    let to = |outputs: Vec<Output>| -> Vec<u32> {
        let told = told(&outputs);
        told.iter().map(|(worker, _)| worker.slot.0).collect()
    };
    // Spares are told, too.
    assert_eq!(to(job.table(1, &[(2, 1), (0, 1)])), [0, 1, 2]);
    assert_eq!(job.takes(of(2, 1), 1), []);
    assert_eq!(job.core.take_reports(), [taken(2, 1)]);
    assert_eq!(to(job.table(1, &[(2, 1), (0, 1)])), [0, 1]);
    // Word of an older one that comes late counts for that one.
    job.table(2, &[(0, 1)]);
    assert_eq!(job.takes(of(1, 1), 1), []);
    assert_eq!(job.core.take_reports(), [taken(1, 1)]);
    let stale = job.core.membership(table_of(1, &[(0, 1)])).unwrap_err();
    assert_eq!(stale.kind, RefusalKind::Stale);
    assert_eq!(job.takes(of(1, 1), 3), [signal(1, Signal::Kill)]);
}

#[test]
fn commits_and_holds_are_passed_on_with_the_name_of_the_process() {
    let mut worker = Job::elastic(&[(4, 2)]);
    worker.table(3, &[(4, 2)]);
    let (generation, commit, kept, failed) = (Generation(3), 7, Kept::Durable, None);
    let committed = |generation| FromWorker::Committed {
        generation,
        commit,
        kept,
    };
    worker.says(of(4, 2), committed(generation));
    let holding = FromWorker::Holding {
        generation,
        commit,
        failed: None,
    };
    worker.says(of(4, 2), holding);
    let (job, slot, incarnation) = (STAY.job, Slot(4), Incarnation(2));
    let events = [
        NodeEvent::Committed {
            job,
            slot,
            incarnation,
            generation,
            commit,
            kept,
        },
        NodeEvent::Holding {
            job,
            slot,
            incarnation,
            generation,
            commit,
            failed,
        },
    ];
    assert_eq!(worker.core.take_reports(), events);
    let unknown = worker.says(of(4, 2), committed(Generation(4)));
    assert_eq!(unknown, [Output::Signal(of(4, 2), Signal::Kill)]);
}

#[test]
fn a_revocation_and_a_hold_reach_the_members_of_the_newest_generation_alone() {
    let mut job = Job::elastic(&[(0, 1), (1, 1), (2, 1)]);
    job.table(2, &[(0, 1), (2, 1)]);
    for (generation, members) in [(1, vec![]), (2, vec![0, 2]), (3, vec![])] {
        let generation = Generation(generation);
        let why = "room".to_owned();
        let message = ToWorker::Hold { generation, why };
        let outputs = job.core.tell_members(generation, &message);
        let members = members.into_iter().map(|slot| (at(slot), message.clone()));
        assert_eq!(told(&outputs), members.collect::<Vec<_>>());
    }
}

#[test]
fn a_process_is_started_once() {
    let mut job = Job::reserved();
    let outputs = job.order(&[(0, 1), (1, 1)]);
    assert_eq!(spawned(&outputs), [of(0, 1), of(1, 1)]);
    job.runs(of(0, 1));
    // Again, with one more, before all have a process.
    let outputs = job.order(&[(0, 1), (1, 1), (2, 1)]);
    assert_eq!(spawned(&outputs), [of(2, 1)]);
    let first = vec![(0, 100), (1, 101)];
    assert_eq!(answered(&job.runs(of(1, 1))), [(1, first)]);
    let second = vec![(0, 100), (1, 101), (2, 102)];
    assert_eq!(answered(&job.runs(of(2, 1))), [(2, second)]);
    // One that has ended is not started again either.
    job.ends(of(1, 1), Exit::Code(1));
    let outputs = job.order(&[(1, 1)]);
    assert_eq!(spawned(&outputs), []);
    assert_eq!(answered(&outputs), [(3, vec![(1, 101)])]);
    // The next one is, in the room that the slot had.
    assert_eq!(spawned(&job.order(&[(1, 2)])), [of(1, 2)]);
    let late = job.order(&[(1, 1)]);
    assert_eq!(spawned(&late), []);
    // An older one is not there.
    assert_eq!(answered(&late), [(5, vec![(1, 0)])]);
}

#[test]
fn an_older_process_of_a_slot_is_killed_and_the_next_one_waits_for_its_end() {
    let mut job = Job::elastic(&[(0, 1), (1, 1)]);
    job.table(1, &[(0, 1), (1, 1)]);
    job.takes(of(1, 1), 1);
    job.core.take_reports();
    let outputs = job.order(&[(1, 2)]);
    assert_eq!(spawned(&outputs), []);
    assert!(outputs.contains(&signal(1, Signal::Kill)));
    // Another one comes before the first has ended. The one in between never runs.
    let outputs = job.order(&[(1, 3)]);
    assert_eq!(spawned(&outputs), []);
    assert_eq!(answered(&outputs), [(2, vec![(1, 0)])]);
    assert_eq!(job.exits(), [(1, 2, 0, true)]);
    let outputs = job.ends(of(1, 1), Exit::Signal(9));
    assert_eq!(spawned(&outputs), [of(1, 3)]);
    assert!(
        matches!(told(&outputs)[..], [(worker, ToWorker::RankLost { .. })] if worker == of(0, 1))
    );
    assert_eq!(job.exits(), [(1, 1, 1, true)]);
    assert_eq!(job.core.take_freed(), Vec::<Vec<String>>::new());
    // What the old one would still say is nothing to the new one.
    assert_eq!(job.greets(of(1, 1)), []);
    assert_eq!(job.ends(of(1, 1), Exit::Code(0)), []);
    assert_eq!(answered(&job.runs(of(1, 3))), [(3, vec![(1, 301)])]);
    // The rank of the old one is not the new one's.
    let stale = job.core.membership(table_of(2, &[(0, 1), (1, 1)]));
    assert_eq!(stale.unwrap_err().kind, RefusalKind::Stale);
    let outputs = job.ends(of(1, 3), Exit::Code(1));
    assert_eq!(told(&outputs), [], "it was no rank");
    assert_eq!(job.core.take_freed().len(), 1);
}

#[test]
fn an_old_process_whose_end_is_not_seen_does_not_hold_the_next_one_up_for_ever() {
    let mut job = Job::elastic(&[(0, 1)]);
    job.order(&[(0, 2)]);
    assert_eq!(job.due(), Some(KILLED));
    assert_eq!(spawned(&job.pass(KILLED)), [of(0, 2)]);
    assert_eq!(job.exits(), [(0, 1, 0, true)]);
}

#[test]
fn one_worker_is_stopped_with_notice_term_and_kill() {
    let mut job = Job::elastic(&[(0, 1), (1, 1)]);
    for unknown in [of(0, 2), of(7, 1)] {
        assert_eq!(job.stop_worker(unknown, "it leaves"), []);
    }
    let outputs = job.stop_worker(of(1, 1), "it leaves");
    let reason = "it leaves".to_owned();
    assert_eq!(told(&outputs), [(of(1, 1), ToWorker::Stop { reason })]);
    assert_eq!(job.stop_worker(of(1, 1), "again"), []);
    assert_eq!(job.due(), Some(GRACE));
    assert_eq!(job.pass(GRACE), [signal(1, Signal::Terminate)]);
    assert_eq!(job.pass(GRACE), [signal(1, Signal::Kill)]);
    job.ends(of(1, 1), Exit::Signal(9));
    let (failure, expected) = job.report();
    assert!(expected);
    assert_eq!(failure.reason.as_deref(), Some("it was stopped: it leaves"));
    assert_eq!(job.due(), None);
    assert_eq!(job.core.slot(Slot(0)), Some(SlotState::Ready));
    assert_eq!(job.stop_worker(of(1, 1), "it has ended"), []);
    // The job's stop takes up one that has begun.
    job.stop_worker(of(0, 1), "it leaves");
    job.now += GRACE / 2;
    job.stop();
    assert_eq!(job.due(), Some(GRACE / 2));
}

#[test]
fn a_process_that_is_stopped_before_it_runs_is_started_or_not_but_ends() {
    let mut job = Job::reserved();
    job.order(&[(0, 1)]);
    assert_eq!(job.stop_worker(of(0, 1), "never mind"), []);
    // However long its start takes, it is not forgotten.
    job.pass(GRACE * 20);
    let outputs = job.runs(of(0, 1));
    assert_eq!(outputs[0], signal(0, Signal::Terminate));
    assert_eq!(answered(&outputs), [(1, vec![(0, 100)])]);
    // One that is killed as soon as it runs has its time to end.
    let mut job = Job::reserved();
    job.order(&[(0, 1)]);
    job.order(&[(0, 2)]);
    job.pass(KILLED * 2);
    assert_eq!(job.runs(of(0, 1))[0], signal(0, Signal::Kill));
    assert_eq!(job.pass(Duration::ZERO), []);
    assert_eq!(job.due(), Some(KILLED));
    // Without a warden there is nothing to start.
    let mut job = Job::new();
    job.order(&[(0, 1)]);
    job.stop_worker(of(0, 1), "never mind");
    let outputs = job.core.warden(Ok(()));
    assert_eq!(spawned(&outputs), []);
    assert_eq!(answered(&outputs), [(1, vec![(0, 0)])]);
    assert_eq!(job.exits(), [(0, 1, 0, true)]);
    // One that waits for an older one.
    let mut job = Job::elastic(&[(0, 1)]);
    job.order(&[(0, 2)]);
    let outputs = job.stop_worker(of(0, 2), "never mind");
    assert_eq!(answered(&outputs), [(2, vec![(0, 0)])]);
    assert_eq!(job.exits(), [(0, 2, 0, true)]);
    assert_eq!(spawned(&job.ends(of(0, 1), Exit::Signal(9))), []);
    assert_eq!(job.core.take_freed().len(), 1);
}

#[test]
fn an_exit_has_the_last_generation_that_was_taken() {
    let mut job = Job::elastic(&[(0, 1), (1, 1)]);
    job.table(5, &[(0, 1), (1, 1)]);
    job.takes(of(0, 1), 5);
    job.core.take_reports();
    let outputs = job.ends(of(0, 1), Exit::Code(0));
    assert!(matches!(&outputs[0], Output::Lost(lost) if lost.slot == Slot(0) && !lost.stopping));
    assert_eq!(hear_of_a_loss(&outputs[1..]), [of(1, 1)]);
    assert_eq!(job.exits(), [(0, 1, 5, false)]);
    job.ends(of(1, 1), Exit::Code(0));
    assert_eq!(job.exits(), [(1, 1, 0, false)]);
    assert!(!job.core.is_gone(), "the head decides");
}

#[test]
fn a_node_that_leaves_gives_the_head_the_grace_to_take_the_job_away() {
    let leave = |job: &mut Job, heard| job.core.leave(job.now, "maintenance", heard);
    let stop = |reason: &str| {
        let reason = reason.to_owned();
        ToWorker::Stop { reason }
    };
    let mut job = Job::elastic(&[(0, 1), (1, 1)]);
    assert_eq!(leave(&mut job, true), []);
    assert_eq!(job.due(), Some(GRACE));
    let refusal = job.begin(start_of(&[(2, 1)])).unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::Stopped);
    assert!(refusal.message.contains("maintenance"));
    // The head takes one away in time.
    job.stop_worker(of(0, 1), "it leaves");
    job.ends(of(0, 1), Exit::Code(0));
    let last = told(&job.pass(GRACE));
    assert_eq!(last, [(of(1, 1), stop("maintenance"))]);
    // Nobody would take it away, and members of a static job don't come and go.
    for (mut job, heard) in [(Job::elastic(&[(0, 1)]), false), (Job::ready(1), true)] {
        let outputs = leave(&mut job, heard);
        assert_eq!(told(&outputs), [(at(0), stop("maintenance"))]);
    }
}

#[test]
fn what_can_not_be_elastic_is_refused_and_changes_nothing() {
    // A program that is installed is started for a generation, which needs a number; and so is a static job.
    let changes: [fn(&mut StartWorkers); 2] = [
        |start| start.installed = Some(kolo_wire::Installed::default()),
        |start| start.next_within_ms = None,
    ];
    for change in changes {
        let mut start = start_of(&[(0, 1)]);
        change(&mut start);
        let mut job = Job::reserved();
        let text = job.begin(start).unwrap_err().message;
        assert!(text.contains("generation 0"), "{text}");
        job.order(&[(0, 1)]);
    }
    let text = Job::elastic(&[(0, 1)]).begin(testing::start(1));
    let text = text.unwrap_err().message;
    assert!(text.contains("started on this node already"), "{text}");
}
