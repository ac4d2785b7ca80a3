//! The word of all ranks that they ask for the same, for operations in which a rank could be done without it.
//!
//! By doubling distances, as a [barrier](crate::schedule::Algorithm::Dissemination), but beside the schedule and in frames
//! of a header alone. These are as many steps as a tree has, so they take hardly any time that the operation would not
//! take, unless a rank comes late; only a *linear* gather or scatter has fewer. A rank that does not agree says no word,
//! so nobody leaves an operation about which any two ranks disagree. Between two ranks only the receiver has to say it:
//! the values are the sender's word.
//!
//! And ranks without data: they send [joins](Operation::JOIN), and are answered with what is asked for in truth.

use crate::header::{Data, Header};
use crate::link::Link;
use crate::operation::{Operation, OperationKind};

/// How far the ranks agree.
#[derive(Debug)]
pub(super) struct Agreement {
    me: u32,
    world: u32,
    round: u32,
    /// How many rounds there are.
    rounds: u32,
    /// The word of this round is given.
    given: bool,
    /// Rounds in which a word came.
    heard: u64,
    /// Rounds in which this rank has given its own word.
    said: u64,
    /// For a rank without data: what the others ask for.
    pub(super) learned: Option<Operation>,
}

impl Agreement {
    /// What an operation needs of it.
    pub(super) fn on(request: &Operation, me: u32, world: u32) -> Self {
        let mut agreement = Self {
            me,
            world,
            round: 0,
            rounds: world.next_power_of_two().ilog2(),
            given: false,
            heard: 0,
            said: 0,
            learned: None,
        };
        if !request.wants_consent() {
            agreement.settle();
        } else if request.kind == OperationKind::SendReceive {
            debug_assert_eq!(world, 2);
            // The sender waits for the word of the receiver.
            agreement.given = request.root == Some(me);
            agreement.heard = u64::from(!agreement.given);
        }
        agreement
    }

    /// As of a sender, which waits until the receiver gives its word.
    pub(super) fn await_receiver(&mut self) {
        (self.round, self.given, self.heard) = (0, true, 0);
    }

    /// Nothing is to be agreed on.
    pub(super) fn settle(&mut self) {
        self.round = self.rounds;
    }

    pub(super) fn is_complete(&self) -> bool {
        self.round >= self.rounds
    }

    /// Whether the word of this round has come and the next one can be given.
    pub(super) fn can_go_on(&self) -> bool {
        !self.is_complete() && self.given && self.has_heard(self.round)
    }

    fn has_heard(&self, round: u32) -> bool {
        self.heard & (1 << round) != 0
    }

    /// A word of this round came.
    pub(super) fn hear(&mut self, round: u32) {
        if round < u64::BITS {
            self.heard |= 1 << round;
        }
    }

    /// The ranks whose words are still to come.
    pub(super) fn awaited(&self) -> impl Iterator<Item = u32> {
        (self.round..self.rounds)
            .filter(move |round| !self.has_heard(*round))
            .map(move |round| before(self.me, round, self.world))
    }

    /// The ranks to which this rank's word is still to go.
    pub(super) fn owed(&self) -> impl Iterator<Item = u32> {
        (self.round..self.rounds)
            .skip(usize::from(self.given))
            .map(move |round| after(self.me, round, self.world))
    }

    /// The ranks to which a link is wanted.
    pub(super) fn peers(&self) -> impl Iterator<Item = u32> {
        self.awaited().chain(self.owed())
    }

    /// Gives this rank's word, as far as those before have given theirs. `asks` is what this rank asks for.
    pub(super) fn give(&mut self, links: &mut [Link], asks: Data) {
        while !self.is_complete() {
            if !self.given {
                let link = &mut links[after(self.me, self.round, self.world) as usize];
                if !link.is_up() {
                    return;
                }
                link.notify(&word(asks, self.round));
                self.said |= 1 << self.round;
                self.given = true;
            }
            if !self.has_heard(self.round) {
                return;
            }
            self.round += 1;
            self.given = false;
        }
    }

    /// A link to a peer was made anew: what was said on the one before may not have come.
    pub(super) fn repeat(&self, peer: u32, link: &mut Link, asks: Data) {
        for round in 0..self.rounds {
            if self.said & (1 << round) != 0 && after(self.me, round, self.world) == peer {
                link.notify(&word(asks, round));
            }
        }
    }
}

/// The frame of a word.
fn word(asks: Data, step: u32) -> [u8; crate::header::HEADER] {
    Header::Consent(Data { step, ..asks }).encode()
}

fn after(me: u32, round: u32, world: u32) -> u32 {
    ((u64::from(me) + (1 << round)) % u64::from(world)) as u32
}

fn before(me: u32, round: u32, world: u32) -> u32 {
    ((u64::from(me) + u64::from(world) - (1 << round)) % u64::from(world)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every rank that gets through all rounds has heard of all others, whatever the world.
    #[test]
    fn words_come_from_everybody() {
        let request = Operation {
            root: Some(0),
            ..Operation::new(OperationKind::Broadcast, None, 0)
        };
        for world in 1..40_u32 {
            let mut ranks: Vec<_> = (0..world)
                .map(|me| Agreement::on(&request, me, world))
                .collect();
            let mut knows: Vec<u64> = (0..world).map(|rank| 1 << rank).collect();
            while !ranks.iter().all(Agreement::is_complete) {
                let said = knows.clone();
                for me in 0..world as usize {
                    let to = ranks[me].owed().next().unwrap() as usize;
                    assert_eq!(ranks[to].awaited().next(), Some(me as u32));
                    knows[to] |= said[me];
                }
                for rank in &mut ranks {
                    rank.given = true;
                    rank.hear(rank.round);
                    assert!(rank.can_go_on());
                    (rank.round, rank.given) = (rank.round + 1, false);
                }
            }
            assert!(knows.iter().all(|known| known.count_ones() == world));
        }
    }
}
