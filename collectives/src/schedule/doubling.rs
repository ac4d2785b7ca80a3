//! Recursive doubling: partners at distance 1, 2, 4, ... exchange all that they have, and both combine it.
//!
//! Both compute `lower op higher`: the same bits on every rank. For that the higher one combines into what it
//! received, so that its result moves between two places.

use super::halving::Fold;
use super::{Schedule, Span, Team};

/// Of the elements from `at` on, with as many from `scratch` on to work with. Returns where the result is.
pub(super) fn all_reduce(
    out: &mut Schedule,
    team: Team,
    at: usize,
    scratch: usize,
    count: usize,
    finish: bool,
) -> Span {
    let span = |start: usize| Span { start, len: count };
    let fold = Fold::of(team);
    let (mut own, mut other) = (span(at), span(scratch));
    if let Some(place) = fold.fold(out, team, own) {
        let mut distance = 1;
        while distance < fold.power {
            let peer = fold.member(place ^ distance);
            out.send_to(peer, own);
            out.receive_from(peer, other);
            if place & distance == 0 {
                out.combine(other, own);
            } else {
                out.combine(own, other);
                std::mem::swap(&mut own, &mut other);
            }
            out.end_step();
            distance *= 2;
        }
        out.finish(finish, own);
    }
    fold.unfold(out, team, |_| own);
    own
}
