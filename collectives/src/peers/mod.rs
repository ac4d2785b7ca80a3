//! Ready-made ways to the peers: a rank, a world size and where the others are is all that a program needs. There are no
//! daemons, and no runtime of the program's own.
//!
//! | the ranks are | use |
//! |---|---|
//! | on one host | [`Local`]: a folder in which each has a socket. They share memory. |
//! | on several hosts | [`Network`]: a table of addresses, and each rank's [credentials](issue). Those of one host share memory if a folder is given. |
//!
//! The communicator has what it needs to be reached, and takes it down when it goes with the last of its clones and
//! [groups](Communicator::group): sockets, their files, and the thread that drives them.
//!
//! # Ranks of one host
//!
//! Each is a process of its own (here they are threads, which makes no difference):
//!
//! ```
//! use kolo_collectives::{Rank, ReduceOp, peers};
//!
//! # let folder = std::env::temp_dir().join(format!("kolo-peers-doc-{}", std::process::id()));
//! let run = |rank| {
//!     let comm = peers::Local::in_folder(&folder).join(Rank(rank), 3)?;
//!     let mut data = [rank as f32];
//!     comm.all_reduce(&mut data, ReduceOp::Sum)?;
//!     assert_eq!(data, [3.0]);
//!     Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
//! };
//! std::thread::scope(|scope| {
//!     let ranks: Vec<_> = (0..3).map(|rank| scope.spawn(move || run(rank))).collect();
//!     ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
//! })?;
//! # std::fs::remove_dir(&folder)?; // there is nothing in it any more
//! # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
//! ```
//!
//! `cargo run --release -p kolo-collectives --example ranks` has real processes.
//!
//! # Ranks on several hosts
//!
//! Links between hosts have mutual TLS, always. So somebody makes an [`Authority`] once, and [credentials](issue) for each
//! rank, which the rank alone has ([`Credentials::save`], [`Credentials::load`]). They say which rank of which job it is.
//!
//! ```
//! use kolo_collectives::peers::{Authority, ClusterId, Network, Peer, RandomId as _, issue};
//! use kolo_collectives::{JobId, Rank, ReduceOp};
//!
//! let (authority, job) = (Authority::create(ClusterId::random())?, JobId(1));
//! # let mut ports = Vec::new();
//! # while ports.len() < 2 {
//! #     let socket = std::net::UdpSocket::bind("127.0.0.1:0")?;
//! #     if std::net::TcpListener::bind(socket.local_addr()?).is_ok() { ports.push(socket); }
//! # }
//! # let address = |rank: usize| ports[rank].local_addr().unwrap();
//! // The same on every rank, which listens at its own address. (Here both hosts are one.)
//! let table = [Peer::new("one", address(0)), Peer::new("two", address(1))];
//! # drop(ports);
//! let run = |credentials| {
//!     let comm = Network::new(credentials).join(&table)?;
//!     let mut data = vec![comm.rank().0; 1000];
//!     comm.all_reduce(&mut data, ReduceOp::Max)?;
//!     assert_eq!(data[999], 1);
//!     Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
//! };
//! let credentials = [issue(&authority, job, Rank(0))?, issue(&authority, job, Rank(1))?];
//! std::thread::scope(|scope| {
//!     let ranks = credentials.map(|credentials| scope.spawn(move || run(credentials)));
//!     ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
//! })?;
//! # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
//! ```
//!
//! Where addresses are not known before, a rank [listens](Network::listen) first, tells the others where, and joins when it knows the
//! table.
//!
//! # Runtime
//!
//! A thread of the communicator's own drives the links, unless a [handle](Local::runtime) of a tokio runtime is given. When
//! the communicator goes, whoever drops it waits for that thread: it delivers what is still on its way to other hosts, for at
//! most three seconds, so that a program may return from `main` after its last operation. In a tokio runtime's context
//! nothing waits; the thread ends by itself. A runtime that the program has given must go on for as long.

mod connector;
mod driver;
mod error;
mod local;
mod network;
mod socket;

use std::time::Duration;

use kolo_transport::ids::{Generation, JobId, Rank, Slot};
use tokio::runtime::Handle;

#[cfg(doc)]
use crate::communicator::Communicator;
use crate::communicator::check_world;

pub use crate::lane::LaneChoice;
pub(crate) use driver::Leaving;
pub use error::PeersError;
pub use kolo_transport::ids::ClusterId;
pub use kolo_transport::{
    Authority, BindError, Credentials, EndpointConfig, Identity, IdentityError, LiveCredentials,
    RandomId, Role,
};
pub use local::Local;
pub use network::{Listening, Network, Peer};

/// How long a peer may take to say hello, and other steps that only need it to be there.
const STEP: Duration = Duration::from_secs(20);

/// How long a peer that is not there yet is waited for, at first.
const WAIT: Duration = Duration::from_secs(30);

/// What both kinds have.
#[derive(Debug, Clone)]
struct Settings {
    generation: Generation,
    wait: Duration,
    runtime: Option<Handle>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            generation: Generation(1),
            wait: WAIT,
            runtime: None,
        }
    }
}

/// New credentials for a rank of a job, for a year. They are those of the job's slot with the rank's number.
///
/// # Errors
///
/// [`IdentityError`] if no key can be made.
pub fn issue(authority: &Authority, job: JobId, rank: Rank) -> Result<Credentials, IdentityError> {
    authority.issue(Role::Worker, &Identity::worker_name(job, Slot(rank.0)))
}

/// Whether a rank is one of so many.
fn check(rank: Rank, world: usize) -> Result<(), PeersError> {
    let world = u32::try_from(world).unwrap_or(u32::MAX);
    check_world(rank, world).map_err(|reason| PeersError::Invalid { reason })
}
