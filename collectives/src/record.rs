//! The flight recorder: what this rank did last, and how much it moved. Nothing is allocated after the first operation.

mod counters;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kolo_transport::ids::Rank;
use kolo_transport::wire::span::Span;

use self::counters::SharedMemory;
pub(crate) use self::counters::Tally;
pub use self::counters::{Counters, Moved, OperationCount};
use crate::group_id::GroupId;
use crate::operation::{Operation, OperationKind, Tag};

/// Operations that the recorder keeps.
pub const KEPT: usize = 4096;

/// Bytes of a name that are kept.
const NAME: usize = 47;

/// A name that is kept without allocation. Longer ones are cut at the front: names differ at their ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ShortName {
    bytes: [u8; NAME],
    length: u8,
}

impl ShortName {
    /// This name, or its end.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let mut start = name.len().saturating_sub(NAME);
        while !name.is_char_boundary(start) {
            start += 1;
        }
        let kept = &name.as_bytes()[start..];
        let mut bytes = [0; NAME];
        bytes[..kept.len()].copy_from_slice(kept);
        Self {
            bytes,
            length: kept.len() as u8,
        }
    }

    /// The name; empty if there is none.
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..usize::from(self.length)]).unwrap_or_default()
    }
}

impl Default for ShortName {
    fn default() -> Self {
        Self::new("")
    }
}

impl fmt::Debug for ShortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

/// Kinds of [lanes](crate::lane::Lane) that an operation used. Shown by their names.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Lanes(u8);

/// What lanes call themselves; others are the last.
const LANES: [&str; 7] = ["memory", "unix", "quic", "shm", "tls", "shm-ring", "other"];

impl Lanes {
    /// Adds a kind.
    pub fn insert(&mut self, kind: &str) {
        self.0 |= 1 << place(kind);
    }

    /// Their names.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        LANES
            .iter()
            .enumerate()
            .filter(move |(index, _)| self.0 & 1 << index != 0)
            .map(|(_, name)| *name)
    }
}

fn place(kind: &str) -> usize {
    LANES
        .iter()
        .position(|name| *name == kind)
        .unwrap_or(LANES.len() - 1)
}

impl fmt::Debug for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Commas between them: `memory,quic`; `none` if there is none.
impl fmt::Display for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 {
            return f.write_str("none");
        }
        for (index, name) in self.names().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            f.write_str(name)?;
        }
        Ok(())
    }
}

/// How an operation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// Not yet.
    Running,
    /// Well.
    Done,
    /// Not well.
    Failed,
}

/// One operation of this rank. Times count from when the rank's first communicator was made.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Record {
    /// Counts this rank's operations, in all its groups, from 0.
    pub number: u64,
    /// In which group.
    pub group: GroupId,
    /// Which operation of which call.
    pub tag: Tag,
    /// What was asked for, and by which algorithm it was done.
    pub operation: Operation,
    /// Its name, if it has one.
    pub name: ShortName,
    /// When it was asked for.
    pub asked: Duration,
    /// When it had its turn.
    pub started: Duration,
    /// When it ended; [`Duration::ZERO`] while it has not.
    pub ended: Duration,
    /// How.
    pub outcome: Outcome,
    /// Over which lanes.
    pub lanes: Lanes,
    /// Bytes that went out over them, headers included. What goes through shared memory is in the [counters](Counters) alone.
    pub sent: u64,
    /// Bytes that came in over them.
    pub received: u64,
}

impl Record {
    /// Bytes of the buffer that was asked for: elements times their size.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.operation.bytes()
    }
}

/// An operation that has its turn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Begun {
    number: u64,
    operation: Operation,
    started: Duration,
}

#[derive(Debug)]
pub(crate) struct Recorder {
    epoch: Instant,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    ring: Vec<Record>,
    next: u64,
    operations: [OperationCount; OperationKind::ALL.len() + 1],
    lanes: [Moved; LANES.len()],
    peers: Vec<Moved>,
    shared: Vec<SharedMemory>,
}

impl State {
    /// One that is still kept.
    fn record(&mut self, number: u64) -> Option<&mut Record> {
        let record = self.ring.get_mut(number as usize % KEPT);
        record.filter(|record| record.number == number)
    }

    /// The record of one more operation, which is under way.
    fn next(
        &mut self,
        (group, tag): (GroupId, Tag),
        operation: Operation,
        name: ShortName,
        (asked, started): (Duration, Duration),
    ) -> Record {
        let number = self.next;
        self.next += 1;
        Record {
            number,
            group,
            tag,
            operation,
            name,
            asked,
            started,
            ended: Duration::ZERO,
            outcome: Outcome::Running,
            lanes: Lanes::default(),
            sent: 0,
            received: 0,
        }
    }

    /// An operation has ended after this time.
    fn count(&mut self, operation: &Operation, well: bool, time: Duration) {
        let count = &mut self.operations[usize::from(operation.kind.code())];
        if well {
            count.done += 1;
            count.bytes += operation.bytes();
        } else {
            count.failed += 1;
        }
        count.time += time;
    }

    fn keep(&mut self, record: Record) {
        if self.ring.len() < KEPT {
            if self.ring.is_empty() {
                self.ring.reserve_exact(KEPT);
            }
            self.ring.push(record);
        } else {
            let place = record.number as usize % KEPT;
            self.ring[place] = record;
        }
    }
}

impl Recorder {
    pub(crate) fn new(world: u32) -> Self {
        Self {
            epoch: Instant::now(),
            state: Mutex::new(State {
                ring: Vec::new(),
                next: 0,
                operations: [OperationCount::default(); OperationKind::ALL.len() + 1],
                lanes: [Moved::default(); LANES.len()],
                peers: vec![Moved::default(); world as usize],
                shared: Vec::new(),
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that runs under the lock panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A group shares memory from here on. `members` are its ranks among all, `me` this one.
    pub(crate) fn shares(&self, moved: Arc<[Tally]>, members: Vec<u32>, me: u32) {
        let mut guard = self.lock();
        let State {
            shared,
            lanes,
            peers,
            ..
        } = &mut *guard;
        // Of groups that are gone only the sums stay.
        for gone in shared.extract_if(.., |memory| memory.is_gone()) {
            gone.add_to(lanes, peers);
        }
        shared.push(SharedMemory::new(moved, members, me));
    }

    /// The time of an instant on this rank's clock.
    pub(crate) fn clock(&self, at: Instant) -> Duration {
        at.saturating_duration_since(self.epoch)
    }

    /// An operation that was `asked` for has its turn, and has `started`.
    pub(crate) fn begin(
        &self,
        place: (GroupId, Tag),
        operation: Operation,
        name: ShortName,
        (asked, started): (Instant, Instant),
    ) -> Begun {
        let times = (self.clock(asked), self.clock(started));
        let mut state = self.lock();
        let record = state.next(place, operation, name, times);
        state.keep(record);
        Begun {
            number: record.number,
            operation,
            started: record.started,
        }
    }

    /// An operation that fails without a turn, or before anything of it was done in its turn.
    pub(crate) fn refused(
        &self,
        place: (GroupId, Tag),
        operation: Operation,
        name: ShortName,
        asked: Instant,
    ) {
        let begun = self.begin(place, operation, name, (asked, Instant::now()));
        self.end(begun, false, std::iter::empty());
    }

    /// An operation in shared memory that is done already.
    pub(crate) fn done(
        &self,
        place: (GroupId, Tag),
        operation: Operation,
        name: ShortName,
        (asked, started): (Instant, Instant),
    ) {
        let times = (self.clock(asked), self.clock(started));
        let ended = self.clock(Instant::now());
        let mut state = self.lock();
        let mut record = state.next(place, operation, name, times);
        record.ended = ended;
        record.outcome = Outcome::Done;
        record.lanes.insert("shm");
        state.count(&operation, true, ended.saturating_sub(record.started));
        state.keep(record);
    }

    /// It is known now how it is done.
    pub(crate) fn goes_on(&self, begun: Begun, operation: Operation) -> Begun {
        let mut state = self.lock();
        if let Some(record) = state.record(begun.number) {
            record.operation = operation;
        }
        Begun { operation, ..begun }
    }

    /// It has ended. `moved` are the kinds of lanes, the peers by their ranks in the job, and what moved.
    pub(crate) fn end(
        &self,
        begun: Begun,
        well: bool,
        moved: impl Iterator<Item = (&'static str, u32, Moved)>,
    ) {
        let now = self.clock(Instant::now());
        let mut guard = self.lock();
        let state = &mut *guard;
        let (mut lanes, mut all) = (Lanes::default(), Moved::default());
        for (kind, peer, moved) in moved {
            lanes.insert(kind);
            all.add(moved);
            state.lanes[place(kind)].add(moved);
            if let Some(peer) = state.peers.get_mut(peer as usize) {
                peer.add(moved);
            }
        }
        let time = now.saturating_sub(begun.started);
        state.count(&begun.operation, well, time);
        // It may have been overwritten, if thousands ran beside it.
        if let Some(record) = state.record(begun.number) {
            record.ended = now;
            record.outcome = if well { Outcome::Done } else { Outcome::Failed };
            record.lanes = lanes;
            (record.sent, record.received) = (all.sent, all.received);
        }
    }

    /// The last operations, oldest first.
    pub(crate) fn records(&self) -> Vec<Record> {
        let state = self.lock();
        let mut records = state.ring.clone();
        drop(state);
        records.sort_unstable_by_key(|record| record.number);
        records
    }

    pub(crate) fn counters(&self) -> Counters {
        let state = self.lock();
        let kinds = OperationKind::ALL
            .into_iter()
            .map(|kind| (kind, state.operations[usize::from(kind.code())]));
        let (mut lanes, mut peers) = (state.lanes, state.peers.clone());
        for memory in &state.shared {
            memory.add_to(&mut lanes, &mut peers);
        }
        Counters {
            operations: kinds
                .filter(|(_, count)| *count != OperationCount::default())
                .collect(),
            lanes: LANES
                .into_iter()
                .zip(lanes)
                .filter(|(_, moved)| *moved != Moved::default())
                .collect(),
            peers: (0..)
                .map(Rank)
                .zip(peers)
                .filter(|(_, moved)| *moved != Moved::default())
                .collect(),
        }
    }

    /// What this rank does, in words, for ranks that wait for it in a group where it does nothing.
    ///
    /// `waits` says what it waits for before it can be an operation, and `describe` what a record is of.
    pub(crate) fn present(
        &self,
        waits: Option<String>,
        describe: impl Fn(&Record) -> String,
    ) -> String {
        let now = self.clock(Instant::now());
        let (running, last) = {
            let state = self.lock();
            let running = state
                .ring
                .iter()
                .filter(|record| record.outcome == Outcome::Running)
                .max_by_key(|record| record.number);
            let last = state.ring.iter().max_by_key(|record| record.number);
            (running.copied(), last.copied())
        };
        let past = |since: Duration| Span::rough(now.saturating_sub(since));
        match (running, last) {
            (Some(record), _) => {
                let also = waits.map_or_else(String::new, |waits| format!("; {waits}"));
                format!(
                    "it is in {} since {}{also}",
                    describe(&record),
                    past(record.started)
                )
            }
            (None, _) if waits.is_some() => waits.unwrap_or_default(),
            (None, Some(record)) => format!(
                "it is in no operation; its last was {}, which {} {} ago",
                describe(&record),
                match record.outcome {
                    Outcome::Failed => "failed",
                    _ => "ended",
                },
                past(record.ended)
            ),
            (None, None) => "it has done no operation yet".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    fn describe(record: &Record) -> String {
        record.operation.to_string()
    }

    fn barrier(recorder: &Recorder) -> Begun {
        let key = (GroupId::WORLD, Tag::default());
        recorder.begin(
            key,
            Operation::BARRIER,
            ShortName::default(),
            (Instant::now(), Instant::now()),
        )
    }

    #[test]
    fn the_last_operations_are_kept_in_order() {
        let recorder = Recorder::new(2);
        assert_eq!(
            recorder.present(None, describe),
            "it has done no operation yet"
        );
        for _ in 0..KEPT + 10 {
            let number = barrier(&recorder);
            recorder.end(number, true, std::iter::empty());
        }
        let records = recorder.records();
        assert_eq!(records.len(), KEPT);
        assert!(
            records
                .windows(2)
                .all(|pair| pair[0].number + 1 == pair[1].number)
        );
        assert_eq!(records[0].number, 10);
        assert!(
            recorder
                .present(None, describe)
                .starts_with("it is in no operation; its last was barrier")
        );
        barrier(&recorder);
        assert!(
            recorder
                .present(None, describe)
                .starts_with("it is in barrier")
        );
    }

    #[test]
    fn what_is_not_kept_any_more_counts() {
        let recorder = Recorder::new(1);
        let (failing, ending) = (barrier(&recorder), barrier(&recorder));
        for _ in 0..KEPT {
            barrier(&recorder);
        }
        let before = recorder.records();
        recorder.end(failing, false, std::iter::empty());
        recorder.end(ending, true, std::iter::empty());
        let [(OperationKind::Barrier, count)] = recorder.counters().operations[..] else {
            panic!("{:?}", recorder.counters());
        };
        assert_eq!((count.done, count.failed), (1, 1));
        // Those in their places still run.
        let outcomes =
            |records: &[Record]| records.iter().map(|one| one.outcome).collect::<Vec<_>>();
        assert_eq!(outcomes(&recorder.records()), outcomes(&before));
    }

    #[test]
    fn counters_add_up() {
        let recorder = Recorder::new(3);
        let moved = |sent, received| Moved { sent, received };
        let operation = Operation::new(OperationKind::Broadcast, Some(DType::F32), 10);
        for well in [true, false, true] {
            let key = (GroupId(9), Tag::default());
            let number = recorder.begin(
                key,
                operation,
                ShortName::new("w"),
                (recorder.epoch, Instant::now()),
            );
            let lanes = [("unix", 1, moved(5, 6)), ("new", 2, moved(1, 0))];
            recorder.end(number, well, lanes.into_iter());
        }
        let counters = recorder.counters();
        let [(OperationKind::Broadcast, count)] = counters.operations[..] else {
            panic!("{counters:?}");
        };
        assert_eq!((count.done, count.failed, count.bytes), (2, 1, 80));
        assert_eq!(
            counters.lanes,
            [("unix", moved(15, 18)), ("other", moved(3, 0))]
        );
        assert_eq!(
            counters.peers,
            [(Rank(1), moved(15, 18)), (Rank(2), moved(3, 0))]
        );
        let record = recorder.records()[0];
        assert_eq!(record.lanes.to_string(), "unix,other");
        assert_eq!((record.sent, record.received, record.bytes()), (6, 6, 40));
        assert_eq!(record.name.as_str(), "w");
        assert!(record.ended >= record.started && record.started >= record.asked);
    }

    #[test]
    fn long_names_keep_their_ends() {
        let name = format!("ü{}end", "x".repeat(60));
        let short = ShortName::new(&name);
        assert_eq!(short.as_str().len(), NAME);
        assert!(short.as_str().ends_with("xend"));
        let exact = ShortName::new(&format!("ü{}", "y".repeat(46)));
        assert_eq!(exact.as_str(), "y".repeat(46));
    }
}
