//! Private files: only the owner reads them, and a crash leaves the old or the new one.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

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
        Some(parent) if !parent.as_os_str().is_empty() => sync_dir(parent),
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

pub(crate) fn sync_dir(dir: &Path) -> Result<(), IdentityError> {
    File::open(dir)
        .and_then(|dir| dir.sync_all())
        .map_err(failed(dir))
}

/// A file under a passing name, removed unless it is moved to its own.
pub(crate) struct Staged {
    temporary: PathBuf,
    path: PathBuf,
}

/// Writes `content` beside `path`, mode 0600, down to the disk.
pub(crate) fn stage(path: &Path, content: &[u8]) -> Result<Staged, IdentityError> {
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
        })
        .map_err(failed(path))?;
    Ok(staged)
}

impl Staged {
    /// Puts the file in its place, over one that is there.
    pub(crate) fn replace(self) -> Result<(), IdentityError> {
        fs::rename(&self.temporary, &self.path).map_err(failed(&self.path))
    }

    /// Puts the file in its place unless one is there. Whether it did.
    pub(crate) fn create(self) -> Result<bool, IdentityError> {
        match fs::hard_link(&self.temporary, &self.path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(failed(&self.path)(error)),
        }
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // After `replace` there is none, and nothing else can be done about one that stays.
        drop(fs::remove_file(&self.temporary));
    }
}

/// One block of PEM.
pub(crate) fn pem(label: &str, der: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = format!("-----BEGIN {label}-----\n");
    for line in der.chunks(48) {
        for group in line.chunks(3) {
            let bytes = [
                group[0],
                group.get(1).copied().unwrap_or(0),
                group.get(2).copied().unwrap_or(0),
            ];
            let word = u32::from_be_bytes([0, bytes[0], bytes[1], bytes[2]]);
            for position in 0..4 {
                if position <= group.len() {
                    let index = (word >> (18 - 6 * position)) & 63;
                    out.push(char::from(ALPHABET[index as usize]));
                } else {
                    out.push('=');
                }
            }
        }
        out.push('\n');
    }
    out + "-----END " + label + "-----\n"
}

#[cfg(test)]
mod tests {
    use rustls_pki_types::CertificateDer;
    use rustls_pki_types::pem::PemObject;

    use super::*;

    #[test]
    fn pem_reads_back() {
        for length in 0..200_u8 {
            let der: Vec<u8> = (0..length).map(|i| i.wrapping_mul(37)).collect();
            let text = pem("CERTIFICATE", &der);
            let back = CertificateDer::from_pem_slice(text.as_bytes()).unwrap();
            assert_eq!(&back[..], &der[..], "{text}");
            assert!(text.lines().all(|line| line.len() <= 64));
        }
    }

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
        stage(&path, b"three").unwrap().replace().unwrap();
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
