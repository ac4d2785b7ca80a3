//! Heartbeats, which wait in no mailbox: a head that has much to do takes nobody for lost, and nobody takes it for gone.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use kolo_core::head::registry::Session;
use kolo_transport::awake::AwakeClock;

/// The connections whose nodes were heard since the head has looked last, and when. Clones share it.
#[derive(Debug, Clone)]
pub struct Beats {
    clock: AwakeClock,
    heard: Arc<Mutex<BTreeMap<Session, Instant>>>,
}

impl Beats {
    pub(super) fn new(clock: AwakeClock) -> Self {
        Self {
            clock,
            heard: Arc::default(),
        }
    }

    /// The node behind a connection was heard. Nothing comes of it if the node is not registered over the connection.
    pub fn heard(&self, session: Session) {
        let now = self.clock.now();
        self.lock().insert(session, now);
    }

    pub(super) fn take(&self) -> Vec<(Session, Instant)> {
        std::mem::take(&mut *self.lock()).into_iter().collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<Session, Instant>> {
        // Nothing that runs under the lock panics.
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
