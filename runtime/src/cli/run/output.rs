//! The output of a job's workers on one node, and their input.

use std::sync::Arc;
use std::time::Duration;

use kolo_transport::CloseCode;
use kolo_transport::frame::Limits;
use kolo_transport::ids::{JobId, Rank};
use kolo_transport::session::{FrameReceiver, FrameSender, Stream};
use kolo_transport::wire::{NodeReply, NodeRequest, OutputChunk, PlacedNode};
use tokio::sync::watch;
use tokio::task::JoinError;

use super::super::link::Link;
use super::sink::Sink;
use super::stdin;

/// Pieces of output.
const OUTPUT: Limits = Limits {
    head: 64 << 10,
    body: 4 << 20,
};

/// How long a node may take to answer.
const ANSWER: Duration = Duration::from_secs(10);

/// After the end of the job: how long a node may be silent before all its output has come.
const SILENCE: Duration = Duration::from_secs(10);

/// How far a job has come, for those that take its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Course {
    /// It has not ended.
    Open,
    /// It has ended, and all its workers ran.
    Ran,
    /// It has ended before all its workers ran; the head says why.
    NeverWhole,
}

/// Where output comes from.
pub(super) struct Source {
    pub(super) link: Arc<Link>,
    /// The nodes of the job, and which of them it is.
    pub(super) nodes: Arc<Vec<PlacedNode>>,
    pub(super) index: usize,
    pub(super) job: JobId,
    /// Ranks whose output nobody wants.
    pub(super) without: Vec<Rank>,
    /// Rank 0 has this command's input.
    pub(super) input: bool,
}

impl Source {
    /// Takes all output of the job's workers there, and brings rank 0 its input if it is there.
    pub(super) async fn take(
        self,
        sink: Sink,
        course: watch::Receiver<Course>,
    ) -> Result<(), String> {
        let taken = self.all(sink, course).await;
        taken.map_err(|error| format!("{}: {error}", self.nodes[self.index].hostname))
    }

    async fn all(&self, sink: Sink, course: watch::Receiver<Course>) -> Result<(), String> {
        let node = &self.nodes[self.index];
        let (_endpoint, connection) = self.link.node(node).await?;
        let stream = connection.open(OUTPUT).await;
        let Stream { mut send, mut recv } = stream.map_err(|error| error.to_string())?;
        if !self.is_accepted(&mut send, &mut recv, &course).await? {
            return Ok(());
        }
        let mut pump = None;
        if self.input && node.ranks.contains(&Rank(0)) {
            pump = Some(tokio::spawn(stdin::pump(send)));
        } else {
            send.finish();
        }
        let result = self.pieces(&mut recv, sink, course).await;
        if let Some(pump) = pump {
            pump.abort();
        }
        if result.is_ok() {
            recv.stop(CloseCode::Done);
        }
        result
    }

    /// Asks for the output. There is none of a job that was released before it had begun: the head says why.
    async fn is_accepted(
        &self,
        send: &mut FrameSender,
        recv: &mut FrameReceiver,
        course: &watch::Receiver<Course>,
    ) -> Result<bool, String> {
        let request = NodeRequest::Output {
            job: self.job,
            without: self.without.clone(),
        };
        let sent = send.send(&request, &[]).await;
        sent.map_err(|error| error.to_string())?;
        match recv.expect_within::<NodeReply>(ANSWER).await {
            Ok(frame) => match frame.head {
                NodeReply::Output => Ok(true),
                NodeReply::Refused(_) if *course.borrow() == Course::NeverWhole => Ok(false),
                NodeReply::Refused(refusal) => Err(refusal.to_string()),
                other => Err(format!("{other:?} is no answer to a request for output")),
            },
            Err(error) => Err(error.to_string()),
        }
    }

    async fn pieces(
        &self,
        recv: &mut FrameReceiver,
        sink: Sink,
        mut course: watch::Receiver<Course>,
    ) -> Result<(), String> {
        let clock = self.link.runtime.clock();
        let mut over = *course.borrow() != Course::Open;
        loop {
            let next = tokio::select! {
                // Output that is there counts before the time.
                biased;
                next = recv.next::<OutputChunk>() => next,
                _ = course.changed(), if !over => {
                    over = true;
                    continue;
                }
                () = async { clock.sleep_until(clock.now() + SILENCE).await }, if over => {
                    return Err(format!("its end did not come within {SILENCE:?}"));
                }
            };
            match next {
                Ok(Some(frame)) => sink.piece(frame.head, frame.body).await,
                Ok(None) => return Ok(()),
                Err(error) => return Err(error.to_string()),
            }
        }
    }
}

/// Why output was not taken to its end.
pub(super) fn error(taken: Result<Result<(), String>, JoinError>) -> Option<String> {
    match taken {
        Ok(result) => result.err(),
        Err(error) => Some(error.to_string()),
    }
}
