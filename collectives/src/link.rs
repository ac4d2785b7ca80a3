//! One peer's lane with what is half read and half written on it.
//!
//! A lane outlives operations that fail. What was begun on it is always brought to its end: the rest of a
//! frame that was half sent is kept (as a copy) and sent before anything else; the rest of one that was half
//! received is read and dropped. So both sides stay in step without a new connection.

mod backlog;
mod buffer;

use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use crate::header::{Data, HEADER, Header};
use crate::lane::{EndedLane, Lane, LaneError};
use crate::operation::{Operation, Tag};
use crate::record::Moved;
use crate::scratch::Scratch;
use backlog::Backlog;
use buffer::ReadBuffer;

/// What is being read.
#[derive(Debug)]
pub(crate) enum Inbound {
    /// The next header.
    Header,
    /// A header has come; its payload waits until somebody wants it.
    Held(Header),
    /// Payload for an action of the present step.
    Payload {
        header: Data,
        action: usize,
        got: usize,
    },
    /// Text about a failure.
    Text { header: Header, text: Vec<u8> },
    /// Payload that nobody wants; so much is left.
    Discard(usize),
}

/// A data frame that is being written. The payload lies in the working buffer.
#[derive(Debug)]
struct Outgoing {
    header: [u8; HEADER],
    payload: Range<usize>,
    sent: usize,
}

/// How a link ended.
#[derive(Debug, Clone)]
pub(crate) struct Ended {
    pub(crate) reason: String,
    /// No other link to the peer can follow.
    pub(crate) is_final: bool,
    pub(crate) at: Instant,
}

/// Why reading stopped.
#[derive(Debug, Clone)]
pub(crate) enum Stop {
    Ended(String),
    Protocol(String),
}

impl From<LaneError> for Stop {
    fn from(error: LaneError) -> Self {
        Self::Ended(error.to_string())
    }
}

/// What became of a link in the present operation.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Present {
    /// Data of the operation went over it, in either direction.
    pub(crate) used: bool,
    /// The operation has begun to make it, or has asked the peer for another one.
    pub(crate) begun: bool,
    /// The operation has found it broken before, and waits for a new one or has it.
    pub(crate) relinked: bool,
}

/// What the peer has said, each in which operation last.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Said {
    /// Its deadline has passed.
    pub(crate) stalled_in: Option<Tag>,
    /// It has no more data.
    pub(crate) joined_in: Option<Tag>,
    /// What it asks for: it has begun that.
    pub(crate) came: Option<(Tag, Operation)>,
}

#[derive(Debug, Default)]
pub(crate) struct Link {
    lane: Option<Box<dyn Lane>>,
    /// Of the last lane.
    kind: &'static str,
    /// A task is making the lane.
    pub(crate) connecting: bool,
    /// The peer has asked for a new lane while this one was there. As a rule the lane has ended for the peer; a question that crosses a
    /// new lane costs one lane more when that one ends.
    pub(crate) requested: bool,
    /// How the last lane ended, while there is no new one.
    pub(crate) ended: Option<Ended>,
    pub(crate) inbound: Option<Inbound>,
    buffer: ReadBuffer,
    /// Where a segment waits that is combined when it is complete.
    pub(crate) stage: Scratch,
    outgoing: Option<Outgoing>,
    backlog: Backlog,
    /// Nothing can be written any more. What the peer said before may still be read.
    pub(crate) write_error: Option<String>,
    pub(crate) present: Present,
    pub(crate) said: Said,
    /// Bytes that went out and came in, and how many of them are counted already.
    moved: Moved,
    counted: Moved,
}

impl Link {
    /// What kind of lane it goes over.
    pub(crate) fn kind(&self) -> &'static str {
        self.kind
    }

    pub(crate) fn is_up(&self) -> bool {
        self.lane.is_some()
    }

    /// Whether there will be no other lane: the peer is gone.
    pub(crate) fn is_over(&self) -> bool {
        !self.is_up() && self.ended.as_ref().is_some_and(|ended| ended.is_final)
    }

    /// Nobody is there who could make another lane in place of the one that has ended: the peer is gone. Returns `false` if there was
    /// none: then the peer may not be there yet.
    pub(crate) fn nobody_is_there(&mut self) -> bool {
        let ended = self.ended.as_mut();
        ended.map(|ended| ended.is_final = true).is_some()
    }

    /// Whether the last lane has ended, be it behind what nobody wants yet.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.is_some() || self.buffer.has_ended()
    }

    /// A link over a lane.
    pub(crate) fn over(lane: Box<dyn Lane>) -> Self {
        Self {
            kind: lane.kind(),
            lane: Some(lane),
            inbound: Some(Inbound::Header),
            ..Self::default()
        }
    }

    /// Takes the place of this one. What was under way here is forgotten.
    pub(crate) fn install(&mut self, new: Self) {
        let moved = Moved {
            sent: self.moved.sent + new.moved.sent,
            received: self.moved.received + new.moved.received,
        };
        *self = Self {
            stage: std::mem::take(&mut self.stage),
            present: Present {
                relinked: self.present.relinked,
                ..Present::default()
            },
            moved,
            counted: self.counted,
            ..new
        };
    }

    /// The lane, and what was read from it, if that is no frame of a link and the lane has not ended.
    pub(crate) fn into_lane(self) -> Option<(Box<dyn Lane>, Vec<u8>)> {
        let is_whole = matches!(self.inbound, Some(Inbound::Header)) && !self.has_ended();
        let read = self.buffer.held().to_vec();
        self.lane.filter(|_| is_whole).map(|lane| (lane, read))
    }

    /// What moved since this was asked last, and over which kind of lane.
    pub(crate) fn take_moved(&mut self) -> Option<(&'static str, Moved)> {
        if self.moved == self.counted {
            return None;
        }
        let news = Moved {
            sent: self.moved.sent - self.counted.sent,
            received: self.moved.received - self.counted.received,
        };
        self.counted = self.moved;
        Some((self.kind, news))
    }

    /// Drops the lane.
    pub(crate) fn end(&mut self, reason: String) {
        if let Some(lane) = self.lane.take() {
            tracing::debug!(lane = lane.kind(), %reason, "a link ended");
            let reason = match self.write_error.take() {
                Some(write) if write != reason => format!("{reason} (after: {write})"),
                _ => reason,
            };
            self.ended = Some(Ended {
                reason: format!("its {} link ended: {reason}", lane.kind()),
                is_final: lane.end_is_final(),
                at: Instant::now(),
            });
        }
        self.inbound = None;
        self.outgoing = None;
        self.backlog.clear();
    }

    /// Gives back what an ended lane holds. What was read from it stays, and how it ended.
    pub(crate) fn let_go(&mut self) {
        if self.buffer.has_ended()
            && let Some(lane) = self.lane.take()
        {
            self.lane = Some(Box::new(EndedLane::of(&*lane)));
        }
    }

    /// Leaves the operation: what is half done is finished later. `work` is the working buffer.
    pub(crate) fn abandon(&mut self, work: &[u8]) {
        if let Some(outgoing) = self.outgoing.take()
            && outgoing.sent > 0
        {
            // Before the notices that came after it: nothing may come between the parts of a frame.
            let header = outgoing.sent.min(HEADER);
            let payload = outgoing.sent.saturating_sub(HEADER);
            self.backlog.put_rest(&[
                &outgoing.header[header..],
                &work[outgoing.payload][payload..],
            ]);
        }
        if let Some(Inbound::Payload { header, got, .. }) = &self.inbound {
            self.inbound = Some(Inbound::Discard(header.length as usize - got));
        }
    }

    /// Puts a notice, or several, behind what is to be sent. If the peer reads nothing for long, older ones give way.
    pub(crate) fn notify(&mut self, frames: &[u8]) {
        if self.lane.is_some() && self.write_error.is_none() {
            self.backlog.put(frames);
        }
    }

    /// Sends a frame with a descriptor beside it. Pending if other frames come first.
    pub(crate) fn poll_offer(
        &mut self,
        cx: &mut Context<'_>,
        frame: &[u8],
        descriptor: BorrowedFd<'_>,
    ) -> Poll<Result<(), LaneError>> {
        ready!(self.poll_backlog(cx))?;
        if let Some(lane) = &mut self.lane {
            let sent = ready!(lane.poll_write_with(cx, frame, descriptor))?;
            self.moved.sent += sent as u64;
            self.backlog.put_rest(&[&frame[sent..]]);
        }
        Poll::Ready(Ok(()))
    }

    /// The last descriptor that came.
    pub(crate) fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.lane.as_mut()?.take_descriptor()
    }

    /// Whether anything waits that no operation will send by itself.
    pub(crate) fn has_backlog(&self) -> bool {
        let unsent = self.lane.as_ref().is_some_and(|lane| lane.is_unsent());
        let waits = unsent || self.lane.is_some() && !self.backlog.is_empty();
        waits && self.write_error.is_none()
    }

    /// Whether a data frame is half written.
    pub(crate) fn is_sending(&self) -> bool {
        self.outgoing.is_some()
    }

    /// Begins a data frame. There must be none under way.
    pub(crate) fn send(&mut self, header: &Header, payload: Range<usize>) {
        debug_assert!(self.outgoing.is_none());
        self.outgoing = Some(Outgoing {
            header: header.encode(),
            payload,
            sent: 0,
        });
    }

    /// Writes what waits: the rest of a frame first, then notices, then a new frame. `work` is the working
    /// buffer. Ready with whether a data frame was completed.
    pub(crate) fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        work: &[u8],
    ) -> Poll<Result<bool, LaneError>> {
        // Nothing may come between the parts of a frame.
        if self.outgoing.as_ref().is_some_and(|frame| frame.sent > 0) {
            ready!(self.poll_send(cx, work))?;
            return Poll::Ready(Ok(true));
        }
        ready!(self.poll_backlog(cx))?;
        let sending = self.outgoing.is_some();
        ready!(self.poll_send(cx, work))?;
        Poll::Ready(Ok(sending))
    }

    /// Writes what waits from earlier operations, and notices. For use between operations.
    pub(crate) fn poll_backlog(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), LaneError>> {
        if self.outgoing.as_ref().is_some_and(|frame| frame.sent > 0) {
            // Its operation goes on with it, or gives it up.
            return Poll::Pending;
        }
        let Some(lane) = &mut self.lane else {
            return Poll::Ready(Ok(()));
        };
        while !self.backlog.is_empty() {
            let rest = self.backlog.unsent();
            let written = ready!(lane.poll_write(cx, &[IoSlice::new(rest)]))?;
            self.backlog.advance(written);
            self.moved.sent += written as u64;
        }
        lane.poll_flush(cx)
    }

    fn poll_send(&mut self, cx: &mut Context<'_>, work: &[u8]) -> Poll<Result<(), LaneError>> {
        let (Some(lane), Some(outgoing)) = (&mut self.lane, &mut self.outgoing) else {
            return Poll::Ready(Ok(()));
        };
        let payload = &work[outgoing.payload.clone()];
        while outgoing.sent < HEADER + payload.len() {
            let written = if outgoing.sent < HEADER {
                let parts = [
                    IoSlice::new(&outgoing.header[outgoing.sent..]),
                    IoSlice::new(payload),
                ];
                ready!(lane.poll_write(cx, &parts))?
            } else {
                let rest = &payload[outgoing.sent - HEADER..];
                ready!(lane.poll_write(cx, &[IoSlice::new(rest)]))?
            };
            outgoing.sent += written;
            self.moved.sent += written as u64;
            self.present.used = true;
        }
        ready!(lane.poll_flush(cx))?;
        self.outgoing = None;
        Poll::Ready(Ok(()))
    }

    /// Reads the next header.
    pub(crate) fn poll_header(&mut self, cx: &mut Context<'_>) -> Poll<Result<Header, Stop>> {
        let Some(lane) = &mut self.lane else {
            return Poll::Pending;
        };
        while self.buffer.held().len() < HEADER {
            ready!(self.buffer.poll_fill(lane.as_mut(), cx))?;
        }
        let mut bytes = [0; HEADER];
        bytes.copy_from_slice(&self.buffer.held()[..HEADER]);
        // One that is none stays: whoever looks next sees that, too.
        let header = Header::parse(&bytes).map_err(|error| Stop::Protocol(error.to_string()))?;
        self.buffer.skip(HEADER);
        self.moved.received += HEADER as u64;
        Poll::Ready(Ok(header))
    }

    /// The header of the frame that waits, if one is there. It stays.
    pub(crate) fn poll_held(&mut self, cx: &mut Context<'_>) -> Option<Header> {
        match self.inbound {
            Some(Inbound::Held(header)) => Some(header),
            Some(Inbound::Header) => {
                // The next operation sees the end, too, and what is no header.
                let Poll::Ready(Ok(header)) = self.poll_header(cx) else {
                    return None;
                };
                self.inbound = Some(Inbound::Held(header));
                Some(header)
            }
            _ => None,
        }
    }

    /// Reads some payload into `into`, which is not empty.
    pub(crate) fn poll_payload(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut [u8],
    ) -> Poll<Result<usize, Stop>> {
        let Some(lane) = &mut self.lane else {
            return Poll::Pending;
        };
        let count = ready!(self.buffer.poll_read(lane.as_mut(), cx, into))?;
        self.moved.received += count as u64;
        Poll::Ready(Ok(count))
    }

    /// As [`Link::poll_payload`], into the stage.
    pub(crate) fn poll_stage(
        &mut self,
        cx: &mut Context<'_>,
        range: Range<usize>,
    ) -> Poll<Result<usize, Stop>> {
        let Some(lane) = &mut self.lane else {
            return Poll::Pending;
        };
        let into = &mut self.stage.bytes_mut()[range];
        let count = ready!(self.buffer.poll_read(lane.as_mut(), cx, into))?;
        self.moved.received += count as u64;
        Poll::Ready(Ok(count))
    }

    /// The next frame that was not shown before, from the one on that waits until somebody wants it, if it can be read now without
    /// holding more than `most` bytes; with its text if it is a notice. It will be read again when its turn comes.
    pub(crate) fn poll_ahead(
        &mut self,
        cx: &mut Context<'_>,
        most: usize,
    ) -> Option<(Header, Option<Vec<u8>>)> {
        let (Some(lane), Some(Inbound::Held(held))) = (&mut self.lane, self.inbound.as_ref())
        else {
            return None;
        };
        self.buffer.poll_ahead(lane.as_mut(), cx, *held, most)
    }

    /// Frames that were [shown](Link::poll_ahead) before are shown again: another operation may have more use for them.
    pub(crate) fn look_again(&mut self) {
        self.buffer.look_again();
    }

    /// Between operations: ends the link if the lane has ended and everything that came before is taken.
    pub(crate) fn poll_end(&mut self, cx: &mut Context<'_>) {
        if !matches!(self.inbound, Some(Inbound::Header)) {
            return;
        }
        match self.poll_header(cx) {
            Poll::Ready(Ok(header)) => self.inbound = Some(Inbound::Held(header)),
            Poll::Ready(Err(Stop::Ended(reason))) => self.end(reason),
            // The next operation sees that what came is no header.
            Poll::Ready(Err(Stop::Protocol(_))) | Poll::Pending => {}
        }
    }

    /// Reads up to `most` bytes and drops them. Returns how many.
    pub(crate) fn poll_discard(
        &mut self,
        cx: &mut Context<'_>,
        most: usize,
    ) -> Poll<Result<usize, Stop>> {
        let Some(lane) = &mut self.lane else {
            return Poll::Pending;
        };
        if self.buffer.held().is_empty() {
            ready!(self.buffer.poll_fill(lane.as_mut(), cx))?;
        }
        let count = self.buffer.skip(most);
        self.moved.received += count as u64;
        Poll::Ready(Ok(count))
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;
    use crate::lane::MemoryLane;

    #[test]
    fn nothing_comes_between_the_parts_of_a_frame_that_is_given_up() {
        let mut cx = Context::from_waker(Waker::noop());
        let (near, mut far) = MemoryLane::pair(8);
        let mut link = Link::default();
        link.install(Link::over(Box::new(near)));
        let header = [7_u8; HEADER];
        let work: Vec<u8> = (0..32).collect();
        link.outgoing = Some(Outgoing {
            header,
            payload: 0..32,
            sent: 0,
        });
        // The lane is full in the middle of the frame; then there is something to tell, and then the operation ends.
        assert!(link.poll_write(&mut cx, &work).is_pending());
        assert!(link.is_sending());
        link.notify(&[99; 5]);
        link.abandon(&work);
        let mut got = Vec::new();
        loop {
            let done = link.poll_backlog(&mut cx).is_ready();
            let mut piece = [0; 16];
            while let Poll::Ready(Ok(count)) = far.poll_read(&mut cx, &mut piece) {
                got.extend_from_slice(&piece[..count]);
            }
            if done {
                break;
            }
        }
        assert_eq!(got, [&header[..], &work, &[99; 5]].concat());
    }
}
