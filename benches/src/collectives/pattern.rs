//! The values that are given and expected: small whole numbers, so that sums are exact in any order.
//!
//! Value `i` of a rank in a round is `i % 1024` plus an offset that differs between ranks and from round to round, so what an
//! earlier operation left in a buffer is never taken for a result.

use super::wire::Operation;

fn offset_of(rank: usize, round: u32) -> u32 {
    (rank as u32)
        .wrapping_mul(131)
        .wrapping_add(round.wrapping_mul(29))
        & 1023
}

fn fill(values: &mut [f32], rank: usize, round: u32) {
    let offset = offset_of(rank, round);
    for (value, i) in values.iter_mut().zip(0_u32..) {
        *value = ((i & 1023) + offset) as f32;
    }
}

/// Counts what is not `times` times the pattern from `first` on plus `offset`.
fn differ(values: &[f32], first: usize, times: u32, offset: u32) -> u64 {
    let first = first as u32;
    values
        .iter()
        .zip(0_u32..)
        .map(|(value, i)| {
            let expected = ((first.wrapping_add(i) & 1023) * times + offset) as f32;
            u64::from(value.to_bits() != expected.to_bits())
        })
        .sum()
}

/// One rank's part in a series of operations.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub(crate) operation: Operation,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    /// Values: see [`Operation::share`].
    pub(crate) share: usize,
}

/// Bytes of what all ranks give and get, with shares of so many values.
pub(crate) fn memory(operation: Operation, ranks: u32, share: u64) -> u64 {
    let part = Part {
        operation,
        rank: 0,
        ranks: ranks as usize,
        share: share as usize,
    };
    let values = (part.given() + part.gotten()) as u64;
    values * size_of::<f32>() as u64 * u64::from(ranks)
}

impl Part {
    /// The root goes round.
    pub(crate) fn root(&self, round: u32) -> usize {
        round as usize % self.ranks
    }

    /// Values that this rank gives.
    pub(crate) fn given(&self) -> usize {
        match self.operation {
            Operation::Scatter | Operation::ReduceScatter | Operation::AllToAll => {
                self.share * self.ranks
            }
            _ => self.share,
        }
    }

    /// Values that this rank gets in memory of their own; 0 if they come where it gave its own.
    pub(crate) fn gotten(&self) -> usize {
        match self.operation {
            Operation::AllGather | Operation::Gather | Operation::AllToAll => {
                self.share * self.ranks
            }
            Operation::Scatter | Operation::ReduceScatter | Operation::SendReceive => self.share,
            _ => 0,
        }
    }

    pub(crate) fn is_root(&self, round: u32) -> bool {
        self.root(round) == self.rank
    }

    /// The other rank of a pair, which sends after it has received if it is the higher one.
    pub(crate) fn partner(&self) -> usize {
        self.rank ^ 1
    }

    pub(crate) fn prepare(&self, give: &mut [f32], round: u32) {
        let of_root = matches!(self.operation, Operation::Broadcast | Operation::Scatter);
        if !of_root || self.is_root(round) {
            fill(give, self.rank, round);
        }
    }

    /// The number of wrong values in a result. Only the root has one of a reduce or gather.
    pub(crate) fn check(&self, get: &[f32], round: u32) -> u64 {
        let times = self.ranks as u32;
        let sum = || (0..self.ranks).map(|rank| offset_of(rank, round)).sum();
        let by_rank = |first: usize| {
            get.chunks(self.share.max(1))
                .zip(0..)
                .map(|(part, rank)| differ(part, first, 1, offset_of(rank, round)))
                .sum()
        };
        match self.operation {
            Operation::Reduce | Operation::Gather if !self.is_root(round) => 0,
            Operation::AllReduce | Operation::Reduce => differ(get, 0, times, sum()),
            Operation::ReduceScatter => differ(get, self.rank * self.share, times, sum()),
            Operation::Broadcast => differ(get, 0, 1, offset_of(self.root(round), round)),
            Operation::Scatter => {
                let offset = offset_of(self.root(round), round);
                differ(get, self.rank * self.share, 1, offset)
            }
            Operation::SendReceive => differ(get, 0, 1, offset_of(self.partner(), round)),
            Operation::AllGather | Operation::Gather => by_rank(0),
            Operation::AllToAll => by_rank(self.rank * self.share),
            Operation::Barrier => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does the operation in plain code.
    fn reference(
        operation: Operation,
        parts: &[Part],
        gives: &[Vec<f32>],
        round: u32,
    ) -> Vec<Vec<f32>> {
        let share = parts[0].share;
        let sum: Vec<f32> = (0..gives[0].len())
            .map(|i| gives.iter().map(|give| give[i]).sum())
            .collect();
        let rank_of = |part: &Part| part.rank * share;
        parts
            .iter()
            .map(|part| match operation {
                Operation::AllReduce | Operation::Reduce => sum.clone(),
                Operation::ReduceScatter => sum[rank_of(part)..][..share].to_vec(),
                Operation::Broadcast => gives[part.root(round)].clone(),
                Operation::Scatter => gives[part.root(round)][rank_of(part)..][..share].to_vec(),
                Operation::SendReceive => gives[part.partner()].clone(),
                Operation::AllGather | Operation::Gather => gives.concat(),
                Operation::AllToAll => gives
                    .iter()
                    .flat_map(|give| give[rank_of(part)..][..share].to_vec())
                    .collect(),
                Operation::Barrier => Vec::new(),
            })
            .collect()
    }

    #[test]
    fn right_results_pass_and_wrong_or_old_ones_do_not() {
        for operation in [
            Operation::AllReduce,
            Operation::Reduce,
            Operation::ReduceScatter,
            Operation::Broadcast,
            Operation::Scatter,
            Operation::AllGather,
            Operation::Gather,
            Operation::AllToAll,
            Operation::SendReceive,
        ] {
            for (ranks, share) in [(2, 1), (3, 7), (8, 2049)] {
                if operation == Operation::SendReceive && ranks == 3 {
                    continue;
                }
                let parts: Vec<Part> = (0..ranks)
                    .map(|rank| Part {
                        operation,
                        rank,
                        ranks,
                        share,
                    })
                    .collect();
                let round = 5;
                let gives: Vec<Vec<f32>> = parts
                    .iter()
                    .map(|part| {
                        let mut give = vec![0.0; part.given()];
                        part.prepare(&mut give, round);
                        give
                    })
                    .collect();
                let results = reference(operation, &parts, &gives, round);
                for (part, result) in parts.iter().zip(results) {
                    assert_eq!(part.check(&result, round), 0, "{part:?}");
                    let counts = |round| match operation {
                        Operation::Reduce | Operation::Gather => part.is_root(round),
                        _ => true,
                    };
                    assert_eq!(
                        part.check(&result, round + 1),
                        if counts(round + 1) {
                            result.len() as u64
                        } else {
                            0
                        },
                        "{part:?}: an old result"
                    );
                    let mut spoilt = result;
                    spoilt[share / 2] += 1.0;
                    assert_eq!(
                        part.check(&spoilt, round),
                        u64::from(counts(round)),
                        "{part:?}: one wrong value"
                    );
                }
            }
        }
    }
}
