//! Frames with file descriptors over a Unix socket: between a daemon and the processes it started.
//!
//! The frames are those of [`crate::frame`]. A frame that carries descriptors has a body of one byte: how
//! many there are, at most [`MAX_FDS`]. The descriptors themselves travel beside the frame's first byte
//! (`SCM_RIGHTS`). A frame without descriptors has no body.
//!
//! Linux keeps the two together: one `recvmsg` never returns the descriptors of two sends, and returns those
//! of a send with its first byte. So each batch of descriptors that is received belongs to exactly one frame
//! that announces some, in order, and is here before that frame is complete. What breaks this rule is
//! refused: a batch without a frame, a frame without its batch, a batch of another size.
//!
//! [`ControlSocket`] is for async code. [`FdReceiver`], [`encode`] and [`send_some`] are its parts for a
//! process that has a poll loop of its own.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytes::{Buf, BytesMut};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::Mutex;

use crate::frame::{self, Decoder, FrameError, InvalidFrame, Limits, PREFIX};

/// The most descriptors that one frame carries.
pub const MAX_FDS: usize = 16;

/// The longest frames on these sockets: heads up to 4 MiB and the count of descriptors.
const LIMITS: Limits = Limits {
    head: Limits::CONTROL.head,
    body: 1,
};

/// How much one `recvmsg` asks for, in bytes.
const READ_CHUNK: usize = 16 * 1024;

/// Batches of descriptors that may wait for the end of their frame. Only a peer that breaks the rules
/// sends a second one before the frame of the first is complete.
const MAX_BATCHES: usize = 4;

/// Encodes a frame that goes with `fds` descriptors.
///
/// # Errors
///
/// [`InvalidFrame::TooLong`] if the head is over 4 MiB; [`InvalidFrame::Encode`] if there are more descriptors
/// than [`MAX_FDS`] or the head can't be encoded.
pub fn encode<T: Serialize>(head: &T, fds: usize) -> Result<BytesMut, FrameError> {
    let count = u8::try_from(fds)
        .ok()
        .filter(|_| fds <= MAX_FDS)
        .ok_or_else(|| {
            InvalidFrame::Encode(format!(
                "{fds} descriptors with one frame, allowed are {MAX_FDS}"
            ))
        })?;
    let mut out = BytesMut::new();
    let body: &[u8] = if count == 0 { &[] } else { &[count] };
    frame::encode(&mut out, head, body)?;
    let head_len = out.len() - PREFIX - body.len();
    if head_len > LIMITS.head as usize {
        return Err(FrameError::Invalid(InvalidFrame::TooLong {
            part: "head",
            given: head_len as u64,
            limit: LIMITS.head,
        }));
    }
    Ok(out)
}

/// Sends as much of a frame as the socket takes now, `fds` beside the first byte. `Ok(n)` with n > 0 means
/// that the descriptors are on their way; the rest goes out with an empty list.
///
/// # Errors
///
/// `WouldBlock` if a non-blocking socket is full; `BrokenPipe` (never the signal) if the other end is closed.
pub fn send_some(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "{} descriptors with one frame, allowed are {MAX_FDS}",
                fds.len()
            ),
        ));
    }
    let sent = rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(
            socket,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        )
    })?;
    Ok(sent)
}

/// Descriptors that came with one frame.
#[derive(Debug)]
struct Batch {
    fds: Vec<OwnedFd>,
    /// This process could not take them all.
    cut: bool,
}

/// Cuts what a Unix socket receives into frames with their descriptors.
///
/// Take all frames with [`FdReceiver::next`] before the next [`FdReceiver::fill`].
#[derive(Debug)]
pub struct FdReceiver {
    decoder: Decoder,
    batches: VecDeque<Batch>,
}

impl Default for FdReceiver {
    fn default() -> Self {
        Self::new()
    }
}

impl FdReceiver {
    /// A receiver at the start of a stream.
    #[must_use]
    pub fn new() -> Self {
        Self {
            decoder: Decoder::new(LIMITS),
            batches: VecDeque::new(),
        }
    }

    /// Bytes of a frame that is not complete.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.decoder.pending()
    }

    /// Receives once. `Ok(0)`: the other end is closed. All descriptors are close-on-exec.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if a non-blocking socket has nothing; `InvalidData` if the peer sends descriptors that
    /// belong to no frame; others as `recvmsg(2)`.
    pub fn fill(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let buffer = self.decoder.buffer();
        let start = buffer.len();
        buffer.resize(start + READ_CHUNK, 0);
        let received = rustix::io::retry_on_intr(|| {
            rustix::net::recvmsg(
                socket,
                &mut [IoSliceMut::new(&mut buffer[start..])],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            )
        });
        buffer.truncate(start + received.as_ref().map_or(0, |message| message.bytes));
        let message = match received {
            Ok(message) => message,
            // The other end was closed with data in it that nobody read.
            Err(rustix::io::Errno::CONNRESET) => return Ok(0),
            Err(error) => return Err(error.into()),
        };
        let mut fds = Vec::new();
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = part {
                fds.extend(rights);
            }
        }
        let cut = message.flags.contains(ReturnFlags::CTRUNC);
        if cut || !fds.is_empty() {
            if self.batches.len() >= MAX_BATCHES {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "descriptors came that belong to no frame",
                ));
            }
            self.batches.push_back(Batch { fds, cut });
        }
        Ok(message.bytes)
    }

    /// The next frame and its descriptors; `None` if more must be received first.
    ///
    /// The descriptors are as many as were sent, or fewer if this process has no room for more (its limit of
    /// open files): the caller checks the number.
    ///
    /// # Errors
    ///
    /// [`InvalidFrame::Malformed`] for a head that is no `T` (the next frame can be read then) and for
    /// descriptors that don't match their frames; [`InvalidFrame::TooLong`].
    #[allow(clippy::should_implement_trait)] // the item type is the caller's choice
    pub fn next<T: DeserializeOwned>(&mut self) -> Result<Option<(T, Vec<OwnedFd>)>, FrameError> {
        let Some(raw) = self.decoder.next_raw()? else {
            if self.decoder.pending() == 0 && !self.batches.is_empty() {
                return Err(mismatch(
                    "descriptors came with a frame that announces none",
                ));
            }
            return Ok(None);
        };
        let count = raw.body.first().map_or(0, |count| usize::from(*count));
        let fds = if count == 0 {
            Vec::new()
        } else {
            let batch = self
                .batches
                .pop_front()
                .ok_or_else(|| mismatch("a frame announces descriptors and none came"))?;
            if batch.fds.len() > count || (batch.fds.len() < count && !batch.cut) {
                return Err(mismatch(&format!(
                    "a frame announces {count} descriptors and {} came",
                    batch.fds.len()
                )));
            }
            batch.fds
        };
        Ok(Some((frame::decode_head(&raw.head)?, fds)))
    }
}

fn mismatch(reason: &str) -> FrameError {
    FrameError::Invalid(InvalidFrame::Malformed {
        expected: "control",
        reason: reason.to_owned(),
    })
}

/// Frames and descriptors over a Unix stream socket, async.
///
/// Any number of tasks may send and receive through `&self`; frames are not mixed.
#[derive(Debug)]
pub struct ControlSocket {
    socket: UnixStream,
    reading: Mutex<FdReceiver>,
    /// The rest of a frame whose send was cancelled after it had begun.
    writing: Mutex<BytesMut>,
}

impl ControlSocket {
    /// A connected pair: this side, and the other as a plain blocking descriptor to give to a child process.
    /// Both are close-on-exec.
    ///
    /// # Errors
    ///
    /// If there are no descriptors left, or no I/O driver in the runtime.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok((Self::from_fd(ours)?, theirs))
    }

    /// Takes over a connected Unix stream socket. It becomes non-blocking and close-on-exec, so that the
    /// children of this process do not keep it open.
    ///
    /// # Errors
    ///
    /// `InvalidInput` if it is no Unix stream socket; as [`ControlSocket::pair`].
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        use rustix::net::sockopt;
        if sockopt::socket_domain(&fd)? != AddressFamily::UNIX
            || sockopt::socket_type(&fd)? != SocketType::STREAM
        {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a control socket must be a Unix stream socket",
            ));
        }
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?;
        rustix::io::ioctl_fionbio(&fd, true)?;
        Ok(Self {
            socket: UnixStream::from_std(fd.into())?,
            reading: Mutex::new(FdReceiver::new()),
            writing: Mutex::new(BytesMut::new()),
        })
    }

    /// Sends one frame with its descriptors. The caller keeps its own copies of them.
    ///
    /// Waits while the peer does not read; put a deadline around it. Cancel safe: a frame that is dropped
    /// half-way is completed by the next send, and one that has not begun is not sent.
    ///
    /// # Errors
    ///
    /// [`FrameError::Io`] if the other end is closed; as [`encode`].
    pub async fn send<T: Serialize>(
        &self,
        head: &T,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), FrameError> {
        let mut frame = encode(head, fds.len())?;
        let mut rest = self.writing.lock().await;
        self.flush(&mut rest).await?;
        let sent = self
            .socket
            .async_io(Interest::WRITABLE, || {
                send_some(self.socket.as_fd(), &frame, fds)
            })
            .await
            .map_err(failed)?;
        frame.advance(sent);
        *rest = frame;
        self.flush(&mut rest).await
    }

    async fn flush(&self, rest: &mut BytesMut) -> Result<(), FrameError> {
        while !rest.is_empty() {
            let sent = self
                .socket
                .async_io(Interest::WRITABLE, || {
                    send_some(self.socket.as_fd(), rest, &[])
                })
                .await
                .map_err(failed)?;
            rest.advance(sent);
        }
        Ok(())
    }

    /// The next frame and its descriptors; `None` if the other end closed between two frames.
    ///
    /// The list is shorter than what was sent if this process has too many files open; check it. Cancel safe.
    ///
    /// # Errors
    ///
    /// [`FrameError::Truncated`] if the stream ends inside a frame; as [`FdReceiver::next`].
    pub async fn recv<T: DeserializeOwned>(&self) -> Result<Option<(T, Vec<OwnedFd>)>, FrameError> {
        let mut receiver = self.reading.lock().await;
        loop {
            if let Some(message) = receiver.next()? {
                return Ok(Some(message));
            }
            let got = self
                .socket
                .async_io(Interest::READABLE, || receiver.fill(self.socket.as_fd()))
                .await
                .map_err(failed)?;
            if got == 0 {
                return match receiver.pending() {
                    0 => Ok(None),
                    got => Err(FrameError::Truncated { got }),
                };
            }
        }
    }

    /// Tells the other end that nothing more comes: its next receive is the end of the stream. What it sends
    /// can still be received here.
    ///
    /// # Errors
    ///
    /// `NotConnected` if the other end is gone.
    pub fn shutdown(&self) -> io::Result<()> {
        Ok(rustix::net::shutdown(&self.socket, Shutdown::Write)?)
    }
}

impl AsFd for ControlSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn failed(error: io::Error) -> FrameError {
    FrameError::Io(error.to_string())
}

#[cfg(test)]
mod tests;
