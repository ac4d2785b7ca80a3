//! Deadlines, cancellation, the end of the loop.

use std::io::{Read, Write};
use std::sync::atomic::Ordering;

use bytes::BytesMut;
use kolo_transport::frame;
use kolo_transport::ids::CallId;
use kolo_transport::wire::FailureKind;

use super::Worker;
use super::caller::{function, is, method};
use super::user::*;
use crate::worker::calls::LoopEnd;
use crate::{Function, codec};

#[test]
fn deadlines_are_kept_before_the_start_and_at_await_points() {
    let mut worker = Worker::start();
    worker.send_within(divide::NAME, 0, &(1, 1));
    let failure = worker.receive().1.unwrap_err();
    is(
        &failure,
        FailureKind::Deadline,
        "the call's deadline passed before it began",
    );

    let (seen, _go) = arrange(1);
    worker.send_within(never_ends::NAME, 50, &(1,));
    let failure = worker.receive().1.unwrap_err();
    is(
        &failure,
        FailureKind::Deadline,
        "the call's deadline passed at an await point",
    );
    assert_eq!(
        (seen.recv().unwrap(), seen.recv().unwrap()),
        ("begun", "dropped")
    );

    // One that is far away, or beyond the end of the clock, is in nobody's way.
    for far in [3_600_000, u64::MAX] {
        worker.send_within(later::NAME, far, &(1,));
        assert_eq!(codec::decode::<u32>(&worker.receive().1.unwrap()), Ok(2));
    }
}

#[test]
fn cancelled_calls_do_not_begin_and_end_at_await_points() {
    let mut worker = Worker::start();
    worker.context.running().cancel(CallId(1));
    let failure = worker.run(divide, (1, 1)).unwrap_err();
    is(
        &failure,
        FailureKind::Cancelled,
        "the call was cancelled before it began",
    );

    let (seen, _go) = arrange(2);
    let call = worker.send(function(never_ends::NAME), &codec::encode(&(2,)).unwrap());
    assert_eq!(seen.recv().unwrap(), "begun");
    worker.context.running().cancel(call);
    let failure = worker.receive().1.unwrap_err();
    is(
        &failure,
        FailureKind::Cancelled,
        "the call was cancelled at an await point",
    );
    assert_eq!(seen.recv().unwrap(), "dropped");

    // A method that was dropped at an await point leaves a usable executable.
    worker.create::<Counter>(1, (0,)).unwrap();
    let (seen, _go) = arrange(3);
    let call = worker.send(method(1, "slowly"), &codec::encode(&(3,)).unwrap());
    assert_eq!(seen.recv().unwrap(), "begun");
    worker.context.running().cancel(call);
    assert_eq!(worker.receive().1.unwrap_err().kind, FailureKind::Cancelled);
    assert_eq!(worker.method::<u64>(1, "add", &((0, 0),)).unwrap(), 2);

    // Synchronous code sees it and decides.
    let (seen, go) = arrange(4);
    let call = worker.send(function(looks::NAME), &codec::encode(&(4,)).unwrap());
    assert_eq!(seen.recv().unwrap(), "begun");
    worker.context.running().cancel(call);
    go.send(()).unwrap();
    assert_eq!(
        codec::decode::<bool>(&worker.receive().1.unwrap()),
        Ok(true)
    );
    assert_eq!(worker.run(divide, (1, 1)).unwrap(), 1);
}

#[test]
fn a_stop_lets_the_running_call_end_and_begins_no_other() {
    let mut worker = Worker::start();
    let (seen, go) = arrange(6);
    let (first, mut both) =
        worker.frame(function(blocks::NAME), None, &codec::encode(&(6,)).unwrap());
    let (_, frame) = worker.frame(
        function(divide::NAME),
        None,
        &codec::encode(&(1, 1)).unwrap(),
    );
    both.extend_from_slice(&frame);
    worker.socket.write_all(&both).unwrap();
    assert_eq!(seen.recv().unwrap(), "begun");
    worker.stopping.store(true, Ordering::Release);
    go.send(()).unwrap();
    assert_eq!(worker.receive().0, first);
    assert_eq!(
        worker.thread.take().unwrap().join().unwrap().unwrap(),
        LoopEnd::Stopped
    );
    let mut rest = Vec::new();
    worker.socket.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
}

#[test]
fn what_is_no_call_ends_the_loop_with_an_error() {
    let mut worker = Worker::start();
    let mut out = BytesMut::new();
    frame::encode(&mut out, &"no call", b"").unwrap();
    worker.socket.write_all(&out).unwrap();
    let error = worker.thread.take().unwrap().join().unwrap().unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("the call socket brought what is no call: "),
        "{error}"
    );

    let mut worker = Worker::start();
    worker.socket.write_all(&[0, 0, 0]).unwrap();
    let error = worker.end().unwrap_err();
    assert!(error.to_string().contains("ended after 3 bytes"), "{error}");
}
