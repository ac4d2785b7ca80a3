//! A link over which messages about named operations go, with what is half read and half written on it.

use std::io::IoSlice;
use std::task::{Context, Poll};
use std::time::Instant;

use super::book::ASKED;
use super::messages::{self, Inbox};
use crate::lane::{Lane, LaneError};

/// Most bytes that wait for a peer that does not read. The answers to all that a rank may have asked for are less, as a rule even
/// with the longest names: a peer with more unread bytes asks on without reading.
const BACKLOG: usize = ASKED * 2 * messages::NAME;

/// So many bytes that were sent are kept at most.
const KEPT: usize = 1 << 20;

/// What is for people is not said to a peer that has so many bytes unread.
const FOR_PEOPLE: usize = 1 << 20;

/// Most reads in a row.
const MOST_READS: usize = 16;

/// How a link has ended.
pub(super) struct Ended {
    pub(super) reason: String,
    /// The peer's process or its communicator is gone.
    pub(super) is_final: bool,
}

/// A link, or none.
#[derive(Debug, Default)]
pub(super) struct Line {
    pub(super) lane: Option<Box<dyn Lane>>,
    /// A task is making the link.
    pub(super) connecting: bool,
    /// The coordinator has asked for a new link while this one was there.
    pub(super) is_requested: bool,
    /// When the last link came.
    pub(super) since: Option<Instant>,
    /// The member has said what it has heard of the coordinator, which is said once on a link.
    pub(super) has_heard: bool,
    pub(super) out: Vec<u8>,
    sent: usize,
    pub(super) inbox: Inbox,
}

impl Line {
    /// Forgets all but that there was a link.
    pub(super) fn end(&mut self) {
        *self = Self {
            since: self.since,
            ..Self::default()
        };
    }

    /// Writes as much as goes.
    fn write(&mut self, cx: &mut Context<'_>) -> Result<(), LaneError> {
        let Some(lane) = &mut self.lane else {
            return Ok(());
        };
        if self.sent > KEPT && self.sent > self.out.len() / 2 {
            self.out.drain(..self.sent);
            self.out.shrink_to(2 * self.out.len());
            self.sent = 0;
        }
        while self.sent < self.out.len() {
            match lane.poll_write(cx, &[IoSlice::new(&self.out[self.sent..])]) {
                Poll::Ready(written) => self.sent += written?,
                Poll::Pending => return Ok(()),
            }
        }
        self.out.clear();
        self.sent = 0;
        if let Poll::Ready(flushed) = lane.poll_flush(cx) {
            flushed?;
        }
        Ok(())
    }

    fn unsent(&self) -> usize {
        self.out.len() - self.sent
    }

    /// Whether more bytes wait than a peer that reads can have asked for.
    pub(super) fn is_overfull(&self) -> bool {
        self.unsent() > BACKLOG
    }

    /// Whether the peer is linked and reads what it is sent.
    pub(super) fn is_read(&self) -> bool {
        self.lane.is_some() && self.unsent() <= FOR_PEOPLE
    }

    /// Whether something waits to be written.
    pub(super) fn is_unsaid(&self) -> bool {
        (self.lane.as_ref()).is_some_and(|lane| !self.out.is_empty() || lane.is_unsent())
    }

    /// Writes, and reads into the inbox. Returns whether there may be more to read.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Result<bool, Ended> {
        // A peer that takes nothing any more may have said something before: that is read first.
        let written = self.write(cx);
        let Some(lane) = &mut self.lane else {
            return Ok(false);
        };
        let error = 'end: {
            for _ in 0..MOST_READS {
                match lane.poll_read(cx, buffer) {
                    Poll::Ready(Ok(0)) => break 'end "the peer closed it".to_owned(),
                    Poll::Ready(Ok(count)) => self.inbox.push(&buffer[..count]),
                    Poll::Ready(Err(error)) => break 'end error.to_string(),
                    Poll::Pending => match written {
                        Ok(()) => return Ok(false),
                        Err(error) => break 'end error.to_string(),
                    },
                }
            }
            return Ok(true);
        };
        Err(Ended {
            reason: format!("its link for named operations ended: {error}"),
            is_final: lane.end_is_final(),
        })
    }
}
