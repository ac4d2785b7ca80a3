//! The API as clients see it: a real TLS connection to a head that is not real.

mod access;
mod client;
mod fake;
mod slow;
