//! The state of a group: committed, restored and synced.

use std::fmt;
use std::ops::{Deref, DerefMut};

use kolo_collectives::ReduceOp;

use super::checkpoint::{Checkpoints, Keeper};
use super::parts::{self, Elastic};
use super::snapshot::{CommitId, Copies, Snapshot};
use super::{Interrupt, StateError};
use crate::Context;
use crate::error::Result;

/// The state of a group, of which every rank has the same: what the group has learnt so far, and how far it has come.
///
/// A state wraps a value that names its parts with [`Elastic`], and derefs to that value. Three operations keep the group together:
///
/// | operation | does | all ranks at once |
/// |---|---|---|
/// | [`commit`](Self::commit) | copies the state, in the memory of each rank | yes |
/// | [`restore`](Self::restore) | goes back to the last commit of this rank | no |
/// | [`sync`](Self::sync) | gives the state of one rank to all, and commits it | yes |
///
/// In a loop under [`elastic::run`](super::run) only `commit` is the loop's to call. In a group whose members stay, use them as needed.
///
/// ```
/// use kolo::elastic::{Elastic, ElasticSampler, Parts, State};
/// use kolo::prelude::*;
///
/// struct Mean {
///     numbers: Vec<f64>,
///     sampler: ElasticSampler,
///     sum: f64,
/// }
///
/// impl Elastic for Mean {
///     fn parts(&mut self, parts: &mut Parts<'_>) {
///         parts.value("sampler", &mut self.sampler);
///         parts.value("sum", &mut self.sum);
///     }
/// }
///
/// #[kolo::function]
/// fn mean(ctx: &Context, numbers: Vec<f64>) -> Result<f64> {
///     let sampler = ElasticSampler::with_global_batch(numbers.len(), 10);
///     let mut state = State::new(Mean { numbers, sampler, sum: 0.0 });
///     while let Some(batch) = state.sampler.next_batch(ctx.rank(), ctx.world_size()) {
///         let mut sum = [batch.iter().map(|index| state.numbers[index]).sum::<f64>()];
///         ctx.comm().all_reduce(&mut sum, ReduceOp::Sum)?;
///         state.sum += sum[0];
///         state.sampler.record(&batch)?;
///         state.commit(ctx)?;
///     }
///     Ok(state.sum / state.numbers.len() as f64)
/// }
/// # use kolo::collectives::local_group;
/// # let contexts: Vec<Context> = local_group(3)?.into_iter().map(Context::for_tests).collect();
/// # std::thread::scope(|scope| {
/// #     for ctx in &contexts {
/// #         scope.spawn(move || assert_eq!(mean::call(ctx, vec![1.0, 2.0, 6.0]).unwrap(), 3.0));
/// #     }
/// # });
/// # Ok::<(), kolo::CollectiveError>(())
/// ```
///
/// A value may also be borrowed: `State::new(&mut *self)` in a method of an executable. The borrow ends with the state, at the latest
/// with [`State::into_inner`].
///
/// Memory: two copies of all parts, which are made by the first two commits; a third on the rank that writes
/// [checkpoints](Self::checkpoints). Later commits allocate nothing, unless a value or list grows.
pub struct State<T> {
    live: T,
    copies: Copies,
    pub(super) id: CommitId,
    pub(super) keeper: Option<Keeper>,
    /// The last commit of which all ranks know that it is on disk, or 0.
    durable: u64,
    /// Says that the group is about to change, if anybody does.
    interrupt: Option<Interrupt>,
    /// The last commit was interrupted.
    interrupted: bool,
    callbacks: Vec<Callback<T>>,
}

type Callback<T> = Box<dyn FnMut(&Context, &mut T) -> Result<()> + Send>;

impl<T: Elastic> State<T> {
    /// A state whose value is this one. Nothing is committed yet.
    pub fn new(value: T) -> Self {
        Self {
            live: value,
            copies: Copies::default(),
            id: CommitId::default(),
            keeper: None,
            durable: 0,
            interrupt: None,
            interrupted: false,
            callbacks: Vec::new(),
        }
    }

    /// Keeps commits on disk, too. Give the same on all ranks.
    #[must_use]
    pub fn checkpoints(mut self, checkpoints: Checkpoints) -> Self {
        self.keeper = Some(Keeper::new(checkpoints));
        self
    }

    /// Adds a function that [`elastic::run`](super::run) calls on all ranks in every generation but the loop's first: after the
    /// state is synced, before the loop goes on, in the order in which the functions were added. For what depends on the size
    /// of the group, such as a learning rate or files that are open.
    ///
    /// The function may use collectives. An error is treated as one of the loop is.
    #[must_use]
    pub fn on_reset(
        mut self,
        callback: impl FnMut(&Context, &mut T) -> Result<()> + Send + 'static,
    ) -> Self {
        self.callbacks.push(Box::new(callback));
        self
    }

    /// Copies the state in the memory of this rank, and waits until every rank has done so. All ranks must call this
    /// at the same place of their loops.
    ///
    /// It costs the copy and one all-reduce of 24 bytes. The copy may be slow for large states: commit as often as work
    /// may be lost, not after every step.
    ///
    /// # Errors
    ///
    /// * [`StateError::Interrupted`] if the group is about to change, as every rank says at the same commit. The state *is*
    ///   committed. Return this error from the loop.
    /// * [`StateError::Collective`] if a rank is lost, late or failed. The last commit of this rank is the one before, or this one if
    ///   other ranks have reached their end of it: see [`Self::sync`].
    /// * [`StateError::Part`] if a part can't be saved; [`StateError::OutOfStep`] if ranks have committed differently often.
    pub fn commit(&mut self, ctx: &Context) -> Result<(), StateError> {
        self.interrupted = false;
        self.copy_live()?;
        let waits = self.interrupt.as_ref().is_some_and(Interrupt::is_raised);
        let own = self.id.number;
        let written = self.keeper.as_ref().map_or(0, Keeper::written);
        // The greatest of all numbers with the flag of any rank that has this number, the lowest number, and what is on disk.
        let mut all = [own << 1 | u64::from(waits), !own, self.durable.max(written)];
        ctx.comm().all_reduce(&mut all, ReduceOp::Max)?;
        let (highest, lowest) = (all[0] >> 1, !all[1]);
        if highest != lowest {
            return Err(StateError::OutOfStep {
                own,
                lowest,
                highest,
            });
        }
        self.keep(ctx, own + 1);
        ctx.committed(own + 1);
        self.durable = all[2];
        if self.durable > 0 {
            ctx.durable(self.durable);
        }
        self.interrupted = all[0] & 1 == 1;
        if self.interrupted {
            return Err(StateError::Interrupted);
        }
        Ok(())
    }

    /// Goes back to the last commit of this rank, or to the last sync if that was later. Waits for nobody.
    ///
    /// # Errors
    ///
    /// [`StateError::NothingCommitted`]; [`StateError::Part`] if the state has other parts, or buffers of other lengths, than it had at the
    /// commit. The state is as before then.
    pub fn restore(&mut self) -> Result<(), StateError> {
        if !self.is_committed() {
            return Err(StateError::NothingCommitted);
        }
        let committed = self.copies.committed();
        parts::check(&mut self.live, committed, "in the last commit")?;
        parts::load(&mut self.live, committed)
    }

    /// The number of commits and syncs so far, which is the same on all ranks. A new rank takes the number over with the state.
    pub fn commits(&self) -> u64 {
        self.id.number
    }

    /// The last commit of which all ranks know that it is on disk; 0 if there is none. It is the same on all ranks: they hear of a
    /// [checkpoint](Self::checkpoints) in the commit that follows.
    pub fn durable(&self) -> u64 {
        self.durable
    }

    /// Waits until the last commit is on disk, on the rank that writes [checkpoints](Self::checkpoints). On others, and without
    /// checkpoints, there is nothing to wait for. A state that is dropped waits, too, and tells nobody of a failure but the log. A disk that
    /// hangs is waited for without a limit.
    ///
    /// # Errors
    ///
    /// [`StateError::Checkpoint`] if the commit can't be written. Later commits are tried anew.
    pub fn flush(&self) -> Result<(), StateError> {
        self.keeper.as_ref().map_or(Ok(()), Keeper::flush)
    }

    /// The value, without the copies.
    pub fn into_inner(self) -> T {
        self.live
    }

    /// Takes the copy in `spare` for the last commit.
    pub(super) fn keep(&mut self, ctx: &Context, number: u64) {
        self.copies.keep();
        self.id = CommitId {
            generation: ctx.generation().0,
            number,
        };
        if ctx.rank() == 0
            && let Some(keeper) = &mut self.keeper
        {
            keeper.keep(ctx.job(), self.id, self.copies.committed());
        }
    }

    /// Takes the state of the newest checkpoint, if that is later than the own one. `must` says that there has to be one.
    pub(super) fn resume(&mut self, ctx: &Context, must: bool) -> Result<(), StateError> {
        let Some(mut keeper) = self.keeper.take() else {
            return if must { Err(StateError::Lost) } else { Ok(()) };
        };
        let found = keeper.find(ctx, must, |id, checkpoint| {
            if id <= self.id {
                return Ok(Ok(()));
            }
            let place = format!("in the checkpoint of commit {}", id.number);
            checkpoint.read_values(self.spare())?;
            if let Err(misfit) = self.check_spare(&place) {
                return Ok(Err(misfit));
            }
            checkpoint.read_buffers(self.spare())?;
            self.copies.keep();
            self.id = id;
            Ok(self.load_committed())
        });
        self.keeper = Some(keeper);
        found
    }

    pub(crate) fn is_committed(&self) -> bool {
        self.id.number > 0
    }

    /// Whether the last commit said that the group is about to change.
    pub(super) fn is_interrupted(&self) -> bool {
        self.interrupted
    }

    /// Commits of a new generation look there from now on.
    pub(crate) fn watch(&mut self, interrupt: Option<Interrupt>) {
        self.interrupt = interrupt;
        self.interrupted = false;
    }

    /// Where the next copy goes.
    pub(super) fn spare(&mut self) -> &mut Snapshot {
        self.copies.spare()
    }

    pub(super) fn copy_live(&mut self) -> Result<(), StateError> {
        parts::save(&mut self.live, self.copies.spare())
    }

    /// Looks whether the parts in `spare`, which come from elsewhere, fit here. Makes room there for the buffers.
    pub(super) fn check_spare(&mut self, place: &str) -> Result<(), StateError> {
        let spare = self.copies.spare();
        parts::check(&mut self.live, spare, place)?;
        parts::make_room(&mut self.live, spare)
    }

    pub(super) fn load_committed(&mut self) -> Result<(), StateError> {
        parts::load(&mut self.live, self.copies.committed())
    }

    pub(super) fn call_back(&mut self, ctx: &Context) -> Result<()> {
        for callback in &mut self.callbacks {
            callback(ctx, &mut self.live)?;
        }
        Ok(())
    }
}

impl<T> Deref for State<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.live
    }
}

impl<T> DerefMut for State<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.live
    }
}

impl<T: fmt::Debug> fmt::Debug for State<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State")
            .field("value", &self.live)
            .field("commits", &self.id.number)
            .finish_non_exhaustive()
    }
}
