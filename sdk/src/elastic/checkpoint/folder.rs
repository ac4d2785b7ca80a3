//! The files of a directory, by name.

use std::fmt;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::Path;

use crate::elastic::snapshot::CommitId;

/// The name of a checkpoint: `commit-000000000012-g1.kolo`. A greater name is that of a newer one: the number counts commits
/// of all jobs that have resumed each other, and generations begin anew in each job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name {
    number: u64,
    generation: u64,
}

impl Name {
    pub(super) fn of(id: CommitId) -> Self {
        Self {
            number: id.number,
            generation: id.generation,
        }
    }

    pub(super) fn id(self) -> CommitId {
        CommitId {
            generation: self.generation,
            number: self.number,
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let ids = text.strip_prefix("commit-")?.strip_suffix(".kolo")?;
        let (number, generation) = ids.split_once("-g")?;
        let name = Self {
            number: number.parse().ok()?,
            generation: generation.parse().ok()?,
        };
        (name.to_string() == text).then_some(name)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "commit-{:012}-g{}.kolo", self.number, self.generation)
    }
}

/// Locked by the process that writes checkpoints.
const LOCK: &str = "writer.lock";

/// Follows the name of a file that is being written.
const UNFINISHED: &str = ".tmp";

/// The checkpoints of a directory, the newest first. There are none if there is no directory.
pub(super) fn list(directory: &Path) -> io::Result<Vec<Name>> {
    let mut names = entries(directory)?;
    names.retain(|(_, is_finished)| *is_finished);
    let mut names: Vec<Name> = names.into_iter().map(|(name, _)| name).collect();
    names.sort_unstable_by(|a, b| b.cmp(a));
    Ok(names)
}

/// Checkpoints, and whether they were written to the end.
fn entries(directory: &Path) -> io::Result<Vec<(Name, bool)>> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut names = Vec::new();
    for entry in entries {
        let text = entry?.file_name();
        let Some(text) = text.to_str() else { continue };
        let finished = text.strip_suffix(UNFINISHED);
        if let Some(name) = Name::parse(finished.unwrap_or(text)) {
            names.push((name, finished.is_none()));
        }
    }
    Ok(names)
}

/// What is done to a disk, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Create,
    Write,
    Sync,
    Rename,
    SyncDirectory,
    /// Of an unfinished file, after a failure.
    Remove,
    /// Of an older checkpoint.
    Delete,
}

/// Asked before each step; an error is taken for one of the step itself. Tests end a process there.
pub(super) type Before<'a> = &'a mut dyn FnMut(Step) -> io::Result<()>;

/// Makes a checkpoint of what `write` writes. The file has its name when all of it is on disk.
pub(super) fn store(
    directory: &Path,
    name: Name,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    before: Before<'_>,
) -> io::Result<()> {
    make(directory)?;
    let unfinished = directory.join(format!("{name}{UNFINISHED}"));
    let result = (|| {
        before(Step::Create)?;
        // One that is there already is from a process that was killed.
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&unfinished)?;
        let mut stepped = Stepped { file, before };
        write(&mut stepped)?;
        let Stepped { file, before } = stepped;
        before(Step::Sync)?;
        file.sync_all()?;
        before(Step::Rename)?;
        fs::rename(&unfinished, directory.join(name.to_string()))?;
        before(Step::SyncDirectory)?;
        File::open(directory)?.sync_all()
    })();
    if result.is_err() && before(Step::Remove).is_ok() {
        // Not there if it could not be made, or has its name already.
        drop(fs::remove_file(&unfinished));
    }
    result
}

/// Takes a directory for the writer that holds the file: another group, or ranks of an earlier generation that run on, must not delete
/// its checkpoints. The system lets go when the process ends.
pub(super) fn lock(directory: &Path) -> io::Result<File> {
    make(directory)?;
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(directory.join(LOCK))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            "another process writes checkpoints there; each job needs a directory of its own",
        )),
        // Not all file systems have locks.
        Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => Ok(file),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Makes the directory, in a way that outlives the machine's end.
fn make(directory: &Path) -> io::Result<()> {
    if directory.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(directory)?;
    match directory.parent() {
        Some(parent) if parent != Path::new("") => File::open(parent)?.sync_all(),
        _ => Ok(()),
    }
}

/// Deletes what is older than a checkpoint.
pub(super) fn delete_before(directory: &Path, oldest: Name, before: Before<'_>) -> io::Result<()> {
    for (name, is_finished) in entries(directory)? {
        if name < oldest {
            before(Step::Delete)?;
            let rest = if is_finished { "" } else { UNFINISHED };
            fs::remove_file(directory.join(format!("{name}{rest}")))?;
        }
    }
    Ok(())
}

struct Stepped<'a, 'b> {
    file: File,
    before: &'a mut (dyn FnMut(Step) -> io::Result<()> + 'b),
}

impl Write for Stepped<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (self.before)(Step::Write)?;
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
