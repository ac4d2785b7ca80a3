//! What an operation asks of a rank that does it in shared memory. Pure.

use crate::operation::Operation;
use crate::schedule::Rows;

/// Bytes of its elements.
#[inline]
pub(super) fn length(operation: &Operation) -> usize {
    operation.count as usize * operation.element_size()
}

/// Who gets which elements of a reduce-scatter.
pub(super) fn rows(operation: &Operation, world: usize) -> Rows {
    let rows = operation.rows.max(1) as usize;
    Rows {
        rows,
        width: operation.count as usize / rows,
        world: world as u32,
    }
}

/// Whether what others see is what the caller gave.
#[inline]
pub(super) fn is_given_as_it_is(operation: &Operation) -> bool {
    operation.wire.is_none() && operation.prescale.is_one()
}
