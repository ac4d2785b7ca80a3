//! The network between the head and its peers.

use crate::knobs::{MS, SECOND, Time};
use crate::link::{Mail, Peer, Side};
use crate::queue::Event;
use crate::world::World;

impl World {
    /// Nothing passes between the head and a peer to this side now.
    pub(crate) fn is_cut(&self, peer: Peer, to: Side) -> bool {
        match peer {
            Peer::Node(node, _) => self.nodes[node].cut[to as usize],
            Peer::Driver(_) => false,
        }
    }

    /// How long a message is on its way.
    pub(crate) fn delay(&mut self) -> Time {
        if self.has_fault() {
            // Most of them are made up for before anybody counts as lost.
            let most = self.random.pick(&[1, 1, 1, 1, 4]);
            self.random.below(self.knobs.lease * most / 2)
        } else {
            MS / 5 + self.random.below(10 * MS)
        }
    }

    /// How long something takes inside a host.
    pub(crate) fn moment(&mut self) -> Time {
        if self.has_mishap() {
            self.random.below(2 * SECOND)
        } else {
            self.random.below(3 * MS)
        }
    }

    /// Sends a message over a connection.
    pub(crate) fn send(&mut self, session: u64, to: Side, mail: Mail) {
        let is_close = matches!(mail, Mail::Close(_));
        let Some(link) = self.links.get(&session) else {
            return;
        };
        if !link.is_open[to.other() as usize] && !is_close {
            return;
        }
        let cut = self.is_cut(link.peer, to);
        let at = self.now + self.delay();
        let Some(link) = self.links.get_mut(&session) else {
            return;
        };
        let at = link.in_order(to, &mail, at);
        if cut {
            link.held[to as usize].push(mail);
        } else {
            self.queue.push(at, Event::Arrive(session, to, mail));
        }
    }

    /// What waited for the network goes on.
    pub(crate) fn reconnect(&mut self, node: usize) {
        let of_node: Vec<u64> = (self.links.iter())
            .filter(|(_, link)| matches!(link.peer, Peer::Node(other, _) if other == node))
            .map(|(session, _)| *session)
            .collect();
        for session in of_node {
            for to in [Side::Head, Side::Peer] {
                let held = match self.links.get_mut(&session) {
                    Some(link) => std::mem::take(&mut link.held[to as usize]),
                    None => continue,
                };
                for mail in held {
                    let at = self.now + self.delay();
                    let at = match self.links.get_mut(&session) {
                        Some(link) => link.in_order(to, &mail, at),
                        None => at,
                    };
                    self.queue.push(at, Event::Arrive(session, to, mail));
                }
            }
        }
    }

    /// A message is there.
    pub(crate) fn arrive(&mut self, session: u64, to: Side, mail: Mail) {
        let Some(peer) = self.links.get(&session).map(|link| link.peer) else {
            return;
        };
        let cut = self.is_cut(peer, to);
        let Some(link) = self.links.get_mut(&session) else {
            return;
        };
        if !link.is_open[to as usize] {
            return;
        }
        if cut {
            link.held[to as usize].push(mail);
            return;
        }
        link.heard[to as usize] = self.now;
        match (to, peer) {
            (Side::Head, _) => self.head_hears(session, mail),
            (Side::Peer, Peer::Node(node, _)) => self.node_hears(node, session, mail),
            (Side::Peer, Peer::Driver(driver)) => self.driver_hears(driver, session, mail),
        }
    }

    /// A side looks whether the other one is silent for too long.
    pub(crate) fn look_for_silence(&mut self, session: u64, side: Side) {
        let Some(link) = self.links.get(&session) else {
            return;
        };
        if !link.is_open[side as usize] {
            return;
        }
        let until = link.heard[side as usize] + self.knobs.lease;
        if until > self.now {
            self.queue.push(until, Event::Idle(session, side));
        } else {
            self.close(session, side, "it was silent for too long", true);
        }
    }

    /// One side ends a connection, and says so to the other one, if the network lets it.
    pub(crate) fn close(&mut self, session: u64, side: Side, reason: &str, say: bool) {
        let Some(link) = self.links.get_mut(&session) else {
            return;
        };
        if !std::mem::replace(&mut link.is_open[side as usize], false) {
            return;
        }
        let peer = link.peer;
        if say && link.is_open[side.other() as usize] {
            self.send(session, side.other(), Mail::Close(reason.to_owned()));
        }
        self.trace.note(self.now, || {
            format!("connection {session}: {side:?} ends it: {reason}")
        });
        match (side, peer) {
            (Side::Head, _) => {
                let gone = Event::HeadLost(self.head.life, session, reason.to_owned());
                self.queue.push(self.now, gone);
            }
            (Side::Peer, Peer::Node(node, life)) => self.node_lost_head(node, life, session),
            (Side::Peer, Peer::Driver(driver)) => self.driver_lost_head(driver, session),
        }
        if let Some(link) = self.links.get(&session)
            && link.is_open == [false; 2]
        {
            self.links.remove(&session);
        }
    }
}
