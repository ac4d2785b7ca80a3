//! Notices that a peer reads later than anybody attends to them, and news that end a look for peers in shared memory.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kolo_transport::ids::{CallId, Generation, JobId, Rank};
use tokio::runtime::{Builder, Runtime};

use crate::lane::{Connecting, Connector, Lane, LaneError, MemoryLane, OneHost, UnixLane};
use crate::schedule::{Algorithm, Tuning};
use crate::{CollectiveError, Communicator, ReduceOp};

/// Longer than anything takes.
const LONG: Duration = Duration::from_secs(40);
/// Of `f32`: much more than twice what the link holds.
const LENGTH: usize = 1 << 20;

/// Has one link to rank 0, and may be on its host.
#[derive(Debug)]
struct MadeOnce {
    lane: Mutex<Option<Box<dyn Lane>>>,
    is_one_host: bool,
}

impl Connector for MadeOnce {
    fn connect(&self, peer: Rank) -> Connecting {
        let lane = self.lane.lock().unwrap().take();
        Box::pin(async move {
            lane.ok_or_else(|| LaneError::Unreachable {
                reason: format!("the link to rank {peer} is made once"),
            })
        })
    }

    fn is_one_host(&self, _ranks: &[Rank]) -> Option<OneHost> {
        let is_one_host = self.is_one_host;
        Some(Box::pin(async move { is_one_host }))
    }
}

fn runtime() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
}

/// Two ranks with a link.
fn linked(
    runtime: &Runtime,
    [own, peers]: [Box<dyn Lane>; 2],
    is_one_host: bool,
) -> [Communicator; 2] {
    let comm = |rank, lane| {
        let lane = Mutex::new(lane);
        let connector = Arc::new(MadeOnce { lane, is_one_host });
        let (job, generation) = (JobId(7), Generation(3));
        let handle = runtime.handle().clone();
        let comm = Communicator::new(Rank(rank), 2, generation, job, connector, handle);
        comm.unwrap().with_timeout(LONG)
    };
    let comms = [comm(0, None), comm(1, Some(peers))];
    comms[0].acceptor().accept(Rank(1), own).unwrap();
    comms
}

fn meet([one, other]: &[Communicator; 2]) {
    std::thread::scope(|scope| {
        scope.spawn(|| other.barrier().unwrap());
        one.barrier().unwrap();
    });
}

/// Two ranks that have met. The first one has given up a long sum, for which the second one was late.
fn busy_and_late(runtime: &Runtime) -> [Communicator; 2] {
    let (zeros, ones) = MemoryLane::pair(10_000);
    let comms = linked(runtime, [Box::new(zeros), Box::new(ones)], false);
    for comm in &comms {
        // Half of what is given goes at once.
        comm.set_tuning(Tuning {
            force: Some(Algorithm::Halving),
            ..Tuning::default()
        });
    }
    meet(&comms);
    let [busy, late] = comms;
    busy.set_timeout(Duration::from_millis(50));
    assert_rank_1_is_late(&sum(&busy).unwrap_err());
    [busy, late]
}

fn sum(comm: &Communicator) -> Result<(), CollectiveError> {
    let mut data = vec![1.0_f32; LENGTH];
    comm.all_reduce(&mut data, ReduceOp::Sum)?;
    assert!(data.iter().all(|value| value.total_cmp(&2.0).is_eq()));
    Ok(())
}

fn assert_rank_1_is_late(error: &CollectiveError) {
    let is_deadline = matches!(error, CollectiveError::Deadline { .. });
    assert!(
        is_deadline && error.culprit_rank() == Some(Rank(1)),
        "{error}"
    );
}

/// A rank is late for longer than the others' time limit, and longer than anybody attends to what they have to say. When it comes
/// back it hears all of that, from those that do nothing by then, and the next operation works. (Other lanes: `tests/unread.rs`.)
#[test]
fn who_comes_back_late_is_not_alone() {
    let runtime = runtime();
    let [busy, late] = busy_and_late(&runtime);
    // Nobody attends to it any more.
    let begun = Instant::now();
    while busy.inner.signals.lock().attended {
        assert!(begun.elapsed() < LONG, "somebody attends to it for ever");
        std::thread::sleep(Duration::from_millis(1));
    }
    busy.set_timeout(LONG);
    {
        let engine = runtime.block_on(busy.inner.engine.lock());
        assert!(engine.links[1].is_up(), "{:?}", engine.links[1]);
        assert!(engine.has_backlog(), "it reads all the same");
    }
    let begun = Instant::now();
    assert_rank_1_is_late(&sum(&late).unwrap_err());
    assert!(begun.elapsed() < LONG / 2, "the rest came");
    std::thread::scope(|scope| {
        scope.spawn(|| sum(&busy).unwrap());
        sum(&late).unwrap();
    });
}

/// What waits for a peer keeps no communicator.
#[test]
fn what_nobody_reads_keeps_no_link_of_a_communicator_that_is_gone() {
    let runtime = runtime();
    let [busy, late] = busy_and_late(&runtime);
    drop(busy);
    // The end of its link, behind what was said before.
    let error = sum(&late).unwrap_err();
    let is_told = matches!(
        error,
        CollectiveError::PeerLost { .. } | CollectiveError::Deadline { .. }
    );
    assert!(is_told, "{error}");
    let error = late.barrier().unwrap_err();
    assert_eq!(error.culprit_rank(), Some(Rank(0)), "{error}");
}

#[test]
fn what_ends_operations_is_seen_by_who_looks_in_shared_memory() {
    let runtime = runtime();
    let says: [fn(&Communicator); 2] = [
        |comm| comm.rank_lost(Rank(1), "killed"),
        |comm| comm.revoke("the job ends"),
    ];
    for say in says {
        let (own, peers) = std::os::unix::net::UnixStream::pair().unwrap();
        let lanes = {
            let _entered = runtime.enter();
            [own, peers]
                .map(|socket| -> Box<dyn Lane> { Box::new(UnixLane::from_std(socket).unwrap()) })
        };
        let comms = linked(&runtime, lanes, true);
        meet(&comms);
        let comm = &comms[0];
        let is_seen = || {
            let mut engine = runtime.block_on(comm.inner.engine.lock());
            engine.shm.active().unwrap().is_other_news()
        };
        assert!(!is_seen());
        comm.abort_call(CallId(0), "cancelled");
        assert!(is_seen());
        comm.begin_call(CallId(1));
        assert!(!is_seen());
        say(comm);
        assert!(is_seen());
    }
}
