//! Starts: of what is refused, and of what fails.

use super::*;

#[test]
fn what_contradicts_itself_is_not_started() {
    let changes: [fn(&mut StartWorkers); 9] = [
        |start| start.job = JobId(8),
        |start| start.slots.clear(),
        |start| start.generation = Generation(0),
        |start| start.slots[1].member.node = NodeId(2),
        |start| start.world_size = 1,
        |start| start.slots[1].member.rank = Rank(0),
        |start| start.slots[1].member.slot = Slot(0),
        |start| start.args.push("a\0b".to_owned()),
        |start| start.user_env.extend([("a=b".to_owned(), String::new())]),
    ];
    let words = [
        "is not job-",
        "starts no worker",
        "generation 0",
        "is for node-",
        "not below the world size 1",
        "twice",
        "twice",
        "NUL",
        "contains `=`",
    ];
    for (change, text) in changes.into_iter().zip(words) {
        let mut start = testing::start(2);
        change(&mut start);
        let mut job = Job::reserved();
        let refusal = job.begin(start).unwrap_err();
        assert_eq!(refusal.kind, RefusalKind::Invalid);
        assert!(refusal.message.contains(text), "{}", refusal.message);
        // The reservation is still good.
        job.starts(testing::start(2));
        let again = job.begin(testing::start(2)).unwrap_err();
        assert_eq!(again.kind, RefusalKind::Invalid);
    }
}

#[test]
fn workers_wait_for_their_warden() {
    let starting = || {
        let mut job = Job::new();
        let outputs = job.begin(testing::start(2)).unwrap();
        assert!(matches!(outputs[..], [Output::Open(_)]));
        job
    };
    let spawns = [0, 1].map(|slot| testing::spawn(slot, &testing::start(2)));
    assert_eq!(starting().core.warden(Ok(())), spawns);

    // A warden that does not start is no end: with the workers another one is started, or their start fails.
    let warning = Output::Warn(format!("no warden was started for {}: no memory", STAY.job));
    let failed = || Err("no memory".to_owned());
    let outputs = starting().core.warden(failed());
    assert_eq!((&outputs[0], &outputs[1..]), (&warning, &spawns[..]));
    let mut job = Job::new();
    assert_eq!(job.core.warden(failed()), std::slice::from_ref(&warning));
    let outputs = job.begin(testing::start(2)).unwrap();
    assert_eq!(outputs[1..], spawns);

    // A job that is stopped before starts nothing.
    let mut job = starting();
    let outputs = job.stop();
    assert!(matches!(
        &outputs[..],
        [Output::Answer { reply: NodeReply::Refused(refusal), .. }]
            if refusal.message.contains("stopped while it started: done")
    ));
    let outputs = job.core.warden(Ok(()));
    assert_eq!(outputs[outputs.len() - 2..], CLOSE);
    assert_eq!(job.core.take_reports().len(), 2);

    // One that is over before its warden runs closes that when it does.
    for (started, last) in [
        (Ok(()), vec![CLOSE[1].clone()]),
        (failed(), vec![warning, CLOSE[1].clone()]),
    ] {
        let mut job = Job::new();
        assert_eq!(job.stop(), CLOSE[..1]);
        assert_eq!(job.core.warden(started), last);
    }
}

#[test]
fn a_process_that_can_not_be_started_is_reported_and_the_start_is_answered() {
    let mut job = Job::reserved();
    job.begin(testing::start(2)).unwrap();
    job.runs(at(1));
    let failed = WorkerEvent::SpawnFailed {
        exit: Exit::Code(127),
        reason: "no such file".to_owned(),
    };
    let outputs = job.has(at(0), failed);
    let (failure, _) = job.report();
    assert_eq!((failure.pid, failure.exit), (0, Exit::Code(127)));
    let text = failure.to_string();
    let end = " was not started: no such file";
    assert!(text.ends_with(end), "{text}");
    assert_eq!(failure.reason.as_deref(), Some("no such file"));
    assert_eq!(answered(&outputs), [(1, vec![(0, 0), (1, 101)])]);
}
