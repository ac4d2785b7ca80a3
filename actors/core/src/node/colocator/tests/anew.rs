//! A group that is started anew: its processes run an installed program, and are started for a generation.

use kolo_wire::ids::Incarnation;
use kolo_wire::{Installed, OnChange};

use super::*;
use crate::agent::WorkerState::{self, Failed, Healthy, Init, Stopped, Succeeded, Unknown};
use crate::node::testing::{of, start_of};

fn group(generation: u64, processes: &[(u32, u64)]) -> StartWorkers {
    let mut start = start_of(processes);
    start.installed = Some(Installed {
        program: "train".to_owned(),
        ..Installed::default()
    });
    start.on_change = OnChange::Restart;
    start.generation = Generation(generation);
    start.world_size = processes.len() as u32;
    start.needs_data_plane = false;
    start
}

fn begin(core: &mut Colocator, ask: u64, start: StartWorkers) -> Result<Vec<Output>, Refusal> {
    core.start(Instant::now(), AskId(ask), start, Vec::new())
}

fn runs(core: &mut Colocator, worker: WorkerId) -> Vec<Output> {
    let pid = 100 * worker.incarnation.0 as u32 + worker.slot.0;
    core.worker(Instant::now(), worker, WorkerEvent::Spawned { pid })
}

/// A group whose processes run.
fn up(generation: u64, processes: &[(u32, u64)]) -> Colocator {
    let mut core = reserved();
    begins(&mut core, generation, processes);
    core
}

fn begins(core: &mut Colocator, generation: u64, processes: &[(u32, u64)]) {
    begin(core, generation, group(generation, processes)).unwrap();
    for (slot, incarnation) in processes {
        runs(core, of(*slot, *incarnation));
    }
}

fn ends(core: &mut Colocator, worker: WorkerId, exit: Exit) -> Vec<Output> {
    core.worker(Instant::now(), worker, exited(exit))
}

/// The workers that are signalled, and how.
fn signals(outputs: &[Output]) -> Vec<(WorkerId, Signal)> {
    let signals = outputs.iter().filter_map(|output| match output {
        Output::Signal(worker, signal) => Some((*worker, *signal)),
        _ => None,
    });
    signals.collect()
}

/// The state of the workers, and the number of their group.
fn state(core: &Colocator) -> (WorkerState, u64) {
    let group = core.worker_group().unwrap();
    (group.state, group.round)
}

const TERM: Signal = Signal::Terminate;

#[test]
fn processes_follow_each_other_and_report_the_generation_that_they_were_started_for() {
    let mut core = up(1, &[(0, 1), (1, 1)]);
    assert_eq!(state(&core), (Healthy, 1));
    // What the head will say anyhow is done at once, also while the head is away.
    let outputs = ends(&mut core, of(0, 1), Exit::Code(3));
    assert_eq!(signals(&outputs), [(of(1, 1), TERM)]);
    let now = Instant::now();
    let outputs = core.stop_worker(now, (Slot(1), Incarnation(1)), "slot 0 has failed");
    assert_eq!(outputs, [], "the head's word comes second");
    assert_eq!(state(&core), (Failed, 1), "they are still ending");
    ends(&mut core, of(1, 1), Exit::Signal(15));
    assert_eq!(exits(&mut core), [(0, 1, 1, false), (1, 1, 1, true)]);
    assert_eq!(core.take_freed().len(), 2, "the seats are empty");
    assert_eq!(state(&core), (Stopped, 1));

    let outputs = begin(&mut core, 2, group(2, &[(0, 2), (1, 2)])).unwrap();
    assert_eq!(spawned(&outputs), [of(0, 2), of(1, 2)]);
    assert_eq!(state(&core), (Stopped, 2), "they are being started");
    runs(&mut core, of(0, 2));
    runs(&mut core, of(1, 2));
    assert_eq!(state(&core), (Healthy, 2));
    let outputs = ends(&mut core, of(0, 2), Exit::Code(0));
    assert_eq!(signals(&outputs), [], "one that is done stops nobody");
    assert_eq!(exits(&mut core), [(0, 2, 2, false)]);
    ends(&mut core, of(1, 2), Exit::Code(0));
    assert_eq!(state(&core), (Succeeded, 2));
}

#[test]
fn who_is_done_here_starts_anew_when_the_head_says_so() {
    let mut core = up(1, &[(0, 1)]);
    ends(&mut core, of(0, 1), Exit::Code(0));
    assert_eq!(state(&core), (Succeeded, 1));
    begins(&mut core, 2, &[(0, 2)]);
    assert_eq!(state(&core), (Healthy, 2));
}

#[test]
fn the_head_s_word_on_one_worker_ends_the_group_here() {
    let mut core = up(1, &[(0, 1), (1, 1), (2, 1)]);
    let now = Instant::now();
    let outputs = core.stop_worker(now, (Slot(1), Incarnation(1)), "a node has joined");
    let all = [(of(0, 1), TERM), (of(1, 1), TERM), (of(2, 1), TERM)];
    assert_eq!(signals(&outputs), all);
    for slot in 0..3 {
        ends(&mut core, of(slot, 1), Exit::Code(0));
    }
    assert_eq!(state(&core), (Stopped, 1));
    let reasons: Vec<_> = core
        .take_reports()
        .into_iter()
        .filter_map(|event| match event {
            NodeEvent::WorkerExited { failure, .. } => failure.reason,
            _ => None,
        })
        .collect();
    assert_eq!(reasons, ["it was stopped: a node has joined"; 3]);
    // A word on a process of a group that is over changes nothing.
    begins(&mut core, 2, &[(0, 2), (1, 2)]);
    let outputs = core.stop_worker(now, (Slot(1), Incarnation(1)), "late");
    assert_eq!(signals(&outputs), []);
    assert_eq!(state(&core), (Healthy, 2));
}

#[test]
fn a_group_that_is_being_started_ends_as_one_too() {
    let mut core = reserved();
    begin(&mut core, 1, group(1, &[(0, 1), (1, 1)])).unwrap();
    assert_eq!(state(&core), (Init, 1));
    runs(&mut core, of(0, 1));
    let reason = "no such file".to_owned();
    let exit = Exit::Code(1);
    let failed = WorkerEvent::SpawnFailed { exit, reason };
    let outputs = core.worker(Instant::now(), of(1, 1), failed);
    assert_eq!(signals(&outputs), [(of(0, 1), TERM)]);
}

#[test]
fn an_end_that_nobody_saw_ends_the_agent_and_the_head_s_next_group_has_another() {
    let mut core = up(1, &[(0, 1), (1, 1)]);
    let outputs = ends(&mut core, of(0, 1), Exit::Unknown);
    assert_eq!(signals(&outputs), [(of(1, 1), TERM)]);
    ends(&mut core, of(1, 1), Exit::Unknown);
    assert_eq!(state(&core), (Unknown, 1));
    begins(&mut core, 2, &[(0, 2), (1, 2)]);
    assert_eq!(state(&core), (Healthy, 2));
}

/// The head has given up processes whose end it did not see: they are killed, and the next ones follow.
#[test]
fn a_group_that_comes_early_follows_when_the_older_one_has_ended() {
    let mut core = up(1, &[(0, 1), (1, 1)]);
    let outputs = begin(&mut core, 2, group(2, &[(0, 2), (1, 2)])).unwrap();
    let all = [(of(0, 1), Signal::Kill), (of(1, 1), Signal::Kill)];
    assert_eq!(signals(&outputs), all);
    let outputs = ends(&mut core, of(0, 1), Exit::Signal(9));
    assert_eq!(spawned(&outputs), [of(0, 2)]);
    // Its end belongs to the next group, though the older one is not over.
    runs(&mut core, of(0, 2));
    ends(&mut core, of(0, 2), Exit::Code(1));
    let outputs = ends(&mut core, of(1, 1), Exit::Signal(9));
    assert_eq!(spawned(&outputs), [of(1, 2)]);
    let outputs = runs(&mut core, of(1, 2));
    assert_eq!(signals(&outputs), [(of(1, 2), TERM)]);
    ends(&mut core, of(1, 2), Exit::Signal(15));
    assert_eq!(state(&core), (Stopped, 2));
}

#[test]
fn the_end_of_the_job_ends_the_agent() {
    let mut core = up(1, &[(0, 1)]);
    let outputs = core.stop(Instant::now(), "done");
    assert_eq!(signals(&outputs), [(of(0, 1), TERM)]);
    ends(&mut core, of(0, 1), Exit::Signal(15));
    assert_eq!(state(&core), (Stopped, 1));
}

#[test]
fn metrics_and_lines_come_out() {
    let mut core = reserved();
    let mut start = group(1, &[(0, 1)]);
    let role = ("ROLE_NAME".to_owned(), "trainer".to_owned());
    start.user_env.extend([role]);
    for (name, value) in [
        ("TORCHELASTIC_MAX_RESTARTS", "3"),
        ("TORCHELASTIC_RESTART_COUNT", "1"),
    ] {
        start.env.insert(name.to_owned(), value.to_owned());
    }
    begin(&mut core, 1, start).unwrap();
    runs(&mut core, of(0, 1));
    let outputs = ends(&mut core, of(0, 1), Exit::Code(1));
    let told: Vec<_> = outputs
        .iter()
        .filter_map(|output| match output {
            Output::Agent { metrics, log, .. } => Some((metrics, log)),
            _ => None,
        })
        .collect();
    let [(metrics, log)] = told[..] else {
        panic!("{outputs:?}");
    };
    let values: Vec<(&str, i64)> = metrics
        .iter()
        .map(|metric| (metric.name.as_str(), metric.value))
        .collect();
    assert_eq!(
        values,
        [
            ("workers.trainer.remaining_restarts", 2),
            ("workers.trainer.failed", 1)
        ]
    );
    assert_eq!(
        *log,
        ["[trainer] the workers are failed, and are started anew; restarts left: 1 of 3"]
    );
}

/// A program whose workers keep their processes has no such agent: there one that fails stops nobody.
#[test]
fn workers_that_go_on_in_place_are_no_group() {
    let mut core = reserved();
    let mut start = group(1, &[(0, 1), (1, 1)]);
    start.on_change = OnChange::InPlace;
    begin(&mut core, 1, start).unwrap();
    runs(&mut core, of(0, 1));
    runs(&mut core, of(1, 1));
    assert!(core.worker_group().is_none());
    let outputs = ends(&mut core, of(0, 1), Exit::Code(1));
    assert_eq!(signals(&outputs), []);
}

#[test]
fn g1_a_group_that_is_over_is_not_started() {
    let mut core = reserved();
    begin(&mut core, 1, group(2, &[(0, 2)])).unwrap();
    let refusal = begin(&mut core, 2, group(1, &[(1, 1)])).unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::Stale);
    let refusal = begin(&mut core, 3, group(0, &[(1, 1)])).unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::Invalid);
}

#[test]
fn an_end_that_is_not_seen_is_told_before_the_process_counts_as_ended() {
    let mut core = up(1, &[(0, 1)]);
    let now = Instant::now();
    core.stop_worker(now, (Slot(0), Incarnation(1)), "slot 1 has failed");
    let late = now + GRACE * 10;
    core.tick(late);
    core.take_reports();
    core.tick(late + KILLED);
    let reports = core.take_reports();
    assert!(
        matches!(
            reports[..],
            [
                NodeEvent::WorkerUnseen {
                    slot: Slot(0),
                    incarnation: Incarnation(1),
                    ..
                },
                NodeEvent::WorkerExited { .. }
            ]
        ),
        "{reports:?}"
    );
}

/// Horovod's processes can't be told.
#[test]
fn a_generation_that_is_over_ends_the_connections_of_horovod_alone() {
    for on_change in [OnChange::Horovod, OnChange::InPlace] {
        let mut core = reserved();
        let mut start = group(1, &[(0, 1), (1, 1)]);
        start.on_change = on_change;
        begin(&mut core, 1, start).unwrap();
        runs(&mut core, of(0, 1));
        runs(&mut core, of(1, 1));
        ends(&mut core, of(1, 1), Exit::Signal(9));
        let message = ToWorker::Revoke {
            generation: Generation(1),
            cause: "rank 1 is lost".to_owned(),
            lost: vec![Rank(1)],
        };
        let outputs = core.revoke(Generation(1), &message);
        let ended = (on_change == OnChange::Horovod).then_some(Output::HangUp { pids: vec![100] });
        assert_eq!(outputs, Vec::from_iter(ended));
    }
}
