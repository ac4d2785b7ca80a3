//! From a request to its bodies: what the public futures share.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use kolo_transport::ids::{CallId, Generation, ObjectId, Rank};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::failure::CallError;
use super::generations::Generations;
use super::group::{Bodies, Group, Request};
use super::object::Owner;
use super::outbox::Permit;
use super::scope::Scope;
use super::target::Target;

/// Why a call has no result that nobody answers any more.
const GONE: &str = "its executor is gone";

/// The source of a call's answer.
enum Source {
    Group(Arc<Group>),
    Generations(Arc<Generations>),
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

    fn span(
        generations: &Arc<Generations>,
        request: Request,
        permit: Permit,
    ) -> Result<Self, CallError> {
        let name = Arc::from(request.name.as_str());
        let (call, answer) = generations.span(request, permit)?;
        let source = Source::Generations(Arc::clone(generations));
        Ok(Self::new(source, &name, call, answer))
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
            return Pending::span(generations, request, permit).map(State::Sent);
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
