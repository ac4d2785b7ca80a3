//! By doubling distances, for any world size: after step k every rank has the shares of 2^(k+1) ranks.
//!
//! The working buffer holds the shares in the order rank, rank+1, ..., around the circle, so that what is
//! sent is always one stretch from the start.

use super::{Action, Counts, Equal, Group, Output, Schedule, Span};

fn exchange(out: &mut Schedule, group: Group, counts: impl Counts) {
    let total = counts.before(group.world);
    // Where the share of the rank at this distance begins in the working buffer.
    let start = |distance: u32| {
        if distance == group.world {
            return total;
        }
        let owner = group.after(distance);
        let wrapped = if owner < group.rank { total } else { 0 };
        counts.before(owner) + wrapped - counts.before(group.rank)
    };
    out.buffer = total;
    out.input = Some(Span::between(0, counts.of(group.rank)));
    let mut have = 1;
    while have < group.world {
        let more = have.min(group.world - have);
        out.act(Action::Send {
            peer: group.before(have),
            span: Span::between(0, start(more)),
        });
        out.act(Action::Receive {
            peer: group.after(have),
            span: Span::between(start(have), start(have + more)),
        });
        out.end_step();
        have += more;
    }
}

pub(super) fn all_gather(out: &mut Schedule, group: Group, counts: impl Counts) {
    exchange(out, group, counts);
    // The buffer begins with this rank's share; the result begins with rank 0's.
    let turn = counts.before(group.rank);
    let total = out.buffer;
    out.outputs.push(Output {
        from: Span::between(0, total - turn),
        to: turn,
    });
    out.outputs.push(Output {
        from: Span::between(total - turn, total),
        to: 0,
    });
}

/// Every rank gets every rank's values and reduces them in rank order.
pub(super) fn all_reduce(out: &mut Schedule, group: Group, count: usize, divide: bool) {
    exchange(out, group, Equal(count));
    out.ends.pop();
    let values = |rank: u32| {
        let distance = (group.world + rank - group.rank) % group.world;
        let start = distance as usize * count;
        Span::between(start, start + count)
    };
    let result = values(0);
    for rank in 1..group.world {
        out.act(Action::Combine {
            from: values(rank),
            into: result,
        });
    }
    if divide {
        out.act(Action::Divide { span: result });
    }
    out.end_step();
    out.outputs.push(Output {
        from: result,
        to: 0,
    });
}
