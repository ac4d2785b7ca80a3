//! The loop over the call socket: read a call, run it right here, write its result.

use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kolo_transport::frame::{Decoder, FrameError, Limits};

use super::dispatch::{CallHead, Dispatcher};
use super::outbox::Outbox;
use super::reply::Reply;

/// How much one read asks for, in bytes.
const READ_CHUNK: usize = 128 << 10;

/// The result of a call that took longer is written before the next one begins.
const SHORT: Duration = Duration::from_micros(50);

/// Why the loop ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LoopEnd {
    /// It was asked to stop.
    Stopped,
    /// The node closed the socket.
    Closed,
}

/// Why the loop can't go on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoopError {
    #[error("the call socket brought what is no call: {0}")]
    Protocol(#[from] FrameError),
    #[error("the call socket failed: {0}")]
    Io(#[from] io::Error),
}

/// Serves calls until the socket ends or `stopping` is set. Every call that was begun is answered.
pub(crate) fn serve(
    socket: impl Read,
    writer: impl Write + Send + 'static,
    dispatcher: &mut Dispatcher,
    stopping: &AtomicBool,
) -> Result<LoopEnd, LoopError> {
    let mut outbox = Outbox::new(writer);
    let end = run(socket, &mut outbox, dispatcher, stopping);
    let flushed = outbox.flush();
    // Why the loop ended says more than that the last results did not arrive.
    let end = end?;
    flushed?;
    Ok(end)
}

fn run<W: Write + Send + 'static>(
    mut socket: impl Read,
    outbox: &mut Outbox<W>,
    dispatcher: &mut Dispatcher,
    stopping: &AtomicBool,
) -> Result<LoopEnd, LoopError> {
    let mut decoder = Decoder::new(Limits::CALLS);
    let mut chunk = vec![0_u8; READ_CHUNK].into_boxed_slice();
    let mut reply = Reply::for_calls();
    let mut read_at = Instant::now();
    loop {
        while let Some(frame) = decoder.next_raw().map_err(FrameError::from)? {
            if stopping.load(Ordering::Acquire) {
                return Ok(LoopEnd::Stopped);
            }
            let head = CallHead::decode(&frame.head)?;
            // Only what has a successor may wait for it.
            let began = decoder.is_ready().then(Instant::now);
            dispatcher.call(&head, &frame.body, read_at, &mut reply)?;
            match began {
                Some(began) if began.elapsed() < SHORT => outbox.collect(reply.frames())?,
                _ => outbox.send(reply.frames())?,
            }
            reply.clear();
        }
        let count = match socket.read(&mut chunk) {
            Ok(0) if stopping.load(Ordering::Acquire) => return Ok(LoopEnd::Stopped),
            Ok(0) if decoder.pending() > 0 => {
                let got = decoder.pending();
                return Err(FrameError::Truncated { got }.into());
            }
            Ok(0) => return Ok(LoopEnd::Closed),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error.into()),
        };
        read_at = Instant::now();
        decoder.buffer().extend_from_slice(&chunk[..count]);
    }
}
