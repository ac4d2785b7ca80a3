//! What lives as long as the worker: which generation is present, the call that runs, and the way to tell the node.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kolo_transport::ids::{CallId, Generation};
use kolo_transport::wire::worker::FailedOperation;
use kolo_transport::wire::{CallFailure, FailureKind, FromWorker, Kept};
use tokio::sync::mpsc::UnboundedSender;

use super::Context;
use super::running::{Running, Stopped};
use crate::__private::Ended;
use crate::elastic::{Cause, NoGeneration};

/// Shared by the main thread, which runs calls, the control thread, which hears of generations, and elastic loops, which wait for
/// generations.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) running: Arc<Running>,
    /// The worker was asked to stop.
    pub(crate) stopping: AtomicBool,
    /// Few messages: some for each generation.
    node: UnboundedSender<FromWorker>,
    state: Mutex<State>,
    news: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// How long a next generation may take, if the job is elastic.
    next_within: Option<Duration>,
    /// The newest generation, this worker in it or not.
    newest: Generation,
    /// This worker's place in it.
    present: Option<Context>,
    /// The call that runs, and the generation that it has come to.
    call: Option<(CallId, Context)>,
    /// The number of the last commit.
    commit: u64,
    told: Told,
    /// Why there are no more generations.
    ended: Option<String>,
}

/// What the node was told of commits and failures.
#[derive(Debug, Default)]
struct Told {
    /// The last generation in which all were given a commit of an earlier one.
    received: Generation,
    /// The last generation in which all have committed, and the first commit there.
    first: (Generation, u64),
    /// The last generation in which such a commit came to disk.
    durable: Generation,
    /// The last generation in which a call failed, with all members there as far as this one knew.
    failed: Generation,
}

impl Session {
    pub(crate) fn new(node: UnboundedSender<FromWorker>) -> Arc<Self> {
        Arc::new(Self {
            running: Arc::default(),
            stopping: AtomicBool::new(false),
            node,
            state: Mutex::default(),
            news: Condvar::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing in here panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, message: FromWorker) {
        if self.node.send(message).is_err() {
            tracing::debug!("the node is gone, and is told nothing");
        }
    }

    /// The job is elastic: a generation follows within this time after one that has failed.
    pub(crate) fn set_elastic(&self, next_within: Duration) {
        self.state().next_within = Some(next_within);
    }

    pub(crate) fn is_static(&self) -> bool {
        self.state().is_static()
    }

    pub(crate) fn newest(&self) -> Generation {
        self.state().newest
    }

    /// A later generation is present, with this worker in it. The one before is over.
    pub(crate) fn enter(&self, context: Context) {
        self.change(context.generation(), Some(context));
    }

    /// A later generation is present, without this worker.
    pub(crate) fn leave(&self, generation: Generation) {
        self.change(generation, None);
    }

    fn change(&self, generation: Generation, present: Option<Context>) {
        let mut state = self.state();
        let before = std::mem::replace(&mut state.present, present);
        state.newest = generation;
        drop(state);
        // Whoever waits there finds the new one when it asks.
        if let Some(before) = before {
            before.revoke(&format!("generation {generation} has begun"));
        }
        self.news.notify_all();
    }

    /// The worker is to end: no wait goes on.
    pub(crate) fn stop(&self, reason: &str) {
        self.stopping.store(true, Ordering::Release);
        let mut state = self.state();
        state.ended.get_or_insert_with(|| reason.to_owned());
        let present = state.present.clone();
        drop(state);
        if let Some(present) = present {
            present.revoke(&format!("the job ends: {reason}"));
        }
        self.news.notify_all();
    }

    /// The caller does not want the result of a call.
    pub(crate) fn cancel(&self, call: CallId) {
        self.running.cancel(call);
        // A wait for the next generation looks at it under the lock.
        drop(self.state());
        self.news.notify_all();
    }

    /// Begins a call in the present generation, if the call is for that one. It may end in a later one.
    pub(crate) fn begin_call(
        &self,
        (call, generation): (CallId, Generation),
        deadline: Option<Instant>,
    ) -> Result<Context, CallFailure> {
        let mut state = self.state();
        let present = state.present.as_ref();
        let takes = |context: &&Context| context.generation() == generation;
        let Some(context) = present.filter(takes) else {
            let place = match present {
                Some(context) => format!("in generation {}", context.generation()),
                None => "in no generation".to_owned(),
            };
            return Err(CallFailure::new(
                FailureKind::Stale,
                format!("the call is for generation {generation}, but this worker is {place}"),
            ));
        };
        let context = context.clone();
        self.running
            .begin(call, deadline)
            .map_err(|stopped| stopped.failure("before it began"))?;
        context.begin_call(call);
        state.call = Some((call, context.clone()));
        Ok(context)
    }

    /// Ends the call that runs, which was meant for `meant`. Also gives the later generation that it has come to, or 0.
    pub(crate) fn end_call(&self, meant: Generation, ended: Ended) -> (Ended, Generation) {
        let mut state = self.state();
        let call = state.call.take();
        let (is_out, is_elastic) = (state.present.is_none(), state.next_within.is_some());
        drop(state);
        let stopping = self.stopping.load(Ordering::Acquire);
        let mut ended = (ended, Generation(0));
        if let Some((call, context)) = call {
            ended.0 = context.end_call(call, ended.0, stopping);
            if context.generation() != meant {
                ended.1 = context.generation();
            }
            if let Err(failure) = &mut ended.0
                && is_elastic
                && !stopping
            {
                if is_out {
                    failure.kind = FailureKind::Left;
                } else if context.lost_a_rank() {
                    failure.kind = FailureKind::GenerationOver;
                    let failed = FailedOperation {
                        culprit: failure.caused_by,
                        reason: failure.message.clone(),
                    };
                    self.give_up(context.generation(), failed);
                }
            }
        }
        self.running.end();
        ended
    }

    /// A call failed because its members can't go on together. Perhaps nobody is lost: then only this word ends the generation.
    fn give_up(&self, generation: Generation, failed: FailedOperation) {
        let mut state = self.state();
        if state.newest == generation && state.told.failed < generation {
            state.told.failed = generation;
            self.tell(FromWorker::Holding {
                generation,
                commit: state.commit,
                failed: Some(failed),
            });
        }
    }

    /// The newest generation, for the call that runs.
    pub(crate) fn latest(&self, context: &Context) -> Context {
        let mut state = self.state();
        state.go_on().unwrap_or_else(|| context.clone())
    }

    /// Waits for a generation after the one of `left`, whose elastic loop can't go on, and takes the call there.
    pub(crate) fn next(&self, left: &Context, cause: &Cause) -> Result<Context, NoGeneration> {
        let generation = left.generation();
        let mut state = self.state();
        let Some(waited) = state.next_within else {
            return Err(NoGeneration::Static { generation });
        };
        if state.newest == generation {
            self.tell(FromWorker::Holding {
                generation,
                commit: state.commit,
                failed: failed(cause),
            });
        }
        let begun = Instant::now();
        loop {
            if let Some(reason) = state.ended.clone() {
                return Err(NoGeneration::Ended { generation, reason });
            }
            if state.newest > generation {
                let generation = state.newest;
                return state.go_on().ok_or(NoGeneration::Left { generation });
            }
            if self.running.is_stopped() {
                return Err(NoGeneration::Unwanted { generation });
            }
            let mut left = waited.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return Err(NoGeneration::Late { generation, waited });
            }
            if let Some(deadline) = self.running.deadline() {
                left = left.min(deadline.saturating_duration_since(Instant::now()));
            }
            state = (self.news.wait_timeout(state, left))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// All members have the state of one of them, as a commit. The node is told if that `is_worth` keeping, and of none that was made
    /// before in this generation.
    pub(crate) fn received(&self, generation: Generation, commit: u64, is_worth: bool) {
        let mut state = self.state();
        state.commit = commit;
        let told = state.told.first.0.max(state.told.received);
        if is_worth && told < generation && !state.is_static() {
            state.told.received = generation;
            self.tell(FromWorker::Committed {
                generation,
                commit,
                kept: Kept::Received,
            });
        }
    }

    /// All members have made a commit.
    pub(crate) fn committed(&self, generation: Generation, commit: u64) {
        let mut state = self.state();
        state.commit = commit;
        if state.told.first.0 < generation && !state.is_static() {
            state.told.first = (generation, commit);
            self.tell(FromWorker::Committed {
                generation,
                commit,
                kept: Kept::Made,
            });
        }
    }

    /// All members know that a commit is on disk. The node is told of one that they have made in this generation.
    pub(crate) fn durable(&self, generation: Generation, commit: u64) {
        let mut state = self.state();
        let (told, first) = state.told.first;
        if told == generation && commit >= first && state.told.durable < generation {
            state.told.durable = generation;
            self.tell(FromWorker::Committed {
                generation,
                commit,
                kept: Kept::Durable,
            });
        }
    }
}

impl State {
    fn is_static(&self) -> bool {
        self.next_within.is_none()
    }

    /// Takes the call that runs to the present generation, if this worker is in it.
    fn go_on(&mut self) -> Option<Context> {
        let present = self.present.clone()?;
        if let Some((call, context)) = &mut self.call
            && context.generation() < present.generation()
        {
            present.begin_call(*call);
            *context = present.clone();
        }
        Some(present)
    }
}

fn failed(cause: &Cause) -> Option<FailedOperation> {
    match cause {
        Cause::Failed(error) => Some(FailedOperation {
            culprit: error.culprit_rank(),
            reason: error.to_string(),
        }),
        Cause::Interrupted => None,
    }
}

impl Stopped {
    /// The failure of the call.
    pub(crate) fn failure(self, place: &str) -> CallFailure {
        let (kind, what) = match self {
            Self::Cancelled => (FailureKind::Cancelled, "the call was cancelled"),
            Self::Deadline => (FailureKind::Deadline, "the call's deadline passed"),
        };
        CallFailure::new(kind, format!("{what} {place}"))
    }
}
