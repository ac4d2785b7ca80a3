//! How a job ends.

/// How a job ends by itself. Everything but [`End::Succeeded`] is a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum End {
    /// All members have returned.
    Succeeded,
    /// A member is lost, and the rest can't go on without it, as other members have returned already.
    Lost,
    /// Fewer processes than the minimum were there within the start timeout.
    BelowMin,
    /// Something was committed, no member that has it is left, and no commit outlives them.
    NoSurvivor,
    /// The membership would change more often than allowed.
    ResetLimit,
    /// Process after process fails without a commit in between.
    NoProgress,
    /// Too many processes have failed: within a time, or at all if the group is started anew each time.
    TooManyRestarts,
}
