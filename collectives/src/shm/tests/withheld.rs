//! What a rank alone needs it does not give: noise is in its place, and no result shows it.

use std::ops::Range;

use super::{Arena, Operation, OperationKind, Outcome, Own, Place, ReduceOp, number, ranks};
use crate::element::{Element, bytes_of};

/// In no value and in no sum of values.
const NOISE: u8 = 0xfe;
/// From so many bytes on something is withheld.
const FROM: usize = 4 << 10;
/// So many bytes are given in another part of the area.
const LONG: usize = 8 << 10;
/// Copies of so many bytes go in pieces.
const PIECES: usize = 512 << 10;
/// Values come again after so many.
const PERIOD: usize = 41;
/// Of a reduce-scatter; not the same for all ranks.
const ROWS: usize = 7;

const KINDS: [OperationKind; 5] = [
    OperationKind::ReduceScatter,
    OperationKind::AllToAll,
    OperationKind::Scatter,
    OperationKind::Gather,
    OperationKind::GatherVarcount,
];

/// One operation on all ranks.
struct Case<T> {
    request: Operation,
    offsets: Vec<usize>,
    inputs: Vec<Vec<T>>,
    /// The part of each input that nobody else needs.
    own: Vec<Range<usize>>,
    results: Vec<Vec<T>>,
}

fn repeated<T: Element + From<u8>>(value: impl Fn(usize) -> usize, range: Range<usize>) -> Vec<T> {
    let once: Vec<T> = (0..PERIOD).map(|at| T::from(value(at) as u8)).collect();
    once.repeat(range.end.div_ceil(PERIOD))[range].to_vec()
}

/// A stretch of what a rank has.
fn values<T: Element + From<u8>>(rank: usize, range: Range<usize>) -> Vec<T> {
    repeated(|at| value(rank, at), range)
}

fn value(rank: usize, at: usize) -> usize {
    (rank * 13 + at * 7) % PERIOD
}

impl<T: Element + From<u8>> Case<T> {
    /// In which a rank gives so many elements, or a few less.
    fn new(kind: OperationKind, world: usize, root: usize, given: usize) -> Self {
        let everyone = 0..world;
        let all = |each: &dyn Fn(usize) -> Vec<T>| everyone.clone().map(each).collect();
        let own = |each: &dyn Fn(usize) -> Range<usize>| everyone.clone().map(each).collect();
        let mut request = Operation::new(kind, Some(T::DTYPE), given as u64);
        let mut offsets = Vec::new();
        let (inputs, own, results) = match kind {
            OperationKind::ReduceScatter => {
                let width = given / ROWS;
                request.count = (ROWS * width) as u64;
                (request.rows, request.reduce) = (ROWS as u64, Some(ReduceOp::Sum));
                let first = |rank: usize| rank * (ROWS / world) + rank.min(ROWS % world);
                let rows = |rank: usize| first(rank) * width..first(rank + 1) * width;
                let sum = |at: usize| (0..world).map(|rank| value(rank, at)).sum();
                (
                    all(&|rank| values(rank, 0..ROWS * width)),
                    own(&rows),
                    all(&|rank| repeated(sum, rows(rank))),
                )
            }
            OperationKind::AllToAll => {
                let each = given / world;
                request.count = each as u64;
                let part = |rank: usize| rank * each..(rank + 1) * each;
                let received = |rank: usize| -> Vec<T> {
                    let parts: Vec<Vec<T>> = all(&|from| values(from, part(rank)));
                    parts.concat()
                };
                (
                    all(&|rank| values(rank, 0..each * world)),
                    own(&part),
                    all(&received),
                )
            }
            OperationKind::Scatter => {
                let each = given / world;
                (request.count, request.root) = (each as u64, Some(root as u32));
                let part = |rank: usize| rank * each..(rank + 1) * each;
                let of_root = |rank: usize| if rank == root { each * world } else { 0 };
                (
                    all(&|rank| values(rank, 0..of_root(rank))),
                    own(&|rank| if rank == root { part(rank) } else { 0..0 }),
                    all(&|rank| values(root, part(rank))),
                )
            }
            _ => {
                let count = |rank: usize| match kind {
                    OperationKind::Gather => given,
                    _ if rank == root => given,
                    _ => given / 2 * ((rank + root) % 3),
                };
                request.root = Some(root as u32);
                if kind == OperationKind::GatherVarcount {
                    offsets = (0..=world).map(|end| (0..end).map(count).sum()).collect();
                    request.count = offsets[world] as u64;
                }
                let inputs: Vec<Vec<T>> = all(&|rank| values(rank, 0..count(rank)));
                let gathered = inputs.concat();
                let results = all(&|rank| {
                    if rank == root {
                        gathered.clone()
                    } else {
                        Vec::new()
                    }
                });
                let own = own(&|rank| if rank == root { 0..given } else { 0..0 });
                (inputs, own, results)
            }
        };
        Self {
            request,
            offsets,
            inputs,
            own,
            results,
        }
    }

    /// Runs it on all ranks, among noise.
    fn run(&self, ranks: &mut [Arena], operation: u64) {
        let (tag, request) = (number(operation), &self.request);
        let map = std::sync::Arc::clone(&ranks[0].map);
        let size = size_of::<T>();
        let places: Vec<usize> = ranks
            .iter()
            .zip(&self.inputs)
            .map(|(rank, input)| rank.next_place(size * input.len()))
            .collect();
        for (rank, input) in self.inputs.iter().enumerate() {
            let noise = vec![NOISE; size * input.len()];
            map.write(rank, Place::Area, places[rank], &noise);
        }
        for (rank, input) in ranks.iter_mut().zip(&self.inputs) {
            rank.begin(tag, request, false, &self.offsets, bytes_of(input), &mut [])
                .unwrap();
        }
        for (rank, own) in self.own.iter().enumerate() {
            if size * self.inputs[rank].len() >= FROM {
                // Nothing was written there.
                let mut held = vec![0; size * own.len()];
                let at = places[rank] + size * own.start;
                map.read(rank, Place::Area, at, &mut held);
                let noise = held.iter().all(|byte| *byte == NOISE);
                assert!(noise, "{request}: rank {rank} gives what it alone needs");
            }
        }
        for (me, rank) in ranks.iter_mut().enumerate() {
            let input = bytes_of(&self.inputs[me]);
            assert_eq!(rank.advance(input, &mut []), Ok(Outcome::Ready));
            let mut result = vec![T::default(); self.results[me].len()];
            rank.store(&self.offsets, Own::At(input), &mut result);
            let right = result == self.results[me];
            assert!(right, "{request} of {:?} at rank {me}", self.own);
        }
    }
}

fn check<T: Element + From<u8>, const N: usize>() {
    let mut ranks = ranks::<N>();
    let mut operation = 0;
    for kind in KINDS {
        let unit = match kind {
            OperationKind::ReduceScatter => ROWS,
            OperationKind::AllToAll | OperationKind::Scatter => N,
            _ => 1,
        };
        // Elements, around what is given in whole, and around what is given in another place.
        let [from, slot, most] = [FROM, LONG, PIECES].map(|bytes| bytes / size_of::<T>());
        let lengths = [
            from - 1,
            from,
            from + unit,
            slot - 1,
            slot,
            slot + unit,
            31 * slot + slot / 3,
            most - 1,
        ];
        for (index, given) in lengths.into_iter().enumerate() {
            let root = index % N;
            Case::<T>::new(kind, N, root, given).run(&mut ranks, operation);
            operation += 1;
        }
    }
}

#[test]
fn what_is_withheld_is_never_read() {
    check::<u8, 2>();
    check::<u32, 2>();
    check::<u8, 3>();
    check::<u32, 3>();
    check::<u8, 5>();
    check::<u32, 5>();
}
