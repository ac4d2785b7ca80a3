//! Reduce-scatter by recursive halving, then all-gather by recursive doubling (Rabenseifner).
//!
//! In a world that is no power of two, each of the first ranks at an even place hands its values to the rank
//! after it, waits, and gets the result from it; the others form a power of two.

use super::{Action, Group, Schedule, Span, piece};

pub(super) fn all_reduce(out: &mut Schedule, group: Group, count: usize, divide: bool) {
    out.whole(count);
    let all = Span::between(0, count);
    // The greatest power of two that fits, and how many ranks are over.
    let power = 1 << group.world.ilog2();
    let over = group.world - power;
    let rank = group.rank;
    if rank < 2 * over && rank.is_multiple_of(2) {
        out.act(Action::Send {
            peer: rank + 1,
            span: all,
        });
        out.end_step();
        out.act(Action::Receive {
            peer: rank + 1,
            span: all,
        });
        out.end_step();
        return;
    }
    let proxy = rank < 2 * over;
    if proxy {
        out.act(Action::ReceiveReduce {
            peer: rank - 1,
            span: all,
        });
        out.end_step();
    }
    let place = if proxy { rank / 2 } else { rank - over };
    let member = |place: u32| {
        if place < over {
            2 * place + 1
        } else {
            place + over
        }
    };
    // Pieces `low..low + width` of `power` are this rank's to reduce, half as many after each step.
    let span = |low: u32, width: u32| {
        Span::between(
            piece(count, power, low).start,
            piece(count, power, low + width - 1).end(),
        )
    };
    let (mut low, mut width) = (0, power);
    while width > 1 {
        width /= 2;
        let upper = place & width != 0;
        let (keep, give) = if upper {
            (low + width, low)
        } else {
            (low, low + width)
        };
        let peer = member(place ^ width);
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
    if divide {
        out.ends.pop();
        out.act(Action::Divide { span: span(low, 1) });
        out.end_step();
    }
    while width < power {
        let peer = member(place ^ width);
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
    if proxy {
        out.act(Action::Send {
            peer: rank - 1,
            span: all,
        });
        out.end_step();
    }
}
