//! Recursive halving and doubling: reduce-scatter, and after it all-gather (Rabenseifner).
//!
//! In a world that is no power of two, each of the first ranks at an even place hands its values to the rank
//! after it, waits, and gets its part of the result from it; the others form a power of two.

use super::{Action, Counts, Schedule, Span, Team, start};

/// How the ranks of a team form a power of two.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fold {
    pub(super) power: u32,
    /// How many ranks are over.
    pub(super) over: u32,
}

/// What a rank does in a [`Fold`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Hands its values to the rank after it.
    Idle,
    /// Has this place; `proxy` for the rank before it too.
    Member { place: u32, proxy: bool },
}

impl Fold {
    pub(super) fn of(team: Team) -> Self {
        let power = 1 << team.size.ilog2();
        Self {
            power,
            over: team.size - power,
        }
    }

    pub(super) fn role(self, rank: u32) -> Role {
        let proxy = rank < 2 * self.over;
        if proxy && rank.is_multiple_of(2) {
            return Role::Idle;
        }
        let place = if proxy { rank / 2 } else { rank - self.over };
        Role::Member { place, proxy }
    }

    /// The rank at a place.
    pub(super) fn member(self, place: u32) -> u32 {
        if place < self.over {
            2 * place + 1
        } else {
            place + self.over
        }
    }

    /// The first rank whose values are at a place.
    fn first(self, place: u32) -> u32 {
        if place < self.over {
            2 * place
        } else {
            place + self.over
        }
    }
}

/// Pieces `low..low + width` of a power of two are this rank's to reduce, half as many after each step.
fn scatter(out: &mut Schedule, fold: Fold, place: u32, bounds: impl Fn(u32) -> usize) {
    let span = |low: u32, width: u32| Span::between(bounds(low), bounds(low + width));
    let (mut low, mut width) = (0, fold.power);
    while width > 1 {
        width /= 2;
        let (keep, give) = if place & width == 0 {
            (low, low + width)
        } else {
            (low + width, low)
        };
        let peer = fold.member(place ^ width);
        out.act(Action::Send {
            peer,
            span: span(give, width),
        });
        out.act(Action::ReceiveReduce {
            peer,
            span: span(keep, width),
        });
        out.end_step();
        low = keep;
    }
}

fn gather(out: &mut Schedule, fold: Fold, place: u32, bounds: impl Fn(u32) -> usize) {
    let span = |low: u32, width: u32| Span::between(bounds(low), bounds(low + width));
    let (mut low, mut width) = (place, 1);
    while width < fold.power {
        let peer = fold.member(place ^ width);
        let other = low ^ width;
        out.act(Action::Send {
            peer,
            span: span(low, width),
        });
        out.act(Action::Receive {
            peer,
            span: span(other, width),
        });
        out.end_step();
        low = low.min(other);
        width *= 2;
    }
}

/// Of the elements from `at` on.
pub(super) fn all_reduce(out: &mut Schedule, team: Team, at: usize, count: usize, finish: bool) {
    let all = Span::between(at, at + count);
    let fold = Fold::of(team);
    let Role::Member { place, proxy } = fold.role(team.me) else {
        let peer = team.me + 1;
        out.alone(Action::Send { peer, span: all });
        out.alone(Action::Receive { peer, span: all });
        return;
    };
    if proxy {
        let peer = team.me - 1;
        out.alone(Action::ReceiveReduce { peer, span: all });
    }
    let bounds = |index: u32| at + start(count, fold.power, index);
    scatter(out, fold, place, bounds);
    if finish {
        let span = Span::between(bounds(place), bounds(place + 1));
        out.local(Action::Finish { span });
    }
    gather(out, fold, place, bounds);
    if proxy {
        let peer = team.me - 1;
        out.alone(Action::Send { peer, span: all });
    }
}

/// Rank k gets the elements that `counts` say are its own.
pub(super) fn reduce_scatter(out: &mut Schedule, team: Team, counts: impl Counts, finish: bool) {
    let total = counts.before(team.size);
    let fold = Fold::of(team);
    let all = Span::between(0, total);
    let Role::Member { place, proxy } = fold.role(team.me) else {
        let peer = team.me + 1;
        out.alone(Action::Send { peer, span: all });
        let span = counts.span(team.me);
        out.alone(Action::Receive { peer, span });
        return;
    };
    if proxy {
        let peer = team.me - 1;
        out.alone(Action::ReceiveReduce { peer, span: all });
    }
    let bounds = |index: u32| {
        if index == fold.power {
            total
        } else {
            counts.before(fold.first(index))
        }
    };
    scatter(out, fold, place, bounds);
    if finish {
        let span = Span::between(bounds(place), bounds(place + 1));
        out.local(Action::Finish { span });
    }
    if proxy {
        let peer = team.me - 1;
        let span = counts.span(peer);
        out.alone(Action::Send { peer, span });
    }
}
