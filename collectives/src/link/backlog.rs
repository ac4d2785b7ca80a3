//! What waits to be sent besides the data of the present operation: the rest of a frame that an earlier operation had begun, and
//! notices.
//!
//! A peer may read nothing for as long as it likes: it is late, and that is no reason to end its link, which it would take for the
//! death of this rank. So what waits is bounded in another way: notices are dropped that say the least to a peer which comes back.

use crate::header::{HEADER, Header, SEGMENT};
use crate::operation::Tag;

/// Most bytes of notices that wait for a peer that does not read.
const MOST: usize = SEGMENT;

/// So much memory is kept for the next ones.
const KEPT: usize = 16 << 10;

/// In bytes, in the order in which they are sent.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    bytes: Vec<u8>,
    /// So much of that is sent.
    sent: usize,
    /// What begins before this place is the rest of a frame of which the peer has the beginning.
    rest: usize,
}

impl Backlog {
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// What is still to be sent.
    pub(super) fn unsent(&self) -> &[u8] {
        &self.bytes[self.sent..]
    }

    /// So many bytes of that are sent.
    pub(super) fn advance(&mut self, count: usize) {
        self.sent += count;
        if self.sent == self.bytes.len() {
            self.clear();
        }
    }

    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(KEPT);
        (self.sent, self.rest) = (0, 0);
    }

    /// The peer has the beginning of a frame whose rest this is. It goes before all notices, of which none may be half sent.
    pub(super) fn put_rest(&mut self, rest: &[&[u8]]) {
        debug_assert_eq!((self.sent, self.rest), (0, 0));
        self.bytes.splice(..0, rest.concat());
        self.rest = rest.iter().map(|part| part.len()).sum();
    }

    /// Puts whole frames, or none, behind the others. Those go that are worth the least if too many wait.
    pub(super) fn put(&mut self, frames: &[u8]) {
        if self.bytes.capacity() == 0 {
            // How many frames wait at once depends on who is how fast: there is room for some from the beginning.
            self.bytes.reserve(8 * HEADER);
        }
        self.bytes.extend_from_slice(frames);
        if self.bytes.len() - self.rest > MOST {
            self.shorten();
        }
    }

    /// Forgets what is sent, and half of the notices if they are still too many.
    fn shorten(&mut self) {
        // Here the first frame begins of which nothing is sent.
        let mut begin = self.rest;
        while begin < self.sent {
            begin += self.frame_at(begin).1;
        }
        self.bytes.drain(..self.sent);
        begin -= self.sent;
        (self.sent, self.rest) = (0, begin);
        if self.bytes.len() - begin <= MOST {
            return;
        }
        // A peer that finds an operation's notice missing sees from a later one's that this rank has left that operation.
        let newest = self.frames().filter_map(|(header, _)| of(&header?)).max();
        self.drop_oldest(|header| match (header, newest) {
            (Header::AbortCall { call, .. }, Some(newest)) => *call < newest.call,
            (header, newest) => of(header).is_some_and(|tag| Some(tag) < newest),
        });
        // These are for people.
        self.drop_oldest(|header| matches!(header, Header::Doing { .. }));
        self.drop_oldest(|_| true);
    }

    /// The notices of which nothing is sent, and how long they are.
    fn frames(&self) -> impl Iterator<Item = (Option<Header>, usize)> {
        let mut at = self.rest;
        std::iter::from_fn(move || {
            let frame = (at < self.bytes.len()).then(|| self.frame_at(at))?;
            at += frame.1;
            Some(frame)
        })
    }

    /// The frame that begins there, and how long it is.
    fn frame_at(&self, at: usize) -> (Option<Header>, usize) {
        let rest = &self.bytes[at..];
        let header = rest.first_chunk::<HEADER>().map(Header::parse);
        match header {
            Some(Ok(header)) => (Some(header), (HEADER + header.length()).min(rest.len())),
            // None of this rank's own. What can't be told apart stays in one piece.
            _ => (None, rest.len()),
        }
    }

    /// Drops the oldest notices of those that may go, until half of the room is free.
    fn drop_oldest(&mut self, may_go: impl Fn(&Header) -> bool) {
        let (mut from, mut into) = (self.rest, self.rest);
        let mut excess = (self.bytes.len() - self.rest).saturating_sub(MOST / 2);
        while excess > 0 && from < self.bytes.len() {
            let (header, length) = self.frame_at(from);
            if header.as_ref().is_some_and(&may_go) {
                excess = excess.saturating_sub(length);
            } else {
                self.bytes.copy_within(from..from + length, into);
                into += length;
            }
            from += length;
        }
        self.bytes.drain(into..from);
    }
}

/// The operation that a notice is about, or the beginning of the call.
fn of(header: &Header) -> Option<Tag> {
    match *header {
        Header::Data(data) | Header::Ask(data) | Header::Consent(data) => Some(data.tag),
        Header::Doing { tag, .. } | Header::AbortOperation { tag, .. } => Some(tag),
        Header::AbortCall { call, .. } => Some(Tag::new(call, 0)),
        Header::Hello { .. } | Header::Welcome | Header::Refusal { .. } | Header::Share { .. } => {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use kolo_transport::ids::{CallId, Generation, Rank};

    use super::*;
    use crate::cause::Cause;
    use crate::error::CollectiveError;
    use crate::header::{Data, Share};
    use crate::operation::Operation;

    const GENERATION: Generation = Generation(1);

    fn abort(operation: u64) -> Vec<u8> {
        let cause = Cause::Failure(CollectiveError::PeerFailed {
            rank: Rank(0),
            reason: "x".repeat(1000),
            call: CallId(0),
        });
        cause.notice(GENERATION, Tag::new(1, operation))
    }

    fn doing(operation: u64) -> Vec<u8> {
        let header = Header::Doing {
            generation: GENERATION,
            tag: Tag::new(1, operation),
            rank: Rank(2),
            length: 1000,
        };
        [&header.encode()[..], &[b'x'; 1000]].concat()
    }

    fn consent(operation: u64) -> Vec<u8> {
        let data = Data {
            generation: GENERATION,
            tag: Tag::new(1, operation),
            operation: Operation::BARRIER,
            step: 0,
            offset: 0,
            length: 0,
        };
        Header::Consent(data).encode().to_vec()
    }

    fn share() -> Vec<u8> {
        let share = Share::Refuse;
        let generation = GENERATION;
        Header::Share { generation, share }.encode().to_vec()
    }

    fn headers(backlog: &Backlog) -> Vec<Header> {
        backlog
            .frames()
            .map(|(header, _)| header.unwrap())
            .collect()
    }

    /// Of operations, those that have a notice.
    fn operations(backlog: &Backlog) -> Vec<u64> {
        let tags = headers(backlog)
            .into_iter()
            .filter_map(|header| of(&header));
        tags.map(|tag| tag.operation).collect()
    }

    #[test]
    fn the_notices_of_the_oldest_operations_go_and_what_is_begun_stays() {
        let mut backlog = Backlog::default();
        backlog.put(&share());
        let half: Vec<u8> = (0..=u8::MAX).cycle().take(SEGMENT).collect();
        backlog.put_rest(&[&half[..10], &half[10..]]);
        for operation in 0..1000 {
            backlog.put(&abort(operation));
            assert!(backlog.bytes.len() <= SEGMENT + MOST);
        }
        assert_eq!(backlog.unsent()[..SEGMENT], half);
        assert!(matches!(headers(&backlog)[0], Header::Share { .. }));
        let left = operations(&backlog);
        assert!(left.len() > 100, "{left:?}");
        assert!(left.iter().copied().eq(1000 - left.len() as u64..1000));
        backlog.advance(backlog.unsent().len());
        assert!(backlog.is_empty() && backlog.bytes.capacity() <= KEPT);
    }

    #[test]
    fn a_notice_that_is_half_sent_is_sent_to_its_end() {
        let mut backlog = Backlog::default();
        let mut sent = Vec::new();
        for operation in 0..2000 {
            backlog.put(&abort(operation));
            // As a peer that reads slower than this rank writes, and never all.
            let count = 777.min(backlog.unsent().len());
            sent.extend_from_slice(&backlog.unsent()[..count]);
            backlog.advance(count);
            assert!(backlog.bytes.len() <= MOST + 2000);
        }
        sent.extend_from_slice(backlog.unsent());
        backlog.advance(backlog.unsent().len());
        assert!(backlog.is_empty());
        // All of that is frames.
        backlog.bytes = sent;
        let came = operations(&backlog);
        assert!(came.is_sorted_by(|one, next| one < next) && came.len() < 2000);
        assert_eq!(came.last(), Some(&1999));
    }

    #[test]
    fn of_one_operation_what_is_for_people_goes_first() {
        let mut backlog = Backlog::default();
        backlog.put(&consent(0));
        backlog.put(&consent(7));
        for _ in 0..1000 {
            backlog.put(&doing(7));
        }
        backlog.put(&abort(7));
        let kept = headers(&backlog);
        assert!(matches!(kept[0], Header::Consent(data) if data.tag.operation == 7));
        assert!(matches!(kept.last(), Some(Header::AbortOperation { .. })));
        // A peer that asks for more and more and never reads gets no more memory for that.
        for _ in 0..10_000 {
            backlog.put(&consent(7));
        }
        assert!(backlog.bytes.len() <= MOST);
    }

    #[test]
    fn a_call_that_ended_stays_until_there_is_a_later_one() {
        let cause = Cause::Failure(CollectiveError::PeerFailed {
            rank: Rank(0),
            reason: "it failed".to_owned(),
            call: CallId(0),
        });
        let mut backlog = Backlog::default();
        backlog.put(&cause.call_notice(GENERATION, 0));
        backlog.put(&cause.call_notice(GENERATION, 1));
        for _ in 0..1000 {
            backlog.put(&doing(0));
        }
        let calls: Vec<u64> = headers(&backlog)
            .iter()
            .filter_map(|header| match header {
                Header::AbortCall { call, .. } => Some(*call),
                _ => None,
            })
            .collect();
        assert_eq!(calls, [1]);
    }
}
