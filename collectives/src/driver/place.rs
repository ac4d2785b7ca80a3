//! What an operation works on, and what a rank does there by itself.

use crate::copy;
use crate::operation::Operation;
use crate::reduce::{self, Dots};
use crate::schedule::{Action, Span};
use crate::scratch::Scratch;

/// Bytes from which on what is kept would drive out of the caches what is worked on.
const MUCH: usize = 1 << 20;

/// The caller's buffer, or its two, when an operation works right there. One that holds input and result is put back as it was if
/// the operation fails: what is overwritten is kept in the working buffer before. A copy of the result is saved.
#[derive(Debug)]
pub(crate) struct InPlace<'a> {
    data: Data<'a>,
    /// Bytes from the beginning that were kept.
    kept: usize,
    keeps: bool,
}

#[derive(Debug)]
enum Data<'a> {
    Result(&'a mut [u8]),
    /// What is sent, and what is written, from some byte of the schedule's buffer on.
    Apart(&'a [u8], &'a mut [u8], usize),
}

impl<'a> InPlace<'a> {
    /// In a buffer that holds the input and is to hold the result. `writes`: whether the schedule changes anything.
    pub(crate) fn over(data: &'a mut [u8], writes: bool) -> Self {
        Self {
            data: Data::Result(data),
            kept: 0,
            keeps: writes,
        }
    }

    /// From an input and into a buffer for the result, which begins at the byte `start` of a schedule's buffer that can be so
    /// [taken apart](crate::schedule::Schedule::is_apart).
    pub(crate) fn apart(input: &'a [u8], result: &'a mut [u8], start: usize) -> Self {
        Self {
            data: Data::Apart(input, result, start),
            kept: 0,
            keeps: false,
        }
    }

    /// Into a buffer for the result alone.
    pub(crate) fn into_result(data: &'a mut [u8]) -> Self {
        Self {
            data: Data::Result(data),
            kept: 0,
            keeps: false,
        }
    }

    /// Before these actions: keeps what is new of what they touch, and scales it.
    pub(super) fn keep(&mut self, kept: &mut Scratch, step: &[Action], operation: &Operation) {
        let end = step.iter().map(Action::end).max().unwrap_or(0);
        let end = end * operation.element_size();
        if end <= self.kept || !self.keeps {
            return;
        }
        let from = std::mem::replace(&mut self.kept, end);
        let (data, _) = self.written();
        let is_small = data.len() < MUCH;
        let fresh = &mut data[from..end];
        let copy = &mut kept.bytes_mut()[from..end];
        if is_small {
            copy::slice(fresh, copy);
        } else {
            // It is read only if the operation fails.
            copy::away(fresh, copy);
        }
        if let (Some(dtype), true) = (operation.wire_type(), operation.reduce.is_some()) {
            reduce::scale(dtype, fresh, operation.prescale);
        }
    }

    /// Puts back what was kept.
    pub(super) fn restore(&mut self, kept: &Scratch) {
        let end = std::mem::take(&mut self.kept);
        if end > 0 {
            self.written().0[..end].copy_from_slice(&kept.bytes()[..end]);
        }
    }

    /// What is sent.
    pub(super) fn bytes(&self) -> &[u8] {
        match &self.data {
            Data::Apart(data, ..) => data,
            Data::Result(data) => data,
        }
    }

    /// What is written, and at which byte of the schedule's buffer it begins.
    pub(super) fn written(&mut self) -> (&mut [u8], usize) {
        match &mut self.data {
            Data::Result(data) => (data, 0),
            Data::Apart(_, data, start) => (data, *start),
        }
    }
}

/// Where an operation writes, and at which byte of the schedule's buffer that begins.
pub(super) fn written<'a>(
    place: &'a mut Option<InPlace<'_>>,
    work: &'a mut Scratch,
) -> (&'a mut [u8], usize) {
    match place {
        None => (work.bytes_mut(), 0),
        Some(place) => place.written(),
    }
}

/// What a rank does by itself at the end of a step of an operation in a world of so many ranks.
pub(super) fn act(
    step: &[Action],
    request: &Operation,
    world: u32,
    in_place: &mut Option<InPlace<'_>>,
    work: &mut Scratch,
) {
    let size = request.element_size();
    if step.iter().all(|action| action.transfer().is_some()) {
        return;
    }
    let finish = reduce::Finish::asked(request, world);
    let (work, begin) = written(in_place, work);
    let bytes = |span: Span| span.start * size - begin..span.end() * size - begin;
    for action in step {
        if let Action::Copy { from, into } = *action {
            work.copy_within(bytes(from), bytes(into).start);
        }
        let (Some(dtype), Some(op)) = (request.wire_type(), request.reduce) else {
            continue;
        };
        match *action {
            Action::Combine { from, into } => {
                let (into, from) = disjoint(work, into, from, size);
                reduce::combine(dtype, op, into, from);
            }
            Action::Finish { span } => {
                if let Some(finish) = &finish {
                    reduce::finish(dtype, &mut work[bytes(span)], finish);
                }
            }
            Action::Dots { left, right, into } => {
                let dots = reduce::dots(dtype, &work[bytes(left)], &work[bytes(right)]);
                work[bytes(into)].copy_from_slice(&dots.to_bytes());
            }
            Action::AddDots { from, into } => {
                let sum =
                    Dots::from_bytes(&work[bytes(into)]).plus(Dots::from_bytes(&work[bytes(from)]));
                work[bytes(into)].copy_from_slice(&sum.to_bytes());
            }
            Action::Blend {
                from,
                into,
                dots,
                mirrored,
            } => {
                let dots = Dots::from_bytes(&work[bytes(dots)]);
                let dots = if mirrored { dots.mirrored() } else { dots };
                let (into, from) = disjoint(work, into, from, size);
                reduce::blend(dtype, into, from, &dots);
            }
            Action::Send { .. }
            | Action::Receive { .. }
            | Action::ReceiveReduce { .. }
            | Action::Copy { .. } => {}
        }
    }
}

/// Two spans of one buffer that do not overlap.
fn disjoint(work: &mut [u8], into: Span, from: Span, size: usize) -> (&mut [u8], &[u8]) {
    let bytes = |span: Span| (span.start * size, span.end() * size);
    let ((into_start, into_end), (from_start, from_end)) = (bytes(into), bytes(from));
    if into_start < from_start {
        let (low, high) = work.split_at_mut(from_start);
        (
            &mut low[into_start..into_end],
            &high[..from_end - from_start],
        )
    } else {
        let (low, high) = work.split_at_mut(into_start);
        (
            &mut high[..into_end - into_start],
            &low[from_start..from_end],
        )
    }
}
