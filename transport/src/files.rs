//! Private files: only the owner reads them, and a crash leaves the old or the new one.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::identity::IdentityError;
use crate::random::random_u64;

pub(crate) fn failed(path: &Path) -> impl FnOnce(io::Error) -> IdentityError {
    let path = path.to_owned();
    move |error| IdentityError::File { path, error }
}

/// Makes `dir` and its parents, for the owner alone. One that exists is left as it is.
pub(crate) fn create_dir(dir: &Path) -> Result<(), IdentityError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(failed(dir))
}

pub(crate) fn read(path: &Path) -> Result<Vec<u8>, IdentityError> {
    fs::read(path).map_err(failed(path))
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

/// Makes a folder that has all that `fill` writes from the first moment on. False if there is one, which is left as it is.
pub(crate) fn appear(
    dir: &Path,
    fill: impl FnOnce(&Path) -> Result<(), IdentityError>,
) -> Result<bool, IdentityError> {
    if dir.exists() {
        return Ok(false);
    }
    let parent = match dir.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut name = dir.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{:016x}.tmp", random_u64()));
    let new = parent.join(name);
    create_dir(parent)
        .and_then(|()| create_dir(&new))
        // Nobody knows the passing name.
        .map_err(|error| match error {
            IdentityError::File { error, .. } => failed(dir)(error),
            other => other,
        })?;
    let made = fill(&new).and_then(|()| match fs::rename(&new, dir) {
        Ok(()) => sync_dir(parent).map(|()| true),
        // Somebody else was first.
        Err(_) if dir.exists() => Ok(false),
        Err(error) => Err(failed(dir)(error)),
    });
    if !matches!(made, Ok(true)) {
        // It holds a key.
        drop(fs::remove_dir_all(&new));
    }
    made
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
    fn a_staged_file_appears_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        assert!(stage(&path, b"one").unwrap().create().unwrap());
        assert!(!stage(&path, b"two").unwrap().create().unwrap());
        assert_eq!(read(&path).unwrap(), b"one");
        stage(&path, b"three").unwrap().replace().unwrap();
        assert_eq!(read(&path).unwrap(), b"three");
        drop(stage(&path, b"four").unwrap());
        assert_eq!(read(&path).unwrap(), b"three");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
    }
}
