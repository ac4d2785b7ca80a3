//! What a process of kolo sees around it: facts for `kolo doctor`, of daemons over the network and of this host alike.

use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use kolo_transport::RandomId as _;
use kolo_transport::wire::{DaemonState, FolderState, FolderUse};
use rustix::fs::{Mode, OFlags, StatVfsMountFlags};
use rustix::io::Errno;
use rustix::process::{Resource, geteuid, getrlimit};

/// Where processes of one host share memory.
pub(crate) const SHARED_MEMORY: &str = "/dev/shm";

/// How long a file system may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Each folder that was looked at, and who looks at it now: one at a time, so that a file system that hangs takes one thread for
/// ever and no more. A process has few folders.
static LOOKS: LazyLock<Mutex<HashMap<PathBuf, Look>>> = LazyLock::new(Mutex::default);

type Look = Arc<tokio::sync::Mutex<()>>;

/// How much is written to see whether something can be: a block of most file systems.
const BLOCK: [u8; 4096] = [0; 4096];

/// The surroundings of this process, which keeps its state in these folders.
pub(crate) async fn look(states: Vec<PathBuf>) -> DaemonState {
    let shared = (FolderUse::SharedMemory, PathBuf::from(SHARED_MEMORY));
    let states = states.into_iter().map(|path| (FolderUse::State, path));
    let folders = states
        .chain([shared])
        .map(|(usage, path)| folder_in_time(usage, path, PATIENCE, folder));
    let folders = join_all(folders).await;
    DaemonState {
        uid: geteuid().as_raw(),
        core_limit: getrlimit(Resource::Core).current,
        core_pattern: std::fs::read_to_string("/proc/sys/kernel/core_pattern")
            .unwrap_or_default()
            .trim()
            .to_owned(),
        folders,
    }
}

/// The addresses of a name as programs of this host find them, the one that they take first; none if nobody knows it in time.
pub(crate) async fn addresses(name: &str) -> Vec<IpAddr> {
    let looking = tokio::net::lookup_host((name, 0));
    match tokio::time::timeout(PATIENCE, looking).await {
        Ok(Ok(found)) => found.map(|address| address.ip()).collect(),
        Ok(Err(_)) | Err(_) => Vec::new(),
    }
}

/// What is wrong with the addresses of a host's own name, and what to do about it: programs that tell other hosts where they are
/// take the first.
pub(crate) fn problem_of_name(name: &str, addresses: &[IpAddr]) -> Option<(String, String)> {
    let (found, own) = match addresses.first() {
        Some(first) if first.is_loopback() => (
            format!("{name} is {first} here, which other hosts can't reach"),
            format!(
                "an address that other hosts reach, in place of {first}, in a line of /etc/hosts"
            ),
        ),
        Some(_) => return None,
        None => (
            format!("{name} has no address here"),
            "an address in a line of /etc/hosts, or in the name service".to_owned(),
        ),
    };
    let to_do = format!(
        "give {name} {own}: Horovod (process sets over hosts) and gloo find their own host by its name"
    );
    Some((found, to_do))
}

/// What `look` ([`folder`]) says in time. A file system of another host may hang for ever.
async fn folder_in_time(
    usage: FolderUse,
    path: PathBuf,
    patience: Duration,
    look: impl FnOnce(FolderUse, &Path) -> FolderState + Send + 'static,
) -> FolderState {
    let shown = path.display().to_string();
    let looking = async {
        let place = {
            let mut looks = LOOKS.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(looks.entry(path.clone()).or_default())
        };
        let place = place.lock_owned().await;
        tokio::task::spawn_blocking(move || {
            let _place = place;
            look(usage, &path)
        })
        .await
    };
    match tokio::time::timeout(patience, looking).await {
        Ok(Ok(state)) => state,
        Ok(Err(_)) | Err(_) => FolderState {
            usage,
            path: shown,
            free: None,
            total: None,
            problem: Some(Errno::TIMEDOUT.raw_os_error()),
        },
    }
}

/// How a folder is; one that is still to be made, as the one that it will be made in.
pub(crate) fn folder(usage: FolderUse, path: &Path) -> FolderState {
    let there = match usage {
        FolderUse::SharedMemory => path,
        _ => path
            .ancestors()
            .find(|path| path.try_exists().unwrap_or(true) && !path.as_os_str().is_empty())
            .unwrap_or(path),
    };
    let stat = rustix::fs::statvfs(there);
    let bytes = |blocks: u64, size: u64| blocks.saturating_mul(size);
    let read_only = stat
        .as_ref()
        .is_ok_and(|stat| stat.f_flag.contains(StatVfsMountFlags::RDONLY));
    let problem = if read_only {
        Some(Errno::ROFS)
    } else {
        try_to_write(there).err()
    };
    FolderState {
        usage,
        path: there.display().to_string(),
        free: stat
            .as_ref()
            .ok()
            .map(|stat| bytes(stat.f_bavail, stat.f_frsize)),
        total: stat
            .as_ref()
            .ok()
            .map(|stat| bytes(stat.f_blocks, stat.f_frsize)),
        problem: problem.map(Errno::raw_os_error),
    }
}

/// Writes a block into a file without a name, so that nothing is left of it whatever happens; or, where the file system knows no such
/// files, into one that is removed at once.
fn try_to_write(dir: &Path) -> Result<(), Errno> {
    let (flags, mode) = (OFlags::WRONLY | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR);
    match rustix::fs::open(dir, flags | OFlags::TMPFILE, mode) {
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {}
        Err(error) => return Err(error),
        Ok(file) => return write_block(&file),
    }
    let name = format!(".kolo-{:016x}", kolo_transport::ids::JobId::random().0);
    let path = dir.join(name);
    let file = rustix::fs::open(&path, flags | OFlags::CREATE | OFlags::EXCL, mode)?;
    let written = write_block(&file);
    rustix::fs::unlink(&path)?;
    written
}

fn write_block(file: impl AsFd) -> Result<(), Errno> {
    match rustix::io::write(file, &BLOCK)? {
        written if written < BLOCK.len() => Err(Errno::NOSPC),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_can_be_written_to_has_no_problem_and_nothing_is_left_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let state = folder(FolderUse::State, dir.path());
        assert_eq!(state.problem, None);
        assert!(state.total.unwrap() > 0 && state.free.unwrap() > 0);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let later = dir.path().join("is/made/later");
        let state = folder(FolderUse::State, &later);
        assert_eq!(state.path, dir.path().display().to_string());
    }

    #[tokio::test]
    async fn a_folder_that_hangs_is_not_looked_at_again_and_holds_up_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let (hangs, answers) = (dir.path().join("hangs"), dir.path().to_owned());
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let short = Duration::from_millis(10);
        let late = Some(Errno::TIMEDOUT.raw_os_error());
        let look = move |usage, path: &Path| {
            ended.recv().unwrap_err();
            folder(usage, path)
        };
        let first = folder_in_time(FolderUse::State, hangs.clone(), short, look).await;
        assert_eq!(first.problem, late);
        for _ in 0..8 {
            // This would not hang.
            let again = folder_in_time(FolderUse::State, hangs.clone(), short, folder).await;
            assert_eq!(
                (again.problem, again.path),
                (late, hangs.display().to_string())
            );
        }
        let patience = Duration::from_secs(60);
        let other = folder_in_time(FolderUse::State, answers, patience, folder).await;
        assert_eq!(other.problem, None);
        // When the file system answers again, it is looked at again.
        drop(end);
        let again = folder_in_time(FolderUse::State, hangs, patience, folder).await;
        assert_eq!(again.problem, None);
    }

    #[test]
    fn what_can_not_be_written_to_is_told_in_the_system_s_words() {
        let proc = folder(FolderUse::State, Path::new("/proc"));
        assert!(proc.problem.is_some(), "{proc:?}");
        let missing = folder(FolderUse::SharedMemory, Path::new("/no/such/folder"));
        assert_eq!(missing.problem, Some(Errno::NOENT.raw_os_error()));
    }

    #[test]
    fn a_name_that_other_hosts_can_not_use_is_a_problem() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        for (addresses, part) in [
            (&["127.0.1.1"][..], "a is 127.0.1.1 here, "),
            (&["::1", "10.0.0.1"], "a is ::1 here, "),
            (&[], "a has no address here"),
        ] {
            let addresses: Vec<IpAddr> = addresses.iter().map(|text| ip(text)).collect();
            let (found, to_do) = problem_of_name("a", &addresses).unwrap();
            assert!(found.starts_with(part), "{found}");
            assert!(to_do.starts_with("give a an address"), "{to_do}");
        }
        assert_eq!(
            problem_of_name("a", &[ip("10.0.0.1"), ip("127.0.0.1")]),
            None
        );
    }

    #[tokio::test]
    async fn a_name_has_the_addresses_that_programs_find() {
        let found = addresses("localhost").await;
        assert!(
            !found.is_empty() && found.iter().all(IpAddr::is_loopback),
            "{found:?}"
        );
        assert_eq!(
            addresses("no such host.invalid").await,
            Vec::<IpAddr>::new()
        );
    }
}
