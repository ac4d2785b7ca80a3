//! Shared memory for the ranks of one host.
//!
//! | part | what |
//! |---|---|
//! | [`region`] | a memory file, mapped |
//! | [`left`] | how much memory the host has left |
//! | [`map`] | the memory itself, and the only ways to touch it |
//! | [`copy`] | copies of what others may write meanwhile |
//! | [`pace`] | whether writes go past the caches: pure |
//! | [`rules`] | who may write what, when: pure |
//! | [`ticket`] | one word for an operation and all that ranks must agree on |
//! | [`wait`] | spin, yield, sleep |
//! | [`arena`] | operations in it |
//! | [`setup`] | how all ranks agree to use it |
//! | [`buffer`] | the caller's own data in it |
//! | [`parts`] | where there is room for them |
//! | [`ring`] | the rules of a ring of bytes: pure |
//! | [`rings`] | the memory of one link ([`crate::lane`]) |
//!
//! Nothing here has a name in the file system, and nothing holds a lock in the memory: a rank that is killed at any
//! instruction leaves a flag that is never set, and the end of its links tells the others.

#![allow(unsafe_code)]

pub(crate) mod arena;
#[cfg(test)]
mod bed;
pub(crate) mod buffer;
mod caches;
mod left;
pub(crate) mod map;
mod pace;
mod parts;
mod region;
pub(crate) mod ring;
pub(crate) mod rings;
pub(crate) mod rules;
pub(crate) mod setup;
mod ticket;
mod wait;

#[cfg(test)]
mod tests;
