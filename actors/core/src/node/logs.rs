//! The last lines of output of a job's workers on one node.
//!
//! A [`LogBook`] keeps a ring per slot, bounded in lines and bytes. Lines lie one behind the other in a few blocks: what is
//! counted is what is taken, and what is dropped is free for good. A reader has a [`Cursor`] of its own
//! and asks for what is new, so that a slow reader holds nothing up: it misses lines, and sees that in
//! their numbers.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque, vec_deque};

use kolo_wire::ids::{Rank, Slot};
use kolo_wire::{LogBatch, LogLine, Stdio};

/// A line of a tail of standard error is cut to so many bytes: it goes with the news of a loss to every member of the
/// job.
const TAIL_LINE: usize = 2048;

/// What a line costs beside its text on its way to a reader.
const LINE_OVERHEAD: usize = 64;

/// What stands before the text of a line in a block: its number, its time, its rank, its length and its stream.
const HEADER: usize = 8 + 8 + 4 + 4 + 1;

/// The smallest block, in bytes.
const SMALLEST_BLOCK: usize = 256;

/// The largest block but for those of longer lines, in bytes.
const LARGEST_BLOCK: usize = 64 << 10;

/// What a slot takes beside its blocks, about.
const SLOT_OVERHEAD: usize = 256;

/// How much output of one slot is kept: of one rank, in a static job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogLimits {
    /// Most lines. Default 10,000.
    pub lines: usize,
    /// Most bytes, with 25 for each line beside its text. Default 1 MiB.
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

impl LogLimits {
    /// The oldest sixteenth makes room at once.
    fn block(&self) -> usize {
        (self.bytes / 16).clamp(SMALLEST_BLOCK, LARGEST_BLOCK)
    }
}

/// A process that writes: its place, and its rank now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Writer {
    /// Its slot. The processes of one slot follow each other.
    pub slot: Slot,
    /// Its rank.
    pub rank: Rank,
}

/// A line as it lies in a block.
#[derive(Debug, Clone, Copy)]
struct Record<'a> {
    /// Counts the lines of all slots, to merge them in the order in which they came.
    index: u64,
    /// It ended with CR: the next line of its stream was written over it.
    over: bool,
    time_ms: u64,
    rank: Rank,
    stream: Stdio,
    text: &'a [u8],
}

impl<'a> Record<'a> {
    fn len(&self) -> usize {
        HEADER + self.text.len()
    }

    fn write(&self, to: &mut Vec<u8>) {
        to.extend_from_slice(&self.index.to_le_bytes());
        to.extend_from_slice(&self.time_ms.to_le_bytes());
        to.extend_from_slice(&self.rank.0.to_le_bytes());
        to.extend_from_slice(&(self.text.len() as u32).to_le_bytes());
        to.push(u8::from(self.stream == Stdio::Stderr) | u8::from(self.over) << 1);
        to.extend_from_slice(self.text);
    }

    /// The first line in `from`, which becomes what follows.
    fn read(from: &mut &'a [u8]) -> Option<Self> {
        let (index, rest) = from.split_first_chunk()?;
        let (time, rest) = rest.split_first_chunk()?;
        let (rank, rest) = rest.split_first_chunk()?;
        let (length, rest) = rest.split_first_chunk()?;
        let (flags, rest) = rest.split_first()?;
        let (text, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        *from = rest;
        Some(Self {
            index: u64::from_le_bytes(*index),
            time_ms: u64::from_le_bytes(*time),
            rank: Rank(u32::from_le_bytes(*rank)),
            stream: if flags & 1 == 0 {
                Stdio::Stdout
            } else {
                Stdio::Stderr
            },
            over: flags & 2 != 0,
            text,
        })
    }
}

#[derive(Debug)]
struct Block {
    /// The number of the first line that is kept.
    first_seq: u64,
    /// Where that begins.
    start: usize,
    bytes: Vec<u8>,
}

impl Block {
    fn rest(&self) -> &[u8] {
        self.bytes.get(self.start..).unwrap_or_default()
    }
}

/// Lines of a ring from one on.
struct Records<'a> {
    rest: &'a [u8],
    blocks: vec_deque::Iter<'a, Block>,
    next_seq: u64,
}

impl<'a> Iterator for Records<'a> {
    type Item = (u64, Record<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        while self.rest.is_empty() {
            self.rest = self.blocks.next()?.rest();
        }
        let record = Record::read(&mut self.rest)?;
        let seq = self.next_seq;
        self.next_seq += 1;
        Some((seq, record))
    }
}

#[derive(Debug, Default)]
struct Ring {
    blocks: VecDeque<Block>,
    lines: usize,
    /// What all blocks take.
    bytes: usize,
    next_seq: u64,
}

impl Ring {
    fn first_seq(&self) -> u64 {
        self.next_seq - self.lines as u64
    }

    fn push(&mut self, record: &Record<'_>, limits: &LogLimits) {
        let most = limits.block();
        let fits = |block: &Block| block.bytes.len() + record.len() <= most;
        if !self.blocks.back().is_some_and(fits) {
            self.blocks.push_back(Block {
                first_seq: self.next_seq,
                start: 0,
                bytes: Vec::new(),
            });
        }
        if let Some(block) = self.blocks.back_mut() {
            let (had, needed) = (block.bytes.capacity(), block.bytes.len() + record.len());
            if needed > had {
                // Twice as much each time, but no more than a block.
                let wanted = (2 * had).clamp(SMALLEST_BLOCK, most).max(needed);
                block.bytes.reserve_exact(wanted - block.bytes.len());
                self.bytes += block.bytes.capacity() - had;
            }
            record.write(&mut block.bytes);
        }
        self.lines += 1;
        self.next_seq += 1;
        while self.lines > limits.lines.max(1) {
            self.drop_line();
        }
        while self.bytes > limits.bytes && self.drop_block() {}
    }

    fn drop_line(&mut self) {
        let Some(block) = self.blocks.front_mut() else {
            return;
        };
        let mut rest = block.rest();
        if let Some(record) = Record::read(&mut rest) {
            block.start += record.len();
            block.first_seq += 1;
            self.lines -= 1;
        }
        if block.start >= block.bytes.len() {
            self.bytes -= block.bytes.capacity();
            self.blocks.pop_front();
        }
    }

    /// Drops the oldest block. The newest lines stay, however long they are.
    fn drop_block(&mut self) -> bool {
        if self.blocks.len() < 2 {
            return false;
        }
        if let Some(block) = self.blocks.pop_front() {
            self.bytes -= block.bytes.capacity();
        }
        let first = self.blocks.front().map_or(self.next_seq, |b| b.first_seq);
        self.lines = (self.next_seq - first) as usize;
        true
    }

    /// Drops the oldest lines: a block of them, half of the last block, or, as the last thing to give, its only line.
    fn shed(&mut self) -> bool {
        if self.drop_block() {
            return true;
        }
        let Some(block) = self.blocks.pop_front() else {
            return false;
        };
        self.bytes -= block.bytes.capacity();
        let mut rest = block.rest();
        let half = rest.len() / 2;
        let mut first_seq = block.first_seq;
        while rest.len() > half && Record::read(&mut rest).is_some() {
            first_seq += 1;
        }
        self.lines = (self.next_seq - first_seq) as usize;
        if !rest.is_empty() {
            let bytes = rest.to_vec();
            self.bytes += bytes.capacity();
            self.blocks.push_front(Block {
                first_seq,
                start: 0,
                bytes,
            });
        }
        true
    }

    /// The lines from this number on that are kept.
    fn from(&self, seq: u64) -> Records<'_> {
        let seq = seq.max(self.first_seq());
        if seq >= self.next_seq {
            return Records {
                rest: &[],
                blocks: self.blocks.range(self.blocks.len()..),
                next_seq: self.next_seq,
            };
        }
        let behind = self.blocks.partition_point(|block| block.first_seq <= seq);
        let at = behind.saturating_sub(1);
        let mut records = Records {
            rest: &[],
            blocks: self.blocks.range(at..),
            next_seq: self.blocks.get(at).map_or(seq, |block| block.first_seq),
        };
        while records.next_seq < seq && records.next().is_some() {}
        records
    }
}

/// Lines of output by slot.
#[derive(Debug, Default)]
pub struct LogBook {
    limits: LogLimits,
    rings: BTreeMap<Slot, Ring>,
    /// What all rings take.
    bytes: usize,
    next_index: u64,
    ended: bool,
}

/// How far a reader has come.
#[derive(Debug, Clone, Default)]
pub struct Cursor {
    /// Only lines of these; all if empty.
    ranks: BTreeSet<Rank>,
    /// The next line of each slot; 0 for one that is not named.
    next: BTreeMap<Slot, u64>,
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
    pub fn push(&mut self, writer: Writer, stream: Stdio, time_ms: u64, text: &[u8]) {
        self.push_ended(writer, stream, time_ms, text, false);
    }

    /// As [`LogBook::push`]; `over` if the line ended with CR and not with LF, as the states of a progress bar do.
    pub fn push_ended(
        &mut self,
        writer: Writer,
        stream: Stdio,
        time_ms: u64,
        text: &[u8],
        over: bool,
    ) {
        let ring = self.rings.entry(writer.slot).or_default();
        let before = if ring.next_seq == 0 {
            0
        } else {
            SLOT_OVERHEAD + ring.bytes
        };
        let record = Record {
            index: self.next_index,
            time_ms,
            rank: writer.rank,
            stream,
            over,
            // Lines are far shorter than that.
            text: text.get(..u32::MAX as usize).unwrap_or(text),
        };
        ring.push(&record, &self.limits);
        self.bytes = self.bytes - before + SLOT_OVERHEAD + ring.bytes;
        self.next_index += 1;
    }

    /// What is kept takes so many bytes of memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Drops the oldest lines of the slot that has most, some at a time. False if there are none.
    pub fn shed(&mut self) -> bool {
        let largest = self.rings.values_mut().max_by_key(|ring| ring.bytes);
        let Some(ring) = largest else {
            return false;
        };
        let before = ring.bytes;
        let dropped = ring.shed();
        self.bytes = self.bytes - before + ring.bytes;
        dropped
    }

    /// Drops all lines. Readers find nothing more.
    pub fn clear(&mut self) {
        self.rings.clear();
        self.bytes = 0;
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

    /// A reader of the lines of these ranks (of all if empty) that begins with the last `tail` lines of each slot, or with everything
    /// that is kept.
    #[must_use]
    pub fn cursor(&self, ranks: &[Rank], tail: Option<u32>) -> Cursor {
        let mut cursor = Cursor {
            ranks: ranks.iter().copied().collect(),
            next: BTreeMap::new(),
        };
        if let Some(tail) = tail {
            for (slot, ring) in &self.rings {
                let wanted = ring.from(0).filter(|(_, line)| cursor.wants(line.rank));
                let wanted: Vec<u64> = wanted.map(|(seq, _)| seq).collect();
                let before = wanted.len().saturating_sub(tail as usize);
                let next = wanted.get(before).copied().unwrap_or(ring.next_seq);
                cursor.next.insert(*slot, next);
            }
        }
        cursor
    }

    /// What is new for this reader, in the order in which it came, up to about `max_bytes` (at least one
    /// line if there is one). Empty if nothing is new.
    pub fn read(&self, cursor: &mut Cursor, max_bytes: usize) -> LogBatch {
        let mut sources = Vec::new();
        // The next line of each, to take the oldest.
        let mut oldest = BinaryHeap::new();
        for (slot, ring) in &self.rings {
            let next = cursor.next.get(slot).copied().unwrap_or(0);
            let mut records = ring.from(next);
            if let Some((seq, record)) = records.find(|(_, line)| cursor.wants(line.rank)) {
                oldest.push(Reverse((record.index, sources.len())));
                sources.push((*slot, seq, record, records));
            } else {
                cursor.next.insert(*slot, ring.next_seq);
            }
        }
        let mut batch = LogBatch::default();
        let mut bytes = 0;
        while let Some(Reverse((_, at))) = oldest.pop() {
            let Some((slot, seq, record, records)) = sources.get_mut(at) else {
                continue;
            };
            bytes += record.text.len() + LINE_OVERHEAD;
            if bytes > max_bytes && !batch.lines.is_empty() {
                break;
            }
            cursor.next.insert(*slot, *seq + 1);
            batch.lines.push(LogLine {
                rank: record.rank,
                stream: record.stream,
                seq: *seq,
                time_ms: record.time_ms,
                text: record.text.to_vec(),
            });
            if let Some((next, following)) = records.find(|(_, line)| cursor.wants(line.rank)) {
                (*seq, *record) = (next, following);
                oldest.push(Reverse((following.index, at)));
            }
        }
        batch
    }

    /// The number of the next line, among those of all slots.
    #[must_use]
    pub fn next_index(&self) -> u64 {
        self.next_index
    }

    /// The last lines of standard error of a slot since a line with this number, oldest first, as text. Of a line that was written over (CR) the last state, of
    /// a long one the first 2 KiB.
    #[must_use]
    pub fn stderr_tail(&self, (slot, since): (Slot, u64), lines: usize) -> Vec<String> {
        let Some(ring) = self.rings.get(&slot) else {
            return Vec::new();
        };
        let records = ring.from(0).map(|(_, record)| record);
        let kept: Vec<_> = records
            .filter(|record| record.stream == Stdio::Stderr && record.index >= since)
            .map(|record| (record.text, record.over))
            .collect();
        last_states(kept.into_iter().rev(), lines)
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
#[path = "logs_tests.rs"]
mod tests;
