//! The call that runs now, as the control thread and the user's code see it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kolo_transport::ids::CallId;
use tokio::sync::Notify;

/// Cancellations of calls that have not begun, at most. The oldest is forgotten first: then its call runs
/// although nobody wants the result, which costs time and nothing else.
const MAX_EARLY: usize = 4096;

/// Why a call does not run, or not any further.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// The caller cancelled it.
    Cancelled,
    /// Its deadline passed.
    Deadline,
}

#[derive(Debug, Default)]
struct State {
    /// The call that runs, and until when it may.
    call: Option<CallId>,
    deadline: Option<Instant>,
    /// Cancelled before they began, oldest first.
    early: VecDeque<CallId>,
}

/// Shared by the main thread, which begins and ends calls, and the control thread, which cancels them.
#[derive(Debug, Default)]
pub(crate) struct Running {
    state: Mutex<State>,
    /// Of the call that runs.
    cancelled: AtomicBool,
    changed: Notify,
}

impl Running {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing in here panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a call, unless it is cancelled already or its deadline has passed.
    pub(crate) fn begin(&self, call: CallId, deadline: Option<Instant>) -> Result<(), Stopped> {
        let mut state = self.state();
        if !state.early.is_empty()
            && let Some(index) = state.early.iter().position(|early| *early == call)
        {
            state.early.remove(index);
            return Err(Stopped::Cancelled);
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(Stopped::Deadline);
        }
        state.call = Some(call);
        state.deadline = deadline;
        self.cancelled.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Ends the call that runs.
    pub(crate) fn end(&self) {
        let mut state = self.state();
        state.call = None;
        state.deadline = None;
        self.cancelled.store(false, Ordering::Relaxed);
    }

    /// Cancels a call, whether it runs or has not begun. One that has ended is no longer known, and ids
    /// are not used again.
    pub(crate) fn cancel(&self, call: CallId) {
        let mut state = self.state();
        if state.call == Some(call) {
            self.cancelled.store(true, Ordering::Relaxed);
            drop(state);
            self.changed.notify_one();
        } else {
            if state.early.len() == MAX_EARLY {
                state.early.pop_front();
            }
            state.early.push_back(call);
        }
    }

    /// The deadline of the call that runs.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.state().deadline
    }

    /// Whether the result of the call that runs is not wanted any more.
    pub(crate) fn is_stopped(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
            || self
                .deadline()
                .is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Waits until the call that runs is cancelled or its deadline passes. Cancel safe.
    pub(crate) async fn stopped(&self) -> Stopped {
        let cancelled = async {
            // A permit may be left from a call that ended meanwhile, so the flag decides.
            while !self.cancelled.load(Ordering::Relaxed) {
                self.changed.notified().await;
            }
            Stopped::Cancelled
        };
        match self.deadline() {
            None => cancelled.await,
            Some(deadline) => tokio::time::timeout_at(deadline.into(), cancelled)
                .await
                .unwrap_or(Stopped::Deadline),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cancelling_the_running_call_does_not_touch_the_next() {
        let running = Running::default();
        running.begin(CallId(1), None).unwrap();
        running.cancel(CallId(1));
        assert!(running.is_stopped());
        running.end();
        running.begin(CallId(2), None).unwrap();
        assert!(!running.is_stopped());
    }

    #[test]
    fn early_cancellations_are_bounded() {
        let running = Running::default();
        for call in 0..=MAX_EARLY as u64 {
            running.cancel(CallId(call));
        }
        assert_eq!(running.begin(CallId(0), None), Ok(()));
        assert_eq!(running.begin(CallId(1), None), Err(Stopped::Cancelled));
    }

    #[tokio::test]
    async fn a_left_over_wake_up_is_not_taken_for_a_cancellation() {
        let running = Running::default();
        running.begin(CallId(1), None).unwrap();
        running.cancel(CallId(1)); // leaves a permit, as nobody awaits
        running.end();
        running.begin(CallId(2), None).unwrap();
        let waiting = running.stopped();
        tokio::pin!(waiting);
        tokio::select! {
            biased;
            stopped = &mut waiting => panic!("{stopped:?}"),
            () = tokio::task::yield_now() => {}
        }
        running.cancel(CallId(2));
        assert_eq!(waiting.await, Stopped::Cancelled);
    }
}
