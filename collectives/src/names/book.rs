//! What rank 0 knows of named operations: who has started which, and what follows from that. Pure: time comes in as
//! arguments, messages go out as verdicts.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cause::Cause;
use crate::operation::Operation;

use super::wire::{BATCH, Join};
use clock::Doing;
use entry::{ASK, Entry, Stall, weight};

pub(super) use entry::likeness;

mod clock;
mod entry;
mod joined;

/// Batches that are under way on rank 0 at once. While they are, what gets ready waits, and is fused.
const AHEAD: usize = 2;

/// Most operations that one rank may have asked for. It has no more under way than [`super::MOST`], and what it gave up
/// itself may not have reached rank 0 yet.
pub(super) const ASKED: usize = 2 * super::MOST;

/// A named operation of a call.
pub(super) type Key = (u64, String);

/// What a rank asks for by a name.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub(super) operation: Operation,
    pub(super) limit: Duration,
    /// Later ones of the rank have higher numbers.
    pub(super) serial: u64,
    /// All ranks had joined last before this operation without a name of the call.
    pub(super) epoch: u64,
}

/// What was heard last of each rank when something was decided: that is not about what a rank has asked for since.
pub(super) type Heard = Arc<Vec<u64>>;

/// What rank 0 has decided.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Verdict {
    /// All ranks do these now, as one operation if they are several, which has this number in its call.
    Run {
        call: u64,
        number: u64,
        heard: Heard,
        names: Vec<String>,
        /// Who takes part without data, and by which of its joins.
        followers: Vec<(u32, u64)>,
    },
    /// They are given up.
    Fail {
        call: u64,
        heard: Heard,
        names: Vec<String>,
        cause: Cause,
        /// By rank, whether it has asked for one of them: it is no news for the others.
        asked: Vec<bool>,
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
    /// By rank.
    joined: Vec<Option<Join>>,
    doing: HashMap<u32, Doing>,
    /// Before this time nobody is asked.
    asks_from: Option<Instant>,
    /// Before this time there is nothing to be seen on the clock: there may be thousands of entries.
    alarm: Option<Instant>,
    /// The number of the last request of each rank.
    heard: Heard,
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
            joined: vec![None; world as usize],
            doing: HashMap::new(),
            asks_from: None,
            alarm: None,
            heard: Arc::new(vec![0; world as usize]),
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
    pub(super) fn ask(&mut self, now: Instant, rank: u32, (call, name): Key, request: Request) {
        if rank >= self.world {
            return;
        }
        // Verdicts that are not told yet keep what was heard before.
        let heard = &mut Arc::make_mut(&mut self.heard)[rank as usize];
        *heard = request.serial.max(*heard);
        let over = self.over.clone().filter(|_| call < self.over_before);
        if let Some(cause) = self.lost.clone().or(over) {
            let asked = (0..self.world).map(|other| other == rank).collect();
            self.fail(call, vec![name], cause, asked);
            return;
        }
        let entry = self.entries.entry((call, name.clone())).or_insert_with(|| {
            self.waiting += 1;
            Entry {
                asked: vec![None; self.world as usize],
                since: now,
                deadline: now + request.limit,
                limit: request.limit,
                ask_at: now + ASK,
                stall: Stall::Not,
                is_ready: false,
                call,
                epoch: 0,
                followers: Vec::new(),
            }
        });
        entry.deadline = entry.deadline.min(now + request.limit);
        let alarm = entry.alarm(self.stall_after, self.asks_from);
        self.alarm = Some(self.alarm.map_or(alarm, |at| at.min(alarm)));
        if entry.asked[rank as usize]
            .replace(request.operation)
            .is_none()
        {
            self.asked[rank as usize] += 1;
        }
        entry.epoch = entry.epoch.max(request.epoch);
        self.check(&(call, name));
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
        for joined in &mut self.joined {
            joined.take_if(|join| join.call < before);
        }
        if before > self.over_before {
            self.over_before = before;
            self.over = Some(cause);
        }
    }

    fn fail_all(&mut self, before: u64, cause: &Cause) {
        let mut failed: HashMap<u64, (Vec<String>, Vec<bool>)> = HashMap::new();
        let keys: Vec<Key> = self
            .entries
            .keys()
            .filter(|(call, _)| *call < before)
            .cloned()
            .collect();
        for key in keys {
            let Some(entry) = self.remove(&key) else {
                continue;
            };
            let (names, asked) = failed
                .entry(key.0)
                .or_insert_with(|| (Vec::new(), vec![false; self.world as usize]));
            names.push(key.1);
            for (any, one) in asked.iter_mut().zip(entry.who_asked()) {
                *any |= one;
            }
        }
        self.ready.retain(|(call, _)| *call >= before);
        for (call, (mut names, asked)) in failed {
            names.sort();
            self.fail(call, names, cause.clone(), asked);
        }
    }

    fn fail(&mut self, call: u64, names: Vec<String>, cause: Cause, asked: Vec<bool>) {
        self.verdicts.push(Verdict::Fail {
            call,
            heard: Arc::clone(&self.heard),
            names,
            cause,
            asked,
        });
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
                    self.fail(call, vec![name], cause, entry.who_asked().collect());
                }
                Ok(None) => {}
                Ok(Some(operation)) => {
                    let names = self.fuse(call, name, &operation, &entry.followers);
                    self.running += 1;
                    let number = self.number(call);
                    self.verdicts.push(Verdict::Run {
                        call,
                        number,
                        heard: Arc::clone(&self.heard),
                        names,
                        followers: entry.followers,
                    });
                }
            }
        }
        std::mem::take(&mut self.verdicts)
    }

    /// Takes what is ready, is like this operation, is done without data of the same ranks, and fits: a rank has data for all of a
    /// batch or for nothing. It looks past what does not.
    fn fuse(
        &mut self,
        call: u64,
        name: String,
        operation: &Operation,
        followers: &[(u32, u64)],
    ) -> Vec<String> {
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
            let entry = self.entries.get(key);
            let entry = entry.filter(|entry| entry.followers == followers);
            let judged = entry.map(|entry| entry.judge(&key.1));
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
}

#[cfg(test)]
mod tests;
