//! Executables as the driver holds them.

use std::fmt;
use std::future::{Future, IntoFuture};
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use kolo_transport::ids::{Generation, ObjectId};
use kolo_transport::wire::CallOp;

use super::Call;
use super::failure::CallError;
use super::group::{Group, Request};
use super::pending::Send;
use super::scope::{All, Scope};
use super::target::Target;
use super::values::Progress;
use crate::codec::CodecError;
use crate::executable::Executable;

/// What all handles of a value share. Drops the value on the workers when the last handle goes.
pub(crate) struct Owner {
    target: Target,
    object: ObjectId,
    class: &'static str,
    /// By which it is made where it is missing, in an elastic group.
    args: Bytes,
    deadline: Option<Duration>,
    progress: Mutex<Progress>,
}

impl Owner {
    pub(super) fn object(&self) -> ObjectId {
        self.object
    }

    pub(super) fn class(&self) -> &'static str {
        self.class
    }

    pub(super) fn progress(&self) -> MutexGuard<'_, Progress> {
        // Nothing in there panics half-way.
        (self.progress.lock()).unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a call go to a group, if the driver knows what the value is there.
    pub(super) fn admit(&self, group: &Group, call: &str) -> Result<(), CallError> {
        match &self.target {
            Target::Fixed(_) => Ok(()),
            Target::Elastic(_) => self.progress().admit(call, group.generation()),
        }
    }

    /// Sends a call, which counts from then on: its answer may come before `send` is back.
    pub(super) fn counted<T>(
        &self,
        send: impl FnOnce() -> Result<T, CallError>,
    ) -> Result<T, CallError> {
        if let Target::Fixed(_) = &self.target {
            return send();
        }
        self.progress().count();
        send().inspect_err(|_| self.progress().discount())
    }

    /// The call that brings the value to its last commit.
    pub(super) fn request(&self) -> Request {
        Request {
            name: self.class.to_owned(),
            op: CallOp::Recover {
                object: self.object,
                class: self.class.to_owned(),
            },
            body: self.args.clone(),
            deadline: self.deadline,
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let group = match &self.target {
            Target::Fixed(group) => Arc::clone(group),
            Target::Elastic(generations) => generations.forget(self.object),
        };
        let object = self.object;
        group.tell(CallOp::Drop { object }, &Bytes::new());
    }
}

/// One value of an [`Executable`] on every rank, with the ranks on which calls through this handle run.
///
/// [`#[kolo::executable]`](macro@crate::executable) wraps it in a handle that has the type's methods. Clones, and
/// handles of other scopes, share the values; when the last one is dropped, the values are dropped on the workers.
pub struct Object<S> {
    owner: Arc<Owner>,
    scope: S,
}

impl<S: Scope> Object<S> {
    /// A call of a method, by its registered name. Generated handles use it.
    pub fn call<T>(&self, method: &'static str, args: Result<Vec<u8>, CodecError>) -> Call<S, T> {
        let op = CallOp::Method {
            object: self.owner.object,
            name: method.to_owned(),
        };
        self.send(self.scope.clone(), method, op, args)
    }

    fn send<R: Scope, T>(
        &self,
        scope: R,
        method: &str,
        op: CallOp,
        args: Result<Vec<u8>, CodecError>,
    ) -> Call<R, T> {
        let owner = &self.owner;
        let name = format!("{}::{method}", owner.class);
        let mut call = Call::new(owner.target.clone(), scope, name, op, args);
        call.object = Some(Arc::clone(owner));
        call
    }

    /// Commits the value's state on all ranks, and gives the number of the commit: 1 for the first, one more for each further one. Ranks
    /// that are lost later cost the calls after the last commit, and no more. For a type that is `#[kolo::executable(elastic)]`.
    ///
    /// If nodes wait to join or to leave, the generation ends at this commit, without a loss of this value's work: the next call
    /// waits, or fails with [`CallError::GenerationOver`], as set with
    /// [`wait_for_recovery`](crate::ExecutorBuilder::wait_for_recovery).
    ///
    /// # Errors
    ///
    /// As of any call. After [`CallError::GenerationOver`] the commit may count or not, on all ranks alike: [`Object::recovered`] tells.
    pub async fn commit(&self) -> Result<u64, CallError> {
        let owner = &self.owner;
        let before = owner.progress().calls();
        let object = owner.object;
        let op = CallOp::Commit { object };
        let call: Call<All, u64> = self.send(All, "commit", op, Ok(Vec::new()));
        let results = call.await?;
        let commit = results.first().copied().unwrap_or_default();
        owner.progress().committed(before + 1, commit);
        if let Target::Elastic(generations) = &owner.target {
            generations.has_committed();
        }
        Ok(commit)
    }

    /// Waits for a generation in which all ranks have the value, at its last commit, and gives the number of that commit; 0 if
    /// there is none, and the value is as it was made. From then on calls are taken again. Cancel safe.
    ///
    /// # Errors
    ///
    /// [`CallError::Ended`]: there is no such generation, and none will come. [`CallError::Failed`]: a process that has joined could
    /// not make the value, or had other parts; drop the handle, and create another value.
    pub async fn recovered(&self) -> Result<u64, CallError> {
        let owner = &self.owner;
        match &owner.target {
            Target::Fixed(group) if group.is_whole() => {}
            Target::Fixed(_) => {
                let reason = "the group never changes, and has lost a worker";
                return Err(CallError::ended(owner.class, reason));
            }
            Target::Elastic(generations) => {
                let recovered = generations.recovered().await;
                recovered.map_err(|end| end.of_elastic(owner.class))?;
            }
        }
        let commit = owner.progress().acknowledge();
        // Calls that are lost are no reason to wait any more.
        if let Target::Elastic(generations) = &owner.target {
            generations.between_calls();
        }
        commit
    }

    /// The same values, called on other ranks.
    pub fn with_scope<R: Scope>(&self, scope: R) -> Object<R> {
        Object {
            owner: Arc::clone(&self.owner),
            scope,
        }
    }

    #[cfg(test)]
    pub(crate) fn id(&self) -> ObjectId {
        self.owner.object
    }

    /// The ranks on which its calls run.
    pub fn scope(&self) -> &S {
        &self.scope
    }
}

impl<S: Clone> Clone for Object<S> {
    fn clone(&self) -> Self {
        Self {
            owner: Arc::clone(&self.owner),
            scope: self.scope.clone(),
        }
    }
}

impl<S: fmt::Debug> fmt::Debug for Object<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Object")
            .field("class", &self.owner.class)
            .field("object", &self.owner.object)
            .field("scope", &self.scope)
            .finish_non_exhaustive()
    }
}

/// The making of an executable on all ranks; await it for its handle.
///
/// It is sent when its future is first polled. If one rank fails, the values that were made on others are dropped.
///
/// On an elastic group the type has to be [`Elastic`](crate::elastic::Elastic), and all ranks begin with the state that rank 0 has made.
/// Each process that joins makes the value with the same arguments, and takes on the state of the last commit. Such a process calls
/// `new` alone, so that `new` makes no collective operations.
#[must_use = "nothing is made until it is awaited"]
pub struct Create<T> {
    target: Target,
    request: Result<Request, CallError>,
    object: ObjectId,
    class: PhantomData<fn() -> T>,
}

impl<T: Executable> Create<T> {
    pub(crate) fn new(target: &Target, args: Result<Vec<u8>, CodecError>) -> Self {
        let object = target.now().new_object();
        let name = T::NAME.to_owned();
        let class = name.clone();
        let op = match target {
            Target::Fixed(_) => Ok(CallOp::Create { object, class }),
            Target::Elastic(_) if T::ELASTIC => Ok(CallOp::Recover { object, class }),
            Target::Elastic(_) => Err(CallError::Elastic { class }),
        };
        let request = op.and_then(|op| match args {
            Ok(body) => Ok(Request {
                name,
                op,
                body: Bytes::from(body),
                deadline: None,
            }),
            Err(reason) => Err(CallError::Arguments { call: name, reason }),
        });
        Self {
            target: target.clone(),
            request,
            object,
            class: PhantomData,
        }
    }

    /// Sets how long it may take on the slowest rank. There is no deadline by default.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        if let Ok(request) = &mut self.request {
            request.deadline = Some(deadline);
        }
        self
    }
}

impl<T: Executable> IntoFuture for Create<T> {
    type Output = Result<T::Handle<All>, CallError>;
    type IntoFuture = CreateFuture<T>;

    fn into_future(self) -> CreateFuture<T> {
        let owner = self.request.as_ref().ok().map(|request| {
            let args = match &self.target {
                Target::Fixed(_) => Bytes::new(),
                Target::Elastic(_) => request.body.clone(),
            };
            Arc::new(Owner {
                target: self.target.clone(),
                object: self.object,
                class: T::NAME,
                args,
                deadline: request.deadline,
                progress: Mutex::new(Progress::new(Generation::default())),
            })
        });
        let is_elastic = matches!(self.target, Target::Elastic(_));
        let mut send = Send::new((self.target, false), self.request, All, None);
        if is_elastic {
            send = send.making(self.object);
        }
        CreateFuture {
            send,
            owner,
            class: PhantomData,
        }
    }
}

impl<T> fmt::Debug for Create<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Create")
            .field("object", &self.object)
            .field("request", &self.request)
            .finish_non_exhaustive()
    }
}

/// The future of [`Create`]. Dropping it cancels, and drops what was made.
#[must_use = "futures do nothing until they are awaited"]
pub struct CreateFuture<T> {
    // Before the owner, so that a cancellation goes out before the drop.
    send: Send<All>,
    owner: Option<Arc<Owner>>,
    class: PhantomData<fn() -> T>,
}

impl<T: Executable> Future for CreateFuture<T> {
    type Output = Result<T::Handle<All>, CallError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.send.poll(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(result) => {
                let owner = self.owner.take();
                Poll::Ready(result.and_then(|_| {
                    let owner = owner.expect("a call that was sent has an owner");
                    if let Target::Elastic(generations) = &owner.target {
                        generations.adopt(&owner, self.send.sent_to())?;
                    }
                    Ok(Object { owner, scope: All }.into())
                }))
            }
        }
    }
}

impl<T> fmt::Debug for CreateFuture<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CreateFuture").finish_non_exhaustive()
    }
}
