//! A program while it comes: hashed on the way, and put in its place whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use kolo_actors::node::ProgramFile;
use kolo_transport::RandomId as _;
use kolo_transport::wire::ProgramHash;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;

use super::file::{MODE, Verified};

/// Names of files in the cache that are not whole begin so.
pub(super) const UPLOAD_PREFIX: &str = ".upload-";

/// How often sealing is tried.
const SEAL_ATTEMPTS: u32 = 20;

/// A program that is coming.
#[derive(Debug)]
pub(super) struct Upload {
    /// `None` once it is in its place.
    file: Option<File>,
    /// Bytes that have come.
    length: u64,
    hasher: blake3::Hasher,
    /// Where it is meanwhile; `None` in memory.
    temporary: Option<Temporary>,
}

impl Upload {
    pub(super) fn begin(dir: Option<&Path>) -> io::Result<Self> {
        let (file, temporary) = match dir {
            Some(dir) => {
                let name = format!(
                    "{UPLOAD_PREFIX}{:016x}",
                    kolo_transport::ids::JobId::random().0
                );
                let path = dir.join(name);
                let file = OpenOptions::new()
                    .write(true)
                    .create_new(true)
                    .mode(0o600)
                    .open(&path)?;
                (file, Some(Temporary(path)))
            }
            None => (memory()?, None),
        };
        Ok(Self {
            file: Some(file),
            length: 0,
            hasher: blake3::Hasher::new(),
            temporary,
        })
    }

    fn file(&self) -> io::Result<&File> {
        self.file
            .as_ref()
            .ok_or_else(|| io::Error::other("it is in its place already"))
    }

    /// Adds a piece. If that fails the same piece can be added again.
    pub(super) fn add(&mut self, piece: &[u8]) -> io::Result<()> {
        self.file()?.write_all_at(piece, self.length)?;
        self.length += piece.len() as u64;
        self.hasher.update(piece);
        Ok(())
    }

    pub(super) fn hash(&self) -> ProgramHash {
        ProgramHash(*self.hasher.finalize().as_bytes())
    }

    /// Puts it in its place. If that fails it can be done again.
    pub(super) fn finish(&mut self, place: Option<&Path>) -> io::Result<Verified> {
        let file = self.file()?;
        file.set_permissions(fs::Permissions::from_mode(MODE))?;
        let metadata = file.metadata()?;
        let id = (metadata.dev(), metadata.ino());
        let (Some(temporary), Some(place)) = (&self.temporary, place) else {
            let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
            seal(|| rustix::fs::fcntl_add_seals(file, seals))?;
            // Another process of this user starts it: by this process's name for it.
            let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
            return Verified::new(ProgramFile {
                path: path.into(),
                id,
                hold: Box::new(self.file.take()),
            });
        };
        fs::rename(&temporary.0, place)?;
        // Until it is closed it can't be executed. It need not be on the disk: what a crash of the machine
        // leaves of it is verified before it is used.
        self.file = None;
        Verified::new(ProgramFile {
            path: place.to_owned(),
            id,
            hold: Box::new(()),
        })
    }
}

/// A file that is removed if it is not moved away before.
#[derive(Debug)]
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %self.0.display(), %error, "the rest of a program could not be removed");
        }
    }
}

/// Seals a file in memory, by `attempt`. The system refuses while anything holds one of its pages for a moment, as what
/// looks for memory to move does; it has waited 0.15 s by then.
fn seal(mut attempt: impl FnMut() -> rustix::io::Result<()>) -> io::Result<()> {
    let mut left = SEAL_ATTEMPTS;
    loop {
        left -= 1;
        match attempt() {
            Err(Errno::BUSY) if left > 0 => {}
            result => return Ok(result?),
        }
    }
}

fn memory() -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let made = rustix::fs::memfd_create("kolo-program", flags | MemfdFlags::EXEC)
        // Kernels before 6.3 do not know the flag and don't need it.
        .or_else(|_| rustix::fs::memfd_create("kolo-program", flags))?;
    Ok(File::from(made))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sealing_is_tried_again_while_the_file_is_busy_but_not_for_ever() {
        let seal_after = |busy: u32, last| {
            let mut attempts = 0;
            let result = seal(|| {
                attempts += 1;
                if attempts <= busy {
                    Err(Errno::BUSY)
                } else {
                    last
                }
            });
            (result.map_err(|error| error.raw_os_error()), attempts)
        };
        assert_eq!(seal_after(0, Ok(())), (Ok(()), 1));
        assert_eq!(seal_after(3, Ok(())), (Ok(()), 4));
        let code = |error: Errno| Err(Some(error.raw_os_error()));
        assert_eq!(seal_after(1, Err(Errno::PERM)), (code(Errno::PERM), 2));
        assert_eq!(seal_after(99, Ok(())), (code(Errno::BUSY), SEAL_ATTEMPTS));
    }
}
