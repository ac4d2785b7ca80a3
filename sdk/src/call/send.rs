//! From a request to its bodies: what the public futures share.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use kolo_transport::ids::{Generation, ObjectId, Rank};
use tokio::sync::OwnedSemaphorePermit;

use super::failure::CallError;
use super::group::{Group, Listener};
use super::object::Owner;
use super::outbox::Permit;
use super::pending::{GONE, Pending};
use super::request::{Bodies, Request};
use super::scope::Scope;
use super::target::Target;

/// A wait before a call is sent.
type Turn<T> = Pin<Box<dyn Future<Output = T> + std::marker::Send>>;

/// A call on the way from its request to its bodies.
pub(crate) struct Send<S> {
    target: Target,
    /// It spans the generations of an elastic group.
    spans: bool,
    /// The value that it makes, in an elastic group.
    makes: Option<ObjectId>,
    scope: S,
    /// The ranks of the bodies, once it is sent.
    ranks: Vec<Rank>,
    state: State,
    /// The generation of the group that it was sent to.
    sent_to: Generation,
    object: Option<Arc<Owner>>,
}

enum State {
    Unsent(Result<Request, CallError>),
    /// For the next generation.
    Recovering(Request, Turn<()>),
    /// For others to end.
    Waiting(Request, Turn<Option<OwnedSemaphorePermit>>),
    Sent(Pending),
    Done,
}

impl<S: Scope> Send<S> {
    pub(crate) fn new(
        (target, spans): (Target, bool),
        request: Result<Request, CallError>,
        scope: S,
        object: Option<Arc<Owner>>,
    ) -> Self {
        Self {
            target,
            spans,
            makes: None,
            scope,
            ranks: Vec::new(),
            state: State::Unsent(request),
            sent_to: Generation::default(),
            object,
        }
    }

    /// The call makes a value on all ranks of an elastic group. It waits for the next generation if this one is over: that it has not
    /// begun anywhere costs nothing.
    pub(super) fn making(mut self, object: ObjectId) -> Self {
        self.makes = Some(object);
        self
    }

    pub(crate) fn scope(&self) -> &S {
        &self.scope
    }

    /// The generation of the group that it was sent to.
    pub(super) fn sent_to(&self) -> Generation {
        self.sent_to
    }

    pub(crate) fn ranks(&self) -> &[Rank] {
        &self.ranks
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Bodies> {
        loop {
            match std::mem::replace(&mut self.state, State::Done) {
                State::Unsent(Err(error)) => return Poll::Ready(Err(error)),
                State::Unsent(Ok(request)) => {
                    if !self.spans
                        && self.waits()
                        && let Some(next) = self.target.recovery()
                    {
                        self.state = State::Recovering(request, Box::pin(next));
                        continue;
                    }
                    let group = self.target.now();
                    self.state = match group.try_permit(&request.name) {
                        Ok(permit) => self.send(group, request, permit)?,
                        Err(_) => State::Waiting(request, Box::pin(group.permit())),
                    };
                }
                State::Recovering(request, mut next) => match next.as_mut().poll(cx) {
                    Poll::Pending => {
                        self.state = State::Recovering(request, next);
                        return Poll::Pending;
                    }
                    Poll::Ready(()) => self.state = State::Unsent(Ok(request)),
                },
                State::Waiting(request, mut turn) => match turn.as_mut().poll(cx) {
                    Poll::Pending => {
                        self.state = State::Waiting(request, turn);
                        return Poll::Pending;
                    }
                    Poll::Ready(Some(permit)) => {
                        let group = self.target.now();
                        self.state = self.send(group, request, Arc::new(permit))?;
                    }
                    Poll::Ready(None) => {
                        return Poll::Ready(Err(CallError::ended(&request.name, GONE)));
                    }
                },
                State::Sent(mut pending) => {
                    let answer = pending.poll(cx);
                    match &answer {
                        Poll::Pending => self.state = State::Sent(pending),
                        // The ranks of its last generation.
                        Poll::Ready(Ok(bodies)) if self.spans => {
                            self.ranks = (0..bodies.len() as u32).map(Rank).collect();
                        }
                        Poll::Ready(_) => {}
                    }
                    return answer;
                }
                State::Done => panic!("the future of a call was polled after it was done"),
            }
        }
    }

    /// Whether it waits if the present generation is over.
    fn waits(&self) -> bool {
        self.makes.is_some() || self.target.waits()
    }

    fn send(
        &mut self,
        group: Arc<Group>,
        request: Request,
        permit: Permit,
    ) -> Result<State, CallError> {
        if self.spans
            && let Target::Elastic(generations) = &self.target
        {
            let name = request.name.clone();
            let sent = generations.span(request, permit)?;
            let all = Arc::clone(generations) as Arc<dyn Listener>;
            return Ok(State::Sent(Pending::spanning(all, &name, sent)));
        }
        if let Some(object) = &self.object {
            object.admit(&group, &request.name)?;
        }
        self.sent_to = group.generation();
        self.ranks = self.scope.ranks(group.world_size());
        let kept = self.waits().then(|| request.clone());
        if let (Some(object), Target::Elastic(generations)) = (self.makes, &self.target) {
            generations.begin_to_make(object);
        }
        let send = || Pending::send_whole(group, request, self.ranks.clone(), permit);
        let sent = match &self.object {
            Some(object) => object.counted(send),
            None => send(),
        };
        match sent {
            Ok(sent) => Ok(State::Sent(sent)),
            Err(error) => {
                if let (Some(object), Target::Elastic(generations)) = (self.makes, &self.target) {
                    generations.stop_to_make(object);
                }
                // The generation has ended a moment ago.
                let again = kept.filter(|_| error.is_retryable());
                let request = again.ok_or(error)?;
                self.target.is_over(self.sent_to);
                Ok(State::Unsent(Ok(request)))
            }
        }
    }
}
