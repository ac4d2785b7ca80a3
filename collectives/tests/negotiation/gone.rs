//! A coordinator that is gone in the middle of what it says, played by the test.

use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use kolo_collectives::header::Header;
use kolo_collectives::lane::{Connecting, MemoryLane, Requesting};
use kolo_collectives::schedule::{Algorithm, Tuning};
use kolo_collectives::{Acceptor, Connector, GroupId, Lane, LaneError};

use super::common::victim::{COUNT, frame, read_frame, right, runtime, write};
use super::common::{GENERATION, JOB};
use super::*;

/// A lane that may be a network's.
#[derive(Debug)]
struct Wire(MemoryLane, bool);

impl Lane for Wire {
    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize, LaneError>> {
        self.0.poll_write(cx, parts)
    }

    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut [u8],
    ) -> Poll<Result<usize, LaneError>> {
        self.0.poll_read(cx, into)
    }

    fn kind(&self) -> &'static str {
        "wire"
    }

    fn end_is_final(&self) -> bool {
        self.1
    }
}

/// A link to the coordinator: of which rank, in which group.
type ToZero = (u32, GroupId, MemoryLane);

/// The ranks but for the first, and how their links are made.
#[derive(Debug)]
struct Ranks {
    acceptors: Mutex<Vec<Acceptor>>,
    to_zero: Sender<ToZero>,
    is_final: bool,
    is_zero_gone: AtomicBool,
}

#[derive(Debug)]
struct Of(u32, Arc<Ranks>);

impl Of {
    fn acceptor(&self, rank: Rank) -> Acceptor {
        self.1.acceptors.lock().unwrap()[rank.index() - 1].clone()
    }
}

impl Connector for Of {
    fn connect(&self, peer: Rank) -> Connecting {
        self.connect_group(peer, GroupId::WORLD)
    }

    fn connect_group(&self, peer: Rank, group: GroupId) -> Connecting {
        let (rank, ranks) = (self.0, Arc::clone(&self.1));
        let acceptor = (peer.0 > 0).then(|| self.acceptor(peer));
        Box::pin(async move {
            let (mine, theirs) = MemoryLane::pair(MemoryLane::CAPACITY);
            if let Some(acceptor) = acceptor {
                acceptor.accept_group(group, Rank(rank), Box::new(Wire(theirs, ranks.is_final)))?;
            } else if ranks.is_zero_gone.load(Ordering::SeqCst) {
                let reason = "nobody listens there".to_owned();
                return Err(LaneError::Unreachable { reason });
            } else {
                ranks.to_zero.send((rank, group, theirs)).unwrap();
            }
            Ok(Box::new(Wire(mine, ranks.is_final)) as Box<dyn Lane>)
        })
    }

    fn request(&self, peer: Rank, group: GroupId) -> Option<Requesting> {
        let (rank, acceptor) = (Rank(self.0), self.acceptor(peer));
        Some(Box::pin(async move { acceptor.requested(group, rank) }))
    }
}

/// Rank 0 tells rank 1 that an operation runs, does its part with that one, and is gone before the others hear of it. Rank 1 waits for
/// those, which know what has become of rank 0.
#[test]
fn a_rank_0_that_is_gone_before_all_have_heard_what_runs_is_named_by_those_that_have() {
    at_once([true, false], |is_final| {
        let runtime = runtime();
        let (to_zero, lanes) = channel();
        let ranks = Arc::new(Ranks {
            acceptors: Mutex::default(),
            to_zero,
            is_final,
            is_zero_gone: AtomicBool::new(false),
        });
        let members = [1, 2, 3].map(|rank| {
            let (of, handle) = (Of(rank, Arc::clone(&ranks)), runtime.handle().clone());
            let comm = Communicator::new(Rank(rank), 4, GENERATION, JOB, Arc::new(of), handle);
            comm.unwrap().with_timeout(LONG / 4)
        });
        *ranks.acceptors.lock().unwrap() = members.iter().map(Communicator::acceptor).collect();
        let begun = Instant::now();
        let waiting = members.each_ref().map(|comm| {
            // Ranks 0 and 1 meet first, then each of them another one.
            comm.set_tuning(Tuning {
                force: Some(Algorithm::Doubling),
                ..Tuning::default()
            });
            let data = vec![1_i32; COUNT as usize];
            comm.named("w").all_reduce(data, ReduceOp::Sum)
        });
        let mut for_names: Vec<ToZero> =
            (0..3).map(|_| lanes.recv_timeout(LONG).unwrap()).collect();
        let to_one = for_names.iter_mut().find(|(rank, ..)| *rank == 1).unwrap();
        // MessagePack: {"Run": [call, number, heard, follows, ["w"]]}, with its length.
        write(
            &runtime,
            &mut to_one.2,
            b"\x0d\0\0\0\x81\xa3Run\x95\0\0\x7f\xc0\x91\xa1w",
        );
        let (_, _, mut one) = of_rank_1(&lanes);
        let mut header = right();
        header.operation.algorithm = Algorithm::Doubling;
        let data = [1_i32; COUNT as usize];
        let bytes = frame(Header::Data(header), &data.map(i32::to_le_bytes).concat());
        write(&runtime, &mut one, &bytes);
        while !matches!(read_frame(&runtime, &mut one), (Header::Data(_), _)) {}
        ranks.is_zero_gone.store(true, Ordering::SeqCst);
        drop((one, for_names));
        for (rank, waiting) in (1..).zip(waiting) {
            let error = waiting.wait().unwrap_err();
            assert_eq!(error.culprit_rank(), Some(Rank(0)), "rank {rank}: {error}");
        }
        assert!(begun.elapsed() < LONG / 8, "by the deadline");
    });
}

/// Rank 1's link for what runs.
fn of_rank_1(lanes: &Receiver<ToZero>) -> ToZero {
    loop {
        let link = lanes.recv_timeout(LONG).unwrap();
        if link.0 == 1 {
            return link;
        }
    }
}
