//! Functions, arguments, names.

use kolo_transport::ids::{CallId, Generation, ObjectId};
use kolo_transport::wire::{CallFailure, CallOp, FailureKind, WorkerCall};

use super::Worker;
use super::caller::{function, method, says};
use super::user::*;
use crate::registry::{Registry, RegistryError};
use crate::worker::dispatch::CallHead;
use crate::{Function, codec};

#[test]
fn the_borrowed_head_is_the_wire_message() {
    let object = ObjectId(3);
    for (op, deadline_ms) in [
        (function("a::b"), None),
        (
            CallOp::Create {
                object,
                class: "C".to_owned(),
            },
            Some(5),
        ),
        (method(3, "m"), None),
        (CallOp::Drop { object }, Some(u64::MAX)),
    ] {
        let call = WorkerCall {
            call: CallId(9),
            generation: Generation(4),
            deadline_ms,
            op,
        };
        let bytes = rmp_serde::to_vec_named(&call).unwrap();
        let head = CallHead::decode(&bytes).unwrap();
        let same: String = format!("{head:?}").replace("CallHead", "WorkerCall");
        assert_eq!(same, format!("{call:?}"));
    }
    assert!(
        CallHead::decode(b"\xc1")
            .unwrap_err()
            .to_string()
            .contains("WorkerCall")
    );
}

#[test]
fn functions_run_and_give_their_results() {
    let mut worker = Worker::start();
    assert_eq!(
        worker.run(whoami, ("hello".to_owned(),)).unwrap(),
        "hello from rank 2 of 4"
    );
    assert_eq!(worker.run(divide, (7, 2)).unwrap(), 3);
    assert_eq!(worker.run(later, (1,)).unwrap(), 2);
    assert_eq!(worker.run(formats, (false,)), Ok(()));
    // And on the spot, as the plain functions that they are.
    assert_eq!(divide::call(6, 2), Ok(3));
    assert!(
        divide::NAME.ends_with("::worker::tests::user::divide"),
        "{}",
        divide::NAME
    );
}

#[test]
fn errors_come_with_their_text_and_sources() {
    let mut worker = Worker::start();
    let failure = worker.run(divide, (1, 0)).unwrap_err();
    assert_eq!(
        failure,
        CallFailure::new(FailureKind::Error, "1 can't be divided by 0")
    );
    let failure = worker.run(parse, ("x".to_owned(),)).unwrap_err();
    assert_eq!(
        failure.message,
        "the reading failed: invalid digit found in string"
    );
    let failure = worker.run(ours, ("x".to_owned(),)).unwrap_err();
    assert_eq!(failure.message, "invalid digit found in string");
    let asked = std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0");
    if std::env::var_os("RUST_LIB_BACKTRACE").is_none() {
        assert_eq!(
            failure
                .backtrace
                .is_some_and(|frames| frames.contains("ours")),
            asked
        );
    }
    assert!(worker.run(formats, (true,)).is_err());
    let failure = worker.run(stays, ()).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Result);
    assert!(
        failure.message.contains("Refuses") && failure.message.contains("this one stays"),
        "{}",
        failure.message
    );
    assert_eq!(worker.run(divide, (4, 2)).unwrap(), 2);
}

#[test]
fn arguments_that_do_not_decode_name_the_function_the_argument_and_its_type() {
    let mut worker = Worker::start();
    let failure = worker
        .call::<()>(function(divide::NAME), &(1, "two"))
        .unwrap_err();
    assert_eq!(failure.kind, FailureKind::Arguments);
    for part in [
        "worker::tests::user::divide(number: u32, by: u32) -> u32",
        "`by: u32`",
        "found a string",
    ] {
        says(&failure, part);
    }
    let failure = worker
        .call::<()>(function(divide::NAME), &(1,))
        .unwrap_err();
    says(&failure, "expected 2, found 1");
    let failure = worker
        .call::<()>(function(divide::NAME), &"text")
        .unwrap_err();
    says(&failure, "expected a list of 2");
    let mut body = codec::encode(&(1, 2)).unwrap();
    body.push(0);
    worker.send(function(divide::NAME), &body);
    assert!(
        worker
            .receive()
            .1
            .unwrap_err()
            .message
            .contains("bytes are left over")
    );
    worker.send(function(divide::NAME), &body[..2]);
    assert_eq!(worker.receive().1.unwrap_err().kind, FailureKind::Arguments);
    worker.create::<Counter>(1, (0,)).unwrap();
    let failure = worker.method::<()>(1, "add", &("x",)).unwrap_err();
    for part in ["worker::tests::user::Counter::add(", "`arg0: (u64, u64)`"] {
        says(&failure, part);
    }
}

#[test]
fn unknown_names_suggest_near_ones() {
    let mut worker = Worker::start();
    let failure = worker
        .call::<()>(function("some::where::divde"), &())
        .unwrap_err();
    assert_eq!(failure.kind, FailureKind::UnknownTarget);
    assert!(
        failure
            .message
            .contains("no function `some::where::divde`; did you mean `")
            && failure.message.contains("worker::tests::user::divide`?"),
        "{}",
        failure.message
    );
    let op = CallOp::Create {
        object: ObjectId(1),
        class: "Xylophone".to_owned(),
    };
    let failure = worker.call::<()>(op, &()).unwrap_err();
    assert_eq!(failure.kind, FailureKind::UnknownTarget);
    says(&failure, "no executable `Xylophone` (it has ");
    let failure = worker.method::<()>(1, "add", &()).unwrap_err();
    assert_eq!(failure.kind, FailureKind::UnknownTarget);
    says(&failure, "no executable 1 on this rank");
    worker.create::<Counter>(1, (0,)).unwrap();
    let failure = worker.method::<()>(1, "ad", &()).unwrap_err();
    assert_eq!(failure.kind, FailureKind::UnknownTarget);
    assert!(
        failure
            .message
            .ends_with("Counter` has no method `ad`; did you mean `add`?"),
        "{}",
        failure.message
    );
    // What is marked or has no `self` is not there, but here.
    let counter = Counter::new(&worker.context, 0).unwrap();
    assert_eq!((*counter.local(), Counter::helper(4)), (2, 8));
    for given in ["local", "helper", "new"] {
        let failure = worker.method::<()>(1, given, &()).unwrap_err();
        assert_eq!(failure.kind, FailureKind::UnknownTarget);
        says(&failure, &format!("no method `{given}`"));
    }
}

#[test]
fn duplicates_are_an_error_that_names_both_places() {
    let one = *Registry::get().unwrap().function(divide::NAME).unwrap();
    let two = *Registry::get().unwrap().function(parse::NAME).unwrap();
    let twice: &'static [_] = Box::leak(Box::new([one, two, one]));
    let error = Registry::new(twice, &[]).unwrap_err();
    let RegistryError::Duplicate {
        kind,
        name,
        first,
        second,
    } = &error;
    assert_eq!((*kind, name.as_str()), ("function", one.name()));
    assert!(
        first.contains("user.rs:") && second.contains("user.rs:"),
        "{error}"
    );
    // The order of the linker is not part of the digest; names and signatures are.
    let forth: &'static [_] = Box::leak(Box::new([one, two]));
    let back: &'static [_] = Box::leak(Box::new([two, one]));
    let less: &'static [_] = Box::leak(Box::new([one]));
    let digest = |entries| Registry::new(entries, &[]).unwrap().digest();
    assert_eq!(digest(forth), digest(back));
    assert_ne!(digest(forth), digest(less));
}
