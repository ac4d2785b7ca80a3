//! Executables as the driver holds them.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
#[cfg(test)]
use kolo_transport::ids::ObjectId;
use kolo_transport::wire::CallOp;

use super::Call;
use super::failure::CallError;
use super::group::{Group, Listener as _};
use super::scope::{All, Scope};
use super::target::Target;
use super::values::Value;
use crate::codec::CodecError;

/// What all handles of a value share. Drops the value on the workers when the last handle goes.
pub(crate) struct Owner {
    pub(super) target: Target,
    pub(super) value: Arc<Value>,
}

impl Owner {
    /// Lets a call go to a group, if the driver knows what the value is there.
    pub(super) fn admit(&self, group: &Group, call: &str) -> Result<(), CallError> {
        match &self.target {
            Target::Fixed(_) => Ok(()),
            Target::Elastic(_) => self.value.progress().admit(call, group.generation()),
        }
    }

    /// Sends a call, which counts from then on: its answer may come before `send` is back.
    pub(super) fn counted<T>(
        &self,
        send: impl FnOnce() -> Result<T, CallError>,
    ) -> Result<T, CallError> {
        match &self.target {
            Target::Fixed(_) => send(),
            Target::Elastic(_) => self.value.counted(send),
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let group = match &self.target {
            Target::Fixed(group) => Arc::clone(group),
            Target::Elastic(generations) => generations.forget(self.value.object),
        };
        let object = self.value.object;
        group.tell(CallOp::Drop { object }, &Bytes::new());
    }
}

/// One value of an [`Executable`](crate::Executable) on every rank, with the ranks on which calls through this handle run.
///
/// [`#[kolo::executable]`](macro@crate::executable) wraps it in a handle that has the type's methods. Clones, and
/// handles of other scopes, share the values; when the last one is dropped, the values are dropped on the workers.
pub struct Object<S> {
    pub(super) owner: Arc<Owner>,
    pub(super) scope: S,
}

impl<S: Scope> Object<S> {
    /// A call of a method, by its registered name. Generated handles use it.
    pub fn call<T>(&self, method: &'static str, args: Result<Vec<u8>, CodecError>) -> Call<S, T> {
        let op = CallOp::Method {
            object: self.owner.value.object,
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
        let name = format!("{}::{method}", owner.value.class);
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
        let before = owner.value.progress().calls();
        let object = owner.value.object;
        let op = CallOp::Commit { object };
        let call: Call<All, u64> = self.send(All, "commit", op, Ok(Vec::new()));
        let results = call.await?;
        let commit = results.first().copied().unwrap_or_default();
        owner.value.progress().committed(before + 1, commit);
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
                return Err(CallError::ended(owner.value.class, reason));
            }
            Target::Elastic(generations) => {
                let recovered = generations.recovered().await;
                recovered.map_err(|end| end.of_elastic(owner.value.class))?;
            }
        }
        let commit = owner.value.progress().acknowledge();
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
        self.owner.value.object
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
            .field("class", &self.owner.value.class)
            .field("object", &self.owner.value.object)
            .field("scope", &self.scope)
            .finish_non_exhaustive()
    }
}
