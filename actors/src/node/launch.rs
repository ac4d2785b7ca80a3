//! The program and the environment that workers are started from.

use std::any::Any;
use std::path::PathBuf;
use std::sync::Arc;

/// A program that is here and was verified.
pub struct ProgramFile {
    /// Where it can be executed from.
    pub path: PathBuf,
    /// Device and inode of the file, which a worker must run.
    pub id: (u64, u64),
    /// Dropped when nobody needs the file any more.
    pub hold: Box<dyn Any + Send + Sync>,
}

impl std::fmt::Debug for ProgramFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProgramFile")
            .field("path", &self.path)
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

/// A program that is installed on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstalledFile {
    /// Where it is.
    pub path: PathBuf,
    /// Where its workers start; the daemon's directory if `None`.
    pub cwd: Option<PathBuf>,
    /// Whether rank 0 has the driver's input.
    pub stdin: bool,
}

/// The program and the environment that a job's workers are started from.
#[derive(Debug, Clone)]
pub enum Launch {
    /// A program that was sent here.
    Sent(Arc<ProgramFile>),
    /// A program that is installed here.
    Installed(InstalledFile),
}
