//! Files and folders that are their owner's alone: replaced as a whole, and locked.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

/// Makes a folder and its parents (mode 0700). One that is there is left as it is.
///
/// # Errors
///
/// What the operating system said.
pub fn make_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Opens the file of a lock (mode 0600), and makes it unless it is there.
pub(crate) fn open_lock(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .mode(0o600)
        .open(path)
}

/// Whether a process has a file locked. One that is not there is not.
pub(crate) fn is_locked(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| {
        flock(&file, FlockOperation::NonBlockingLockExclusive) == Err(rustix::io::Errno::WOULDBLOCK)
    })
}

/// Makes a file (mode 0600) unless it is there, and locks it; `None` if another process has it locked. The kernel lets go of
/// the lock when the file is closed, however the process ends.
///
/// # Errors
///
/// What the operating system said.
pub fn lock(path: &Path) -> io::Result<Option<File>> {
    let file = open_lock(path)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Replaces a file, for its owner alone (mode 0600), so that a crash leaves the old or the new one. Of a link the target is
/// replaced.
///
/// # Errors
///
/// What the operating system said, or that there is something else than a file. All is as it was then.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    // If nothing is there yet, the path is that of the file to be.
    let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if path.exists() && !path.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a folder, pipe, socket or device is not replaced; give the path of a file",
        ));
    }
    kolo_transport::files::replace(path, content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_followed_and_what_is_no_file_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::os::unix::fs::symlink("file", at("link")).unwrap();
        fs::write(at("file"), "old").unwrap();
        replace(&at("link"), b"new").unwrap();
        assert!(fs::symlink_metadata(at("link")).unwrap().is_symlink());
        assert_eq!(fs::read(at("file")).unwrap(), b"new");
        let _listener = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        let error = replace(&at("socket"), b"new").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
        replace(dir.path(), b"new").unwrap_err();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
    }
}
