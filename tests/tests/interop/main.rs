//! Real Horovod and real torch under `kolo run`: scripts that know nothing of kolo.
//!
//! A test whose framework is missing says so with the word SKIPPED, and passes.

// `pub` says here what other files use.
#![allow(unreachable_pub)]

mod elastic_jobs;
mod jobs;
mod static_jobs;
mod torch_restart;
#[allow(dead_code)] // the tests of networks use more of it
#[path = "../netns/world.rs"]
mod world;
