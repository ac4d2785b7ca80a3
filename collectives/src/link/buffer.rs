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
    /// So many of them were looked through, or, of payload that was not there yet, will have been.
    seen: usize,
    /// The frame whose payload they begin with was shown.
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

    /// What was looked through is looked through again.
    pub(super) fn look_again(&mut self) {
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

    /// The next frame that was not shown before, with its text if it is a notice. `held` is the header of the first frame, whose
    /// payload comes first. Nothing is taken away. `most` is how many bytes may be held.
    pub(super) fn poll_ahead(
        &mut self,
        lane: &mut dyn Lane,
        cx: &mut Context<'_>,
        held: Header,
        most: usize,
    ) -> Option<(Header, Option<Vec<u8>>)> {
        if !self.held_seen {
            while held.is_notice() && self.held().len() < held.length() {
                self.poll_more(lane, cx, most).then_some(())?;
            }
            self.held_seen = true;
            let text = || self.held()[..held.length()].to_vec();
            return Some((held, held.is_notice().then(text)));
        }
        self.seen = self.seen.max(held.length());
        loop {
            let rest = self.held().get(self.seen..).unwrap_or_default();
            if let Some((header, rest)) = rest.split_first_chunk::<HEADER>() {
                // What is wrong with it is found when its turn comes.
                let header = Header::parse(header).ok()?;
                let text = rest.get(..header.length()).map(<[u8]>::to_vec);
                let text = text.filter(|_| header.is_notice());
                if text.is_some() || !header.is_notice() {
                    self.seen += HEADER + header.length();
                    return Some((header, text));
                }
            }
            self.poll_more(lane, cx, most).then_some(())?;
        }
    }

    /// Whether the lane has ended behind what is held.
    pub(super) fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Reads more behind what is held, if there is anything to read and room for it.
    fn poll_more(&mut self, lane: &mut dyn Lane, cx: &mut Context<'_>, most: usize) -> bool {
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
    use std::io::IoSlice;
    use std::task::Waker;

    use kolo_transport::ids::{Generation, Rank};
    use proptest::prelude::*;

    use super::*;
    use crate::header::{Data, SEGMENT};
    use crate::lane::MemoryLane;
    use crate::operation::{Operation, Tag};

    const GENERATION: Generation = Generation(1);
    const MOST: usize = 4 << 20;

    fn data(length: usize) -> Vec<u8> {
        let header = Header::Data(Data {
            generation: GENERATION,
            tag: Tag::new(0, 4),
            operation: Operation::BARRIER,
            step: 1,
            offset: 0,
            length: length as u32,
        });
        header.with(&(0..length).map(|at| at as u8).collect::<Vec<_>>())
    }

    fn notice(text: &str) -> Vec<u8> {
        Header::doing(GENERATION, Tag::new(0, 4), Rank(2), text)
    }

    fn send(far: &mut MemoryLane, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let mut cx = Context::from_waker(Waker::noop());
        let sent = far.poll_write(&mut cx, &[IoSlice::new(bytes)]);
        assert!(matches!(sent, Poll::Ready(Ok(count)) if count == bytes.len()));
    }

    /// What is done at the near end of the lane, and at the far one.
    #[derive(Debug, Clone, Copy)]
    enum Step {
        Send(usize),
        /// Up to so many bytes; the next frame at least.
        Read(usize),
        Look,
        LookAgain,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (1..20_000_usize).prop_map(Step::Send),
            (1..20_000_usize).prop_map(Step::Read),
            Just(Step::Look),
            Just(Step::LookAgain),
        ];
        prop::collection::vec(step, 0..60)
    }

    fn frames() -> impl Strategy<Value = Vec<Vec<u8>>> {
        let frame = prop_oneof![
            (0..20_000_usize).prop_map(data),
            "[a-z]{0,9}".prop_map(|text| notice(&text)),
        ];
        prop::collection::vec(frame, 1..12)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        /// Whatever the pieces in which frames come and are read, and whenever somebody looks ahead: all frames are shown in order,
        /// none twice before it is held or looked for again, notices with their texts; and nothing is taken away.
        #[test]
        fn frames_are_shown_in_order_and_read_as_they_were_sent(frames in frames(), steps in steps()) {
            let mut cx = Context::from_waker(Waker::noop());
            let (mut near, mut far) = MemoryLane::pair(8 << 20);
            let sent = frames.concat();
            let starts: Vec<usize> = frames.iter().scan(0, |at, frame| {
                let start = *at;
                *at += frame.len();
                Some(start)
            }).collect();
            let (mut unsent, mut read) = (&sent[..], Vec::new());
            let mut buffer = ReadBuffer::default();
            // The frame that is held, whether it was shown, and which one behind it is shown next.
            let (mut held, mut is_shown, mut next) = (None::<usize>, false, 0);
            let header = |frame: usize| Header::parse(frames[frame].first_chunk().unwrap()).unwrap();
            let end = [Step::Send(usize::MAX), Step::Look, Step::Read(usize::MAX)];
            for step in steps.into_iter().chain(end) {
                match (step, held) {
                    (Step::Send(count), _) => {
                        let (now, later) = unsent.split_at(count.min(unsent.len()));
                        send(&mut far, now);
                        unsent = later;
                    }
                    (Step::LookAgain, _) => {
                        buffer.look_again();
                        (is_shown, next) = (false, 0);
                    }
                    (Step::Look, None) => {}
                    (Step::Look, Some(held)) => loop {
                        let at = if is_shown { next.max(held + 1) } else { held };
                        let found = buffer.poll_ahead(&mut near, &mut cx, header(held), MOST);
                        let Some(shown) = found else {
                            // It has not begun to come, or is a notice that is not complete.
                            let came = sent.len() - unsent.len();
                            let needed = |at: usize| match header(at) {
                                notice if notice.is_notice() => starts[at] + frames[at].len(),
                                _ => starts[at] + HEADER,
                            };
                            prop_assert!(at == frames.len() || came < needed(at));
                            break;
                        };
                        let text = header(at).is_notice().then(|| frames[at][HEADER..].to_vec());
                        prop_assert_eq!(shown, (header(at), text));
                        if is_shown {
                            next = at + 1;
                        }
                        is_shown = true;
                    },
                    (Step::Read(count), _) => {
                        let until = sent.len().min(read.len().saturating_add(count));
                        while read.len() < until {
                            let of = starts.partition_point(|start| *start <= read.len()) - 1;
                            if read.len() == starts[of] {
                                while buffer.held().len() < HEADER
                                    && buffer.poll_fill(&mut near, &mut cx).is_ready() {}
                                if buffer.held().len() < HEADER {
                                    break;
                                }
                                read.extend_from_slice(&buffer.held()[..HEADER]);
                                buffer.skip(HEADER);
                                (held, is_shown) = (Some(of), false);
                                continue;
                            }
                            held = None;
                            let end = starts.get(of + 1).copied().unwrap_or(sent.len());
                            let mut piece = vec![0; end - read.len()];
                            match buffer.poll_read(&mut near, &mut cx, &mut piece) {
                                Poll::Ready(Ok(count)) => read.extend_from_slice(&piece[..count]),
                                _ => break,
                            }
                        }
                        prop_assert!(sent.starts_with(&read));
                    }
                }
            }
            prop_assert_eq!(read.len(), sent.len());
            prop_assert!(buffer.bytes.len() <= READ_AHEAD);
        }
    }

    #[test]
    fn looking_ahead_takes_no_more_memory_than_that_and_sees_the_end() {
        let mut cx = Context::from_waker(Waker::noop());
        let (mut near, mut far) = MemoryLane::pair(1 << 20);
        let mut buffer = ReadBuffer::default();
        let (frame, mut sent) = (data(SEGMENT), 0);
        let mut look = |near: &mut MemoryLane, most| {
            while buffer
                .poll_ahead(near, &mut cx, Header::Welcome, most)
                .is_some()
            {}
            (buffer.bytes.len(), buffer.has_ended())
        };
        for _ in 0..4 * MOST / frame.len() {
            let mut cx = Context::from_waker(Waker::noop());
            if let Poll::Ready(Ok(count)) = far.poll_write(&mut cx, &[IoSlice::new(&frame[sent..])])
            {
                sent = (sent + count) % frame.len();
            }
            look(&mut near, MOST);
        }
        assert_eq!(look(&mut near, MOST), (MOST, false));
        drop(far);
        assert_eq!(look(&mut near, 8 * MOST), (2 * MOST, true));
    }
}
