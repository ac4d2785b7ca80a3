//! What rank 0 knows of named operations: who has started which, and what follows from that. Pure: time comes in as
//! arguments, messages go out as verdicts.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use kolo_transport::ids::Rank;

use crate::cause::Cause;
use crate::element::DType;
use crate::operation::{Factor, Operation, OperationKind, ReduceOp};

use super::wire::BATCH;

/// So long it waits for those that did not come to say what they do, before it reports them.
const COLLECT: Duration = Duration::from_millis(300);

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
        operation: Operation,
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

#[derive(Debug)]
struct Entry {
    /// By rank.
    asked: Vec<Option<Operation>>,
    since: Instant,
    deadline: Instant,
    limit: Duration,
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
    fn missing(&self, joined: &[bool]) -> Vec<u32> {
        (0..)
            .zip(self.asked.iter().zip(joined))
            .filter(|(_, (asked, joined))| asked.is_none() && !**joined)
            .map(|(rank, _)| rank)
            .collect()
    }

    /// The first operation, and another one that differs.
    fn judge(&self) -> Result<Option<Operation>, Cause> {
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
                asked: first.to_string(),
                other,
                other_asked: theirs.to_string(),
            }),
        }
    }
}

/// What operations have in common that can be fused.
type Likeness = (
    Option<DType>,
    Option<ReduceOp>,
    Option<DType>,
    Factor,
    Factor,
);

fn likeness(operation: &Operation) -> Option<Likeness> {
    let alike = operation.kind == OperationKind::AllReduce
        && operation.reduce != Some(ReduceOp::Adasum)
        // Groups are by themselves.
        && operation.rows == 0;
    alike.then_some((
        operation.dtype,
        operation.reduce,
        operation.wire,
        operation.prescale,
        operation.postscale,
    ))
}

fn bytes(operation: &Operation) -> u64 {
    let size = operation.dtype.map_or(1, DType::size) as u64;
    operation.count.saturating_mul(size)
}

#[derive(Debug)]
pub(super) struct Book {
    world: u32,
    /// Most bytes that are fused.
    pub(super) threshold: u64,
    pub(super) stall_after: Duration,
    entries: HashMap<Key, Entry>,
    /// Those for which all have asked, in that order.
    ready: VecDeque<Key>,
    joined: Vec<bool>,
    doing: HashMap<u32, String>,
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
            ready: VecDeque::new(),
            joined: vec![false; world as usize],
            doing: HashMap::new(),
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
        let entry = self
            .entries
            .entry((call, name.clone()))
            .or_insert_with(|| Entry {
                asked: vec![None; self.world as usize],
                since: now,
                deadline: now + limit,
                limit,
                stall: Stall::Not,
                is_ready: false,
            });
        entry.deadline = entry.deadline.min(now + limit);
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
            self.ready.push_back(key.clone());
        }
    }

    /// A rank says what it does.
    pub(super) fn doing(&mut self, rank: u32, text: String) {
        self.doing.insert(rank, text);
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
        self.fail_all(u64::MAX, &cause);
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
        for (count, asked) in self.asked.iter_mut().zip(&entry.asked) {
            *count -= usize::from(asked.is_some());
        }
        Some(entry)
    }

    /// The number of the next operation of a call, which takes `numbers` of them.
    fn number(&mut self, call: u64, numbers: u64) -> u64 {
        if self.next.0 != call {
            self.next = (call, 0);
        }
        let number = self.next.1;
        self.next.1 += numbers;
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
            match entry.judge() {
                Err(cause) => {
                    let names = vec![name];
                    self.verdicts.push(Verdict::Fail { call, names, cause });
                }
                Ok(None) => {}
                Ok(Some(operation)) => {
                    let names = self.fuse(call, name, &operation);
                    self.running += 1;
                    let number = self.number(call, super::numbers(&operation));
                    self.verdicts.push(Verdict::Run {
                        call,
                        number,
                        names,
                        operation,
                    });
                }
            }
        }
        std::mem::take(&mut self.verdicts)
    }

    /// Takes what is ready, is like this operation, and fits. It looks past what does not.
    fn fuse(&mut self, call: u64, name: String, operation: &Operation) -> Vec<String> {
        let mut names = vec![name];
        let Some(like) = likeness(operation) else {
            return names;
        };
        let mut sum = bytes(operation);
        let mut ready = std::mem::take(&mut self.ready);
        ready.retain(|key| {
            if key.0 != call || sum >= self.threshold || names.len() == BATCH {
                return true;
            }
            let Some(Ok(Some(other))) = self.entries.get(key).map(Entry::judge) else {
                return true;
            };
            let with = sum.saturating_add(bytes(&other));
            if likeness(&other) != Some(like) || with > self.threshold {
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

    fn look_at_the_clock(&mut self, now: Instant) {
        let mut late: Vec<(Key, Cause)> = Vec::new();
        let mut query = Vec::new();
        let mut stalled: HashMap<(u64, Vec<u32>), (Vec<String>, Duration)> = HashMap::new();
        for (key, entry) in &mut self.entries {
            if entry.is_ready {
                continue;
            }
            let waited = now.saturating_duration_since(entry.since);
            let missing = || entry.missing(&self.joined);
            if now >= entry.deadline {
                let cause = Cause::Deadline {
                    waited: entry.limit,
                    late: missing().into_iter().map(Rank).collect(),
                };
                late.push((key.clone(), cause));
            }
            match entry.stall {
                Stall::Not if waited >= self.stall_after => {
                    query.extend(missing());
                    entry.stall = Stall::Asked(now);
                }
                Stall::Asked(at) if now >= at + COLLECT => {
                    let of_call = (key.0, missing());
                    let (names, longest) = stalled.entry(of_call).or_default();
                    names.push(key.1.clone());
                    *longest = waited.max(*longest);
                    entry.stall = Stall::Reported;
                }
                _ => {}
            }
        }
        for (key, cause) in late {
            self.remove(&key);
            let (call, name) = key;
            let names = vec![name];
            self.verdicts.push(Verdict::Fail { call, names, cause });
        }
        if !query.is_empty() {
            query.sort_unstable();
            query.dedup();
            for rank in &query {
                self.doing.remove(rank);
            }
            self.verdicts.push(Verdict::Query { ranks: query });
        }
        for ((call, missing), (mut names, waited)) in stalled {
            names.sort();
            let missing = missing
                .into_iter()
                .map(|rank| {
                    let doing = self.doing.get(&rank).cloned();
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

    /// When to look at the clock again.
    pub(super) fn next_alarm(&self) -> Option<Instant> {
        self.entries
            .values()
            .filter(|entry| !entry.is_ready)
            .flat_map(|entry| {
                let stall = match entry.stall {
                    Stall::Not => entry.since.checked_add(self.stall_after),
                    Stall::Asked(at) => Some(at + COLLECT),
                    Stall::Reported => None,
                };
                [Some(entry.deadline), stall]
            })
            .flatten()
            .min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    fn sum(count: u64) -> Operation {
        Operation {
            reduce: Some(ReduceOp::Sum),
            ..Operation::new(OperationKind::AllReduce, Some(DType::F32), count)
        }
    }

    fn key(name: &str) -> Key {
        (0, name.to_owned())
    }

    fn book(world: u32) -> (Book, Instant) {
        (
            Book::new(world, 100, Duration::from_secs(5)),
            Instant::now(),
        )
    }

    fn runs(verdicts: Vec<Verdict>) -> Vec<Vec<String>> {
        verdicts
            .into_iter()
            .map(|verdict| match verdict {
                Verdict::Run { names, .. } => names,
                other => panic!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn a_name_runs_when_all_have_asked_in_whatever_order() {
        let (mut book, now) = book(2);
        book.ask(now, 0, key("a"), sum(1), LIMIT);
        book.ask(now, 0, key("b"), sum(100), LIMIT);
        book.ask(now, 1, key("b"), sum(100), LIMIT);
        assert_eq!(runs(book.verdicts(now)), [["b"]]);
        book.ask(now, 1, key("a"), sum(1), LIMIT);
        assert_eq!(runs(book.verdicts(now)), [["a"]]);
        assert_eq!(book.next_alarm(), None);
    }

    #[test]
    fn what_is_ready_while_others_run_is_fused_up_to_the_threshold() {
        let (mut book, now) = book(1);
        let max = Operation {
            reduce: Some(ReduceOp::Max),
            ..sum(1)
        };
        for name in ["x", "y"] {
            book.ask(now, 0, key(name), sum(25), LIMIT);
            assert_eq!(runs(book.verdicts(now)), [[name]]);
        }
        for (name, operation) in [
            ("a", sum(10)),
            ("m", max),
            ("b", sum(10)),
            ("big", sum(10)),
            ("c", sum(5)),
        ] {
            book.ask(now, 0, key(name), operation, LIMIT);
        }
        assert_eq!(book.verdicts(now), [], "two are under way");
        book.ended();
        assert_eq!(runs(book.verdicts(now)), [["a", "b", "c"]]);
        book.ended();
        assert_eq!(runs(book.verdicts(now)), [["m"]]);
        book.ended();
        assert_eq!(runs(book.verdicts(now)), [["big"]]);
    }

    #[test]
    fn operations_have_numbers_in_their_calls() {
        let (mut book, now) = book(1);
        let gather = Operation::new(OperationKind::AllGatherVarcount, Some(DType::F32), 0);
        let mut numbers = Vec::new();
        for (call, name, operation) in [
            (0, "a", sum(1)),
            (0, "b", gather),
            (0, "c", sum(1)),
            (7, "a", sum(1)),
            (7, "b", sum(1)),
        ] {
            book.ask(now, 0, (call, name.to_owned()), operation, LIMIT);
            for verdict in book.verdicts(now) {
                if let Verdict::Run { call, number, .. } = verdict {
                    numbers.push((call, number));
                }
            }
            book.ended();
        }
        assert_eq!(numbers, [(0, 0), (0, 1), (0, 3), (7, 0), (7, 1)]);
    }

    #[test]
    fn a_rank_that_asks_without_end_is_seen() {
        let (mut book, now) = book(2);
        for index in 0..ASKED {
            assert!(!book.is_greedy(1));
            book.ask(now, 1, key(&index.to_string()), sum(1), LIMIT);
        }
        assert!(book.is_greedy(1));
        assert!(!book.is_greedy(0));
        book.over(
            1,
            Cause::Left {
                rank: Rank(1),
                reason: "call 1 has begun".to_owned(),
            },
        );
        assert!(!book.is_greedy(1), "what has ended does not count");
    }

    #[test]
    fn ranks_that_disagree_are_named() {
        let (mut book, now) = book(3);
        book.ask(now, 0, key("a"), sum(1), LIMIT);
        book.ask(now, 1, key("a"), sum(1), LIMIT);
        book.ask(now, 2, key("a"), sum(2), LIMIT);
        let [Verdict::Fail { names, cause, .. }] = &book.verdicts(now)[..] else {
            panic!("it fails");
        };
        assert_eq!(names, &["a"]);
        assert_eq!(
            cause,
            &Cause::Mismatch {
                rank: Rank(0),
                asked: "all_reduce(sum) of 1 f32".to_owned(),
                other: Rank(2),
                other_asked: "all_reduce(sum) of 2 f32".to_owned(),
            }
        );
    }

    #[test]
    fn a_late_rank_is_asked_reported_and_in_the_end_named() {
        let (mut book, now) = book(3);
        book.ask(now, 0, key("a"), sum(1), LIMIT);
        book.ask(now, 2, key("a"), sum(1), LIMIT);
        let at = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(book.next_alarm(), Some(at(5)));
        assert_eq!(book.verdicts(at(4)), []);
        assert_eq!(book.verdicts(at(5)), [Verdict::Query { ranks: vec![1] }]);
        book.doing(1, "it sleeps".to_owned());
        let [Verdict::Stalled { missing, names, .. }] = &book.verdicts(at(6))[..] else {
            panic!("it is reported");
        };
        assert_eq!(missing, &[(1, "it sleeps".to_owned())]);
        assert_eq!(names, &["a"]);
        assert_eq!(book.next_alarm(), Some(at(10)));
        let [Verdict::Fail { cause, .. }] = &book.verdicts(at(10))[..] else {
            panic!("it fails");
        };
        let late = vec![Rank(1)];
        assert_eq!(
            cause,
            &Cause::Deadline {
                waited: LIMIT,
                late
            }
        );
        assert_eq!(book.next_alarm(), None);
    }

    #[test]
    fn nobody_waits_for_a_rank_that_has_joined() {
        let (mut book, now) = book(2);
        book.ask(now, 0, key("a"), sum(1), LIMIT);
        book.join(1);
        assert_eq!(runs(book.verdicts(now)), [["a"]]);
        book.ask(now, 0, key("b"), sum(1), LIMIT);
        assert_eq!(runs(book.verdicts(now)), [["b"]]);
        book.ended();
        // All have joined: from now on all are waited for again.
        book.join(0);
        book.ask(now, 0, key("c"), sum(1), LIMIT);
        assert_eq!(book.verdicts(now), []);
        book.ask(now, 1, key("c"), sum(1), LIMIT);
        assert_eq!(runs(book.verdicts(now)), [["c"]]);
    }

    #[test]
    fn a_loss_fails_all_and_a_call_that_is_over_its_own() {
        let (mut book, now) = book(2);
        book.ask(now, 0, (4, "a".to_owned()), sum(1), LIMIT);
        book.ask(now, 0, (5, "a".to_owned()), sum(1), LIMIT);
        let failed = Cause::Failed {
            rank: Rank(1),
            reason: "panic".to_owned(),
        };
        book.over(5, failed.clone());
        let fail = |call, cause: &Cause| Verdict::Fail {
            call,
            names: vec!["a".to_owned()],
            cause: cause.clone(),
        };
        assert_eq!(book.verdicts(now), [fail(4, &failed)]);
        book.ask(now, 0, (4, "a".to_owned()), sum(1), LIMIT);
        assert_eq!(book.verdicts(now), [fail(4, &failed)], "it stays over");
        let lost = Cause::Lost {
            rank: Rank(1),
            reason: "killed".to_owned(),
            for_good: true,
        };
        book.lost(lost.clone(), true);
        assert_eq!(book.verdicts(now), [fail(5, &lost)]);
        book.ask(now, 0, (6, "a".to_owned()), sum(1), LIMIT);
        assert_eq!(book.verdicts(now), [fail(6, &lost)]);
    }
}
