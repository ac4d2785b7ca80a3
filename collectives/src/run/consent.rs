//! The word of all ranks that they ask for the same, for operations in which a rank could be done without it.
//!
//! By doubling distances, as a [barrier](crate::schedule::Algorithm::Dissemination), but beside the schedule and in frames
//! of a header alone. These are as many steps as a tree has, so they take hardly any time that the operation would not
//! take, unless a rank comes late; only a *linear* gather or scatter has fewer. A rank that does not agree says no word,
//! so nobody leaves an operation about which any two ranks disagree. Between two ranks only the receiver has to say it:
//! the values are the sender's word.
//!
//! And ranks without data: they send [joins](Operation::JOIN), and are answered with what is asked for in truth.

use super::{Mode, Run};
use crate::engine::Engine;
use crate::header::{Data, Header};
use crate::operation::{Operation, OperationKind};

/// How far it is.
#[derive(Debug, Default)]
pub(super) struct Consent {
    round: u32,
    /// The word of this round is given.
    given: bool,
    /// Rounds in which a word came.
    heard: u64,
}

impl Consent {
    /// What an operation needs of it.
    pub(super) fn of(request: &Operation, me: u32, world: u32) -> Option<Self> {
        if world == 1 || !request.wants_consent() {
            return None;
        }
        let mut consent = Self::default();
        if request.kind == OperationKind::SendReceive {
            debug_assert_eq!(world, 2);
            if request.root == Some(me) {
                return Some(Self::of_receiver());
            }
            consent.hear(0);
        }
        Some(consent)
    }

    /// What a sender waits for.
    pub(super) fn of_receiver() -> Self {
        Self {
            given: true,
            ..Self::default()
        }
    }

    /// Whether the word of this round has come and the next one can be given.
    pub(super) fn can_go_on(&self) -> bool {
        self.given && self.has_heard(self.round)
    }

    fn has_heard(&self, round: u32) -> bool {
        self.heard & (1 << round) != 0
    }

    fn hear(&mut self, round: u32) {
        if round < u64::BITS {
            self.heard |= 1 << round;
        }
    }

    fn rounds(&self, world: u32) -> impl Iterator<Item = u32> + use<> {
        self.round..world.next_power_of_two().ilog2()
    }

    /// Those that this rank still waits for.
    pub(super) fn awaited(&self, me: u32, world: u32) -> impl Iterator<Item = u32> {
        self.rounds(world)
            .filter(|round| !self.has_heard(*round))
            .map(move |round| before(me, round, world))
    }

    /// Those that still wait for this rank.
    pub(super) fn owed(&self, me: u32, world: u32) -> impl Iterator<Item = u32> + use<> {
        self.rounds(world)
            .skip(usize::from(self.given))
            .map(move |round| after(me, round, world))
    }

    /// Those to which a link is wanted.
    pub(super) fn peers(&self, me: u32, world: u32) -> impl Iterator<Item = u32> {
        self.awaited(me, world).chain(self.owed(me, world))
    }
}

fn after(me: u32, round: u32, world: u32) -> u32 {
    ((u64::from(me) + (1 << round)) % u64::from(world)) as u32
}

fn before(me: u32, round: u32, world: u32) -> u32 {
    ((u64::from(me) + u64::from(world) - (1 << round)) % u64::from(world)) as u32
}

impl Run<'_> {
    pub(super) fn awaits_consent(&self, peer: u32) -> bool {
        let (me, world) = (self.engine.me, self.engine.world);
        self.consent
            .as_ref()
            .is_some_and(|consent| consent.awaited(me, world).any(|other| other == peer))
    }

    pub(super) fn owes_consent(&self, peer: u32) -> bool {
        let (me, world) = (self.engine.me, self.engine.world);
        self.consent
            .as_ref()
            .is_some_and(|consent| consent.owed(me, world).any(|other| other == peer))
    }

    /// A word came.
    pub(super) fn hear_consent(&mut self, round: u32) {
        if let Some(consent) = &mut self.consent {
            consent.hear(round);
        }
    }

    /// Gives this rank's word, as far as those before have given theirs.
    pub(super) fn give_consent(&mut self) {
        let data = self.as_data(0);
        let header = |step| Header::Consent(Data { step, ..data });
        let Some(consent) = &mut self.consent else {
            return;
        };
        let Engine {
            links, me, world, ..
        } = &mut *self.engine;
        let rounds = world.next_power_of_two().ilog2();
        while consent.round < rounds {
            if !consent.given {
                let link = &mut links[after(*me, consent.round, *world) as usize];
                if !link.is_up() {
                    return;
                }
                link.notify(&header(consent.round).encode());
                self.words |= 1 << consent.round;
                consent.given = true;
            }
            if !consent.has_heard(consent.round) {
                return;
            }
            consent.round += 1;
            consent.given = false;
        }
        self.consent = None;
    }

    /// A link was made anew: what was said on the one before may not have come.
    pub(super) fn repeat_words(&mut self, peer: u32) {
        let data = self.as_data(0);
        let Engine {
            links, me, world, ..
        } = &mut *self.engine;
        for round in 0..world.next_power_of_two().ilog2() {
            if self.words & (1 << round) != 0 && after(*me, round, *world) == peer {
                let word = Header::Consent(Data {
                    step: round,
                    ..data
                });
                links[peer as usize].notify(&word.encode());
            }
        }
    }

    /// What this rank asks for, in a frame without elements.
    fn as_data(&self, step: u32) -> Data {
        Data {
            generation: self.engine.generation,
            tag: self.tag,
            operation: self.request,
            step,
            offset: 0,
            length: 0,
        }
    }

    /// The frame that says what this rank asks for.
    pub(super) fn ask_frame(&self) -> [u8; crate::header::HEADER] {
        Header::Ask(self.as_data(0)).encode()
    }

    /// A peer has no data: it is told what is asked for.
    pub(super) fn peer_has_joined(&mut self, peer: u32) {
        let frame = self.ask_frame();
        let link = &mut self.engine.links[peer as usize];
        link.joined_in = Some(self.tag);
        if !self.request.is_join() {
            link.notify(&frame);
        }
    }

    /// Peers told that they have no data while this rank had none either, and knew nothing to tell them.
    pub(super) fn answer_joined(&mut self) {
        if self.request.is_join() {
            return;
        }
        let frame = self.ask_frame();
        for link in &mut self.engine.links {
            if link.joined_in == Some(self.tag) {
                link.notify(&frame);
            }
        }
    }

    /// Whether a frame with what others ask for is news for a rank without data.
    pub(super) fn learns(&mut self, asked: Operation) -> bool {
        // In shared memory all see by themselves who asks for what.
        let over_links = self.mode == Mode::Links;
        if !over_links || !self.request.is_join() || asked.is_join() {
            return false;
        }
        self.learned = Some(asked);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every rank that gets through all rounds has heard of all others, whatever the world.
    #[test]
    fn words_come_from_everybody() {
        for world in 1..40_u32 {
            let rounds = world.next_power_of_two().ilog2();
            let mut knows: Vec<u64> = (0..world).map(|rank| 1 << rank).collect();
            for round in 0..rounds {
                knows = (0..world)
                    .map(|me| {
                        let from = before(me, round, world);
                        assert_eq!(after(from, round, world), me);
                        knows[me as usize] | knows[from as usize]
                    })
                    .collect();
            }
            assert!(knows.iter().all(|known| known.count_ones() == world));
        }
    }
}
