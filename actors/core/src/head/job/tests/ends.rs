//! How a job ends, and what is said of it.

use kolo_wire::RankFailure;

use super::*;

#[test]
fn the_first_cause_is_the_first_that_came_and_not_an_exit_with_code_0() {
    let mut run = healthy();
    run.report(1, exited(JOB, 0, Exit::Code(0)));
    run.report(2, exited(JOB, 3, Exit::Code(7)));
    run.report(1, exited(JOB, 1, Exit::Signal(6)));
    run.report(2, exited(JOB, 2, Exit::Code(1)));
    assert_eq!(
        run.asked(),
        [
            "tell:lost 0",
            "2:lost",
            "tell:lost 3",
            "1:lost",
            "tell:lost 1",
            "2:lost",
            "tell:lost 2",
            "1:stop",
            "2:stop"
        ]
    );
    run.answer(2, NodeReply::Done);
    run.report(1, NodeEvent::JobGone { job: JOB });
    let (state, _, failure) = run.ended();
    assert_eq!(state, JobState::Failed);
    let failure = failure.unwrap();
    assert_eq!((failure.rank, failure.exit), (Rank(3), Exit::Code(7)));
    assert_eq!(run.asked(), ["2:free", "1:free", "tell:failed", "finished"]);
    // The late answer changes nothing.
    run.answer(1, NodeReply::Done);
    assert!(run.asked().is_empty());
}

#[test]
fn a_node_that_leaves_ends_the_job_everywhere_at_once() {
    let mut run = healthy();
    let reason = "the node is stopping".to_owned();
    run.report(1, NodeEvent::JobLeft { job: JOB, reason });
    let asked = run.asked();
    assert!(asked.iter().any(|asked| asked == "2:stop"), "{asked:?}");
    for slot in 0..4 {
        run.report(1 + u64::from(slot) / 2, exited(JOB, slot, Exit::Code(0)));
    }
    run.all_done(2);
    let (state, refusal, _) = run.ended();
    assert_eq!(state, JobState::Stopped);
    let text = refusal.unwrap().to_string();
    assert!(text.contains("leaves: the node is stopping"), "{text}");
}

#[test]
fn a_job_whose_driver_has_what_it_wanted_has_succeeded_unless_a_worker_was_lost() {
    let end = |mut run: Run| {
        run.step(Event::Driver(SubmitFrame::Done));
        // What a driver says for heads that do not know the first word, and its going, change nothing.
        run.step(Event::Driver(SubmitFrame::Stop));
        run.step(Event::DriverGone);
        // Workers that die of the stop are no failure.
        run.report(1, exited(JOB, 0, Exit::Signal(15)));
        run.all_done(2);
        let (state, refusal, failure) = run.ended();
        let info = run.job.info(Duration::ZERO);
        assert_eq!((state, refusal), (info.state, None));
        (state, failure.map(|failure| failure.rank), info.reason)
    };
    let reason = "its driver has ended it";
    let (state, failure, why) = end(healthy());
    assert_eq!((state, failure), (JobState::Succeeded, None));
    assert_eq!(why.as_deref(), Some(reason));

    let mut run = healthy();
    run.report(2, exited(JOB, 2, Exit::Signal(9)));
    let (state, failure, why) = end(run);
    assert_eq!((state, failure), (JobState::Stopped, Some(Rank(2))));
    assert!(
        why.unwrap()
            .starts_with(&format!("{reason}; before that, rank 2"))
    );
}

#[test]
fn a_job_whose_node_was_told_to_stop_has_not_succeeded() {
    let mut run = healthy();
    for slot in 0..4 {
        let failure = RankFailure {
            reason: Some("the job was stopped: the node is stopping".to_owned()),
            ..failure(Exit::Code(0))
        };
        let event = ended(JOB, slot, failure, true);
        run.report(1 + u64::from(slot) / 2, event);
    }
    run.all_done(2);
    let info = run.job.info(Duration::ZERO);
    assert_eq!(info.state, JobState::Failed);
    let reason = info.reason.unwrap();
    assert!(
        reason.contains("rank 0") && reason.contains("the node is stopping"),
        "{reason}"
    );
}

#[test]
fn whoever_stops_a_job_is_named() {
    for (event, refused, reason) in [
        (
            Event::Driver(SubmitFrame::Stop),
            None,
            "its driver has ended it",
        ),
        (
            Event::Driver(SubmitFrame::Overran { limit_ms: 5000 }),
            None,
            "it has run for 5s, which is its --timeout",
        ),
        (
            Event::DriverGone,
            Some("the job was stopped: its driver is gone"),
            "its driver is gone",
        ),
        (
            Event::Stop {
                reason: "driver-1 asked for it".to_owned(),
            },
            Some("the job was stopped: driver-1 asked for it"),
            "driver-1 asked for it",
        ),
    ] {
        let mut run = healthy();
        run.step(event);
        // A second reason is too late.
        run.step(Event::DriverGone);
        assert_eq!(run.asked(), ["1:stop", "2:stop"]);
        run.answer(1, NodeReply::Done);
        run.step(Event::Replied {
            node: NodeId(2),
            reply: Reply::Refused(Refusal::new(RefusalKind::NotFound, "no such job")),
        });
        let (state, refusal, failure) = run.ended();
        assert_eq!((state, failure), (JobState::Stopped, None));
        assert_eq!(refusal.map(|r| r.message).as_deref(), refused);
        let info = run.job.info(Duration::ZERO);
        assert_eq!(info.reason.as_deref(), Some(reason));
        assert_eq!(
            run.asked(),
            ["1:free", "2:free", "tell:stopped", "finished"]
        );
        assert!(run.job.base.is_finished());
    }
}
