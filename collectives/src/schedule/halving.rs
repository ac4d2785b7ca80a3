//! Recursive halving and doubling: reduce-scatter, and after it all-gather (Rabenseifner).
//!
//! In a world that is no power of two, each of the first ranks at an even place hands its values to the rank
//! after it, waits, and gets its part of the result from it; the others form a power of two.

use super::{Counts, Schedule, Span, Team, start};

/// How the ranks of a team form a power of two.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fold {
    pub(super) power: u32,
    /// How many ranks are over.
    over: u32,
}

impl Fold {
    pub(super) fn of(team: Team) -> Self {
        let power = 1 << team.size.ilog2();
        Self {
            power,
            over: team.size - power,
        }
    }

    /// Brings the values of ranks that are over to the ranks after them. Returns the place of this rank; `None` if it is over.
    pub(super) fn fold(self, out: &mut Schedule, team: Team, all: Span) -> Option<u32> {
        let is_folded = team.me < 2 * self.over;
        if is_folded && team.me.is_multiple_of(2) {
            out.send_to(team.me + 1, all);
            out.end_step();
            return None;
        }
        if is_folded {
            out.reduce_from(team.me - 1, all);
            out.end_step();
            return Some(team.me / 2);
        }
        Some(team.me - self.over)
    }

    /// Hands the results to the ranks that are over; `of` says which part a rank has.
    pub(super) fn unfold(self, out: &mut Schedule, team: Team, of: impl Fn(u32) -> Span) {
        if team.me >= 2 * self.over {
            return;
        }
        if team.me.is_multiple_of(2) {
            out.receive_from(team.me + 1, of(team.me));
        } else {
            out.send_to(team.me - 1, of(team.me - 1));
        }
        out.end_step();
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
        out.send_to(peer, span(give, width));
        out.reduce_from(peer, span(keep, width));
        out.end_step();
        low = keep;
    }
}

/// Of the elements from `at` on.
pub(super) fn all_reduce(out: &mut Schedule, team: Team, at: usize, count: usize, finish: bool) {
    let all = Span::between(at, at + count);
    let fold = Fold::of(team);
    if let Some(place) = fold.fold(out, team, all) {
        let bounds = |index: u32| at + start(count, fold.power, index);
        let first = out.len();
        scatter(out, fold, place, bounds);
        out.finish(finish, Span::between(bounds(place), bounds(place + 1)));
        out.and_back(first);
    }
    fold.unfold(out, team, |_| all);
}

/// Rank k gets the elements that `counts` say are its own.
pub(super) fn reduce_scatter(out: &mut Schedule, team: Team, counts: impl Counts, finish: bool) {
    let total = counts.before(team.size);
    let fold = Fold::of(team);
    if let Some(place) = fold.fold(out, team, Span::between(0, total)) {
        let bounds = |index: u32| {
            if index == fold.power {
                total
            } else {
                counts.before(fold.first(index))
            }
        };
        scatter(out, fold, place, bounds);
        out.finish(finish, Span::between(bounds(place), bounds(place + 1)));
    }
    fold.unfold(out, team, |rank| counts.span(rank));
}
