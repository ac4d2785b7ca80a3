//! What is kept in files: on a host, that a node runs there; on the launcher's machine, what was detached.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::agent::is_folder_name;

/// The folder for what programs of a user keep: `$XDG_STATE_HOME`, or `~/.local/state`.
///
/// # Errors
///
/// In words, if there is no home folder.
pub fn state_home() -> Result<PathBuf, String> {
    let folder = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    folder("XDG_STATE_HOME")
        .or_else(|| folder("HOME").map(|home| home.join(".local").join("state")))
        .map(|dir| dir.join("kolo"))
        .ok_or_else(|| "there is no home folder; set XDG_STATE_HOME or HOME".to_owned())
}

fn make_dir(path: &Path) -> Result<(), String> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(|error| format!("{}: {error}", path.display()))
}

/// The folder of a node on its host, by cluster and by the name of the host: a home folder may be shared by many hosts.
#[derive(Debug)]
pub(super) struct HostDir(PathBuf);

/// The lock of a folder: held for as long as a node runs.
pub(super) enum Locked {
    Ours(File),
    /// By another process, with its id.
    Theirs(u32),
}

impl HostDir {
    pub(super) fn of(cluster: &str, hostname: &str) -> Result<Self, String> {
        for name in [cluster, hostname] {
            if !is_folder_name(name) {
                return Err(format!("`{}` is no name for a folder", name.escape_debug()));
            }
        }
        Ok(Self(
            state_home()?.join("nodes").join(cluster).join(hostname),
        ))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    pub(super) fn log(&self) -> PathBuf {
        self.0.join("log")
    }

    pub(super) fn open_log(&self) -> Result<File, String> {
        make_dir(&self.0)?;
        let path = self.log();
        OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(&path)
            .map_err(|error| format!("{}: {error}", path.display()))
    }

    pub(super) fn lock(&self) -> Result<Locked, String> {
        make_dir(&self.0)?;
        let path = self.0.join("lock");
        let failed = |error: std::io::Error| format!("{}: {error}", path.display());
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .mode(0o600)
            .open(&path)
            .map_err(failed)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            // Whoever had it before has removed the folder meanwhile: nobody would find this lock.
            Ok(()) if !is_at(&file, &path) => self.lock(),
            Ok(()) => {
                file.set_len(0)
                    .and_then(|()| file.rewind())
                    .and_then(|()| writeln!(file, "{}", std::process::id()))
                    .map_err(failed)?;
                Ok(Locked::Ours(file))
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut text = String::new();
                file.read_to_string(&mut text).map_err(failed)?;
                Ok(Locked::Theirs(text.trim().parse().unwrap_or(0)))
            }
            Err(error) => Err(failed(error.into())),
        }
    }

    /// Leaves word for the node how long its jobs may take to end by themselves.
    pub(super) fn ask_to_drain(&self, limit: Duration) -> Result<(), String> {
        let path = self.0.join("drain");
        fs::write(&path, limit.as_millis().to_string())
            .map_err(|error| format!("{}: {error}", path.display()))
    }

    /// What [`ask_to_drain`](Self::ask_to_drain) has left.
    pub(super) fn asked_to_drain(&self) -> Duration {
        fs::read_to_string(self.0.join("drain"))
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .map_or(Duration::ZERO, Duration::from_millis)
    }

    /// Removes the folder, and that of the cluster if it was the last.
    pub(super) fn remove(&self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            tracing::debug!(%error, path = %self.0.display(), "a folder stays");
        }
        if let Some(cluster) = self.0.parent() {
            // Others may be in it.
            fs::remove_dir(cluster).ok();
        }
    }
}

/// Whether the file still is the one of that name.
fn is_at(file: &File, path: &Path) -> bool {
    file.metadata()
        .and_then(|open| Ok((open, fs::metadata(path)?)))
        .is_ok_and(|(open, named)| (open.dev(), open.ino()) == (named.dev(), named.ino()))
}

/// What `kolo up --detach` has left running, for `kolo down`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// The cluster.
    pub cluster: String,
    /// `HOST:PORT` of the head, as commands on this machine reach it.
    pub head: String,
    /// Folder with the credentials of a driver.
    pub credentials: PathBuf,
    /// The head's process, if the launch has started it.
    #[serde(default)]
    pub head_pid: Option<u32>,
    /// The head's state folder, if the launch has started it.
    #[serde(default)]
    pub head_state: Option<PathBuf>,
    /// The hosts, as given: `user@host:slots`.
    pub hosts: Vec<String>,
    /// How they are reached.
    pub ssh: SshRecord,
}

/// What must be known to reach the hosts again.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SshRecord {
    /// See [`SshOptions::port`](super::SshOptions::port).
    #[serde(default)]
    pub port: Option<u16>,
    /// See [`SshOptions::identity_file`](super::SshOptions::identity_file).
    #[serde(default)]
    pub identity_file: Option<PathBuf>,
    /// See [`SshOptions::config_file`](super::SshOptions::config_file).
    #[serde(default)]
    pub config_file: Option<PathBuf>,
    /// See [`SshOptions::remote_program`](super::SshOptions::remote_program).
    #[serde(default)]
    pub remote_program: Option<String>,
    /// See [`SshOptions::node_program`](super::SshOptions::node_program).
    #[serde(default)]
    pub node_program: Option<PathBuf>,
    /// See [`SshOptions::ssh_local`](super::SshOptions::ssh_local).
    #[serde(default)]
    pub ssh_local: bool,
}

impl Launch {
    fn dir() -> Result<PathBuf, String> {
        Ok(state_home()?.join("launches"))
    }

    fn path(cluster: &str) -> Result<PathBuf, String> {
        Ok(Self::dir()?.join(format!("{cluster}.json")))
    }

    /// Writes it, for its owner alone.
    ///
    /// # Errors
    ///
    /// In words, with the file.
    pub fn save(&self) -> Result<(), String> {
        make_dir(&Self::dir()?)?;
        let path = Self::path(&self.cluster)?;
        let text = serde_json::to_vec_pretty(self).map_err(|error| error.to_string())?;
        crate::head::replace_file(&path, &text)
            .map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Forgets it.
    ///
    /// # Errors
    ///
    /// In words, with the file.
    pub fn forget(&self) -> Result<(), String> {
        let path = Self::path(&self.cluster)?;
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(format!("{}: {error}", path.display()))
            }
            _ => Ok(()),
        }
    }

    /// All that are on record, in the order of their clusters' names.
    ///
    /// # Errors
    ///
    /// In words, with the file that can't be read.
    pub fn all() -> Result<Vec<Self>, String> {
        let dir = Self::dir()?;
        let entries = match fs::read_dir(&dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(format!("{}: {error}", dir.display())),
        };
        let mut paths: Vec<PathBuf> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| {
                path.extension()
                    .is_some_and(|extension| extension == "json")
            })
            .collect();
        paths.sort();
        paths
            .iter()
            .map(|path| {
                let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
                let text = fs::read(path).map_err(|error| failed(&error))?;
                serde_json::from_slice(&text).map_err(|error| failed(&error))
            })
            .collect()
    }
}
