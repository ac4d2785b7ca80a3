//! How an elastic job ends.

use super::*;

#[test]
fn a_program_that_always_fails_ends_the_job_fast_with_its_output() {
    let mut bed = Bed::submit(1, 1, &[1], |_| ());
    bed.run();
    let start = bed.now;
    for incarnation in 1..=4 {
        assert_eq!(bed.started.last().unwrap().2, Incarnation(incarnation));
        bed.now += Duration::from_millis(10);
        bed.exits(1, 0, incarnation, Exit::Code(101));
    }
    assert!(bed.now - start < Duration::from_secs(1));
    let (state, refusal, failure) = bed.ended();
    assert_eq!(state, JobState::Failed);
    let message = refusal.unwrap().message;
    for part in [
        "4 failures before the first commit",
        "exit code 101",
        "last words",
    ] {
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(failure.unwrap().stderr_tail, ["last words"]);
    let reason = bed.job.info(Duration::ZERO).reason.unwrap();
    assert!(reason.contains("before the first commit"), "{reason}");
}

#[test]
fn a_driver_that_has_what_it_wanted_ends_the_job_well_whatever_was_lost() {
    let mut bed = Bed::active(1, 2, &[1, 1]);
    bed.commit(1, false);
    bed.exits(1, 0, 1, Exit::Signal(9));
    bed.step(Event::Driver(SubmitFrame::Done));
    assert_eq!(bed.ended(), (JobState::Succeeded, None, None));
    assert_eq!(bed.job.deadline(), None);
    // What comes then changes nothing.
    bed.take_log();
    bed.exits(2, 1, 1, Exit::Signal(15));
    bed.step(Event::Offered);
    assert_eq!(bed.take_log(), Vec::<String>::new());
}

#[test]
fn a_stop_ends_it_wherever_it_is() {
    let mut bed = Bed::submit(1, 4, &[2, 2], |_| ());
    bed.step(Event::DriverGone);
    assert_eq!(bed.ended().0, JobState::Stopped);
    for node in ["1:free", "2:free"] {
        assert!(bed.log.contains(&node.to_owned()), "{:?}", bed.log);
    }
    assert!(bed.started.is_empty());
}

#[test]
fn limits_that_make_no_sense_are_refused() {
    let refused = |change: fn(&mut JobSpec)| {
        let mut spec = spec(Placement::Pack { workers: 4 });
        spec.elastic = Some(Box::new(elastic(2, 4)));
        change(&mut spec);
        crate::head::validate::validate(&spec).map_err(|refusal| refusal.message)
    };
    assert_eq!(refused(|_| ()), Ok(()));
    for (change, part) in [
        (
            (|spec| spec.elastic = Some(Box::new(elastic(0, 4)))) as fn(&mut JobSpec),
            "min_workers=0",
        ),
        (
            |spec| spec.elastic = Some(Box::new(elastic(5, 4))),
            "max_workers must be at least min_workers",
        ),
        (
            |spec| spec.placement = Placement::Pack { workers: 3 },
            "must be for 4 workers",
        ),
        (|spec| spec.rendezvous = true, "the plain HTTP rendezvous"),
        (
            |spec| spec.elastic.as_mut().unwrap().spares = u32::MAX,
            "spares=4294967295",
        ),
        (
            |spec| spec.elastic.as_mut().unwrap().ack_timeout_ms = u64::MAX,
            "acknowledge timeout",
        ),
    ] {
        let message = refused(change).unwrap_err();
        assert!(message.contains(part), "{message}");
    }
}
