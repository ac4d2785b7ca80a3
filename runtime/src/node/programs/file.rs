//! Files that hold programs: whether they are what they are said to be, and whether they still are.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kolo_actors::node::ProgramFile;
use kolo_transport::wire::ProgramHash;

/// How much is read at once to verify a file.
const READ_CHUNK: usize = 1 << 20;

/// The mode of a program in the cache: this user's to read and to execute, and nobody's to write.
pub(super) const MODE: u32 = 0o500;

/// A file whose content was seen to have its hash, or is answered for by the caller.
#[derive(Debug, Clone)]
pub(super) struct Verified {
    pub(super) file: Arc<ProgramFile>,
    pub(super) stamp: Stamp,
}

impl Verified {
    pub(super) fn new(file: ProgramFile) -> io::Result<Self> {
        let stamp = Stamp::of(&file.path)?;
        if stamp.id() != file.id {
            return Err(io::Error::other("another file was put in its place"));
        }
        Ok(Self {
            file: Arc::new(file),
            stamp,
        })
    }
}

/// What of a file changes when anybody writes to it, cuts it short or puts another in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    dev: u64,
    ino: u64,
    len: u64,
    /// Seconds and nanoseconds of the last change, which no program can set.
    changed: (i64, i64),
}

impl Stamp {
    pub(super) fn of(path: &Path) -> io::Result<Self> {
        fs::metadata(path).map(|metadata| Self::from(&metadata))
    }

    pub(super) fn id(&self) -> (u64, u64) {
        (self.dev, self.ino)
    }
}

impl From<&fs::Metadata> for Stamp {
    fn from(metadata: &fs::Metadata) -> Self {
        Self {
            dev: metadata.dev(),
            ino: metadata.ino(),
            len: metadata.len(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// `/proc/self` means something else in another process.
pub(super) fn lasting(path: &Path) -> PathBuf {
    match path.strip_prefix("/proc/self") {
        Ok(rest) => Path::new("/proc")
            .join(std::process::id().to_string())
            .join(rest),
        Err(_) => path.to_owned(),
    }
}

pub(super) fn identify(path: &Path) -> io::Result<Verified> {
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no file"));
    }
    let stamp = Stamp::from(&metadata);
    Ok(Verified {
        file: Arc::new(ProgramFile {
            path: path.to_owned(),
            id: stamp.id(),
            hold: Box::new(()),
        }),
        stamp,
    })
}

/// Whether a file will not be good the next time either.
pub(super) fn is_final(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidData, InvalidInput, NotFound};
    matches!(error.kind(), InvalidData | InvalidInput | NotFound)
}

/// Reads the file whole. One that is not `preloaded` gets back the mode that makes it a program.
pub(super) fn verify(path: &Path, hash: ProgramHash, preloaded: bool) -> io::Result<Verified> {
    let mut file = File::open(path)?;
    if !preloaded {
        file.set_permissions(fs::Permissions::from_mode(MODE))?;
    }
    let before = Stamp::from(&file.metadata()?);
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; READ_CHUNK];
    loop {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            break;
        }
        hasher.update(&buffer[..count]);
    }
    let found = ProgramHash(*hasher.finalize().as_bytes());
    if found != hash {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("the hash of {} is {found}", path.display()),
        ));
    }
    let verified = identify(path)?;
    if verified.stamp != before {
        return Err(io::Error::other(format!(
            "{} was changed while it was read",
            path.display()
        )));
    }
    Ok(verified)
}
