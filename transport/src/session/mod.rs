//! Connections between authenticated processes, and the streams on them.

mod bytes;
mod connection;
pub(crate) mod error;
mod request;
mod stream;

pub use bytes::ByteStream;
pub use connection::Connection;
pub(crate) use connection::{WeakConnection, canonical};
pub use error::{CloseCode, ConnectionLost, StreamEnd};
pub use request::RequestError;
pub use stream::{FrameReceiver, FrameSender, Stream};
