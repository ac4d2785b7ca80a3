//! One end of a link over rings in shared memory, beside a Unix socket.
//!
//! All bytes of the link go through the rings. The socket carries a byte when the other side sleeps, and descriptors. By its
//! end a side knows that the other is gone, by whatever death: then it reads what is left in the ring, and ends.

use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::task::{Context, Poll, ready};

use kolo_transport::direct;

use super::LaneError;
use super::bell::{Bell, Side};
use super::passing::PassingSocket;
use crate::shm::ring::{Broken, Reader, Writer};
use crate::shm::rings::{Direction, Rings, SIZE};

/// Most bytes that are written before the reader hears of them, or read before the writer has their room: so that both work
/// at once.
const PIECE: usize = 64 << 10;

/// How often the peer may ring for nothing before others have their turn: one that never stops holds up neither the other links
/// nor the deadline.
const MOST_RINGS: usize = 64;

/// Looks at the ring without one at the socket.
const MOST_LOOKS: u32 = 32;

#[derive(Debug)]
pub(super) struct RingEnd {
    rings: Rings,
    /// Where this side writes.
    out: Direction,
    writer: Writer,
    reader: Reader,
    bell: Bell,
    /// Since the last look at the socket.
    looks: u32,
    /// Bytes of the ring that this side writes for which there are pages.
    populated: usize,
    /// The peer breaks the rules.
    broken: Option<Broken>,
}

impl RingEnd {
    pub(super) fn new(rings: Rings, out: Direction) -> Self {
        Self {
            rings,
            out,
            writer: Writer::new(SIZE),
            reader: Reader::new(SIZE),
            bell: Bell::new(),
            looks: 0,
            populated: 0,
            broken: None,
        }
    }

    pub(super) fn poll_write(
        &mut self,
        socket: &mut PassingSocket,
        cx: &Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize, LaneError>> {
        if parts.iter().all(|part| part.is_empty()) {
            return Poll::Ready(Ok(0));
        }
        ready!(self.poll_room(socket, cx))?;
        Poll::Ready(self.write(socket, parts))
    }

    /// As [`RingEnd::poll_write`], with a descriptor, which is on the socket when its bytes are in the ring.
    pub(super) fn poll_write_with(
        &mut self,
        socket: &mut PassingSocket,
        cx: &mut Context<'_>,
        bytes: &[u8],
        descriptor: BorrowedFd<'_>,
    ) -> Poll<Result<usize, LaneError>> {
        // With room for some bytes, the descriptor is sent once.
        ready!(self.poll_room(socket, cx))?;
        match ready!(socket.poll_write_with(cx, &[0], descriptor)) {
            Ok(_) => Poll::Ready(self.write(socket, &[IoSlice::new(bytes)])),
            Err(error) => Poll::Ready(Err(LaneError::Ended {
                reason: error.to_string(),
            })),
        }
    }

    pub(super) fn poll_read(
        &mut self,
        socket: &mut PassingSocket,
        cx: &Context<'_>,
        into: &mut [u8],
    ) -> Poll<Result<usize, LaneError>> {
        for _ in 0..MOST_RINGS {
            // Before the look: what the peer gave before it went is seen after this.
            let is_gone = self.bell.is_gone();
            if self.held()? > 0 {
                self.reader.wake(&self.rings.words(self.out.other()));
                return Poll::Ready(self.read(socket, into));
            }
            if is_gone {
                return Poll::Ready(Ok(0));
            }
            if self.looks_again(cx) {
                self.reader.wake(&self.rings.words(self.out.other()));
                return Poll::Pending;
            }
            self.reader.sleep(&self.rings.words(self.out.other()));
            if self.held()? == 0 {
                ready!(self.poll_bell(socket, Side::Read, cx));
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Whether who polls looks at the ring again in any case. Then the peer need not ring, and a look at the socket is not worth
    /// what it costs, but now and then: who never sleeps must hear that the peer is gone, too.
    fn looks_again(&mut self, cx: &Context<'_>) -> bool {
        let again = direct::polls_again(cx) && self.looks < MOST_LOOKS;
        self.looks = if again { self.looks + 1 } else { 0 };
        again
    }

    /// Reads what is on the socket, for a descriptor may be there.
    pub(super) fn look(&mut self, socket: &mut PassingSocket) {
        if self.bell.look(socket) {
            self.wake_rung(Side::Read);
            self.wake_rung(Side::Write);
        }
    }

    fn held(&mut self) -> Result<usize, LaneError> {
        let held = self.reader.held(&self.rings.words(self.out.other()));
        self.checked(held)
    }

    fn room(&mut self) -> Result<usize, LaneError> {
        let room = self.writer.room(&self.rings.words(self.out));
        self.checked(room)
    }

    fn checked(&mut self, count: Result<usize, Broken>) -> Result<usize, LaneError> {
        if let Err(broken) = count {
            self.broken = self.broken.or(Some(broken));
        }
        match self.broken {
            Some(broken) => Err(LaneError::Protocol {
                reason: format!("the counts of the ring are wrong: {broken}"),
            }),
            None => Ok(count.unwrap_or(0)),
        }
    }

    /// Ready when there is room for some bytes.
    fn poll_room(
        &mut self,
        socket: &mut PassingSocket,
        cx: &Context<'_>,
    ) -> Poll<Result<(), LaneError>> {
        for _ in 0..MOST_RINGS {
            if self.bell.is_gone() {
                return Poll::Ready(Err(closed()));
            }
            if self.room()? > 0 {
                self.writer.wake(&self.rings.words(self.out));
                return Poll::Ready(Ok(()));
            }
            if self.looks_again(cx) {
                self.writer.wake(&self.rings.words(self.out));
                return Poll::Pending;
            }
            self.writer.sleep(&self.rings.words(self.out));
            if self.room()? == 0 {
                ready!(self.poll_bell(socket, Side::Write, cx));
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Writes as much as there is room for, at least a byte.
    fn write(&mut self, socket: &PassingSocket, parts: &[IoSlice<'_>]) -> Result<usize, LaneError> {
        let (mut given, mut written, mut room) = (0, 0, self.room()?);
        self.writer.rewind(&self.rings.words(self.out));
        for part in parts {
            let mut rest: &[u8] = part;
            while !rest.is_empty() {
                if written == PIECE || written == room {
                    self.give(socket, written);
                    given += std::mem::take(&mut written);
                    room = self.room()?;
                    if room == 0 {
                        return Ok(given);
                    }
                }
                let most = rest.len().min(room - written).min(PIECE - written);
                let spot = self.writer.spot(written, most);
                self.populated = self
                    .rings
                    .populate(self.out, spot, self.populated)
                    .map_err(|error| LaneError::Ended {
                        reason: format!("the system has no memory for the ring: {error}"),
                    })?;
                self.rings.write(self.out, spot, rest);
                written += spot.length;
                rest = &rest[spot.length..];
            }
        }
        self.give(socket, written);
        if self.bell.is_gone() {
            return Err(closed());
        }
        Ok(given + written)
    }

    fn give(&mut self, socket: &PassingSocket, count: usize) {
        if self.writer.give(&self.rings.words(self.out), count) {
            self.bell.ring(socket);
        }
    }

    /// Reads as much as there is, at least a byte.
    fn read(&mut self, socket: &PassingSocket, into: &mut [u8]) -> Result<usize, LaneError> {
        let from = self.out.other();
        let mut done = 0;
        while done < into.len() {
            let held = match self.held() {
                Ok(0) => break,
                Ok(held) => held,
                // The next read says so.
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            };
            let spot = self.reader.spot(held.min(into.len() - done).min(PIECE));
            self.rings.read(from, spot, &mut into[done..]);
            done += spot.length;
            if self.reader.give_back(&self.rings.words(from), spot.length) {
                self.bell.ring(socket);
            }
        }
        Ok(done)
    }

    /// Ready when the peer has rung or is gone.
    fn poll_bell(&mut self, socket: &mut PassingSocket, side: Side, cx: &Context<'_>) -> Poll<()> {
        ready!(self.bell.poll(socket, side, cx));
        // It may have been for the other side, which does not hear of it any more.
        self.wake_rung(side.other());
        Poll::Ready(())
    }

    fn wake_rung(&self, side: Side) {
        let was_rung = match side {
            Side::Read => self.reader.was_rung(&self.rings.words(self.out.other())),
            Side::Write => self.writer.was_rung(&self.rings.words(self.out)),
        };
        if was_rung || self.bell.is_gone() {
            self.bell.wake(side);
        }
    }
}

fn closed() -> LaneError {
    LaneError::Ended {
        reason: "the peer has left, or its process has ended".to_owned(),
    }
}

#[cfg(test)]
mod tests;
