//! Broadcast.

use std::pin::pin;
use std::time::Instant;

use kolo_transport::ids::Rank;

use super::Ends;
use crate::blocking::{Alarm, SleepAlarm};
use crate::communicator::Communicator;
use crate::element::Element;
use crate::error::CollectiveError;
use crate::operation::{Operation, OperationKind};

impl Communicator {
    /// Copies the root's values to every rank. All ranks give the same length and root.
    ///
    /// ```
    /// # use kolo_collectives::local_group;
    /// # use kolo_collectives::Rank;
    /// let group = local_group(2)?;
    /// std::thread::scope(|scope| {
    ///     for comm in &group {
    ///         scope.spawn(move || {
    ///             let mut data = if comm.rank() == Rank(1) { [7, 8] } else { [0, 0] };
    ///             comm.broadcast(&mut data, Rank(1)).unwrap();
    ///             assert_eq!(data, [7, 8]);
    ///         });
    ///     }
    /// });
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`]. The root's `data` is as it was; the others' may hold a part of what the root gave.
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: Rank) -> Result<(), CollectiveError> {
        let request = Operation {
            root: Some(root.0),
            ..self.request::<T>(OperationKind::Broadcast, data.len())
        };
        let stores = root.0 != self.inner.me || request.wire.is_some();
        let ends = if stores {
            Ends::Over(data)
        } else {
            Ends::Nowhere(data)
        };
        if let Some(done) = self.short(&request, ends) {
            return done;
        }
        Self::blocking(async |alarm, started| self.spread(alarm, started, data, root).await)
    }

    /// As [`Communicator::broadcast`]. Cancels the operation on all ranks if it is dropped.
    ///
    /// # Errors
    ///
    /// As [`Communicator::broadcast`].
    pub async fn broadcast_async<T: Element>(
        &self,
        data: &mut [T],
        root: Rank,
    ) -> Result<(), CollectiveError> {
        let started = Instant::now();
        let sleep = pin!(self.inner.sleep());
        self.spread(&mut SleepAlarm(sleep), started, data, root)
            .await
    }

    async fn spread<A: Alarm, T: Element>(
        &self,
        alarm: &mut A,
        started: Instant,
        data: &mut [T],
        root: Rank,
    ) -> Result<(), CollectiveError> {
        let kind = OperationKind::Broadcast;
        let (mut turn, tag) = self.turn(alarm, started, kind).await?;
        let root = match self.check_root(kind, root) {
            Ok(root) => root,
            Err(error) => return Err(turn.refuse(tag, error)),
        };
        let request = Operation {
            root: Some(root),
            ..self.request::<T>(kind, data.len())
        };
        // The root's own values, too, if the others get them rounded.
        let stores = root != self.inner.me || request.wire.is_some();
        turn.run_in_place(alarm, tag, request, data, stores).await
    }
}
