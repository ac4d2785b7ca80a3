//! From which lengths on an operation is done in another way.

use super::*;

/// No more bytes of one rank, and of all together.
const MOST: usize = 26 << 20;
const MOST_OF_ALL: usize = 64 << 20;

impl Sample {
    /// What the ranks agree on, with so many elements: of a rank, or of its part.
    fn operation(&self, length: usize) -> Operation {
        let kind = self.what.kind();
        let is_sum = matches!(
            kind,
            OperationKind::AllGatherVarcount
                | OperationKind::GatherVarcount
                | OperationKind::ScatterVarcount
        );
        let count = length * if is_sum { self.world as usize } else { 1 };
        Operation {
            reduce: self.op,
            root: self.root.map(|root| root.0),
            rows: if kind == OperationKind::ReduceScatter {
                length as u64
            } else {
                0
            },
            ..Operation::new(kind, Some(self.dtype), count as u64)
        }
    }

    /// The way in shared memory, if it is one.
    pub(crate) fn way(&self) -> Option<&'static str> {
        self.way_of(self.length)
    }

    fn way_of(&self, length: usize) -> Option<&'static str> {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        (self.kind == Kind::Shared)
            .then(|| way_in_shared_memory(&self.operation(length), self.world, processors))?
    }

    /// As [`Sample::way`], on a machine with so many processors.
    pub(crate) fn way_with(&self, processors: usize) -> Option<&'static str> {
        way_in_shared_memory(&self.operation(self.length), self.world, processors)
    }

    /// The first lengths at which something else is done than at the one before.
    pub(crate) fn switches(&self) -> Vec<usize> {
        let mut choices = Choices::new(self.tuning(), Shape::even(self.world, 1));
        let (kind, size) = (self.what.kind(), self.dtype.size());
        let world = self.world as usize;
        let shares = match kind {
            OperationKind::AllReduce
            | OperationKind::Broadcast
            | OperationKind::Reduce
            | OperationKind::ReduceScatter => 1,
            _ => world,
        };
        let mut way = |length: usize| {
            let bytes = (length * shares * size) as u64;
            let algorithm = choices.choose(kind, self.op, bytes);
            let segment = choices.segment(kind, algorithm, bytes);
            match self.way_of(length) {
                Some(way) => (way, None),
                None => ("", Some((algorithm, segment))),
            }
        };
        let most = (MOST / size / shares).min(MOST_OF_ALL / size / world);
        let mut switches = Vec::new();
        let mut known = 0;
        // Where neighbours differ the place is searched.
        let grid = (0..).map(|step| (2 + step % 2) << (step / 2));
        for length in grid.take_while(|length| *length <= most) {
            let (mut same, mut other) = (known, length);
            if way(same) != way(other) {
                while other - same > 1 {
                    let middle = usize::midpoint(same, other);
                    if way(middle) == way(known) {
                        same = middle;
                    } else {
                        other = middle;
                    }
                }
                switches.push(other);
            }
            known = length;
        }
        switches
    }
}
