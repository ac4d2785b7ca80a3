//! The programs that jobs run, by their BLAKE3 hash.
//!
//! A program comes from a driver once, is verified while it comes and is put in its place whole or not at
//! all: in a directory that only this user can enter, or, without one, in memory that can't be changed any
//! more (a sealed memfd).

mod file;
mod upload;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use kolo_actors::node::ProgramFile;
use kolo_transport::wire::{Program, ProgramHash, Refusal, RefusalKind};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use self::file::{Stamp, Verified, identify, is_final, lasting, verify};
use self::upload::{UPLOAD_PREFIX, Upload};
use crate::private_file;

/// Uploads at the same time; more are asked to try again.
const MAX_UPLOADS: usize = 8;

/// How long a driver may take for the next piece of a program.
const PIECE_TIMEOUT: Duration = Duration::from_secs(30);

/// The longest piece of a program, in bytes.
pub(crate) const MAX_PIECE: u32 = 16 << 20;

/// Where a node has its programs from, and where it puts them.
#[derive(Debug, Clone)]
pub struct ProgramSource {
    /// A directory for programs, made if it does not exist (mode 0700), for this node alone. They are found there
    /// again after a restart. Default `None`: they are kept in memory.
    pub cache: Option<PathBuf>,
    /// Programs that are on this machine already, and need not be sent. The caller answers for the hash.
    pub preloaded: Vec<(ProgramHash, PathBuf)>,
    /// The largest program that is taken, in bytes. Default 4 GiB.
    pub max_size: u64,
    /// The most that all programs together may take, in bytes; those that were not used for the longest time
    /// make room, here and when the disk is full, but none that a job runs. Default 16 GiB.
    pub max_total: u64,
}

impl Default for ProgramSource {
    fn default() -> Self {
        Self {
            cache: None,
            preloaded: Vec::new(),
            max_size: 4 << 30,
            max_total: 16 << 30,
        }
    }
}

/// A program's directory or a preloaded program can't be used.
#[derive(Debug, thiserror::Error)]
#[error("{what} {}: {error}", path.display())]
pub struct ProgramsError {
    what: &'static str,
    path: PathBuf,
    error: io::Error,
}

#[derive(Debug)]
struct Entry {
    size: u64,
    /// When it was last asked for, in numbers of requests.
    used: u64,
    /// `None` as long as it is a file of an earlier life of the daemon that was not verified yet.
    verified: Option<Verified>,
    /// Whether it is the caller's and not ours to remove.
    preloaded: bool,
}

#[derive(Debug, Default)]
struct State {
    entries: BTreeMap<ProgramHash, Entry>,
    requests: u64,
    /// Bytes of uploads that have not ended.
    coming: u64,
}

/// The programs of a node.
#[derive(Debug)]
pub(crate) struct Programs {
    source: ProgramSource,
    runtime: Handle,
    state: Mutex<State>,
    /// One at a time verifies a file, so that each is verified once.
    verifying: tokio::sync::Mutex<()>,
    uploads: Semaphore,
}

/// Pieces of a program as they come.
pub(crate) trait Pieces: Send {
    /// The next piece; `None` at the end. An error is the end too, but not a good one.
    fn next(&mut self) -> impl Future<Output = Result<Option<Bytes>, String>> + Send;
}

impl Programs {
    /// Opens the cache and looks at what is there.
    pub(crate) fn open(source: ProgramSource, runtime: Handle) -> Result<Self, ProgramsError> {
        let mut state = State::default();
        if let Some(dir) = &source.cache {
            let failed = |error| ProgramsError {
                what: "the directory for programs",
                path: dir.clone(),
                error,
            };
            open_dir(dir).map_err(failed)?;
            for file in fs::read_dir(dir).map_err(failed)? {
                let file = file.map_err(failed)?;
                let name = file.file_name();
                let name = name.to_string_lossy();
                if name.starts_with(UPLOAD_PREFIX) {
                    // Left by a daemon that was killed.
                    fs::remove_file(file.path()).map_err(failed)?;
                } else if let Some(hash) = parse_hash(&name) {
                    let size = file.metadata().map_err(failed)?.len();
                    state.entries.insert(
                        hash,
                        Entry {
                            size,
                            used: 0,
                            verified: None,
                            preloaded: false,
                        },
                    );
                }
            }
        }
        for (hash, path) in &source.preloaded {
            let path = lasting(path);
            let file = identify(&path).map_err(|error| ProgramsError {
                what: "the program",
                path: path.clone(),
                error,
            })?;
            state.entries.insert(
                *hash,
                Entry {
                    size: 0,
                    used: 0,
                    verified: Some(file),
                    preloaded: true,
                },
            );
        }
        let programs = Self {
            source,
            runtime,
            state: Mutex::new(state),
            verifying: tokio::sync::Mutex::new(()),
            uploads: Semaphore::new(MAX_UPLOADS),
        };
        // The bound may be lower than it was in an earlier life of the daemon, none of whose jobs run any more.
        drop(programs.make_room(0));
        Ok(programs)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// A program, verified; `None` if it is not here. One that was changed behind the node's back is verified again, and
    /// forgotten if it is not what it was, so that it is sent again.
    pub(crate) async fn get(&self, hash: ProgramHash) -> Option<Arc<ProgramFile>> {
        match self.look(hash) {
            Look::Here(file) => return Some(file),
            Look::Missing => return None,
            Look::Unverified { .. } => {}
        }
        let _turn = self.verifying.lock().await;
        // Somebody else may have had the turn before.
        let (path, preloaded) = match self.look(hash) {
            Look::Here(file) => return Some(file),
            Look::Missing => return None,
            Look::Unverified { path, preloaded } => (path, preloaded),
        };
        let verified = self
            .runtime
            .spawn_blocking(move || verify(&path, hash, preloaded))
            .await
            .unwrap_or_else(|error| Err(io::Error::other(error)));
        let mut state = self.state();
        match verified {
            Ok(new) => {
                // It has made room for another meanwhile, and its file is gone.
                let entry = state.entries.get_mut(&hash)?;
                // Those who hold the same file go on holding it.
                let file = match &entry.verified {
                    Some(old) if old.file.id == new.file.id => old.file.clone(),
                    _ => new.file,
                };
                entry.verified = Some(Verified {
                    file: file.clone(),
                    stamp: new.stamp,
                });
                Some(file)
            }
            Err(error) if is_final(&error) => {
                tracing::warn!(%hash, %error, "a program is not what it was and must be sent again");
                state.entries.remove(&hash);
                drop(state);
                if !preloaded {
                    self.remove(hash);
                }
                None
            }
            Err(error) => {
                // Too many open files, say. It may be good, and is looked at again the next time.
                tracing::error!(%hash, %error, "a program can't be read now");
                None
            }
        }
    }

    fn look(&self, hash: ProgramHash) -> Look {
        let mut state = self.state();
        state.requests += 1;
        let now = state.requests;
        let Some(entry) = state.entries.get_mut(&hash) else {
            return Look::Missing;
        };
        entry.used = now;
        let preloaded = entry.preloaded;
        let path = match &entry.verified {
            Some(Verified { file, stamp }) => {
                if Stamp::of(&file.path).is_ok_and(|now| now == *stamp) {
                    return Look::Here(file.clone());
                }
                Some(file.path.clone())
            }
            None => self.path(hash),
        };
        path.map_or(Look::Missing, |path| Look::Unverified { path, preloaded })
    }

    fn path(&self, hash: ProgramHash) -> Option<PathBuf> {
        let dir = self.source.cache.as_ref()?;
        Some(dir.join(hash.to_string()))
    }

    fn remove(&self, hash: ProgramHash) {
        if let Some(path) = self.path(hash)
            && let Err(error) = fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %path.display(), %error, "a program could not be removed");
        }
    }

    /// Takes a program. If it is here already, or comes from somebody else meanwhile, the rest is not read.
    /// Whatever goes wrong, nothing is left.
    pub(crate) async fn put(
        &self,
        program: &Program,
        pieces: &mut impl Pieces,
    ) -> Result<(), Refusal> {
        let max = self.source.max_size.min(self.source.max_total);
        if program.size == 0 || program.size > max {
            return Err(Refusal::new(
                RefusalKind::TooLarge,
                format!(
                    "the program `{}` has {} bytes; allowed is 1 to {max}",
                    program.name.escape_debug(),
                    program.size
                ),
            ));
        }
        if self.get(program.hash).await.is_some() {
            return Ok(());
        }
        let Ok(_permit) = self.uploads.try_acquire() else {
            return Err(Refusal::new(
                RefusalKind::Busy,
                format!("{MAX_UPLOADS} programs are being sent to this node; try again"),
            ));
        };
        let _room = self.make_room(program.size)?;
        let dir = self.source.cache.clone();
        let upload = self.storing(move || Upload::begin(dir.as_deref())).await?;
        let upload = Arc::new(Mutex::new(upload));
        let mut missing = program.size;
        while missing > 0 {
            let piece = tokio::time::timeout(PIECE_TIMEOUT, pieces.next())
                .await
                .map_err(|_| {
                    Refusal::new(
                        RefusalKind::Timeout,
                        format!(
                            "the next piece of the program did not come within {PIECE_TIMEOUT:?}"
                        ),
                    )
                })?
                .map_err(|error| Refusal::new(RefusalKind::Invalid, error))?
                .ok_or_else(|| {
                    Refusal::new(
                        RefusalKind::Invalid,
                        format!("the program ended {missing} bytes before its end"),
                    )
                })?;
            missing = missing.checked_sub(piece.len() as u64).ok_or_else(|| {
                Refusal::new(
                    RefusalKind::Invalid,
                    format!(
                        "the program is longer than the {} bytes announced",
                        program.size
                    ),
                )
            })?;
            if let Look::Here(_) = self.look(program.hash) {
                return Ok(());
            }
            let coming = Arc::clone(&upload);
            self.storing(move || lock(&coming).add(&piece)).await?;
        }
        let hash = lock(&upload).hash();
        if hash != program.hash {
            return Err(Refusal::new(
                RefusalKind::Invalid,
                format!(
                    "what came has the hash {hash}, announced was {}; the program was changed while it was sent",
                    program.hash
                ),
            ));
        }
        // Two uploads of one program may end at once. The later must not put its file in the place of the
        // one that workers are being started from: they are told apart by inode.
        let _turn = self.verifying.lock().await;
        if let Look::Here(_) = self.look(hash) {
            return Ok(());
        }
        let place = self.path(hash);
        let file = self
            .storing(move || lock(&upload).finish(place.as_deref()))
            .await?;
        let mut state = self.state();
        state.requests += 1;
        let entry = Entry {
            size: program.size,
            used: state.requests,
            verified: Some(file),
            preloaded: false,
        };
        state.entries.insert(hash, entry);
        kolo_actors::news!(%hash, size = program.size, name = program.name, "a program has come");
        Ok(())
    }

    /// Does a step of storing a program, and again each time that the disk was full and another program made room.
    async fn storing<T: Send + 'static>(
        &self,
        step: impl Fn() -> io::Result<T> + Send + Sync + 'static,
    ) -> Result<T, Refusal> {
        let step = Arc::new(step);
        let error = loop {
            let once = Arc::clone(&step);
            let done = self
                .runtime
                .spawn_blocking(move || once())
                .await
                .unwrap_or_else(|error| Err(io::Error::other(error)));
            match done {
                Ok(done) => return Ok(done),
                Err(error) if is_full(&error) && self.forget_oldest(&mut self.state()) => {}
                Err(error) => break error,
            }
        };
        tracing::error!(%error, "a program could not be stored");
        if is_full(&error) {
            return Err(Refusal::new(
                RefusalKind::Busy,
                format!(
                    "the program could not be stored: {error}, and no program that could make room is left; free some space \
                     in the node's folder of programs"
                ),
            ));
        }
        Err(Refusal::new(
            RefusalKind::Internal,
            format!("the program could not be stored: {error}"),
        ))
    }

    /// Forgets programs until there is room for `size` bytes, and holds that room.
    fn make_room(&self, size: u64) -> Result<Room<'_>, Refusal> {
        let mut state = self.state();
        loop {
            let held: u64 = state.entries.values().map(|entry| entry.size).sum();
            if held + state.coming + size <= self.source.max_total {
                state.coming += size;
                return Ok(Room {
                    programs: self,
                    size,
                });
            }
            if !self.forget_oldest(&mut state) {
                return Err(Refusal::new(
                    RefusalKind::Busy,
                    format!(
                        "this node keeps at most {} bytes of programs, and those that run leave no room for \
                         {size} more; its setting --program-cache-size says how many",
                        self.source.max_total
                    ),
                ));
            }
        }
    }

    /// Removes the program that was not used for the longest time, and that no job runs. False if there is none.
    fn forget_oldest(&self, state: &mut State) -> bool {
        let oldest = state
            .entries
            .iter()
            .filter(|(_, entry)| {
                !entry.preloaded
                    && entry
                        .verified
                        .as_ref()
                        .is_none_or(|verified| Arc::strong_count(&verified.file) == 1)
            })
            .min_by_key(|(_, entry)| entry.used)
            .map(|(hash, _)| *hash);
        let Some(oldest) = oldest else {
            return false;
        };
        tracing::info!(hash = %oldest, "a program makes room for another");
        state.entries.remove(&oldest);
        self.remove(oldest);
        true
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

enum Look {
    Here(Arc<ProgramFile>),
    Unverified { path: PathBuf, preloaded: bool },
    Missing,
}

/// Room that an upload holds.
#[derive(Debug)]
struct Room<'a> {
    programs: &'a Programs,
    size: u64,
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.programs.state().coming -= self.size;
    }
}

fn open_dir(dir: &Path) -> io::Result<()> {
    private_file::make_dir(dir)?;
    let metadata = fs::metadata(dir)?;
    if metadata.mode() & 0o022 != 0 {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "others can write to it; what runs from it must be this user's alone (chmod 700)",
        ));
    }
    Ok(())
}

fn parse_hash(name: &str) -> Option<ProgramHash> {
    let digits = name.as_bytes();
    if digits.len() != 64
        || !digits
            .iter()
            .all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
    {
        return None;
    }
    let mut hash = [0; 32];
    for (byte, pair) in hash.iter_mut().zip(digits.chunks(2)) {
        let pair = std::str::from_utf8(pair).ok()?;
        *byte = u8::from_str_radix(pair, 16).ok()?;
    }
    Some(ProgramHash(hash))
}

#[cfg(test)]
#[path = "programs_tests.rs"]
mod tests;
