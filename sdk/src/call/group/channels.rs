//! The tasks of a group's channels: what comes from its nodes, what their streams had no room for, and time.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kolo_transport::frame::{FrameError, InvalidFrame};
use kolo_transport::ids::{CallId, Generation, Incarnation, Rank, Slot};
use kolo_transport::session::FrameReceiver;
use kolo_transport::wire::{CallReply, Exit, Outcome, RankFailure};

use super::super::entry::Completion;
use super::super::outbox::Outbox;
use super::super::spanning::Process;
use super::super::table::STOPPED;
use super::{Group, Waiter};

/// Results that wake their callers together, at most.
const MOST_TOGETHER: usize = 64;

/// How often to look for calls that wait behind others. No call sets a timer for that.
const LOOK: Duration = Duration::from_secs(5);

/// Callers that have their answers and are not woken yet. They are woken at the latest when the task that reads the answers ends.
#[derive(Default)]
struct Done(Vec<Completion<Waiter>>);

impl Done {
    fn wake(&mut self) {
        Group::complete(self.0.drain(..));
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        self.wake();
    }
}

impl Group {
    /// Takes a reply. Who waited for it goes to `done`, to be woken with others.
    fn reply(
        &self,
        index: usize,
        reply: CallReply,
        body: Bytes,
        done: &mut Vec<Completion<Waiter>>,
    ) {
        match reply {
            CallReply::Result {
                call,
                slot,
                generation,
                outcome,
            } => {
                let rank = self.rank_of(slot);
                let Some(rank) = rank.filter(|rank| self.routes[rank.index()] == index) else {
                    tracing::warn!(%call, %slot, "a node sent a result of a worker that it does not have");
                    return;
                };
                self.result((call, rank), generation, (outcome, body), done);
            }
            CallReply::Refused {
                call,
                rank,
                failure,
            } => {
                let outcome = (Outcome::Failed(failure), Bytes::new());
                if self.routes.get(rank.index()) == Some(&index) {
                    self.result((call, rank), Generation(0), outcome, done);
                }
            }
            CallReply::Lost {
                slot,
                incarnation,
                failure,
                stopping,
            } => self.lost((slot, incarnation), failure, stopping),
        }
    }

    fn result(
        &self,
        (call, rank): (CallId, Rank),
        generation: Generation,
        (outcome, body): (Outcome, Bytes),
        done: &mut Vec<Completion<Waiter>>,
    ) {
        let now = Instant::now();
        if let Some(generations) = self.elastic()
            && !self.lock().table.has(call)
        {
            self.lock().table.answered(call, rank);
            if let Some(process) = self.process(rank) {
                generations.result(now, (call, process), generation, outcome, body);
            }
            return;
        }
        let failed = !matches!(outcome, Outcome::Returned);
        done.extend(self.apply_only(|table| table.result(now, call, rank, outcome, body)));
        if failed {
            self.timer.notify_one();
        }
    }

    /// The node says that a process of it is gone.
    fn lost(&self, (slot, incarnation): (Slot, Incarnation), failure: RankFailure, stopping: bool) {
        let process = Process { slot, incarnation };
        let rank = self.rank_of(slot);
        let Some(rank) = rank.filter(|rank| self.process(*rank) == Some(process)) else {
            tracing::debug!(%slot, %incarnation, "a worker is gone that is not of this generation");
            return;
        };
        // The node may know the worker by the rank that it had later.
        let failure = RankFailure { rank, ..failure };
        let Some(generations) = self.elastic() else {
            return self.apply_timed(|table| table.lost(Instant::now(), failure, stopping));
        };
        // A worker of an elastic group may be stopped alone.
        let reason = failure.reason.as_deref();
        let stopping = stopping && reason.is_some_and(|reason| reason.starts_with(STOPPED));
        let told = failure.clone();
        self.apply_timed(|table| table.lost(Instant::now(), failure, stopping));
        if !stopping {
            generations.lost(process, &told, None);
        }
    }

    /// The process of a rank.
    pub(in super::super) fn process(&self, rank: Rank) -> Option<Process> {
        self.members.members.get(rank.index()).map(Process::of)
    }

    /// Reads what a node sends until its channel ends.
    pub(crate) async fn read(self: Arc<Self>, index: usize, mut replies: FrameReceiver) {
        let mut done = Done::default();
        let reason = loop {
            // Results that came together wake who waits for them together: it would else go to sleep between two of them.
            if !replies.is_ready() || done.0.len() >= MOST_TOGETHER {
                done.wake();
            }
            match replies.next::<CallReply>().await {
                Ok(Some(frame)) => self.reply(index, frame.head, frame.body, &mut done.0),
                Ok(None) => break "the node ended the channel".to_owned(),
                Err(error @ FrameError::Invalid(InvalidFrame::Malformed { .. })) => {
                    tracing::warn!(%error, "a node sent a reply that is not known here");
                }
                Err(error) => break error.to_string(),
            }
        };
        drop(done);
        self.unreachable(index, &reason);
    }

    fn unreachable(&self, index: usize, reason: &str) {
        let node = &self.nodes[index];
        let failures = node.ranks.iter().map(|rank| RankFailure {
            rank: *rank,
            node: node.node,
            hostname: node.hostname.clone(),
            pid: 0,
            exit: Exit::Unknown,
            reason: Some(format!(
                "the driver's channel to {} is gone: {reason}",
                node.node
            )),
            stderr_tail: Vec::new(),
            account: None,
        });
        let failures: Vec<RankFailure> = failures.collect();
        let elastic = self
            .elastic()
            .map(|generations| (generations, failures.clone()));
        self.apply_timed(|table| table.unreachable(Instant::now(), failures));
        if let Some((generations, failures)) = elastic {
            let why = format!("its driver's channel to {} is gone: {reason}", node.node);
            generations.note_unreachable(self.generation(), why);
            for failure in failures {
                if let Some(process) = self.process(failure.rank) {
                    generations.lost(process, &failure, Some(self.generation()));
                }
            }
        }
    }

    /// Writes to a node what its stream had no room for, until the stream fails.
    pub(crate) async fn flush(self: Arc<Self>, index: usize) {
        let Some(wake) = self.lock().outboxes.get(index).map(Outbox::wake) else {
            return;
        };
        loop {
            wake.notified().await;
            let flushed = poll_fn(|cx| match self.lock().outboxes.get_mut(index) {
                Some(outbox) => outbox.poll_flush(cx),
                None => Poll::Ready(Ok(())),
            });
            let flushed = flushed.await;
            if let Err(error) = flushed {
                return self.unreachable(index, &error.to_string());
            }
        }
    }

    /// Ends calls whose deadlines pass, and tells `say` of calls that wait behind others. Never ends by itself.
    pub(crate) async fn keep_time(self: Arc<Self>, say: impl Fn(String)) {
        let mut look = tokio::time::interval(LOOK);
        loop {
            let next = {
                let mut state = self.lock();
                state.armed = state.table.next_wake();
                state.armed
            };
            let sleep = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = sleep => self.apply(|table| table.tick(Instant::now())),
                () = self.timer.notified() => {}
                _ = look.tick() => {
                    let line = self.lock().table.held_up(Instant::now());
                    if let Some(line) = line {
                        say(line);
                    }
                }
            }
        }
    }
}
