//! Every pair of ranks by itself: all-to-all, linear gathers and scatters, one rank to another.

use super::{Action, Counts, Output, Schedule, Span, Team};

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
        out.act(Action::Send {
            peer: to,
            span: send.span(to),
        });
        let span = receive.span(from);
        out.act(Action::Receive {
            peer: from,
            span: Span {
                start: sent + span.start,
                ..span
            },
        });
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
    let own = counts.of(team.me);
    if team.me != root {
        let span = Span::between(0, own);
        out.buffer = own;
        out.input = Some(span);
        out.alone(Action::Send { peer: root, span });
        return;
    }
    let all = Span::between(0, counts.before(team.size));
    out.buffer = all.len;
    out.input = Some(counts.span(root));
    out.outputs.push(Output { from: all, to: 0 });
    for distance in 1..team.size {
        let peer = team.after(distance);
        out.act(Action::Receive {
            peer,
            span: counts.span(peer),
        });
    }
    out.end_step();
}

/// The root sends every rank its share, all at once.
pub(super) fn scatter(out: &mut Schedule, team: Team, root: u32, counts: impl Counts) {
    let own = counts.of(team.me);
    if team.me != root {
        let span = Span::between(0, own);
        out.buffer = own;
        out.outputs.push(Output { from: span, to: 0 });
        out.alone(Action::Receive { peer: root, span });
        return;
    }
    let all = Span::between(0, counts.before(team.size));
    out.buffer = all.len;
    out.input = Some(all);
    out.outputs.push(Output {
        from: counts.span(root),
        to: 0,
    });
    for distance in 1..team.size {
        let peer = team.after(distance);
        out.act(Action::Send {
            peer,
            span: counts.span(peer),
        });
    }
    out.end_step();
}
