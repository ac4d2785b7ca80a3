//! What is to be run, and what comes of it.

use std::time::Duration;

use bytes::Bytes;
use kolo_transport::frame::Limits;
use kolo_transport::wire::CallOp;

use super::failure::CallError;
use crate::codec::CodecError;

/// Longest arguments and results, in bytes.
pub(crate) const MAX_BODY: usize = Limits::CALLS.body as usize;

/// What a waiting future gets: one body for each of its ranks.
pub(crate) type Bodies = Result<Vec<Bytes>, CallError>;

/// What is to be run.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    /// For error messages.
    pub(crate) name: String,
    pub(crate) op: CallOp,
    pub(crate) body: Bytes,
    pub(crate) deadline: Option<Duration>,
}

impl Request {
    /// A call with these arguments, as far as they could be encoded.
    pub(crate) fn new(
        name: String,
        op: CallOp,
        args: Result<Vec<u8>, CodecError>,
    ) -> Result<Self, CallError> {
        match args {
            Ok(body) => Ok(Self {
                name,
                op,
                body: Bytes::from(body),
                deadline: None,
            }),
            Err(reason) => Err(CallError::Arguments { call: name, reason }),
        }
    }

    /// Whether it can be sent at all.
    pub(crate) fn check(&self) -> Result<(), CallError> {
        if self.body.len() <= MAX_BODY {
            return Ok(());
        }
        Err(CallError::Arguments {
            call: self.name.clone(),
            reason: CodecError::TooLong {
                type_name: "arguments",
                limit: MAX_BODY,
            },
        })
    }
}
