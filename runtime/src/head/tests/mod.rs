//! The head over QUIC, with nodes and drivers that are tasks of the test.

mod access;
mod fake;
mod jobs;
mod trust;
