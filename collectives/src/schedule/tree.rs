//! Broadcast along a binomial tree, and the dissemination barrier.

use super::{Action, Group, Output, Schedule, Span};

/// Places count from the root. A place gets the values from the place without its lowest bit, and hands them
/// to the places that have one more, lower bit: the farthest first, which has the most below it.
pub(super) fn broadcast(out: &mut Schedule, group: Group, root: u32, count: usize) {
    let span = Span::between(0, count);
    out.buffer = count;
    out.outputs.push(Output { from: span, to: 0 });
    let place = group.before(root);
    let member = |place: u32| {
        Group {
            rank: root,
            ..group
        }
        .after(place)
    };
    let mut bit = group.world.next_power_of_two();
    if place == 0 {
        out.input = Some(span);
    } else {
        bit = 1 << place.trailing_zeros();
        out.act(Action::Receive {
            peer: member(place - bit),
            span,
        });
        out.end_step();
    }
    while bit > 1 {
        bit /= 2;
        if place + bit < group.world {
            out.act(Action::Send {
                peer: member(place + bit),
                span,
            });
            out.end_step();
        }
    }
}

/// After step k every rank knows that the 2^(k+1) - 1 ranks before it have come.
pub(super) fn barrier(out: &mut Schedule, group: Group) {
    let nothing = Span::default();
    let mut distance = 1;
    while distance < group.world {
        out.act(Action::Send {
            peer: group.after(distance),
            span: nothing,
        });
        out.act(Action::Receive {
            peer: group.before(distance),
            span: nothing,
        });
        out.end_step();
        distance *= 2;
    }
}
