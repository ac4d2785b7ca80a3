//! Ranks of one host.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kolo_transport::ids::{Generation, JobId, Rank};
use tokio::runtime::Handle;

use super::connector::{Known, Paths, sit};
use super::driver::Driver;
use super::{PeersError, Settings};
use crate::communicator::Communicator;
use crate::lane::LinkHello;

/// The ranks are processes (or threads) of one host and of one user, each with a socket that the others find. They
/// share memory.
///
/// The sockets can be reached by their user alone, and both ends of a link check who the other one is. A socket that a
/// killed process has left is replaced.
///
/// ```
/// use kolo_collectives::{Rank, peers};
///
/// # let folder = std::env::temp_dir().join(format!("kolo-local-doc-{}", std::process::id()));
/// let comm = peers::Local::in_folder(&folder).join(Rank(0), 1)?;
/// comm.barrier()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
#[must_use = "nothing is done before `join`"]
pub struct Local {
    paths: Paths,
    job: JobId,
    settings: Settings,
}

impl Local {
    /// Sockets are files in this folder, which is made if it is not there (for this user alone), and stays. The same on
    /// all ranks, and of these ranks alone.
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self::new(Paths::Folder(folder.into()))
    }

    /// Sockets have these paths, one for each rank, in rank order.
    pub fn at_sockets<P: Into<PathBuf>>(paths: impl IntoIterator<Item = P>) -> Self {
        Self::new(Paths::Table(paths.into_iter().map(Into::into).collect()))
    }

    fn new(paths: Paths) -> Self {
        Self {
            paths,
            job: JobId(1),
            settings: Settings::default(),
        }
    }

    /// The job; processes of different jobs refuse each other. The same on all ranks. Default: 1.
    pub fn job(mut self, job: JobId) -> Self {
        self.job = job;
        self
    }

    /// The generation; processes of different generations refuse each other (G-1). The same on all ranks; when ranks are
    /// started again after a loss, a higher one for all. Default: 1.
    pub fn generation(mut self, generation: Generation) -> Self {
        self.settings.generation = generation;
        self
    }

    /// How long an operation waits for a peer that does not listen yet, and [`Local::join`] for another process that
    /// listens in this rank's place. An operation also has its [own limit](Communicator::set_timeout). Default: 30 s.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.settings.wait = wait;
        self
    }

    /// A runtime that drives the links, with I/O and time enabled, on threads that no operation blocks. It must go on for as long as the
    /// communicator is used. Default: a thread of the communicator's own.
    pub fn runtime(mut self, handle: Handle) -> Self {
        self.settings.runtime = Some(handle);
        self
    }

    /// Takes a rank's place among so many. Returns at once, whether the others are there or not: links are made at first
    /// use. A barrier waits for all.
    ///
    /// # Errors
    ///
    /// [`PeersError`], of which [`PeersError::InUse`] after [`Local::wait`] if a process listens in this rank's place.
    pub fn join(self, rank: Rank, world_size: u32) -> Result<Communicator, PeersError> {
        let Self {
            paths,
            job,
            settings,
        } = self;
        if let Paths::Table(paths) = &paths
            && paths.len() != world_size as usize
        {
            return Err(PeersError::Invalid {
                reason: format!(
                    "there are {} sockets for {world_size} ranks: give one for each",
                    paths.len()
                ),
            });
        }
        if let Paths::Folder(folder) = &paths
            && folder.as_os_str().is_empty()
        {
            return Err(PeersError::Invalid {
                reason:
                    "the path of the folder is empty: give one, or `.` for the current directory"
                        .to_owned(),
            });
        }
        super::check(rank, world_size as usize)?;
        let driver = Driver::start(settings.runtime.clone())
            .map_err(|error| PeersError::Runtime { rank, error })?;
        let known = Known {
            own: LinkHello::new(job, settings.generation, rank).of_world(world_size),
            world: world_size,
            paths: Some(paths),
            far: None,
            spares: Arc::default(),
        };
        sit(known, &settings, driver)
    }
}
