//! The program that workers run: this one.

use std::fs::File;
use std::io::Read as _;
use std::path::PathBuf;
use std::sync::OnceLock;

use bytes::Bytes;
use kolo_transport::wire::{Program, ProgramHash};

use crate::error::StartError;

/// Always the file that this process runs, also after the path has been given to a newer build.
const SELF: &str = "/proc/self/exe";

/// This process's own executable.
#[derive(Debug, Clone)]
pub(crate) struct OwnProgram {
    pub(crate) program: Program,
    /// Where it was when the process started.
    #[cfg(feature = "local")]
    path: PathBuf,
}

#[cfg(feature = "local")]
impl OwnProgram {
    /// A file with this program, for processes of this host, as long as this process lives.
    pub(crate) fn file(&self) -> PathBuf {
        use std::os::unix::fs::MetadataExt as _;
        let id = |path: &std::path::Path| {
            std::fs::metadata(path)
                .map(|meta| (meta.dev(), meta.ino()))
                .ok()
        };
        if id(&self.path).is_some_and(|own| Some(own) == id(SELF.as_ref())) {
            self.path.clone()
        } else {
            // The path belongs to another build now, or to nothing.
            format!("/proc/{}/exe", std::process::id()).into()
        }
    }
}

/// Reads and hashes the executable, once in the life of the process. Blocks for about a millisecond per megabyte.
pub(crate) fn own() -> Result<&'static OwnProgram, StartError> {
    static OWN: OnceLock<Result<OwnProgram, (PathBuf, String)>> = OnceLock::new();
    OWN.get_or_init(read)
        .as_ref()
        .map_err(|(path, reason)| StartError::Program {
            path: path.clone(),
            reason: reason.clone(),
        })
}

fn read() -> Result<OwnProgram, (PathBuf, String)> {
    let path = std::env::current_exe().unwrap_or_else(|_| PathBuf::from(SELF));
    let hash = || -> std::io::Result<(blake3::Hash, u64)> {
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(File::open(SELF)?)?;
        Ok((hasher.finalize(), hasher.count()))
    };
    let (hash, size) = hash().map_err(|error| (path.clone(), error.to_string()))?;
    let name = path
        .file_name()
        .map_or_else(|| "program".into(), |name| name.to_string_lossy());
    // What the kernel adds to the path of a file that was deleted.
    let name = name.trim_end_matches(" (deleted)").to_owned();
    let program = Program {
        hash: ProgramHash(*hash.as_bytes()),
        size,
        name,
    };
    Ok(OwnProgram {
        program,
        #[cfg(feature = "local")]
        path,
    })
}

/// The executable in pieces.
pub(crate) struct Pieces {
    file: File,
    size: usize,
}

impl Pieces {
    pub(crate) fn open(size: usize) -> std::io::Result<Self> {
        Ok(Self {
            file: File::open(SELF)?,
            size,
        })
    }

    /// The next piece; empty at the end. Blocks.
    pub(crate) fn next(&mut self) -> std::io::Result<Bytes> {
        let mut piece = Vec::with_capacity(self.size);
        (&mut self.file)
            .take(self.size as u64)
            .read_to_end(&mut piece)?;
        Ok(piece.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pieces_have_the_hash_of_the_program() {
        let own = own().unwrap();
        let mut pieces = Pieces::open(1 << 20).unwrap();
        let mut hasher = blake3::Hasher::new();
        loop {
            let piece = pieces.next().unwrap();
            if piece.is_empty() {
                break;
            }
            assert!(piece.len() <= 1 << 20);
            hasher.update(&piece);
        }
        assert_eq!(hasher.finalize().as_bytes(), &own.program.hash.0);
        assert_eq!(hasher.count(), own.program.size);
        let path = std::env::current_exe().unwrap();
        assert_eq!(
            path.file_name().unwrap().to_str(),
            Some(own.program.name.as_str())
        );
        assert!(std::ptr::eq(own, super::own().unwrap()));
    }
}
