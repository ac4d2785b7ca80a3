//! Groups on a head and nodes whose every word a test decides.

mod calls;
mod elastic;
mod ends;
mod fake;
mod start;
mod values;

use std::time::Duration;

use fake::{Counter, Fake, FakeJob, add, settle, soon};
use kolo_transport::ids::{CallId, Generation, Incarnation, Rank, Slot};
use kolo_transport::wire::{
    CallFailure, CallFrame, CallOp, CallReply, Exit, FailureKind, HeadReply, JobEvent, JobState,
    NodeReply, NodeRequest, Placement, RankFailure, Refusal, RefusalKind, SubmitFrame,
};

use super::*;
use crate::error::{CallErrorKind, StartError};

fn failure(job: &FakeJob, rank: u32, exit: Exit) -> RankFailure {
    RankFailure {
        node: job.node_of(Rank(rank)),
        stderr_tail: vec!["last words".to_owned()],
        ..crate::call::test_failure(rank, exit)
    }
}
