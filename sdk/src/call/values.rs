//! Values of executables in an elastic group, as its driver knows them: how far each has come, and how it gets to the next generation.
//!
//! A value goes back to its last commit when a generation ends. A driver that has called the value since then must hear of that, also
//! if the loss and the recovery come between two of its calls: the next call fails with [`CallError::GenerationOver`], until the driver
//! has asked which commit the value is at.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use kolo_transport::ids::{Generation, ObjectId, Rank};
use kolo_transport::wire::CallOp;

use super::failure::{CallError, CallErrorKind};
use super::group::Group;
use super::pending::Pending;
use super::request::Request;
use crate::codec;

/// One value of an executable on every rank.
pub(crate) struct Value {
    pub(super) object: ObjectId,
    pub(super) class: &'static str,
    /// By which it is made where it is missing, in an elastic group.
    pub(super) args: Bytes,
    pub(super) deadline: Option<Duration>,
    pub(super) progress: Mutex<Progress>,
}

impl Value {
    pub(super) fn progress(&self) -> MutexGuard<'_, Progress> {
        // Nothing in there panics half-way.
        (self.progress.lock()).unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a call, which counts from then on: its answer may come before `send` is back.
    pub(super) fn counted<T>(
        &self,
        send: impl FnOnce() -> Result<T, CallError>,
    ) -> Result<T, CallError> {
        self.progress().count();
        send().inspect_err(|_| self.progress().discount())
    }

    /// The call that brings the value to its last commit.
    fn request(&self) -> Request {
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

/// The progress of one value.
#[derive(Debug)]
pub(super) struct Progress {
    /// The last generation that the value has come to, and its commit there; or why it could not come there.
    at: Result<(Generation, u64), CallError>,
    /// The generation that the driver knows the value to be in, and its last commit there.
    known: Generation,
    known_commit: u64,
    /// Calls so far, and how many of them the last commit has in it.
    calls: u64,
    committed: u64,
}

impl Progress {
    /// A value that was just made.
    pub(super) fn new(generation: Generation) -> Self {
        Self {
            at: Ok((generation, 0)),
            known: generation,
            known_commit: 0,
            calls: 0,
            committed: 0,
        }
    }

    /// Looks whether the driver knows what the value is in a generation.
    pub(super) fn admit(&mut self, call: &str, generation: Generation) -> Result<(), CallError> {
        let (_, commit) = self.at.clone()?;
        if self.known != generation {
            // All members may be lost with a commit, if another state of theirs is on disk.
            if self.calls != self.committed || commit < self.known_commit {
                return Err(CallError::GenerationOver {
                    call: call.to_owned(),
                    generation: self.known,
                    lost: Vec::new(),
                    cause: format!(
                        "the value is back at commit {commit}, and calls after that are lost; call recovered() of its handle"
                    ),
                });
            }
            self.known = generation;
        }
        Ok(())
    }

    /// A call is sent.
    pub(super) fn count(&mut self) {
        self.calls += 1;
    }

    /// It was not.
    pub(super) fn discount(&mut self) {
        self.calls -= 1;
    }

    pub(super) fn calls(&self) -> u64 {
        self.calls
    }

    /// A commit has so many calls in it.
    pub(super) fn committed(&mut self, calls: u64, commit: u64) {
        self.committed = calls;
        self.known_commit = commit;
        if let Ok((_, at)) = &mut self.at {
            *at = commit;
        }
    }

    /// Whether a change of the group loses no call of the value.
    pub(super) fn is_committed(&self) -> bool {
        self.calls == self.committed || self.at.is_err()
    }

    /// The value has come to a generation, or could not.
    fn recovered(&mut self, at: Result<(Generation, u64), CallError>) {
        self.at = at;
    }

    /// The driver hears which commit the value is at.
    pub(super) fn acknowledge(&mut self) -> Result<u64, CallError> {
        let (generation, commit) = self.at.clone()?;
        if self.known != generation {
            self.known = generation;
            self.known_commit = commit;
            self.committed = self.calls;
        }
        Ok(commit)
    }
}

/// Values on their way to a generation.
pub(crate) struct Recovery {
    group: Arc<Group>,
    values: Vec<(Arc<Value>, Result<Pending, CallError>)>,
}

impl Recovery {
    /// Asks all ranks for these values, in the same order everywhere, and for nothing else that was made before.
    pub(super) fn begin(group: Arc<Group>, values: Vec<Arc<Value>>) -> Self {
        let kept: Vec<ObjectId> = values.iter().map(|value| value.object).collect();
        match codec::encode(&kept) {
            Ok(list) => group.tell(CallOp::Retain, &Bytes::from(list)),
            // A list of numbers.
            Err(error) => tracing::error!(%error, "values that were dropped stay on their workers"),
        }
        let all: Vec<Rank> = (0..group.world_size() as u32).map(Rank).collect();
        let recover = |value: Arc<Value>| {
            let permit = Group::permit_beside();
            let sent =
                Pending::send_whole(Arc::clone(&group), value.request(), all.clone(), permit);
            (value, sent)
        };
        let values = values.into_iter().map(recover).collect();
        Self { group, values }
    }

    /// The values.
    pub(super) fn objects(&self) -> Vec<ObjectId> {
        self.values.iter().map(|(value, _)| value.object).collect()
    }

    /// A generation without values.
    pub(super) fn nothing(group: Arc<Group>) -> Self {
        let values = Vec::new();
        Self { group, values }
    }

    /// There is nothing to wait for.
    pub(crate) fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    pub(crate) fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// Waits until all ranks have the values, and says whether the generation goes on. A value that can't come there is reported by
    /// its calls, and keeps no others back. Cancel safe.
    pub(crate) async fn done(&mut self) -> bool {
        let generation = self.group.generation();
        while let Some((value, sent)) = self.values.last_mut() {
            let answer = match sent {
                Ok(pending) => poll_fn(|cx| pending.poll(cx)).await,
                Err(error) => Err(error.clone()),
            };
            let at = answer.and_then(|bodies| {
                let body = bodies.first().cloned().unwrap_or_default();
                let commit = super::decode(value.class, Rank(0), &body)?;
                Ok((generation, commit))
            });
            if let Err(error) = &at {
                match error.kind() {
                    CallErrorKind::GenerationOver | CallErrorKind::Ended => {
                        tracing::debug!(%generation, %error, "the group changes again");
                        return false;
                    }
                    _ => {
                        let class = value.class;
                        tracing::error!(%generation, class, %error, "a value is lost");
                    }
                }
            }
            value.progress().recovered(at);
            self.values.pop();
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Generation = Generation(1);
    const SECOND: Generation = Generation(2);

    impl Progress {
        fn call(&mut self, call: &str, generation: Generation) -> Result<(), CallError> {
            self.admit(call, generation)?;
            self.count();
            Ok(())
        }
    }

    #[test]
    fn calls_after_the_last_commit_are_told_to_be_lost_until_somebody_asks() {
        let mut value = Progress::new(FIRST);
        value.call("add", FIRST).unwrap();
        value.recovered(Ok((SECOND, 0)));
        for _ in 0..2 {
            let error = value.call("add", SECOND).unwrap_err();
            assert!(error.is_retryable(), "{error}");
            assert!(error.to_string().contains("back at commit 0"), "{error}");
        }
        assert_eq!(value.acknowledge(), Ok(0));
        value.call("add", SECOND).unwrap();
        // That was said of the generation before.
        assert_eq!(value.acknowledge(), Ok(0));
        value.recovered(Ok((Generation(3), 0)));
        assert!(value.call("add", Generation(3)).is_err());
    }

    #[test]
    fn a_value_without_calls_after_its_last_commit_goes_on() {
        let mut value = Progress::new(FIRST);
        value.recovered(Ok((SECOND, 0)));
        value.call("add", SECOND).unwrap();
        value.call("commit", SECOND).unwrap();
        value.committed(2, 1);
        value.recovered(Ok((Generation(4), 1)));
        value.call("add", Generation(4)).unwrap();
        assert_eq!(value.acknowledge(), Ok(1));
    }

    /// All members were lost, and only another state of theirs was on disk.
    #[test]
    fn e1_a_value_that_comes_back_at_an_older_commit_is_told() {
        let mut value = Progress::new(FIRST);
        value.call("add", FIRST).unwrap();
        value.call("commit", FIRST).unwrap();
        value.committed(2, 1);
        value.recovered(Ok((SECOND, 0)));
        let error = value.call("add", SECOND).unwrap_err();
        assert!(error.to_string().contains("back at commit 0"), "{error}");
        assert_eq!(value.acknowledge(), Ok(0));
        value.call("add", SECOND).unwrap();
    }

    #[test]
    fn a_call_that_crosses_a_commit_is_not_in_it() {
        let mut value = Progress::new(FIRST);
        value.call("commit", FIRST).unwrap();
        value.call("add", FIRST).unwrap();
        value.committed(1, 1);
        value.recovered(Ok((SECOND, 1)));
        assert!(value.call("add", SECOND).is_err());
    }

    #[test]
    fn a_value_that_could_not_come_along_says_why() {
        let mut value = Progress::new(FIRST);
        let error = CallError::NoRanks {
            call: "Counter".to_owned(),
        };
        value.recovered(Err(error.clone()));
        assert_eq!(value.call("add", SECOND), Err(error.clone()));
        assert_eq!(value.acknowledge(), Err(error));
    }
}
