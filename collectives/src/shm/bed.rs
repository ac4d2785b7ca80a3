//! The bed of tests: ranks of one process, operations of all of them, and steps in any order.

use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;

use kolo_transport::ids::{Generation, JobId};

use super::arena::{Arena, Outcome, Own};
use super::map::{Map, Owner, Place};
use crate::element::{Element, bytes_of, bytes_of_mut};
use crate::operation::{Operation, OperationKind as Kind, Tag};
use crate::{DType, ReduceOp};

/// The same numbers in every run.
pub(super) struct Numbers(pub(super) u64);

impl Numbers {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = self.0.wrapping_add(1_442_695_040_888_963_407);
        (self.0 ^ (self.0 >> 29)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    pub(super) fn below(&mut self, end: usize) -> usize {
        (self.next() >> 33) as usize % end
    }
}

pub(super) fn owner(world: usize) -> Owner {
    Owner {
        job: JobId(5),
        generation: Generation(2),
        world: world as u32,
    }
}

/// The ranks of one memory, each with a mapping of its own; more than there are processors if they are `crowded`.
pub(super) fn ranks(world: usize, crowded: bool) -> Vec<Arena> {
    let owner = owner(world);
    let (_map, descriptor) = Map::create(owner, crowded).unwrap();
    (0..world as u32)
        .map(|rank| {
            Arena::new(
                Arc::new(Map::open(descriptor.as_fd(), owner).unwrap()),
                rank,
                Arc::default(),
            )
        })
        .collect()
}

pub(super) fn pair() -> [Arena; 2] {
    ranks(2, false).try_into().unwrap()
}

pub(super) fn tag(operation: u64) -> Tag {
    Tag::new(0, operation)
}

/// An all-reduce of bytes.
pub(super) fn sum(count: u64) -> Operation {
    Operation {
        reduce: Some(ReduceOp::Sum),
        ..Operation::new(Kind::AllReduce, Some(DType::U8), count)
    }
}

/// In no value and in no sum of values.
const NOISE: u8 = 0xfe;
/// From so many bytes on something is withheld.
pub(super) const FROM: usize = 4 << 10;
/// Values come again after so many.
const PERIOD: usize = 41;
/// Of a reduce-scatter; not the same for all ranks.
pub(super) const ROWS: usize = 7;

/// One operation of all ranks: what each one gives, and has in the end.
pub(super) struct Case<T> {
    pub(super) request: Operation,
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

fn value(rank: usize, at: usize) -> usize {
    (rank * 13 + at * 7) % PERIOD
}

/// A stretch of what a rank has.
fn values<T: Element + From<u8>>(rank: usize, range: Range<usize>) -> Vec<T> {
    repeated(|at| value(rank, at), range)
}

impl<T: Element + From<u8>> Case<T> {
    /// In which a rank gives so many elements, or a few less.
    pub(super) fn new(kind: Kind, world: usize, root: usize, given: usize) -> Self {
        let all = |each: &dyn Fn(usize) -> Vec<T>| (0..world).map(each).collect::<Vec<_>>();
        let at_root = |values: &[T]| all(&|rank| if rank == root { values } else { &[] }.to_vec());
        let mut request = Operation::new(kind, Some(T::DTYPE), given as u64);
        let (mut offsets, mut own) = (Vec::new(), vec![0..0; world]);
        let sum = |at: usize| (0..world).map(|rank| value(rank, at)).sum();
        let each = given / world;
        let part = |rank: usize| rank * each..(rank + 1) * each;
        let whole = all(&|rank| values(rank, 0..given));
        let (inputs, results) = match kind {
            Kind::AllReduce | Kind::Reduce => {
                request.reduce = Some(ReduceOp::Sum);
                let sum = repeated(sum, 0..given);
                if kind == Kind::AllReduce {
                    (whole, vec![sum; world])
                } else {
                    request.root = Some(root as u32);
                    (whole, at_root(&sum))
                }
            }
            Kind::ReduceScatter => {
                let width = given / ROWS;
                request.count = (ROWS * width) as u64;
                (request.rows, request.reduce) = (ROWS as u64, Some(ReduceOp::Sum));
                let first = |rank: usize| rank * (ROWS / world) + rank.min(ROWS % world);
                let rows = |rank: usize| first(rank) * width..first(rank + 1) * width;
                own = (0..world).map(rows).collect();
                let inputs = all(&|rank| values(rank, 0..ROWS * width));
                (inputs, all(&|rank| repeated(sum, rows(rank))))
            }
            Kind::Broadcast => {
                request.root = Some(root as u32);
                (at_root(&whole[root]), vec![whole[root].clone(); world])
            }
            Kind::AllGather => (whole.clone(), vec![whole.concat(); world]),
            Kind::AllToAll => {
                request.count = each as u64;
                own = (0..world).map(part).collect();
                let parts = |to| all(&|from| values(from, part(to))).concat();
                (all(&|rank| values(rank, 0..each * world)), all(&parts))
            }
            Kind::Scatter => {
                (request.count, request.root) = (each as u64, Some(root as u32));
                own[root] = part(root);
                let inputs = at_root(&values(root, 0..each * world));
                (inputs, all(&|rank| values(root, part(rank))))
            }
            _ => {
                let count = |rank: usize| match kind {
                    Kind::GatherVarcount if rank != root => given / 2 * ((rank + root) % 3),
                    _ => given,
                };
                request.root = Some(root as u32);
                own[root] = 0..given;
                let inputs = all(&|rank| values(rank, 0..count(rank)));
                if kind == Kind::GatherVarcount {
                    offsets = (0..=world).map(|end| (0..end).map(count).sum()).collect();
                    request.count = offsets[world] as u64;
                }
                let gathered = inputs.concat();
                (inputs, at_root(&gathered))
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

    /// Steps of ranks in any order, some times in a row: one rank may be in the next operation while others are in this one.
    pub(super) fn play(&self, ranks: &mut [Arena], operations: Range<u64>, numbers: &mut Numbers) {
        let kind = self.request.kind;
        let world = ranks.len();
        let streams = ranks[0].streams(&self.request);
        let noisy = self.make_noise(ranks);
        let mut places: Vec<Played<T>> = (0..world).map(|_| Played::default()).collect();
        let all = operations.end - operations.start;
        while places.iter().any(|place| place.ended < all) {
            let me = numbers.below(world);
            let (arena, place) = (&mut ranks[me], &mut places[me]);
            let (input, expected) = (&self.inputs[me], &self.results[me]);
            if place.ended == all {
                continue;
            }
            // The result goes over the input.
            let is_root = self.request.root.is_none_or(|root| root == me as u32);
            let over = place.ended % 2 == 1
                && (kind == Kind::AllReduce || kind == Kind::Reduce && is_root);
            let begins = place.begun == place.ended;
            if begins {
                place.begun += 1;
                let has_none = streams && kind == Kind::Broadcast && is_root;
                place.result = match over {
                    true => input.clone(),
                    false if has_none => Vec::new(),
                    false => vec![T::default(); expected.len()],
                };
            }
            let tag = tag(operations.start + place.ended);
            let given: &[u8] = if over && streams {
                &[]
            } else {
                bytes_of(input)
            };
            let into = if streams {
                bytes_of_mut(&mut place.result).unwrap()
            } else {
                &mut []
            };
            let outcome = match (begins, over && streams) {
                (true, true) => arena.begin_in_place(tag, &self.request, false, into, true),
                (true, false) => arena.begin(tag, &self.request, false, &self.offsets, given, into),
                (false, _) => arena.advance(given, into),
            };
            if begins && all == 1 {
                self.check_noise(arena, me, noisy[me]);
            }
            if outcome.unwrap() == Outcome::Ready {
                let own = if over {
                    Own::InResult
                } else {
                    Own::At(bytes_of(input))
                };
                arena.store(&self.offsets, own, &mut place.result);
                let is_right = place.result == *expected || place.result.is_empty();
                assert!(is_right, "{} on rank {me} of {world}", self.request);
                place.ended += 1;
            }
        }
    }

    /// Where ranks give next. Returns where that is.
    fn make_noise(&self, ranks: &[Arena]) -> Vec<usize> {
        let make = |(rank, input): (usize, &Vec<T>)| {
            let noise = vec![NOISE; size_of_val(&input[..])];
            let place = ranks[rank].next_place(noise.len());
            ranks[0].map().write(rank, Place::Area, place, &noise);
            place
        };
        self.inputs.iter().enumerate().map(make).collect()
    }

    /// What a rank alone needs it does not give: the noise is still in its place.
    fn check_noise(&self, arena: &Arena, rank: usize, place: usize) {
        let (own, size) = (&self.own[rank], size_of::<T>());
        let given = size * self.inputs[rank].len();
        if arena.streams(&self.request) || given < FROM {
            return;
        }
        let mut held = vec![0; size * own.len()];
        let at = place + size * own.start;
        arena.map().read(rank, Place::Area, at, &mut held);
        let is_noise = held.iter().all(|byte| *byte == NOISE);
        assert!(
            is_noise,
            "{}: rank {rank} gives what it alone needs",
            self.request
        );
    }
}

/// Where a rank is.
#[derive(Default)]
struct Played<T> {
    begun: u64,
    ended: u64,
    result: Vec<T>,
}
