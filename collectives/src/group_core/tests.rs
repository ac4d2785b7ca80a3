//! What is left to be said when nobody reads it for longer than anybody attends to it.

use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use kolo_transport::ids::{ClusterId, Generation, JobId, Rank, Slot};
use kolo_transport::{Authority, EndpointConfig, Identity, RandomId as _, Role, TransportRuntime};
use tokio::runtime::{Builder, Runtime};

use crate::lane::{
    Connecting, Connector, Door, Lane, LaneChoice, LaneError, LinkHello, MemoryLane, UnixLane,
};
use crate::schedule::{Algorithm, Tuning};
use crate::{CollectiveError, Communicator, ReduceOp};

const JOB: JobId = JobId(7);
const GENERATION: Generation = Generation(3);
/// Longer than anything takes.
const LONG: Duration = Duration::from_secs(40);
/// Of `f32`: much more than twice what any of the links holds.
const LENGTH: usize = 8 << 20;

type Ends = [Box<dyn Lane>; 2];

/// Has one link to rank 0.
#[derive(Debug)]
struct MadeOnce(Mutex<Option<Box<dyn Lane>>>);

impl Connector for MadeOnce {
    fn connect(&self, peer: Rank) -> Connecting {
        let lane = self.0.lock().unwrap().take();
        Box::pin(async move {
            lane.ok_or_else(|| LaneError::Unreachable {
                reason: format!("the link to rank {peer} is made once"),
            })
        })
    }
}

fn runtime() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
}

fn hello(rank: u32) -> LinkHello {
    LinkHello::new(JOB, GENERATION, Rank(rank))
}

/// Two ranks with these ends of the link between them.
fn pair(runtime: &Runtime, [zeros, ones]: Ends) -> [Communicator; 2] {
    let comm = |rank, lane| {
        let connector = std::sync::Arc::new(MadeOnce(Mutex::new(lane)));
        let handle = runtime.handle().clone();
        let comm = Communicator::new(Rank(rank), 2, GENERATION, JOB, connector, handle);
        let comm = comm.unwrap().with_timeout(LONG);
        // Half of what is given goes at once.
        comm.set_tuning(Tuning {
            force: Some(Algorithm::Halving),
            ..Tuning::default()
        });
        comm
    };
    let both = [comm(0, None), comm(1, Some(ones))];
    both[0].acceptor().accept(Rank(1), zeros).unwrap();
    both
}

fn over_memory(_runtime: &Runtime) -> Ends {
    let (zeros, ones) = MemoryLane::pair(10_000);
    [Box::new(zeros), Box::new(ones)]
}

fn over_sockets(runtime: &Runtime) -> Ends {
    let (zeros, ones) = UnixStream::pair().unwrap();
    let open = |socket, own, peer| async move {
        let lane = UnixLane::from_std(socket).unwrap().without_rings();
        lane.greeted(&hello(own), Rank(peer), LONG).await.unwrap()
    };
    let (zeros, ones) =
        runtime.block_on(async { tokio::join!(open(zeros, 0, 1), open(ones, 1, 0)) });
    [Box::new(zeros), Box::new(ones)]
}

fn over_tls(runtime: &Runtime) -> Ends {
    let authority = Authority::create(ClusterId::random()).unwrap();
    let transport = TransportRuntime::new(1).unwrap();
    let door = |slot| {
        let name = Identity::worker_name(JOB, Slot(slot));
        let credentials = authority.issue(Role::Worker, &name).unwrap();
        let settings = [EndpointConfig::default()];
        let doors = Door::open_all(&transport, credentials, &settings, LaneChoice::Tls);
        doors.unwrap().remove(0)
    };
    let (zero, one) = (door(0), door(1));
    let (target, theirs) = ((Rank(0), Slot(0), zero.address()), hello(1));
    runtime.block_on(async {
        let (ones, zeros) = tokio::join!(one.connect(&theirs, target, LONG), async {
            let incoming = zero.accept().await.unwrap();
            incoming.open(&hello(0), Rank(1), LONG).await
        });
        [zeros.unwrap().0, ones.unwrap()]
    })
}

/// A rank is late for longer than the others' time limit, and longer than anybody attends to what they have to say. When it comes
/// back it hears all of that, from those that do nothing by then, and the next operation works.
fn who_comes_back_is_not_alone(ends: impl Fn(&Runtime) -> Ends) {
    let runtime = runtime();
    let [busy, late] = pair(&runtime, ends(&runtime));
    std::thread::scope(|scope| {
        scope.spawn(|| late.barrier().unwrap());
        busy.barrier().unwrap();
    });
    busy.set_timeout(Duration::from_millis(50));
    let error = busy.all_reduce(&mut vec![1.0_f32; LENGTH], ReduceOp::Sum);
    let error = error.unwrap_err();
    assert!(matches!(error, CollectiveError::Deadline { .. }), "{error}");
    assert_eq!(error.culprit_rank(), Some(Rank(1)), "{error}");
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
    let error = late.all_reduce(&mut vec![1.0_f32; LENGTH], ReduceOp::Sum);
    let error = error.unwrap_err();
    assert!(matches!(error, CollectiveError::Deadline { .. }), "{error}");
    assert_eq!(error.culprit_rank(), Some(Rank(1)), "{error}");
    assert!(begun.elapsed() < LONG / 2, "the rest came");
    std::thread::scope(|scope| {
        let both = [&busy, &late].map(|comm| {
            scope.spawn(|| {
                let mut data = vec![1.0_f32; LENGTH];
                comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert!(data.iter().all(|value| value.total_cmp(&2.0).is_eq()));
            })
        });
        for sum in both {
            sum.join().unwrap();
        }
    });
}

#[test]
fn who_comes_back_late_is_not_alone_over_memory() {
    who_comes_back_is_not_alone(over_memory);
}

#[test]
fn who_comes_back_late_is_not_alone_over_sockets() {
    who_comes_back_is_not_alone(over_sockets);
}

#[test]
fn who_comes_back_late_is_not_alone_over_tls() {
    who_comes_back_is_not_alone(over_tls);
}

/// What waits for a peer keeps no communicator.
#[test]
fn what_nobody_reads_keeps_no_link_of_a_communicator_that_is_gone() {
    let runtime = runtime();
    let [busy, late] = pair(&runtime, over_memory(&runtime));
    std::thread::scope(|scope| {
        scope.spawn(|| late.barrier().unwrap());
        busy.barrier().unwrap();
    });
    busy.set_timeout(Duration::from_millis(50));
    let error = busy.all_reduce(&mut vec![1.0_f32; LENGTH], ReduceOp::Sum);
    assert!(error.is_err());
    drop(busy);
    // The end of its link, behind what was said before.
    let error = late.all_reduce(&mut vec![1.0_f32; LENGTH], ReduceOp::Sum);
    let error = error.unwrap_err();
    assert!(
        matches!(
            error,
            CollectiveError::PeerLost { .. } | CollectiveError::Deadline { .. }
        ),
        "{error}"
    );
    let error = late.barrier().unwrap_err();
    assert_eq!(error.culprit_rank(), Some(Rank(0)), "{error}");
}
