//! What rank 0 knows of named operations: who has started which, and what follows from that. Pure: time comes in as
//! arguments, messages go out as verdicts.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use kolo_transport::ids::Rank;

use crate::cause::Cause;
use crate::error::DOING;
use crate::operation::{Operation, OperationKind, ReduceOp};
use crate::stall::{Missing, as_said};

use super::wire::BATCH;

/// So long it waits for those that did not come to say what they do, before it reports them.
const COLLECT: Duration = Duration::from_millis(300);

/// Those that did not come are asked what they do when an operation has waited for so long ...
const ASK: Duration = Duration::from_millis(100);

/// ... (but once in this time, for all entries are looked at) ...
const PAUSE: Duration = Duration::from_millis(50);

/// ... and for so long, and whenever it has waited for twice as long as then.
const REPEAT: Duration = Duration::from_secs(1);

/// Batches that are under way on rank 0 at once. While they are, what gets ready waits, and is fused.
const AHEAD: usize = 2;

/// Most operations that one rank may have asked for. It has no more under way than [`super::MOST`], and what it gave up
/// itself may not have reached rank 0 yet.
const ASKED: usize = 2 * super::MOST;

/// A named operation of a call.
pub(super) type Key = (u64, String);

/// What rank 0 has decided.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Verdict {
    /// All ranks do these now, as one operation if they are several, which has this number in its call.
    Run {
        call: u64,
        number: u64,
        names: Vec<String>,
    },
    /// They are given up.
    Fail {
        call: u64,
        names: Vec<String>,
        cause: Cause,
    },
    /// These ranks are asked what they do.
    Query { ranks: Vec<u32> },
    /// They wait for long, for these ranks, which do something else.
    Stalled {
        call: u64,
        names: Vec<String>,
        waited: Duration,
        missing: Vec<(u32, String)>,
    },
}

/// What a rank said that it does, and when.
#[derive(Debug)]
struct Doing {
    at: Instant,
    text: String,
}

impl Doing {
    fn in_words(&self, now: Instant) -> String {
        as_said(&self.text, now.saturating_duration_since(self.at))
    }
}

#[derive(Debug)]
struct Entry {
    /// By rank.
    asked: Vec<Option<Operation>>,
    since: Instant,
    deadline: Instant,
    limit: Duration,
    /// When those that are missing are asked next what they do.
    ask_at: Instant,
    stall: Stall,
    is_ready: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stall {
    Not,
    Asked(Instant),
    Reported,
}

impl Entry {
    /// When there is something to be done about it, if it is not ready by then.
    fn alarm(&self, stall_after: Duration, asks_from: Option<Instant>) -> Instant {
        let stall = match self.stall {
            Stall::Not => self.since.checked_add(stall_after),
            Stall::Asked(at) => Some(at + COLLECT),
            Stall::Reported => None,
        };
        let ask_at = asks_from.map_or(self.ask_at, |from| from.max(self.ask_at));
        let first = self.deadline.min(ask_at);
        stall.map_or(first, |stall| stall.min(first))
    }

    fn missing(&self, joined: &[bool]) -> Vec<u32> {
        (0..)
            .zip(self.asked.iter().zip(joined))
            .filter(|(_, (asked, joined))| asked.is_none() && !**joined)
            .map(|(rank, _)| rank)
            .collect()
    }

    /// The first operation, and another one that differs.
    fn judge(&self, name: &str) -> Result<Option<Operation>, Cause> {
        let mut asked = (0..)
            .zip(&self.asked)
            .filter_map(|(rank, asked)| Some((Rank(rank), (*asked)?)));
        let Some((rank, first)) = asked.next() else {
            return Ok(None);
        };
        match asked.find(|(_, other)| *other != first) {
            None => Ok(Some(first)),
            Some((other, theirs)) => Err(Cause::Mismatch {
                rank,
                asked: format!("{first} named `{name}`"),
                other,
                other_asked: theirs.to_string(),
            }),
        }
    }
}

/// What operations have in common that can be fused: all but lengths and shapes. None if this one can't be.
pub(super) fn likeness(operation: &Operation, world: u32) -> Option<Operation> {
    let alike = match operation.kind {
        // Several buffers are by themselves.
        OperationKind::AllReduce => {
            operation.rows == 0 && operation.reduce != Some(ReduceOp::Adasum)
        }
        OperationKind::AllGather => operation.rows == 0,
        // With fewer rows than ranks most of what is fused would be padding.
        OperationKind::ReduceScatter => {
            operation.rows >= u64::from(world)
                && operation.rows != Operation::OF_SEVERAL
                && operation.count.is_multiple_of(operation.rows)
        }
        _ => false,
    };
    // One that fails by itself would let others fail.
    (alike && operation.check(world).is_ok()).then_some(Operation {
        count: 0,
        rows: 0,
        shape: 0,
        ..*operation
    })
}

/// Bytes of the longest buffer that an operation has.
fn weight(operation: &Operation, world: u32) -> u64 {
    match operation.kind {
        OperationKind::AllGather => operation.bytes().saturating_mul(u64::from(world)),
        _ => operation.bytes(),
    }
}

#[derive(Debug)]
pub(super) struct Book {
    world: u32,
    /// Most bytes that are fused.
    pub(super) threshold: u64,
    stall_after: Duration,
    entries: HashMap<Key, Entry>,
    /// How many of them are not ready.
    waiting: usize,
    /// Those for which all have asked, in that order.
    ready: VecDeque<Key>,
    joined: Vec<bool>,
    doing: HashMap<u32, Doing>,
    /// Before this time nobody is asked.
    asks_from: Option<Instant>,
    /// Before this time there is nothing to be seen on the clock: there may be thousands of entries.
    alarm: Option<Instant>,
    /// How many entries each rank has asked for.
    asked: Vec<usize>,
    /// The number of the next operation, and of which call.
    next: (u64, u64),
    /// Ranks that are gone.
    lost: Option<Cause>,
    /// Calls before this one are over.
    over_before: u64,
    over: Option<Cause>,
    running: usize,
    verdicts: Vec<Verdict>,
}

impl Book {
    pub(super) fn new(world: u32, threshold: u64, stall_after: Duration) -> Self {
        Self {
            world,
            threshold,
            stall_after,
            entries: HashMap::new(),
            waiting: 0,
            ready: VecDeque::new(),
            joined: vec![false; world as usize],
            doing: HashMap::new(),
            asks_from: None,
            alarm: None,
            asked: vec![0; world as usize],
            next: (0, 0),
            lost: None,
            over_before: 0,
            over: None,
            running: 0,
            verdicts: Vec::new(),
        }
    }

    /// Whether a rank has asked for more than it can have under way: then it does not keep to the protocol.
    pub(super) fn is_greedy(&self, rank: u32) -> bool {
        self.asked
            .get(rank as usize)
            .is_some_and(|asked| *asked >= ASKED)
    }

    /// A rank has started an operation.
    pub(super) fn ask(
        &mut self,
        now: Instant,
        rank: u32,
        (call, name): Key,
        operation: Operation,
        limit: Duration,
    ) {
        if rank >= self.world {
            return;
        }
        let over = self.over.clone().filter(|_| call < self.over_before);
        if let Some(cause) = self.lost.clone().or(over) {
            let names = vec![name];
            self.verdicts.push(Verdict::Fail { call, names, cause });
            return;
        }
        let entry = self.entries.entry((call, name.clone())).or_insert_with(|| {
            self.waiting += 1;
            Entry {
                asked: vec![None; self.world as usize],
                since: now,
                deadline: now + limit,
                limit,
                ask_at: now + ASK,
                stall: Stall::Not,
                is_ready: false,
            }
        });
        entry.deadline = entry.deadline.min(now + limit);
        let alarm = entry.alarm(self.stall_after, self.asks_from);
        self.alarm = Some(self.alarm.map_or(alarm, |at| at.min(alarm)));
        if entry.asked[rank as usize].replace(operation).is_none() {
            self.asked[rank as usize] += 1;
        }
        self.check(&(call, name));
    }

    /// A rank has no more data. When all have said so, all begin anew.
    pub(super) fn join(&mut self, rank: u32) {
        let Some(joined) = self.joined.get_mut(rank as usize) else {
            return;
        };
        *joined = true;
        if self.joined.iter().all(|joined| *joined) {
            self.joined.fill(false);
            return;
        }
        let mut keys: Vec<(Instant, Key)> = self
            .entries
            .iter()
            .filter(|(_, entry)| !entry.is_ready)
            .map(|(key, entry)| (entry.since, key.clone()))
            .collect();
        keys.sort();
        for (_, key) in keys {
            self.check(&key);
        }
    }

    fn check(&mut self, key: &Key) {
        let Some(entry) = self.entries.get_mut(key) else {
            return;
        };
        if !entry.is_ready && entry.missing(&self.joined).is_empty() {
            entry.is_ready = true;
            self.waiting -= 1;
            self.ready.push_back(key.clone());
        }
    }

    /// A rank says what it does.
    pub(super) fn doing(&mut self, now: Instant, rank: u32, text: String) {
        self.doing.insert(rank, Doing { at: now, text });
    }

    /// Whether a rank that has a link now was to be asked what it does.
    pub(super) fn wants_to_know(&self, rank: u32) -> bool {
        let mut asked = self.entries.values().filter(|entry| {
            let was_asked = entry.ask_at != entry.since + ASK || entry.stall != Stall::Not;
            was_asked && !entry.is_ready
        });
        asked.any(|entry| entry.missing(&self.joined).contains(&rank))
    }

    /// A batch has ended on rank 0.
    pub(super) fn ended(&mut self) {
        self.running = self.running.saturating_sub(1);
    }

    /// A rank's link has ended; if it is gone for good nothing can work any more.
    pub(super) fn lost(&mut self, cause: Cause, for_good: bool) {
        if for_good && self.lost.is_none() {
            self.lost = Some(cause.clone());
        }
        // With the first one it began.
        let cause = self.lost.clone().unwrap_or(cause);
        self.fail_all(u64::MAX, &cause);
    }

    /// Whether a rank is gone for good.
    pub(super) fn has_lost(&self) -> bool {
        self.lost.is_some()
    }

    /// Calls before this one are over on some rank.
    pub(super) fn over(&mut self, before: u64, cause: Cause) {
        self.fail_all(before, &cause);
        if before > self.over_before {
            self.over_before = before;
            self.over = Some(cause);
        }
    }

    fn fail_all(&mut self, before: u64, cause: &Cause) {
        let mut failed: HashMap<u64, Vec<String>> = HashMap::new();
        let keys: Vec<Key> = self
            .entries
            .keys()
            .filter(|(call, _)| *call < before)
            .cloned()
            .collect();
        for key in keys {
            self.remove(&key);
            failed.entry(key.0).or_default().push(key.1);
        }
        self.ready.retain(|(call, _)| *call >= before);
        for (call, mut names) in failed {
            names.sort();
            let cause = cause.clone();
            self.verdicts.push(Verdict::Fail { call, names, cause });
        }
    }

    fn remove(&mut self, key: &Key) -> Option<Entry> {
        let entry = self.entries.remove(key)?;
        self.waiting -= usize::from(!entry.is_ready);
        for (count, asked) in self.asked.iter_mut().zip(&entry.asked) {
            *count -= usize::from(asked.is_some());
        }
        Some(entry)
    }

    /// The number of the next operation of a call, which is taken by it.
    fn number(&mut self, call: u64) -> u64 {
        if self.next.0 != call {
            self.next = (call, 0);
        }
        let number = self.next.1;
        self.next.1 += 1;
        number
    }

    /// What follows from all that came.
    pub(super) fn verdicts(&mut self, now: Instant) -> Vec<Verdict> {
        self.look_at_the_clock(now);
        while self.running < AHEAD
            && let Some(key) = self.ready.pop_front()
        {
            let Some(entry) = self.remove(&key) else {
                continue;
            };
            let (call, name) = key;
            match entry.judge(&name) {
                Err(cause) => {
                    let names = vec![name];
                    self.verdicts.push(Verdict::Fail { call, names, cause });
                }
                Ok(None) => {}
                Ok(Some(operation)) => {
                    let names = self.fuse(call, name, &operation);
                    self.running += 1;
                    let number = self.number(call);
                    self.verdicts.push(Verdict::Run {
                        call,
                        number,
                        names,
                    });
                }
            }
        }
        std::mem::take(&mut self.verdicts)
    }

    /// Takes what is ready, is like this operation, and fits. It looks past what does not.
    fn fuse(&mut self, call: u64, name: String, operation: &Operation) -> Vec<String> {
        let mut names = vec![name];
        let world = self.world;
        let Some(like) = likeness(operation, world) else {
            return names;
        };
        let mut sum = weight(operation, world);
        let mut ready = std::mem::take(&mut self.ready);
        ready.retain(|key| {
            if key.0 != call || sum >= self.threshold || names.len() == BATCH {
                return true;
            }
            let judged = self.entries.get(key).map(|entry| entry.judge(&key.1));
            let Some(Ok(Some(other))) = judged else {
                return true;
            };
            let with = sum.saturating_add(weight(&other, world));
            if likeness(&other, world) != Some(like) || with > self.threshold {
                return true;
            }
            sum = with;
            self.remove(key);
            names.push(key.1.clone());
            false
        });
        self.ready = ready;
        names
    }

    /// After such a time operations are said to wait for long.
    pub(super) fn set_stall_after(&mut self, now: Instant, stall_after: Duration) {
        if self.stall_after != stall_after {
            self.stall_after = stall_after;
            // Of those that wait, too.
            self.alarm = Some(now);
        }
    }

    fn look_at_the_clock(&mut self, now: Instant) {
        if self.alarm.is_none_or(|at| now < at) {
            return;
        }
        let mut late: Vec<(Key, Cause)> = Vec::new();
        let (asks, mut asked) = (self.asks_from.is_none_or(|at| now >= at), false);
        let mut query = Vec::new();
        let mut stalled: HashMap<(u64, Vec<u32>), (Vec<String>, Duration)> = HashMap::new();
        for (key, entry) in &mut self.entries {
            if entry.is_ready {
                continue;
            }
            let waited = now.saturating_duration_since(entry.since);
            if now >= entry.deadline {
                let missing = entry.missing(&self.joined);
                let doing = missing.iter().filter_map(|rank| {
                    let doing = self.doing.get(rank)?;
                    (doing.at >= entry.since).then(|| Missing {
                        rank: Rank(*rank),
                        doing: doing.in_words(now),
                    })
                });
                let cause = Cause::Deadline {
                    waited: entry.limit,
                    doing: doing.take(DOING).collect(),
                    late: missing.into_iter().map(Rank).collect(),
                };
                late.push((key.clone(), cause));
            } else if asks && now >= entry.ask_at {
                asked = true;
                query.extend(entry.missing(&self.joined).into_iter().filter(|rank| {
                    let said = self.doing.get(rank).map(|doing| doing.at);
                    said.is_none_or(|at| now >= at + ASK)
                }));
                entry.ask_at = (entry.since + REPEAT).max(now + waited);
            }
            match entry.stall {
                Stall::Not if waited >= self.stall_after => {
                    query.extend(entry.missing(&self.joined));
                    entry.stall = Stall::Asked(now);
                }
                Stall::Asked(at) if now >= at + COLLECT => {
                    let of_call = (key.0, entry.missing(&self.joined));
                    let (names, longest) = stalled.entry(of_call).or_default();
                    names.push(key.1.clone());
                    *longest = waited.max(*longest);
                    entry.stall = Stall::Reported;
                }
                _ => {}
            }
        }
        if asked {
            self.asks_from = Some(now + PAUSE);
        }
        for (key, _) in &late {
            self.remove(key);
        }
        let waiting = self.entries.values().filter(|entry| !entry.is_ready);
        let alarms = waiting.map(|entry| entry.alarm(self.stall_after, self.asks_from));
        self.alarm = alarms.min();
        for ((call, name), cause) in late {
            let names = vec![name];
            self.verdicts.push(Verdict::Fail { call, names, cause });
        }
        if !query.is_empty() {
            query.sort_unstable();
            query.dedup();
            self.verdicts.push(Verdict::Query { ranks: query });
        }
        for ((call, missing), (mut names, waited)) in stalled {
            names.sort();
            let missing = missing
                .into_iter()
                .map(|rank| {
                    let doing = (self.doing.get(&rank)).filter(|doing| doing.at + waited >= now);
                    let doing = doing.map(|doing| doing.in_words(now));
                    (
                        rank,
                        doing.unwrap_or_else(|| "nothing is heard from it".to_owned()),
                    )
                })
                .collect();
            self.verdicts.push(Verdict::Stalled {
                call,
                names,
                waited,
                missing,
            });
        }
    }

    /// The ranks that operations wait for.
    pub(super) fn waits_for(&self) -> BTreeSet<u32> {
        let waiting = self.entries.values().filter(|entry| !entry.is_ready);
        waiting
            .flat_map(|entry| entry.missing(&self.joined))
            .collect()
    }

    /// When to look at the clock again.
    pub(super) fn next_alarm(&self) -> Option<Instant> {
        self.alarm.filter(|_| self.waiting > 0)
    }
}

#[cfg(test)]
mod tests;
