//! A real kolo cluster inside `cargo test`, with faults on demand.
//!
//! ```no_run
//! use kolo::prelude::*;
//! use kolo_harness::TestCluster;
//!
//! #[kolo::function]
//! fn whoami(ctx: &Context) -> usize {
//!     ctx.rank()
//! }
//!
//! # async fn test() -> Result<(), Box<dyn std::error::Error>> {
//! let mut cluster = TestCluster::builder().nodes(2).slots(2).start().await?;
//! let executor = Executor::builder().workers(4).start(&cluster.connect().await?).await?;
//! assert_eq!(executor.run(whoami, ()).await?, [0, 1, 2, 3]);
//! cluster.kill_node(1)?;
//! assert!(executor.run(whoami, ()).await.is_err());
//! # Ok(()) }
//! ```
//!
//! Head and nodes are real processes (or, with [`Mode::InProcess`], threads of the test): the test
//! binary itself, started again. That works because this crate looks at the environment before
//! `main` begins, and becomes a daemon, a warden or a worker where it is asked to. So a test file needs no
//! special `main`, and workers find the functions and executables that the test file defines.
//!
//! [`netns`] has several hosts on one machine, with networks of their own. [`Framework`] finds real Horovod and torch.
//!
//! Each cluster has ports, keys and a directory of its own: many can run at once in one test
//! process. When a [`TestCluster`] is dropped its processes are killed, and with them all workers; if the
//! test is panicking, what the daemons wrote is printed.

mod builder;
mod cluster;
mod command;
mod entry;
mod error;
mod frameworks;
mod member;
pub mod netns;
mod process;

pub use builder::{Mode, TestClusterBuilder};
pub use cluster::TestCluster;
pub use command::kolo;
pub use entry::run_if_member;
pub use error::HarnessError;
pub use frameworks::Framework;
