//! Executables as the driver holds them.

use std::fmt;
use std::future::{Future, IntoFuture};
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use kolo_transport::ids::ObjectId;
use kolo_transport::wire::CallOp;

use super::Call;
use super::failure::CallError;
use super::group::{Group, Request};
use super::pending::Send;
use super::scope::{All, Scope};
use super::target::Target;
use crate::codec::CodecError;
use crate::executable::Executable;

/// Drops the values on the workers when the last handle goes.
pub(crate) struct Owner {
    group: Arc<Group>,
    object: ObjectId,
    class: &'static str,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.group.drop_object(self.object);
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
        let owner = &self.owner;
        let op = CallOp::Method {
            object: owner.object,
            name: method.to_owned(),
        };
        let name = format!("{}::{method}", owner.class);
        let target = Target::Fixed(Arc::clone(&owner.group));
        let mut call = Call::new(target, self.scope.clone(), name, op, args);
        call.object = Some(Arc::clone(owner));
        call
    }

    /// The same values, called on other ranks.
    pub fn with_scope<R: Scope>(&self, scope: R) -> Object<R> {
        Object {
            owner: Arc::clone(&self.owner),
            scope,
        }
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
#[must_use = "nothing is made until it is awaited"]
pub struct Create<T> {
    group: Arc<Group>,
    request: Result<Request, CallError>,
    object: ObjectId,
    class: PhantomData<fn() -> T>,
}

impl<T: Executable> Create<T> {
    pub(crate) fn new(target: &Target, args: Result<Vec<u8>, CodecError>) -> Self {
        let group = target.now();
        let object = group.new_object();
        let name = T::NAME.to_owned();
        let request = match args {
            Ok(_) if matches!(target, Target::Elastic(_)) => {
                Err(CallError::Elastic { class: name })
            }
            Ok(body) => {
                let op = CallOp::Create {
                    object,
                    class: name.clone(),
                };
                Ok(Request {
                    name,
                    op,
                    body: Bytes::from(body),
                    deadline: None,
                })
            }
            Err(reason) => Err(CallError::Arguments { call: name, reason }),
        };
        Self {
            group,
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
        let owner = self.request.is_ok().then(|| {
            Arc::new(Owner {
                group: Arc::clone(&self.group),
                object: self.object,
                class: T::NAME,
            })
        });
        CreateFuture {
            send: Send::new((Target::Fixed(self.group), false), self.request, All, None),
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
                Poll::Ready(result.map(|_| {
                    let owner = owner.expect("a call that was sent has an owner");
                    Object { owner, scope: All }.into()
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
