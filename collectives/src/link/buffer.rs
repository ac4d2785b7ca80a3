//! What was read from a lane and is not used yet.

use std::task::{Context, Poll, ready};

use super::Stop;
use crate::header::{Data, HEADER, Header, SEGMENT};
use crate::lane::Lane;

/// What is read ahead: small frames come out of one read.
const READ_AHEAD: usize = 8 * 1024;

/// Payload of at least this many bytes is read straight to its place.
const DIRECT: usize = 4 * 1024;

/// Most bytes that are read to find a notice behind frames that nobody wants yet. What a peer had sent when it gave up is in
/// the buffers of the network, a few MiB.
const MOST_AHEAD: usize = 32 * SEGMENT;

/// Bytes in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct ReadBuffer {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    /// So many of them were looked through for notices.
    seen: usize,
}

impl ReadBuffer {
    pub(super) fn held(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Copies as much as there is, up to the whole of `into`.
    pub(super) fn take(&mut self, into: &mut [u8]) -> usize {
        let count = into.len().min(self.end - self.start);
        into[..count].copy_from_slice(&self.bytes[self.start..self.start + count]);
        self.skip(count)
    }

    pub(super) fn skip(&mut self, most: usize) -> usize {
        let count = most.min(self.end - self.start);
        self.start += count;
        self.seen = self.seen.saturating_sub(count);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            if self.bytes.len() > READ_AHEAD {
                self.bytes = Vec::new();
            }
        }
        count
    }

    /// Reads more behind what is held.
    pub(super) fn poll_fill(
        &mut self,
        lane: &mut dyn Lane,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Stop>> {
        if self.bytes.is_empty() {
            self.bytes = vec![0; READ_AHEAD];
        }
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        self.end += ready!(poll_some(lane, cx, &mut self.bytes[self.end..]))?;
        Poll::Ready(Ok(()))
    }

    pub(super) fn poll_read(
        &mut self,
        lane: &mut dyn Lane,
        cx: &mut Context<'_>,
        into: &mut [u8],
    ) -> Poll<Result<usize, Stop>> {
        if self.held().is_empty() {
            if into.len() >= DIRECT {
                return poll_some(lane, cx, into);
            }
            // The next header comes along with the end of this payload.
            ready!(self.poll_fill(lane, cx))?;
        }
        Poll::Ready(Ok(self.take(into)))
    }

    /// The next notice that was not returned before, with its text. `from` says how many bytes of a frame come first. Nothing
    /// is taken away.
    pub(super) fn poll_notice(
        &mut self,
        lane: &mut dyn Lane,
        cx: &mut Context<'_>,
        from: usize,
    ) -> Option<(Header, Vec<u8>)> {
        self.seen = self.seen.max(from);
        loop {
            let rest = self.held().get(self.seen..).unwrap_or_default();
            if let Some((header, rest)) = rest.split_first_chunk::<HEADER>() {
                // What is wrong with it is found when its turn comes.
                let header = Header::parse(header).ok()?;
                if !header.is_notice() {
                    self.seen += HEADER + header.length();
                    continue;
                }
                if let Some(text) = rest.get(..header.length()) {
                    let text = text.to_vec();
                    self.seen += HEADER + text.len();
                    return Some((header, text));
                }
            }
            if !self.poll_ahead(lane, cx) {
                return None;
            }
        }
    }

    /// As [`ReadBuffer::poll_notice`], the first frame that asks for an operation, however often it was returned.
    pub(super) fn poll_asked(
        &mut self,
        lane: &mut dyn Lane,
        cx: &mut Context<'_>,
        from: usize,
    ) -> Option<Data> {
        let mut at = from;
        loop {
            let rest = self.held().get(at..).unwrap_or_default();
            if let Some(header) = rest.first_chunk::<HEADER>() {
                match Header::parse(header).ok()? {
                    Header::Data(data) | Header::Ask(data) | Header::Consent(data) => {
                        return Some(data);
                    }
                    other => at += HEADER + other.length(),
                }
            } else if !self.poll_ahead(lane, cx) {
                return None;
            }
        }
    }

    /// Reads more behind what is held, if there is anything to read and room for it.
    fn poll_ahead(&mut self, lane: &mut dyn Lane, cx: &mut Context<'_>) -> bool {
        if self.start == 0 && self.end == self.bytes.len() {
            if self.end >= MOST_AHEAD {
                return false;
            }
            self.bytes.resize(2 * self.end.max(READ_AHEAD / 2), 0);
        }
        // The end of the link is seen, too, when its turn comes.
        matches!(self.poll_fill(lane, cx), Poll::Ready(Ok(())))
    }
}

fn poll_some(
    lane: &mut dyn Lane,
    cx: &mut Context<'_>,
    into: &mut [u8],
) -> Poll<Result<usize, Stop>> {
    match ready!(lane.poll_read(cx, into))? {
        0 => Poll::Ready(Err(Stop::Ended("the peer closed it".to_owned()))),
        count => Poll::Ready(Ok(count)),
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use kolo_transport::ids::{Generation, Rank};

    use super::*;
    use crate::lane::MemoryLane;
    use crate::operation::{Operation, Tag};

    const GENERATION: Generation = Generation(1);
    const TAG: Tag = Tag {
        call: 0,
        operation: 4,
    };

    fn data(length: usize) -> Vec<u8> {
        let header = Header::Data(Data {
            generation: GENERATION,
            tag: TAG,
            operation: Operation::BARRIER,
            step: 1,
            offset: 0,
            length: length as u32,
        });
        let mut frame = header.encode().to_vec();
        frame.extend((0..length).map(|at| at as u8));
        frame
    }

    fn notice(text: &[u8]) -> (Header, Vec<u8>) {
        let header = Header::Doing {
            generation: GENERATION,
            tag: TAG,
            rank: Rank(2),
            length: text.len() as u32,
        };
        (header, [&header.encode(), text].concat())
    }

    /// Whatever the pieces in which it comes.
    #[test]
    fn notices_are_found_behind_other_frames_and_nothing_is_taken_away() {
        for piece in [1, 7, HEADER, 5000, 1 << 20] {
            let mut cx = Context::from_waker(Waker::noop());
            let (mut near, mut far) = MemoryLane::pair(2 << 20);
            let (first, second) = (notice(b"first"), notice(b""));
            let all = [
                &[9; 10_000][..],
                &first.1,
                &data(SEGMENT),
                &data(0),
                &second.1,
                &data(3),
            ]
            .concat();
            let (mut buffer, mut found) = (ReadBuffer::default(), Vec::new());
            for bytes in all.chunks(piece) {
                let sent = far.poll_write(&mut cx, &[std::io::IoSlice::new(bytes)]);
                assert!(matches!(sent, Poll::Ready(Ok(count)) if count == bytes.len()));
                // A reader that is a frame behind takes some in between.
                while let Some(notice) = buffer.poll_notice(&mut near, &mut cx, 10_000) {
                    found.push(notice);
                }
            }
            assert_eq!(found, [(first.0, b"first".to_vec()), (second.0, vec![])]);
            let mut read = vec![0; all.len()];
            let mut got = 0;
            while got < all.len() {
                let most = all.len().min(got + 4096);
                match buffer.poll_read(&mut near, &mut cx, &mut read[got..most]) {
                    Poll::Ready(Ok(count)) => got += count,
                    _ => panic!("{piece}: it ends after {got}"),
                }
            }
            assert!(read == all, "{piece}");
            assert!(buffer.bytes.len() <= READ_AHEAD);
        }
    }

    /// What stands before the frame that is held now is not looked through again, and what was found is found once.
    #[test]
    fn frames_that_are_taken_do_not_disturb_the_search() {
        let mut cx = Context::from_waker(Waker::noop());
        let (mut near, mut far) = MemoryLane::pair(1 << 20);
        let (first, second) = (notice(b"first"), notice(b"second"));
        let all = [&data(100)[..], &first.1, &data(50), &second.1].concat();
        let sent = far.poll_write(&mut cx, &[std::io::IoSlice::new(&all)]);
        assert!(matches!(sent, Poll::Ready(Ok(count)) if count == all.len()));
        let mut buffer = ReadBuffer::default();
        buffer.poll_fill(&mut near, &mut cx).is_ready();
        buffer.skip(HEADER);
        let found = buffer.poll_notice(&mut near, &mut cx, 100);
        assert_eq!(found, Some((first.0, b"first".to_vec())));
        // The first frame, the notice, and the header of the next frame.
        buffer.skip(100 + first.1.len() + HEADER);
        let found = buffer.poll_notice(&mut near, &mut cx, 50);
        assert_eq!(found, Some((second.0, b"second".to_vec())));
        assert_eq!(buffer.poll_notice(&mut near, &mut cx, 50), None);
    }

    #[test]
    fn the_search_takes_no_more_memory_than_that() {
        let mut cx = Context::from_waker(Waker::noop());
        let (mut near, mut far) = MemoryLane::pair(1 << 20);
        let mut buffer = ReadBuffer::default();
        let frame = data(SEGMENT);
        let mut sent = 0;
        for _ in 0..4 * MOST_AHEAD / frame.len() {
            let wrote = far.poll_write(&mut cx, &[std::io::IoSlice::new(&frame[sent..])]);
            if let Poll::Ready(Ok(count)) = wrote {
                sent = (sent + count) % frame.len();
            }
            assert_eq!(buffer.poll_notice(&mut near, &mut cx, 0), None);
        }
        assert_eq!(buffer.bytes.len(), MOST_AHEAD);
    }
}
