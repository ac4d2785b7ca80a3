//! A process's output, line by line.

use std::io;
use std::os::fd::OwnedFd;

use bytes::{Buf, BytesMut};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;

/// The longest line that [`LineReader`] gives, in bytes.
pub const MAX_LINE: usize = 64 * 1024;

/// How much is read at once: what a pipe holds.
const READ_CHUNK: usize = 64 * 1024;

/// A pipe: read end and write end, both close-on-exec and blocking.
///
/// # Errors
///
/// If there are no descriptors left.
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?)
}

/// Cuts bytes into lines, without I/O.
#[derive(Debug, Default)]
struct Splitter {
    buffer: BytesMut,
    /// Bytes at the start of `buffer` in which there is no LF.
    searched: usize,
    /// The last piece was cut out of a line, so an empty rest is no line.
    cut: bool,
    /// Nothing more comes into `buffer`.
    ended: bool,
}

impl Splitter {
    fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            let window = self.buffer.len().min(MAX_LINE + 1);
            let found = self.buffer[self.searched.min(window)..window]
                .iter()
                .position(|byte| *byte == b'\n')
                .map(|offset| self.searched + offset);
            let (line, cut) = match found {
                Some(end) => {
                    let mut line = self.take(end);
                    self.buffer.advance(1);
                    if line.last() == Some(&b'\r') {
                        line.pop();
                    }
                    (line, false)
                }
                None if self.buffer.len() > MAX_LINE => (self.take(MAX_LINE), true),
                None if self.ended && !self.buffer.is_empty() => {
                    (self.take(self.buffer.len()), false)
                }
                None => {
                    self.searched = self.buffer.len();
                    return None;
                }
            };
            let rest_of_a_cut_line = std::mem::replace(&mut self.cut, cut);
            if !(rest_of_a_cut_line && line.is_empty()) {
                return Some(line);
            }
        }
    }

    fn take(&mut self, length: usize) -> Vec<u8> {
        self.searched = 0;
        self.buffer.split_to(length).to_vec()
    }
}

/// Lines from the read end of a pipe. Any bytes; nothing is lost.
///
/// A line ends with LF or CR LF, which are taken off; a CR elsewhere stays. A line of more than [`MAX_LINE`] bytes is cut: it
/// comes in pieces of that length and a rest. What stands behind the last LF at the end is a line too.
#[derive(Debug)]
pub struct LineReader {
    pipe: Receiver,
    lines: Splitter,
}

impl LineReader {
    /// Reads from this end, which becomes non-blocking (the other end does not).
    ///
    /// # Errors
    ///
    /// `InvalidInput` if it is no pipe that can be read.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime with I/O.
    pub fn new(pipe: OwnedFd) -> io::Result<Self> {
        Ok(Self {
            pipe: Receiver::from_owned_fd(pipe)?,
            lines: Splitter::default(),
        })
    }

    /// The next line; `None` when all writers have closed the pipe. Waits for as long as one of them has it open and is
    /// silent. Cancel safe.
    pub async fn next_line(&mut self) -> Option<Vec<u8>> {
        loop {
            if let Some(line) = self.lines.next() {
                return Some(line);
            }
            if self.lines.ended {
                return None;
            }
            self.lines.buffer.reserve(READ_CHUNK);
            let read = self.pipe.read_buf(&mut self.lines.buffer).await;
            self.lines.ended = read.unwrap_or_else(|error| {
                // Reading from a pipe does not fail; if it does there is nothing more to get.
                tracing::warn!(%error, "reading the output of a process");
                0
            }) == 0;
        }
    }

    /// The next line if it has been read already: for taking many at once after [`LineReader::next_line`] gave one.
    pub fn buffered_line(&mut self) -> Option<Vec<u8>> {
        self.lines.next()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// All lines of the pieces, fed one by one.
    fn split<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<Vec<u8>> {
        let mut splitter = Splitter::default();
        let mut lines = Vec::new();
        for piece in pieces {
            splitter.buffer.extend_from_slice(piece);
            lines.extend(std::iter::from_fn(|| splitter.next()));
        }
        splitter.ended = true;
        lines.extend(std::iter::from_fn(|| splitter.next()));
        lines
    }

    #[test]
    fn ends_of_lines() {
        for (input, lines) in [
            (&b""[..], &[][..]),
            (b"\n", &[&b""[..]]),
            (b"a\n\nb", &[b"a", b"", b"b"]),
            (b"a\r\nb\rc\r\r\n", &[b"a", b"b\rc\r"]),
            (b"a\r", &[b"a\r"]),
            (b"\xff\0\n", &[b"\xff\0"]),
        ] {
            assert_eq!(split([input]), lines);
        }
    }

    #[test]
    fn a_long_line_comes_in_pieces_and_a_rest() {
        let lengths = |input: &[u8]| split([input]).iter().map(Vec::len).collect::<Vec<_>>();
        let of = |length: usize, end: &str| {
            let mut line = vec![b'x'; length];
            line.extend_from_slice(end.as_bytes());
            line
        };
        assert_eq!(lengths(&of(MAX_LINE, "\n")), [MAX_LINE]);
        assert_eq!(lengths(&of(MAX_LINE, "\r\n")), [MAX_LINE]);
        assert_eq!(lengths(&of(MAX_LINE, "")), [MAX_LINE]);
        assert_eq!(lengths(&of(MAX_LINE, "\n\n")), [MAX_LINE, 0]);
        assert_eq!(lengths(&of(MAX_LINE + 1, "\n")), [MAX_LINE, 1]);
        assert_eq!(
            lengths(&of(3 * MAX_LINE, "\nab")),
            [MAX_LINE, MAX_LINE, MAX_LINE, 2]
        );
    }

    proptest! {
        #[test]
        fn how_it_arrives_makes_no_difference(
            pieces in prop::collection::vec(
                prop_oneof![
                    prop::collection::vec(any::<u8>(), 0..40),
                    prop::collection::vec(prop::sample::select(&b"\r\na"[..]), 0..40),
                    (0..2 * MAX_LINE + 9).prop_map(|length| vec![b'y'; length]),
                ],
                0..12,
            ),
        ) {
            let whole = pieces.concat();
            let lines = split(pieces.iter().map(Vec::as_slice));
            prop_assert_eq!(&lines, &split([whole.as_slice()]));
            prop_assert!(lines.iter().all(|line| line.len() <= MAX_LINE));
            // Nothing is lost but the ends of lines.
            let without = |bytes: Vec<u8>| -> Vec<u8> {
                bytes.into_iter().filter(|byte| !b"\r\n".contains(byte)).collect()
            };
            prop_assert_eq!(without(lines.concat()), without(whole));
        }
    }
}
