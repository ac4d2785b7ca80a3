//! What tests of a worker share: the node's end of its call socket.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use bytes::BytesMut;
use kolo_transport::frame::{self, Decoder, Limits};
use kolo_transport::ids::{CallId, Generation, ObjectId};
use kolo_transport::wire::{CallFailure, CallOp, FailureKind, Outcome, WorkerCall, WorkerResult};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Executable, Function, codec};

/// Makes calls by hand.
pub(super) struct Caller {
    pub(super) socket: UnixStream,
    decoder: Decoder,
    /// The number of the last call.
    pub(super) last: u64,
    /// The generation of further calls.
    pub(super) generation: Generation,
    /// The later generation in which the last call has ended, or 0.
    pub(super) ended_in: Generation,
}

impl Caller {
    pub(super) fn new(socket: UnixStream) -> Self {
        socket
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        Self {
            socket,
            decoder: Decoder::new(Limits::CALLS),
            last: 0,
            generation: Generation(1),
            ended_in: Generation(0),
        }
    }

    pub(super) fn frame(
        &mut self,
        op: CallOp,
        deadline_ms: Option<u64>,
        body: &[u8],
    ) -> (CallId, BytesMut) {
        self.last += 1;
        let call = CallId(self.last);
        let head = WorkerCall {
            call,
            generation: self.generation,
            deadline_ms,
            op,
        };
        let mut out = BytesMut::new();
        frame::encode(&mut out, &head, body).unwrap();
        (call, out)
    }

    pub(super) fn send(&mut self, op: CallOp, body: &[u8]) -> CallId {
        let (call, frame) = self.frame(op, None, body);
        self.socket.write_all(&frame).unwrap();
        call
    }

    /// Sends a call of a function with a deadline.
    pub(super) fn send_within(&mut self, name: &str, deadline_ms: u64, args: &impl Serialize) {
        let args = codec::encode(args).unwrap();
        let (_, frame) = self.frame(function(name), Some(deadline_ms), &args);
        self.socket.write_all(&frame).unwrap();
    }

    pub(super) fn receive(&mut self) -> (CallId, Result<Vec<u8>, CallFailure>) {
        loop {
            if let Some(frame) = self.decoder.next::<WorkerResult>().unwrap() {
                let result = match frame.head.outcome {
                    Outcome::Returned => Ok(frame.body.to_vec()),
                    Outcome::Failed(failure) => Err(failure),
                };
                self.ended_in = frame.head.generation;
                return (frame.head.call, result);
            }
            let mut chunk = [0; 4096];
            let count = self.socket.read(&mut chunk).unwrap();
            assert_ne!(count, 0, "the worker closed the socket");
            self.decoder.buffer().extend_from_slice(&chunk[..count]);
        }
    }

    pub(super) fn call<T: DeserializeOwned>(
        &mut self,
        op: CallOp,
        args: &impl Serialize,
    ) -> Result<T, CallFailure> {
        let sent = self.send(op, &codec::encode(args).unwrap());
        let (call, result) = self.receive();
        assert_eq!(call, sent);
        result.map(|body| codec::decode(&body).unwrap())
    }

    pub(super) fn run<F: Function>(
        &mut self,
        _: impl FnOnce() -> F,
        args: F::Args,
    ) -> Result<F::Output, CallFailure>
    where
        F::Args: Serialize,
        F::Output: DeserializeOwned,
    {
        self.call(function(F::NAME), &args)
    }

    pub(super) fn create<E: Executable>(
        &mut self,
        object: u64,
        args: E::Args,
    ) -> Result<(), CallFailure>
    where
        E::Args: Serialize,
    {
        let op = CallOp::Create {
            object: ObjectId(object),
            class: E::NAME.to_owned(),
        };
        self.call(op, &args)
    }

    pub(super) fn method<T: DeserializeOwned>(
        &mut self,
        object: u64,
        name: &str,
        args: &impl Serialize,
    ) -> Result<T, CallFailure> {
        self.call(method(object, name), args)
    }
}

/// A failure is of this kind, and has this message and nothing else.
pub(super) fn is(failure: &CallFailure, kind: FailureKind, message: &str) {
    assert_eq!(*failure, CallFailure::new(kind, message));
}

/// A failure has this in its message.
pub(super) fn says(failure: &CallFailure, part: &str) {
    assert!(failure.message.contains(part), "{failure:?}");
}

pub(super) fn function(name: &str) -> CallOp {
    CallOp::Function {
        name: name.to_owned(),
    }
}

pub(super) fn method(object: u64, name: &str) -> CallOp {
    CallOp::Method {
        object: ObjectId(object),
        name: name.to_owned(),
    }
}
