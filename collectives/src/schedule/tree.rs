//! Along binomial trees, and the dissemination barrier.
//!
//! Places count from the root. A place has a parent, the place without its lowest bit, and children, the places that
//! have one more, lower bit; below the child with bit b are the places from it on to before `place + 2 b`.

use super::{Action, Counts, Output, Schedule, Span, Team, start};

/// The bits of the children of a place, the lowest first; the parent's bit is the next.
fn bits(team: Team, place: u32) -> impl DoubleEndedIterator<Item = u32> + Clone {
    let limit = if place == 0 {
        u32::BITS - (team.size - 1).leading_zeros()
    } else {
        place.trailing_zeros()
    };
    (0..limit)
        .map(|bit| 1 << bit)
        .filter(move |bit| place + bit < team.size)
}

/// The values from `at` on, from the root to all. The farthest child, which has the most below it, comes first.
pub(super) fn broadcast(out: &mut Schedule, team: Team, root: u32, span: Span) {
    let place = team.place(root);
    if place > 0 {
        let peer = team.member(root, place & (place - 1));
        out.alone(Action::Receive { peer, span });
    }
    for bit in bits(team, place).rev() {
        let peer = team.member(root, place + bit);
        out.alone(Action::Send { peer, span });
    }
}

/// The combination of the values from `at` on, from all to the root. The nearest child comes first.
pub(super) fn reduce(out: &mut Schedule, team: Team, root: u32, span: Span) {
    let place = team.place(root);
    for bit in bits(team, place) {
        let peer = team.member(root, place + bit);
        out.alone(Action::ReceiveReduce { peer, span });
    }
    if place > 0 {
        let peer = team.member(root, place & (place - 1));
        out.alone(Action::Send { peer, span });
    }
}

/// Where the places below `place` end, itself included.
fn end_of(team: Team, place: u32) -> u32 {
    if place == 0 {
        team.size
    } else {
        team.size.min(place + (1 << place.trailing_zeros()))
    }
}

/// Piece k of a buffer goes from the root to the rank at place k.
pub(super) fn scatter_pieces(out: &mut Schedule, team: Team, root: u32, count: usize) {
    let place = team.place(root);
    let span = |from: u32, to: u32| {
        Span::between(start(count, team.size, from), start(count, team.size, to))
    };
    if place > 0 {
        let peer = team.member(root, place & (place - 1));
        let span = span(place, end_of(team, place));
        out.alone(Action::Receive { peer, span });
    }
    for bit in bits(team, place).rev() {
        let child = place + bit;
        out.alone(Action::Send {
            peer: team.member(root, child),
            span: span(child, end_of(team, child)),
        });
    }
}

/// Piece k of a buffer goes to the root from the rank at place k.
pub(super) fn gather_pieces(out: &mut Schedule, team: Team, root: u32, count: usize) {
    let place = team.place(root);
    let span = |from: u32, to: u32| {
        Span::between(start(count, team.size, from), start(count, team.size, to))
    };
    for bit in bits(team, place) {
        let child = place + bit;
        out.act(Action::Receive {
            peer: team.member(root, child),
            span: span(child, end_of(team, child)),
        });
    }
    out.end_step();
    if place > 0 {
        let peer = team.member(root, place & (place - 1));
        let span = span(place, end_of(team, place));
        out.alone(Action::Send { peer, span });
    }
}

/// Shares of ranks, as they lie on one rank: in rank order on the root, in the order of places below it elsewhere.
struct Shares<C> {
    team: Team,
    root: u32,
    counts: C,
}

impl<C: Counts> Shares<C> {
    /// Elements of the places before this one.
    fn before(&self, place: u32) -> usize {
        let total = self.counts.before(self.team.size);
        if place == self.team.size {
            return total;
        }
        let rank = self.team.member(self.root, place);
        let turned = if rank < self.root { total } else { 0 };
        self.counts.before(rank) + turned - self.counts.before(self.root)
    }

    /// The stretches of these places on this rank: two if rank 0 is among them and not the first, because the root has
    /// it at the start.
    fn spans(&self, from: u32, to: u32) -> impl Iterator<Item = Span> {
        let turn = self.team.size - self.root;
        let middle = if from < turn && turn < to { turn } else { to };
        let me = self.team.place(self.root);
        let span = |from: u32, to: u32| Span {
            start: if me == 0 {
                self.counts.before(self.team.member(self.root, from))
            } else {
                self.before(from) - self.before(me)
            },
            len: self.before(to) - self.before(from),
        };
        let second = (middle < to).then(|| span(middle, to));
        std::iter::once(span(from, middle)).chain(second)
    }
}

/// Every rank's share goes to the root.
pub(super) fn gather(out: &mut Schedule, team: Team, root: u32, counts: impl Counts) {
    let shares = Shares { team, root, counts };
    let place = team.place(root);
    let own = counts.of(team.me);
    if place == 0 {
        out.buffer = counts.before(team.size);
        out.input = Some(counts.span(root));
        let all = Span::between(0, out.buffer);
        out.outputs.push(Output { from: all, to: 0 });
    } else {
        out.buffer = shares.before(end_of(team, place)) - shares.before(place);
        out.input = Some(Span::between(0, own));
    }
    for bit in bits(team, place) {
        let child = place + bit;
        let peer = team.member(root, child);
        for span in shares.spans(child, end_of(team, child)) {
            out.act(Action::Receive { peer, span });
        }
    }
    out.end_step();
    if place > 0 {
        let peer = team.member(root, place & (place - 1));
        for span in shares.spans(place, end_of(team, place)) {
            out.act(Action::Send { peer, span });
        }
        out.end_step();
    }
}

/// Every rank's share comes from the root.
pub(super) fn scatter(out: &mut Schedule, team: Team, root: u32, counts: impl Counts) {
    let shares = Shares { team, root, counts };
    let place = team.place(root);
    let own = counts.of(team.me);
    if place == 0 {
        out.buffer = counts.before(team.size);
        out.input = Some(Span::between(0, out.buffer));
        let from = counts.span(root);
        out.outputs.push(Output { from, to: 0 });
    } else {
        out.buffer = shares.before(end_of(team, place)) - shares.before(place);
        let from = Span::between(0, own);
        out.outputs.push(Output { from, to: 0 });
        let peer = team.member(root, place & (place - 1));
        for span in shares.spans(place, end_of(team, place)) {
            out.act(Action::Receive { peer, span });
        }
        out.end_step();
    }
    for bit in bits(team, place).rev() {
        let child = place + bit;
        let peer = team.member(root, child);
        for span in shares.spans(child, end_of(team, child)) {
            out.act(Action::Send { peer, span });
        }
        out.end_step();
    }
}

/// After step k every rank knows that the 2^(k+1) - 1 ranks before it have come.
pub(super) fn barrier(out: &mut Schedule, team: Team) {
    let span = Span::default();
    let mut distance = 1;
    while distance < team.size {
        out.act(Action::Send {
            peer: team.after(distance),
            span,
        });
        out.act(Action::Receive {
            peer: team.before(distance),
            span,
        });
        out.end_step();
        distance = distance.saturating_mul(2);
    }
}
