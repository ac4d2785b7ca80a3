//! Recursive doubling: partners at distance 1, 2, 4, ... exchange all that they have, and both combine it.
//!
//! Both compute `lower op higher`: the same bits on every rank. For that the higher one combines into what it
//! received, so that its result moves between two places.

use super::halving::{Fold, Role};
use super::{Action, Schedule, Span, Team};

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
    let Role::Member { place, proxy } = fold.role(team.me) else {
        let (peer, span) = (team.me + 1, span(at));
        out.alone(Action::Send { peer, span });
        out.alone(Action::Receive { peer, span });
        return span;
    };
    let (mut own, mut other) = (span(at), span(scratch));
    if proxy {
        let peer = team.me - 1;
        out.alone(Action::ReceiveReduce { peer, span: own });
    }
    let mut distance = 1;
    while distance < fold.power {
        let peer = fold.member(place ^ distance);
        out.act(Action::Send { peer, span: own });
        out.act(Action::Receive { peer, span: other });
        if place & distance == 0 {
            out.act(Action::Combine {
                from: other,
                into: own,
            });
        } else {
            out.act(Action::Combine {
                from: own,
                into: other,
            });
            std::mem::swap(&mut own, &mut other);
        }
        out.end_step();
        distance *= 2;
    }
    if finish {
        out.local(Action::Finish { span: own });
    }
    if proxy {
        let peer = team.me - 1;
        out.alone(Action::Send { peer, span: own });
    }
    own
}
