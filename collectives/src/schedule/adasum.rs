//! Adasum over a power of two of ranks: the pairs of partners at distance 1, then of those pairs at distance 2, ...
//!
//! The scalar products travel as three `f64`, in elements of whatever type, and lie at a place that is aligned for them.
//! In [`halving`] every rank holds a part of both vectors, and the scalar products of the parts are added up among the
//! ranks that hold them (Maleki et al. 2021, section 4.2; Horovod's `adasum.h` does the same).

use super::{Action, Schedule, Span, Team};

/// Where three `f64` lie behind `end` elements of `size` bytes.
fn place_for_dots(end: usize, size: usize) -> Span {
    let each = size_of::<f64>() / size;
    Span {
        start: end.next_multiple_of(each),
        len: 3 * each,
    }
}

/// Partners exchange whole vectors and both combine them: log2 n steps, S bytes each.
pub(super) fn doubling(out: &mut Schedule, team: Team, count: usize, size: usize, finish: bool) {
    let own = Span::between(0, count);
    let other = Span::between(count, 2 * count);
    let dots = place_for_dots(2 * count, size);
    out.whole(count);
    out.buffer = dots.end();
    let mut distance = 1;
    while distance < team.size {
        let peer = team.me ^ distance;
        out.send_to(peer, own);
        out.receive_from(peer, other);
        let mirrored = team.me & distance != 0;
        let (left, right) = if mirrored { (other, own) } else { (own, other) };
        let into = dots;
        out.act(Action::Dots { left, right, into });
        out.act(Action::Blend {
            from: other,
            into: own,
            dots,
            mirrored,
        });
        out.end_step();
        distance *= 2;
    }
    out.finish(finish, own);
}

/// Partners exchange halves of what they hold; then all-gather: 2 S (n-1)/n bytes, and 24 bytes now and then.
pub(super) fn halving(out: &mut Schedule, team: Team, count: usize, size: usize, finish: bool) {
    let scratch = count;
    let room = count.div_ceil(2);
    let dots = place_for_dots(scratch + room, size);
    let more = place_for_dots(dots.end(), size);
    out.whole(count);
    out.buffer = more.end();
    let mut distance = 1;
    while distance < team.size {
        let peer = team.me ^ distance;
        let mirrored = team.me & distance != 0;
        let (keep, give) = halves(team.me, count, distance);
        let other = Span {
            start: scratch,
            len: keep.len,
        };
        out.send_to(peer, give);
        out.receive_from(peer, other);
        let (left, right) = if mirrored {
            (other, keep)
        } else {
            (keep, other)
        };
        let into = dots;
        out.act(Action::Dots { left, right, into });
        out.end_step();
        // The 2 * distance ranks from a multiple of that on hold the parts of these two vectors.
        let mut near = 1;
        while near <= distance {
            let peer = team.me ^ near;
            out.send_to(peer, dots);
            out.receive_from(peer, more);
            let (from, into) = (more, dots);
            out.act(Action::AddDots { from, into });
            out.end_step();
            near *= 2;
        }
        out.local(Action::Blend {
            from: other,
            into: keep,
            dots,
            mirrored,
        });
        distance *= 2;
    }
    let (span, _) = halves(team.me, count, distance / 2);
    out.finish(finish, span);
    while distance > 1 {
        distance /= 2;
        let peer = team.me ^ distance;
        let (keep, give) = halves(team.me, count, distance);
        out.send_to(peer, keep);
        out.receive_from(peer, give);
        out.end_step();
    }
}

/// What a rank keeps of what it held, and what it gives to its partner at this distance. It holds all at distance 1;
/// nothing is given at distance 0.
fn halves(me: u32, count: usize, distance: u32) -> (Span, Span) {
    let (mut keep, mut give) = (Span::between(0, count), Span::default());
    let mut at = 1;
    while at <= distance {
        let middle = keep.start + keep.len / 2;
        let (low, high) = (
            Span::between(keep.start, middle),
            Span::between(middle, keep.end()),
        );
        (keep, give) = if me & at == 0 {
            (low, high)
        } else {
            (high, low)
        };
        at *= 2;
    }
    (keep, give)
}
