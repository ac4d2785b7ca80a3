//! By doubling distances, for any world size: after step k every rank has the shares of 2^(k+1) ranks.
//!
//! The working buffer holds the shares in the order rank, rank+1, ..., around the circle, so that what is
//! sent is always one stretch from the start.

use super::{Action, Counts, Equal, Output, Schedule, Span, Team};

fn exchange(out: &mut Schedule, team: Team, counts: impl Counts) {
    let total = counts.before(team.size);
    // Where the share of the rank at this distance begins in the working buffer.
    let start = |distance: u32| {
        if distance == team.size {
            return total;
        }
        let owner = team.after(distance);
        let wrapped = if owner < team.me { total } else { 0 };
        counts.before(owner) + wrapped - counts.before(team.me)
    };
    out.buffer = total;
    out.input = Some(Span::between(0, counts.of(team.me)));
    let mut have = 1;
    while have < team.size {
        let more = have.min(team.size - have);
        out.send_to(team.before(have), Span::between(0, start(more)));
        let span = Span::between(start(have), start(have + more));
        out.receive_from(team.after(have), span);
        out.end_step();
        have += more;
    }
}

pub(super) fn all_gather(out: &mut Schedule, team: Team, counts: impl Counts) {
    exchange(out, team, counts);
    // The buffer begins with this rank's share; the result begins with rank 0's.
    let turn = counts.before(team.me);
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
pub(super) fn all_reduce(out: &mut Schedule, team: Team, count: usize, finish: bool) {
    exchange(out, team, Equal(count));
    let values = |rank: u32| {
        let distance = (team.size + rank - team.me) % team.size;
        let start = distance as usize * count;
        Span::between(start, start + count)
    };
    let result = values(0);
    for from in (1..team.size).map(values) {
        out.local(Action::Combine { from, into: result });
    }
    out.finish(finish, result);
    let (from, to) = (result, 0);
    out.outputs.push(Output { from, to });
}
