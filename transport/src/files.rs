//! Private files: only the owner reads them, and a crash leaves the old or the new one.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use pem::{EncodeConfig, LineEnding, Pem, encode_config};
use rustix::fs::{FlockOperation, flock};

use crate::identity::IdentityError;
use crate::random::random_u64;

pub(crate) fn failed(path: &Path) -> impl FnOnce(io::Error) -> IdentityError {
    let path = path.to_owned();
    move |error| IdentityError::File { path, error }
}

/// Makes `dir` and its parents, for the owner alone. One that exists is left as it is.
pub(crate) fn create_dir(dir: &Path) -> Result<(), IdentityError> {
    if dir.exists() {
        return Ok(());
    }
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(failed(dir))?;
    match dir.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => sync_dir(parent).map_err(failed(parent)),
        _ => Ok(()),
    }
}

/// Waits until nobody else changes files of a folder, which takes as long as a small file does; removes what a crash has left. Where
/// a file system has no locks it is as if nobody did.
pub(crate) fn alone(dir: &Path) -> Option<File> {
    let lock = File::open(dir).and_then(|file| {
        flock(&file, FlockOperation::LockExclusive)?;
        Ok(file)
    });
    match lock {
        Ok(lock) => {
            sweep(dir);
            Some(lock)
        }
        Err(error) => {
            tracing::debug!(%error, dir = %dir.display(), "the folder is not locked");
            None
        }
    }
}

/// Removes the files under [passing names](stage): they may hold a key.
fn sweep(dir: &Path) {
    let is_passing = |name: &OsStr| {
        let nonce =
            (name.to_str()).and_then(|name| name.strip_suffix(".tmp")?.rsplit_once(".pem."));
        nonce.is_some_and(|(_, nonce)| {
            nonce.len() == 16 && nonce.bytes().all(|byte| byte.is_ascii_hexdigit())
        })
    };
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| is_passing(&entry.file_name())) {
        drop(fs::remove_file(entry.path()));
    }
}

/// Reads a file that nobody but its owner can read or write, and refuses any other.
pub(crate) fn read_private(path: &Path) -> Result<Vec<u8>, IdentityError> {
    // Of the file that is read, whatever takes its name meanwhile.
    let mut file = File::open(path).map_err(failed(path))?;
    let mode = file.metadata().map_err(failed(path))?.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(IdentityError::Exposed {
            path: path.to_owned(),
            mode,
        });
    }
    let mut content = Vec::new();
    file.read_to_end(&mut content).map_err(failed(path))?;
    Ok(content)
}

/// Refuses a folder in which others than its owner can put files: they could put an identity of theirs there.
pub(crate) fn check_dir(dir: &Path) -> Result<(), IdentityError> {
    let mode = fs::metadata(dir).map_err(failed(dir))?.permissions().mode() & 0o777;
    if mode & 0o022 == 0 {
        Ok(())
    } else {
        Err(IdentityError::Writable {
            path: dir.to_owned(),
            mode,
        })
    }
}

/// Waits until the names in a folder are on the disk.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Puts a file in its place (mode 0600), over one that is there, so that a crash leaves the old or the new one.
///
/// # Errors
///
/// What the operating system said. The old file is as it was then.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    stage(path, content)?.replace()?;
    sync_dir(match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    })
}

/// A file under a passing name, removed unless it is moved to its own.
pub(crate) struct Staged {
    temporary: PathBuf,
    path: PathBuf,
}

/// Writes `content` beside `path`, mode 0600, down to the disk.
pub(crate) fn stage(path: &Path, content: &[u8]) -> io::Result<Staged> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{:016x}.tmp", random_u64()));
    let staged = Staged {
        temporary: path.with_file_name(name),
        path: path.to_owned(),
    };
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&staged.temporary)
        .and_then(|mut file| {
            file.write_all(content)?;
            file.sync_all()
        })?;
    Ok(staged)
}

impl Staged {
    /// Puts the file in its place, over one that is there.
    fn replace(self) -> io::Result<()> {
        fs::rename(&self.temporary, &self.path)
    }

    /// Puts the file in its place unless one is there. Whether it did.
    pub(crate) fn create(self) -> io::Result<bool> {
        match fs::hard_link(&self.temporary, &self.path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // After `replace` there is none, and nothing else can be done about one that stays.
        drop(fs::remove_file(&self.temporary));
    }
}

/// These blocks, each with its label, in PEM.
pub(crate) fn pem<const N: usize>(blocks: [(&str, &[u8]); N]) -> String {
    let config = EncodeConfig::new().set_line_ending(LineEnding::LF);
    let encode = |(label, der)| encode_config(&Pem::new(label, der), config);
    blocks.map(encode).concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_crash_has_left_is_removed_and_nothing_else() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path();
        for name in ["identity.pem", "identity.pem.mine.tmp"] {
            fs::write(dir.join(name), "").unwrap();
        }
        let left = dir.join("identity.pem.0123456789abcdef.tmp");
        fs::write(&left, "a key").unwrap();
        drop(alone(dir));
        assert!(!left.exists());
        assert_eq!(fs::read_dir(dir).unwrap().count(), 2);
    }

    #[test]
    fn a_staged_file_appears_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        assert!(stage(&path, b"one").unwrap().create().unwrap());
        assert!(!stage(&path, b"two").unwrap().create().unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"one");
        replace(&path, b"three").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"three");
        drop(stage(&path, b"four").unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"three");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
    }
}
