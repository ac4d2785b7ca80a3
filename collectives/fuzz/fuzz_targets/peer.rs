//! All that a peer sends, while this rank is in an operation. The peer ends the link then, so that the operation ends.

#![no_main]

use std::future::poll_fn;
use std::io::IoSlice;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kolo_collectives::header::{BEGINNING, HEADER};
use kolo_collectives::lane::{Connecting, MemoryLane};
use kolo_collectives::{CollectiveError, Communicator, Connector, Lane, LaneError, ReduceOp};
use kolo_transport::ids::{Generation, JobId, Rank};
use libfuzzer_sys::fuzz_target;
use tokio::runtime::{Builder, Runtime};

/// Set in the first byte: headers have a [beginning](BEGINNING) that is right.
const STEERED: u8 = 0x80;

/// Set in the first byte: frames have no payload, if they are steered.
const BARE: u8 = 0x40;

/// Rank 0 waits for links and makes none.
#[derive(Debug)]
struct NoConnector;

impl Connector for NoConnector {
    fn connect(&self, _peer: Rank) -> Connecting {
        Box::pin(async {
            Err(LaneError::Unreachable {
                reason: "there is no way".to_owned(),
            })
        })
    }
}

fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        Builder::new_multi_thread()
            .worker_threads(1)
            .enable_time()
            .build()
            .expect("the system gives a thread")
    })
}

fn work(comm: &Communicator, which: u8) -> Result<(), CollectiveError> {
    match which % 11 {
        0 => comm.all_reduce(&mut [1_i32; 100], ReduceOp::Sum),
        1 => comm.broadcast(&mut [1_u8; 9], Rank(1)),
        2 => comm.all_gather_varcount(&[1_f32; 3]).map(drop),
        3 => comm.gather_varcount(&[1_f64; 3], Rank(0)).map(drop),
        4 => comm.scatter_varcount(&[0_u8], &[0, 1], Rank(1)).map(drop),
        5 => comm.all_to_all_varcount(&[1_u8; 4], &[1, 3]).map(drop),
        6 => comm.broadcast_object(Some(5_u8), Rank(1)).map(drop),
        7 => comm.join().map(drop),
        8 => comm.trace().map(drop),
        9 => comm.all_gather_grouped(&[&[1_u16; 3][..], &[]]).map(drop),
        _ => comm.barrier(),
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((which, bytes)) = bytes.split_first() else {
        return;
    };
    let comm = Communicator::new(
        Rank(0),
        2,
        Generation(3),
        JobId(7),
        Arc::new(NoConnector),
        runtime().handle().clone(),
    )
    .expect("rank 0 is in a world of 2");
    comm.set_timeout(Duration::from_secs(20));
    let (mine, mut theirs) = MemoryLane::pair(1 << 20);
    comm.acceptor()
        .accept(Rank(1), Box::new(mine))
        .expect("rank 1 is in a world of 2");
    let mut frames = bytes.to_vec();
    if which & STEERED != 0 {
        // Every header has the right beginning and generation, and is of one of the first operations and parts: deeper, sooner.
        for header in frames.chunks_exact_mut(HEADER) {
            let (part, number) = (u64::from(header[32] % 3), u64::from(header[34] % 3));
            header[..BEGINNING.len()].copy_from_slice(&BEGINNING);
            header[16..24].copy_from_slice(&3_u64.to_le_bytes());
            header[24..32].fill(0);
            header[32..40].copy_from_slice(&(number << 16 | part).to_le_bytes());
            if which & BARE != 0 {
                // No payload.
                header[52..56].fill(0);
            }
        }
    }
    let mut rest = &frames[..];
    let mut cx = Context::from_waker(Waker::noop());
    while !rest.is_empty() {
        match theirs.poll_write(&mut cx, &[IoSlice::new(rest)]) {
            Poll::Ready(Ok(count)) => rest = &rest[count..],
            // The lane is full, or the other side is done with it.
            Poll::Ready(Err(_)) | Poll::Pending => break,
        }
    }
    drop(theirs);
    if let Err(CollectiveError::Deadline { .. }) = work(&comm, which & !(STEERED | BARE)) {
        panic!("an operation whose peer is gone waited until its deadline");
    }
    // Nothing may be left that keeps the runtime busy.
    runtime().block_on(poll_fn(|_| Poll::Ready(())));
});
