//! Identities, wire messages, framing and QUIC sessions with mutual TLS: what every process of kolo speaks.
//!
//! | to | use |
//! |---|---|
//! | make a cluster's certificate authority | [`Authority`] |
//! | let a daemon or driver into a cluster | [`JoinToken`], [`TokenBook`], [`JoinHandler`], [`join()`] |
//! | keep its certificate from ending | [`LiveCredentials`], [`renewal`] |
//! | talk to another process | [`Endpoint`], [`Connection`], [`Stream`] |
//! | move much to another process | [`TlsListener`], [`TlsLink`] |
//! | block a thread on sockets of a runtime | [`direct`] |
//! | know this host's network interfaces | [`interfaces`] |
//! | know what may be said | [`wire`], [`frame`] |
#![deny(unsafe_code)]

pub mod authority;
pub mod awake;
pub mod bulk;
pub mod credentials;
pub mod descriptors;
pub mod direct;
pub mod end;
pub mod endpoint;
pub mod files;
mod fingerprint;
pub mod flood;
pub mod frame;
pub mod heartbeat;
pub mod identity;
pub mod interfaces;
pub mod join;
pub mod joiners;
pub mod live;
pub mod local;
pub mod names;
pub mod obituary;
pub mod places;
pub mod random;
pub mod renewal;
pub mod runtime;
pub mod session;
mod suites;
pub mod tls;
pub mod token;
mod validity;
mod verify;

pub use authority::{Authority, Fingerprint};
pub use awake::AwakeClock;
pub use bulk::{LinkLost, TlsLink, TlsListener};
pub use credentials::{CertificateRequest, Credentials};
pub use end::{CloseCode, ConnectionLost, StreamEnd};
pub use endpoint::{BindError, ConnectError, Endpoint, EndpointConfig, Expect};
pub use flood::Flood;
pub use frame::{Frame, FrameError, Limits};
pub use identity::{Identity, IdentityError, Role};
pub use join::{JoinError, join, join_any};
pub use joiners::JoinHandler;
pub use kolo_wire::{self as wire, ids};
pub use live::LiveCredentials;
pub use obituary::ObituarySecret;
pub use places::Places;
pub use random::RandomId;
pub use renewal::Validity;
pub use runtime::TransportRuntime;
pub use session::{ByteStream, Connection, FrameReceiver, FrameSender, RequestError, Stream};
pub use token::{JoinToken, TokenBook, TokenError, TokenId, TokenInfo};
