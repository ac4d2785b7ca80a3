//! Along binomial trees, and the dissemination barrier.
//!
//! Places count from the root. A place has a parent, the place without its lowest bit, and children, the places that
//! have one more, lower bit; below the child with bit b are the places from it on to before `place + 2 b`.

use super::{Counts, Output, Schedule, Span, Team, start};

/// The bits of the children of a place, the lowest first; the parent's bit is the next.
fn bits(team: Team, place: u32) -> impl Iterator<Item = u32> + Clone {
    let limit = if place == 0 {
        u32::BITS - (team.size - 1).leading_zeros()
    } else {
        place.trailing_zeros()
    };
    (0..limit)
        .map(|bit| 1 << bit)
        .filter(move |bit| place + bit < team.size)
}

/// The rank above a place; `None` for the root.
fn parent(team: Team, root: u32, place: u32) -> Option<u32> {
    (place > 0).then(|| team.member(root, place & (place - 1)))
}

/// Where the places below `place` end, itself included.
fn end_of(team: Team, place: u32) -> u32 {
    if place == 0 {
        team.size
    } else {
        team.size.min(place + (1 << place.trailing_zeros()))
    }
}

/// The combination of the values of a span, from all to the root. The nearest child comes first.
pub(super) fn reduce(out: &mut Schedule, team: Team, root: u32, span: Span) {
    let place = team.place(root);
    for bit in bits(team, place) {
        out.reduce_from(team.member(root, place + bit), span);
        out.end_step();
    }
    if let Some(peer) = parent(team, root, place) {
        out.send_to(peer, span);
        out.end_step();
    }
}

/// The values of a span, from the root to all. The farthest child, which has the most below it, comes first.
pub(super) fn broadcast(out: &mut Schedule, team: Team, root: u32, span: Span) {
    let first = out.len();
    reduce(out, team, root, span);
    out.only_back(first);
}

/// What the places from one to another have, as it lies on a rank, goes along the tree to the root.
fn collect<S: Iterator<Item = Span>>(
    out: &mut Schedule,
    team: Team,
    root: u32,
    spans: impl Fn(u32, u32) -> S,
) {
    let place = team.place(root);
    for child in bits(team, place).map(|bit| place + bit) {
        for span in spans(child, end_of(team, child)) {
            out.receive_from(team.member(root, child), span);
        }
    }
    out.end_step();
    if let Some(peer) = parent(team, root, place) {
        for span in spans(place, end_of(team, place)) {
            out.send_to(peer, span);
        }
        out.end_step();
    }
}

/// Piece k of a buffer goes to the root from the rank at place k.
pub(super) fn gather_pieces(out: &mut Schedule, team: Team, root: u32, count: usize) {
    let at = |place: u32| start(count, team.size, place);
    collect(out, team, root, |from, to| {
        std::iter::once(Span::between(at(from), at(to)))
    });
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
    fn spans(&self, from: u32, to: u32) -> impl Iterator<Item = Span> + use<C> {
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
    if place == 0 {
        let all = Span::between(0, counts.before(team.size));
        out.buffer = all.len;
        out.input = Some(counts.span(root));
        out.outputs.push(Output { from: all, to: 0 });
    } else {
        out.buffer = shares.before(end_of(team, place)) - shares.before(place);
        out.input = Some(Span::between(0, counts.of(team.me)));
    }
    collect(out, team, root, |from, to| shares.spans(from, to));
}

/// After step k every rank knows that the 2^(k+1) - 1 ranks before it have come.
pub(super) fn barrier(out: &mut Schedule, team: Team) {
    let mut distance = 1;
    while distance < team.size {
        out.send_to(team.after(distance), Span::default());
        out.receive_from(team.before(distance), Span::default());
        out.end_step();
        distance = distance.saturating_mul(2);
    }
}
