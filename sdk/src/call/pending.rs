//! A call that was sent, and waits for its answer.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use kolo_transport::ids::{CallId, Rank};
use tokio::sync::oneshot;

use super::failure::CallError;
use super::group::{Group, Listener};
use super::outbox::Permit;
use super::request::{Bodies, Request};

/// Why a call has no result that nobody answers any more.
pub(super) const GONE: &str = "its executor is gone";

/// The source of a call's answer.
enum Source {
    Group(Arc<Group>),
    Generations(Arc<dyn Listener>),
}

/// A call that was sent. Dropping it cancels.
pub(crate) struct Pending {
    source: Source,
    name: Arc<str>,
    call: CallId,
    /// For one of several: its rank.
    rank: Option<Rank>,
    answer: oneshot::Receiver<Bodies>,
    /// The links know that somebody waits.
    awaited: bool,
    done: bool,
}

impl Pending {
    fn new(
        source: Source,
        name: &Arc<str>,
        call: CallId,
        answer: oneshot::Receiver<Bodies>,
    ) -> Self {
        Self {
            source,
            name: Arc::clone(name),
            call,
            rank: None,
            answer,
            awaited: true,
            done: false,
        }
    }

    /// A call that spans generations.
    pub(super) fn spanning(
        generations: Arc<dyn Listener>,
        name: &str,
        (call, answer): (CallId, oneshot::Receiver<Bodies>),
    ) -> Self {
        Self::new(
            Source::Generations(generations),
            &Arc::from(name),
            call,
            answer,
        )
    }

    pub(super) fn send_whole(
        group: Arc<Group>,
        request: Request,
        ranks: Vec<Rank>,
        permit: Permit,
    ) -> Result<Self, CallError> {
        let name = Arc::from(request.name.as_str());
        let (call, mut answers) = group.send(request, ranks, false, permit)?;
        let answer = answers.pop().expect("one waiter for the whole call");
        Ok(Self::new(Source::Group(group), &name, call, answer))
    }

    pub(crate) fn send_each(
        group: &Arc<Group>,
        request: Request,
        ranks: Vec<Rank>,
        permit: Permit,
    ) -> Result<Vec<Self>, CallError> {
        let name: Arc<str> = Arc::from(request.name.as_str());
        let (call, answers) = group.send(request, ranks.clone(), true, permit)?;
        let pending = |(rank, answer)| {
            let mut pending = Self::new(Source::Group(Arc::clone(group)), &name, call, answer);
            (pending.rank, pending.awaited) = (Some(rank), false);
            pending
        };
        Ok(ranks.into_iter().zip(answers).map(pending).collect())
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Bodies> {
        let answer = match Pin::new(&mut self.answer).poll(cx) {
            Poll::Pending => {
                if !std::mem::replace(&mut self.awaited, true)
                    && let Source::Group(group) = &self.source
                {
                    group.awaited();
                }
                return Poll::Pending;
            }
            Poll::Ready(Ok(answer)) => answer,
            // The table answers every waiter before it goes. This is what is left if it could not.
            Poll::Ready(Err(_)) => Err(CallError::ended(&self.name, GONE)),
        };
        self.done = true;
        Poll::Ready(answer)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        match &self.source {
            _ if self.done => {}
            Source::Group(group) => group.cancel(self.call, self.rank),
            Source::Generations(generations) => generations.cancel(self.call),
        }
    }
}
