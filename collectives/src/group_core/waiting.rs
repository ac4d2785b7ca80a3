//! Operations that wait for their turn.

use std::sync::Arc;

use super::GroupCore;

/// An operation that waits for its turn. Given up before that, it still takes its number when its turn comes,
/// so that this rank stays in step, and the peers hear that it was cancelled.
pub(super) struct Waiting<'a> {
    inner: &'a Arc<GroupCore>,
    operation: &'static str,
    call: u64,
    over: bool,
}

impl<'a> Waiting<'a> {
    pub(super) fn new(inner: &'a Arc<GroupCore>, operation: &'static str) -> Self {
        Self {
            inner,
            operation,
            call: inner.signals.lock().call,
            over: false,
        }
    }

    pub(super) fn end(mut self) {
        self.over = true;
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        self.inner.signals.change(|state| {
            if state.call == self.call {
                state.cancelled.push(self.operation);
            }
        });
        self.inner.attend();
    }
}
