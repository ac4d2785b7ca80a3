//! The forms of an operation, each made in one way.
//!
//! | form | made by |
//! |---|---|
//! | blocking, of one part | [`Communicator::once`] |
//! | async, of one part | [`Communicator::once_async`] |
//! | blocking, of several parts | [`Communicator::in_turn`] |
//! | started, with a name or without | the macro `started`, beside the blocking form |

use std::pin::pin;
use std::time::Instant;

use crate::blocking::{Alarm, ParkAlarm, SleepAlarm, Wait, block_on};
use crate::communicator::Communicator;
use crate::element::{self, Element};
use crate::error::CollectiveError;
use crate::group_core::{OpGuard, Quick};
use crate::operation::{Operation, OperationKind, Tag};

/// The buffers of an operation on this rank.
pub(super) enum Ends<'a, T> {
    /// One buffer for the input and the result.
    Over(&'a mut [T]),
    /// One buffer, which stays as it is.
    Kept(&'a mut [T]),
    /// Two. The second one is empty on ranks that get nothing.
    Into(&'a [T], &'a mut [T]),
    /// There is no result here.
    Nowhere(&'a [T]),
}

impl<T: Element> Ends<'_, T> {
    #[inline]
    fn input(&self) -> &[u8] {
        match self {
            Self::Over(data) | Self::Kept(data) => element::bytes_of(data),
            Self::Into(data, _) | Self::Nowhere(data) => element::bytes_of(data),
        }
    }

    #[inline]
    fn store(&mut self, turn: &mut OpGuard<'_>) {
        match self {
            Self::Over(data) => turn.store_over(data),
            Self::Into(data, result) => turn.store_with(element::bytes_of(data), result),
            Self::Kept(_) | Self::Nowhere(_) => {}
        }
    }
}

/// What an operation needs in its turn. If that is not there, the operation ends here, and the peers hear why.
pub(super) fn or_refuse<R>(
    turn: &mut OpGuard<'_>,
    tag: Tag,
    needed: Result<R, CollectiveError>,
) -> Result<R, CollectiveError> {
    needed.map_err(|error| turn.refuse(tag, error))
}

impl Communicator {
    /// The blocking form of an operation that has one part. `check` says whether the arguments are right.
    #[inline]
    pub(super) fn once<T: Element>(
        &self,
        request: &Operation,
        mut ends: Ends<'_, T>,
        check: impl Fn() -> Result<(), CollectiveError>,
    ) -> Result<(), CollectiveError> {
        if check().is_ok() {
            // The short way. A turn is not handed around where it ends well: to move it is a tenth of the time of the shortest
            // operations.
            match self.inner.quick(request, &self.options, ends.input()) {
                Quick::Done(mut turn) => {
                    ends.store(&mut turn);
                    return Ok(());
                }
                Quick::Begun(turn, tag) => return Self::resume(turn, tag, ends),
                Quick::Failed(error) => return Err(error),
                Quick::No => {}
            }
        }
        Self::blocking(async |alarm, started| {
            self.single(alarm, started, request, ends, check()).await
        })
    }

    /// The async form of an operation that has one part. `checked` says whether the arguments are right.
    pub(super) async fn once_async<T: Element>(
        &self,
        request: &Operation,
        ends: Ends<'_, T>,
        checked: Result<(), CollectiveError>,
    ) -> Result<(), CollectiveError> {
        let started = Instant::now();
        let mut alarm = SleepAlarm(pin!(self.inner.sleep()));
        self.single(&mut alarm, started, request, ends, checked)
            .await
    }

    /// Does an operation that has one part when it is its turn.
    async fn single<A: Alarm, T: Element>(
        &self,
        alarm: &mut A,
        started: Instant,
        request: &Operation,
        ends: Ends<'_, T>,
        checked: Result<(), CollectiveError>,
    ) -> Result<(), CollectiveError> {
        let (mut turn, tag) = self.turn(alarm, started, request.kind).await?;
        or_refuse(&mut turn, tag, checked)?;
        match ends {
            Ends::Over(data) => turn.run_in_place(alarm, tag, *request, data, true).await,
            Ends::Kept(data) => turn.run_in_place(alarm, tag, *request, data, false).await,
            Ends::Into(data, result) => turn.run_into(alarm, tag, *request, data, result).await,
            Ends::Nowhere(data) => {
                turn.run(alarm, tag, *request, element::bytes_of(data))
                    .await
            }
        }
    }

    /// Goes on with an operation that has begun the short way.
    fn resume<T: Element>(
        mut turn: OpGuard<'_>,
        tag: Tag,
        mut ends: Ends<'_, T>,
    ) -> Result<(), CollectiveError> {
        Self::blocking(async |alarm, _| turn.resume(alarm, tag, ends.input()).await)?;
        ends.store(&mut turn);
        Ok(())
    }

    /// The blocking form of an operation that has several parts: `parts` does them when it is the operation's turn.
    pub(super) fn in_turn<R>(
        &self,
        kind: OperationKind,
        parts: impl AsyncFnOnce(&mut ParkAlarm<'_>, &mut OpGuard<'_>, Tag) -> Result<R, CollectiveError>,
    ) -> Result<R, CollectiveError> {
        Self::blocking(async |alarm, started| {
            let (mut turn, tag) = self.turn(alarm, started, kind).await?;
            parts(alarm, &mut turn, tag).await
        })
    }

    pub(super) fn blocking<R>(operation: impl AsyncFnOnce(&mut ParkAlarm<'_>, Instant) -> R) -> R {
        let started = Instant::now();
        let wait = Wait::default();
        block_on(&wait, |mut alarm| async move {
            operation(&mut alarm, started).await
        })
    }

    /// Waits for this operation's turn.
    pub(super) async fn turn<A: Alarm>(
        &self,
        alarm: &mut A,
        started: Instant,
        kind: OperationKind,
    ) -> Result<(OpGuard<'_>, Tag), CollectiveError> {
        let (mut turn, tag) = self.inner.turn(alarm, started, kind.name()).await?;
        turn.operation = Operation::new(kind, None, 0);
        turn.name = self.options.name;
        turn.asked = self.options.asked.unwrap_or(started);
        Ok((turn, tag))
    }

    /// What a blocking operation needs before its turn. If that is not there, the operation takes its number all the same, and the
    /// peers hear why this rank does not do it.
    pub(super) fn needed<R>(
        &self,
        kind: OperationKind,
        needed: Result<R, CollectiveError>,
    ) -> Result<R, CollectiveError> {
        match needed {
            Ok(needed) => Ok(needed),
            needed => self.in_turn(kind, async |_, turn, tag| or_refuse(turn, tag, needed)),
        }
    }
}

/// Makes the started form of an operation: a method of [`Start`](super::Start) that has the operation's name.
///
/// First comes what the ranks agree on if the operation has a name. Then comes what is done when it is the operation's turn:
///
/// * a closure on the communicator, which returns the result;
/// * a closure on the communicator and the argument that it changes in place, which comes back after a failure;
/// * or a [`Job`](super::alike::Job), which may be done together with others that are alike.
macro_rules! started {
    (@method $(#[$doc:meta])* $name:ident[$($generics:tt)*]($($argument:ident: $type:ty),*) -> $result:ty,
        |$of:ident| $operation:expr, $submit:ident($($job:tt)*)) => {
        impl super::Start {
            #[doc = concat!("See [`Communicator::", stringify!($name), "`].")]
            $(#[$doc])*
            pub fn $name<$($generics)*>(&self $(, $argument: $type)*) -> $crate::handle::Handle<$result> {
                let $of = &self.comm;
                let operation = $operation;
                self.$submit(operation, $($job)*)
            }
        }
    };
    ($(#[$doc:meta])* $name:ident $generics:tt $arguments:tt -> $result:ty,
        |$of:ident| $operation:expr, |$comm:ident| $does:expr) => {
        started!(@method $(#[$doc])* $name $generics $arguments -> $result,
            |$of| $operation, give(move |$comm| $does));
    };
    ($(#[$doc:meta])* $name:ident $generics:tt $arguments:tt -> $result:ty,
        |$of:ident| $operation:expr, |$comm:ident, $data:ident| $does:expr) => {
        started!(@method $(#[$doc])* $name $generics $arguments -> $result,
            |$of| $operation, change($data, move |$comm, $data| $does));
    };
    ($(#[$doc:meta])* $name:ident $generics:tt $arguments:tt -> $result:ty,
        |$of:ident| $operation:expr, $job:expr) => {
        started!(@method $(#[$doc])* $name $generics $arguments -> $result,
            |$of| $operation, submit_job($job));
    };
}
pub(super) use started;
