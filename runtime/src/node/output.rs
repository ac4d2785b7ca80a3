//! All output of a job's workers here, for its driver; and the driver's input for rank 0.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::time::Duration;

use kolo_actors::node::Taken;
use kolo_transport::ids::{DriverId, JobId, Rank};
use kolo_transport::wire::{NodeReply, Refusal, RefusalKind, StdinChunk};
use kolo_transport::{CloseCode, FrameError, FrameReceiver, Limits, Stream};
use tokio::io::AsyncWriteExt;
use tokio::net::unix::pipe::Sender;
use tokio::sync::oneshot;

use super::serve::{Server, reply};

/// Pieces of input.
const INPUT: Limits = Limits {
    head: 1 << 10,
    body: 1 << 20,
};

/// How long a driver may take to read the end of the output.
const FAREWELL: Duration = Duration::from_secs(10);

impl Server {
    /// Serves a stream of output to its end.
    pub(super) async fn output(
        &self,
        stream: &mut Stream,
        driver: Option<DriverId>,
        job: JobId,
        without: &[Rank],
    ) -> Result<(), FrameError> {
        let taken = self
            .context
            .outputs
            .get(job)
            .zip(driver)
            .ok_or_else(|| {
                Refusal::new(
                    RefusalKind::NotFound,
                    format!("there is no output of {job} on this node"),
                )
            })
            .and_then(|(output, driver)| output.take(driver));
        let Taken { mut chunks, stdin } = match taken {
            Ok(taken) => taken,
            Err(refusal) => {
                reply(stream, &NodeReply::Refused(refusal)).await?;
                return Ok(());
            }
        };
        stream.send.send(&NodeReply::Output, &[]).await?;
        stream.recv.set_limits(INPUT);
        let without: BTreeSet<Rank> = without.iter().copied().collect();
        let Stream { send, recv } = stream;
        // A driver that is gone shows here also while no output comes: it must not count as there.
        let stopped = send.stopped();
        tokio::pin!(stopped);
        let output = async {
            while let Some((head, piece)) = chunks.recv().await {
                if !without.contains(&head.rank) {
                    send.send_bytes(&head, piece).await?;
                }
            }
            send.finish();
            Ok::<_, FrameError>(())
        };
        let input = async {
            if let Some(stdin) = stdin {
                feed(stdin, recv).await;
            }
            recv.stop(CloseCode::Done);
            std::future::pending::<()>().await;
        };
        // When all output has come nobody is left who reads input.
        tokio::select! {
            result = output => result?,
            () = input => {}
            _ = &mut stopped => return Ok(()),
        }
        if tokio::time::timeout(FAREWELL, stopped).await.is_err() {
            tracing::debug!(%job, "a driver did not read the end of the output");
        }
        Ok(())
    }
}

/// Writes what comes to rank 0's standard input, until either side ends.
async fn feed(stdin: oneshot::Receiver<OwnedFd>, recv: &mut FrameReceiver) {
    // It never starts, or not here.
    let Ok(pipe) = stdin.await else { return };
    let mut pipe = match Sender::from_owned_fd(pipe) {
        Ok(pipe) => pipe,
        Err(error) => return tracing::error!(%error, "rank 0 has no standard input"),
    };
    while let Ok(Some(frame)) = recv.next::<StdinChunk>().await {
        if pipe.write_all(&frame.body).await.is_err() {
            // It has closed its input, or has ended.
            return;
        }
    }
}
