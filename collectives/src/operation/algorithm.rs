//! The algorithms by name.

use std::fmt;

use super::OperationKind;

/// The algorithms with their names, by their codes on the wire.
macro_rules! algorithms {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// How an operation is done. The table is at [`schedule`](crate::schedule).
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Algorithm {
            $($(#[$doc])* $variant,)*
        }

        impl Algorithm {
            /// All algorithms, by their codes on the wire.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$variant),*];

            /// Its name, as settings and tables have it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

algorithms! {
    /// A world of one rank: nothing to exchange.
    Local = "local",
    /// All-reduce: gather all, then every rank reduces all in rank order.
    Flat = "flat",
    /// Reduce-scatter by recursive halving; for all-reduce then all-gather by doubling.
    Halving = "halving",
    /// Along a ring.
    Ring = "ring",
    /// By doubling distances around the circle of ranks.
    Bruck = "bruck",
    /// Along binomial trees.
    Binomial = "binomial",
    /// Barrier by doubling distances.
    Dissemination = "dissemination",
    /// All-reduce by exchange of everything with partners at doubling distances.
    Doubling = "doubling",
    /// Broadcast: scatter along a tree, all-gather along a ring.
    ScatterGather = "scatter-gather",
    /// Every pair of ranks by itself, all at once.
    Linear = "linear",
    /// Every pair of ranks by itself, one after the other.
    Pairwise = "pairwise",
    /// Inside the hosts, along a ring of hosts, inside the hosts.
    TwoLevelRing = "two-level-ring",
    /// Inside the hosts, by halving and doubling across them, inside the hosts.
    TwoLevelHalving = "two-level-halving",
    /// Inside the hosts, by doubling across them, inside the hosts.
    TwoLevelDoubling = "two-level-doubling",
    /// Broadcast along a tree of hosts, then along trees in them.
    TwoLevelTree = "two-level-tree",
}

impl Algorithm {
    /// The algorithms for a kind of operation, in a world of more than one rank; the last resort comes first. Those of
    /// two levels want a [`Layout`](crate::schedule::Layout).
    #[must_use]
    pub const fn able(kind: OperationKind) -> &'static [Self] {
        use OperationKind as Kind;
        match kind {
            Kind::AllReduce => &[
                Self::Ring,
                Self::Flat,
                Self::Doubling,
                Self::Halving,
                Self::TwoLevelRing,
                Self::TwoLevelHalving,
                Self::TwoLevelDoubling,
            ],
            Kind::Reduce => &[Self::Binomial, Self::Ring],
            Kind::ReduceScatter => &[Self::Ring, Self::Halving],
            Kind::AllGather | Kind::AllGatherCounts | Kind::AllGatherVarcount => {
                &[Self::Ring, Self::Bruck, Self::TwoLevelRing]
            }
            Kind::Gather | Kind::GatherVarcount | Kind::Scatter | Kind::ScatterVarcount => {
                &[Self::Linear, Self::Binomial]
            }
            Kind::Broadcast => &[Self::Binomial, Self::ScatterGather, Self::TwoLevelTree],
            Kind::AllToAll | Kind::AllToAllVarcount => &[Self::Pairwise, Self::Linear],
            Kind::Barrier => &[Self::Dissemination],
            Kind::SendReceive => &[Self::Linear],
        }
    }

    /// The algorithms for Adasum.
    pub const ADASUM: &'static [Self] = &[Self::Doubling, Self::Halving];

    /// Whether it works inside hosts and across them.
    #[must_use]
    pub const fn is_two_level(self) -> bool {
        matches!(
            self,
            Self::TwoLevelRing
                | Self::TwoLevelHalving
                | Self::TwoLevelDoubling
                | Self::TwoLevelTree
        )
    }

    pub(crate) fn code(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// No algorithm has this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no algorithm is called `{given}`; there are {}", Algorithm::ALL.map(Algorithm::name).join(", "))]
pub struct UnknownAlgorithm {
    /// What was given.
    pub given: String,
}

impl std::str::FromStr for Algorithm {
    type Err = UnknownAlgorithm;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL.into_iter().find(|one| one.name() == name);
        known.ok_or_else(|| UnknownAlgorithm {
            given: name.to_owned(),
        })
    }
}
