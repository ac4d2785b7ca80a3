//! Which results are written together.

use std::io::Write;
use std::sync::atomic::Ordering;

use bytes::BytesMut;
use kolo_transport::ids::CallId;

use super::Worker;
use super::caller::function;
use super::user::*;
use crate::{Function, codec};

#[test]
fn short_calls_that_come_together_are_answered_together() {
    let mut worker = Worker::start();
    let body = codec::encode(&(6, 3)).unwrap();
    let mut batch = BytesMut::new();
    for _ in 0..500 {
        let (_, frame) = worker.frame(function(divide::NAME), None, &body);
        batch.extend_from_slice(&frame);
    }
    worker.socket.write_all(&batch).unwrap();
    for call in 1..=500 {
        let (id, result) = worker.receive();
        assert_eq!(id, CallId(call));
        assert_eq!(codec::decode::<u32>(&result.unwrap()), Ok(2));
    }
    let writes = worker.writes.load(Ordering::SeqCst);
    assert!(writes < 400, "{writes} writes for 500 results");
}

#[test]
fn a_long_call_does_not_keep_back_the_results_before_it() {
    let mut worker = Worker::start();
    for round in 0..5 {
        let number = 500 + round;
        let (seen, go) = arrange(number);
        let (first, mut both) = worker.frame(
            function(divide::NAME),
            None,
            &codec::encode(&(6, 3)).unwrap(),
        );
        let (second, frame) = worker.frame(
            function(blocks::NAME),
            None,
            &codec::encode(&(number,)).unwrap(),
        );
        both.extend_from_slice(&frame);
        worker.socket.write_all(&both).unwrap();
        // The second call waits for what happens after the first one's result.
        assert_eq!(worker.receive().0, first);
        assert_eq!(seen.recv().unwrap(), "begun");
        go.send(()).unwrap();
        assert_eq!(worker.receive().0, second);
    }
}
