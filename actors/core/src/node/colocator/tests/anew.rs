//! A group that is started anew: its processes run an installed program, and are started for a generation.

use kolo_wire::{Installed, OnChange};

use super::*;
use crate::agent::WorkerState::{self, Failed, Healthy, Init, Stopped, Succeeded, Unknown};
use crate::node::testing::{of, start_of};

const TERM: Signal = Signal::Terminate;

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

/// A group whose processes run.
fn up(processes: &[(u32, u64)]) -> Job {
    Job::of(group(1, processes))
}

impl Job {
    /// The state of the workers, and the number of their group.
    fn state(&self) -> (WorkerState, u64) {
        let group = self.core.agent.as_ref().unwrap().group();
        (group.state, group.round)
    }

    /// A process ends: the workers that are signalled for that, and how.
    fn signals(&mut self, worker: WorkerId, exit: Exit) -> Vec<(WorkerId, Signal)> {
        signals(&self.ends(worker, exit))
    }
}

fn signals(outputs: &[Output]) -> Vec<(WorkerId, Signal)> {
    let signals = outputs.iter().filter_map(|output| match output {
        Output::Signal(worker, signal) => Some((*worker, *signal)),
        _ => None,
    });
    signals.collect()
}

#[test]
fn processes_follow_each_other_and_report_the_generation_that_they_were_started_for() {
    let mut job = up(&[(0, 1), (1, 1)]);
    assert_eq!(job.state(), (Healthy, 1));
    // What the head will say anyhow is done at once, also while the head is away.
    let signals = job.signals(of(0, 1), Exit::Code(3));
    assert_eq!(signals, [(of(1, 1), TERM)]);
    let outputs = job.stop_worker(of(1, 1), "slot 0 has failed");
    assert_eq!(outputs, [], "the head's word comes second");
    assert_eq!(job.state(), (Failed, 1), "they are still ending");
    job.ends(of(1, 1), Exit::Signal(15));
    assert_eq!(job.exits(), [(0, 1, 1, false), (1, 1, 1, true)]);
    assert_eq!(job.core.take_freed().len(), 2, "the seats are empty");
    assert_eq!(job.state(), (Stopped, 1));

    let outputs = job.begin(group(2, &[(0, 2), (1, 2)])).unwrap();
    assert_eq!(spawned(&outputs), [of(0, 2), of(1, 2)]);
    assert_eq!(job.state(), (Stopped, 2), "they are being started");
    job.runs(of(0, 2));
    job.runs(of(1, 2));
    assert_eq!(job.state(), (Healthy, 2));
    // One that is done stops nobody.
    assert_eq!(job.signals(of(0, 2), Exit::Code(0)), []);
    assert_eq!(job.exits(), [(0, 2, 2, false)]);
    job.ends(of(1, 2), Exit::Code(0));
    assert_eq!(job.state(), (Succeeded, 2));
    // All start anew when the head says so.
    job.starts(group(3, &[(0, 3), (1, 3)]));
    assert_eq!(job.state(), (Healthy, 3));
}

#[test]
fn the_head_s_word_on_one_worker_ends_the_group_here() {
    let mut job = up(&[(0, 1), (1, 1), (2, 1)]);
    let outputs = job.stop_worker(of(1, 1), "a node has joined");
    let all = [(of(0, 1), TERM), (of(1, 1), TERM), (of(2, 1), TERM)];
    assert_eq!(signals(&outputs), all);
    for slot in 0..3 {
        job.ends(of(slot, 1), Exit::Code(0));
        let reason = job.report().0.reason;
        let why = "it was stopped: a node has joined";
        assert_eq!(reason.as_deref(), Some(why));
    }
    assert_eq!(job.state(), (Stopped, 1));
    // A word on a process of a group that is over changes nothing.
    job.starts(group(2, &[(0, 2), (1, 2)]));
    assert_eq!(signals(&job.stop_worker(of(1, 1), "late")), []);
    assert_eq!(job.state(), (Healthy, 2));
}

#[test]
fn a_group_that_is_being_started_ends_as_one_too() {
    let mut job = Job::reserved();
    job.begin(group(1, &[(0, 1), (1, 1)])).unwrap();
    assert_eq!(job.state(), (Init, 1));
    job.runs(of(0, 1));
    let (exit, reason) = (Exit::Code(1), "no such file".to_owned());
    let outputs = job.has(of(1, 1), WorkerEvent::SpawnFailed { exit, reason });
    assert_eq!(signals(&outputs), [(of(0, 1), TERM)]);
}

#[test]
fn an_end_that_nobody_saw_ends_the_agent_and_the_head_s_next_group_has_another() {
    let mut job = up(&[(0, 1), (1, 1)]);
    let signals = job.signals(of(0, 1), Exit::Unknown);
    assert_eq!(signals, [(of(1, 1), TERM)]);
    job.ends(of(1, 1), Exit::Unknown);
    assert_eq!(job.state(), (Unknown, 1));
    job.starts(group(2, &[(0, 2), (1, 2)]));
    assert_eq!(job.state(), (Healthy, 2));
}

/// The head has given up processes whose end it did not see: they are killed, and the next ones follow.
#[test]
fn a_group_that_comes_early_follows_when_the_older_one_has_ended() {
    let mut job = up(&[(0, 1), (1, 1)]);
    let outputs = job.begin(group(2, &[(0, 2), (1, 2)])).unwrap();
    let all = [(of(0, 1), Signal::Kill), (of(1, 1), Signal::Kill)];
    assert_eq!(signals(&outputs), all);
    let outputs = job.ends(of(0, 1), Exit::Signal(9));
    assert_eq!(spawned(&outputs), [of(0, 2)]);
    // Its end belongs to the next group, though the older one is not over.
    job.runs(of(0, 2));
    job.ends(of(0, 2), Exit::Code(1));
    let outputs = job.ends(of(1, 1), Exit::Signal(9));
    assert_eq!(spawned(&outputs), [of(1, 2)]);
    assert_eq!(signals(&job.runs(of(1, 2))), [(of(1, 2), TERM)]);
    job.ends(of(1, 2), Exit::Signal(15));
    assert_eq!(job.state(), (Stopped, 2));
}

#[test]
fn the_end_of_the_job_ends_the_agent() {
    let mut job = up(&[(0, 1)]);
    assert_eq!(signals(&job.stop()), [(of(0, 1), TERM)]);
    job.ends(of(0, 1), Exit::Signal(15));
    assert_eq!(job.state(), (Stopped, 1));
}

#[test]
fn metrics_and_lines_come_out() {
    let mut start = group(1, &[(0, 1)]);
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    start.user_env.extend([pair("ROLE_NAME", "trainer")]);
    start.env.extend([
        pair("TORCHELASTIC_MAX_RESTARTS", "3"),
        pair("TORCHELASTIC_RESTART_COUNT", "1"),
    ]);
    let mut job = Job::of(start);
    let outputs = job.ends(of(0, 1), Exit::Code(1));
    let told = outputs.iter().filter_map(|output| match output {
        Output::Agent { metrics, log, .. } => Some((metrics, log)),
        _ => None,
    });
    let [(metrics, log)] = told.collect::<Vec<_>>()[..] else {
        panic!("{outputs:?}");
    };
    let metrics = metrics.iter();
    let values = metrics.map(|metric| (metric.name.as_str(), metric.value));
    let expected = [
        ("workers.trainer.remaining_restarts", 2),
        ("workers.trainer.failed", 1),
    ];
    assert_eq!(values.collect::<Vec<_>>(), expected);
    let line = "[trainer] the workers are failed, and are started anew; restarts left: 1 of 3";
    assert_eq!(log[..], [line]);
}

#[test]
fn g1_a_group_that_is_over_is_not_started() {
    let mut job = Job::reserved();
    job.begin(group(2, &[(0, 2)])).unwrap();
    for (generation, kind) in [(1, RefusalKind::Stale), (0, RefusalKind::Invalid)] {
        let refusal = job.begin(group(generation, &[(1, 1)])).unwrap_err();
        assert_eq!(refusal.kind, kind);
    }
}

#[test]
fn an_end_that_is_not_seen_is_told_before_the_process_counts_as_ended() {
    let mut job = up(&[(0, 1)]);
    job.stop_worker(of(0, 1), "slot 1 has failed");
    job.pass(GRACE * 10);
    job.core.take_reports();
    job.pass(KILLED);
    let reports = job.core.take_reports();
    let [unseen, NodeEvent::WorkerExited { .. }] = &reports[..] else {
        panic!("{reports:?}");
    };
    let expected = NodeEvent::WorkerUnseen {
        job: STAY.job,
        slot: Slot(0),
        incarnation: Incarnation(1),
    };
    assert_eq!(unseen, &expected);
}

/// Horovod's processes can't be told. Where processes go on, one that fails stops nobody, so that there is no agent.
#[test]
fn a_generation_that_is_over_ends_the_connections_of_horovod_alone() {
    for on_change in [OnChange::Horovod, OnChange::InPlace] {
        let mut start = group(1, &[(0, 1), (1, 1)]);
        start.on_change = on_change;
        let mut job = Job::of(start);
        assert!(job.core.agent.is_none());
        assert_eq!(job.signals(of(1, 1), Exit::Signal(9)), []);
        let message = ToWorker::Revoke {
            generation: FIRST,
            cause: "rank 1 is lost".to_owned(),
            lost: vec![Rank(1)],
        };
        let outputs = job.core.revoke(FIRST, &message);
        let ended = (on_change == OnChange::Horovod).then_some(Output::HangUp { pids: vec![100] });
        assert_eq!(outputs, Vec::from_iter(ended));
    }
}
