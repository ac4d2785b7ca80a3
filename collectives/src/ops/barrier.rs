//! Barrier.

use super::forms::{Ends, started};
use crate::communicator::Communicator;
use crate::error::CollectiveError;
use crate::operation::Operation;

impl Communicator {
    /// Returns when all ranks have come.
    ///
    /// ```
    /// # use kolo_collectives::run_local;
    /// run_local(3, |comm| assert_eq!(comm.barrier(), Ok(())))?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`].
    pub fn barrier(&self) -> Result<(), CollectiveError> {
        self.once(&Operation::BARRIER, Ends::<u8>::Nowhere(&[]), || Ok(()))
    }

    /// As [`Communicator::barrier`]. Cancels the operation on all ranks if it is dropped.
    ///
    /// # Errors
    ///
    /// As [`Communicator::barrier`].
    pub async fn barrier_async(&self) -> Result<(), CollectiveError> {
        let ends = Ends::<u8>::Nowhere(&[]);
        self.once_async(&Operation::BARRIER, ends, Ok(())).await
    }
}

started! {
    barrier[]() -> (), |_of| Operation::BARRIER, |comm| comm.barrier()
}
