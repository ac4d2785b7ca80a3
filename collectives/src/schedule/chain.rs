//! Along a chain from or to the root, cut into segments that follow each other: while a rank receives one, it sends the
//! one before it.

use super::{Action, Schedule, Span, Team};

fn segment(count: usize, segment: usize, index: usize) -> Span {
    let start = index * segment;
    Span::between(start, count.min(start + segment))
}

fn segments(count: usize, segment: usize) -> usize {
    count.div_ceil(segment).max(1)
}

/// From the root on.
pub(super) fn broadcast(out: &mut Schedule, team: Team, root: u32, count: usize, each: usize) {
    let place = team.place(root);
    let (previous, next) = (team.before(1), team.after(1));
    pipeline(
        out,
        count,
        each,
        (place > 0, place + 1 < team.size),
        |index| {
            let span = segment(count, each, index);
            (
                Action::Receive {
                    peer: previous,
                    span,
                },
                Action::Send { peer: next, span },
            )
        },
    );
}

/// Towards the root.
pub(super) fn reduce(out: &mut Schedule, team: Team, root: u32, count: usize, each: usize) {
    let place = team.place(root);
    let (previous, next) = (team.before(1), team.after(1));
    pipeline(
        out,
        count,
        each,
        (place + 1 < team.size, place > 0),
        |index| {
            let span = segment(count, each, index);
            (
                Action::ReceiveReduce { peer: next, span },
                Action::Send {
                    peer: previous,
                    span,
                },
            )
        },
    );
}

fn pipeline(
    out: &mut Schedule,
    count: usize,
    each: usize,
    (receives, sends): (bool, bool),
    transfer: impl Fn(usize) -> (Action, Action),
) {
    let last = segments(count, each);
    // What is received in one step is sent in the next.
    let delay = usize::from(receives);
    for step in 0..last + delay {
        if receives && step < last {
            out.act(transfer(step).0);
        }
        if sends && step >= delay {
            out.act(transfer(step - delay).1);
        }
        out.end_step();
    }
}
