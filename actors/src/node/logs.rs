//! The last lines of output of a job's workers on one node.
//!
//! A [`LogBook`] keeps a ring per rank, bounded in lines and bytes. A reader has a [`Cursor`] of its own
//! and asks for what is new, so that a slow reader holds nothing up: it misses lines, and sees that in
//! their numbers.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use kolo_transport::ids::Rank;
use kolo_transport::wire::{LogBatch, LogLine, Stdio};

/// A line of a tail of standard error is cut to so many bytes: it goes with the news of a loss to every member of the
/// job.
const TAIL_LINE: usize = 2048;

/// What a line costs beside its text.
const LINE_OVERHEAD: usize = 64;

/// How much output of one rank is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogLimits {
    /// Most lines. Default 10,000.
    pub lines: usize,
    /// Most bytes, with 64 for each line beside its text. Default 1 MiB.
    pub bytes: usize,
}

impl Default for LogLimits {
    fn default() -> Self {
        Self {
            lines: 10_000,
            bytes: 1 << 20,
        }
    }
}

#[derive(Debug)]
struct Kept {
    /// Counts the lines of all ranks, to merge them in the order in which they came.
    index: u64,
    line: LogLine,
    /// It ended with CR: the next line of its stream was written over it.
    over: bool,
}

#[derive(Debug, Default)]
struct Ring {
    lines: VecDeque<Kept>,
    bytes: usize,
    next_seq: u64,
}

impl Ring {
    fn first_seq(&self) -> u64 {
        self.next_seq - self.lines.len() as u64
    }
}

/// Lines of output by rank.
#[derive(Debug, Default)]
pub struct LogBook {
    limits: LogLimits,
    rings: BTreeMap<Rank, Ring>,
    next_index: u64,
    ended: bool,
}

/// How far a reader has come.
#[derive(Debug, Clone, Default)]
pub struct Cursor {
    /// Only these; all if empty.
    ranks: BTreeSet<Rank>,
    /// The next line of each rank; 0 for one that is not named.
    next: BTreeMap<Rank, u64>,
}

impl Cursor {
    fn wants(&self, rank: Rank) -> bool {
        self.ranks.is_empty() || self.ranks.contains(&rank)
    }
}

impl LogBook {
    /// An empty book.
    #[must_use]
    pub fn new(limits: LogLimits) -> Self {
        Self {
            limits,
            ..Self::default()
        }
    }

    /// Adds a line. `time_ms` is wall clock, in milliseconds since 1970.
    pub fn push(&mut self, rank: Rank, stream: Stdio, time_ms: u64, text: Vec<u8>) {
        self.push_ended(rank, stream, time_ms, text, false);
    }

    /// As [`LogBook::push`]; `over` if the line ended with CR and not with LF, as the states of a progress bar do.
    pub fn push_ended(
        &mut self,
        rank: Rank,
        stream: Stdio,
        time_ms: u64,
        text: Vec<u8>,
        over: bool,
    ) {
        let ring = self.rings.entry(rank).or_default();
        ring.bytes += text.len() + LINE_OVERHEAD;
        ring.lines.push_back(Kept {
            index: self.next_index,
            line: LogLine {
                rank,
                stream,
                seq: ring.next_seq,
                time_ms,
                text,
            },
            over,
        });
        ring.next_seq += 1;
        self.next_index += 1;
        // The newest line stays, however long it is.
        while ring.lines.len() > 1
            && (ring.lines.len() > self.limits.lines || ring.bytes > self.limits.bytes)
        {
            if let Some(old) = ring.lines.pop_front() {
                ring.bytes -= old.line.text.len() + LINE_OVERHEAD;
            }
        }
    }

    /// No more lines will come.
    pub fn end(&mut self) {
        self.ended = true;
    }

    /// Whether no more lines will come.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// A reader of these ranks (all if empty) that begins with the last `tail` lines of each, or with
    /// everything that is kept.
    #[must_use]
    pub fn cursor(&self, ranks: &[Rank], tail: Option<u32>) -> Cursor {
        let mut cursor = Cursor {
            ranks: ranks.iter().copied().collect(),
            next: BTreeMap::new(),
        };
        if let Some(tail) = tail {
            for (rank, ring) in &self.rings {
                if cursor.wants(*rank) {
                    let next = ring.next_seq.saturating_sub(u64::from(tail));
                    cursor.next.insert(*rank, next);
                }
            }
        }
        cursor
    }

    /// What is new for this reader, in the order in which it came, up to about `max_bytes` (at least one
    /// line if there is one). Empty if nothing is new.
    pub fn read(&self, cursor: &mut Cursor, max_bytes: usize) -> LogBatch {
        let mut sources: BinaryHeap<Reverse<(u64, Rank, usize)>> = BinaryHeap::new();
        for (rank, ring) in &self.rings {
            if !cursor.wants(*rank) {
                continue;
            }
            let next = cursor.next.get(rank).copied().unwrap_or(0);
            let skip = next.saturating_sub(ring.first_seq()) as usize;
            if let Some(kept) = ring.lines.get(skip) {
                sources.push(Reverse((kept.index, *rank, skip)));
            }
        }
        let mut batch = LogBatch::default();
        let mut bytes = 0;
        while let Some(Reverse((_, rank, at))) = sources.pop() {
            let Some(ring) = self.rings.get(&rank) else {
                continue;
            };
            let Some(kept) = ring.lines.get(at) else {
                continue;
            };
            bytes += kept.line.text.len() + LINE_OVERHEAD;
            if bytes > max_bytes && !batch.lines.is_empty() {
                break;
            }
            cursor.next.insert(rank, kept.line.seq + 1);
            batch.lines.push(kept.line.clone());
            if let Some(kept) = ring.lines.get(at + 1) {
                sources.push(Reverse((kept.index, rank, at + 1)));
            }
        }
        batch
    }

    /// The last lines of standard error of a rank, oldest first, as text. Of a line that was written over (CR) the last state, of
    /// a long one the first 2 KiB.
    #[must_use]
    pub fn stderr_tail(&self, rank: Rank, lines: usize) -> Vec<String> {
        let Some(ring) = self.rings.get(&rank) else {
            return Vec::new();
        };
        let kept = ring.lines.iter().rev();
        let kept = kept.filter(|kept| kept.line.stream == Stdio::Stderr);
        last_states(kept.map(|kept| (&kept.line.text[..], kept.over)), lines)
    }
}

/// The last lines as a terminal shows them, oldest first: of each the last state. They are given the newest first, each with whether
/// it ended with CR.
fn last_states<'a>(
    newest_first: impl Iterator<Item = (&'a [u8], bool)>,
    lines: usize,
) -> Vec<String> {
    let mut tail: Vec<String> = Vec::new();
    // What was written over the line that comes next, if that ended with CR.
    let mut shown: Option<String> = None;
    for (text, over) in newest_first {
        let mut states = text.rsplit(|byte| *byte == b'\r');
        let state = shortened(states.find(|state| !state.is_empty()).unwrap_or_default());
        shown = match shown.take() {
            // Nothing was written over it, as by the end of a line that follows a CR.
            Some(later) if over && later.is_empty() => Some(state),
            Some(later) if over => Some(later),
            later => {
                tail.extend(later);
                if tail.len() == lines {
                    break;
                }
                Some(state)
            }
        };
    }
    if tail.len() < lines {
        tail.extend(shown);
    }
    tail.reverse();
    tail
}

fn shortened(line: &[u8]) -> String {
    if line.len() <= TAIL_LINE {
        return String::from_utf8_lossy(line).into_owned();
    }
    // A character that the cut goes through is not shown.
    let start = String::from_utf8_lossy(&line[..TAIL_LINE]);
    format!("{}…", start.trim_end_matches('\u{fffd}'))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn book(lines: usize, bytes: usize) -> LogBook {
        LogBook::new(LogLimits { lines, bytes })
    }

    fn texts(batch: &LogBatch) -> Vec<String> {
        batch
            .lines
            .iter()
            .map(|line| format!("{}:{}", line.rank, String::from_utf8_lossy(&line.text)))
            .collect()
    }

    fn push(book: &mut LogBook, rank: u32, text: &str) {
        book.push(Rank(rank), Stdio::Stdout, 0, text.as_bytes().to_vec());
    }

    #[test]
    fn lines_of_all_ranks_come_in_the_order_in_which_they_were_written() {
        let mut book = book(10, 10_000);
        for (rank, text) in [(1, "a"), (0, "b"), (1, "c"), (0, "d")] {
            push(&mut book, rank, text);
        }
        let mut all = book.cursor(&[], None);
        assert_eq!(
            texts(&book.read(&mut all, 1 << 20)),
            ["1:a", "0:b", "1:c", "0:d"]
        );
        assert!(book.read(&mut all, 1 << 20).lines.is_empty());
        push(&mut book, 2, "e");
        assert_eq!(
            texts(&book.read(&mut all, 1 << 20)),
            ["2:e"],
            "a rank that is new"
        );
        let mut one = book.cursor(&[Rank(0)], None);
        assert_eq!(texts(&book.read(&mut one, 1 << 20)), ["0:b", "0:d"]);
    }

    #[test]
    fn a_tail_is_counted_per_rank() {
        let mut book = book(10, 10_000);
        for (rank, text) in [(0, "a"), (0, "b"), (0, "c"), (1, "d")] {
            push(&mut book, rank, text);
        }
        let mut cursor = book.cursor(&[], Some(2));
        assert_eq!(
            texts(&book.read(&mut cursor, 1 << 20)),
            ["0:b", "0:c", "1:d"]
        );
        let mut cursor = book.cursor(&[], Some(0));
        assert!(book.read(&mut cursor, 1 << 20).lines.is_empty());
        push(&mut book, 0, "e");
        assert_eq!(texts(&book.read(&mut cursor, 1 << 20)), ["0:e"]);
    }

    #[test]
    fn a_slow_reader_misses_lines_and_sees_it_in_their_numbers() {
        let mut book = book(3, 10_000);
        push(&mut book, 0, "0");
        let mut cursor = book.cursor(&[], None);
        assert_eq!(book.read(&mut cursor, 1 << 20).lines[0].seq, 0);
        for number in 1..10 {
            push(&mut book, 0, &number.to_string());
        }
        let seqs: Vec<u64> = book
            .read(&mut cursor, 1 << 20)
            .lines
            .iter()
            .map(|line| line.seq)
            .collect();
        assert_eq!(seqs, [7, 8, 9]);
    }

    #[test]
    fn a_long_line_is_kept_alone_and_sent_alone() {
        let mut book = book(10, 500);
        push(&mut book, 0, "short");
        push(&mut book, 0, &"x".repeat(1000));
        let mut cursor = book.cursor(&[], None);
        let batch = book.read(&mut cursor, 10);
        assert_eq!(batch.lines.len(), 1);
        assert_eq!(batch.lines[0].text.len(), 1000);
    }

    #[test]
    fn the_tail_of_standard_error_is_text_of_that_stream_only() {
        let mut book = book(100, 100_000);
        for number in 0..30 {
            let text = format!("{number}").into_bytes();
            book.push(Rank(0), Stdio::Stderr, 0, text);
            book.push(Rank(0), Stdio::Stdout, 0, b"out".to_vec());
        }
        book.push(Rank(0), Stdio::Stderr, 0, vec![0xff, b'!']);
        let tail = book.stderr_tail(Rank(0), 3);
        assert_eq!(tail, ["28", "29", "\u{fffd}!"]);
        let long = "é".repeat(40_000).into_bytes();
        book.push(Rank(0), Stdio::Stderr, 0, [b"x", &long[..]].concat());
        let tail = book.stderr_tail(Rank(0), 1);
        assert_eq!(tail, [format!("x{}…", "é".repeat((TAIL_LINE - 1) / 2))]);
        assert!(book.stderr_tail(Rank(9), 3).is_empty());
    }

    #[test]
    fn a_line_that_was_written_over_is_one_line_with_its_last_state() {
        for (lines, limit, tail) in [
            (&[][..], 20, &[][..]),
            (
                &[("a", false), ("", false), ("b", false)],
                20,
                &["a", "", "b"],
            ),
            // A progress bar in pieces, and what follows it.
            (
                &[("10%", true), ("20%", true), ("30%", true), ("boom", false)],
                20,
                &["boom"],
            ),
            (
                &[("10%", true), ("30%", false), ("boom", false)],
                20,
                &["30%", "boom"],
            ),
            // CR and LF that came apart.
            (
                &[("10%", true), ("30%", true), ("", false), ("boom", false)],
                20,
                &["30%", "boom"],
            ),
            // At the end, with nothing over it.
            (
                &[("start", false), ("10%", true), ("30%", true)],
                20,
                &["start", "30%"],
            ),
            // In one piece, CR before or behind each state.
            (
                &[("10%\r20%\r30%", false), ("boom", false)],
                20,
                &["30%", "boom"],
            ),
            (&[("\r10%\r30%\r", false)], 20, &["30%"]),
            (&[("\r\r", false)], 20, &[""]),
            // As many lines as are wanted, whatever is between them.
            (
                &[
                    ("a", false),
                    ("b", false),
                    ("1", true),
                    ("2", true),
                    ("c", false),
                ],
                2,
                &["b", "c"],
            ),
            (&[("a", false), ("1", true), ("2", true)], 1, &["2"]),
            (&[("a", false)], 0, &[]),
        ] {
            let newest_first = lines.iter().rev();
            let newest_first = newest_first.map(|(text, over)| (text.as_bytes(), *over));
            assert_eq!(last_states(newest_first, limit), tail, "{lines:?}");
        }
    }

    proptest! {
        /// Any number of reads of any size gives each line that is kept once, in order, and the ring
        /// stays inside its limits.
        #[test]
        fn reads_of_any_size_give_every_line_once(
            lines in proptest::collection::vec((0_u32..4, 0_usize..50), 0..100),
            max_bytes in 1_usize..500,
            limit in 1_usize..30,
        ) {
            let mut book = book(limit, 1500);
            for (rank, len) in lines {
                push(&mut book, rank, &"x".repeat(len));
            }
            for ring in book.rings.values() {
                prop_assert!(ring.lines.len() <= limit && ring.bytes <= 1500);
            }
            let kept: usize = book.rings.values().map(|ring| ring.lines.len()).sum();
            let mut whole = book.cursor(&[], None);
            let all = book.read(&mut whole, usize::MAX).lines;
            prop_assert_eq!(all.len(), kept);
            let mut cursor = book.cursor(&[], None);
            let mut seen = Vec::new();
            loop {
                let batch = book.read(&mut cursor, max_bytes);
                if batch.lines.is_empty() {
                    break;
                }
                seen.extend(batch.lines);
            }
            prop_assert_eq!(seen, all);
        }
    }
}
