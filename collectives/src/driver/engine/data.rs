//! What an operation works on: its schedule, its buffer, what goes in and what comes out.

use super::Engine;
use crate::copy;
use crate::element::Element;
use crate::error::CollectiveError;
use crate::operation::{Operation, OperationKind, ReduceOp};
use crate::reduce;
use crate::schedule::{Algorithm, Equal, Group, Offsets, Rows};

impl Engine {
    /// Sets how many elements each rank has, for an operation on different lengths. Returns their sum, if it is a number.
    pub(crate) fn set_offsets(&mut self, counts: impl IntoIterator<Item = usize>) -> Option<usize> {
        fill_offsets(&mut self.offsets, counts)
    }

    /// The same for what an all-to-all sends.
    pub(crate) fn set_sent_offsets(
        &mut self,
        counts: impl IntoIterator<Item = usize>,
    ) -> Option<usize> {
        fill_offsets(&mut self.sent_offsets, counts)
    }

    /// Whether the lengths that are known have this sum, and this rank has none of it.
    pub(crate) fn is_share_empty(&self, total: u64) -> bool {
        let me = self.me as usize;
        self.offsets.len() == self.world as usize + 1
            && self.offsets[me] == self.offsets[me + 1]
            && self
                .offsets
                .last()
                .is_some_and(|last| *last as u64 == total)
    }

    /// Sets how an operation is done.
    pub(crate) fn choose(&mut self, operation: &mut Operation) {
        let size = operation.element_size() as u64;
        let shares = match operation.kind {
            OperationKind::AllGather
            | OperationKind::AllGatherCounts
            | OperationKind::Gather
            | OperationKind::Scatter
            | OperationKind::AllToAll => u64::from(self.world),
            _ => 1,
        };
        let bytes = operation.count.saturating_mul(size).saturating_mul(shares);
        if operation.is_join() && self.world > 1 {
            // Every rank sends something at once, to one that may have data still and says so.
            operation.algorithm = Algorithm::Bruck;
            return;
        }
        operation.algorithm = self.choices.choose(operation.kind, operation.reduce, bytes);
        operation.segment = self
            .choices
            .segment(operation.kind, operation.algorithm, bytes);
    }

    /// Makes the schedule of an operation, unless it is the last one's, and the room that it needs.
    ///
    /// Fails if there is not so much memory.
    pub(crate) fn plan(&mut self, operation: &Operation) -> Result<(), CollectiveError> {
        let varcount = matches!(
            operation.kind,
            OperationKind::AllGatherVarcount
                | OperationKind::GatherVarcount
                | OperationKind::ScatterVarcount
                | OperationKind::AllToAllVarcount
        );
        if operation.segment != 0 {
            // Such a schedule is as long as the data, whose length a rank without data has from others.
            self.reserve(operation, operation.count as usize)?;
        }
        if varcount || self.made_for != Some(*operation) {
            self.make_schedule(operation);
            // One of different lengths is made anew each time: the lengths are not in the operation.
            self.made_for = (!varcount).then_some(*operation);
        }
        Ok(())
    }

    /// Gets memory for what was [planned](Engine::plan). Fails if there is not so much.
    pub(crate) fn make_room(&mut self, operation: &Operation) -> Result<(), CollectiveError> {
        self.reserve(operation, self.schedule.buffer)
    }

    fn reserve(&mut self, operation: &Operation, elements: usize) -> Result<(), CollectiveError> {
        let size = operation.element_size();
        let bytes = elements.checked_mul(size);
        if bytes.is_some_and(|bytes| self.work.try_reserve(bytes)) {
            return Ok(());
        }
        Err(CollectiveError::Invalid {
            reason: format!(
                "{operation} by the {} algorithm takes {elements} elements of {size} bytes to work with, more than this \
                 process can get: give less at a time, or the process more memory",
                operation.algorithm,
            ),
        })
    }

    fn make_schedule(&mut self, operation: &Operation) {
        let Self {
            schedule, layout, ..
        } = self;
        let group = Group::on(self.me, layout);
        let count = operation.count as usize;
        let algorithm = operation.algorithm;
        let root = operation.root.unwrap_or(0);
        let finish =
            reduce::Finish::asked(operation, self.world).is_some_and(|finish| !finish.is_nothing());
        let size = operation.element_size();
        let segment = match operation.segment {
            0 => count.max(1),
            power => ((1_usize << power) / size).max(1),
        };
        match operation.kind {
            OperationKind::AllReduce if operation.reduce == Some(ReduceOp::Adasum) => {
                schedule.adasum(group, algorithm, count, size, finish);
            }
            OperationKind::AllReduce => {
                schedule.all_reduce(group, algorithm, count, segment, finish);
            }
            OperationKind::Reduce => {
                schedule.reduce(group, algorithm, root, count, finish);
            }
            OperationKind::ReduceScatter => {
                let rows = operation.rows.max(1) as usize;
                let split = Rows {
                    rows,
                    width: count / rows,
                    world: self.world,
                };
                schedule.reduce_scatter(group, algorithm, split, finish);
            }
            OperationKind::Broadcast => {
                schedule.broadcast(group, algorithm, root, count);
            }
            OperationKind::AllGather | OperationKind::AllGatherCounts => {
                schedule.all_gather(group, algorithm, Equal(count));
            }
            OperationKind::AllGatherVarcount => {
                schedule.all_gather(group, algorithm, Offsets(&self.offsets));
            }
            OperationKind::Gather => schedule.gather(group, algorithm, root, Equal(count)),
            OperationKind::GatherVarcount => {
                schedule.gather(group, algorithm, root, Offsets(&self.offsets));
            }
            OperationKind::Scatter => schedule.scatter(group, algorithm, root, Equal(count)),
            OperationKind::ScatterVarcount => {
                schedule.scatter(group, algorithm, root, Offsets(&self.offsets));
            }
            OperationKind::AllToAll => {
                schedule.all_to_all(group, algorithm, Equal(count), Equal(count));
            }
            OperationKind::AllToAllVarcount => {
                let (send, receive) = (Offsets(&self.sent_offsets), Offsets(&self.offsets));
                schedule.all_to_all(group, algorithm, send, receive);
            }
            OperationKind::Barrier => schedule.barrier(group),
            OperationKind::SendReceive if root == self.me => {
                schedule.send(operation.rows as u32, count);
            }
            OperationKind::SendReceive => schedule.receive(root, count),
        }
    }

    /// Copies this rank's input to its place, as it travels.
    pub(crate) fn load(&mut self, operation: &Operation, input: &[u8]) {
        let Some(span) = self.schedule.input else {
            return;
        };
        let size = operation.element_size();
        let place = &mut self.work.bytes_mut()[span.start * size..span.end() * size];
        convert_in(operation, place, input);
        if let (Some(dtype), true) = (operation.wire_type(), operation.reduce.is_some()) {
            reduce::scale(dtype, place, operation.prescale);
        }
    }

    /// As [`Engine::load`], of inputs that follow each other.
    pub(crate) fn load_parts<'a>(
        &mut self,
        operation: &Operation,
        parts: impl Iterator<Item = &'a [u8]>,
    ) {
        let Some(span) = self.schedule.input else {
            return;
        };
        let size = operation.element_size();
        let given = operation.dtype.map_or(1, crate::DType::size);
        let place = &mut self.work.bytes_mut()[span.start * size..span.end() * size];
        let mut at = 0;
        for part in parts {
            let end = at + part.len() / given * size;
            convert_in(operation, &mut place[at..end], part);
            at = end;
        }
        if let (Some(dtype), true) = (operation.wire_type(), operation.reduce.is_some()) {
            reduce::scale(dtype, place, operation.prescale);
        }
    }

    /// The input of a rank that has no data: what changes nothing.
    pub(crate) fn load_neutral(&mut self, operation: &Operation) {
        let Some(span) = self.schedule.input else {
            return;
        };
        let size = operation.element_size();
        let place = &mut self.work.bytes_mut()[span.start * size..span.end() * size];
        match (operation.wire_type(), operation.reduce) {
            (Some(dtype), Some(op)) => reduce::fill_neutral(dtype, op, place),
            _ => place.fill(0),
        }
    }

    /// A stretch of the result, from one element to before another one, as it travelled. It lies in one piece, as the
    /// results of all reductions on all elements do.
    pub(crate) fn result(&self, operation: &Operation, from: usize, to: usize) -> &[u8] {
        let size = operation.element_size();
        let start = self
            .schedule
            .outputs
            .first()
            .map_or(0, |output| output.from.start);
        &self.work.bytes()[(start + from) * size..(start + to) * size]
    }

    /// Copies the result to the caller. `T` is the type of the operation that was planned last.
    pub(crate) fn store<T: Element>(&self, operation: &Operation, result: &mut [T]) {
        let size = operation.element_size();
        for output in &self.schedule.outputs {
            let from = &self.work.bytes()[output.from.start * size..output.from.end() * size];
            let into = &mut result[output.to..output.to + output.from.len];
            reduce::store(into, operation.wire, from);
        }
    }

    /// Forgets the schedule.
    pub(crate) fn unplan(&mut self) {
        self.schedule.clear();
        self.made_for = None;
    }
}

fn fill_offsets(
    offsets: &mut Vec<usize>,
    counts: impl IntoIterator<Item = usize>,
) -> Option<usize> {
    offsets.clear();
    offsets.push(0);
    let mut total = 0_usize;
    for count in counts {
        total = total.checked_add(count)?;
        offsets.push(total);
    }
    Some(total)
}

/// Copies elements to the working buffer, as they travel.
fn convert_in(operation: &Operation, place: &mut [u8], input: &[u8]) {
    match (operation.dtype, operation.wire) {
        (Some(dtype), Some(wire)) => reduce::convert(wire, place, dtype, input),
        _ => copy::slice(input, place),
    }
}
