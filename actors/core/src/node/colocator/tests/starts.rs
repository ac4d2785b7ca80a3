//! Starts: of what is refused, and of what fails.

use super::*;

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
fn workers_wait_for_their_warden() {
    let now = Instant::now();
    let starting = || {
        let mut core = Colocator::new(Arc::new(testing::here()), STAY);
        let outputs = begin(&mut core, testing::start(2)).unwrap();
        assert!(matches!(outputs[..], [Output::Open(_)]));
        core
    };
    let spawns = [0, 1].map(|slot| testing::spawn(slot, &testing::start(2)));
    assert_eq!(starting().warden(Ok(())), spawns);

    // A warden that does not start is no end: with the workers another one is started, or their start fails.
    let warning = Output::Warn(format!("no warden was started for {}: no memory", STAY.job));
    let failed = || Err("no memory".to_owned());
    let outputs = starting().warden(failed());
    assert_eq!((&outputs[0], &outputs[1..]), (&warning, &spawns[..]));
    let mut core = Colocator::new(Arc::new(testing::here()), STAY);
    assert_eq!(core.warden(failed()), std::slice::from_ref(&warning));
    let outputs = begin(&mut core, testing::start(2)).unwrap();
    assert_eq!(outputs[1..], spawns);

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
    assert_eq!(core.warden(failed()), [warning, CLOSE[1].clone()]);
}

#[test]
fn a_process_that_can_not_be_started_is_reported_and_the_start_is_answered() {
    let now = Instant::now();
    let mut core = reserved();
    begin(&mut core, testing::start(2)).unwrap();
    core.worker(now, at(1), WorkerEvent::Spawned { pid: 101 });
    let failed = WorkerEvent::SpawnFailed {
        exit: Exit::Code(127),
        reason: "no such file".to_owned(),
    };
    let outputs = core.worker(now, at(0), failed);
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
