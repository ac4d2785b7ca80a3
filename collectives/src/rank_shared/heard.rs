//! What ranks are known to ask for, and what this one says of itself.

use std::time::Instant;

use kolo_transport::ids::Rank;
use kolo_transport::wire::span::Span;

use super::{GroupId, RankShared};
use crate::error::{CollectiveError, DOING};
use crate::operation::{Operation, OperationKind, Tag};
use crate::record::Record;
use crate::stall::{Missing, as_said};

/// What a rank asks for that this one has not begun.
pub(super) struct Heard {
    group: GroupId,
    tag: Tag,
    asked: String,
    at: Instant,
    gave_up: Option<Instant>,
}

impl Heard {
    fn in_words(&self) -> String {
        match self.gave_up {
            None => as_said(&format!("it is in {}", self.asked), self.at.elapsed()),
            Some(at) => {
                let ago = Span::rough(at.elapsed());
                format!("{ago} ago it gave up {}", self.asked)
            }
        }
    }
}

impl RankShared {
    /// An operation of a rank in words, with its place.
    fn describe(&self, rank: u32, (group, tag): (GroupId, Tag), operation: &Operation) -> String {
        let text = operation.to_string();
        let pair = self.lock().pairs.get(&group).copied();
        match (pair, text.strip_prefix(OperationKind::SendReceive.name())) {
            (Some((from, to)), Some(what)) if rank == to => {
                format!("receive{what} from rank {from}")
            }
            (Some((_, to)), Some(what)) => format!("send{what} to rank {to}"),
            _ => format!("{text} ({tag}, {group})"),
        }
    }

    /// A rank asks for an operation that this one has not begun.
    pub(crate) fn hear(&self, rank: u32, (group, tag): (GroupId, Tag), operation: &Operation) {
        let known = {
            let state = self.lock();
            let heard = state.heard.get(&rank);
            heard.is_some_and(|heard| (heard.group, heard.tag) == (group, tag))
        };
        if known {
            return;
        }
        let heard = Heard {
            group,
            tag,
            asked: self.describe(rank, (group, tag), operation),
            at: Instant::now(),
            gave_up: None,
        };
        self.lock().heard.insert(rank, heard);
    }

    /// It has given that up.
    pub(crate) fn hear_no_more(&self, rank: u32, (group, tag): (GroupId, Tag)) {
        let mut state = self.lock();
        if let Some(heard) = state.heard.get_mut(&rank)
            && (heard.group, heard.tag) == (group, tag)
        {
            heard.gave_up.get_or_insert_with(Instant::now);
        }
    }

    /// What this rank does, for ranks that wait for it elsewhere.
    pub(crate) fn present(&self) -> String {
        let waits = self
            .members()
            .into_iter()
            .filter_map(|member| member.waits());
        let waits = waits.min().map(|(since, what)| {
            format!("it waits for {what} since {}", Span::rough(since.elapsed()))
        });
        let describe = |record: &Record| {
            let place = (record.group, record.tag);
            let what = self.describe(self.me, place, &record.operation);
            match record.name.as_str() {
                "" => what,
                name => format!("{what} by the name of `{name}`"),
            }
        };
        self.recorder.present(waits, describe)
    }

    /// The ranks that are known to wait for this one in some group, with what they ask for.
    pub(crate) fn who_waits(&self) -> Vec<Missing> {
        let heard: Vec<_> = {
            let early_links = self.early_links();
            let state = self.lock();
            let of = |(rank, heard): (&u32, &Heard)| {
                let member = match state.members.get(&heard.group) {
                    Some(member) => Some(member.upgrade()?),
                    // This rank has not made it.
                    None => (early_links.has_link(heard.group, *rank)).then_some(None)?,
                };
                let missing = Missing {
                    rank: Rank(*rank),
                    doing: heard.in_words(),
                };
                Some((member, heard.tag, missing))
            };
            state.heard.iter().filter_map(of).collect()
        };
        let mut waits: Vec<Missing> = heard
            .into_iter()
            .filter(|(member, tag, _)| {
                (member.as_ref()).is_none_or(|member| member.has_yet_to_begin(*tag))
            })
            .map(|(_, _, missing)| missing)
            .collect();
        waits.sort_unstable_by_key(|missing| missing.rank);
        waits.truncate(DOING);
        waits
    }

    /// An error with ranks by their numbers among all also names those that [wait for this one](Self::who_waits): they may be at
    /// odds with it, or wait for what it waits for.
    pub(crate) fn add_who_waits(&self, mut error: CollectiveError) -> CollectiveError {
        if let CollectiveError::Deadline { doing, .. } = &mut error {
            for waiting in self.who_waits() {
                if doing.len() < DOING && doing.iter().all(|known| known.rank != waiting.rank) {
                    doing.push(waiting);
                }
            }
        }
        error
    }
}
