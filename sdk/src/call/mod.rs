//! Calls on the ranks of a group.

mod busy;
mod create;
mod entry;
mod failure;
mod generations;
mod group;
mod object;
mod outbox;
mod pending;
mod request;
mod scope;
mod send;
mod spanning;
mod table;
mod target;
mod values;

use std::fmt;
use std::future::{Future, IntoFuture};
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use kolo_transport::ids::Rank;
use kolo_transport::wire::CallOp;
use serde::de::DeserializeOwned;

pub use busy::BusyRank;
pub use create::{Create, CreateFuture};
#[cfg(test)]
pub(crate) use failure::tests::failure as test_failure;
pub use failure::{CallError, CallErrorKind, FailedCall, RankCause, RankError};
pub use generations::GenerationChange;
pub(crate) use generations::Generations;
pub(crate) use group::{Group, GroupNode, InFlight, Listener};
pub use object::Object;
#[cfg(test)]
pub(crate) use request::MAX_BODY;
pub use scope::{All, One, Ranks, Scope};
#[cfg(test)]
pub(crate) use spanning::tests::table as test_table;

use crate::codec::{self, CodecError};
use pending::Pending;
use request::Request;
use send::Send;
pub(crate) use target::Target;
pub(crate) use values::Recovery;

/// A call that has not been sent.
///
/// Await it for the results of all its ranks, in rank order (C-3), or [`submit`](Call::submit) it for a future per
/// rank. It is sent when its future is first polled, or by `submit`; until then it does nothing.
///
/// Calls reach every rank in the order in which they were sent (C-2), and run at most once on each (C-1).
///
/// # Back-pressure
///
/// An executor has at most [`max_in_flight`](crate::ExecutorBuilder::max_in_flight) calls in flight, 1024 by default;
/// with 64 bytes of arguments, that is far more than a worker needs to be busy. A call that is awaited waits its
/// turn, first come, first served. `submit` does not wait: beyond the limit it gives [`CallError::Busy`].
///
/// # Cancel safety
///
/// Dropping the future cancels the call: ranks that have not begun it do not begin, an asynchronous function stops
/// at its next await point, and a synchronous one runs to its end with nobody to hear it.
#[must_use = "a call does nothing until it is awaited or submitted"]
pub struct Call<S, T> {
    target: Target,
    /// It spans the generations of an elastic group.
    spans: bool,
    scope: S,
    request: Result<Request, CallError>,
    /// Keeps the executable until the call is sent.
    object: Option<Arc<object::Owner>>,
    output: PhantomData<fn() -> T>,
}

impl<S: Scope, T> Call<S, T> {
    pub(crate) fn new(
        target: Target,
        scope: S,
        name: String,
        op: CallOp,
        args: Result<Vec<u8>, CodecError>,
    ) -> Self {
        Self {
            target,
            spans: false,
            scope,
            request: Request::new(name, op, args),
            object: None,
            output: PhantomData,
        }
    }

    /// The call goes on through the generations of an elastic group.
    pub(crate) fn spanning(mut self) -> Self {
        self.spans = matches!(self.target, Target::Elastic(_));
        self
    }

    /// Sets how long the call may take, from when it is sent to its last result. There is no deadline by default.
    ///
    /// When it passes, the call fails with [`CallError::Deadline`], which names the ranks that were late, and is
    /// cancelled there.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        if let Ok(request) = &mut self.request {
            request.deadline = Some(deadline);
        }
        self
    }

    /// Sends the call now and gives one future per rank, in rank order. What goes wrong with one rank leaves the
    /// others' futures alone.
    ///
    /// Errors come from the futures: also those that concern the call as a whole, such as [`CallError::Busy`].
    pub fn submit(self) -> Vec<RankCall<T>> {
        let group = self.target.now();
        let ranks = self.scope.ranks(group.world_size());
        let sent = self.request.and_then(|request| {
            let permit = group.try_permit(&request.name)?;
            if let Some(object) = &self.object {
                object.admit(&group, &request.name)?;
            }
            let send = || Pending::send_each(&group, request, ranks.clone(), permit);
            match &self.object {
                Some(object) => object.counted(send),
                None => send(),
            }
        });
        let states: Vec<Result<Pending, CallError>> = match sent {
            Ok(pending) => pending.into_iter().map(Ok).collect(),
            Err(error) => ranks.iter().map(|_| Err(error.clone())).collect(),
        };
        let call = |(rank, state)| RankCall {
            rank,
            state: Some(state),
            output: PhantomData,
        };
        ranks.into_iter().zip(states).map(call).collect()
    }
}

impl<S: Scope, T: DeserializeOwned + 'static> IntoFuture for Call<S, T> {
    type Output = Result<S::Output<T>, CallError>;
    type IntoFuture = CallFuture<S, T>;

    fn into_future(self) -> CallFuture<S, T> {
        let name = self
            .request
            .as_ref()
            .map(|request| request.name.clone())
            .unwrap_or_default();
        CallFuture {
            name,
            send: Send::new(
                (self.target, self.spans),
                self.request,
                self.scope,
                self.object,
            ),
            output: PhantomData,
        }
    }
}

impl<S: fmt::Debug, T> fmt::Debug for Call<S, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call")
            .field("scope", &self.scope)
            .field("request", &self.request)
            .finish_non_exhaustive()
    }
}

/// The future of a [`Call`]. Dropping it cancels the call.
#[must_use = "futures do nothing until they are awaited"]
pub struct CallFuture<S, T> {
    name: String,
    send: Send<S>,
    output: PhantomData<fn() -> T>,
}

impl<S: Scope, T: DeserializeOwned + 'static> Future for CallFuture<S, T> {
    type Output = Result<S::Output<T>, CallError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let bodies = match self.send.poll(cx) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
            Poll::Ready(Ok(bodies)) => bodies,
        };
        let ranks = self.send.ranks();
        let results: Result<Vec<T>, CallError> = bodies
            .iter()
            .zip(ranks)
            .map(|(body, rank)| decode(&self.name, *rank, body))
            .collect();
        Poll::Ready(results.map(|results| self.send.scope().collect(results)))
    }
}

impl<S: Scope + fmt::Debug, T> fmt::Debug for CallFuture<S, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallFuture")
            .field("name", &self.name)
            .field("scope", self.send.scope())
            .finish_non_exhaustive()
    }
}

/// A call on one rank, sent by [`Call::submit`]. A future of its result; dropping it cancels the call on this rank.
#[must_use = "dropping it cancels the call on this rank"]
pub struct RankCall<T> {
    rank: Rank,
    state: Option<Result<Pending, CallError>>,
    output: PhantomData<fn() -> T>,
}

impl<T> RankCall<T> {
    /// The rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }
}

impl<T: DeserializeOwned + 'static> Future for RankCall<T> {
    type Output = Result<T, CallError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let rank = self.rank;
        let result = match &mut self.state {
            Some(Ok(pending)) => match pending.poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(result) => {
                    let name = pending.name();
                    result.and_then(|bodies| {
                        decode(name, rank, &bodies.first().cloned().unwrap_or_default())
                    })
                }
            },
            Some(Err(error)) => Err(error.clone()),
            None => panic!("a RankCall was polled after it was done"),
        };
        self.state = None;
        Poll::Ready(result)
    }
}

impl<T> fmt::Debug for RankCall<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankCall")
            .field("rank", &self.rank)
            .finish_non_exhaustive()
    }
}

fn decode<T: DeserializeOwned + 'static>(
    call: &str,
    rank: Rank,
    body: &[u8],
) -> Result<T, CallError> {
    codec::decode_result(body).map_err(|reason| CallError::Result {
        call: call.to_owned(),
        rank,
        reason,
    })
}
