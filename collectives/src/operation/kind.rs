//! Which operations there are.

use std::fmt;

/// The kinds of operations, as the header of a frame names them. Their order is part of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OperationKind {
    /// Every rank gets the combination of all ranks' values.
    AllReduce,
    /// Every rank gets the root's values.
    Broadcast,
    /// Every rank gets all ranks' values, of equal length.
    AllGather,
    /// The first half of an operation on different lengths: the lengths.
    AllGatherCounts,
    /// Every rank gets all ranks' values, of different lengths.
    AllGatherVarcount,
    /// Nobody leaves before all have come.
    Barrier,
    /// The root gets the combination of all ranks' values.
    Reduce,
    /// Every rank gets its part of the combination of all ranks' values.
    ReduceScatter,
    /// The root gets all ranks' values, of equal length.
    Gather,
    /// The root gets all ranks' values, of different lengths.
    GatherVarcount,
    /// Every rank gets its part, of equal length, of the root's values.
    Scatter,
    /// Every rank gets its part, of different length, of the root's values.
    ScatterVarcount,
    /// Every rank gets from each other one the part that is for it; parts have equal length.
    AllToAll,
    /// Every rank gets from each other one the part that is for it; parts have different lengths.
    AllToAllVarcount,
    /// One rank's values go to one other rank: from the root to the rank in [`Operation::rows`](super::Operation::rows).
    SendReceive,
}

impl OperationKind {
    /// All kinds.
    pub const ALL: [Self; 15] = [
        Self::AllReduce,
        Self::Broadcast,
        Self::AllGather,
        Self::AllGatherCounts,
        Self::AllGatherVarcount,
        Self::Barrier,
        Self::Reduce,
        Self::ReduceScatter,
        Self::Gather,
        Self::GatherVarcount,
        Self::Scatter,
        Self::ScatterVarcount,
        Self::AllToAll,
        Self::AllToAllVarcount,
        Self::SendReceive,
    ];

    /// Whether values go from a root or to it; nothing for operations without a root.
    pub(crate) const fn root(self) -> Option<&'static str> {
        match self {
            Self::Broadcast | Self::Scatter | Self::ScatterVarcount | Self::SendReceive => {
                Some("from")
            }
            Self::Reduce | Self::Gather | Self::GatherVarcount => Some("to"),
            Self::AllReduce
            | Self::AllGather
            | Self::AllGatherCounts
            | Self::AllGatherVarcount
            | Self::Barrier
            | Self::ReduceScatter
            | Self::AllToAll
            | Self::AllToAllVarcount => None,
        }
    }

    /// Whether it has an operator.
    pub(crate) const fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::Reduce | Self::ReduceScatter)
    }

    /// From 1, in the order above.
    pub(crate) const fn code(self) -> u8 {
        self as u8 + 1
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code).checked_sub(1)?).copied()
    }

    /// Its name in the API.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::Broadcast => "broadcast",
            Self::AllGather => "all_gather",
            Self::AllGatherCounts | Self::AllGatherVarcount => "all_gather_varcount",
            Self::Barrier => "barrier",
            Self::Reduce => "reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::Gather => "gather",
            Self::GatherVarcount => "gather_varcount",
            Self::Scatter => "scatter",
            Self::ScatterVarcount => "scatter_varcount",
            Self::AllToAll => "all_to_all",
            Self::AllToAllVarcount => "all_to_all_varcount",
            Self::SendReceive => "send",
        }
    }
}

impl fmt::Display for OperationKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
