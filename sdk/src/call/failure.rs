//! What calls fail with.

use std::fmt;
use std::time::Duration;

use kolo_transport::ids::{Generation, Rank};
use kolo_transport::wire::span::Span;
use kolo_transport::wire::{CallFailure, Exit, FailureKind, RankFailure};

use super::busy::BusyRank;
use crate::codec::CodecError;

/// Other ranks' failures that an error message shows in full.
const SHOWN: usize = 4;

/// How a call failed on one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankError {
    /// The rank.
    pub rank: Rank,
    /// The hostname of its node.
    pub hostname: String,
    /// What happened there.
    pub cause: RankCause,
}

/// What happened on a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RankCause {
    /// The call failed, and the worker lives on.
    Call(CallFailure),
    /// The worker is gone: its process ended, or its node can't be reached.
    Lost {
        /// What is known of its end.
        failure: RankFailure,
        /// Whether it ended because its job was being stopped: then that is not the first cause.
        stopping: bool,
    },
}

impl RankError {
    /// The error of a worker that is gone.
    pub(crate) fn lost(failure: RankFailure, stopping: bool) -> Self {
        Self {
            rank: failure.rank,
            hostname: failure.hostname.clone(),
            cause: RankCause::Lost { failure, stopping },
        }
    }

    /// The kind, for programs.
    pub fn kind(&self) -> CallErrorKind {
        match &self.cause {
            RankCause::Lost { .. } => CallErrorKind::Lost,
            RankCause::Call(failure) => match failure.kind {
                FailureKind::Error => CallErrorKind::Error,
                FailureKind::Panic => CallErrorKind::Panic,
                FailureKind::Poisoned => CallErrorKind::Poisoned,
                FailureKind::UnknownTarget => CallErrorKind::UnknownTarget,
                FailureKind::Arguments => CallErrorKind::Arguments,
                FailureKind::Result => CallErrorKind::Result,
                FailureKind::Cancelled => CallErrorKind::Cancelled,
                FailureKind::Deadline => CallErrorKind::Deadline,
                FailureKind::Stale => CallErrorKind::Stale,
                FailureKind::NoSuchRank => CallErrorKind::NoSuchRank,
                FailureKind::GenerationOver | FailureKind::Left => CallErrorKind::GenerationOver,
                _ => CallErrorKind::Other,
            },
        }
    }

    /// The rank whose loss or failure caused this one, if it is an echo.
    pub fn caused_by(&self) -> Option<Rank> {
        match &self.cause {
            RankCause::Call(failure) => failure.caused_by.filter(|cause| *cause != self.rank),
            RankCause::Lost { .. } => None,
        }
    }

    /// Whether something else is the first cause.
    pub(crate) fn is_echo(&self) -> bool {
        let is_stopped = match &self.cause {
            RankCause::Call(failure) => failure.stopping,
            RankCause::Lost { stopping, .. } => *stopping,
        };
        is_stopped || self.caused_by().is_some()
    }

    /// The error's or panic's message, or what is known of the worker's end, in one line if it has just one.
    pub fn message(&self) -> String {
        match &self.cause {
            RankCause::Call(failure) => match failure.kind {
                FailureKind::Error => format!("returned an error: {}", failure.message),
                FailureKind::Panic => format!("panicked: {}", failure.message),
                _ => failure.message.clone(),
            },
            RankCause::Lost { failure, .. } => {
                let reason = failure.reason.as_deref().unwrap_or_default();
                if failure.was_not_started() {
                    return reason.to_owned();
                }
                match (failure.exit, failure.pid) {
                    (Exit::Unknown, _) if !reason.is_empty() => reason.to_owned(),
                    (exit, 0) if reason.is_empty() => format!("the worker ended with {exit}"),
                    (exit, 0) => format!("the worker ended with {exit}: {reason}"),
                    (exit, pid) if reason.is_empty() => {
                        format!("the worker (pid {pid}) ended with {exit}")
                    }
                    (exit, pid) => format!("the worker (pid {pid}) ended with {exit}: {reason}"),
                }
            }
        }
    }

    /// Where it happened: of a panic, or of an error that kept its backtrace.
    pub fn backtrace(&self) -> Option<&str> {
        match &self.cause {
            RankCause::Call(failure) => failure.backtrace.as_deref(),
            RankCause::Lost { .. } => None,
        }
    }

    /// How the worker's process ended, if it did.
    pub fn exit(&self) -> Option<Exit> {
        match &self.cause {
            RankCause::Call(_) => None,
            RankCause::Lost { failure, .. } => Some(failure.exit),
        }
    }

    /// The last lines of the worker's standard error, oldest first, if its process ended.
    pub fn stderr_tail(&self) -> &[String] {
        match &self.cause {
            RankCause::Call(_) => &[],
            RankCause::Lost { failure, .. } => &failure.stderr_tail,
        }
    }
}

/// The alternate form (`{:#}`) has the backtrace too.
impl fmt::Display for RankError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "rank {} ({}): {}",
            self.rank,
            self.hostname,
            self.message()
        )?;
        for line in self.stderr_tail() {
            write!(f, "\n  [{}]<stderr>:{line}", self.rank)?;
        }
        if let Some(backtrace) = self.backtrace().filter(|_| f.alternate()) {
            write!(f, "\n{}", backtrace.trim_end())?;
        }
        Ok(())
    }
}

/// The kinds of [`CallError`], for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CallErrorKind {
    /// The user's code returned an error.
    Error,
    /// The user's code panicked.
    Panic,
    /// An earlier panic left the executable in an unknown state. Create it again.
    Poisoned,
    /// A worker's process ended, or its node can't be reached.
    Lost,
    /// No such function, type, method or executable in the workers' program.
    UnknownTarget,
    /// The arguments did not encode, are too long, or did not decode.
    Arguments,
    /// The result did not encode, is too long, or did not decode.
    Result,
    /// It was cancelled before it began, or at an await point.
    Cancelled,
    /// It took longer than its deadline.
    Deadline,
    /// It was meant for another generation.
    Stale,
    /// There is no such rank, or no rank at all was named.
    NoSuchRank,
    /// Too many calls are in flight.
    Busy,
    /// The group has ended, was shut down, or is being stopped.
    Ended,
    /// The members of an elastic group change. The next generation takes the call.
    GenerationOver,
    /// A kind that this version does not know.
    Other,
}

/// A call that failed on at least one rank that still has a worker, or that lost one.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FailedCall {
    /// What was called: a function's name, `Type::method`, or a type's name for its constructor.
    pub call: String,
    /// The first cause.
    pub first: RankError,
    /// What else had failed by then: echoes of the first cause, and failures of their own.
    pub others: Vec<RankError>,
}

impl std::error::Error for FailedCall {}

/// The alternate form (`{:#}`) has the backtraces too.
impl fmt::Display for FailedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` failed on ", self.call)?;
        fmt::Display::fmt(&self.first, f)?;
        let (echoes, own): (Vec<_>, Vec<_>) = self.others.iter().partition(|error| error.is_echo());
        for error in own.iter().take(SHOWN) {
            f.write_str("\nalso failed on ")?;
            fmt::Display::fmt(error, f)?;
        }
        if own.len() > SHOWN {
            write!(
                f,
                "\nalso failed on {}",
                ranks_text(own[SHOWN..].iter().map(|e| e.rank))
            )?;
        }
        if !echoes.is_empty() {
            write!(
                f,
                "\nand because of that on {}",
                ranks_text(echoes.iter().map(|e| e.rank))
            )?;
        }
        Ok(())
    }
}

/// `rank 3`, `ranks 0, 1, 4`; not more than a line of them.
pub(crate) fn ranks_text(ranks: impl IntoIterator<Item = Rank>) -> String {
    const MOST: usize = 16;
    let mut ranks: Vec<Rank> = ranks.into_iter().collect();
    ranks.sort_unstable();
    let mut text = String::from(if ranks.len() == 1 { "rank " } else { "ranks " });
    let shown: Vec<String> = ranks.iter().take(MOST).map(Rank::to_string).collect();
    text.push_str(&shown.join(", "));
    match ranks.len().checked_sub(MOST) {
        Some(more @ 1..) => format!("{text} and {more} more"),
        _ => text,
    }
}

/// Why a call gave no result.
///
/// [`CallError::rank`], [`CallError::backtrace`] and the other accessors speak of the first cause.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// It failed on a rank: the user's code returned an error or panicked, or the worker is gone. The first
    /// cause comes first in the message. Fix what it names; a lost worker needs a new executor.
    #[error(transparent)]
    Failed(Box<FailedCall>),
    /// The arguments could not be encoded or are too long. Nothing was sent.
    #[error("the arguments of `{call}` were not sent: {reason}")]
    Arguments {
        /// What was called.
        call: String,
        /// What is wrong with them.
        reason: CodecError,
    },
    /// A rank's result is no value of the type that is expected.
    #[error("the result of `{call}` from rank {rank} does not decode: {reason}")]
    Result {
        /// What was called.
        call: String,
        /// Whose result it is.
        rank: Rank,
        /// What is wrong with it.
        reason: CodecError,
    },
    /// There is no such rank. Ranks count from 0 to the world size less one.
    #[error("there is no rank {rank}; the ranks of this group are 0 to {}", .world_size.saturating_sub(1))]
    NoSuchRank {
        /// The rank.
        rank: Rank,
        /// How many there are.
        world_size: usize,
    },
    /// The list of ranks is empty. Name at least one.
    #[error("`{call}` was called on no rank; name at least one")]
    NoRanks {
        /// What was called.
        call: String,
    },
    /// Some ranks had no result when the deadline passed. The call was cancelled there: it does not begin if
    /// it had not, and an asynchronous one stops at its next await point.
    #[error(
        "`{call}` had no result from {} after {}, its deadline{}",
        ranks_text(.missing.iter().copied()),
        Span(*after),
        BusyRank::text(.busy).map_or(String::new(), |text| format!(": {text}"))
    )]
    Deadline {
        /// What was called.
        call: String,
        /// The deadline, from when it was sent.
        after: Duration,
        /// The ranks that were late.
        missing: Vec<Rank>,
        /// Those of them that were still in an earlier call, so that this one had not begun there.
        busy: Vec<BusyRank>,
    },
    /// As many calls are in flight as the executor allows, and `submit` does not wait. Await some of them
    /// first, await this call itself instead of submitting it, or raise `max_in_flight`.
    #[error(
        "`{call}` was not sent: {limit} calls are in flight, the most that this executor allows; await some of them first, or raise max_in_flight"
    )]
    Busy {
        /// What was called.
        call: String,
        /// The limit.
        limit: usize,
    },
    /// The group has ended or is about to: it was shut down, its executor was dropped, somebody else stopped its
    /// job, a node with workers of it stops, or it failed. Start a new one.
    #[error("`{call}` has no result: {reason}")]
    Ended {
        /// What was called.
        call: String,
        /// Why the group ended.
        reason: String,
        /// The last worker that failed, if an elastic group ended because of such.
        first: Option<Box<RankError>>,
    },
    /// The type does not say what of its values outlives a change of an elastic group. Implement
    /// [`Elastic`](crate::elastic::Elastic) for the type and write `#[kolo::executable(elastic)]`, or give the group a fixed number of
    /// workers.
    #[error(
        "`{class}` was not made: in an elastic group the type must say what its state is; implement `kolo::elastic::Elastic` and write \
         `#[kolo::executable(elastic)]`, or give a fixed number of workers"
    )]
    Elastic {
        /// The type's name.
        class: String,
    },
    /// The members of an elastic group change, and the call did not come to its end before. Wait for
    /// [`recovered`](crate::Executor::recovered), and call again.
    #[error("`{call}` has no result from generation {generation}, which is over: {cause}")]
    GenerationOver {
        /// What was called.
        call: String,
        /// The generation.
        generation: Generation,
        /// The ranks of it that are lost, as far as is known.
        lost: Vec<Rank>,
        /// Why it is over.
        cause: String,
    },
}

impl CallError {
    pub(crate) fn failed(call: &str, first: RankError, others: Vec<RankError>) -> Self {
        Self::Failed(Box::new(FailedCall {
            call: call.to_owned(),
            first,
            others,
        }))
    }

    /// The error of a call of a group that has ended for this reason.
    pub(crate) fn ended(call: &str, reason: &str) -> Self {
        Self::Ended {
            call: call.to_owned(),
            reason: reason.to_owned(),
            first: None,
        }
    }

    fn first(&self) -> Option<&RankError> {
        match self {
            Self::Failed(failed) => Some(&failed.first),
            Self::Ended { first, .. } => first.as_deref(),
            _ => None,
        }
    }

    /// The kind of the first cause, for programs.
    pub fn kind(&self) -> CallErrorKind {
        match self {
            Self::Failed(failed) => failed.first.kind(),
            Self::Arguments { .. } => CallErrorKind::Arguments,
            Self::Result { .. } => CallErrorKind::Result,
            Self::NoSuchRank { .. } | Self::NoRanks { .. } => CallErrorKind::NoSuchRank,
            Self::Deadline { .. } => CallErrorKind::Deadline,
            Self::Busy { .. } => CallErrorKind::Busy,
            Self::Ended { .. } => CallErrorKind::Ended,
            Self::GenerationOver { .. } => CallErrorKind::GenerationOver,
            Self::Elastic { .. } => CallErrorKind::Other,
        }
    }

    /// The rank of the first cause, if it was one rank.
    pub fn rank(&self) -> Option<Rank> {
        match self {
            Self::Result { rank, .. } | Self::NoSuchRank { rank, .. } => Some(*rank),
            Self::Deadline { missing, .. } if missing.len() == 1 => missing.first().copied(),
            Self::GenerationOver { lost, .. } if lost.len() == 1 => lost.first().copied(),
            _ => self.first().map(|first| first.rank),
        }
    }

    /// The hostname of that rank's node.
    pub fn hostname(&self) -> Option<&str> {
        self.first().map(|first| first.hostname.as_str())
    }

    /// The first cause's message, without the other ranks.
    pub fn message(&self) -> String {
        match self {
            Self::Failed(failed) => failed.first.message(),
            _ => self.to_string(),
        }
    }

    /// Where the first cause happened: of a panic, or of an error that kept its backtrace.
    pub fn backtrace(&self) -> Option<&str> {
        self.first().and_then(RankError::backtrace)
    }

    /// How the process of the first cause's worker ended, if it did.
    pub fn exit(&self) -> Option<Exit> {
        self.first().and_then(RankError::exit)
    }

    /// The last lines of that worker's standard error, oldest first.
    pub fn stderr_tail(&self) -> &[String] {
        self.first().map_or(&[], RankError::stderr_tail)
    }

    /// All failures by rank that were known when the call failed, the first cause first.
    pub fn failures(&self) -> impl Iterator<Item = &RankError> {
        let others = match self {
            Self::Failed(failed) => failed.others.as_slice(),
            _ => &[],
        };
        self.first().into_iter().chain(others)
    }

    /// Whether the same call on the same handle may succeed later without a change: it was refused because too
    /// much was in flight, it was cancelled, it was late, or the members of an elastic group changed. An error or a panic of the
    /// user's code counts as final, and so does a lost worker of a group that never changes: a new executor is needed then.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self.kind(),
            CallErrorKind::Busy
                | CallErrorKind::Cancelled
                | CallErrorKind::Deadline
                | CallErrorKind::GenerationOver
        )
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use kolo_transport::ids::NodeId;

    use super::*;

    pub(crate) fn failure(rank: u32, exit: Exit) -> RankFailure {
        RankFailure {
            rank: Rank(rank),
            node: NodeId(7),
            hostname: "gpu-7".to_owned(),
            pid: 412,
            exit,
            reason: None,
            stderr_tail: vec!["out of memory".to_owned()],
            account: None,
        }
    }

    fn error(rank: u32, cause: RankCause) -> RankError {
        RankError {
            rank: Rank(rank),
            hostname: "gpu-7".to_owned(),
            cause,
        }
    }

    fn panic(rank: u32, message: &str) -> RankError {
        let mut failure = CallFailure::new(FailureKind::Panic, message);
        failure.backtrace = Some("   0: digits::train\n".to_owned());
        error(rank, RankCause::Call(failure))
    }

    fn echo(rank: u32, of: u32) -> RankError {
        let mut failure = CallFailure::new(FailureKind::Error, format!("rank {of} is lost"));
        failure.caused_by = Some(Rank(of));
        error(rank, RankCause::Call(failure))
    }

    #[test]
    fn a_lost_worker_is_told_with_its_end_and_its_last_words() {
        let lost = error(
            3,
            RankCause::Lost {
                failure: failure(3, Exit::Signal(9)),
                stopping: false,
            },
        );
        let error = CallError::failed("digits::Trainer::train", lost, vec![echo(1, 3), echo(0, 3)]);
        assert_eq!(
            error.to_string(),
            "`digits::Trainer::train` failed on rank 3 (gpu-7): the worker (pid 412) ended with signal 9 (SIGKILL)\n  \
             [3]<stderr>:out of memory\n\
             and because of that on ranks 0, 1"
        );
        assert_eq!(error.kind(), CallErrorKind::Lost);
        assert_eq!(error.rank(), Some(Rank(3)));
        assert_eq!(error.exit(), Some(Exit::Signal(9)));
        assert_eq!(error.stderr_tail(), ["out of memory"]);
        assert_eq!(error.failures().count(), 3);
        assert!(!error.is_retryable());
    }

    #[test]
    fn a_panic_shows_its_backtrace_when_asked() {
        let error = CallError::failed(
            "step",
            panic(2, "index out of bounds"),
            vec![panic(0, "me too")],
        );
        let short = error.to_string();
        assert_eq!(
            short,
            "`step` failed on rank 2 (gpu-7): panicked: index out of bounds\n\
             also failed on rank 0 (gpu-7): panicked: me too"
        );
        assert!(format!("{error:#}").contains("0: digits::train"));
        assert_eq!(error.backtrace(), Some("   0: digits::train\n"));
        assert_eq!(error.message(), "panicked: index out of bounds");
        assert_eq!(error.hostname(), Some("gpu-7"));
    }

    #[test]
    fn many_failures_stay_readable() {
        let others = (1..40).map(|rank| panic(rank, "no")).collect();
        let text = CallError::failed("step", panic(0, "no"), others).to_string();
        assert_eq!(text.lines().count(), 6, "{text}");
        assert!(text.ends_with("and 19 more"), "{text}");
    }

    #[test]
    fn the_rest_says_what_to_do() {
        let busy = CallError::Busy {
            call: "f".to_owned(),
            limit: 2,
        };
        assert!(busy.is_retryable());
        assert!(busy.to_string().contains("raise max_in_flight"));
        let late = CallError::Deadline {
            call: "f".to_owned(),
            after: Duration::from_millis(1500),
            missing: vec![Rank(1)],
            busy: Vec::new(),
        };
        assert_eq!(
            late.to_string(),
            "`f` had no result from rank 1 after 1.5s, its deadline"
        );
        assert_eq!(late.rank(), Some(Rank(1)));
        let none = CallError::NoSuchRank {
            rank: Rank(4),
            world_size: 4,
        };
        assert_eq!(
            none.to_string(),
            "there is no rank 4; the ranks of this group are 0 to 3"
        );
        assert_eq!(none.failures().count(), 0);
    }
}
