//! Along a ring: every rank sends to the next and receives from the one before, all the time.

use super::{Action, Schedule, Span, Team};

/// Reduce-scatter: piece k, from `bounds(k)` to `bounds(k + 1)`, is summed along k+1, k+2, ... and is whole at rank k,
/// which alone computes its last term.
pub(super) fn reduce_scatter(out: &mut Schedule, team: Team, bounds: impl Fn(u32) -> usize) {
    for round in 1..team.size {
        reduce_round(out, team, round, &bounds);
        out.end_step();
    }
}

fn reduce_round(out: &mut Schedule, team: Team, round: u32, bounds: impl Fn(u32) -> usize) {
    let next = (round + 1) % team.size;
    out.send_to(team.after(1), piece(team, round, &bounds));
    out.reduce_from(team.before(1), piece(team, next, &bounds));
}

/// All-gather: every rank begins with its own piece, and passes on what it got last.
pub(super) fn all_gather(out: &mut Schedule, team: Team, bounds: impl Fn(u32) -> usize) {
    for round in 0..team.size - 1 {
        gather_round(out, team, round, &bounds);
        out.end_step();
    }
}

fn gather_round(out: &mut Schedule, team: Team, round: u32, bounds: impl Fn(u32) -> usize) {
    out.send_to(team.after(1), piece(team, round, &bounds));
    out.receive_from(team.before(1), piece(team, round + 1, &bounds));
}

/// The piece of the rank so far before this one.
fn piece(team: Team, distance: u32, bounds: impl Fn(u32) -> usize) -> Span {
    let index = team.before(distance);
    Span::between(bounds(index), bounds(index + 1))
}

/// Reduce-scatter around the ring, then all-gather around the ring, of the elements from `at` on. Of more than `each` elements
/// one segment after the other: while one is gathered, the next one is reduced. So what a rank works on stays in its caches.
pub(super) fn all_reduce(
    out: &mut Schedule,
    team: Team,
    at: usize,
    count: usize,
    each: usize,
    finish: bool,
) {
    let each = each.max(1);
    let segments = count.div_ceil(each).max(1);
    let bounds = |segment: usize| {
        let start = segment * each;
        let len = each.min(count - start);
        move |index: u32| at + start + super::start(len, team.size, index)
    };
    let rounds = team.size - 1;
    for segment in 0..=segments {
        for round in 0..rounds {
            if let Some(before) = segment.checked_sub(1) {
                gather_round(out, team, round, bounds(before));
            }
            if segment < segments {
                reduce_round(out, team, round + 1, bounds(segment));
                if finish && round + 1 == rounds {
                    let span = piece(team, 0, bounds(segment));
                    out.act(Action::Finish { span });
                }
            }
            out.end_step();
        }
    }
}
