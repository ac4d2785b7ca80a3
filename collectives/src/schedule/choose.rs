//! Which algorithm, by operation, layout, bytes and what links take. A function of what all ranks know alike.

use super::cost::{Model, predict};
use super::{Algorithm, Shape};
use crate::operation::{OperationKind, ReduceOp};

/// What algorithms are chosen by. The same on every rank, or operations are a mismatch.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Tuning {
    /// What links and processors take. Default: [`Model::default`].
    pub model: Model,
    /// Use this algorithm for every operation that it can do, whatever the size. Default: none.
    pub force: Option<Algorithm>,
    /// Cut all-reduces around a ring into segments of two to this power bytes. Default: by the number of ranks.
    pub segment: Option<u8>,
}

/// Up to so many bytes an algorithm is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Row {
    to: u64,
    algorithm: Algorithm,
}

/// The choices for one world: made when a kind of operation is first asked for, then looked up.
///
/// Bytes are as [`predict`] takes them. Those of [`OperationKind::AllToAllVarcount`] count as 0, because no two ranks
/// know the same.
#[derive(Debug, Clone)]
pub struct Choices {
    tuning: Tuning,
    shape: Shape,
    /// By kind; Adasum has a place of its own, before them.
    rows: [Vec<Row>; OperationKind::ALL.len() + 1],
}

/// A difference of less is rounding.
const NOISE: f64 = 1.0 - 1e-6;

/// The least segment of a ring, and the least message in it.
const RING_SEGMENT: u64 = 1 << 20;
const RING_MESSAGE: u64 = 256 << 10;

/// The least message of a ring whose segment is set.
const RING_LEAST: u64 = 4096;

/// From here on nothing changes any more, it is thought.
const LARGEST: u32 = 38;

impl Choices {
    /// None is made yet.
    #[must_use]
    pub fn new(tuning: Tuning, shape: Shape) -> Self {
        Self {
            tuning,
            shape,
            rows: std::array::from_fn(|_| Vec::new()),
        }
    }

    /// What they are made by.
    #[must_use]
    pub fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// What they are made for.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The algorithm for an operation of so many bytes.
    pub fn choose(&mut self, kind: OperationKind, op: Option<ReduceOp>, bytes: u64) -> Algorithm {
        if self.shape.world <= 1 {
            return Algorithm::Local;
        }
        let adasum = op == Some(ReduceOp::Adasum);
        let able = able(kind, adasum);
        if let Some(forced) = self.tuning.force.filter(|forced| able.contains(forced)) {
            return forced;
        }
        if let [only] = able {
            return *only;
        }
        let bytes = if kind == OperationKind::AllToAllVarcount {
            0
        } else {
            bytes
        };
        let rows = self.rows(kind, adasum);
        let row = rows.partition_point(|row| row.to < bytes);
        rows[row.min(rows.len() - 1)].algorithm
    }

    /// The segment of an all-reduce of so many bytes around a ring, as two to which power of bytes; 0 for the others.
    #[must_use]
    pub fn segment(&self, kind: OperationKind, algorithm: Algorithm, bytes: u64) -> u8 {
        if (kind, algorithm) != (OperationKind::AllReduce, Algorithm::Ring) {
            return 0;
        }
        // Less than a page for each rank would make many messages, and a long schedule, for nothing.
        let least = u64::from(self.shape.world) * RING_LEAST;
        let given = |power: u8| power.max(log2_up(least));
        let power = self
            .tuning
            .segment
            .map_or_else(|| ring_segment(self.shape), given);
        if bytes >> power.min(40) < 2 {
            return 0;
        }
        power.clamp(3, 40)
    }

    fn rows(&mut self, kind: OperationKind, adasum: bool) -> &[Row] {
        let index = if adasum { 0 } else { usize::from(kind.code()) };
        if self.rows[index].is_empty() {
            self.rows[index] = self.make(kind, adasum);
        }
        &self.rows[index]
    }

    /// The cheapest algorithm for a size. Of equals the first.
    fn best(&self, kind: OperationKind, adasum: bool, bytes: u64) -> Algorithm {
        let bytes = bytes as f64;
        let cost = |algorithm: Algorithm| {
            predict(&self.tuning.model, self.shape, kind, algorithm, bytes).seconds
                + if adasum && algorithm == Algorithm::Halving {
                    // The scalar products travel by themselves: 1 + 2 + ... + log n times.
                    let class = if self.shape.hosts > 1 {
                        self.tuning.model.across
                    } else {
                        self.tuning.model.inside
                    };
                    let levels = f64::from(self.shape.world.ilog2());
                    levels * (levels + 1.0) / 2.0 * (class.alpha + class.overhead)
                } else {
                    0.0
                }
        };
        let mut best: Option<(Algorithm, f64)> = None;
        for &algorithm in able(kind, adasum) {
            let cost = cost(algorithm);
            if best.is_none_or(|(_, least)| cost < least * NOISE) {
                best = Some((algorithm, cost));
            }
        }
        best.map_or(Algorithm::Ring, |(algorithm, _)| algorithm)
    }

    fn make(&self, kind: OperationKind, adasum: bool) -> Vec<Row> {
        let mut rows: Vec<Row> = Vec::new();
        let mut algorithm = self.best(kind, adasum, 0);
        let mut known = 0;
        // Two sizes for each power of two; where the choice differs between neighbours, the place is searched.
        for step in 6..2 * LARGEST {
            let size = if step % 2 == 0 {
                1 << (step / 2)
            } else {
                3 << (step / 2 - 1)
            };
            while self.best(kind, adasum, size) != algorithm {
                let (mut same, mut other) = (known, size);
                while other - same > 1 {
                    let middle = same + (other - same) / 2;
                    if self.best(kind, adasum, middle) == algorithm {
                        same = middle;
                    } else {
                        other = middle;
                    }
                }
                rows.push(Row {
                    to: same,
                    algorithm,
                });
                known = other;
                algorithm = self.best(kind, adasum, other);
            }
            known = size;
        }
        rows.push(Row {
            to: u64::MAX,
            algorithm,
        });
        rows
    }
}

fn able(kind: OperationKind, adasum: bool) -> &'static [Algorithm] {
    if adasum {
        Algorithm::ADASUM
    } else {
        Algorithm::able(kind)
    }
}

/// What the ranks of a ring work on at once, two segments, fits the second-level cache of most processors, but their
/// messages stay long beside what a message costs.
fn ring_segment(shape: Shape) -> u8 {
    let messages = u64::from(shape.world) * RING_MESSAGE;
    log2_up(messages.max(RING_SEGMENT))
}

#[allow(clippy::cast_possible_truncation)] // it is below 64
fn log2_up(number: u64) -> u8 {
    number.next_power_of_two().ilog2() as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUM: Option<ReduceOp> = Some(ReduceOp::Sum);

    #[test]
    fn a_world_of_one_has_nothing_to_choose_and_rows_are_few_and_cover_all_sizes() {
        let one = Shape::even(1, 1);
        let chosen = Choices::new(Tuning::default(), one).choose(OperationKind::AllReduce, SUM, 9);
        assert_eq!(chosen, Algorithm::Local);
        for (ranks, hosts) in [(2, 1), (7, 1), (24, 3), (65_536, 8192)] {
            let mut choices = Choices::new(Tuning::default(), Shape::even(ranks, hosts));
            for kind in OperationKind::ALL {
                let rows = choices.rows(kind, false).to_vec();
                assert!(rows.len() < 10, "{kind}: {rows:?}");
                assert_eq!(rows[rows.len() - 1].to, u64::MAX);
                let changes = |pair: &[Row]| {
                    pair[0].to < pair[1].to && pair[0].algorithm != pair[1].algorithm
                };
                assert!(rows.windows(2).all(changes), "{kind}: {rows:?}");
            }
        }
    }

    #[test]
    fn the_table_has_the_cheapest_of_all() {
        let kind = OperationKind::AllReduce;
        for (ranks, hosts) in [(3, 1), (16, 2), (40, 5), (64, 64)] {
            let shape = Shape::even(ranks, hosts);
            let mut choices = Choices::new(Tuning::default(), shape);
            for bytes in (0..34).map(|exponent| 5_u64 << exponent) {
                let chosen = choices.choose(kind, SUM, bytes);
                let cost = |algorithm| {
                    predict(&Model::default(), shape, kind, algorithm, bytes as f64).seconds
                };
                for &other in Algorithm::able(kind) {
                    // A choice that changes twice between two sizes of the grid is missed, and costs next to nothing.
                    assert!(
                        cost(chosen) <= cost(other) * 1.02,
                        "{bytes} bytes, {ranks} ranks, {hosts} hosts: {chosen} is dearer than {other}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_forced_algorithm_is_used_where_it_can_be() {
        let tuning = Tuning {
            force: Some(Algorithm::Ring),
            ..Tuning::default()
        };
        let mut choices = Choices::new(tuning, Shape::even(4, 1));
        for (kind, expected) in [
            (OperationKind::AllReduce, Algorithm::Ring),
            (OperationKind::AllGather, Algorithm::Ring),
            (OperationKind::Broadcast, Algorithm::Binomial),
            (OperationKind::Barrier, Algorithm::Dissemination),
        ] {
            assert_eq!(choices.choose(kind, None, 4), expected);
        }
        let adasum = Some(ReduceOp::Adasum);
        let chosen = choices.choose(OperationKind::AllReduce, adasum, 4);
        assert!(Algorithm::ADASUM.contains(&chosen), "{chosen}");
    }
}
