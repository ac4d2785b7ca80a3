//! From a request to its bodies: what the public futures share.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use kolo_transport::ids::{CallId, Rank};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::failure::CallError;
use super::group::{Bodies, Group, Request};
use super::object::Owner;
use super::outbox::Permit;

/// A call that was sent. Dropping it cancels.
pub(crate) struct Pending {
    group: Arc<Group>,
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
    fn send_whole(
        group: &Arc<Group>,
        request: Request,
        ranks: Vec<Rank>,
        permit: Permit,
    ) -> Result<Self, CallError> {
        let name = Arc::from(request.name.as_str());
        let (call, answers) = group.send(request, ranks, false, permit)?;
        let answer = answers
            .into_iter()
            .next()
            .expect("one waiter for the whole call");
        Ok(Self {
            group: Arc::clone(group),
            name,
            call,
            rank: None,
            answer,
            awaited: true,
            done: false,
        })
    }

    pub(crate) fn send_each(
        group: &Arc<Group>,
        request: Request,
        ranks: Vec<Rank>,
        permit: Permit,
    ) -> Result<Vec<Self>, CallError> {
        let name: Arc<str> = Arc::from(request.name.as_str());
        let (call, answers) = group.send(request, ranks.clone(), true, permit)?;
        let pending = |(rank, answer)| Self {
            group: Arc::clone(group),
            name: Arc::clone(&name),
            call,
            rank: Some(rank),
            answer,
            awaited: false,
            done: false,
        };
        Ok(ranks.into_iter().zip(answers).map(pending).collect())
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Bodies> {
        let answer = match Pin::new(&mut self.answer).poll(cx) {
            Poll::Pending => {
                if !std::mem::replace(&mut self.awaited, true) {
                    self.group.awaited();
                }
                return Poll::Pending;
            }
            Poll::Ready(Ok(answer)) => answer,
            // The table answers every waiter before it goes. This is what is left if it could not.
            Poll::Ready(Err(_)) => Err(CallError::Ended {
                call: self.name.to_string(),
                reason: "its executor is gone".to_owned(),
            }),
        };
        self.done = true;
        Poll::Ready(answer)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.done {
            self.group.cancel(self.call, self.rank);
        }
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending")
            .field("call", &self.call)
            .field("rank", &self.rank)
            .finish_non_exhaustive()
    }
}

type Turn = Pin<Box<dyn Future<Output = Option<OwnedSemaphorePermit>> + std::marker::Send>>;

/// A call on the way from its request to its bodies.
pub(crate) struct Send {
    group: Arc<Group>,
    ranks: Vec<Rank>,
    state: State,
    _object: Option<Arc<Owner>>,
}

enum State {
    Unsent(Result<Request, CallError>),
    Waiting(Request, Turn),
    Sent(Pending),
    Done,
}

impl Send {
    pub(crate) fn new(
        group: Arc<Group>,
        request: Result<Request, CallError>,
        ranks: Vec<Rank>,
        object: Option<Arc<Owner>>,
    ) -> Self {
        Self {
            group,
            ranks,
            state: State::Unsent(request),
            _object: object,
        }
    }

    pub(crate) fn ranks(&self) -> &[Rank] {
        &self.ranks
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Bodies> {
        loop {
            match std::mem::replace(&mut self.state, State::Done) {
                State::Unsent(Err(error)) => return Poll::Ready(Err(error)),
                State::Unsent(Ok(request)) => {
                    self.state = match self.group.try_permit(&request.name) {
                        Ok(permit) => State::Sent(self.send(request, permit)?),
                        Err(_) => State::Waiting(request, Box::pin(self.group.permit())),
                    };
                }
                State::Waiting(request, mut turn) => match turn.as_mut().poll(cx) {
                    Poll::Pending => {
                        self.state = State::Waiting(request, turn);
                        return Poll::Pending;
                    }
                    Poll::Ready(Some(permit)) => {
                        self.state = State::Sent(self.send(request, Arc::new(permit))?);
                    }
                    Poll::Ready(None) => {
                        let reason = "its executor is gone".to_owned();
                        return Poll::Ready(Err(CallError::Ended {
                            call: request.name,
                            reason,
                        }));
                    }
                },
                State::Sent(mut pending) => {
                    let answer = pending.poll(cx);
                    if answer.is_pending() {
                        self.state = State::Sent(pending);
                    }
                    return answer;
                }
                State::Done => panic!("the future of a call was polled after it was done"),
            }
        }
    }

    fn send(&self, request: Request, permit: Permit) -> Result<Pending, CallError> {
        Pending::send_whole(&self.group, request, self.ranks.clone(), permit)
    }
}
