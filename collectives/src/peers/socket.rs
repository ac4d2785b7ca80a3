//! The sockets of the ranks of one host: a file for each, which a killed one leaves and its successor replaces.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kolo_transport::ids::Rank;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::{UnixListener, UnixStream};

use super::{PeersError, STEP};
use crate::communicator::Acceptor;
use crate::lane::{Lane, LaneError, LinkHello, Links, UnixLane, excuse, greet, greet_any};

/// Between two attempts to reach a peer, or to take a place.
const PAUSE: Duration = Duration::from_millis(10);

/// How long others may be at the folder.
const OTHERS: Duration = Duration::from_secs(1);

/// When the process has no more descriptors, and none to spare.
const NO_DESCRIPTORS: Duration = Duration::from_millis(100);

/// How long it may take to tell a peer so.
const EXCUSE: Duration = Duration::from_secs(1);

/// Links that wait for this rank to take them.
const BACKLOG: i32 = 1024;

/// The file of a socket that this process listens on. It goes with this.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// Device and inode: what is there later may be another one's.
    id: Option<(u64, u64)>,
    /// Somebody listens as long as there is the file. So no successor takes it for dead, and its inode is not used again.
    _listens: OwnedFd,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.id.is_some()
            && id_of(&self.path) == self.id
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::debug!(path = %self.path.display(), %error, "a socket stays behind");
        }
    }
}

fn id_of(path: &Path) -> Option<(u64, u64)> {
    let found = fs::symlink_metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

/// Listens at a path, where only this user can connect. A socket that nobody listens on any more is replaced; one that somebody
/// does is waited for.
pub(super) fn listen(
    path: &Path,
    rank: Rank,
    wait: Duration,
) -> Result<(StdUnixListener, SocketFile), PeersError> {
    let failed = |error| PeersError::Socket {
        path: path.to_owned(),
        rank,
        error,
    };
    let address = SocketAddrUnix::new(path).map_err(|_| {
        let reason = format!(
            "a path of {} bytes is too long for a socket, which takes 107: use a folder with a shorter name",
            path.as_os_str().len()
        );
        failed(io::Error::new(ErrorKind::InvalidInput, reason))
    })?;
    let folder = match path.parent() {
        Some(folder) if folder.as_os_str().is_empty() => Path::new("."),
        Some(folder) => folder,
        None => Path::new("/"),
    };
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .map_err(|error| {
            let reason = format!(
                "its folder {} can't be made, or is none: {error}",
                folder.display()
            );
            failed(io::Error::new(error.kind(), reason))
        })?;
    let begun = Instant::now();
    let mut has_said = false;
    loop {
        if let Some(listener) = try_listen(folder, path, &address).map_err(failed)? {
            let file = SocketFile {
                path: path.to_owned(),
                id: id_of(path),
                _listens: listener.try_clone().map_err(failed)?,
            };
            return Ok((listener.into(), file));
        }
        if begun.elapsed() >= wait {
            return Err(PeersError::InUse {
                path: path.to_owned(),
                rank,
                waited: wait,
            });
        }
        if begun.elapsed() > OTHERS && !std::mem::replace(&mut has_said, true) {
            tracing::warn!(
                path = %path.display(),
                %rank,
                ?wait,
                "another process listens in this rank's place: it is waited for until it ends, or another folder is wanted"
            );
        }
        std::thread::sleep(PAUSE);
    }
}

/// `None` if somebody else listens there, or is just about to.
fn try_listen(folder: &Path, path: &Path, address: &SocketAddrUnix) -> io::Result<Option<OwnedFd>> {
    // What looks dead may be a socket that is just being made: one at a time.
    let alone = rustix::fs::open(folder, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    // A file system without locks does without. Others are done in a moment, however short this rank is to wait.
    let begun = Instant::now();
    while rustix::fs::flock(&alone, FlockOperation::NonBlockingLockExclusive)
        == Err(Errno::WOULDBLOCK)
    {
        if begun.elapsed() > OTHERS {
            return Ok(None);
        }
        std::thread::sleep(PAUSE);
    }
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(io::Error::new(
                ErrorKind::AlreadyExists,
                "there is something that is no socket; remove it, or use another folder",
            ));
        }
        Ok(_) => match rustix::net::connect(socket()?, address) {
            Err(Errno::CONNREFUSED) => fs::remove_file(path)?,
            Err(Errno::NOENT) => {}
            // Somebody has a long queue, if it says that it would block.
            Ok(()) | Err(Errno::AGAIN) => return Ok(None),
            Err(error) => return Err(error.into()),
        },
    }
    let socket = socket()?;
    // What the file gets when it is bound.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(Some(socket))
}

fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        flags,
        None,
    )?)
}

/// Descriptors that are given up when the process has no more, so that peers can be told: they wait for a link, and who has none
/// can say nothing to them. One is enough at a time; another thread may be faster to use its place.
#[derive(Debug, Default)]
pub(super) struct Spares(Mutex<Vec<OwnedFd>>);

impl Spares {
    const COUNT: usize = 3;

    fn lock(&self) -> MutexGuard<'_, Vec<OwnedFd>> {
        // Nothing that runs under the lock panics.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has them all again, if the system gives them. Returns whether it does: then there is no want of descriptors.
    pub(super) fn fill(&self) -> bool {
        let mut held = self.lock();
        while held.len() < Self::COUNT {
            match eventfd(0, EventfdFlags::CLOEXEC) {
                Ok(spare) => held.push(spare),
                Err(_) => return false,
            }
        }
        true
    }

    /// Makes room for one more.
    fn give_one_up(&self) {
        drop(self.lock().pop());
    }
}

/// Whether the process, or the system, has no descriptor left.
fn has_no_descriptor(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::MFILE | Errno::NFILE))
}

/// Takes the links that other ranks make, until it is dropped.
pub(super) async fn serve(
    listener: UnixListener,
    own: LinkHello,
    acceptor: Acceptor,
    spares: Arc<Spares>,
) {
    let mut links = Links::new();
    let mut is_news = true;
    loop {
        let (stream, shortage) = match take(&listener, &spares).await {
            Ok(taken) => taken,
            Err(error) => {
                if std::mem::take(&mut is_news) {
                    tracing::warn!(%error, "links from ranks of this host are not accepted for now");
                }
                tokio::time::sleep(NO_DESCRIPTORS).await;
                continue;
            }
        };
        is_news = true;
        let (acceptor, spares) = (acceptor.clone(), Arc::clone(&spares));
        let link = async move {
            let accepted = match shortage {
                None => accept(stream, &own, &acceptor).await,
                Some(what) => refuse(stream, &own, &acceptor, what).await,
            };
            // A refused one has given its descriptor back.
            spares.fill();
            match accepted {
                Ok(()) => {}
                // A process that wants this rank's place looks whether somebody is there.
                Err(error @ LaneError::Ended { .. }) => {
                    tracing::debug!(%error, "a link from a rank of this host was not accepted");
                }
                Err(error) => {
                    tracing::warn!(%error, "a link from a rank of this host was not accepted");
                }
            }
        };
        links.begin(link).await;
    }
}

/// The next link, and what there is no descriptor for, if it is good only to say that.
async fn take(
    listener: &UnixListener,
    spares: &Spares,
) -> io::Result<(UnixStream, Option<String>)> {
    let error = match listener.accept().await {
        Ok((stream, _)) => return Ok((stream, None)),
        Err(error) if has_no_descriptor(&error) => error,
        Err(error) => return Err(error),
    };
    spares.give_one_up();
    // The peer may have gone meanwhile.
    let accepted = tokio::time::timeout(NO_DESCRIPTORS, listener.accept()).await;
    let is_over = spares.fill();
    match accepted {
        Ok(Ok((stream, _))) if is_over => Ok((stream, None)),
        Ok(Ok((stream, _))) => Ok((stream, Some(format!("links from other ranks ({error})")))),
        _ => Err(error),
    }
}

async fn accept(stream: UnixStream, own: &LinkHello, acceptor: &Acceptor) -> Result<(), LaneError> {
    let mut lane = lane(stream)?;
    let (who, greeted) = greet_any(&mut lane, own, STEP).await;
    if let (Some(peer), Err(error @ LaneError::NoDescriptors { .. })) = (who, &greeted) {
        acceptor.refused(peer.group, peer.rank, error.clone())?;
    }
    let peer = greeted?;
    acceptor.accept_group(peer.group, peer.rank, Box::new(lane))
}

/// Tells who wants a link that there is no descriptor for it.
async fn refuse(
    stream: UnixStream,
    own: &LinkHello,
    acceptor: &Acceptor,
    what: String,
) -> Result<(), LaneError> {
    let mut lane = lane(stream)?;
    let (who, error) = excuse(&mut lane, own, None, what, EXCUSE).await;
    match who {
        Some(peer) => acceptor.refused(peer.group, peer.rank, error),
        None => Err(error),
    }
}

/// Why a rank that has listened there is gone, if it is.
pub(super) async fn why_gone(path: &Path) -> Option<String> {
    let error = UnixStream::connect(path).await.err()?;
    let gone = [ErrorKind::NotFound, ErrorKind::ConnectionRefused].contains(&error.kind());
    gone.then(|| {
        let path = path.display();
        format!("nobody listens at {path} any more: its communicator or its process is gone")
    })
}

/// A lane over a socket whose other end is this user's.
fn lane(stream: UnixStream) -> Result<UnixLane, LaneError> {
    let unreachable = |error: io::Error| LaneError::Unreachable {
        reason: format!("the socket can't be used: {error}"),
    };
    let (theirs, own) = (
        stream.peer_cred().map_err(unreachable)?.uid(),
        rustix::process::geteuid().as_raw(),
    );
    if theirs != own {
        return Err(LaneError::Refused {
            reason: format!(
                "the other end is a process of user {theirs}, and this one of user {own}"
            ),
        });
    }
    UnixLane::from_std(stream.into_std().map_err(unreachable)?).map_err(unreachable)
}

/// Why a link was not made this time, and whether another attempt may do better.
enum Failed {
    NotYet(String),
    /// There is no descriptor for this, and the peer has not heard of it.
    Unheard(String),
    Never(LaneError),
}

impl Failed {
    /// The peer is there.
    fn after_hello(error: LaneError, own: &LinkHello) -> Self {
        match error {
            // It was about to end: another one may come.
            LaneError::Ended { reason } => Self::NotYet(reason),
            error if error.is_behind(own) => Self::NotYet(error.to_string()),
            error => Self::Never(error),
        }
    }
}

/// Makes a link to a rank of this host, which may not be there yet.
pub(super) async fn connect(
    path: &Path,
    own: &LinkHello,
    peer: Rank,
    wait: Duration,
    spares: &Spares,
) -> Result<Box<dyn Lane>, LaneError> {
    let begun = Instant::now();
    loop {
        let is_late = || begun.elapsed() >= wait;
        let why = match attempt(path, own, peer, spares).await {
            Ok(lane) => return Ok(Box::new(lane)),
            Err(Failed::Never(error)) => return Err(error),
            Err(Failed::Unheard(what)) if is_late() => {
                return Err(LaneError::NoDescriptors {
                    rank: own.rank,
                    reason: what,
                });
            }
            Err(Failed::NotYet(why) | Failed::Unheard(why)) => why,
        };
        if is_late() {
            return Err(LaneError::Timeout {
                reason: format!(
                    "rank {peer} has not listened at {} for {} s ({why}); was it started, and with the same folder?",
                    path.display(),
                    wait.as_secs_f64()
                ),
            });
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn attempt(
    path: &Path,
    own: &LinkHello,
    peer: Rank,
    spares: &Spares,
) -> Result<UnixLane, Failed> {
    let mut connected = UnixStream::connect(path).await;
    let mut shortage = None;
    if let Err(error) = &connected
        && has_no_descriptor(error)
    {
        let what = format!("a link to rank {peer} ({error})");
        spares.give_one_up();
        connected = UnixStream::connect(path).await;
        shortage = Some(what).filter(|_| !spares.fill());
    }
    let stream = match (connected, shortage) {
        (Ok(stream), None) => stream,
        (Ok(stream), Some(what)) => {
            let mut lane = lane(stream).map_err(Failed::Never)?;
            let (_, error) = excuse(&mut lane, own, Some(peer), what, EXCUSE).await;
            drop(lane);
            spares.fill();
            return Err(Failed::after_hello(error, own));
        }
        (Err(error), shortage) => {
            return Err(match (error.kind(), shortage) {
                (ErrorKind::PermissionDenied | ErrorKind::InvalidInput, _) => {
                    Failed::Never(LaneError::Unreachable {
                        reason: format!("{}: {error}", path.display()),
                    })
                }
                (_, Some(what)) => Failed::Unheard(what),
                _ => Failed::NotYet(error.to_string()),
            });
        }
    };
    let mut lane = lane(stream).map_err(Failed::Never)?;
    match greet(&mut lane, own, Some(peer), STEP).await {
        Ok(_) => Ok(lane),
        Err(error) => Err(Failed::after_hello(error, own)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    fn mode_of(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    fn folder(name: &str) -> PathBuf {
        let name = format!("kolo-socket-{name}-{}", std::process::id());
        std::env::temp_dir().join(name)
    }

    #[test]
    fn a_socket_is_this_users_and_goes_with_its_owner() {
        let folder = folder("mode");
        let path = folder.join("0");
        let (_listener, file) = listen(&path, Rank(0), NOW).unwrap();
        assert_eq!((mode_of(&folder), mode_of(&path)), (0o700, 0o600));
        drop(file);
        assert!(!path.exists());
        fs::remove_dir(&folder).unwrap();
    }

    #[test]
    fn what_a_dead_process_left_is_replaced_and_what_a_live_one_has_is_not() {
        let folder = folder("stale");
        let path = folder.join("0");
        let (listener, old) = listen(&path, Rank(0), NOW).unwrap();
        let error = listen(&path, Rank(0), NOW).unwrap_err();
        assert!(matches!(error, PeersError::InUse { .. }), "{error}");
        assert!(error.to_string().contains("rank 0"), "{error}");

        // Who comes late to take its file away leaves that of a successor alone.
        fs::remove_file(&path).unwrap();
        let (_listener, new) = listen(&path, Rank(0), NOW).unwrap();
        drop((listener, old));
        assert!(path.exists());
        drop(new);
        assert!(!path.exists());

        // As a killed process leaves it.
        drop(StdUnixListener::bind(&path).unwrap());
        drop(listen(&path, Rank(0), NOW).unwrap());
        assert!(!path.exists());

        fs::write(&path, "something").unwrap();
        let error = listen(&path, Rank(0), NOW).unwrap_err().to_string();
        assert!(error.contains("no socket"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "something");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn one_that_ends_soon_is_waited_for() {
        let folder = folder("soon");
        let path = folder.join("0");
        let (listener, file) = listen(&path, Rank(0), NOW).unwrap();
        std::thread::scope(|scope| {
            let successor = scope.spawn(|| listen(&path, Rank(0), STEP));
            std::thread::sleep(2 * PAUSE);
            drop((file, listener));
            successor.join().unwrap().unwrap();
        });
        fs::remove_dir(&folder).unwrap();
    }

    #[test]
    fn a_path_that_is_too_long_is_refused_with_its_length() {
        let path = folder("long").join("x".repeat(100));
        let error = listen(&path, Rank(3), NOW).unwrap_err().to_string();
        let length = path.as_os_str().len().to_string();
        assert!(
            error.contains(&length) && error.contains("rank 3"),
            "{error}"
        );
        assert!(!path.parent().unwrap().exists());
    }
}
