//! The thread that writes checkpoints.

use std::fs::File;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kolo_transport::ids::JobId;

use super::Checkpoints;
use super::file::{self, About};
use super::folder::{self, Before, Name};
use crate::elastic::snapshot::{CommitId, Snapshot};

/// The checkpoints that were there before the first write of this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Base {
    /// Nobody has looked.
    Unknown,
    /// The group has begun with a sync, for which its rank 0 has looked: there were none, or those of the group.
    Synced,
    /// This rank has begun with this one.
    Read(CommitId),
}

/// Writes the newest commit that it is offered, again and again. Dropped, it writes the last one first.
pub(super) struct Writer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    slot: Mutex<Slot>,
    /// The thread has something to do.
    work: Condvar,
    /// The thread has nothing to do.
    idle: Condvar,
}

#[derive(Default)]
pub(super) struct Slot {
    /// The newest commit, if it is not written yet.
    pub(super) newest: Option<(CommitId, Arc<Snapshot>)>,
    is_writing: bool,
    /// When the next write is due: not before this commit, and not before this time.
    pub(super) due_commit: u64,
    pub(super) due_at: Option<Instant>,
    /// The last commit that is on disk.
    written: u64,
    /// Why the last write failed.
    failure: Option<String>,
    /// Waits for no time and no other commit.
    pub(super) hurries: bool,
    ends: bool,
}

impl Slot {
    pub(super) fn is_due(&self) -> bool {
        let Some((id, _)) = &self.newest else {
            return false;
        };
        let is_late = self.due_at.is_none_or(|at| at <= Instant::now());
        self.hurries || self.ends || (id.number >= self.due_commit && is_late)
    }
}

impl Shared {
    fn slot(&self) -> MutexGuard<'_, Slot> {
        // Nothing in here panics half-way.
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Writer {
    pub(super) fn start(settings: Checkpoints, job: JobId, base: Base) -> Self {
        Self::start_with(settings, job, base, |_| Ok(()))
    }

    /// `before` is asked before each step: see [`folder::store`].
    pub(super) fn start_with(
        settings: Checkpoints,
        job: JobId,
        base: Base,
        before: impl FnMut(folder::Step) -> io::Result<()> + Send + 'static,
    ) -> Self {
        let shared = Arc::<Shared>::default();
        let mut thread = Thread {
            previous: match base {
                Base::Read(id) => Some(Name::of(id)),
                Base::Unknown | Base::Synced => None,
            },
            may_begin: base != Base::Unknown,
            lock: None,
            settings,
            job,
            shared: Arc::clone(&shared),
            before,
        };
        let started = std::thread::Builder::new()
            .name("kolo-checkpoint".to_owned())
            .spawn(move || thread.run());
        let thread = match started {
            Ok(thread) => Some(thread),
            Err(error) => {
                let why = format!("can't be written: the system gives no thread: {error}");
                tracing::error!("checkpoints: {why}");
                shared.slot().failure = Some(why);
                None
            }
        };
        Self { shared, thread }
    }

    /// Writes this commit when that is due, unless a newer one comes before.
    pub(super) fn offer(&self, id: CommitId, copy: Arc<Snapshot>) {
        if self.thread.is_none() {
            return;
        }
        let mut slot = self.shared.slot();
        let older = slot.newest.replace((id, copy));
        let wakes = !slot.is_writing && slot.is_due();
        drop(slot);
        if wakes {
            self.shared.work.notify_one();
        }
        // The memory is the state's, too.
        drop(older);
    }

    pub(super) fn written(&self) -> u64 {
        self.shared.slot().written
    }

    /// Waits until the newest commit is on disk.
    pub(super) fn flush(&self) -> Result<(), String> {
        let mut slot = self.shared.slot();
        slot.hurries = true;
        self.shared.work.notify_one();
        let mut slot = (self.shared.idle)
            .wait_while(slot, |slot| slot.newest.is_some() || slot.is_writing)
            .unwrap_or_else(PoisonError::into_inner);
        slot.hurries = false;
        slot.failure.clone().map_or(Ok(()), Err)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.shared.slot().ends = true;
        self.shared.work.notify_one();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that writes checkpoints has panicked");
        }
    }
}

struct Thread<B> {
    settings: Checkpoints,
    job: JobId,
    shared: Arc<Shared>,
    /// The last good checkpoint. Older ones go when a newer one is there.
    previous: Option<Name>,
    /// Nothing that is in the directory would be lost.
    may_begin: bool,
    /// Held from the first write on.
    lock: Option<File>,
    before: B,
}

impl<B: FnMut(folder::Step) -> io::Result<()>> Thread<B> {
    fn run(&mut self) {
        while let Some((id, copy)) = self.next() {
            let result = self.write(id, &copy);
            // Before the next one is taken: the state has memory for two.
            drop(copy);
            let mut slot = self.shared.slot();
            slot.is_writing = false;
            match result {
                Ok(()) => {
                    slot.written = id.number;
                    slot.failure = None;
                }
                Err(why) => {
                    // On the user's screen, and not once a second: the loop goes on.
                    if slot.failure.as_ref() != Some(&why) {
                        eprintln!(
                            "kolo: no checkpoint of commit {}: the directory `{}` {why}; the last checkpoint is that of commit {}",
                            id.number,
                            self.settings.directory.display(),
                            slot.written
                        );
                    }
                    slot.failure = Some(why);
                }
            }
            drop(slot);
            self.shared.idle.notify_all();
        }
    }

    /// Waits for a commit that is to be written. `None` at the end.
    fn next(&self) -> Option<(CommitId, Arc<Snapshot>)> {
        let mut slot = self.shared.slot();
        loop {
            if slot.is_due() {
                break;
            }
            if slot.ends {
                return None;
            }
            let rest = slot.due_at.map_or(Duration::ZERO, |at| {
                at.saturating_duration_since(Instant::now())
            });
            let work = &self.shared.work;
            slot = if rest.is_zero() {
                work.wait(slot).unwrap_or_else(PoisonError::into_inner)
            } else {
                let waited = work.wait_timeout(slot, rest);
                waited.unwrap_or_else(PoisonError::into_inner).0
            };
        }
        let (id, copy) = slot.newest.take()?;
        slot.is_writing = true;
        slot.due_commit = id.number.saturating_add(self.settings.every);
        slot.due_at = Instant::now().checked_add(self.settings.interval);
        Some((id, copy))
    }

    fn write(&mut self, id: CommitId, copy: &Snapshot) -> Result<(), String> {
        let directory = &self.settings.directory;
        let before: Before<'_> = &mut self.before;
        let cant = |error: io::Error| format!("can't be written: {error}");
        if self.lock.is_none() {
            self.lock = Some(folder::lock(directory).map_err(cant)?);
        }
        if !self.may_begin {
            if let Some(name) = folder::list(directory).map_err(cant)?.first() {
                return Err(format!(
                    "has checkpoints already, `{name}` for one, and the state was not synced before its first commit: sync \
                     first, which resumes them or refuses the directory"
                ));
            }
            self.may_begin = true;
        }
        let name = Name::of(id);
        let about = About::new(self.job, id.generation, id.number);
        let write = |to: &mut dyn io::Write| file::write(to, &about, copy);
        folder::store(directory, name, write, before).map_err(cant)?;
        // The newest is on disk, so that a failure here costs room alone.
        if let Some(previous) = self.previous.replace(name)
            && let Err(error) = folder::delete_before(directory, previous, before)
        {
            tracing::warn!(
                "older checkpoints in `{}` can't be deleted: {error}",
                directory.display()
            );
        }
        Ok(())
    }
}
