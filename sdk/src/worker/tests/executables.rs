//! State, panics, drops.

use std::sync::mpsc::channel;

use kolo_transport::ids::ObjectId;
use kolo_transport::wire::{CallOp, FailureKind};

use super::Worker;
use super::caller::says;
use super::user::*;
use crate::worker::calls::LoopEnd;

#[test]
fn a_panic_fails_the_call_and_poisons_its_executable_until_it_is_created_again() {
    let mut worker = Worker::start();
    let failure = worker.run(breaks, ("as asked".to_owned(),)).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Panic);
    assert!(
        failure.message.starts_with("as asked ("),
        "{}",
        failure.message
    );
    assert!(failure.backtrace.unwrap().contains("breaks"));
    worker.create::<Counter>(1, (0,)).unwrap();
    worker.create::<Counter>(2, (0,)).unwrap();
    let failure = worker.method::<()>(1, "breaks", &()).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Panic);
    let failure = worker.method::<()>(1, "add", &((1, 1),)).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Poisoned);
    for part in [
        "worker::tests::user::Counter",
        "`breaks` panicked in call",
        "half-way",
        "create it again",
    ] {
        says(&failure, part);
    }
    assert_eq!(worker.method::<u64>(2, "add", &((1, 1),)).unwrap(), 4);
    worker.create::<Counter>(1, (5,)).unwrap();
    assert_eq!(worker.method::<u64>(1, "add", &((1, 1),)).unwrap(), 9);
}

#[test]
fn dropped_executables_are_gone_and_the_rest_goes_in_order_at_the_end() {
    let mut worker = Worker::start();
    let (first, _go) = arrange(101);
    worker.create::<Counter>(1, (0,)).unwrap();
    worker
        .method::<()>(1, "tell_when_dropped", &(101, "first"))
        .unwrap();
    let object = ObjectId(1);
    worker.call::<()>(CallOp::Drop { object }, &()).unwrap();
    assert_eq!(first.recv().unwrap(), "first");
    // Again, or never created: nothing to do.
    worker.call::<()>(CallOp::Drop { object }, &()).unwrap();
    assert_eq!(
        worker.method::<()>(1, "fails", &()).unwrap_err().kind,
        FailureKind::UnknownTarget
    );

    let (here, dropped) = channel();
    let names: Vec<&'static str> = (2..20)
        .map(|object| &*format!("object {object}").leak())
        .collect();
    for (object, name) in (2..).zip(&names) {
        let number = 1000 + object as u32;
        let (_go, wait) = channel();
        MEETINGS.lock().unwrap().push((
            number,
            Meeting {
                here: here.clone(),
                wait,
            },
        ));
        worker.create::<Counter>(object, (0,)).unwrap();
        let args = (number, *name);
        worker
            .method::<()>(object, "tell_when_dropped", &args)
            .unwrap();
    }
    assert_eq!(worker.end().unwrap(), LoopEnd::Closed);
    drop(here);
    assert_eq!(dropped.iter().collect::<Vec<_>>(), names);
}
