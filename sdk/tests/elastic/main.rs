//! State and sampler in groups that stay, and loops in groups that change: ranks are threads.

#![allow(clippy::unwrap_used)]

mod allocation;
mod checkpoints;
mod group;
mod loops;
mod random;
mod sampler;
mod state;
