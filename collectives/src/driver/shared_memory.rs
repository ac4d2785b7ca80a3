//! Operations of ranks that share memory, and how they come to share it: see [`crate::shm`].
//!
//! The links are read meanwhile: on them come the notices of ranks that give up, and the end of those that die.

use std::task::Context;
use std::time::Instant;

use kolo_transport::ids::Rank;

use super::Driver;
use crate::error::CollectiveError;
use crate::header::{Header, Share};
use crate::shm::arena::Outcome;
use crate::shm::setup::Sharing;
use crate::times::WORD;

/// What a run does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// An operation by its schedule, over the links.
    Links,
    /// Agrees on whether memory is shared.
    Form,
    /// An operation in shared memory, which has begun there.
    Shared,
}

impl Driver<'_> {
    /// Agrees with all ranks on whether memory is shared. Returns whether that is settled.
    pub(super) fn advance_form(&mut self, cx: &mut Context<'_>) -> Result<bool, CollectiveError> {
        self.take_signals(cx)?;
        let asked = {
            let mut state = self.place.signals.lock();
            state.register(cx);
            state.one_host
        };
        if matches!(self.engine.shm, Sharing::Asked) {
            match asked {
                Some(true) => {
                    let is_over = self.place.signals.is_over();
                    self.engine.form(self.place.job, is_over);
                }
                Some(false) => self.engine.shm = Sharing::Off,
                None => {
                    return self.form_in_time().map(|()| false);
                }
            }
        }
        let complete = self.link_all()?;
        for peer in self.others() {
            if self.engine.links[peer as usize].is_up() {
                self.serve(peer, cx);
                self.write(peer, cx);
                self.read(peer, cx)?;
            }
        }
        let Some(forming) = self.engine.shm.forming() else {
            return Ok(true);
        };
        if forming.is_refused() {
            forming.refuse();
        } else if complete && forming.attach() {
            self.engine.say(Share::Settled);
        }
        if !self
            .engine
            .shm
            .forming()
            .is_some_and(|forming| forming.is_settled())
        {
            return self.form_in_time().map(|()| false);
        }
        if self.engine.shm.settle() {
            // What is in the links is read by the first operation.
            self.engine.flush_now();
        } else {
            self.refuse_for_ever();
        }
        Ok(true)
    }

    fn form_in_time(&mut self) -> Result<(), CollectiveError> {
        self.unsaid |= self.check_time(false)?;
        Ok(())
    }

    /// Those for which this rank waits before it shares memory.
    pub(super) fn not_attached(&self) -> Vec<Rank> {
        let links = &self.engine.links;
        // Without a link to a rank nobody attaches: it is late, and not all that wait for it.
        let unlinked: Vec<u32> = (self.others())
            .filter(|rank| !links[*rank as usize].is_up())
            .collect();
        let awaited = match &self.engine.shm {
            Sharing::Forming(forming) if unlinked.is_empty() => forming.missing(),
            _ => unlinked,
        };
        let me = self.engine.me;
        awaited
            .into_iter()
            .filter(|rank| *rank != me)
            .map(Rank)
            .collect()
    }

    /// There will be no shared memory, and this rank says so to whoever asks.
    fn refuse_for_ever(&mut self) {
        let frame = self.engine.say(Share::Refuse);
        self.engine.flush_now();
        self.place.signals.lock().notices.refusal = Some(frame);
    }

    /// The operation ends. What was done so far for sharing memory is where the next one goes on.
    pub(super) fn give_up_form(&mut self) {
        // The others wait for this rank, which may be the one that makes the links on which they hear of that. A lost one is
        // no news now.
        self.link_all().ok();
        if matches!(self.engine.shm, Sharing::Asked) {
            self.engine.shm = Sharing::Unknown;
        }
        let Some(forming) = self.engine.shm.forming() else {
            return;
        };
        if forming.is_refused() {
            forming.refuse();
            if !self.engine.shm.settle() {
                self.refuse_for_ever();
            }
        }
    }

    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let me = self.engine.me;
        (0..self.engine.world).filter(move |peer| *peer != me)
    }

    /// Starts making all links that are this rank's to make. Returns whether all are there.
    fn link_all(&mut self) -> Result<bool, CollectiveError> {
        let mut complete = true;
        for peer in self.others() {
            let link = &self.engine.links[peer as usize];
            if link.is_up() {
                continue;
            }
            complete = false;
            if link.is_over() {
                self.lack_link(peer)?;
                continue;
            }
            self.begin_link(peer);
        }
        Ok(complete)
    }

    /// Asks rank 0 for the memory, or passes it on.
    fn serve(&mut self, peer: u32, cx: &mut Context<'_>) {
        let (me, generation) = (self.engine.me, self.engine.generation);
        let Sharing::Forming(forming) = &mut self.engine.shm else {
            return;
        };
        let link = &mut self.engine.links[peer as usize];
        if forming.served[peer as usize] || (me != 0 && peer != 0) {
            return;
        }
        let header = |share| Header::Share { generation, share };
        if me != 0 {
            link.notify(&header(Share::Ask).encode());
            forming.served[peer as usize] = true;
        } else if let Some(descriptor) = forming.descriptor() {
            match link.poll_offer(cx, &header(Share::Offer).encode(), descriptor) {
                std::task::Poll::Pending => {}
                std::task::Poll::Ready(Ok(())) => forming.served[peer as usize] = true,
                std::task::Poll::Ready(Err(error)) => {
                    tracing::info!(peer, %error, "a link carries no shared memory");
                    forming.refuse();
                }
            }
        }
    }

    /// A peer says something about shared memory.
    pub(super) fn shared(&mut self, peer: u32, share: Share) {
        let link = &mut self.engine.links[peer as usize];
        let descriptor = (share == Share::Offer)
            .then(|| link.take_descriptor())
            .flatten();
        match &mut self.engine.shm {
            Sharing::Forming(forming) => match share {
                Share::Offer if peer == 0 => forming.offered(descriptor),
                Share::Refuse => forming.refuse(),
                Share::Ask | Share::Offer | Share::Attached | Share::Settled => {}
            },
            Sharing::Off if matches!(share, Share::Offer | Share::Ask) => {
                let generation = self.engine.generation;
                let header = Header::Share {
                    generation,
                    share: Share::Refuse,
                };
                link.notify(&header.encode());
            }
            _ => {}
        }
    }

    /// A peer does the operation over the links already: it shares no memory.
    pub(super) fn peer_shares_nothing(&mut self) {
        if let Sharing::Forming(forming) = &mut self.engine.shm {
            forming.refuse();
        }
    }

    /// An operation in shared memory, as far as it goes without waiting. `input` and `result` are what it began with.
    pub(super) fn advance_shared(&mut self, cx: &mut Context<'_>) -> Result<bool, CollectiveError> {
        let blocking = self.in_memory.blocking;
        if let Some(arena) = self.engine.shm.active() {
            // Pieces come one soon after the other: to sleep for each would take longer than to look for it.
            if arena.is_streaming() {
                arena.ignore();
                if arena.look(self.in_memory.input, self.in_memory.result)? != Outcome::Pending {
                    self.engine.is_hasty = false;
                    return Ok(true);
                }
            }
            arena.listen(blocking, cx);
        }
        // After that: a signal that comes now ends the sleep.
        self.take_signals(cx)?;
        // The second time round tells what a peer said before it went on.
        let mut observed = Ok(());
        for _ in 0..2 {
            if let Some(arena) = self.engine.shm.active() {
                arena.listen_to_links();
            }
            for peer in self.others() {
                if self.engine.links[peer as usize].is_up() {
                    self.write(peer, cx);
                    self.read(peer, cx)?;
                }
            }
            let Some(arena) = self.engine.shm.active() else {
                return Ok(true);
            };
            if arena.advance(self.in_memory.input, self.in_memory.result)? != Outcome::Pending {
                arena.ignore();
                self.engine.is_hasty = false;
                return Ok(true);
            }
            observed = arena.observe();
            if observed.is_ok() {
                break;
            }
        }
        if observed.is_ok() {
            self.in_memory.left_at = None;
        }
        if let Err(error) = observed {
            // Who leaves says why on its link. Flags are faster than that.
            let is_left = matches!(error, CollectiveError::PeerLeft { .. });
            let at = *self
                .in_memory
                .left_at
                .get_or_insert_with(|| Instant::now() + WORD);
            if !is_left || Instant::now() >= at {
                return Err(error);
            }
        }
        for peer in self.others() {
            if !self.engine.links[peer as usize].is_up() && self.needs(peer) {
                self.lack_link(peer)?;
            }
        }
        let Some(arena) = self.engine.shm.active() else {
            return Ok(true);
        };
        let outcome = arena.advance(self.in_memory.input, self.in_memory.result)?;
        if outcome != Outcome::Pending {
            arena.ignore();
            // All have come, as was just observed, and not with the same: some have no data.
            self.engine.is_hasty = outcome == Outcome::Elsewhere;
            return Ok(true);
        }
        let now = Instant::now();
        // A rank that has done its part may go.
        let through = (self.verdict.suspected()).filter(|rank| !self.needs(rank.0));
        let through: Vec<Rank> = through.collect();
        self.verdict.acquit(&through);
        self.verdict.judge_suspicions(now)?;
        if now >= self.limit.deadline {
            let late = self.engine.late_in_shared();
            return Err(self.verdict.late(now, late));
        }
        Ok(false)
    }
}
