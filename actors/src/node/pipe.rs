//! Readers of the pipes that workers write to.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use kolo_transport::wire::OutputChunk;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;
use tokio::sync::mpsc;

use super::author::{Author, now_ms};
use super::stream::Chunk;

/// The longest piece, in bytes, and how much is read at once.
const PIECE: usize = 64 << 10;

/// How long the rest of a line that has no end yet is kept back from a driver.
const PATIENCE: Duration = Duration::from_millis(50);

/// Cuts bytes behind line ends, without I/O.
#[derive(Debug, Default)]
struct Cutter {
    buffer: BytesMut,
}

impl Cutter {
    /// Everything up to the last line end; all of it if that is too long to wait for one.
    fn whole_lines(&mut self) -> Option<Bytes> {
        // A CR at the end may be the first half of a line end.
        let whole = self.buffer.strip_suffix(b"\r").unwrap_or(&self.buffer);
        let end = memchr::memrchr2(b'\n', b'\r', whole).map(|at| at + 1);
        let end = end.or_else(|| (self.buffer.len() >= PIECE).then_some(self.buffer.len()))?;
        Some(self.buffer.split_to(end).freeze())
    }

    /// Everything.
    fn rest(&mut self) -> Option<Bytes> {
        (!self.buffer.is_empty()).then(|| self.buffer.split().freeze())
    }
}

/// Reads a worker's pipe to its end: its lines are kept, and go to the driver that wants all of them.
pub(super) async fn read(
    pipe: OwnedFd,
    head: OutputChunk,
    author: Arc<Author>,
    mut sender: Option<mpsc::Sender<Chunk>>,
) {
    let mut pipe = match Receiver::from_owned_fd(pipe) {
        Ok(pipe) => pipe,
        Err(error) => {
            tracing::error!(rank = %head.rank, %error, "a worker's output can't be read");
            return;
        }
    };
    let mut cutter = Cutter::default();
    loop {
        cutter.buffer.reserve(PIECE);
        let has_rest = !cutter.buffer.is_empty();
        // No more than a piece, whatever room there is by chance.
        let mut limited = (&mut pipe).take(PIECE as u64);
        let reading = limited.read_buf(&mut cutter.buffer);
        let read = if has_rest && sender.is_some() {
            tokio::time::timeout(PATIENCE, reading).await.ok()
        } else {
            Some(reading.await)
        };
        let (piece, ended) = match read {
            Some(Ok(1..)) => (cutter.whole_lines(), false),
            Some(Ok(0)) => (cutter.rest(), true),
            // A prompt, or a line that is written bit by bit.
            None => (cutter.rest(), false),
            Some(Err(error)) => {
                // Reading from a pipe does not fail; if it does there is nothing more to get.
                tracing::warn!(rank = %head.rank, %error, "reading the output of a worker");
                (cutter.rest(), true)
            }
        };
        if let Some(piece) = piece {
            let time_ms = now_ms();
            author.keep(head.stream, time_ms, &piece);
            if let Some(queue) = &sender
                && queue
                    .send((OutputChunk { time_ms, ..head }, piece))
                    .await
                    .is_err()
            {
                // The driver is gone. A worker that is being ended must not wait for anybody to read.
                sender = None;
            }
        }
        if ended {
            if let Some(queue) = &sender {
                // An empty piece is the end: what stands in a line without an end can be shown.
                drop(queue.send((head, Bytes::new())).await);
            }
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use kolo_core::node::logs::LogLimits;
    use kolo_transport::ids::{DriverId, Generation, JobId, Rank, Slot};
    use kolo_transport::wire::{RefusalKind, Stdio};

    use super::super::output::{Output, Outputs};
    use super::*;

    const OWNER: DriverId = DriverId(3);

    fn head() -> OutputChunk {
        OutputChunk {
            rank: Rank(1),
            generation: Generation(1),
            stream: Stdio::Stdout,
            time_ms: 0,
        }
    }

    /// A reader of a pipe, and the job's output.
    fn reading() -> (std::fs::File, Arc<Output>, tokio::task::JoinHandle<()>) {
        let (reader, writer) = kolo_process::pipe().unwrap();
        let outputs = Outputs::new(LogLimits::default(), 64 << 20);
        let output = outputs.open_streamed(JobId(1), OWNER, false);
        let sender = output.stream().unwrap().sender();
        let author = Arc::new(Author::new(output.clone(), Slot(1), Rank(1)));
        let task = tokio::spawn(read(reader, head(), author, sender));
        outputs.end(JobId(1));
        (writer.into(), output, task)
    }

    #[test]
    fn pieces_end_with_a_line_or_are_too_long_for_one() {
        let mut cutter = Cutter::default();
        cutter.buffer.extend_from_slice(b"one\ntwo\rthr");
        assert_eq!(cutter.whole_lines().unwrap(), "one\ntwo\r");
        assert_eq!(cutter.whole_lines(), None);
        assert_eq!(cutter.rest().unwrap(), "thr");
        assert_eq!(cutter.rest(), None);
        cutter.buffer.extend_from_slice(b"four\r");
        assert_eq!(cutter.whole_lines(), None);
        cutter.buffer.extend_from_slice(b"\n");
        assert_eq!(cutter.whole_lines().unwrap(), "four\r\n");
        cutter.buffer.resize(PIECE + 5, b'x');
        assert_eq!(cutter.whole_lines().unwrap().len(), PIECE + 5);
    }

    #[tokio::test]
    async fn every_byte_comes_once_and_nothing_is_read_ahead_of_a_slow_driver() {
        let (mut writer, output, task) = reading();
        let line = [b'x'; 99];
        let written = tokio::task::spawn_blocking(move || {
            for _ in 0..50_000 {
                writer.write_all(&line).unwrap();
                writer.write_all(b"\n").unwrap();
            }
            writer.write_all(b"end \xff").unwrap();
        });
        tokio::time::timeout(Duration::from_millis(200), async {
            while !written.is_finished() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await
        .expect_err("5 MB don't fit into a pipe and a queue");
        let mut taken = output.stream().unwrap().take(OWNER).unwrap();
        let mut all = Vec::new();
        while let Some((head, piece)) = taken.chunks.recv().await {
            assert!(piece.len() <= 2 * PIECE);
            assert_eq!(head.time_ms > 1_700_000_000_000, !piece.is_empty());
            all.extend_from_slice(&piece);
        }
        written.await.unwrap();
        task.await.unwrap();
        assert_eq!(all.len(), 5_000_000 + 5);
        let lines: Vec<_> = all.split(|byte| *byte == b'\n').collect();
        assert!(lines[..50_000].iter().all(|text| *text == line));
        assert_eq!(lines[50_000], b"end \xff");
        assert_eq!(
            output.read(&mut output.cursor(&[], Some(1)), 1000).0.lines[0].text,
            b"end \xff"
        );
    }

    #[tokio::test]
    async fn lines_that_no_driver_takes_are_kept_whole() {
        let (reader, writer) = kolo_process::pipe().unwrap();
        let output = Outputs::new(LogLimits::default(), 64 << 20).open(JobId(1));
        let author = Arc::new(Author::new(output.clone(), Slot(1), Rank(1)));
        let task = tokio::spawn(read(reader, head(), author, None));
        let mut writer = std::fs::File::from(writer);
        writer.write_all(b"half ").unwrap();
        tokio::time::sleep(2 * PATIENCE).await;
        writer.write_all(b"and half\r\n\xff").unwrap();
        drop(writer);
        task.await.unwrap();
        let lines = output.read(&mut output.cursor(&[], None), 1000).0.lines;
        let texts: Vec<&[u8]> = lines.iter().map(|line| &line.text[..]).collect();
        assert_eq!(texts, [&b"half and half"[..], b"\xff"]);
    }

    #[tokio::test]
    async fn a_line_without_an_end_comes_after_a_moment() {
        let (mut writer, output, _task) = reading();
        let mut taken = output.stream().unwrap().take(OWNER).unwrap();
        writer.write_all(b"name? ").unwrap();
        assert_eq!(taken.chunks.recv().await.unwrap().1, "name? ");
    }

    #[tokio::test]
    async fn only_the_owner_takes_it_and_once_and_without_it_workers_go_on() {
        let (mut writer, output, task) = reading();
        let stream = output.stream().unwrap();
        let refused = |driver| stream.take(driver).unwrap_err().kind;
        assert_eq!(refused(DriverId(4)), RefusalKind::Forbidden);
        let taken = stream.take(OWNER).unwrap();
        assert_eq!(refused(OWNER), RefusalKind::Invalid);
        drop(taken);
        let writing = move || writer.write_all(&vec![b'\n'; 1 << 20]);
        tokio::task::spawn_blocking(writing).await.unwrap().unwrap();
        task.await.unwrap();
    }

    #[tokio::test]
    async fn what_nobody_takes_holds_nobody_up_once_it_is_abandoned() {
        let (mut writer, output, task) = reading();
        output.stream().unwrap().abandon();
        let writing = move || writer.write_all(&vec![b'\n'; 1 << 20]);
        tokio::task::spawn_blocking(writing).await.unwrap().unwrap();
        task.await.unwrap();
    }
}
