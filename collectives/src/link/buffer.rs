//! What was read from a lane and is not used yet.

use std::task::{Context, Poll, ready};

use super::Stop;
use crate::header::{HEADER, Header};
use crate::lane::Lane;

/// What is read ahead: small frames come out of one read.
const READ_AHEAD: usize = 8 * 1024;

/// Payload of at least this many bytes is read straight to its place.
const DIRECT: usize = 4 * 1024;

/// Bytes in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct ReadBuffer {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    /// So many of them were looked through for notices, or, of payload that was not there yet, will have been.
    seen: usize,
    /// The notice whose payload they begin with was found.
    held_seen: bool,
    /// How the lane has ended behind them. It may say it once.
    ended: Option<Stop>,
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
        self.held_seen = false;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            if self.bytes.len() > READ_AHEAD {
                self.bytes = Vec::new();
            }
        }
        count
    }

    /// What was looked through for notices is looked through again.
    pub(super) fn search_again(&mut self) {
        (self.seen, self.held_seen) = (0, false);
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
        let count = ready!(poll_some(
            lane,
            cx,
            &mut self.bytes[self.end..],
            &mut self.ended
        ))?;
        self.end += count;
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
                let count = ready!(poll_some(lane, cx, into, &mut self.ended))?;
                self.seen = self.seen.saturating_sub(count);
                return Poll::Ready(Ok(count));
            }
            // The next header comes along with the end of this payload.
            ready!(self.poll_fill(lane, cx))?;
        }
        Poll::Ready(Ok(self.take(into)))
    }

    /// The next notice that was not returned before, with its text. `held` is the header of the first frame, whose payload comes
    /// first. Nothing is taken away. `most` is how many bytes may be held.
    pub(super) fn poll_notice(
        &mut self,
        lane: &mut dyn Lane,
        cx: &mut Context<'_>,
        held: Header,
        most: usize,
    ) -> Option<(Header, Vec<u8>)> {
        if !self.held_seen && held.is_notice() {
            while self.held().len() < held.length() {
                self.poll_ahead(lane, cx, most).then_some(())?;
            }
            self.held_seen = true;
            return Some((held, self.held()[..held.length()].to_vec()));
        }
        self.seen = self.seen.max(held.length());
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
            self.poll_ahead(lane, cx, most).then_some(())?;
        }
    }

    /// Shows every frame whose header is there, with its payload if that is there, too.
    pub(super) fn poll_frames(
        &mut self,
        lane: &mut dyn Lane,
        cx: &mut Context<'_>,
        held: Header,
        most: usize,
        mut see: impl FnMut(Header, Option<&[u8]>),
    ) {
        while self.poll_ahead(lane, cx, most) {}
        let bytes = self.held();
        see(held, bytes.get(..held.length()));
        let mut rest = bytes.get(held.length()..).unwrap_or_default();
        while let Some((header, behind)) = rest.split_first_chunk::<HEADER>() {
            let Ok(header) = Header::parse(header) else {
                return;
            };
            see(header, behind.get(..header.length()));
            rest = behind.get(header.length()..).unwrap_or_default();
        }
    }

    /// Whether the lane has ended behind what is held.
    pub(super) fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Reads more behind what is held, if there is anything to read and room for it.
    fn poll_ahead(&mut self, lane: &mut dyn Lane, cx: &mut Context<'_>, most: usize) -> bool {
        if self.start == 0 && self.end == self.bytes.len() {
            if self.end >= most {
                return false;
            }
            self.bytes.resize(2 * self.end.max(READ_AHEAD / 2), 0);
        }
        // The end of the lane is seen when its turn comes.
        matches!(self.poll_fill(lane, cx), Poll::Ready(Ok(())))
    }
}

fn poll_some(
    lane: &mut dyn Lane,
    cx: &mut Context<'_>,
    into: &mut [u8],
    ended: &mut Option<Stop>,
) -> Poll<Result<usize, Stop>> {
    if let Some(stop) = ended {
        return Poll::Ready(Err(stop.clone()));
    }
    let stop = match ready!(lane.poll_read(cx, into)) {
        Ok(0) => Stop::Ended("the peer has left, or its process has ended".to_owned()),
        Ok(count) => return Poll::Ready(Ok(count)),
        Err(error) => Stop::from(error),
    };
    *ended = Some(stop.clone());
    Poll::Ready(Err(stop))
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use kolo_transport::ids::{Generation, Rank};

    use super::*;
    use crate::header::{Data, SEGMENT};
    use crate::lane::MemoryLane;
    use crate::operation::{Operation, Tag};

    const GENERATION: Generation = Generation(1);
    const TAG: Tag = Tag::new(0, 4);

    const MOST: usize = 4 << 20;

    fn header(length: usize) -> Header {
        Header::Data(Data {
            generation: GENERATION,
            tag: TAG,
            operation: Operation::BARRIER,
            step: 1,
            offset: 0,
            length: length as u32,
        })
    }

    fn data(length: usize) -> Vec<u8> {
        let mut frame = header(length).encode().to_vec();
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
                while let Some(notice) =
                    buffer.poll_notice(&mut near, &mut cx, header(10_000), MOST)
                {
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
        let found = buffer.poll_notice(&mut near, &mut cx, header(100), MOST);
        assert_eq!(found, Some((first.0, b"first".to_vec())));
        // The first frame, the notice, and the header of the next frame.
        buffer.skip(100 + first.1.len() + HEADER);
        let found = buffer.poll_notice(&mut near, &mut cx, header(50), MOST);
        assert_eq!(found, Some((second.0, b"second".to_vec())));
        assert_eq!(
            buffer.poll_notice(&mut near, &mut cx, header(50), MOST),
            None
        );
    }

    #[test]
    fn the_search_takes_no_more_memory_than_that() {
        let mut cx = Context::from_waker(Waker::noop());
        let (mut near, mut far) = MemoryLane::pair(1 << 20);
        let mut buffer = ReadBuffer::default();
        let frame = data(SEGMENT);
        let mut sent = 0;
        for _ in 0..4 * MOST / frame.len() {
            let wrote = far.poll_write(&mut cx, &[std::io::IoSlice::new(&frame[sent..])]);
            if let Poll::Ready(Ok(count)) = wrote {
                sent = (sent + count) % frame.len();
            }
            assert_eq!(
                buffer.poll_notice(&mut near, &mut cx, header(0), MOST),
                None
            );
        }
        assert_eq!(buffer.bytes.len(), MOST);
    }

    /// The payload that the search has jumped over is read straight to its place, and the search goes on where it ends.
    #[test]
    fn payload_that_comes_after_the_search_does_not_lead_it_astray() {
        let mut cx = Context::from_waker(Waker::noop());
        let (mut near, mut far) = MemoryLane::pair(2 << 20);
        let mut send = |bytes: &[u8]| {
            let sent = far.poll_write(&mut cx, &[std::io::IoSlice::new(bytes)]);
            assert!(matches!(sent, Poll::Ready(Ok(count)) if count == bytes.len()));
        };
        let mut cx = Context::from_waker(Waker::noop());
        let first = data(SEGMENT);
        let mut buffer = ReadBuffer::default();
        // The header was taken, and half of the payload is there.
        send(&first[HEADER..SEGMENT / 2]);
        let held = header(SEGMENT);
        assert_eq!(
            buffer.poll_notice(&mut near, &mut cx, held, READ_AHEAD),
            None
        );
        let notice = notice(b"after it");
        send(&first[SEGMENT / 2..]);
        send(&data(7));
        send(&notice.1);
        let mut payload = vec![0; SEGMENT];
        let mut got = 0;
        while got < SEGMENT {
            match buffer.poll_read(&mut near, &mut cx, &mut payload[got..]) {
                Poll::Ready(Ok(count)) => got += count,
                _ => panic!("it is there"),
            }
        }
        assert!(payload == first[HEADER..]);
        // The next header is taken.
        while buffer.held().len() < HEADER {
            assert!(buffer.poll_fill(&mut near, &mut cx).is_ready());
        }
        buffer.skip(HEADER);
        let found = buffer.poll_notice(&mut near, &mut cx, header(7), MOST);
        assert_eq!(found, Some((notice.0, b"after it".to_vec())));
    }

    #[test]
    fn a_notice_that_is_held_itself_is_found_once() {
        let mut cx = Context::from_waker(Waker::noop());
        let (mut near, mut far) = MemoryLane::pair(1 << 20);
        let (first, second) = (notice(b"first"), notice(b"second"));
        let mut buffer = ReadBuffer::default();
        let mut find = |bytes: &[u8]| {
            if !bytes.is_empty() {
                let sent = far.poll_write(&mut cx, &[std::io::IoSlice::new(bytes)]);
                assert!(matches!(sent, Poll::Ready(Ok(count)) if count == bytes.len()));
            }
            buffer.poll_notice(&mut near, &mut cx, first.0, MOST)
        };
        assert_eq!(find(b"fir"), None);
        assert_eq!(find(b"st"), Some((first.0, b"first".to_vec())));
        assert_eq!(find(b""), None);
        assert_eq!(find(&second.1), Some((second.0, b"second".to_vec())));

        // One without a text, as no rank of ours sends.
        let (mut near, _far) = MemoryLane::pair(1 << 20);
        let mut buffer = ReadBuffer::default();
        let empty = self::notice(b"").0;
        let mut find = || buffer.poll_notice(&mut near, &mut cx, empty, MOST);
        assert_eq!(find(), Some((empty, Vec::new())));
        assert_eq!(find(), None);
    }

    #[test]
    fn what_was_found_is_found_again_if_it_is_asked_for() {
        let mut cx = Context::from_waker(Waker::noop());
        let (mut near, mut far) = MemoryLane::pair(1 << 20);
        let (first, second) = (notice(b"first"), notice(b"second"));
        let all = [&first.1[HEADER..], &data(9), &second.1].concat();
        let sent = far.poll_write(&mut cx, &[std::io::IoSlice::new(&all)]);
        assert!(matches!(sent, Poll::Ready(Ok(count)) if count == all.len()));
        let mut buffer = ReadBuffer::default();
        for _ in 0..2 {
            let mut find = || buffer.poll_notice(&mut near, &mut cx, first.0, MOST);
            assert_eq!(find(), Some((first.0, b"first".to_vec())));
            assert_eq!(find(), Some((second.0, b"second".to_vec())));
            assert_eq!(find(), None);
            buffer.search_again();
        }
    }

    #[test]
    fn frames_are_shown_in_order_with_the_texts_that_are_there() {
        let mut cx = Context::from_waker(Waker::noop());
        let (mut near, mut far) = MemoryLane::pair(1 << 20);
        let notice = notice(b"text");
        let all = [
            &data(3)[HEADER..],
            &notice.1,
            &data(5),
            &data(9)[..HEADER + 4],
        ]
        .concat();
        let sent = far.poll_write(&mut cx, &[std::io::IoSlice::new(&all)]);
        assert!(matches!(sent, Poll::Ready(Ok(count)) if count == all.len()));
        drop(far);
        let mut buffer = ReadBuffer::default();
        for _ in 0..2 {
            let mut shown = Vec::new();
            buffer.poll_frames(&mut near, &mut cx, header(3), MOST, |header, text| {
                shown.push((header, text.map(<[u8]>::len)));
            });
            let expected = [
                (header(3), Some(3)),
                (notice.0, Some(4)),
                (header(5), Some(5)),
                (header(9), None),
            ];
            assert_eq!(shown, expected);
            assert!(buffer.has_ended());
        }
    }
}
