//! Every pair of ranks by itself: all-to-all, and a gather all at once.

use super::{Counts, Output, Schedule, Span, Team};

/// All-to-all. The rank at distance d is served in step d, or all at once.
///
/// The working buffer holds what is sent, then what is received.
pub(super) fn all_to_all(
    out: &mut Schedule,
    team: Team,
    send: impl Counts,
    receive: impl Counts,
    at_once: bool,
) {
    let sent = send.before(team.size);
    let received = receive.before(team.size);
    out.buffer = sent + received;
    out.input = Some(Span::between(0, sent));
    for distance in 1..team.size {
        let (to, from) = (team.after(distance), team.before(distance));
        out.send_to(to, send.span(to));
        let Span { start, len } = receive.span(from);
        let start = sent + start;
        out.receive_from(from, Span { start, len });
        if !at_once {
            out.end_step();
        }
    }
    out.end_step();
    let own = receive.span(team.me);
    for (from, to) in [
        (Span::between(sent, sent + own.start), 0),
        (send.span(team.me), own.start),
        (Span::between(sent + own.end(), sent + received), own.end()),
    ] {
        out.outputs.push(Output { from, to });
    }
}

/// Every rank sends its share to the root, which receives all at once.
pub(super) fn gather(out: &mut Schedule, team: Team, root: u32, counts: impl Counts) {
    if team.me == root {
        let all = Span::between(0, counts.before(team.size));
        out.buffer = all.len;
        out.input = Some(counts.span(root));
        out.outputs.push(Output { from: all, to: 0 });
        for peer in (1..team.size).map(|distance| team.after(distance)) {
            out.receive_from(peer, counts.span(peer));
        }
    } else {
        let own = Span::between(0, counts.of(team.me));
        out.buffer = own.len;
        out.input = Some(own);
        out.send_to(root, own);
    }
    out.end_step();
}
