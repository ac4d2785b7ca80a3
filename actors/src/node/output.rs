//! The output of all jobs' workers, shared between those who read it from pipes and those who want it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use kolo_core::node::logs::{Cursor, LogBook, LogLimits};
use kolo_transport::ids::{DriverId, JobId, Rank, Slot};
use kolo_transport::wire::{LogBatch, Refusal, RefusalKind};
use tokio::sync::watch;

use super::stream::{OutputStream, Taken};
use crate::budget::{Budget, Share};

/// What a job takes beside the lines of its workers, about.
const JOB_OVERHEAD: usize = 4096;

/// Lines, and what of all jobs' memory they take.
#[derive(Debug)]
struct Kept {
    book: LogBook,
    /// Behind the lines: these are free before it is.
    share: Share,
}

impl Kept {
    /// Whether the output of all jobs is within its bound.
    fn count(&mut self) -> bool {
        self.share.set(JOB_OVERHEAD + self.book.bytes())
    }
}

/// The output of a job's workers on this node.
#[derive(Debug)]
pub struct Output {
    kept: Mutex<Kept>,
    /// The output of all jobs.
    all: Weak<All>,
    /// Counts the changes.
    changes: watch::Sender<u64>,
    /// Where the driver gets all of it.
    stream: Option<OutputStream>,
}

impl Output {
    fn new(all: &Arc<All>, stream: Option<OutputStream>) -> Self {
        Self {
            kept: Mutex::new(Kept {
                book: LogBook::new(all.limits),
                share: all.budget.share(),
            }),
            all: Arc::downgrade(all),
            changes: watch::Sender::new(0),
            stream,
        }
    }

    pub(super) fn stream(&self) -> Option<&OutputStream> {
        self.stream.as_ref()
    }

    pub(super) fn add(&self, lines: impl FnOnce(&mut LogBook)) {
        let mut kept = self.kept();
        lines(&mut kept.book);
        let fits = kept.count();
        // It has no lock of a job's while it looks for room.
        drop(kept);
        if !fits && let Some(all) = self.all.upgrade() {
            all.make_room();
        }
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

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives up its oldest lines, some at a time. False if it has no more to give.
    fn shed(&self) -> bool {
        let mut kept = self.kept();
        let shed = kept.book.shed();
        kept.count();
        shed
    }

    /// Gives up all lines, also where somebody still reads them.
    fn forget(&self) {
        let mut kept = self.kept();
        kept.book.clear();
        kept.share.release();
    }

    fn changed(&self) {
        self.changes
            .send_modify(|count| *count = count.wrapping_add(1));
    }

    /// No more lines will come.
    pub fn end(&self) {
        if let Some(stream) = &self.stream {
            stream.end();
        }
        self.kept().book.end();
        self.changed();
    }

    /// Whether its driver may still come for it.
    fn is_awaited(&self) -> bool {
        self.stream.as_ref().is_some_and(OutputStream::is_awaited)
    }

    fn is_ended(&self) -> bool {
        self.kept().book.is_ended()
    }

    /// A reader; see [`LogBook::cursor`].
    #[must_use]
    pub fn cursor(&self, ranks: &[Rank], tail: Option<u32>) -> Cursor {
        self.kept().book.cursor(ranks, tail)
    }

    /// What is new for a reader, and whether more may come; see [`LogBook::read`].
    pub fn read(&self, cursor: &mut Cursor, max_bytes: usize) -> (LogBatch, bool) {
        let book = &self.kept().book;
        (book.read(cursor, max_bytes), !book.is_ended())
    }

    /// Changes whenever there is something new. Subscribe before [`Output::read`], to miss nothing.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    pub(super) fn next_index(&self) -> u64 {
        self.kept().book.next_index()
    }

    pub(super) fn stderr_tail(&self, of: (Slot, u64), lines: usize) -> Vec<String> {
        self.kept().book.stderr_tail(of, lines)
    }
}

#[derive(Debug, Default)]
struct Jobs {
    outputs: BTreeMap<JobId, Arc<Output>>,
    /// Those that have ended, in that order.
    ended: VecDeque<JobId>,
}

#[derive(Debug)]
struct All {
    limits: LogLimits,
    budget: Arc<Budget>,
    jobs: Mutex<Jobs>,
}

impl All {
    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the output of jobs that have ended, those first that ended first, until the rest is well within the bound.
    /// If that is not enough, the other jobs that have most lose their oldest lines: those that run, and those that have
    /// ended and whose driver may still come. That driver would take a job that is forgotten for one that never ran.
    fn make_room(&self) {
        let mut jobs = self.jobs();
        // Not for each line anew.
        let wanted = self.budget.most() - self.budget.most() / 16;
        while self.budget.held() > wanted {
            let Jobs { outputs, ended } = &mut *jobs;
            let awaited = |job: &JobId| outputs.get(job).is_some_and(|output| output.is_awaited());
            if let Some(oldest) = ended.iter().position(|job| !awaited(job)) {
                if let Some(output) = ended.remove(oldest).and_then(|job| outputs.remove(&job)) {
                    output.forget();
                }
                continue;
            }
            let largest = jobs
                .outputs
                .values()
                .max_by_key(|output| output.kept().share.bytes());
            if !largest.is_some_and(|output| output.shed()) {
                return;
            }
        }
    }
}

/// The output of all jobs: of those that run, and of as many that have ended as there is memory for.
#[derive(Debug)]
pub struct Outputs(Arc<All>);

impl Outputs {
    /// Nothing yet; `limits` hold for each rank, and all output together takes at most `most` bytes of memory.
    #[must_use]
    pub fn new(limits: LogLimits, most: usize) -> Self {
        Self(Arc::new(All {
            limits,
            budget: Budget::new(most),
            jobs: Mutex::default(),
        }))
    }

    /// How many bytes of memory all output takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.budget.held()
    }

    /// The output of a job that begins.
    pub fn open(&self, job: JobId) -> Arc<Output> {
        self.open_with(job, || None)
    }

    /// The output of a job that begins, all of which its driver takes. `stdin` if the driver has input for rank 0.
    pub fn open_streamed(&self, job: JobId, owner: DriverId, stdin: bool) -> Arc<Output> {
        self.open_with(job, || Some(OutputStream::new(owner, stdin)))
    }

    fn open_with(&self, job: JobId, stream: impl FnOnce() -> Option<OutputStream>) -> Arc<Output> {
        let mut jobs = self.0.jobs();
        let known = jobs.outputs.get(&job).filter(|output| !output.is_ended());
        if let Some(output) = known {
            return output.clone();
        }
        jobs.ended.retain(|ended| *ended != job);
        let output = Arc::new(Output::new(&self.0, stream()));
        if let Some(old) = jobs.outputs.insert(job, output.clone()) {
            old.forget();
        }
        output
    }

    /// The output of a job; `None` if it never ran here or is forgotten.
    #[must_use]
    pub fn get(&self, job: JobId) -> Option<Arc<Output>> {
        self.0.jobs().outputs.get(&job).cloned()
    }

    /// The job has ended.
    pub fn end(&self, job: JobId) {
        let mut jobs = self.0.jobs();
        let Some(output) = jobs.outputs.get(&job) else {
            return;
        };
        let first = !output.is_ended();
        output.end();
        // Also one that has said nothing takes something.
        let fits = output.kept().count();
        if first {
            jobs.ended.push_back(job);
        }
        drop(jobs);
        if !fits {
            self.0.make_room();
        }
    }
}

#[cfg(test)]
mod tests {
    use kolo_transport::wire::Stdio;

    use super::super::author::Author;
    use super::*;

    #[tokio::test]
    async fn a_reader_is_woken_by_lines_and_by_the_end() {
        let outputs = Outputs::new(LogLimits::default(), 1 << 20);
        let output = outputs.open(JobId(1));
        let mut changes = output.changes();
        let mut cursor = output.cursor(&[], None);
        let (batch, more) = output.read(&mut cursor, 1000);
        assert!(batch.lines.is_empty() && more);
        Author::new(output.clone(), Slot(0), Rank(0)).keep(Stdio::Stdout, 7, b"one\n");
        changes.changed().await.unwrap();
        let (batch, more) = output.read(&mut cursor, 1000);
        assert_eq!(batch.lines[0].text, b"one");
        assert!(batch.lines[0].time_ms == 7 && more);
        outputs.end(JobId(1));
        changes.changed().await.unwrap();
        assert!(!output.read(&mut cursor, 1000).1);
    }

    /// Writes so many lines of 100 bytes for one rank.
    fn write(output: &Arc<Output>, rank: u32, lines: usize) {
        Author::new(output.clone(), Slot(rank), Rank(rank)).keep(
            Stdio::Stdout,
            0,
            &[&[b'x'; 100][..], b"\n"].concat().repeat(lines),
        );
    }

    fn count(output: &Output) -> usize {
        output
            .read(&mut output.cursor(&[], None), usize::MAX)
            .0
            .lines
            .len()
    }

    #[test]
    fn jobs_that_ended_first_are_forgotten_first_and_their_memory_is_free() {
        const MOST: usize = 1 << 20;
        let outputs = Outputs::new(LogLimits::default(), MOST);
        let running = outputs.open(JobId(1000));
        write(&running, 0, 100);
        for job in 0..100 {
            let output = outputs.open(JobId(job));
            for rank in 0..4 {
                write(&output, rank, 200);
            }
            outputs.end(JobId(job));
            // Said twice, it has ended once.
            outputs.end(JobId(job));
            assert!(outputs.bytes() <= MOST, "{}", outputs.bytes());
        }
        let kept: Vec<u64> = (0..100)
            .filter(|job| outputs.get(JobId(*job)).is_some())
            .collect();
        assert!(kept.len() > 5, "{kept:?}");
        let newest: Vec<u64> = (100 - kept.len() as u64..100).collect();
        assert_eq!(kept, newest, "the oldest went first");
        assert_eq!(count(&running), 100, "who runs loses nothing to who ended");
        // A reader keeps no memory of a job that is forgotten, and comes to an end.
        let reader = outputs.get(JobId(99)).unwrap();
        while outputs.get(JobId(99)).is_some() {
            write(&running, 1, 1000);
            write(&running, 2, 1000);
            for rank in 3..40 {
                write(&running, rank, 1000);
            }
        }
        assert_eq!(count(&reader), 0);
        drop((running, reader));
        assert!(outputs.bytes() <= MOST);
    }

    #[test]
    fn a_job_that_runs_and_writes_most_loses_its_oldest_lines() {
        const MOST: usize = 1 << 20;
        let outputs = Outputs::new(LogLimits::default(), MOST);
        let (quiet, loud) = (outputs.open(JobId(1)), outputs.open(JobId(2)));
        write(&quiet, 0, 50);
        for round in 0..50 {
            for rank in 0..64 {
                write(&loud, rank, 100);
            }
            assert!(outputs.bytes() <= MOST, "{round}: {}", outputs.bytes());
        }
        assert_eq!(count(&quiet), 50);
        assert!(count(&loud) > 64);
        for rank in 0..64 {
            let mut cursor = loud.cursor(&[Rank(rank)], None);
            let lines = loud.read(&mut cursor, usize::MAX).0.lines;
            // Those that write later may take even a rank's last line.
            assert!(lines.last().is_none_or(|line| line.seq == 4999));
        }
    }

    #[test]
    fn a_job_that_has_ended_is_kept_while_its_driver_may_come_for_its_output() {
        const OWNER: DriverId = DriverId(3);
        let outputs = Outputs::new(LogLimits::default(), 40 * JOB_OVERHEAD);
        let ended = |job| {
            let output = outputs.open_streamed(JobId(job), OWNER, false);
            write(&output, 0, 10);
            outputs.end(JobId(job));
            output
        };
        let streams = [1, 2, 3].map(ended);
        let fill = |jobs: std::ops::Range<u64>| {
            for job in jobs {
                write(&outputs.open(JobId(job)), 0, 10);
                outputs.end(JobId(job));
                assert!(outputs.bytes() <= 40 * JOB_OVERHEAD);
            }
        };
        fill(100..200);
        assert!(outputs.get(JobId(100)).is_none());
        for job in [1, 2, 3] {
            assert!(outputs.get(JobId(job)).is_some(), "{job}");
        }
        assert!(streams[0].take(OWNER).is_ok());
        streams[1].abandon();
        fill(200..300);
        let kept = [1, 2, 3].map(|job| outputs.get(JobId(job)).is_some());
        assert_eq!(kept, [false, false, true]);
        assert!(streams[2].take(OWNER).is_ok());
    }

    #[test]
    fn jobs_without_output_are_forgotten_too() {
        let outputs = Outputs::new(LogLimits::default(), 40 * JOB_OVERHEAD);
        for job in 0..1000 {
            outputs.open(JobId(job));
            outputs.end(JobId(job));
        }
        let kept = (0..1000).filter(|job| outputs.get(JobId(*job)).is_some());
        assert!((1..=40).contains(&kept.count()));
        assert!(outputs.get(JobId(999)).is_some());
        outputs.end(JobId(5000));
        assert!(outputs.get(JobId(5000)).is_none());
    }
}
