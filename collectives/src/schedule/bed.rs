//! The bed of tests: operations whose data are known, and what must hold whatever the algorithm.

use super::simulate::run;
use super::*;
use crate::operation::OperationKind as Kind;

/// One schedule that is reused, as the engine does: nothing of the previous operation may be left.
fn schedules(layout: &Layout, make: impl Fn(&mut Schedule, Group<'_>)) -> Vec<Schedule> {
    let mut schedule = Schedule::default();
    schedule.broadcast(Group::new(0, 7), Algorithm::Binomial, 3, 5);
    (0..layout.world())
        .map(|rank| {
            make(&mut schedule, Group::on(rank, layout));
            schedule.clone()
        })
        .collect()
}

pub(super) fn of_world(world: u32, make: impl Fn(&mut Schedule, Group<'_>)) -> Vec<Schedule> {
    schedules(&Layout::single(world), make)
}

fn offsets(counts: &[usize]) -> Vec<usize> {
    let mut offsets = vec![0];
    for count in counts {
        offsets.push(offsets[offsets.len() - 1] + count);
    }
    offsets
}

/// An operation, how it is done, and how long the data are: of each rank, where the length may differ.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub(super) kind: Kind,
    pub(super) algorithm: Algorithm,
    pub(super) root: u32,
    pub(super) count: usize,
    pub(super) shares: Vec<usize>,
    pub(super) finish: bool,
    pub(super) segment: usize,
}

impl Case {
    pub(super) fn new(kind: Kind, algorithm: Algorithm, world: u32, count: usize) -> Self {
        Self {
            kind,
            algorithm,
            root: 0,
            count,
            shares: vec![count; world as usize],
            finish: false,
            segment: count.max(1),
        }
    }

    pub(super) fn schedules(&self, layout: &Layout) -> Vec<Schedule> {
        let (algorithm, root, count) = (self.algorithm, self.root, self.count);
        let at = offsets(&self.shares);
        schedules(layout, |schedule, group| match self.kind {
            Kind::AllReduce => {
                schedule.all_reduce(group, algorithm, count, self.segment, self.finish);
            }
            Kind::Reduce => schedule.reduce(group, algorithm, root, count, self.finish),
            Kind::ReduceScatter => {
                schedule.reduce_scatter(group, algorithm, Offsets(&at), self.finish);
            }
            Kind::AllGather => schedule.all_gather(group, algorithm, Offsets(&at)),
            Kind::Gather => schedule.gather(group, algorithm, root, Offsets(&at)),
            Kind::Scatter => schedule.scatter(group, algorithm, root, Offsets(&at)),
            Kind::Broadcast => schedule.broadcast(group, algorithm, root, count),
            Kind::AllToAll => {
                let world = layout.world();
                let all = |len: &dyn Fn(u32) -> usize| {
                    offsets(&(0..world).map(len).collect::<Vec<usize>>())
                };
                let sent = all(&|to| self.block(group.rank, to));
                let received = all(&|from| self.block(from, group.rank));
                schedule.all_to_all(group, algorithm, Offsets(&sent), Offsets(&received));
            }
            _ => schedule.barrier(group),
        })
    }

    /// Elements that a rank has for another one in an all-to-all.
    fn block(&self, from: u32, to: u32) -> usize {
        self.shares[(from as usize * 3 + to as usize) % self.shares.len()]
    }

    /// What each rank gives, and what each one shall have.
    pub(super) fn data(&self, world: u32) -> [Vec<Vec<i64>>; 2] {
        let ranks = || 0..world;
        let all = |make: &dyn Fn(u32) -> Vec<i64>| ranks().map(make).collect::<Vec<_>>();
        let stretch = |name: i64, len: usize| (0..len as i64).map(|i| name + i).collect();
        let total = self.shares.iter().sum();
        // Rank r has `(r + 1) (i + 3)`.
        let times = |times: i64, len: usize| (0..len as i64).map(|i| times * (i + 3)).collect();
        let n = i64::from(world);
        let sum = |len| -> Vec<i64> {
            let sum: Vec<i64> = times(n * (n + 1) / 2, len);
            let by = if self.finish { n } else { 1 };
            sum.iter().map(|value| value / by).collect()
        };
        let at_root = |values: &[i64]| {
            let of = |rank| if rank == self.root { values } else { &[] };
            all(&|rank| of(rank).to_vec())
        };
        let named = all(&|rank| stretch(i64::from(rank) * 1000, self.shares[rank as usize]));
        let terms = |len| all(&|rank| times(i64::from(rank) + 1, len));
        match self.kind {
            Kind::AllReduce => [terms(self.count), all(&|_| sum(self.count))],
            Kind::Reduce => [terms(self.count), at_root(&sum(self.count))],
            Kind::ReduceScatter => {
                let (at, sum) = (offsets(&self.shares), sum(total));
                let part = |rank: u32| sum[at[rank as usize]..at[rank as usize + 1]].to_vec();
                [terms(total), all(&part)]
            }
            Kind::AllGather => [named.clone(), all(&|_| named.concat())],
            Kind::Gather => [named.clone(), at_root(&named.concat())],
            Kind::Scatter => [at_root(&named.concat()), named],
            Kind::Broadcast => {
                let values: Vec<i64> = stretch(1, self.count);
                [at_root(&values), all(&|_| values.clone())]
            }
            Kind::AllToAll => {
                let name = |from, to| i64::from(from) * 10_000 + i64::from(to) * 100;
                let block =
                    |from, to| -> Vec<i64> { stretch(name(from, to), self.block(from, to)) };
                [
                    all(&|me| ranks().flat_map(|to| block(me, to)).collect()),
                    all(&|me| ranks().flat_map(|from| block(from, me)).collect()),
                ]
            }
            _ => [all(&|_| Vec::new()), all(&|_| Vec::new())],
        }
    }

    /// Every rank has what it shall have, also where the result is not copied from the working buffer. Returns what was sent.
    pub(super) fn check(&self, layout: &Layout) -> (Vec<Schedule>, Vec<usize>) {
        let what = format!("{self:?} on {layout:?}");
        let all = self.schedules(layout);
        let [inputs, expected] = self.data(layout.world());
        // All that is in the buffers in the end.
        let whole = |schedule: &Schedule| {
            let from = Span::between(0, schedule.buffer);
            let outputs = vec![Output { from, to: 0 }];
            Schedule {
                outputs,
                ..schedule.clone()
            }
        };
        let whole: Vec<Schedule> = all.iter().map(whole).collect();
        let world = all.len() as i64;
        let (left, sent) = run(&whole, &inputs, |a, b| a + b, |value| value / world).unwrap();
        for (rank, schedule) in all.iter().enumerate() {
            let (left, input, expected) = (&left[rank], &inputs[rank], &expected[rank]);
            assert!(schedule.input.is_some() || input.is_empty(), "{what}");
            let mut result = vec![0; schedule.outputs.iter().map(|output| output.from.len).sum()];
            for Output { from, to } in &schedule.outputs {
                result[*to..to + from.len].copy_from_slice(&left[from.start..from.end()]);
            }
            assert_eq!(result, *expected, "{what}: rank {rank}");
            if schedule.is_into(expected.len()) {
                assert_eq!(left, expected, "{what}: rank {rank}");
            } else if let Some(written) = schedule.is_apart(input.len(), expected.len()) {
                let beside = |at: &usize| *at < written.start || *at >= written.end();
                let is_kept = (0..input.len())
                    .filter(beside)
                    .all(|at| left[at] == input[at]);
                assert!(is_kept, "{what}: rank {rank}");
                // What is of the input is there before the rest comes.
                let mut result = left[written.start..written.end()].to_vec();
                for Output { from, to } in &schedule.outputs {
                    if from.start < written.start || from.end() > written.end() {
                        let given = &input[from.start..from.end()];
                        result[*to..to + from.len].copy_from_slice(given);
                    }
                }
                assert_eq!(result, *expected, "{what}: rank {rank}");
            }
        }
        if self.kind == Kind::AllReduce {
            assert!(same_order(&all, self.count), "{what}");
        }
        (all, sent)
    }
}

/// Whether all ranks combined values in the same order, so that sums of floats have the same bits: by hashes of expression trees.
fn same_order(schedules: &[Schedule], count: usize) -> bool {
    let inputs: Vec<Vec<u64>> = (0..schedules.len() as u64)
        .map(|rank| (0..count as u64).map(|i| rank << 32 | i).collect())
        .collect();
    let tree = |a: u64, b: u64| {
        a.wrapping_mul(6_364_136_223_846_793_005)
            .rotate_left(17)
            .wrapping_add(b.wrapping_mul(1_442_695_040_888_963_407) ^ 0x9e37)
    };
    let (results, _) = run(schedules, &inputs, tree, |value| value).unwrap();
    results.windows(2).all(|pair| pair[0] == pair[1])
}
