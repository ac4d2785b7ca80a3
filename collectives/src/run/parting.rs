//! The end of an operation that was given up: what this rank says last of it leaves first.

use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use kolo_transport::ids::Rank;

use super::{Mode, Run};
use crate::cause::Cause;
use crate::engine::{LOOK, LastWords};
use crate::error::CollectiveError;
use crate::group::Saying;
use crate::header::Header;
use crate::operation::Operation;

/// What a rank says last of an operation has left it in this time, or a peer does not let it through.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// A link that is on its way when ranks disagree is there in this time, or its peer is.
const ON_THE_WAY: Duration = Duration::from_millis(200);

/// The end of an operation that was given up.
pub(super) struct Parting {
    error: CollectiveError,
    since: Instant,
    words: LastWords,
    /// What is being said in other groups.
    elsewhere: Vec<Saying>,
    /// No longer than this they are waited for.
    words_until: Instant,
    /// When to look again.
    next: Instant,
}

impl Parting {
    pub(super) fn new(error: CollectiveError, words: LastWords, elsewhere: Vec<Saying>) -> Self {
        let since = Instant::now();
        Self {
            error,
            since,
            words,
            elsewhere,
            words_until: since + LAST_WORDS,
            next: since,
        }
    }

    /// When to look again.
    pub(super) fn next(&self) -> Instant {
        self.next
    }
}

impl Run<'_> {
    /// Ends the operation that this rank gave up when what it said has left, for its program may end because of the failure. If
    /// ranks disagree, those hear of it, too, to whom a link is on its way: nobody else may tell them.
    pub(super) fn part(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Operation>, CollectiveError>> {
        let Some(mut parting) = self.parting.take() else {
            return Poll::Pending;
        };
        let now = Instant::now();
        let mut waits = false;
        if matches!(parting.error, CollectiveError::Mismatch { .. }) {
            let (arrivals, notices) = {
                let mut state = self.signals.lock();
                state.register(cx);
                (state.take_links(), state.notices())
            };
            for arrival in arrivals {
                let peer = arrival.rank;
                // One that failed has nobody to tell.
                if self.engine.arrive(arrival, &notices).is_ok() {
                    self.engine.more_last_words(&mut parting.words, peer);
                    parting.words_until = now + LAST_WORDS;
                }
            }
            let me = self.engine.me;
            let mut others = (0..self.engine.world).filter(|peer| *peer != me);
            if others.any(|peer| self.is_on_the_way(peer)) {
                parting.next = parting.since + ON_THE_WAY;
                waits = now < parting.next;
            }
        }
        // Other groups may have something to say in this one.
        let unsaid = std::mem::take(&mut self.signals.lock().unsaid);
        if !unsaid.is_empty() {
            self.engine.notify_all(&unsaid);
        }
        parting.elsewhere.retain_mut(|has_left| !has_left());
        let words_left = self.engine.have_left(&mut parting.words)
            || (parting.words).are_heard(|peer, culprit| self.has_left_too(peer, culprit, cx));
        let all_left = words_left && parting.elsewhere.is_empty();
        if !all_left && now < parting.words_until {
            parting.next = now + LOOK;
            waits = true;
        }
        if waits {
            self.parting = Some(parting);
            return Poll::Pending;
        }
        Poll::Ready(Err(parting.error))
    }

    /// Whether a peer has given the operation up itself, as far as can be read now, or is gone: it needs no word of this one. If this
    /// one leaves because of another rank the peer does because of the same, or it could not tell later why this one is gone. Two
    /// that had much on the way to each other would wait for each other to read.
    fn has_left_too(&mut self, peer: u32, culprit: Option<Rank>, cx: &mut Context<'_>) -> bool {
        if self.told_by == Some(peer) {
            return true;
        }
        if self.mode != Mode::Links {
            return false;
        }
        let (current, most) = (self.tag, self.most_ahead());
        let link = &mut self.engine.links[peer as usize];
        // What is wrong with it is found when it is wanted.
        if let Poll::Ready(Err(_)) = link.poll_next(cx) {
            return true;
        }
        let mut has_left = false;
        let ends_call = self.ends_call;
        // The next operation takes it in.
        link.poll_frames(cx, most, |header, text| {
            let is_here = match header {
                Header::AbortCall { call, .. } => call == current.call,
                // Of one operation, where this rank says something of all.
                Header::AbortOperation { .. } if ends_call => false,
                Header::AbortOperation { tag, .. } => tag >= current || tag.is_part_of(current),
                _ => false,
            };
            has_left |= is_here
                && text.and_then(Cause::parse).is_some_and(|cause| {
                    cause.ends_operation() && (culprit.is_none() || cause.absent() == culprit)
                });
        });
        has_left || link.has_ended()
    }

    /// Whether a link is being made that was needed, or will be by the peer whose it is to make.
    fn is_on_the_way(&self, peer: u32) -> bool {
        let link = &self.engine.links[peer as usize];
        link.connecting || !link.is_up() && !link.is_over() && self.needs(peer)
    }
}
