//! Along a ring: every rank sends to the next and receives from the one before, all the time.

use super::{Action, Counts, Group, Output, Schedule, Span, piece};

/// Reduce-scatter around the ring, then all-gather around the ring.
///
/// Piece k is summed along k, k+1, ... and is whole at rank k-1, which alone computes its last term.
pub(super) fn all_reduce(out: &mut Schedule, group: Group, count: usize, divide: bool) {
    out.whole(count);
    let (next, previous) = (group.after(1), group.before(1));
    let of = |distance: u32| piece(count, group.world, group.before(distance));
    for step in 0..group.world - 1 {
        out.act(Action::Send {
            peer: next,
            span: of(step),
        });
        out.act(Action::ReceiveReduce {
            peer: previous,
            span: of(step + 1),
        });
        out.end_step();
    }
    let mine = piece(count, group.world, group.after(1));
    if divide {
        out.ends.pop();
        out.act(Action::Divide { span: mine });
        out.end_step();
    }
    for step in 0..group.world - 1 {
        let send = if step == 0 { mine } else { of(step - 1) };
        out.act(Action::Send {
            peer: next,
            span: send,
        });
        out.act(Action::Receive {
            peer: previous,
            span: of(step),
        });
        out.end_step();
    }
}

/// Every rank passes on what it got last.
pub(super) fn all_gather(out: &mut Schedule, group: Group, counts: impl Counts) {
    let span = |rank: u32| {
        let start = counts.before(rank);
        Span {
            start,
            len: counts.of(rank),
        }
    };
    let all = Span::between(0, counts.before(group.world));
    out.buffer = all.len;
    out.input = Some(span(group.rank));
    out.outputs.push(Output { from: all, to: 0 });
    for step in 0..group.world - 1 {
        out.act(Action::Send {
            peer: group.after(1),
            span: span(group.before(step)),
        });
        out.act(Action::Receive {
            peer: group.before(1),
            span: span(group.before(step + 1)),
        });
        out.end_step();
    }
}
