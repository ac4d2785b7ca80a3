//! Which algorithm, by operation, world size and bytes. A function of what all ranks know alike.

use super::Algorithm;
use crate::operation::OperationKind;

/// Where one algorithm hands over to the next. The same on every rank, or operations are a mismatch.
///
/// The default fits links that take some ten microseconds for a message and move around a gigabyte a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// All-reduce: gather all values while all ranks' values together have at most this many bytes.
    /// Default: 64 KiB.
    pub gather_limit: usize,
    /// All-reduce: use the ring when a rank's piece (the whole divided by the world size) has at least this
    /// many bytes. Default: 64 KiB.
    pub ring_from: usize,
    /// All-gather: use Bruck's algorithm while the result has at most this many bytes. Default: 64 KiB.
    pub bruck_limit: usize,
    /// Use this algorithm for every operation that it can do, whatever the size. Default: none.
    pub force: Option<Algorithm>,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            gather_limit: 64 << 10,
            ring_from: 64 << 10,
            bruck_limit: 64 << 10,
            force: None,
        }
    }
}

/// Chooses. `bytes` are those of the buffer, or of a gather's result.
pub(crate) fn choose(tuning: &Tuning, kind: OperationKind, world: u32, bytes: usize) -> Algorithm {
    if world == 1 {
        return Algorithm::Local;
    }
    let able: &[Algorithm] = match kind {
        OperationKind::AllReduce => &[Algorithm::Gather, Algorithm::Halving, Algorithm::Ring],
        OperationKind::AllGather
        | OperationKind::AllGatherCounts
        | OperationKind::AllGatherVarcount => &[Algorithm::Bruck, Algorithm::Ring],
        OperationKind::Broadcast => &[Algorithm::Binomial],
        OperationKind::Barrier => &[Algorithm::Dissemination],
    };
    if let Some(forced) = tuning.force.filter(|forced| able.contains(forced)) {
        return forced;
    }
    match kind {
        OperationKind::AllReduce => {
            if bytes.saturating_mul(world as usize) <= tuning.gather_limit {
                Algorithm::Gather
            } else if bytes / (world as usize) < tuning.ring_from {
                Algorithm::Halving
            } else {
                Algorithm::Ring
            }
        }
        OperationKind::AllGather
        | OperationKind::AllGatherCounts
        | OperationKind::AllGatherVarcount => {
            if bytes <= tuning.bruck_limit {
                Algorithm::Bruck
            } else {
                Algorithm::Ring
            }
        }
        OperationKind::Broadcast => Algorithm::Binomial,
        OperationKind::Barrier => Algorithm::Dissemination,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_choice_follows_size_and_world() {
        let tuning = Tuning::default();
        let all_reduce = |world, bytes| choose(&tuning, OperationKind::AllReduce, world, bytes);
        assert_eq!(all_reduce(1, 1 << 30), Algorithm::Local);
        assert_eq!(all_reduce(2, 0), Algorithm::Gather);
        assert_eq!(all_reduce(2, 32 << 10), Algorithm::Gather);
        assert_eq!(all_reduce(2, (32 << 10) + 4), Algorithm::Halving);
        assert_eq!(all_reduce(2, 128 << 10), Algorithm::Ring);
        assert_eq!(all_reduce(64, 1 << 10), Algorithm::Gather);
        assert_eq!(all_reduce(64, 1 << 20), Algorithm::Halving);
        assert_eq!(all_reduce(64, 4 << 20), Algorithm::Ring);
        assert_eq!(all_reduce(64, usize::MAX), Algorithm::Ring);
        let gather = |bytes| choose(&tuning, OperationKind::AllGather, 8, bytes);
        assert_eq!(gather(64 << 10), Algorithm::Bruck);
        assert_eq!(gather((64 << 10) + 1), Algorithm::Ring);
    }

    #[test]
    fn a_forced_algorithm_is_used_where_it_can_be() {
        let tuning = Tuning {
            force: Some(Algorithm::Ring),
            ..Tuning::default()
        };
        let chosen = |kind| choose(&tuning, kind, 4, 4);
        assert_eq!(chosen(OperationKind::AllReduce), Algorithm::Ring);
        assert_eq!(chosen(OperationKind::AllGather), Algorithm::Ring);
        assert_eq!(chosen(OperationKind::Broadcast), Algorithm::Binomial);
        assert_eq!(chosen(OperationKind::Barrier), Algorithm::Dissemination);
    }
}
