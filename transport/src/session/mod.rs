//! Connections between authenticated processes, and the streams on them.

mod bytes;
mod connection;
mod request;
mod stream;
mod writer;

pub use bytes::ByteStream;
pub use connection::Connection;
pub(crate) use connection::{WeakConnection, canonical};
pub use request::RequestError;
pub use stream::{FrameReceiver, FrameSender, Stream};
