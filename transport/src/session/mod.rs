//! Connections between authenticated processes, and the streams on them.

mod bytes;
mod connection;
pub(crate) mod error;
mod stream;

pub use bytes::ByteStream;
pub use connection::Connection;
pub(crate) use connection::{WeakConnection, canonical};
pub use error::{CloseCode, ConnectionLost, RequestError, StreamEnd};
pub use stream::{FrameReceiver, FrameSender, Stream};
