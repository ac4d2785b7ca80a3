//! The output of all jobs' workers, shared between those who read it from pipes and those who want it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use kolo_transport::ids::{DriverId, JobId, Rank};
use kolo_transport::wire::{LogBatch, Refusal, RefusalKind, Stdio};
use tokio::sync::watch;

use super::logs::{Cursor, LogBook, LogLimits};
use super::stream::{OutputStream, Taken};

/// Jobs whose output is kept after they have ended.
const ENDED_JOBS: usize = 32;

/// The output of a job's workers on this node.
#[derive(Debug)]
pub struct Output {
    book: Mutex<LogBook>,
    /// Counts the changes.
    changes: watch::Sender<u64>,
    /// Where the driver gets all of it.
    stream: Option<OutputStream>,
}

impl Output {
    fn new(limits: LogLimits, stream: Option<OutputStream>) -> Self {
        Self {
            book: Mutex::new(LogBook::new(limits)),
            changes: watch::Sender::new(0),
            stream,
        }
    }

    pub(super) fn stream(&self) -> Option<&OutputStream> {
        self.stream.as_ref()
    }

    /// Keeps the lines of a piece of output.
    pub(super) fn keep(&self, rank: Rank, stream: Stdio, time_ms: u64, piece: &[u8]) {
        let whole = piece.strip_suffix(b"\n").unwrap_or(piece);
        let mut book = self.book();
        let mut from = 0;
        for end in memchr::memchr_iter(b'\n', whole).chain([whole.len()]) {
            let line = &whole[from..end];
            let bare = line.strip_suffix(b"\r").unwrap_or(line);
            // Only the end of the piece may have no LF.
            let over = bare.len() < line.len() && end == piece.len();
            book.push_ended(rank, stream, time_ms, bare.to_vec(), over);
            from = end + 1;
        }
        drop(book);
        self.changed();
    }

    /// All output from the first byte on, for the driver that owns the job. It can be taken once.
    ///
    /// # Errors
    ///
    /// A [`Refusal`] if the job's output is not sent to its driver, is not this one's, or is taken.
    pub fn take(&self, driver: DriverId) -> Result<Taken, Refusal> {
        match &self.stream {
            Some(stream) => stream.take(driver),
            None => Err(Refusal::new(
                RefusalKind::Invalid,
                "the output of this job is only kept; ask for its log",
            )),
        }
    }

    /// Nobody will take the output any more, unless it is taken already.
    pub fn abandon(&self) {
        if let Some(stream) = &self.stream {
            stream.abandon();
        }
    }

    fn book(&self) -> MutexGuard<'_, LogBook> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.changes
            .send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Adds lines, with the time at which they were complete: now.
    pub fn push(&self, rank: Rank, stream: Stdio, lines: impl IntoIterator<Item = Vec<u8>>) {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_millis() as u64);
        let mut book = self.book();
        for line in lines {
            book.push(rank, stream, now, line);
        }
        drop(book);
        self.changed();
    }

    /// No more lines will come.
    pub fn end(&self) {
        if let Some(stream) = &self.stream {
            stream.end();
        }
        self.book().end();
        self.changed();
    }

    fn is_ended(&self) -> bool {
        self.book().is_ended()
    }

    /// A reader; see [`LogBook::cursor`].
    #[must_use]
    pub fn cursor(&self, ranks: &[Rank], tail: Option<u32>) -> Cursor {
        self.book().cursor(ranks, tail)
    }

    /// What is new for a reader, and whether more may come; see [`LogBook::read`].
    pub fn read(&self, cursor: &mut Cursor, max_bytes: usize) -> (LogBatch, bool) {
        let book = self.book();
        (book.read(cursor, max_bytes), !book.is_ended())
    }

    /// Changes whenever there is something new. Subscribe before [`Output::read`], to miss nothing.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// See [`LogBook::stderr_tail`].
    #[must_use]
    pub fn stderr_tail(&self, rank: Rank, lines: usize) -> Vec<String> {
        self.book().stderr_tail(rank, lines)
    }
}

#[derive(Debug, Default)]
struct Jobs {
    outputs: BTreeMap<JobId, Arc<Output>>,
    ended: VecDeque<JobId>,
}

/// The output of all jobs. That of the last 32 jobs that ended is kept.
#[derive(Debug)]
pub struct Outputs {
    limits: LogLimits,
    jobs: Mutex<Jobs>,
}

impl Outputs {
    /// Nothing yet; `limits` hold for each rank.
    #[must_use]
    pub fn new(limits: LogLimits) -> Self {
        Self {
            limits,
            jobs: Mutex::default(),
        }
    }

    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The output of a job that begins.
    pub fn open(&self, job: JobId) -> Arc<Output> {
        let mut jobs = self.jobs();
        let known = jobs.outputs.get(&job).filter(|output| !output.is_ended());
        if let Some(output) = known {
            return output.clone();
        }
        let output = Arc::new(Output::new(self.limits, None));
        jobs.outputs.insert(job, output.clone());
        output
    }

    /// The output of a job that begins, all of which its driver takes. `stdin` if the driver has input for rank 0.
    pub fn open_streamed(&self, job: JobId, owner: DriverId, stdin: bool) -> Arc<Output> {
        let mut jobs = self.jobs();
        let known = jobs.outputs.get(&job).filter(|output| !output.is_ended());
        if let Some(output) = known {
            return output.clone();
        }
        let stream = OutputStream::new(owner, stdin);
        let output = Arc::new(Output::new(self.limits, Some(stream)));
        jobs.outputs.insert(job, output.clone());
        output
    }

    /// The output of a job; `None` if it never ran here or is forgotten.
    #[must_use]
    pub fn get(&self, job: JobId) -> Option<Arc<Output>> {
        self.jobs().outputs.get(&job).cloned()
    }

    /// The job has ended.
    pub fn end(&self, job: JobId) {
        let mut jobs = self.jobs();
        let Some(output) = jobs.outputs.get(&job) else {
            return;
        };
        output.end();
        jobs.ended.push_back(job);
        if jobs.ended.len() > ENDED_JOBS
            && let Some(oldest) = jobs.ended.pop_front()
        {
            jobs.outputs.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_reader_is_woken_by_lines_and_by_the_end() {
        let outputs = Outputs::new(LogLimits::default());
        let output = outputs.open(JobId(1));
        let mut changes = output.changes();
        let mut cursor = output.cursor(&[], None);
        let (batch, more) = output.read(&mut cursor, 1000);
        assert!(batch.lines.is_empty() && more);
        output.push(Rank(0), Stdio::Stdout, [b"one".to_vec()]);
        changes.changed().await.unwrap();
        let (batch, more) = output.read(&mut cursor, 1000);
        assert_eq!(batch.lines[0].text, b"one");
        assert!(batch.lines[0].time_ms > 1_700_000_000_000 && more);
        outputs.end(JobId(1));
        changes.changed().await.unwrap();
        assert!(!output.read(&mut cursor, 1000).1);
    }

    #[test]
    fn only_the_last_jobs_that_ended_are_kept() {
        let outputs = Outputs::new(LogLimits::default());
        for job in 0..=ENDED_JOBS as u64 {
            outputs.open(JobId(job));
            outputs.end(JobId(job));
        }
        assert!(outputs.get(JobId(0)).is_none());
        assert!(outputs.get(JobId(1)).is_some());
        outputs.end(JobId(99));
        assert!(outputs.get(JobId(99)).is_none());
    }
}
