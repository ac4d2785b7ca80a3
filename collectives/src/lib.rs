//! Collective operations for a group of ranks: schedules, reductions, lanes and the communicator.
//!
//! A [`Communicator`] is one rank of a group. A worker of a job has one ready; a program with its own ways to its ranks writes a
//! [`Connector`].
//!
//! [`run_local`] runs a closure on each rank of a group inside one process, for tests, and [`local_group`] makes such a group:
//!
//! ```
//! use kolo_collectives::{ReduceOp, run_local};
//!
//! let sums = run_local(3, |comm| {
//!     let mut data = vec![comm.rank().0 as f32, 1.0];
//!     comm.all_reduce(&mut data, ReduceOp::Sum).map(|()| data)
//! })?;
//! assert_eq!(sums, vec![Ok(vec![3.0, 3.0]); 3]);
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
//! An operation goes through three layers: what is asked, checked and agreed (`group_core`, with its `op_guard`), one schedule under way
//! (`driver`), and one peer's lane (`link`). A module uses only those above it in this table.
//!
//! | module | content | I/O |
//! |---|---|---|
//! | [`element`], [`operation`], [`reduce`] | types, operators, kernels | none |
//! | [`schedule`] | which rank sends what to whom, step by step; what it costs; which algorithm is taken | none |
//! | [`record`], [`stall`], `times` | what was done, and what waits; how long things may take | none |
//! | [`error`], [`header`], [`cause`], `verdict` | the frames of the data plane; why an operation ends, and because of whom | none |
//! | `shm`, [`lane`] | shared memory; connected links: memory, Unix socket, QUIC, TLS over TCP | yes |
//! | `link` | a lane with what is half read and half written on it | through lanes |
//! | `rank_shared` | what the groups of a rank share, and what comes from outside an operation: links, losses, questions | through links |
//! | `driver` | one operation under way, with its deadline and failures | through links |
//! | `group_core` | one group: its links and buffers, and the turns of its operations | through links |
//! | [`communicator`], `negotiation`, `ops` | the operations in all their forms: blocking, async, handles, names | through groups |
// Three modules allow it to themselves: `reduce::dispatch` (instructions that not every processor has), `copy`, and `shm`.
#![deny(unsafe_code)]

pub mod cause;
pub mod communicator;
pub mod element;
pub mod error;
pub mod header;
pub mod lane;
pub mod operation;
pub mod record;
pub mod reduce;
pub mod schedule;
pub mod stall;

mod blocking;
mod copy;
mod driver;
mod group_core;
mod group_id;
mod handle;
mod link;
mod negotiation;
mod ops;
mod options;
mod rank_shared;
mod scratch;
mod shm;
mod times;
mod verdict;
mod world;

pub use communicator::{Acceptor, Communicator};
pub use element::{DType, Element, Elements};
pub use error::CollectiveError;
pub use group_id::GroupId;
pub use handle::{Failure, Handle};
pub use lane::{Connector, Lane, LaneError, LinkHello};
pub use operation::{Factor, ReduceOp, Unsupported, shape};
pub use ops::{Gathered, Start};
pub use options::{Compression, Options};
pub use schedule::{Algorithm, Layout, Tuning};
pub use shm::arena::way_in_shared_memory;
pub use shm::buffer::SharedBuffer;
pub use world::{local_group, run_local};

// What the arguments are made of, so that nobody needs another crate for them.
pub use half::{bf16, f16};
pub use kolo_transport::ids::{CallId, Generation, JobId, Rank};
pub use kolo_transport::wire::GenerationTable;
