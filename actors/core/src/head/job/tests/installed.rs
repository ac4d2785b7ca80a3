//! Jobs whose program is installed on the hosts, step by step.

use kolo_wire::{Installed, StartWorkers, WorkerSignal};

use super::*;
use crate::head::job::fixtures::accounted;

fn installed(workers: &[u32]) -> Run {
    submit(workers, |spec| {
        spec.installed = Some(Installed {
            program: "train".to_owned(),
            ..Installed::default()
        });
    })
}

#[test]
fn workers_are_ready_when_they_run_and_the_job_succeeds_when_all_have() {
    let mut run = installed(&[1, 1]);
    run.reserve_all(2, false);
    let starts = run.starts();
    assert_eq!(starts.len(), 2, "no program is waited for");
    let is_bare = |start: &StartWorkers| start.installed.is_some() && !start.needs_data_plane;
    assert!(starts.iter().all(|(_, start)| is_bare(start)));
    run.started(1, &[(0, 40)]);
    run.started(2, &[(1, 41)]);
    run.report(1, exited(JOB, 0, Exit::Code(0)));
    assert_eq!(run.asked(), ["tell:healthy"]);
    run.report(2, exited(JOB, 1, Exit::Code(0)));
    run.all_done(2);
    assert_eq!(run.ended(), (JobState::Succeeded, None, None));
}

#[test]
fn workers_may_end_before_the_answer_to_the_start() {
    let mut run = installed(&[2]);
    run.reserve(1, false);
    for slot in 0..2 {
        run.report(1, exited(JOB, slot, Exit::Code(0)));
    }
    run.started(1, &[(0, 40), (1, 41)]);
    run.answer(1, NodeReply::Done);
    assert_eq!(run.ended().0, JobState::Succeeded);
}

#[test]
fn the_first_bad_end_ends_the_group_and_is_its_cause() {
    for early in [true, false] {
        let mut run = installed(&[2, 1]);
        run.reserve_all(2, false);
        let start = |run: &mut Run| {
            run.started(1, &[(0, 40), (1, 41)]);
            run.started(2, &[(2, 42)]);
            run.asked();
        };
        if !early {
            start(&mut run);
        }
        run.report(1, exited(JOB, 1, Exit::Code(3)));
        run.report(1, exited(JOB, 0, Exit::Signal(15)));
        if early {
            start(&mut run);
        } else {
            assert_eq!(run.asked(), ["1:stop", "2:stop"]);
        }
        run.all_done(2);
        let (state, refusal, failure) = run.ended();
        assert_eq!(state, JobState::Failed);
        let failure = failure.unwrap();
        assert_eq!((failure.rank.0, failure.exit), (1, Exit::Code(3)));
        assert!(refusal.unwrap().message.contains("exit code 3"));
    }
}

#[test]
fn a_worker_that_was_stopped_may_have_failed_first() {
    // Rank 0 has said its error a while before its exit, and is stopped because of rank 1. Or only just: nobody knows.
    for (second, cause) in [(6, 0), (9, 1)] {
        let mut run = installed(&[2]);
        run.reserve(1, false);
        run.started(1, &[(0, 40), (1, 41)]);
        run.report(1, exited(JOB, 1, Exit::Code(3)));
        let failure = RankFailure {
            reason: Some("the job was stopped: because".to_owned()),
            ..accounted(Exit::Signal(15), 9500, Some(second))
        };
        run.report(1, ended(JOB, 0, failure, true));
        run.answer(1, NodeReply::Done);
        let (_, refusal, failure) = run.ended();
        let failure = failure.unwrap();
        assert_eq!(failure.rank.0, cause);
        assert_eq!(failure.reason, None, "the stop is no cause");
        assert_eq!(refusal.unwrap().message, failure.to_string());
        let reason = run.job.info(std::time::Duration::ZERO).reason.unwrap();
        assert!(failure.to_string().starts_with(&reason), "{reason}");
    }
}

#[test]
fn hosts_without_the_program_are_named_together() {
    let mut run = installed(&[1, 1, 1, 1]);
    let problem = |kind, text: &str| NodeReply::Reserved {
        has_program: false,
        free_port: 1,
        problem: Some(Refusal::new(kind, text)),
    };
    run.answer(1, problem(RefusalKind::NoProgram, "no `train` in PATH"));
    run.reserve(2, false);
    run.answer(3, problem(RefusalKind::NoProgram, "no `train` in PATH"));
    run.answer(4, problem(RefusalKind::Forbidden, "not executable"));
    run.all_done(4);
    let (state, refusal, _) = run.ended();
    let refusal = refusal.unwrap();
    assert_eq!(
        (state, refusal.kind),
        (JobState::Failed, RefusalKind::NoProgram)
    );
    assert_eq!(
        refusal.message,
        "no `train` in PATH (on host1, host3); not executable (on host4)"
    );
    assert!(run.starts().is_empty());
}

#[test]
fn a_dry_run_ends_where_its_workers_would_start() {
    let dry = || {
        let mut run = submit(&[1, 1], |spec| {
            spec.installed = Some(Installed::default());
            spec.rendezvous = true;
        });
        run.job.run_dry();
        run.asked();
        run.reserve(1, false);
        run
    };
    let mut run = dry();
    run.reserve(2, false);
    assert_eq!(run.asked(), ["tell:placed", "open 2"]);
    run.step(Event::Rendezvous(Ok("10.0.0.7:80".parse().unwrap())));
    assert_eq!(run.asked(), ["1:release", "2:release"]);
    run.all_done(2);
    assert_eq!(run.ended(), (JobState::Succeeded, None, None));
    let asked = run.asked();
    assert_eq!(asked[2..], ["close", "tell:succeeded", "finished"]);

    let mut run = dry();
    let problem = NodeReply::Reserved {
        has_program: false,
        free_port: 1,
        problem: Some(Refusal::new(RefusalKind::NoProgram, "no `train` in PATH")),
    };
    run.answer(2, problem);
    assert_eq!(run.asked(), ["1:release", "2:release"]);
    run.all_done(2);
    let (state, refusal, _) = run.ended();
    assert_eq!(state, JobState::Failed);
    assert_eq!(refusal.unwrap().message, "no `train` in PATH (on host2)");
}

#[test]
fn a_kill_follows_a_stop_or_takes_its_place() {
    for first in [Some(SubmitFrame::Stop), None] {
        let mut run = installed(&[1]);
        run.reserve(1, false);
        run.started(1, &[(0, 40)]);
        run.asked();
        if let Some(first) = first {
            run.step(Event::Driver(first));
            assert_eq!(run.asked(), ["1:stop"]);
        }
        run.step(Event::Driver(SubmitFrame::Kill));
        assert_eq!(run.asked(), ["1:kill"]);
        run.report(1, exited(JOB, 0, Exit::Signal(9)));
        run.answer(1, NodeReply::Done);
        assert_eq!(run.ended().0, JobState::Stopped);
    }
}

#[test]
fn an_interrupt_ends_the_job_and_the_nodes_are_told_how() {
    let mut run = installed(&[1, 1]);
    run.reserve_all(2, false);
    run.started(1, &[(0, 40)]);
    run.asked();
    run.step(Event::Driver(SubmitFrame::Interrupt));
    run.step(Event::Driver(SubmitFrame::Stop));
    // One that is still starting is told when it has.
    assert_eq!(run.asked(), ["1:interrupt"]);
    run.started(2, &[(1, 41)]);
    assert_eq!(run.asked(), ["2:interrupt"]);
    run.all_done(2);
    assert_eq!(run.ended().0, JobState::Stopped);

    // An end that has begun otherwise goes on as it was.
    let mut run = installed(&[1]);
    run.reserve(1, false);
    run.asked();
    run.step(Event::Driver(SubmitFrame::Stop));
    run.step(Event::Driver(SubmitFrame::Interrupt));
    run.started(1, &[(0, 40)]);
    assert_eq!(run.asked(), ["1:stop"]);
}

#[test]
fn signals_go_to_every_node_one_at_a_time_and_none_is_waiting_twice() {
    use WorkerSignal::{Continue, Stop, User1, User2};
    let sent = |run: &Run, at: u64| -> Vec<(WorkerSignal, u64)> {
        let of_node = |(node, request): &(NodeId, NodeRequest)| match request {
            NodeRequest::Signal { signal, seq, .. } if node.0 == at => Some((*signal, *seq)),
            _ => None,
        };
        run.pushed.iter().filter_map(of_node).collect()
    };
    let mut run = installed(&[1, 1]);
    run.reserve_all(2, false);
    run.step(Event::Driver(SubmitFrame::Signal(User1)));
    assert_eq!(sent(&run, 1), [], "nobody is there to hear it");
    run.started(1, &[(0, 40)]);
    run.started(2, &[(1, 41)]);
    run.step(Event::Driver(SubmitFrame::Signal(User1)));
    assert_eq!(
        (sent(&run, 1), sent(&run, 2)),
        (vec![(User1, 1)], vec![(User1, 2)])
    );
    for signal in [User1, Stop, User1, Continue, Stop, Continue, User2] {
        run.step(Event::Driver(SubmitFrame::Signal(signal)));
    }
    assert_eq!(sent(&run, 1).len(), 1, "it has not taken the first");
    for _ in 0..9 {
        run.taken(1);
    }
    let kinds: Vec<WorkerSignal> = sent(&run, 1).iter().map(|(signal, _)| *signal).collect();
    assert_eq!(kinds, [User1, User1, Continue, User2]);
    let numbers: Vec<u64> = sent(&run, 1).iter().map(|(_, seq)| *seq).collect();
    assert!(numbers.is_sorted_by(|one, next| one < next), "{numbers:?}");
    // The end overtakes what is waiting, and what comes then.
    run.step(Event::Driver(SubmitFrame::Stop));
    run.step(Event::Driver(SubmitFrame::Signal(User1)));
    run.taken(2);
    assert_eq!(sent(&run, 2), [(User1, 2)]);
}
