//! The directory of a warden's processes: for files that they leave to the daemon.
//!
//! It is removed when the warden ends, by the warden, and by the daemon if the warden was killed. What both have left is
//! swept by the next daemon of the same name.

use std::fs;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The beginning of the names of the directories of a daemon.
fn prefix(owner: &str) -> String {
    format!("kolo-{owner}-")
}

/// The directory of the warden with this mark, in the directory for temporary files.
pub(crate) fn path(mark: &str) -> PathBuf {
    let name = match mark.split_once('/') {
        Some((owner, rest)) => prefix(owner) + rest,
        None => prefix(mark),
    };
    std::env::temp_dir().join(name)
}

/// Makes a directory that is this user's alone. One that is there is not believed.
pub(crate) fn make(path: &Path) -> io::Result<()> {
    let made = fs::DirBuilder::new().mode(0o700).create(path);
    made.map_err(|error| {
        let text = format!("the directory {} can't be made: {error}", path.display());
        io::Error::new(error.kind(), text)
    })
}

/// The first `most` bytes of a file that a process has left, which is removed. Nothing if there is no such file, or if what
/// is there is no file. Never waits, whatever is there.
pub fn take_file(path: &Path, most: u64) -> Option<Vec<u8>> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let opened = fs::File::options()
        .read(true)
        .custom_flags(flags)
        .open(path);
    let file = opened.ok();
    let is_file = |file: &fs::File| file.metadata().is_ok_and(|found| found.is_file());
    let file = file.filter(is_file)?;
    let mut bytes = Vec::new();
    let read = file.take(most).read_to_end(&mut bytes);
    // The directory goes later in any case.
    fs::remove_file(path).ok();
    read.is_ok().then_some(bytes)
}

/// Removes a directory with all that is in it, if it is there.
pub(crate) fn remove(path: &Path) {
    match fs::remove_dir_all(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => tracing::warn!(path = %path.display(), %error, "a directory is left behind"),
    }
}

/// Removes what the wardens of an earlier daemon of this name have left.
pub(crate) fn sweep(owner: &str) {
    let prefix = prefix(owner);
    let Ok(entries) = fs::read_dir(std::env::temp_dir()) else {
        return;
    };
    let left = entries.filter_map(Result::ok);
    let left = left.filter(|entry| entry.file_name().as_bytes().starts_with(prefix.as_bytes()));
    for entry in left {
        remove(&entry.path());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_file_is_not_read_and_never_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        assert_eq!(take_file(&path, 9), None, "nothing is there");
        fs::write(&path, "0123456789").unwrap();
        assert_eq!(take_file(&path, 9).unwrap(), b"012345678");
        assert!(!path.exists());
        fs::write(dir.path().join("secret"), "secret").unwrap();
        std::os::unix::fs::symlink("secret", &path).unwrap();
        assert_eq!(take_file(&path, 9), None);
        fs::remove_file(&path).unwrap();
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, mode).unwrap();
        assert_eq!(take_file(&path, 9), None, "nobody writes to it");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert_eq!(take_file(&path, 9), None);
    }
}
