//! Which failure of a call is told as the first cause, and when.

use super::*;

/// What comes to a table of a call on all ranks but the last.
#[derive(Debug, Clone, Copy)]
enum Word {
    Returns(u32),
    /// An error of the rank's own.
    Fails(u32),
    /// An error that names another rank as its cause.
    Blames(u32, u32),
    /// An error of a rank whose worker is told to stop: its collectives are revoked then.
    Leaves(u32),
    /// The rank's own node says so.
    Lost(u32, Exit),
    /// As above, because the job is being stopped.
    Stopped(u32),
    /// The head says so.
    Reported(u32, Exit),
    /// The channel to the node is gone.
    Cut(u32),
    /// So much time has passed.
    At(Duration),
    /// The group ends with the loss of a rank.
    Ended(u32, Exit),
    /// The group ends with a rank that its node has stopped.
    EndedBy(u32),
}

use Word::{At, Blames, Cut, Ended, EndedBy, Fails, Leaves, Lost, Reported, Returns, Stopped};

fn stopped(rank: u32) -> RankFailure {
    let mut failure = failure(rank, Exit::Code(0));
    failure.reason = Some("the job was stopped: by an operator".to_owned());
    failure
}

/// It says that the job was stopped and why, and not which worker was the first to go.
fn check_stopped(error: &CallError) {
    let text = "`f` has no result: the job was stopped: by an operator";
    assert_eq!(error.to_string(), text);
    assert_eq!((error.kind(), error.rank()), (CallErrorKind::Ended, None));
}

fn say(table: &mut Table, now: Instant, call: CallId, word: Word) -> Effects<&'static str> {
    let end = |failure| End {
        reason: "a worker was lost".to_owned(),
        failure: Some(failure),
    };
    match word {
        Returns(rank) => returned(table, now, call, rank),
        Fails(rank) => failed(table, now, call, rank, None),
        Blames(rank, cause) => failed(table, now, call, rank, Some(cause)),
        Leaves(rank) => {
            let mut failure = CallFailure::new(FailureKind::Error, "no operation goes on");
            failure.stopping = true;
            let outcome = Outcome::Failed(failure);
            table.result(now, call, Rank(rank), outcome, Bytes::new())
        }
        Lost(rank, exit) => table.lost(now, failure(rank, exit), false),
        Stopped(rank) => table.lost(now, stopped(rank), true),
        Reported(rank, exit) => table.reported_lost(now, failure(rank, exit)),
        Cut(rank) => table.unreachable(now, vec![failure(rank, Exit::Unknown)]),
        At(after) => table.tick(now + after),
        Ended(rank, exit) => table.finish(end(failure(rank, exit))),
        EndedBy(rank) => table.finish(end(stopped(rank))),
    }
}

/// A rank that is the first cause, and its end. None is the stop.
type First = Option<(u32, Option<Exit>)>;

/// The last word ends the call with this first cause, and no other does.
#[test]
fn the_first_cause_is_told_and_as_early_as_it_is_known() {
    let (half, late, leave) = (ECHO_WAIT / 2, ECHO_WAIT, LEAVE_WAIT);
    let (killed, unknown) = (Exit::Signal(9), Exit::Unknown);
    let stop = None;
    let own = |rank| Some((rank, None));
    let lost = |rank, exit| Some((rank, Some(exit)));
    let cases: &[(u32, &[Word], First)] = &[
        // Of a rank that the call is not for, before and after its loss is known.
        (2, &[Blames(0, 2), Lost(2, killed)], lost(2, killed)),
        (2, &[Lost(2, killed), Blames(1, 2)], lost(2, killed)),
        // Of a rank that is well, and of itself.
        (2, &[Returns(1), Blames(0, 1), At(leave)], own(0)),
        (2, &[Blames(0, 0)], own(0)),
        // The head's word waits for results; that of the rank's own node is final.
        (2, &[Reported(1, killed), At(SUSPECT_WAIT)], lost(1, killed)),
        (2, &[Reported(1, unknown), Lost(1, killed)], lost(1, killed)),
        // A channel that ends waits for the head's word.
        (2, &[Cut(1), Reported(1, killed)], lost(1, killed)),
        (2, &[Reported(1, killed), Cut(1)], lost(1, killed)),
        (2, &[Cut(1), At(half), At(late)], lost(1, unknown)),
        // A worker that is being stopped is not the first cause.
        (2, &[Stopped(0), Ended(2, killed)], lost(2, killed)),
        (2, &[Stopped(0), Lost(1, killed)], lost(1, killed)),
        (3, &[Stopped(1), Fails(2)], own(2)),
        (2, &[Leaves(1), Fails(0)], own(0)),
        (2, &[Leaves(1), At(late)], own(1)),
        // An echo of one is the stop.
        (3, &[Blames(2, 1), Stopped(1), Blames(0, 2), At(late)], stop),
        (3, &[Leaves(1), Blames(0, 1), Stopped(1), At(late)], stop),
        (2, &[Stopped(1), EndedBy(1)], stop),
        // The worker closed its links before the other had all that it needed; and in a circle.
        (2, &[Returns(1), Blames(0, 1), Stopped(1), At(leave)], stop),
        (
            2,
            &[
                Blames(0, 1),
                Blames(1, 0),
                Stopped(1),
                Stopped(0),
                At(leave),
            ],
            stop,
        ),
    ];
    for (called, words, expected) in cases {
        let (mut table, now) = table(called + 1);
        let call = whole(&mut table, *called, "w");
        let (last, before) = words.split_last().unwrap();
        for word in before {
            let effects = say(&mut table, now, call, *word);
            assert_eq!(effects, Effects::default(), "{word:?} of {words:?}");
        }
        let told = error(say(&mut table, now, call, *last), "w");
        match expected {
            Some((rank, exit)) => {
                let told = (told.rank(), told.exit());
                assert_eq!(told, (Some(Rank(*rank)), *exit), "{words:?}");
            }
            None => check_stopped(&told),
        }
    }
}

#[test]
fn later_calls_on_a_worker_that_was_stopped_are_told_of_the_stop() {
    let (mut table, now) = table(3);
    nothing(&table.lost(now, stopped(1), true));
    let mut call_on =
        |list: &[u32], waiters| send(&mut table, ranks(list.iter().copied()), waiters);
    check_stopped(&call_on(&[0, 1], Waiters::Whole("w")).unwrap_err());
    let mut taken = call_on(&[0, 1], one_each(&["a", "b"])).unwrap();
    assert_eq!(taken.send_to, ranks([0]));
    check_stopped(&taken.completions.remove(0).result.unwrap_err());
    assert!(call_on(&[0, 2], Waiters::Whole("w")).is_ok());
}

#[test]
fn each_waiter_and_a_deadline_are_told_of_a_stop() {
    for leaves_first in [false, true] {
        let (mut table, now) = table(2);
        let call = each(&mut table, &["a", "b"]);
        if leaves_first {
            let first = returned(&mut table, now, call, 1);
            assert_eq!(first.completions[0].waiter, "b");
        }
        nothing(&failed(&mut table, now, call, 0, Some(1)));
        nothing(&table.lost(now, stopped(1), true));
        let told = table.tick(now + ECHO_WAIT).completions;
        assert_eq!(told.len(), if leaves_first { 1 } else { 2 });
        for completion in told {
            check_stopped(&completion.result.unwrap_err());
        }
    }
    let (mut table, now) = table(2);
    let after = ECHO_WAIT / 2;
    send_within(&mut table, now, after, Waiters::Whole("w"));
    nothing(&table.lost(now, stopped(1), true));
    check_stopped(&error(table.tick(now + after), "w"));
}

#[test]
fn a_stop_without_a_reason_and_one_by_the_driver_itself() {
    let mut silent = failure(0, Exit::Unknown);
    silent.reason = Some("its end was not seen".to_owned());
    for (closed, failure, why) in [
        (false, silent, "the job was stopped"),
        (true, stopped(0), "the group was shut down"),
    ] {
        let (mut table, now) = table(1);
        whole(&mut table, 1, "a");
        if closed {
            table.close(why);
        }
        nothing(&table.lost(now, failure, true));
        let text = error(table.tick(now + ECHO_WAIT), "a").to_string();
        assert_eq!(text, format!("`f` has no result: {why}"));
    }
}
