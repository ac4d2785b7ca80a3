//! Bugs that can be put in on purpose, at the boundary of the cores: each must be found.

use std::fmt;

macro_rules! mutations {
    ($($name:ident, $text:literal, $about:literal;)*) => {
        /// A bug to put in.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum Mutation {
            $(#[doc = $about] $name,)*
        }

        impl Mutation {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The name, as the command line takes it.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text),* }
            }

            /// The bug, in words.
            #[must_use]
            pub fn about(self) -> &'static str {
                match self { $(Self::$name => $about),* }
            }
        }
    };
}

mutations! {
    LoseExit, "lose-exit", "The head acknowledges the end of a process, and does not look at it.";
    LoseRankLost, "lose-rank-lost", "A node acknowledges a loss, and tells nobody.";
    SpawnTwice, "spawn-twice", "A node starts a process twice.";
    SwapRanks, "swap-ranks", "A node swaps the local ranks of two members before it tells them.";
    ForgetStop, "forget-stop", "A node says that a job has ended, and does nothing.";
    LeaveProcesses, "leave-processes", "A warden signals nobody, and says that nothing is left.";
    ForgetDriver, "forget-driver", "The head does not see that a driver is gone.";
    LoseMembership, "lose-membership", "A node acknowledges a generation, and tells nobody.";
    HalfStart, "half-start", "A node starts all workers but the last one.";
    EndWorkersEarly, "end-workers-early", "A node ends workers when the head is away for a moment.";
    StaleRegistration, "stale-registration", "A node that comes back does not name the jobs that it has.";
    LoseReady, "lose-ready", "The head acknowledges that a worker is ready, and does not look at it.";
    WrongMember, "wrong-member", "A node tells its workers of another process in the place of a member.";
    DropRevoke, "drop-revoke", "A node acknowledges a revocation, and tells nobody.";
    SwallowTaken, "swallow-taken", "The head does not look at what members say of a generation.";
    StaleTable, "stale-table", "A node repeats the table before the last one, and workers take it.";
    CommitEarly, "commit-early", "A commit counts of a member that does not have it yet.";
    SkipFence, "skip-fence", "A node that is cut off from the head goes on for ever.";
    ForgetHold, "forget-hold", "A node acknowledges that members are to hold, and tells nobody.";
    KeepWorker, "keep-worker", "A node acknowledges that a worker is to end, and lets it run.";
    EarlyEnd, "early-end", "A warden says that an installed program has ended when it tells it to, and not when it has.";
    SamePort, "same-port", "A node gives the same port to one group of installed programs after the other.";
}

impl Mutation {
    /// The mutation with this name.
    #[must_use]
    pub fn find(name: &str) -> Option<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|mutation| mutation.name() == name)
    }
}

impl fmt::Display for Mutation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
