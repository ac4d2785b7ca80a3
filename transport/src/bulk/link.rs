//! One connection: a stream of bytes each way, polled.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};
use rustls::crypto::cipher::OutboundChunks;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::records::{HEADER, MOST_BODY, MOST_PLAIN, Opened, RecordError, Records};
use crate::direct::Socket;
use crate::identity::Identity;
use crate::runtime::TransportRuntime;

/// Records that are sealed and given to the kernel together.
const BATCH: usize = 8;

/// Parts of a write that are looked at. The rest waits for the next call.
const MOST_PARTS: usize = 8;

/// What the kernel may write at once: fits the second-level cache, and saves most system calls.
const READ_BUFFER: usize = 256 << 10;

/// Records that are opened in one go.
const MOST_RECORDS: usize = 1024;

/// How long a dropped link still tries to deliver what was sent on it.
const LINGER: Duration = Duration::from_secs(2);

/// How a [`TlsLink`] ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LinkLost {
    /// The connection broke, or its peer is gone without a word: nobody vouches for which.
    #[error("the connection was lost: {reason}")]
    Broken {
        /// What the operating system said.
        reason: String,
    },
    /// The peer said why it ends the connection, for instance that it does not take this side's certificate.
    #[error("the peer ended the connection: {reason}")]
    Refused {
        /// The TLS alert.
        reason: String,
    },
    /// What came was not what the peer had sent, or breaks TLS.
    #[error("the connection can't be trusted: {reason}")]
    Tampered {
        /// What is wrong.
        reason: String,
    },
}

impl From<io::Error> for LinkLost {
    fn from(error: io::Error) -> Self {
        Self::Broken {
            reason: error.to_string(),
        }
    }
}

impl From<RecordError> for LinkLost {
    fn from(error: RecordError) -> Self {
        match error {
            RecordError::Alert(reason) => Self::Refused { reason },
            RecordError::Broken(reason) => Self::Tampered { reason },
        }
    }
}

/// A connection of TLS 1.3 over TCP to a peer whose certificate was checked. It carries bytes both ways and is polled, so that
/// one task can drive many in both directions. A thread in [`block_on`](crate::direct::block_on) that polls it sleeps on its
/// socket by itself. Dropped, it says that it ends, and delivers what was sent for two seconds more.
pub struct TlsLink {
    /// `None` while it is dropped.
    tcp: Option<Socket>,
    records: Records,
    peer: Identity,
    remote: SocketAddr,
    /// Sealed records that the kernel has not taken, and how much of the first it has.
    out: VecDeque<Vec<u8>>,
    out_sent: usize,
    /// What came and is not used; opened data is at `plain`, sealed data at `sealed`.
    buffer: Vec<u8>,
    plain: Range<usize>,
    sealed: Range<usize>,
    /// Nothing more comes.
    end: Option<Result<(), LinkLost>>,
    runtime: TransportRuntime,
}

impl TlsLink {
    pub(super) fn new(
        tcp: TcpStream,
        records: Records,
        peer: Identity,
        remote: SocketAddr,
        runtime: &TransportRuntime,
    ) -> io::Result<Self> {
        let socket = tcp.into_std()?.into();
        Ok(Self {
            tcp: Some(Socket::new(socket, runtime.handle().clone())),
            records,
            peer,
            remote,
            out: VecDeque::new(),
            out_sent: 0,
            buffer: Vec::new(),
            plain: 0..0,
            sealed: 0..0,
            end: None,
            runtime: runtime.clone(),
        })
    }

    /// Who is at the other end.
    pub fn peer(&self) -> &Identity {
        &self.peer
    }

    /// The peer's address.
    pub fn remote_addr(&self) -> SocketAddr {
        self.remote
    }

    /// Whether the peer itself has ended the connection, and said so.
    pub fn ended_by_peer(&self) -> bool {
        matches!(self.end, Some(Ok(()) | Err(LinkLost::Refused { .. })))
    }

    /// Takes some of the bytes, from the first part on, and says how many; not 0 unless there are none. What was taken is on
    /// its way when [`TlsLink::poll_flush`] says so. Pending while the peer does not read; the last waker is woken.
    ///
    /// # Errors
    ///
    /// [`LinkLost`]. There may still be something to read.
    pub fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize, LinkLost>> {
        ready!(self.poll_flush(cx))?;
        let mut taken = 0;
        loop {
            let mut chunks: [&[u8]; MOST_PARTS] = [&[]; MOST_PARTS];
            let mut count = 0;
            let mut skip = taken;
            for part in parts {
                if part.len() <= skip {
                    skip -= part.len();
                } else if count < MOST_PARTS {
                    chunks[count] = &part[skip..];
                    (count, skip) = (count + 1, 0);
                }
            }
            if count == 0 {
                return Poll::Ready(Ok(taken));
            }
            taken += self.seal(&chunks[..count])?;
            // What the kernel does not take now it takes in `poll_flush`.
            if self.poll_flush(cx)?.is_pending() {
                return Poll::Ready(Ok(taken));
            }
        }
    }

    /// Seals up to a batch.
    fn seal(&mut self, chunks: &[&[u8]]) -> Result<usize, LinkLost> {
        let mut rest = OutboundChunks::new(chunks);
        let mut taken = 0;
        for _ in 0..BATCH {
            if rest.is_empty() {
                break;
            }
            let (record, behind) = rest.split_at(MOST_PLAIN);
            taken += record.len();
            let out = &mut self.out;
            self.records
                .seal(record, |sealed| out.push_back(sealed))
                .map_err(|reason| LinkLost::Tampered { reason })?;
            rest = behind;
        }
        Ok(taken)
    }

    /// Ready when the kernel has all that was taken: no further call is needed for it to be sent.
    ///
    /// # Errors
    ///
    /// [`LinkLost`].
    pub fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), LinkLost>> {
        while !self.out.is_empty() {
            let Some(tcp) = &mut self.tcp else {
                return Poll::Ready(Ok(()));
            };
            let mut slices = [IoSlice::new(&[]); BATCH + 2];
            let (mut count, mut length) = (0, 0);
            for (slice, record) in slices.iter_mut().zip(&self.out) {
                let sent = if count == 0 { self.out_sent } else { 0 };
                *slice = IoSlice::new(&record[sent..]);
                (count, length) = (count + 1, length + slice.len());
            }
            let slices = &slices[..count];
            let written = ready!(tcp.poll_write_with(cx, length, |tcp| send(tcp, slices)))?;
            if written == 0 {
                return Poll::Ready(Err(io::Error::from(io::ErrorKind::WriteZero).into()));
            }
            self.sent(written);
        }
        Poll::Ready(Ok(()))
    }

    /// Whether [`TlsLink::poll_flush`] has something to do.
    pub fn is_unsent(&self) -> bool {
        !self.out.is_empty()
    }

    fn sent(&mut self, written: usize) {
        self.out_sent += written;
        while let Some(first) = self.out.front()
            && self.out_sent >= first.len()
        {
            self.out_sent -= first.len();
            self.out.pop_front();
        }
    }

    /// Fills some of `into`, which is not empty, and says how much; 0 when the peer has ended the connection in order. The last
    /// waker is woken.
    ///
    /// # Errors
    ///
    /// [`LinkLost`].
    pub fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut [u8],
    ) -> Poll<Result<usize, LinkLost>> {
        let mut filled = 0;
        for _ in 0..MOST_RECORDS {
            let count = self.plain.len().min(into.len() - filled);
            let from = self.plain.start;
            into[filled..filled + count].copy_from_slice(&self.buffer[from..from + count]);
            filled += count;
            self.plain.start += count;
            if filled == into.len() {
                return Poll::Ready(Ok(filled));
            }
            if self.open() {
                continue;
            }
            if filled > 0 {
                return Poll::Ready(Ok(filled));
            }
            if let Some(end) = &self.end {
                return Poll::Ready(end.clone().map(|()| 0));
            }
            ready!(self.poll_fill(cx));
        }
        if filled > 0 {
            return Poll::Ready(Ok(filled));
        }
        // The peer sends records with nothing in them. Others have their turn.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Opens the next record, if all of it is there.
    fn open(&mut self) -> bool {
        if self.end.is_some() || self.sealed.len() < HEADER {
            return false;
        }
        let sealed = &mut self.buffer[self.sealed.clone()];
        let length = usize::from(u16::from_be_bytes([sealed[3], sealed[4]]));
        let opened = if length > MOST_BODY {
            Err(RecordError::Broken(format!(
                "a record of {length} bytes; allowed is {MOST_BODY}"
            )))
        } else if sealed.len() < HEADER + length {
            return false;
        } else {
            let (header, body) = sealed.split_at_mut(HEADER);
            self.records.open(header[0], &mut body[..length])
        };
        let body = self.sealed.start + HEADER;
        self.sealed.start = body + length;
        match opened {
            Ok(Opened::Data(count)) => self.plain = body..body + count,
            Ok(Opened::Nothing) => {}
            Ok(Opened::Closed) => self.end = Some(Ok(())),
            Err(error) => self.end = Some(Err(error.into())),
        }
        self.end.is_none()
    }

    /// Reads more behind what is there. Ready if there is more, or an end.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.buffer.is_empty() {
            self.buffer = vec![0; READ_BUFFER];
        }
        if self.sealed.is_empty() {
            self.sealed = 0..0;
        } else if self.buffer.len() - self.sealed.start < 2 * (HEADER + MOST_BODY) {
            // A part of a record.
            self.buffer.copy_within(self.sealed.clone(), 0);
            self.sealed = 0..self.sealed.len();
        }
        self.plain = 0..0;
        let Some(tcp) = &mut self.tcp else {
            return Poll::Pending;
        };
        let space = &mut self.buffer[self.sealed.end..];
        let received = tcp.poll_read_with(cx, space.len(), |tcp| {
            Ok(rustix::net::recv(tcp, &mut *space, RecvFlags::empty())?.0)
        });
        match ready!(received) {
            Ok(0) => {
                let reason =
                    "the peer's side ended without a word; its process may be gone".to_owned();
                self.end = Some(Err(LinkLost::Broken { reason }));
            }
            Ok(count) => self.sealed.end += count,
            Err(error) => self.end = Some(Err(error.into())),
        }
        Poll::Ready(())
    }

    #[cfg(test)]
    pub(super) fn rekey_soon(&mut self) {
        self.records.rekey_soon();
    }

    /// Ends the connection at once, without a word. What was sent may be lost.
    pub fn abort(mut self) {
        self.tcp = None;
    }
}

impl Drop for TlsLink {
    fn drop(&mut self) {
        let Some(tcp) = self.tcp.take() else {
            return;
        };
        if matches!(self.end, Some(Err(_))) {
            return;
        }
        if let Ok(goodbye) = self.records.close_notify() {
            self.out.push_back(goodbye);
        }
        // As far as it goes at once: the process may end now.
        while let Some(first) = self.out.front() {
            match send(tcp.as_fd(), &[IoSlice::new(&first[self.out_sent..])]) {
                Ok(written) if written > 0 => self.sent(written),
                _ => break,
            }
        }
        if self.ended_by_peer() {
            return;
        }
        if self.out.is_empty() {
            // An error says that the peer has ended it.
            rustix::net::shutdown(&tcp, rustix::net::Shutdown::Write).ok();
        }
        let (out, sent) = (std::mem::take(&mut self.out), self.out_sent);
        let runtime = self.runtime.clone();
        let waiting = runtime.clone();
        runtime.handle().spawn(async move {
            let rest = async {
                let mut tcp = TcpStream::from_std(tcp.into_fd()?.into())?;
                for (record, sent) in out
                    .iter()
                    .zip([sent].into_iter().chain(std::iter::repeat(0)))
                {
                    tcp.write_all(&record[sent..]).await?;
                }
                tcp.shutdown().await?;
                // A socket that is closed with something unread in it takes back what the peer has not read.
                let mut unread = [0; 4096];
                while tcp.read(&mut unread).await? > 0 {}
                io::Result::Ok(())
            };
            // How it ended does not matter: it is over.
            drop(waiting.timeout(LINGER, rest).await);
        });
    }
}

fn send(tcp: BorrowedFd<'_>, parts: &[IoSlice<'_>]) -> io::Result<usize> {
    let mut nothing = SendAncillaryBuffer::default();
    let sent = rustix::net::sendmsg(tcp, parts, &mut nothing, SendFlags::NOSIGNAL)?;
    Ok(sent)
}

impl fmt::Debug for TlsLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsLink")
            .field("peer", &self.peer.to_string())
            .field("remote_addr", &self.remote)
            .finish_non_exhaustive()
    }
}
