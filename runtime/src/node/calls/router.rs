//! From a driver's stream to the workers.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use kolo_core::membership::Process;
use kolo_transport::ids::{CallId, Generation, Rank};
use kolo_transport::wire::{CallFailure, CallFrame, CallOp, CallReply, FailureKind, WorkerCall};
use kolo_transport::{Connection, Frame, FrameReceiver, frame};

use super::channel::Channel;
use super::job::{Job, Routes};
use super::link::{Link, Sent};

/// A rank of the channel's generation.
struct Route {
    rank: Rank,
    process: Process,
    /// Its call socket, once it has one.
    link: Option<Arc<Link>>,
}

/// Takes calls from a driver's stream to the workers.
pub(super) struct Router<'a> {
    job: &'a Job,
    channel: &'a Arc<Channel>,
    /// The connection that the channel is a stream of.
    connection: &'a Connection,
    generation: Generation,
    /// In rank order.
    routes: Vec<Route>,
    /// Workers with calls that are not on their sockets yet.
    touched: Vec<Arc<Link>>,
    head: BytesMut,
}

impl<'a> Router<'a> {
    pub(super) fn new(
        job: &'a Job,
        channel: &'a Arc<Channel>,
        connection: &'a Connection,
        generation: Generation,
        routes: &Routes,
    ) -> Self {
        let route = |&(rank, process): &(Rank, Process)| Route {
            rank,
            process,
            link: job.link(process),
        };
        Self {
            job,
            channel,
            connection,
            generation,
            routes: routes.iter().map(route).collect(),
            touched: Vec::new(),
            head: BytesMut::new(),
        }
    }

    /// Until the driver or the job ends the channel.
    pub(super) async fn run(&mut self, stream: &mut FrameReceiver) {
        let mut over = self.channel.over();
        loop {
            let frame = tokio::select! {
                biased;
                frame = stream.next::<CallFrame>() => frame,
                _ = over.wait_for(|over| *over) => return,
            };
            match frame {
                Ok(Some(frame)) => self.route(frame),
                Ok(None) => return,
                Err(error) => {
                    tracing::debug!(job = %self.job.id, %error, "a channel of calls failed");
                    return;
                }
            }
            // What came with one read goes out with one write per worker.
            if !stream.is_ready() && !self.flush().await {
                return;
            }
        }
    }

    fn route(&mut self, frame: Frame<CallFrame>) {
        match frame.head {
            CallFrame::Call {
                call,
                generation,
                ranks,
                deadline_ms,
                op,
            } => self.call(call, generation, &ranks, deadline_ms, op, &frame.body),
            CallFrame::Cancel { call, ranks } => {
                for route in &self.routes {
                    if let Some(link) = &route.link
                        && (ranks.is_empty() || ranks.contains(&route.rank))
                    {
                        link.cancel(call, self.channel);
                    }
                }
            }
        }
    }

    fn call(
        &mut self,
        call: CallId,
        generation: Generation,
        ranks: &[Rank],
        deadline_ms: Option<u64>,
        op: CallOp,
        body: &Bytes,
    ) {
        if generation != self.generation {
            let message = format!(
                "the call is for generation {generation}, its channel for {}",
                self.generation
            );
            for rank in ranks {
                self.refuse(call, *rank, FailureKind::Stale, message.clone());
            }
            return;
        }
        // The same for every rank.
        self.head.clear();
        let request = WorkerCall {
            call,
            generation,
            deadline_ms,
            op,
        };
        if let Err(error) = frame::encode_head(&mut self.head, &request, body.len()) {
            for rank in ranks {
                self.refuse(call, *rank, FailureKind::Arguments, error.to_string());
            }
            return;
        }
        // Once on each rank, also if it is named twice (C-1).
        let ranks = distinct(ranks);
        for rank in &*ranks {
            let index = (self.routes).binary_search_by_key(rank, |route| route.rank);
            let Some(route) = index.ok().map(|index| &mut self.routes[index]) else {
                let message = format!("rank {rank} of {} is not on this node", self.job.id);
                self.refuse(call, *rank, FailureKind::NoSuchRank, message);
                continue;
            };
            let process = route.process;
            if route.link.is_none() {
                route.link = self.job.link(process);
            }
            let sent = (route.link.as_ref())
                .map(|link| (link, link.send(call, self.channel, &self.head, body)));
            match sent {
                Some((link, Sent::Queued)) => {
                    if !self.touched.iter().any(|other| Arc::ptr_eq(other, link)) {
                        self.touched.push(link.clone());
                    }
                }
                // If its loss is not known yet, it follows.
                Some((_, Sent::Closed)) => drop(self.job.repeat_loss(self.channel, process)),
                None if self.job.repeat_loss(self.channel, process) => {}
                None => {
                    let message = format!("rank {rank} of {} takes no calls yet", self.job.id);
                    self.refuse(call, *rank, FailureKind::NoSuchRank, message);
                }
            }
        }
    }

    fn refuse(&self, call: CallId, rank: Rank, kind: FailureKind, message: String) {
        let reply = CallReply::Refused {
            call,
            rank,
            failure: CallFailure::new(kind, message),
        };
        self.channel.push(&reply, &Bytes::new());
    }

    /// Puts calls on the workers' sockets and answers on the stream; waits while a queue is full, that of answers
    /// included: nobody who sends calls and reads no answers makes it grow. `false` if the channel is over.
    async fn flush(&mut self) -> bool {
        for link in &self.touched {
            link.flush();
        }
        self.channel.flush();
        for link in self.touched.drain(..) {
            if link.has_room() {
                continue;
            }
            let mut over = self.channel.over();
            tokio::select! {
                biased;
                () = link.room() => {}
                _ = over.wait_for(|over| *over) => return false,
                // While it waits nobody reads the stream, and would notice that the driver is gone.
                _ = self.connection.closed() => return false,
            }
        }
        self.channel.room().await;
        !self.channel.is_over()
    }
}

/// The ranks, each once. Drivers name them in order, so that there is nothing to do most of the time.
fn distinct(ranks: &[Rank]) -> Cow<'_, [Rank]> {
    if ranks.is_sorted_by(|one, next| one < next) {
        return Cow::Borrowed(ranks);
    }
    let mut ranks = ranks.to_vec();
    ranks.sort_unstable();
    ranks.dedup();
    Cow::Owned(ranks)
}
