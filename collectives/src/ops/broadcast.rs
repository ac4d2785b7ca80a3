//! Broadcast.

use kolo_transport::ids::Rank;

use super::forms::{Ends, started};
use crate::communicator::Communicator;
use crate::element::{Element, Elements};
use crate::error::CollectiveError;
use crate::operation::{Operation, OperationKind};

impl Communicator {
    /// Copies the root's values to every rank. All ranks give the same length and root.
    ///
    /// ```
    /// # use kolo_collectives::run_local;
    /// # use kolo_collectives::Rank;
    /// run_local(2, |comm| {
    ///     let mut data = if comm.rank() == Rank(1) { [7, 8] } else { [0, 0] };
    ///     comm.broadcast(&mut data, Rank(1)).unwrap();
    ///     assert_eq!(data, [7, 8]);
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`]. The root's `data` is as it was; the others' may hold a part of what the root gave.
    pub fn broadcast<E: Elements + ?Sized>(
        &self,
        data: &mut E,
        root: Rank,
    ) -> Result<(), CollectiveError> {
        let (request, ends) = self.of_broadcast(data.elements_mut(), root);
        self.once(&request, ends, || self.check_root(request.kind, root))
    }

    /// As [`Communicator::broadcast`]. Cancels the operation on all ranks if it is dropped.
    ///
    /// # Errors
    ///
    /// As [`Communicator::broadcast`].
    pub async fn broadcast_async<E: Elements + ?Sized>(
        &self,
        data: &mut E,
        root: Rank,
    ) -> Result<(), CollectiveError> {
        let (request, ends) = self.of_broadcast(data.elements_mut(), root);
        let checked = self.check_root(request.kind, root);
        self.once_async(&request, ends, checked).await
    }

    fn of_broadcast<'a, T: Element>(
        &self,
        data: &'a mut [T],
        root: Rank,
    ) -> (Operation, Ends<'a, T>) {
        let request = self.rooted::<T>(OperationKind::Broadcast, data.len(), root);
        // The root's own values are stored as well if the others get them rounded.
        let ends = if root == self.rank() && request.wire.is_none() {
            Ends::Kept(data)
        } else {
            Ends::Over(data)
        };
        (request, ends)
    }
}

started! {
    broadcast[T: Element](data: Vec<T>, root: Rank) -> Vec<T>,
    |of| of.rooted::<T>(OperationKind::Broadcast, data.len(), root),
    |comm, data| comm.broadcast(data, root)
}
