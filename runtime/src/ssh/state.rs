//! What is kept in files: on a host, that a node runs there; on the launcher's machine, what was detached.

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kolo_transport::ids::NodeId;
use kolo_transport::interfaces::machine;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::hosts::{HostSlots, Machine, parse_hosts};
use crate::private_file;

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
    private_file::make_dir(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// The folder of a node on its host, by cluster and by the name of the host: a home folder may be shared by many hosts.
#[derive(Debug)]
pub(super) struct HostDir(PathBuf);

/// The folder is no secret, and its name must not lead elsewhere.
fn is_folder_name(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 255
        && !text.starts_with('.')
        && Path::new(text).components().count() == 1
        && !text.contains(['/', '\0'])
}

/// The lock of a folder: held for as long as a node runs.
pub(super) enum Locked {
    Ours(File),
    /// By another process, with its id.
    Theirs(u32),
}

impl HostDir {
    pub(super) fn of(cluster: &str, hostname: &str) -> Result<Self, String> {
        let hostname = &Machine::new(hostname, "").to_string();
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
        let mut file = private_file::open_lock(&path).map_err(failed)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            // Whoever had it before has removed the folder meanwhile: nobody would find this lock.
            Ok(()) if !is_at(&file, &path) => self.lock(),
            Ok(()) => {
                file.set_len(0)
                    .and_then(|()| file.rewind())
                    .and_then(|()| writeln!(file, "{} {}", std::process::id(), machine()))
                    .map_err(failed)?;
                Ok(Locked::Ours(file))
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut text = String::new();
                file.read_to_string(&mut text).map_err(failed)?;
                Ok(Locked::Theirs(holder(&text).map_or(0, |(pid, _)| pid)))
            }
            Err(error) => Err(failed(error.into())),
        }
    }

    /// The folder of another node of the cluster that runs on this machine, under another name, and its process. Of the same
    /// user, that is.
    pub(super) fn other(&self) -> Option<(Self, u32)> {
        // Whoever names an address such as `127.0.0.2` wants another host.
        let is_by_wish = |dir: &Self| Machine::new(&dir.name(), "").is_host_by_wish();
        let own = machine();
        if own.is_empty() || is_by_wish(self) {
            return None;
        }
        let held = fs::read_to_string("/proc/locks").unwrap_or_default();
        fs::read_dir(self.0.parent()?)
            .ok()?
            .filter_map(|entry| Some(Self(entry.ok()?.path())))
            .filter(|other| other.0 != self.0 && !is_by_wish(other))
            .find_map(|other| {
                let lock = other.0.join("lock");
                let text = fs::read_to_string(&lock).ok()?;
                let (pid, machine) = holder(&text)?;
                let inode = fs::metadata(&lock).ok()?.ino();
                // A file of a node that has ended may be there as well.
                (machine == own && is_held(&held, pid, inode)).then_some((other, pid))
            })
    }

    /// What the node is called.
    pub(super) fn name(&self) -> String {
        self.0
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
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

/// The process and the machine of whoever has written a lock. Earlier versions, and hosts that do not know their machine, name
/// none.
fn holder(text: &str) -> Option<(u32, &str)> {
    let mut words = text.split_whitespace();
    let pid = words.next()?.parse().ok()?;
    Some((pid, words.next().unwrap_or_default()))
}

/// Whether a process holds a lock on a file, of those in `/proc/locks`.
fn is_held(locks: &str, pid: u32, inode: u64) -> bool {
    let (pid, inode) = (pid.to_string(), inode.to_string());
    locks.lines().any(|line| {
        // `1: FLOCK  ADVISORY  WRITE 708 00:13:19 0 EOF`
        let mut words = line.split_whitespace().skip(4);
        words.next() == Some(&pid)
            && words
                .next()
                .and_then(|file| file.rsplit(':').next())
                .is_some_and(|file| file == inode)
    })
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
    /// The hosts, as given: `user@host:slots`. Those included on which a launch was about to start a node when it was killed.
    pub hosts: Vec<String>,
    /// What is known of their nodes; nothing of one whose launch was killed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<RecordedNode>,
    /// How they are reached.
    pub ssh: SshRecord,
}

/// A detached node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedNode {
    /// The host as ssh knows it, without user and slots.
    pub host: String,
    /// Its id in the cluster.
    pub node: NodeId,
    /// Its process there.
    pub pid: u32,
    /// Its folder there.
    pub state: String,
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

impl RecordedNode {
    /// Whether it is the one of a host.
    #[must_use]
    pub fn is_of(&self, host: &HostSlots) -> bool {
        host.is_called(&self.host)
    }
}

impl Launch {
    fn dir() -> Result<PathBuf, String> {
        Ok(state_home()?.join("launches"))
    }

    fn path(cluster: &str) -> Result<PathBuf, String> {
        Ok(Self::dir()?.join(format!("{cluster}.json")))
    }

    /// Changes what is on record for a cluster: `change` is given what is there, and gives what is to be there, which is
    /// nothing if it has no hosts and no head. Other launches wait meanwhile, so that none writes over another's hosts. Returns
    /// what is on record now.
    ///
    /// # Errors
    ///
    /// In words, with the file.
    pub fn change(
        cluster: &str,
        change: impl FnOnce(Option<Self>) -> Option<Self>,
    ) -> Result<Option<Self>, String> {
        let dir = Self::dir()?;
        make_dir(&dir)?;
        let lock = dir.join("lock");
        let failed =
            |path: &Path, error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        // It is held for as long as a small file takes to be written, and ends with its holder.
        let _lock = private_file::open_lock(&lock)
            .and_then(|file| {
                flock(&file, FlockOperation::LockExclusive)?;
                Ok(file)
            })
            .map_err(|error| failed(&lock, &error))?;
        let path = Self::path(cluster)?;
        let before = match fs::read(&path) {
            Ok(text) => Some(serde_json::from_slice(&text).map_err(|error| failed(&path, &error))?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(&path, &error)),
        };
        let after = change(before)
            .filter(|launch: &Self| !launch.hosts.is_empty() || launch.head_pid.is_some());
        if let Some(launch) = &after {
            let text = serde_json::to_vec_pretty(launch).map_err(|error| error.to_string())?;
            private_file::replace(&path, &text).map_err(|error| failed(&path, &error))?;
        } else if let Err(error) = fs::remove_file(&path)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            return Err(failed(&path, &error));
        }
        Ok(after)
    }

    /// The hosts.
    ///
    /// # Errors
    ///
    /// In words, if the record is damaged.
    pub fn slots(&self) -> Result<Vec<HostSlots>, String> {
        if self.hosts.is_empty() {
            return Ok(Vec::new());
        }
        parse_hosts(&self.hosts.join(","))
            .map_err(|error| format!("the record of the launch is not readable: {error}"))
    }

    /// Puts hosts on record; one that is there already, with whatever slots, as it is given now.
    pub fn add(&mut self, hosts: &[HostSlots]) {
        self.remove(hosts);
        self.hosts.extend(hosts.iter().map(ToString::to_string));
    }

    /// Strikes hosts off the record, with their nodes.
    pub fn remove(&mut self, hosts: &[HostSlots]) {
        self.hosts.retain(|known| {
            let known = parse_hosts(known).ok().and_then(|mut known| known.pop());
            !known.is_some_and(|known| hosts.iter().any(|host| host.is_same_host(&known)))
        });
        self.nodes
            .retain(|node| !hosts.iter().any(|host| node.is_of(host)));
    }

    /// Whether a host is on record.
    #[must_use]
    pub fn has(&self, host: &HostSlots) -> bool {
        self.slots()
            .is_ok_and(|known| known.iter().any(|known| known.is_same_host(host)))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(hosts: &str) -> Launch {
        Launch {
            cluster: "cluster-0000000000000001".to_owned(),
            head: "h:1".to_owned(),
            credentials: "/c".into(),
            head_pid: None,
            head_state: None,
            hosts: hosts.split(',').map(str::to_owned).collect(),
            nodes: Vec::new(),
            ssh: SshRecord::default(),
        }
    }

    fn hosts(text: &str) -> Vec<HostSlots> {
        parse_hosts(text).unwrap()
    }

    #[test]
    fn a_host_that_is_launched_anew_is_on_record_once() {
        let mut launch = launch("A:4,me@b:1,[fd00:0::2]:4,c:1");
        launch.nodes.push(RecordedNode {
            host: "c".to_owned(),
            node: NodeId(7),
            pid: 1,
            state: "/s".to_owned(),
        });
        launch.add(&hosts("a:2,[fd00::2]:1"));
        assert_eq!(launch.hosts, ["me@b:1", "c:1", "a:2", "[fd00::2]:1"]);
        assert_eq!(launch.slots().unwrap().len(), 4);
        assert_eq!(launch.nodes.len(), 1);
        assert!(launch.has(&hosts("c:9,b:1")[1]) && !launch.has(&hosts("d:1")[0]));
        launch.remove(&hosts("c:9,x:1"));
        assert_eq!(launch.hosts.len(), 3);
        assert!(launch.nodes.is_empty());
    }

    #[test]
    fn a_node_under_another_name_is_found_while_it_runs() {
        let dir = tempfile::tempdir().unwrap();
        let host = |name: &str| HostDir(dir.path().join(name));
        assert!(host("a").other().is_none());
        let Locked::Ours(lock) = host("a").lock().unwrap() else {
            panic!("nobody else is there");
        };
        assert!(host("a").other().is_none(), "it is itself");
        assert!(host("127.0.0.2").other().is_none(), "another by wish");
        let (other, pid) = host("a.example").other().unwrap();
        assert_eq!((other.name(), pid), ("a".to_owned(), std::process::id()));
        // Of another machine that shares the folder.
        let path = host("a").path().join("lock");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, format!("{} else", std::process::id())).unwrap();
        assert!(host("a.example").other().is_none());
        fs::write(&path, text).unwrap();
        drop(lock);
        assert!(host("a.example").other().is_none(), "it has ended");
    }

    #[test]
    fn holders_of_locks_are_known() {
        assert_eq!(holder("12 ab\n"), Some((12, "ab")));
        assert_eq!(holder("12 \n"), Some((12, "")));
        assert_eq!(holder("12\n"), Some((12, "")));
        for text in ["", "\n", "x ab"] {
            assert_eq!(holder(text), None, "{text:?}");
        }
        let locks = "1: POSIX  ADVISORY  READ 5 fd:01:19 128 128\n2: FLOCK  ADVISORY  WRITE 708 00:13:191 0 EOF\n";
        assert!(is_held(locks, 708, 191) && is_held(locks, 5, 19));
        assert!(!is_held(locks, 708, 19) && !is_held(locks, 70, 191) && !is_held("", 1, 1));
    }

    #[test]
    fn a_record_of_an_earlier_version_is_read() {
        let text = r#"{"cluster":"c","head":"h:1","credentials":"/c","hosts":["me@[fd00::2]:2"],"ssh":{}}"#;
        let launch: Launch = serde_json::from_str(text).unwrap();
        assert_eq!(launch.slots().unwrap()[0].to_string(), "me@[fd00::2]:2");
        assert!(launch.nodes.is_empty());
        assert!(!serde_json::to_string(&launch).unwrap().contains("nodes"));
    }
}
