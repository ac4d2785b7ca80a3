//! What an operation works on.

use crate::copy;
use crate::operation::Operation;
use crate::reduce;
use crate::schedule::Action;
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
    pub(super) fn keep(
        &mut self,
        kept: &mut Scratch,
        step: &[Action],
        size: usize,
        operation: &Operation,
    ) {
        let end = step.iter().map(Action::end).max().unwrap_or(0) * size;
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
