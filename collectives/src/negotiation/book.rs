//! What the coordinator knows of named operations: which member has asked for which, and what follows from that. Pure: events and
//! the time come in as arguments, decisions go out.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cause::cut;
use crate::error::CollectiveError;
use crate::operation::Operation;
use crate::times::{ASK, FOREVER};

use super::messages::{BATCH, Join, Key, Request, Up};
use clock::Clock;
use entry::{Entry, Stall, weight};

pub(super) use entry::likeness;

mod clock;
mod entry;
mod joined;

/// Operations that are under way on the coordinator at once. What gets ready meanwhile waits, and is fused.
pub(super) const AHEAD: usize = 2;

/// Most operations that one member may have asked for. It has no more than [`super::MOST`] under way, and the word that it has
/// given some up may be on its way.
pub(super) const ASKED: usize = 2 * super::MOST;

/// The number of the last request of each member when something was decided: the decision is not about later requests.
pub(super) type Heard = Arc<Vec<u64>>;

/// Operations that are given up.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Failed {
    pub(super) call: u64,
    pub(super) heard: Heard,
    pub(super) names: Vec<String>,
    pub(super) cause: CollectiveError,
    /// By member, whether it has asked for one of them: the others need not know.
    pub(super) asked: Vec<bool>,
}

/// What the coordinator has decided.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Decision {
    /// All ranks run these now, as one operation with this number in its call.
    Run {
        call: u64,
        number: u64,
        heard: Heard,
        names: Vec<String>,
        /// The members that take part without data, and by which of their joins.
        followers: Vec<(u32, u64)>,
    },
    Fail(Failed),
    /// This member has not heard of the operations with these numbers that were decided: its link broke.
    Missed {
        member: u32,
        call: u64,
        numbers: Range<u64>,
    },
    /// These members are asked what they do.
    Query {
        members: Vec<u32>,
    },
    /// These operations have waited for long for these members, which do something else.
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
    entries: HashMap<Key, Entry>,
    /// How many of them are not ready.
    waiting: usize,
    /// Those for which all have asked, in the order in which the last request came.
    ready: VecDeque<Key>,
    /// By member.
    joined: Vec<Option<Join>>,
    clock: Clock,
    heard: Heard,
    /// How many entries each member has asked for.
    asked: Vec<usize>,
    /// The number of the next operation, and of which call.
    next: (u64, u64),
    /// Why nothing works any more.
    lost: Option<CollectiveError>,
    /// Calls before this one are over, and why.
    over: Option<(u64, CollectiveError)>,
    running: usize,
    decisions: Vec<Decision>,
}

impl Book {
    pub(super) fn new(world: u32, threshold: u64, stall_after: Duration) -> Self {
        Self {
            world,
            threshold,
            entries: HashMap::new(),
            waiting: 0,
            ready: VecDeque::new(),
            joined: vec![None; world as usize],
            clock: Clock::new(stall_after),
            heard: Arc::new(vec![0; world as usize]),
            asked: vec![0; world as usize],
            next: (0, 0),
            lost: None,
            over: None,
            running: 0,
            decisions: Vec::new(),
        }
    }

    /// Whether a member has asked for more than it can have under way: it does not keep to the protocol then.
    pub(super) fn is_greedy(&self, rank: u32) -> bool {
        self.asked
            .get(rank as usize)
            .is_some_and(|asked| *asked >= ASKED)
    }

    /// A member has said something.
    pub(super) fn hear(&mut self, now: Instant, rank: u32, message: Up) {
        if rank >= self.world {
            return;
        }
        match message {
            Up::Heard { call, next } => self.heard(rank, call, next),
            Up::Ask { key, request } => self.ask(now, rank, key, request),
            Up::Join(join) => self.join(rank, join),
            Up::Unjoin { serial, all } => self.unjoin(rank, serial, all),
            Up::Over { before, cause } => self.over(before, cause),
            Up::Doing { text } => self.clock.does(now, rank, cut(&text).to_owned()),
        }
    }

    /// A member has a new link, and had heard of the operations before this one of the call. It is told of those that were decided
    /// since, so that it gives up its part in them and nobody waits for it.
    fn heard(&mut self, member: u32, call: u64, next: u64) {
        let (of_call, end) = self.next;
        let next = if call < of_call { 0 } else { next };
        // It can't have been asked for more at once.
        let numbers = next.max(end.saturating_sub(ASKED as u64))..end;
        if !numbers.is_empty() {
            self.decisions.push(Decision::Missed {
                member,
                call: of_call,
                numbers,
            });
        }
    }

    /// Whether a member without a link may not have heard of something that was decided.
    pub(super) fn has_decided(&self) -> bool {
        self.next.1 > 0
    }

    /// A member has started an operation.
    fn ask(&mut self, now: Instant, rank: u32, (call, name): Key, request: Request) {
        let limit = request.limit.min(FOREVER);
        // Decisions that are not told yet keep what was heard before.
        let heard = &mut Arc::make_mut(&mut self.heard)[rank as usize];
        *heard = request.serial.max(*heard);
        let over = self.over.as_ref().filter(|(before, _)| call < *before);
        let cause = self.lost.as_ref().or(over.map(|(_, cause)| cause)).cloned();
        if let Some(cause) = cause {
            let asked = (0..self.world).map(|other| other == rank).collect();
            let failed = self.failed(call, vec![name], cause, asked);
            self.decisions.push(Decision::Fail(failed));
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
                call,
                epoch: 0,
                followers: Vec::new(),
            }
        });
        entry.deadline = entry.deadline.min(now + limit);
        self.clock.await_entry(entry);
        if entry.asked[rank as usize]
            .replace(request.operation)
            .is_none()
        {
            self.asked[rank as usize] += 1;
        }
        entry.epoch = entry.epoch.max(request.epoch);
        self.check(&(call, name));
    }

    /// An operation that was decided has ended on the coordinator.
    pub(super) fn ended(&mut self) {
        self.running = self.running.saturating_sub(1);
    }

    /// A member is lost: nothing works any more. The first cause stays.
    pub(super) fn lost(&mut self, cause: CollectiveError) {
        let cause = self.lost.get_or_insert(cause).clone();
        let failed = self.fail_all(u64::MAX, &cause);
        self.decide_to_fail(failed);
    }

    /// Calls before this one are over on some member.
    fn over(&mut self, before: u64, cause: CollectiveError) {
        let failed = self.fail_all(before, &cause);
        self.decide_to_fail(failed);
        for joined in &mut self.joined {
            joined.take_if(|join| join.call < before);
        }
        if before > self.over_before() {
            self.over = Some((before, cause));
        }
    }

    /// Calls before this one are over.
    fn over_before(&self) -> u64 {
        self.over.as_ref().map_or(0, |(before, _)| *before)
    }

    fn decide_to_fail(&mut self, failed: Vec<Failed>) {
        let decisions = failed.into_iter().map(Decision::Fail);
        self.decisions.extend(decisions);
    }

    /// Forgets all operations of calls before this one, and returns them.
    pub(super) fn fail_all(&mut self, before: u64, cause: &CollectiveError) -> Vec<Failed> {
        let mut calls: BTreeMap<u64, (Vec<String>, Vec<bool>)> = BTreeMap::new();
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
            let (names, asked) = calls
                .entry(key.0)
                .or_insert_with(|| (Vec::new(), vec![false; self.world as usize]));
            names.push(key.1);
            for (any, one) in asked.iter_mut().zip(entry.who_asked()) {
                *any |= one;
            }
        }
        self.ready.retain(|(call, _)| *call >= before);
        let failed = calls.into_iter().map(|(call, (mut names, asked))| {
            names.sort();
            self.failed(call, names, cause.clone(), asked)
        });
        failed.collect()
    }

    fn failed(
        &self,
        call: u64,
        names: Vec<String>,
        cause: CollectiveError,
        asked: Vec<bool>,
    ) -> Failed {
        Failed {
            call,
            heard: Arc::clone(&self.heard),
            names,
            cause,
            asked,
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
    pub(super) fn decisions(&mut self, now: Instant) -> Vec<Decision> {
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
                    let asked = entry.who_asked().collect();
                    let failed = self.failed(call, vec![name], cause, asked);
                    self.decisions.push(Decision::Fail(failed));
                }
                Ok(None) => {}
                Ok(Some(operation)) => {
                    let names = self.fuse(call, name, &operation, &entry.followers);
                    self.running += 1;
                    let number = self.number(call);
                    self.decisions.push(Decision::Run {
                        call,
                        number,
                        heard: Arc::clone(&self.heard),
                        names,
                        followers: entry.followers,
                    });
                }
            }
        }
        std::mem::take(&mut self.decisions)
    }

    /// Takes those of the ready operations that are like this one, are done without data of the same members, and fit: a member has
    /// data for all of a fused operation or for none. Operations that do not fit are passed over.
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
