//! Operations on memory that the ranks of a host share.

use super::forms::started;
use crate::communicator::Communicator;
use crate::element::{self, Element};
use crate::error::CollectiveError;
use crate::group_core::{OpGuard, Quick, Shared};
use crate::operation::{Operation, OperationKind, ReduceOp};
use crate::shm::buffer::SharedBuffer;

/// Tells operations on buffers apart from those on other memory, which are done in another way.
const OF_BUFFERS: u8 = u8::MAX;

impl Communicator {
    /// Memory for `len` elements, all 0, that the ranks of this host map: [`Communicator::all_reduce_buffer`] reduces it
    /// without a copy. It is an operation: all ranks make it, of the same length. Where the ranks share no memory it is
    /// memory of this process alone, and everything works as well.
    ///
    /// The time limit is for the ranks to agree. After that each gets its memory from the system, twice what it asks for, which
    /// takes as long as writing to it.
    ///
    /// ```
    /// use kolo_collectives::{ReduceOp, run_local};
    ///
    /// run_local(2, |comm| {
    ///     let mut gradients = comm.buffer::<f32>(1000).unwrap();
    ///     gradients.fill(1.5);
    ///     comm.all_reduce_buffer(&mut gradients, ReduceOp::Sum).unwrap();
    ///     assert_eq!(gradients[999], 3.0);
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`], of which [`CollectiveError::Invalid`] if the host has not so much memory left: then the other
    /// ranks may have their buffers.
    pub fn buffer<T: Element>(&self, len: usize) -> Result<SharedBuffer<T>, CollectiveError> {
        self.in_turn(OperationKind::Barrier, async |alarm, turn, tag| {
            let request = Operation {
                dtype: Some(T::DTYPE),
                shape: crate::shape::of(&[len]),
                ..Operation::BARRIER
            };
            turn.run(alarm, tag, request, &[]).await?;
            turn.buffer(len)
        })
    }

    /// As [`Communicator::all_reduce`], of buffers that [`Communicator::buffer`] made: every rank gives one. The result is
    /// in the buffer. It takes half to nine tenths of the time of other memory.
    ///
    /// ```
    /// # use kolo_collectives::{ReduceOp, run_local};
    /// run_local(2, |comm| {
    ///     let mut buffer = comm.buffer::<f32>(1000).unwrap();
    ///     buffer.fill(2.5);
    ///     comm.all_reduce_buffer(&mut buffer, ReduceOp::Sum).unwrap();
    ///     assert!(buffer.iter().all(|value| *value == 5.0));
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`]; the buffer is as it was.
    pub fn all_reduce_buffer<T: Element>(
        &self,
        buffer: &mut SharedBuffer<T>,
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        let plain = self.reduction::<T>(OperationKind::AllReduce, buffer.len(), op);
        // What is converted, scaled before or looked at as a whole has no way without a copy.
        let in_place = plain.wire.is_none() && plain.prescale.is_one() && op != ReduceOp::Adasum;
        if !buffer.is_shared() || !in_place {
            return self.all_reduce(buffer, op);
        }
        let request = Operation {
            segment: OF_BUFFERS,
            ..plain
        };
        let tainted = buffer.taint();
        match self.inner.quick_buffers(&request, &self.options, buffer) {
            Quick::Done(mut turn) => {
                turn.leave();
                buffer.turn();
                return Ok(());
            }
            Quick::Begun(mut turn, tag) => {
                let input = element::bytes_of(buffer);
                let shared = Self::blocking(async |alarm, _| turn.resume(alarm, tag, input).await)?;
                end_in(&mut turn, buffer, shared, tainted);
                return Ok(());
            }
            Quick::Failed(error) => return Err(error),
            Quick::No => buffer.untaint(tainted),
        }
        self.in_turn(request.kind, async |alarm, turn, tag| {
            let tainted = buffer.taint();
            if let Some(shared) = turn.run_buffers(alarm, tag, request, buffer).await? {
                end_in(turn, buffer, shared, tainted);
                return Ok(());
            }
            // It is another communicator's, or an algorithm is asked for.
            buffer.untaint(tainted);
            turn.run_in_place(alarm, tag, plain, buffer, true).await
        })
    }
}

/// Puts the result of an operation in its buffer, which was `tainted` before or not.
fn end_in<T: Element>(
    turn: &mut OpGuard<'_>,
    buffer: &mut SharedBuffer<T>,
    shared: Shared,
    tainted: bool,
) {
    match shared {
        Shared::Done => {
            turn.leave();
            buffer.turn();
        }
        // A rank has no data: nobody has touched the other half.
        Shared::Not => {
            buffer.untaint(tainted);
            turn.store(buffer);
        }
    }
}

started! {
    /// By name it takes a copy more, as on memory of this process alone.
    all_reduce_buffer[T: Element](buffer: SharedBuffer<T>, op: ReduceOp) -> SharedBuffer<T>,
    |of| Operation {
        rows: Operation::OF_SHARED_BUFFER,
        ..of.reduction::<T>(OperationKind::AllReduce, buffer.len(), op)
    },
    |comm, buffer| comm.all_reduce_buffer(buffer, op)
}
