//! Making a value of an executable on all ranks.

use std::fmt;
use std::future::{Future, IntoFuture};
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use kolo_transport::ids::{Generation, ObjectId};
use kolo_transport::wire::CallOp;

use super::failure::CallError;
use super::object::{Object, Owner};
use super::request::Request;
use super::scope::All;
use super::send::Send;
use super::target::Target;
use super::values::{Progress, Value};
use crate::codec::CodecError;
use crate::executable::Executable;

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
        let class = T::NAME.to_owned();
        let op = match target {
            Target::Fixed(_) => Ok(CallOp::Create { object, class }),
            Target::Elastic(_) if T::ELASTIC => Ok(CallOp::Recover { object, class }),
            Target::Elastic(_) => Err(CallError::Elastic { class }),
        };
        Self {
            target: target.clone(),
            request: op.and_then(|op| Request::new(T::NAME.to_owned(), op, args)),
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
            let value = Value {
                object: self.object,
                class: T::NAME,
                args,
                deadline: request.deadline,
                progress: Mutex::new(Progress::new(Generation::default())),
            };
            Arc::new(Owner {
                target: self.target.clone(),
                value: Arc::new(value),
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
                        generations.adopt(&owner.value, self.send.sent_to())?;
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
