//! How the communicator of all ranks is made: by a connector, or for a whole group inside this process.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ScopedJoinHandle;

use kolo_transport::RandomId as _;
use kolo_transport::ids::{Generation, JobId, Rank};
use tokio::runtime::{Builder, Handle, Runtime};

use crate::communicator::{Acceptor, Communicator};
use crate::error::CollectiveError;
use crate::group_core::GroupCore;
use crate::group_id::GroupId;
use crate::lane::{Connecting, Connector, Lane, LaneError, MemoryLane, Requesting};
use crate::negotiation::Negotiation;
use crate::rank_shared::RankShared;

/// Most ranks of a world. Each takes about 1 KB of memory on every rank.
const MOST_RANKS: u32 = 1 << 20;

impl Communicator {
    /// A communicator for `rank` of `world_size` ranks. Makes no link yet: that happens at first use, through
    /// `connector` (to lower ranks) and [`Communicator::acceptor`] (from higher ones).
    ///
    /// `handle` is a runtime with I/O and time enabled, driven by threads that no operation blocks. It runs
    /// the connector's futures and finishes what a failed operation leaves to be sent.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::Invalid`] if the rank is not in `0..world_size`, or there are more than 1,048,576 of them.
    pub fn new(
        rank: Rank,
        world_size: u32,
        generation: Generation,
        job: JobId,
        connector: Arc<dyn Connector>,
        handle: Handle,
    ) -> Result<Self, CollectiveError> {
        let invalid = |reason| Err(CollectiveError::Invalid { reason });
        if world_size > MOST_RANKS {
            return invalid(format!(
                "a world of {world_size} ranks: there can be {MOST_RANKS} at most"
            ));
        }
        if rank.0 >= world_size {
            return invalid(format!(
                "rank {rank} is not in a world of {world_size}: ranks are 0 to world size - 1"
            ));
        }
        let rank_shared = RankShared::new((rank.0, world_size), generation, job, connector, handle);
        Ok(Self::of(GroupCore::root(rank_shared, Negotiation::start)))
    }
}

/// A group of `world_size` communicators in this process, in rank order, linked by memory lanes: for tests of
/// code that uses collectives. Run each rank on a thread of its own, or use the async forms.
///
/// Dropping one communicator is like losing its rank. The group has a small runtime of its own, which goes
/// with its last communicator.
///
/// ```
/// use kolo_collectives::{ReduceOp, local_group};
///
/// let group = local_group(2)?;
/// let sums = [0, 1].map(|rank: usize| group[rank].start().all_reduce(vec![1.5], ReduceOp::Sum));
/// for sum in sums {
///     assert_eq!(sum.wait()?, [3.0]);
/// }
/// # Ok::<(), kolo_collectives::CollectiveError>(())
/// ```
///
/// # Errors
///
/// [`CollectiveError::Invalid`] if `world_size` is 0 or the system gives no thread.
pub fn local_group(world_size: u32) -> Result<Vec<Communicator>, CollectiveError> {
    if world_size == 0 {
        return Err(CollectiveError::Invalid {
            reason: "a group of 0 ranks was asked for: it has at least 1".to_owned(),
        });
    }
    let runtime = Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("kolo-local-group")
        .enable_time()
        .build()
        .map_err(|error| CollectiveError::Invalid {
            reason: format!("no runtime for a local group: {error}"),
        })?;
    let handle = runtime.handle().clone();
    let hub = Arc::new(Hub {
        acceptors: Mutex::new(Vec::new()),
        _runtime: OwnedRuntime(Some(runtime)),
    });
    let job = JobId::random();
    let group: Vec<Communicator> = (0..world_size)
        .map(|rank| {
            let connector = MemoryConnector {
                rank: Rank(rank),
                hub: Arc::clone(&hub),
            };
            Communicator::new(
                Rank(rank),
                world_size,
                Generation(1),
                job,
                Arc::new(connector),
                handle.clone(),
            )
        })
        .collect::<Result<_, _>>()?;
    *hub.acceptors.lock().unwrap_or_else(PoisonError::into_inner) =
        group.iter().map(Communicator::acceptor).collect();
    Ok(group)
}

/// Runs a closure for each rank of a [`local_group`], each on a thread of its own. Returns the results in rank order.
///
/// ```
/// use kolo_collectives::{CollectiveError, Communicator, ReduceOp, run_local};
///
/// /// The code under test.
/// fn mean(comm: &Communicator, mine: f64) -> Result<f64, CollectiveError> {
///     let mut data = [mine];
///     comm.all_reduce(&mut data, ReduceOp::Average)?;
///     Ok(data[0])
/// }
///
/// let means = run_local(4, |comm| mean(comm, f64::from(comm.rank().0)))?;
/// assert_eq!(means, vec![Ok(1.5); 4]);
/// # Ok::<(), CollectiveError>(())
/// ```
///
/// # Errors
///
/// As [`local_group`].
///
/// # Panics
///
/// If the closure panics on a rank.
pub fn run_local<R: Send>(
    world_size: u32,
    body: impl Fn(&Communicator) -> R + Sync,
) -> Result<Vec<R>, CollectiveError> {
    let group = local_group(world_size)?;
    Ok(std::thread::scope(|scope| {
        let body = &body;
        // A rank that panics leaves its group, and the others have all members until the last has ended.
        let spawn = |comm| scope.spawn(move || (body(&comm), comm));
        let threads: Vec<_> = group.into_iter().map(spawn).collect();
        let joined = threads.into_iter().map(ScopedJoinHandle::join);
        let ended: Vec<_> = joined.collect();
        let results = ended.into_iter().map(|result| match result {
            Ok((result, _)) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        results.collect()
    }))
}

/// Where the members of a local group find each other.
#[derive(Debug)]
struct Hub {
    acceptors: Mutex<Vec<Acceptor>>,
    _runtime: OwnedRuntime,
}

impl Hub {
    fn acceptor(&self, peer: Rank) -> Result<Acceptor, LaneError> {
        self.acceptors
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(peer.index())
            .cloned()
            .ok_or_else(|| LaneError::Unreachable {
                reason: format!("rank {peer} is not in this group"),
            })
    }
}

/// A runtime that may be dropped anywhere, async code included.
#[derive(Debug)]
struct OwnedRuntime(Option<Runtime>);

impl Drop for OwnedRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

#[derive(Debug)]
struct MemoryConnector {
    rank: Rank,
    hub: Arc<Hub>,
}

impl Connector for MemoryConnector {
    fn connect(&self, peer: Rank) -> Connecting {
        self.connect_group(peer, GroupId::WORLD)
    }

    fn connect_group(&self, peer: Rank, group: GroupId) -> Connecting {
        let (acceptor, rank) = (self.hub.acceptor(peer), self.rank);
        Box::pin(async move {
            let acceptor = acceptor?;
            let (mine, theirs) = MemoryLane::pair(MemoryLane::CAPACITY);
            acceptor.accept_group(group, rank, Box::new(theirs))?;
            let mine: Box<dyn Lane> = Box::new(mine);
            Ok(mine)
        })
    }

    fn request(&self, peer: Rank, group: GroupId) -> Option<Requesting> {
        let (acceptor, rank) = (self.hub.acceptor(peer), self.rank);
        Some(Box::pin(async move { acceptor?.requested(group, rank) }))
    }
}
