//! Bytes on their way to a stream: small pieces together, large ones as they are.

use std::collections::VecDeque;

use bytes::{Buf, Bytes, BytesMut};

/// Pieces up to this length are copied together, so that one write carries many.
const SMALL: usize = 16 * 1024;

/// A run of small pieces grows up to about this length.
const RUN: usize = 256 * 1024;

#[derive(Debug)]
enum Segment {
    Run(BytesMut),
    Shared(Bytes),
}

impl Segment {
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Run(bytes) => bytes,
            Self::Shared(bytes) => bytes,
        }
    }

    fn advance(&mut self, count: usize) {
        match self {
            Self::Run(bytes) => bytes.advance(count),
            Self::Shared(bytes) => bytes.advance(count),
        }
    }
}

/// A queue of bytes.
#[derive(Debug, Default)]
pub(super) struct SendQueue {
    segments: VecDeque<Segment>,
    len: usize,
    /// The buffer of an earlier run, to use again.
    spare: BytesMut,
}

impl SendQueue {
    /// Bytes that wait.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends a copy of `bytes`.
    pub(super) fn copy(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.run().extend_from_slice(bytes);
        self.len += bytes.len();
    }

    /// Appends `bytes`, without a copy if they are many.
    pub(super) fn share(&mut self, bytes: &Bytes) {
        if bytes.len() <= SMALL {
            self.copy(bytes);
        } else {
            self.segments.push_back(Segment::Shared(bytes.clone()));
            self.len += bytes.len();
        }
    }

    /// Appends what `fill` writes.
    pub(super) fn write<E>(
        &mut self,
        fill: impl FnOnce(&mut BytesMut) -> Result<(), E>,
    ) -> Result<(), E> {
        let run = self.run();
        let before = run.len();
        let result = fill(run);
        if result.is_err() {
            run.truncate(before);
        }
        let added = run.len() - before;
        self.len += added;
        result
    }

    fn run(&mut self) -> &mut BytesMut {
        let open = matches!(self.segments.back(), Some(Segment::Run(run)) if run.len() < RUN);
        if !open {
            let mut spare = std::mem::take(&mut self.spare);
            spare.clear();
            self.segments.push_back(Segment::Run(spare));
        }
        match self.segments.back_mut() {
            Some(Segment::Run(run)) => run,
            _ => unreachable!("an open run was put there above"),
        }
    }

    /// The first bytes; as many as lie together.
    pub(super) fn front(&self) -> &[u8] {
        self.segments.front().map_or(&[], Segment::as_slice)
    }

    /// Forgets the first `count` bytes, which must lie inside [`SendQueue::front`].
    pub(super) fn consume(&mut self, count: usize) {
        let Some(front) = self.segments.front_mut() else {
            return;
        };
        front.advance(count);
        self.len -= count;
        if front.as_slice().is_empty()
            && let Some(Segment::Run(run)) = self.segments.pop_front()
        {
            self.give_back(run);
        }
    }

    /// Takes the first bytes out; as many as lie together. `None` if there are none.
    pub(super) fn pop(&mut self) -> Option<Taken> {
        loop {
            let segment = self.segments.pop_front()?;
            self.len -= segment.as_slice().len();
            if !segment.as_slice().is_empty() {
                return Some(Taken(segment));
            }
        }
    }

    /// Gives a buffer back for use by later runs.
    pub(super) fn recycle(&mut self, bytes: Taken) {
        if let Segment::Run(run) = bytes.0 {
            self.give_back(run);
        }
    }

    fn give_back(&mut self, mut run: BytesMut) {
        run.clear();
        // One that grew large once must not be kept for ever.
        if run.capacity() > self.spare.capacity() && run.capacity() <= 2 * RUN {
            self.spare = run;
        }
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        self.segments.clear();
        self.len = 0;
    }
}

/// Bytes that were taken out of a [`SendQueue`].
#[derive(Debug)]
pub(super) struct Taken(Segment);

impl Taken {
    /// The piece that was shared, if it is one.
    pub(super) fn shared(&self) -> Option<&Bytes> {
        match &self.0 {
            Segment::Shared(bytes) => Some(bytes),
            Segment::Run(_) => None,
        }
    }
}

impl std::ops::Deref for Taken {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_slice()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn large_pieces_are_not_copied() {
        let large = Bytes::from(vec![7; SMALL + 1]);
        let mut queue = SendQueue::default();
        queue.copy(b"head");
        queue.share(&large);
        queue.copy(b"tail");
        assert_eq!(queue.front(), b"head");
        queue.consume(4);
        assert_eq!(queue.front().as_ptr(), large.as_ptr());
        queue.consume(large.len());
        assert_eq!(queue.front(), b"tail");
    }

    #[test]
    fn what_can_not_be_written_leaves_nothing() {
        let mut queue = SendQueue::default();
        queue.copy(b"one");
        let result = queue.write(|out| {
            out.extend_from_slice(b"half");
            Err("no")
        });
        assert_eq!(result, Err("no"));
        assert_eq!(queue.len(), 3);
        assert_eq!(queue.front(), b"one");
    }

    proptest! {
        #[test]
        fn bytes_come_out_as_they_went_in(
            pieces in proptest::collection::vec((0_usize..40_000, 0_u8..3), 0..20),
            takes in proptest::collection::vec((1_usize..50_000, any::<bool>()), 1..20),
        ) {
            let mut queue = SendQueue::default();
            let mut expected = Vec::new();
            let mut seen = Vec::new();
            let mut takes = takes.into_iter().cycle();
            let mut drain = |queue: &mut SendQueue, seen: &mut Vec<u8>| {
                let (most, pop) = takes.next().unwrap();
                if pop {
                    if let Some(bytes) = queue.pop() {
                        seen.extend_from_slice(&bytes);
                        queue.recycle(bytes);
                    }
                } else {
                    let count = queue.front().len().min(most);
                    seen.extend_from_slice(&queue.front()[..count]);
                    queue.consume(count);
                }
            };
            for (index, (len, how)) in pieces.into_iter().enumerate() {
                let bytes = vec![index as u8; len];
                expected.extend_from_slice(&bytes);
                match how {
                    0 => queue.copy(&bytes),
                    1 => queue.share(&Bytes::from(bytes)),
                    _ => queue.write(|out| {
                        out.extend_from_slice(&bytes);
                        Ok::<(), ()>(())
                    }).unwrap(),
                }
                prop_assert_eq!(queue.len(), expected.len() - seen.len());
                drain(&mut queue, &mut seen);
            }
            while !queue.is_empty() {
                drain(&mut queue, &mut seen);
            }
            prop_assert_eq!(seen, expected);
        }
    }
}
