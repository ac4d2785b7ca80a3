//! What a daemon sees around it, for `kolo doctor`: facts, which the doctor judges.

use serde::{Deserialize, Serialize};

/// What a folder is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FolderUse {
    /// A daemon, or `kolo` itself, keeps there what must outlive it.
    State,
    /// Shared memory of the host's processes: `/dev/shm`.
    SharedMemory,
    /// Something that this version does not know.
    #[serde(other)]
    Other,
}

/// A folder, and how much fits into it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FolderState {
    /// What it is for.
    pub usage: FolderUse,
    /// Where it is.
    pub path: String,
    /// Bytes of its file system that are free; `None` if that is not known.
    #[serde(default)]
    pub free: Option<u64>,
    /// Bytes of its file system in all; `None` if that is not known.
    #[serde(default)]
    pub total: Option<u64>,
    /// Why nothing can be written there, as the operating system numbers it (`errno`); `None` if it can.
    #[serde(default)]
    pub problem: Option<i32>,
}

/// A daemon's surroundings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonState {
    /// The user that it runs as, and its workers with it; 0 is root.
    pub uid: u32,
    /// How long a core dump of it may be, in bytes; `None` if there is no limit.
    #[serde(default)]
    pub core_limit: Option<u64>,
    /// Where core dumps of its host go, as `/proc/sys/kernel/core_pattern` says it; empty if that is not known.
    #[serde(default)]
    pub core_pattern: String,
    /// The folders that it needs.
    #[serde(default)]
    pub folders: Vec<FolderState>,
}
