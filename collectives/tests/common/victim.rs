//! A rank whose peer does not keep to the protocol.

use std::future::poll_fn;
use std::io::IoSlice;
use std::sync::Arc;

use kolo_collectives::cause::Cause;
use kolo_collectives::header::{Data, HEADER, Header};
use kolo_collectives::lane::{Connecting, MemoryLane};
use kolo_collectives::operation::{Operation, OperationKind, Tag};
use kolo_collectives::schedule::Algorithm;
use kolo_collectives::{Communicator, Connector, DType, Lane, LaneError, ReduceOp};
use kolo_transport::ids::Rank;
use tokio::runtime::Runtime;

use super::{GENERATION, JOB, LONG};

/// Rank 0 waits for links and makes none.
#[derive(Debug)]
pub(crate) struct NoConnector;

impl Connector for NoConnector {
    fn connect(&self, peer: Rank) -> Connecting {
        Box::pin(async move {
            Err(LaneError::Unreachable {
                reason: format!("there is no way to rank {peer}"),
            })
        })
    }
}

/// One of two ranks, without a link.
pub(crate) fn lonely(runtime: &Runtime, rank: u32) -> Communicator {
    let (connector, handle) = (Arc::new(NoConnector), runtime.handle().clone());
    Communicator::new(Rank(rank), 2, GENERATION, JOB, connector, handle)
        .unwrap()
        .with_timeout(LONG)
}

/// One of two ranks, and the other end of its link.
pub(crate) fn victim(runtime: &Runtime, rank: u32) -> (Communicator, MemoryLane) {
    let comm = lonely(runtime, rank);
    let (mine, theirs) = MemoryLane::pair(4 << 20);
    comm.acceptor()
        .accept(Rank(1 - rank), Box::new(mine))
        .unwrap();
    (comm, theirs)
}

pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
}

pub(crate) fn write(runtime: &Runtime, lane: &mut MemoryLane, mut bytes: &[u8]) {
    runtime.block_on(async {
        while !bytes.is_empty() {
            let count = poll_fn(|cx| lane.poll_write(cx, &[IoSlice::new(bytes)])).await;
            bytes = &bytes[count.unwrap()..];
        }
    });
}

pub(crate) const COUNT: u64 = 100;

/// The right header of the first frame for rank 0's all-reduce of 100 `i32`.
pub(crate) fn right() -> Data {
    Data {
        generation: GENERATION,
        tag: Tag::default(),
        operation: Operation {
            reduce: Some(ReduceOp::Sum),
            algorithm: Algorithm::Flat,
            ..Operation::new(OperationKind::AllReduce, Some(DType::I32), COUNT)
        },
        step: 0,
        offset: 0,
        length: 4 * COUNT as u32,
    }
}

pub(crate) fn frame(header: Header, payload: &[u8]) -> Vec<u8> {
    let mut bytes = header.encode().to_vec();
    bytes.extend_from_slice(payload);
    bytes
}

/// What a rank says about an operation: as a rule why it gives up.
pub(crate) fn notice(tag: Tag, cause: &Cause) -> Vec<u8> {
    let text = cause.encode();
    let header = Header::AbortOperation {
        generation: GENERATION,
        tag,
        length: text.len() as u32,
    };
    frame(header, &text)
}

/// Reads a frame.
pub(crate) fn read_frame(runtime: &Runtime, lane: &mut MemoryLane) -> (Header, Vec<u8>) {
    let mut header = [0; HEADER];
    read(runtime, lane, &mut header);
    let header = Header::parse(&header).unwrap();
    let mut payload = vec![0; header.length()];
    read(runtime, lane, &mut payload);
    (header, payload)
}

/// Reads a frame, and what it says about which operation, if it does.
pub(crate) fn read_notice(runtime: &Runtime, lane: &mut MemoryLane) -> Option<(Tag, Cause)> {
    let (header, text) = read_frame(runtime, lane);
    match header {
        Header::AbortOperation { tag, .. } => Cause::parse(&text).map(|cause| (tag, cause)),
        _ => None,
    }
}

fn read(runtime: &Runtime, lane: &mut MemoryLane, into: &mut [u8]) {
    runtime.block_on(async {
        let mut done = 0;
        while done < into.len() {
            let count = poll_fn(|cx| lane.poll_read(cx, &mut into[done..]));
            let count = count.await.unwrap();
            assert_ne!(count, 0, "the link has ended");
            done += count;
        }
    });
}
