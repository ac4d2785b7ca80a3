//! What the book decides when time goes by: members that are late are asked, reported and named.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kolo_transport::ids::Rank;

use crate::error::{CollectiveError, DOING};
use crate::stall::{Missing, as_said};

use super::entry::Stall;
use super::{Book, Decision, Entry, Key};
use crate::times::{ASK, COLLECT, PAUSE, REPEAT};

/// What a member said that it does, and when.
#[derive(Debug)]
pub(super) struct Doing {
    at: Instant,
    text: String,
}

impl Doing {
    fn in_words(&self, now: Instant) -> String {
        as_said(&self.text, now.saturating_duration_since(self.at))
    }
}

/// What is to be looked at, and when.
#[derive(Debug)]
pub(super) struct Clock {
    stall_after: Duration,
    doing: HashMap<u32, Doing>,
    /// Before this time nobody is asked what it does.
    asks_from: Option<Instant>,
    /// Before this time the clock brings nothing, so the entries, of which there may be thousands, are not looked at.
    alarm: Option<Instant>,
}

impl Clock {
    pub(super) fn new(stall_after: Duration) -> Self {
        Self {
            stall_after,
            doing: HashMap::new(),
            asks_from: None,
            alarm: None,
        }
    }

    /// A member says what it does.
    pub(super) fn does(&mut self, now: Instant, rank: u32, text: String) {
        self.doing.insert(rank, Doing { at: now, text });
    }

    /// An entry waits that may be looked at sooner than others.
    pub(super) fn await_entry(&mut self, entry: &Entry) {
        let alarm = entry.alarm(self.stall_after, self.asks_from);
        self.alarm = Some(self.alarm.map_or(alarm, |at| at.min(alarm)));
    }
}

impl Book {
    /// Whether a member that has a link now was to be asked before what it does.
    pub(in crate::negotiation) fn wants_to_know(&self, rank: u32) -> bool {
        let mut asked = self.entries.values().filter(|entry| {
            let was_asked = entry.ask_at != entry.since + ASK || entry.stall != Stall::Not;
            was_asked && !entry.is_ready
        });
        asked.any(|entry| entry.missing(&self.joined).contains(&rank))
    }

    /// Operations are reported when they have waited for so long.
    pub(in crate::negotiation) fn set_stall_after(&mut self, now: Instant, stall_after: Duration) {
        if self.clock.stall_after != stall_after {
            self.clock.stall_after = stall_after;
            // Of those that wait, too.
            self.clock.alarm = Some(now);
        }
    }

    pub(super) fn look_at_the_clock(&mut self, now: Instant) {
        if self.clock.alarm.is_none_or(|at| now < at) {
            return;
        }
        let mut late: Vec<(Key, CollectiveError, Vec<bool>)> = Vec::new();
        let (asks, mut asked) = (self.clock.asks_from.is_none_or(|at| now >= at), false);
        let mut query = Vec::new();
        let mut stalled: HashMap<(u64, Vec<u32>), (Vec<String>, Duration)> = HashMap::new();
        for (key, entry) in &mut self.entries {
            if entry.is_ready {
                continue;
            }
            let waited = now.saturating_duration_since(entry.since);
            let is_late = now >= entry.deadline;
            if is_late {
                let missing = entry.missing(&self.joined);
                let doing = missing.iter().filter_map(|rank| {
                    let doing = self.clock.doing.get(rank)?;
                    (doing.at >= entry.since).then(|| Missing {
                        rank: Rank(*rank),
                        doing: doing.in_words(now),
                    })
                });
                let cause = CollectiveError::Deadline {
                    operation: String::new(),
                    waited: entry.limit,
                    doing: doing.take(DOING).collect(),
                    late: missing.into_iter().map(Rank).collect(),
                };
                late.push((key.clone(), cause, entry.who_asked().collect()));
            } else if asks && now >= entry.ask_at {
                asked = true;
                query.extend(entry.missing(&self.joined).into_iter().filter(|rank| {
                    let said = self.clock.doing.get(rank).map(|doing| doing.at);
                    said.is_none_or(|at| now >= at + ASK)
                }));
                entry.ask_at = (entry.since + REPEAT).max(now + waited);
            }
            let is_stalled = waited >= self.clock.stall_after;
            let is_reported = match entry.stall {
                // There may be no time left to ask.
                Stall::Not => is_stalled && is_late,
                Stall::Asked(at) => is_late || now >= at + COLLECT,
                Stall::Reported => false,
            };
            if is_reported {
                let of_call = (key.0, entry.missing(&self.joined));
                let (names, longest) = stalled.entry(of_call).or_default();
                names.push(key.1.clone());
                *longest = waited.max(*longest);
                entry.stall = Stall::Reported;
            } else if is_stalled && entry.stall == Stall::Not {
                query.extend(entry.missing(&self.joined));
                entry.stall = Stall::Asked(now);
            }
        }
        if asked {
            self.clock.asks_from = Some(now + PAUSE);
        }
        for (key, ..) in &late {
            self.remove(key);
        }
        let waiting = self.entries.values().filter(|entry| !entry.is_ready);
        let alarms = waiting.map(|entry| entry.alarm(self.clock.stall_after, self.clock.asks_from));
        self.clock.alarm = alarms.min();
        if !query.is_empty() {
            query.sort_unstable();
            query.dedup();
            self.decisions.push(Decision::Query { members: query });
        }
        for ((call, missing), (mut names, waited)) in stalled {
            names.sort();
            let missing = missing
                .into_iter()
                .map(|rank| {
                    let doing =
                        (self.clock.doing.get(&rank)).filter(|doing| doing.at + waited >= now);
                    let doing = doing.map(|doing| doing.in_words(now));
                    (
                        rank,
                        doing.unwrap_or_else(|| "nothing is heard from it".to_owned()),
                    )
                })
                .collect();
            self.decisions.push(Decision::Stalled {
                call,
                names,
                waited,
                missing,
            });
        }
        // Of what is given up nothing is reported any more.
        for ((call, name), cause, asked) in late {
            let failed = self.failed(call, vec![name], cause, asked);
            self.decisions.push(Decision::Fail(failed));
        }
    }

    /// When to look at the clock again.
    pub(in crate::negotiation) fn next_alarm(&self) -> Option<Instant> {
        self.clock.alarm.filter(|_| self.waiting > 0)
    }
}
