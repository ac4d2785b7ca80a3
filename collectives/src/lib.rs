//! Collective operations for a group of ranks: schedules, reductions, lanes and the communicator.
//!
//! A [`Communicator`] is one rank of a group. A worker of a job has one ready; a program with its own ways to its ranks writes a
//! [`Connector`].
//!
//! [`local_group`] makes a whole group inside one process, for tests:
//!
//! ```
//! use kolo_collectives::{ReduceOp, local_group};
//!
//! let group = local_group(3)?;
//! let sums: Vec<Vec<f32>> = std::thread::scope(|scope| {
//!     let threads: Vec<_> = group
//!         .iter()
//!         .map(|comm| {
//!             scope.spawn(move || {
//!                 let mut data = vec![comm.rank().0 as f32, 1.0];
//!                 comm.all_reduce(&mut data, ReduceOp::Sum).map(|()| data)
//!             })
//!         })
//!         .collect();
//!     threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Result<_, _>>()
//! })?;
//! assert_eq!(sums, vec![vec![3.0, 3.0]; 3]);
//! # Ok::<(), kolo_collectives::CollectiveError>(())
//! ```
//!
//! # What holds
//!
//! * Results have the same bits on every rank, and in every run of one world layout, length and tuning (sums of floats by name: if
//!   nothing is fused).
//! * An operation that fails leaves its inputs as they were (F-2). A buffer for the result alone may hold anything, and
//!   so may a broadcast's on ranks that are not the root.
//! * Every wait has a deadline. A rank that dies, fails, leaves or is late ends the operation on all ranks that
//!   are in it, and is named (F-1). Ranks that are not linked with it hear of it from those that are.
//! * Frames carry the generation, the call and the operation. What is older is dropped; what is of another
//!   generation ends the link (G-1). After a failure the next operation works, unless a rank is lost.
//! * After the first operation of a size, nothing is allocated (aside from results that are returned, and from what QUIC's library
//!   takes for what it sends).
//!
//! # How it is made
//!
//! | module | what | I/O |
//! |---|---|---|
//! | [`schedule`] | which rank sends what to whom, step by step; what it costs; which algorithm is taken | none |
//! | [`element`], [`operation`], [`reduce`] | types, operators, kernels | none |
//! | [`header`], [`cause`] | the frames of the data plane | none |
//! | [`lane`] | connected links: memory, Unix socket, QUIC, TLS over TCP | yes |
//! | [`communicator`], [`group`] | operations of all ranks and of groups: run over lanes, with deadlines and failures; handles, names | through lanes |
//! | [`record`], [`stall`] | what was done, and what waits | none |
// Three modules allow it to themselves: `reduce::dispatch` (instructions that not every processor has), `copy`, and `shm`.
#![deny(unsafe_code)]

pub mod cause;
pub mod communicator;
pub mod element;
pub mod error;
pub mod group;
pub mod header;
pub mod lane;
pub mod operation;
pub mod record;
pub mod reduce;
pub mod schedule;
pub mod shape;
pub mod stall;

mod blocking;
mod copy;
mod engine;
mod group_id;
mod handle;
mod inner;
mod link;
mod listen;
mod local;
mod negotiation;
mod ops;
mod options;
mod run;
mod scratch;
mod shm;
mod signals;
mod verdict;

pub use communicator::{Acceptor, Communicator};
pub use element::{DType, Element};
pub use error::CollectiveError;
pub use group_id::GroupId;
pub use handle::{Failure, Handle};
pub use lane::{Connector, Lane, LaneError, LinkHello};
pub use local::local_group;
pub use operation::{Factor, ReduceOp, Unsupported};
pub use ops::{Gathered, Start};
pub use options::{Compression, Options};
pub use schedule::{Algorithm, Layout, Tuning};
pub use shm::arena::way_in_shared_memory;
pub use shm::buffer::SharedBuffer;

// What the arguments are made of, so that nobody needs another crate for them.
pub use half::{bf16, f16};
pub use kolo_transport::ids::{CallId, Generation, JobId, Rank};
pub use kolo_transport::wire::GenerationTable;
