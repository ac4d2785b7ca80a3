//! One link over which names are negotiated, with what is half read and half written on it.

use std::io::IoSlice;
use std::task::{Context, Poll};

use super::book::ASKED;
use super::loss::Words;
use super::wire::{self, Inbox};
use crate::lane::Lane;

/// Most bytes that wait for a rank that does not read, which is late and nothing worse. All answers to what a rank may have asked
/// for are less, as a rule even with the longest names and long reasons why they failed: who has more unread asks on without reading.
const BACKLOG: usize = ASKED * 2 * wire::NAME;

/// So much of what was sent is kept.
const KEPT: usize = 1 << 20;

/// What is for people is not said to a rank that has not read so much.
const FOR_PEOPLE: usize = 1 << 20;

/// Most reads in a row.
const MOST_READS: usize = 16;

/// A link, or none.
#[derive(Debug, Default)]
pub(super) struct Line {
    pub(super) lane: Option<Box<dyn Lane>>,
    /// This rank is making it ...
    pub(super) connecting: bool,
    /// ... because rank 0 asks for it, and not for something of its own.
    pub(super) is_asked: bool,
    pub(super) out: Vec<u8>,
    pub(super) sent: usize,
    pub(super) inbox: Inbox,
    /// Which rank the peer has lost. It may end because of that.
    pub(super) last_words: Option<Words>,
}

impl Line {
    /// Writes what it can.
    pub(super) fn write(&mut self, cx: &mut Context<'_>) -> Result<(), (String, bool)> {
        let Some(lane) = &mut self.lane else {
            return Ok(());
        };
        // Of what a slow reader has read nothing is kept.
        if self.sent > KEPT && self.sent > self.out.len() / 2 {
            self.out.drain(..self.sent);
            self.out.shrink_to(2 * self.out.len());
            self.sent = 0;
        }
        while self.sent < self.out.len() {
            match lane.poll_write(cx, &[IoSlice::new(&self.out[self.sent..])]) {
                Poll::Ready(Ok(count)) => self.sent += count,
                Poll::Ready(Err(error)) => return Err((error.to_string(), lane.end_is_final())),
                Poll::Pending => break,
            }
        }
        if self.sent == self.out.len() {
            self.out.clear();
            self.sent = 0;
            if lane.is_unsent()
                && let Poll::Ready(Err(error)) = lane.poll_flush(cx)
            {
                return Err((error.to_string(), lane.end_is_final()));
            }
        }
        Ok(())
    }

    /// Whether more waits than can be answers to what the peer asks for, or than it may be asked for.
    pub(super) fn is_overfull(&self) -> bool {
        self.out.len() - self.sent > BACKLOG
    }

    /// Whether the peer is linked and reads what it is sent.
    pub(super) fn is_read(&self) -> bool {
        self.lane.is_some() && self.out.len() - self.sent <= FOR_PEOPLE
    }

    /// Whether something waits to be written.
    pub(super) fn is_unsaid(&self) -> bool {
        (self.lane.as_ref()).is_some_and(|lane| !self.out.is_empty() || lane.is_unsent())
    }

    /// Whether something that was written may be dropped if this process ends at once.
    pub(super) fn is_leaving(&self) -> bool {
        self.lane.as_ref().is_some_and(|lane| lane.is_leaving())
    }

    /// Writes and reads. What came is in the inbox. Returns whether there may be more to read.
    pub(super) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Result<bool, (String, bool)> {
        // Who takes nothing any more may have said why before: that is read first.
        let written = self.write(cx);
        let Some(lane) = &mut self.lane else {
            return Ok(false);
        };
        for _ in 0..MOST_READS {
            match lane.poll_read(cx, buffer) {
                Poll::Ready(Ok(0)) => {
                    let ended = "the peer closed its link for names".to_owned();
                    return Err((ended, lane.end_is_final()));
                }
                Poll::Ready(Ok(count)) => self.inbox.push(&buffer[..count]),
                Poll::Ready(Err(error)) => return Err((error.to_string(), lane.end_is_final())),
                Poll::Pending => return written.map(|()| false),
            }
        }
        Ok(true)
    }
}
