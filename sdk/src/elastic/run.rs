//! The loop around the loop: from one generation to the next.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kolo_collectives::CollectiveError;

use super::{Elastic, ElasticError, State};
use crate::{Context, Error};

/// Where the generations of a group come from.
///
/// [`run`] asks for the present one and for the next one. Implement this for tests of an elastic loop, with
/// [`local_group`](crate::collectives::local_group) and [`Context::for_tests`], or for groups that something else than
/// kolo makes.
pub trait Membership {
    /// The present generation of this rank.
    fn current(&self) -> Epoch;

    /// Waits for the next generation that this rank is in. That one has a communicator of its own, and ranks `0..n`: those that stay
    /// keep their order, and come before those that are new (R-2).
    ///
    /// # Errors
    ///
    /// There is none: the group ends, this rank has left, or nothing has changed within the time that is allowed for that. [`run`] ends
    /// with [`ElasticError::Membership`].
    fn next(&mut self, cause: &Cause) -> Result<Epoch, Error>;

    /// Whether the group never changes. Then a loop that fails returns its own error, with the state back at the last commit.
    fn is_static(&self) -> bool {
        false
    }
}

/// One generation, as one of its ranks sees it.
#[derive(Debug, Clone)]
pub struct Epoch {
    context: Context,
}

impl Epoch {
    /// The generation that this context belongs to.
    pub fn new(context: Context) -> Self {
        Self { context }
    }

    /// Ranks and communicator of the generation.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// By which the loop hears that the generation is about to end.
    pub fn interrupt(&self) -> &Interrupt {
        self.context.interrupt()
    }
}

/// Tells the loop of one rank that its group is about to change: a host has joined, or is to be drained. Clones are the same.
///
/// Raise it on any rank, from any thread. The next [`commit`](State::commit) that begins on that rank tells all the others, so that all
/// ranks stop at the same commit. An interrupt belongs to one generation and stays raised: the next generation has one of its own,
/// so that a change which comes while another one is carried out is not missed.
#[derive(Debug, Clone, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// A change waits.
    pub fn raise(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether a change waits.
    pub fn is_raised(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Why a loop can't go on in the present generation.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// A collective operation failed on this rank, and this rank is back at its last commit. The error names the rank that is lost,
    /// late or failed.
    Failed(CollectiveError),
    /// A commit said that the group is about to change. All ranks have made this commit.
    Interrupted,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(error) => error.fmt(f),
            Self::Interrupted => f.write_str("the group was about to change"),
        }
    }
}

/// Runs a loop through all generations of a group. All ranks call this, new ones too, each with a state of the same parts.
///
/// In each generation the ranks first make sure that all have the state of the last commit; then [`State::on_reset`]'s callbacks are
/// called, in all generations but the first; then `body`. If `body` returns an error, that happens:
///
/// | cause | then |
/// |---|---|
/// | the last commit was interrupted | the next generation, from the same place: no work is lost |
/// | a collective operation has failed because of another rank | back to the last commit, then the next generation (in a [static](Membership::is_static) group: the error) |
/// | anything else | the error is returned |
///
/// Which of them it was is told by the state and the communicator. So the error may be of any type, and wrapped in any
/// other. An operation that fails for other reasons (a mismatch, wrong arguments) is an error of the loop's own.
///
/// # Errors
///
/// Those of `body`, and [`ElasticError`].
///
/// # Panics
///
/// Those of `body`.
///
/// ```
/// use kolo::elastic::{self, Cause, Epoch, Membership, State, Value};
/// use kolo::prelude::*;
///
/// /// A group that never changes.
/// struct Fixed(Epoch);
///
/// impl Membership for Fixed {
///     fn current(&self) -> Epoch {
///         self.0.clone()
///     }
///
///     fn next(&mut self, _: &Cause) -> Result<Epoch> {
///         Err(kolo::Error::msg("this group never changes"))
///     }
/// }
///
/// #[derive(serde::Serialize, serde::Deserialize)]
/// struct Progress {
///     step: u32,
/// }
///
/// fn work(group: &mut impl Membership) -> Result<u32> {
///     let mut state = State::new(Value(Progress { step: 0 }));
///     elastic::run(group, &mut state, |ctx, state| {
///         while state.step < 10 {
///             ctx.comm().barrier()?;
///             state.step += 1;
///             state.commit(ctx)?;
///         }
///         Ok(state.step)
///     })
/// }
///
/// let comm = kolo::collectives::local_group(1)?.remove(0);
/// let mut group = Fixed(Epoch::new(Context::for_tests(comm)));
/// assert_eq!(work(&mut group)?, 10);
/// # Ok::<(), kolo::Error>(())
/// ```
pub fn run<M, T, R, E>(
    membership: &mut M,
    state: &mut State<T>,
    mut body: impl FnMut(&Context, &mut State<T>) -> Result<R, E>,
) -> Result<R, E>
where
    M: Membership + ?Sized,
    T: Elastic,
    E: From<ElasticError>,
{
    let mut epoch = membership.current();
    let mut resumes = false;
    loop {
        state.watch(Some(epoch.interrupt().clone()));
        let result = begin(&epoch.context, state, resumes)
            .map_err(E::from)
            .and_then(|()| body(&epoch.context, state));
        let interrupted = state.is_interrupted();
        state.watch(None);
        let error = match result {
            Ok(result) => return Ok(result),
            Err(error) => error,
        };
        let cause = match failure(&epoch.context) {
            Some(_) if membership.is_static() => {
                go_back(state)?;
                return Err(error);
            }
            Some(failure) => {
                // Other threads of this rank may wait in this generation, too.
                epoch.context.comm().revoke(&failure.to_string());
                go_back(state)?;
                Cause::Failed(failure)
            }
            None if interrupted => Cause::Interrupted,
            None => return Err(error),
        };
        epoch = (membership.next(&cause)).map_err(|error| ElasticError::Membership {
            cause: Box::new(cause),
            error,
        })?;
        resumes = true;
    }
}

/// Makes the state that of all, and tells the loop's callbacks of a change.
fn begin<T: Elastic>(
    ctx: &Context,
    state: &mut State<T>,
    resumes: bool,
) -> Result<(), ElasticError> {
    // A rank that is new hears from the others that this is no first generation: the callbacks are called on all ranks or on none.
    if state.begin(ctx, resumes)?.resumes {
        state.call_back(ctx).map_err(ElasticError::Reset)?;
    }
    Ok(())
}

/// Before the first commit the state can't have changed but by the loop's own callbacks: none has run.
fn go_back<T: Elastic>(state: &mut State<T>) -> Result<(), ElasticError> {
    if state.is_committed() {
        state.restore()?;
    }
    Ok(())
}

/// The last failure of an operation in this generation, if another membership may mend that.
fn failure(ctx: &Context) -> Option<CollectiveError> {
    ctx.comm().last_failure().filter(|error| match error {
        CollectiveError::PeerLost { .. }
        | CollectiveError::PeerFailed { .. }
        | CollectiveError::PeerLeft { .. }
        | CollectiveError::Deadline { .. }
        | CollectiveError::Connect { .. }
        | CollectiveError::Protocol { .. }
        | CollectiveError::Revoked { .. } => true,
        // The ranks disagree, the call has ended, or this rank asked for what can't be.
        _ => false,
    })
}
