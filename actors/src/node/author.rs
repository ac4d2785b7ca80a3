//! Whose lines of output these are.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use kolo_core::node::logs::{LogBook, Writer};
use kolo_transport::ids::{Rank, Slot};
use kolo_transport::wire::Stdio;

use super::output::Output;

/// Milliseconds since 1970.
pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

/// One process that writes to the output of its job.
#[derive(Debug)]
pub(super) struct Author {
    output: Arc<Output>,
    slot: Slot,
    rank: AtomicU32,
    /// Its first line has at least this number among the lines of all slots.
    since: u64,
}

impl Author {
    /// A process that has written nothing yet.
    #[must_use]
    pub(super) fn new(output: Arc<Output>, slot: Slot, rank: Rank) -> Self {
        Self {
            slot,
            rank: AtomicU32::new(rank.0),
            since: output.next_index(),
            output,
        }
    }

    /// Where its lines are kept.
    pub(super) fn output(&self) -> &Output {
        &self.output
    }

    pub(super) fn rank(&self) -> Rank {
        Rank(self.rank.load(Ordering::Relaxed))
    }

    /// Lines that are read from now on are those of this rank.
    pub(super) fn set_rank(&self, rank: Rank) {
        self.rank.store(rank.0, Ordering::Relaxed);
    }

    fn writer(&self) -> Writer {
        Writer {
            slot: self.slot,
            rank: self.rank(),
        }
    }

    /// Keeps the lines of a piece of output.
    pub(super) fn keep(&self, stream: Stdio, time_ms: u64, piece: &[u8]) {
        let whole = piece.strip_suffix(b"\n").unwrap_or(piece);
        let writer = self.writer();
        self.output.add(|book: &mut LogBook| {
            let mut from = 0;
            for end in memchr::memchr_iter(b'\n', whole).chain([whole.len()]) {
                let line = &whole[from..end];
                let bare = line.strip_suffix(b"\r").unwrap_or(line);
                // Only the end of the piece may have no LF.
                let over = bare.len() < line.len() && end == piece.len();
                book.push_ended(writer, stream, time_ms, bare, over);
                from = end + 1;
            }
        });
    }

    /// See [`LogBook::stderr_tail`]. Lines of an older process of its slot are not among them.
    #[must_use]
    pub(super) fn stderr_tail(&self, lines: usize) -> Vec<String> {
        self.output.stderr_tail((self.slot, self.since), lines)
    }
}
