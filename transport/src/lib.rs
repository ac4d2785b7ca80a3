//! Identities, wire messages, framing and QUIC sessions with mutual TLS: what every process of kolo speaks.
#![forbid(unsafe_code)]

pub mod frame;
pub mod identity;
pub mod ids;
pub mod wire;
