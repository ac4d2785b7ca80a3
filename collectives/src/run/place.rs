//! What an operation works on.

use crate::operation::Operation;
use crate::reduce;
use crate::schedule::Action;
use crate::scratch::Scratch;
use crate::shm::copy;

/// Bytes from which on what is kept would drive out of the caches what is worked on.
const MUCH: usize = 1 << 20;

/// The caller's buffer, when an operation works right in it. What is overwritten is kept in the working buffer before, so that a
/// failure leaves the caller's as it was. A copy of the result is saved.
#[derive(Debug)]
pub(crate) struct InPlace<'a> {
    data: &'a mut [u8],
    /// Bytes from the beginning that were kept.
    kept: usize,
    /// Whether anything is ever overwritten.
    writes: bool,
}

impl<'a> InPlace<'a> {
    pub(crate) fn new(data: &'a mut [u8], writes: bool) -> Self {
        Self {
            data,
            kept: 0,
            writes,
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
        if end <= self.kept || !self.writes {
            return;
        }
        let is_small = self.data.len() < MUCH;
        let fresh = &mut self.data[self.kept..end];
        let copy = &mut kept.bytes_mut()[self.kept..end];
        if is_small {
            copy.copy_from_slice(fresh);
        } else {
            // It is read only if the operation fails.
            copy::away(fresh, copy);
        }
        if let (Some(dtype), true) = (operation.wire_type(), operation.reduce.is_some()) {
            reduce::scale(dtype, fresh, operation.prescale);
        }
        self.kept = end;
    }

    /// Puts back what was kept.
    pub(super) fn restore(&mut self, kept: &Scratch) {
        self.data[..self.kept].copy_from_slice(&kept.bytes()[..self.kept]);
        self.kept = 0;
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.data
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        self.data
    }
}
