//! Two levels: inside the hosts, across them, inside again. Any number of ranks on any host.
//!
//! The values are cut into as many pieces as the host with the fewest ranks has ranks. Piece j belongs to the j-th rank
//! of every host: it collects its host's sum of the piece, combines it with the j-th ranks of the other hosts, and hands
//! it to the ranks of its host. So every host's share of the network is used by as many ranks as can be, and each byte
//! crosses it as often as in a ring of hosts. On a host with more ranks, the others take part inside only.

use super::layout::Layout;
use super::{
    Action, Algorithm, Counts, Output, Schedule, Span, Team, doubling, halving, ring, start, tree,
};

/// A rank and its host.
struct Home<'a> {
    layout: &'a Layout,
    host: u32,
    local: u32,
    mates: &'a [u32],
    pieces: u32,
}

impl<'a> Home<'a> {
    fn of(layout: &'a Layout, rank: u32) -> Self {
        let host = layout.host_of(rank);
        Self {
            layout,
            host,
            local: layout.local_of(rank),
            mates: layout.ranks_on(host),
            pieces: layout.shape().least,
        }
    }

    fn across(&self) -> Team {
        Team {
            me: self.host,
            size: self.layout.hosts(),
        }
    }

    /// Whether this rank takes part across hosts.
    fn has_piece(&self) -> bool {
        self.local < self.pieces
    }

    /// The places of the others on this host, beginning after this rank.
    fn others(&self) -> impl Iterator<Item = u32> + Clone {
        let (local, size) = (self.local, self.mates.len() as u32);
        (1..size).map(move |distance| (local + distance) % size)
    }

    /// Makes actions that name hosts name the ranks there that have this rank's place.
    fn name_ranks(&self, out: &mut Schedule, first: usize) {
        out.rename(first, |host| {
            self.layout.ranks_on(host)[self.local as usize]
        });
    }
}

/// All-reduce; `across` is one of the two-level algorithms.
pub(super) fn all_reduce(
    out: &mut Schedule,
    rank: u32,
    layout: &Layout,
    across: Algorithm,
    count: usize,
    finish: bool,
) {
    let home = Home::of(layout, rank);
    let piece = |index: u32| {
        Span::between(
            start(count, home.pieces, index),
            start(count, home.pieces, index + 1),
        )
    };
    let mine = if home.has_piece() {
        piece(home.local)
    } else {
        Span::default()
    };
    out.whole(count);
    let alone = home.mates.len() == 1;
    // Inside: what the others have of this rank's piece comes to a place each, and is combined in order of places.
    for other in home.others() {
        if other < home.pieces {
            out.send_to(home.mates[other as usize], piece(other));
        }
    }
    if home.has_piece() {
        let from_others = (0..home.mates.len())
            .filter(|other| *other != home.local as usize)
            .enumerate()
            .map(|(slot, other)| {
                let span = Span {
                    start: count + slot * mine.len,
                    len: mine.len,
                };
                (home.mates[other], span)
            });
        out.buffer += (home.mates.len() - 1) * mine.len;
        for (peer, span) in from_others.clone() {
            out.receive_from(peer, span);
        }
        for (_, from) in from_others {
            out.combine(from, mine);
        }
    }
    out.end_step();
    if home.has_piece() {
        let team = home.across();
        let first = out.actions.len();
        if team.size == 1 {
            out.finish(finish, mine);
        } else {
            match across {
                Algorithm::TwoLevelDoubling => {
                    let scratch = out.buffer;
                    out.buffer += mine.len;
                    let result =
                        doubling::all_reduce(out, team, mine.start, scratch, mine.len, finish);
                    if result != mine {
                        let (from, into) = (result, mine);
                        out.local(Action::Copy { from, into });
                    }
                }
                Algorithm::TwoLevelHalving => {
                    halving::all_reduce(out, team, mine.start, mine.len, finish);
                }
                _ => ring::all_reduce(out, team, mine.start, mine.len, mine.len.max(1), finish),
            }
            home.name_ranks(out, first);
        }
    }
    if alone {
        return;
    }
    for other in home.others() {
        let peer = home.mates[other as usize];
        if home.has_piece() {
            out.send_to(peer, mine);
        }
        if other < home.pieces {
            out.receive_from(peer, piece(other));
        }
    }
    out.end_step();
}

/// All-gather. The working buffer holds the shares host by host.
pub(super) fn all_gather(out: &mut Schedule, rank: u32, layout: &Layout, counts: impl Counts) {
    let home = Home::of(layout, rank);
    // One output for each share, host by host: they say where each share and each host's block lies.
    let mut end = 0;
    for host in 0..layout.hosts() {
        for &member in layout.ranks_on(host) {
            let from = Span {
                start: end,
                len: counts.of(member),
            };
            end = from.end();
            out.outputs.push(Output {
                from,
                to: counts.before(member),
            });
        }
    }
    out.buffer = end;
    let share_of =
        |out: &Schedule, local: u32| out.outputs[layout.before(home.host) + local as usize].from;
    let block_start = |out: &Schedule, host: u32| {
        out.outputs
            .get(layout.before(host))
            .map_or(end, |output| output.from.start)
    };
    let share = share_of(out, home.local);
    out.input = Some(share);
    for other in home.others() {
        let peer = home.mates[other as usize];
        out.send_to(peer, share);
        out.receive_from(peer, share_of(out, other));
    }
    out.end_step();
    // Each block is cut among the ranks that have a place on every host.
    let part = |out: &Schedule, host: u32, piece: u32| {
        let (from, to) = (block_start(out, host), block_start(out, host + 1));
        Span::between(
            from + start(to - from, home.pieces, piece),
            from + start(to - from, home.pieces, piece + 1),
        )
    };
    let team = home.across();
    if home.has_piece() {
        let first = out.actions.len();
        for step in 0..team.size - 1 {
            let sent = part(out, team.before(step), home.local);
            out.send_to(team.after(1), sent);
            let received = part(out, team.before(step + 1), home.local);
            out.receive_from(team.before(1), received);
            out.end_step();
        }
        home.name_ranks(out, first);
    }
    for host in (1..team.size).map(|distance| team.before(distance)) {
        for other in home.others() {
            let peer = home.mates[other as usize];
            if home.has_piece() {
                out.send_to(peer, part(out, host, home.local));
            }
            if other < home.pieces {
                out.receive_from(peer, part(out, host, other));
            }
        }
    }
    out.end_step();
}

/// Broadcast: a tree of hosts, then a tree in each.
pub(super) fn broadcast(out: &mut Schedule, rank: u32, layout: &Layout, root: u32, span: Span) {
    let home = Home::of(layout, rank);
    let root_host = layout.host_of(root);
    let leader = |host: u32| {
        if host == root_host {
            root
        } else {
            layout.ranks_on(host)[0]
        }
    };
    if leader(home.host) == rank {
        let first = out.actions.len();
        tree::broadcast(out, home.across(), root_host, span);
        out.rename(first, leader);
    }
    let inside = Team {
        me: home.local,
        size: home.mates.len() as u32,
    };
    let first = out.actions.len();
    tree::broadcast(out, inside, layout.local_of(leader(home.host)), span);
    out.rename(first, |place| home.mates[place as usize]);
}
