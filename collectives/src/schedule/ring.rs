//! Along a ring: every rank sends to the next and receives from the one before, all the time.

use super::{Action, Schedule, Span, Team};

/// Reduce-scatter: piece k, from `bounds(k)` to `bounds(k + 1)`, is summed along k+1, k+2, ... and is whole at rank k,
/// which alone computes its last term.
pub(super) fn reduce_scatter(out: &mut Schedule, team: Team, bounds: impl Fn(u32) -> usize) {
    let piece = |distance: u32| {
        let index = team.before(distance);
        Span::between(bounds(index), bounds(index + 1))
    };
    for step in 1..team.size {
        out.act(Action::Send {
            peer: team.after(1),
            span: piece(step),
        });
        out.act(Action::ReceiveReduce {
            peer: team.before(1),
            span: piece((step + 1) % team.size),
        });
        out.end_step();
    }
}

/// All-gather: every rank begins with its own piece, and passes on what it got last.
pub(super) fn all_gather(out: &mut Schedule, team: Team, bounds: impl Fn(u32) -> usize) {
    let piece = |distance: u32| {
        let index = team.before(distance);
        Span::between(bounds(index), bounds(index + 1))
    };
    for step in 0..team.size - 1 {
        out.act(Action::Send {
            peer: team.after(1),
            span: piece(step),
        });
        out.act(Action::Receive {
            peer: team.before(1),
            span: piece(step + 1),
        });
        out.end_step();
    }
}

/// Reduce-scatter around the ring, then all-gather around the ring, of the elements from `at` on.
pub(super) fn all_reduce(out: &mut Schedule, team: Team, at: usize, count: usize, finish: bool) {
    let bounds = |index: u32| at + super::start(count, team.size, index);
    reduce_scatter(out, team, bounds);
    if finish {
        let span = Span::between(bounds(team.me), bounds(team.me + 1));
        out.local(Action::Finish { span });
    }
    all_gather(out, team, bounds);
}
