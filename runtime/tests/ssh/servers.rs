//! ssh servers on loopback addresses, which for ssh are hosts of their own, or on hosts with networks of their own.

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kolo_harness::netns::Host;
use serde_json::Value;

const SSHD: &str = "/usr/sbin/sshd";

/// How long anything here may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Tells why a test does nothing, if it can't do anything.
fn skipped() -> bool {
    let there = Path::new(SSHD).exists() && Command::new("ssh").arg("-V").output().is_ok();
    if !there {
        eprintln!("skipped: there is no {SSHD} or no ssh; install openssh-server to run this test");
    }
    !there
}

/// One server: its address is `127.0.0.2`, `127.0.0.3`, ..., unless it is on a host of a lab.
struct Server {
    address: String,
    listener: TcpListener,
    port: u16,
    /// What a user of that host keeps there.
    home: PathBuf,
    stop: Arc<AtomicBool>,
    sessions: Arc<Mutex<Vec<Child>>>,
    thread: Option<JoinHandle<()>>,
}

/// A folder with keys, servers, an ssh_config that leads to them, and a home for the one who launches.
pub(crate) struct Servers {
    all: Vec<Server>,
    /// Where the launcher is, if it is not on this machine.
    launcher: Option<Host>,
    dir: tempfile::TempDir,
}

fn keygen(path: &Path) {
    let made = Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-f"])
        .arg(path)
        .status()
        .unwrap();
    assert!(made.success());
}

impl Servers {
    /// So many servers; none if there is no ssh here, which is told.
    pub(crate) fn start(count: u8) -> Option<Self> {
        let places = (0..count).map(|number| (format!("127.0.0.{}", number + 2), None));
        (!skipped()).then(|| Self::at(places.collect(), None))
    }

    /// A server on each of these hosts of a lab, at this address; the launcher is on a host, too.
    pub(crate) fn on_lab(launcher: &Host, hosts: &[(Host, String)]) -> Option<Self> {
        let places = hosts
            .iter()
            .map(|(host, address)| (address.clone(), Some(host.clone())));
        (!skipped()).then(|| Self::at(places.collect(), Some(launcher.clone())))
    }

    fn at(places: Vec<(String, Option<Host>)>, launcher: Option<Host>) -> Self {
        let dir = tempfile::Builder::new()
            .prefix("kolo-test-ssh")
            .tempdir()
            .unwrap();
        if rustix::process::geteuid().is_root() {
            // As the package's service does; sshd does not start without it.
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create("/run/sshd")
                .unwrap();
        }
        keygen(&dir.path().join("id"));
        let mut config = format!(
            "Host *\n  IdentityFile {0}/id\n  IdentitiesOnly yes\n  IdentityAgent none\n  UserKnownHostsFile {0}/known_hosts\n  GlobalKnownHostsFile none\n",
            dir.path().display()
        );
        let mut known = String::new();
        let mut servers = Vec::new();
        for (number, (address, host)) in (2..).zip(places) {
            // An alias, too, which only ssh_config knows, or the name that the host has in its lab.
            let alias = match &host {
                Some(host) => host.name().to_owned(),
                None => format!("alias{number}"),
            };
            let server = Server::start(dir.path(), number, address, host);
            let key = fs::read_to_string(dir.path().join(format!("host{number}.pub"))).unwrap();
            let (address, port) = (&server.address, server.port);
            writeln!(
                config,
                "Host {address} {alias}\n  HostName {address}\n  Port {port}"
            )
            .unwrap();
            let key = key.split_whitespace().take(2).collect::<Vec<_>>().join(" ");
            writeln!(known, "[{address}]:{port} {key}").unwrap();
            servers.push(server);
        }
        fs::write(dir.path().join("config"), config).unwrap();
        fs::write(dir.path().join("known_hosts"), known).unwrap();
        Self {
            all: servers,
            launcher,
            dir,
        }
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// `127.0.0.2:1,127.0.0.3:2,...`: host n has n slots.
    pub(crate) fn hosts(&self) -> String {
        let entries: Vec<String> = (1..)
            .zip(&self.all)
            .map(|(slots, server)| {
                if server.address.contains(':') {
                    format!("[{}]:{slots}", server.address)
                } else {
                    format!("{}:{slots}", server.address)
                }
            })
            .collect();
        entries.join(",")
    }

    pub(crate) fn port(&self, index: usize) -> u16 {
        self.all[index].port
    }

    /// The home of the user on a host.
    pub(crate) fn home(&self, index: usize) -> &Path {
        &self.all[index].home
    }

    /// Files in the cache of programs on a host.
    pub(crate) fn cached(&self, index: usize) -> Vec<PathBuf> {
        let dir = self.home(index).join("cache/kolo/bin");
        fs::read_dir(dir).map_or_else(
            |_| Vec::new(),
            |entries| entries.map(|entry| entry.unwrap().path()).collect(),
        )
    }

    /// Folders of nodes on a host.
    pub(crate) fn node_dirs(&self, index: usize) -> usize {
        let clusters = self.home(index).join("state/kolo/nodes");
        fs::read_dir(clusters).map_or(0, |clusters| {
            clusters
                .map(|cluster| fs::read_dir(cluster.unwrap().path()).map_or(0, Iterator::count))
                .sum()
        })
    }

    /// Leads ssh to a place where nobody listens in place of a host.
    pub(crate) fn lose(&self, index: usize) {
        let address = &self.all[index].address;
        let config = self.dir.path().join("config");
        let text = fs::read_to_string(&config).unwrap();
        let lost = text.replace(&format!("HostName {address}\n"), "HostName 127.0.0.99\n");
        assert_ne!(text, lost);
        fs::write(config, lost).unwrap();
    }

    /// Leads ssh to the host again.
    pub(crate) fn find(&self, index: usize) {
        let address = &self.all[index].address;
        let config = self.dir.path().join("config");
        let text = fs::read_to_string(&config).unwrap();
        fs::write(config, text.replace("127.0.0.99", address)).unwrap();
    }

    /// Processes that these hosts' users have: nodes, workers, and whatever these started. With their command lines.
    pub(crate) fn left(&self) -> Vec<(u32, String)> {
        let homes: Vec<String> = self
            .all
            .iter()
            .map(|server| format!("XDG_STATE_HOME={}/state", server.home.display()))
            .collect();
        let has_home = |pid: u32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let environment = String::from_utf8_lossy(&environment).into_owned();
            homes.iter().any(|home| environment.contains(home))
        };
        fs::read_dir("/proc")
            .unwrap()
            .flatten()
            .filter_map(|entry| entry.file_name().to_string_lossy().parse().ok())
            .filter(|pid| has_home(*pid) && is_running(*pid))
            .map(|pid| {
                let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                (pid, String::from_utf8_lossy(&line).replace('\0', " "))
            })
            .collect()
    }

    /// Waits until none of [`left`](Self::left) is there.
    #[track_caller]
    pub(crate) fn nothing_is_left(&self) {
        let begin = Instant::now();
        while !self.left().is_empty() {
            assert!(begin.elapsed() < PATIENCE, "{:?} are left", self.left());
            std::thread::sleep(Duration::from_millis(10));
        }
        for index in 0..self.all.len() {
            assert_eq!(self.node_dirs(index), 0, "host {index}");
        }
    }

    /// Stops all that ssh does for a host, as a cut cable does: nothing arrives any more, nothing ends.
    pub(crate) fn freeze(&self, index: usize) {
        for session in self.all[index].sessions.lock().unwrap().iter() {
            for pid in tree(session.id()) {
                // The node's own process goes on.
                if program(pid).contains("sshd") {
                    signal(pid, rustix::process::Signal::STOP);
                }
            }
        }
    }

    /// `kolo` as a user of these hosts runs it, who has no other clusters.
    pub(crate) fn kolo(&self, args: &[&str]) -> Command {
        self.kolo_at(Path::new(env!("CARGO_BIN_EXE_kolo")), args)
    }

    /// As [`kolo`](Self::kolo), installed elsewhere.
    pub(crate) fn kolo_at(&self, program: &Path, args: &[&str]) -> Command {
        let mut command = match &self.launcher {
            Some(host) => host.command(program),
            None => Command::new(program),
        };
        command
            .args(args)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.dir.path().join("launcher"))
            .env("KOLO_SSH_CONFIG_FILE", self.dir.path().join("config"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// `kolo up` with the program that is on these hosts already.
    pub(crate) fn up(&self, args: &[&str]) -> Command {
        let mut command = self.kolo(&["--format", "json", "up"]);
        command.args(["--remote-program", env!("CARGO_BIN_EXE_kolo-node")]);
        command.args(args);
        command
    }

    pub(crate) fn launch(&self, args: &[&str]) -> Launched {
        Launched::start(self.up(args))
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = fs::read_to_string(self.dir.path().join("sshd.log")).unwrap_or_default();
            eprintln!("---- the servers' log\n{log}");
        }
        // A node that a failed test has left must not outlive it.
        let marker = self.dir.path().to_string_lossy().into_owned();
        self.all.clear();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else {
                continue;
            };
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let program = program(pid);
            if (program.contains("kolo-node") || program.contains("kolo-head"))
                && String::from_utf8_lossy(&environment).contains(&marker)
            {
                signal(pid, rustix::process::Signal::KILL);
            }
        }
    }
}

impl Server {
    fn start(dir: &Path, number: u8, address: String, host: Option<Host>) -> Self {
        let host_key = dir.join(format!("host{number}"));
        keygen(&host_key);
        let home = dir.join(format!("home{number}"));
        fs::create_dir(&home).unwrap();
        let config = dir.join(format!("sshd{number}"));
        fs::write(
            &config,
            format!(
                "HostKey {}\nAuthorizedKeysFile {}/id.pub\nStrictModes no\nUsePAM no\nPidFile none\n\
                 PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\nLogLevel ERROR\n\
                 SetEnv XDG_CACHE_HOME={home}/cache XDG_STATE_HOME={home}/state\n",
                host_key.display(),
                dir.display(),
                home = home.display(),
            ),
        )
        .unwrap();
        // The test listens and gives sshd each connection, so that the port is sure to be free.
        let bind = || TcpListener::bind((address.as_str(), 0)).unwrap();
        let listener = match &host {
            Some(host) => host.enter(bind).unwrap(),
            None => bind(),
        };
        let port = listener.local_addr().unwrap().port();
        let own = listener.try_clone().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let sessions: Arc<Mutex<Vec<Child>>> = Arc::default();
        let log = dir.join("sshd.log");
        let thread = std::thread::spawn({
            let (stop, sessions) = (Arc::clone(&stop), Arc::clone(&sessions));
            move || {
                for stream in listener.incoming() {
                    if stop.load(Ordering::Acquire) {
                        return;
                    }
                    let session = serve(stream.unwrap(), host.as_ref(), &config, &log);
                    sessions.lock().unwrap().push(session);
                }
            }
        });
        Self {
            address,
            listener: own,
            port,
            home,
            stop,
            sessions,
            thread: Some(thread),
        }
    }
}

fn serve(stream: TcpStream, host: Option<&Host>, config: &Path, log: &Path) -> Child {
    let log = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(log)
        .unwrap();
    let other = stream.try_clone().unwrap();
    let mut sshd = match host {
        Some(host) => host.command(SSHD),
        None => Command::new(SSHD),
    };
    sshd.args(["-i", "-e", "-f"])
        .arg(config)
        .stdin(OwnedFd::from(stream))
        .stdout(OwnedFd::from(other))
        .stderr(log)
        .spawn()
        .unwrap()
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // Wakes the thread.
        // Wakes the thread, also where the network is gone.
        rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both).unwrap();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
        for session in self.sessions.lock().unwrap().iter_mut() {
            for pid in tree(session.id()) {
                signal(pid, rustix::process::Signal::CONT);
                signal(pid, rustix::process::Signal::KILL);
            }
            session.wait().unwrap();
        }
    }
}

/// A `kolo up` that runs.
pub(crate) struct Launched {
    pub(crate) child: Child,
    pub(crate) stderr: Option<JoinHandle<String>>,
}

impl Launched {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let mut stderr = child.stderr.take().unwrap();
        let stderr = std::thread::spawn(move || {
            let mut text = String::new();
            stderr.read_to_string(&mut text).unwrap();
            text
        });
        Self {
            child,
            stderr: Some(stderr),
        }
    }

    /// What it prints when all is up.
    pub(crate) fn ready(&mut self) -> Value {
        let stdout = self.child.stdout.take().unwrap();
        let mut text = String::new();
        for line in BufReader::new(stdout).lines() {
            let line = line.unwrap();
            text.push_str(&line);
            if line == "}" {
                break;
            }
        }
        serde_json::from_str(&text).unwrap_or_else(|error| {
            self.child.kill().ok();
            panic!("{error}: {text}\n{}", self.stderr());
        })
    }

    pub(crate) fn stderr(&mut self) -> String {
        self.stderr.take().unwrap().join().unwrap()
    }

    /// Its exit code, within the tests' patience.
    pub(crate) fn wait(&mut self) -> Option<i32> {
        soon("the launcher to end", || {
            self.child.try_wait().unwrap().map(|status| status.code())
        })
    }

    pub(crate) fn signal(&self, which: rustix::process::Signal) {
        signal(self.child.id(), which);
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Tries until there is something.
#[track_caller]
pub(crate) fn soon<T>(what: &str, mut try_it: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = try_it() {
            return value;
        }
        assert!(start.elapsed() < PATIENCE, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[track_caller]
pub(crate) fn gone(pid: u32) {
    soon(
        &format!("the end of process {pid} ({})", program(pid)),
        || (!is_running(pid)).then_some(()),
    );
}

/// Whether a process is there and not a zombie.
pub(crate) fn is_running(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        let state = stat.rsplit(')').next().unwrap_or_default();
        !state.trim_start().starts_with('Z')
    })
}

pub(crate) fn signal(pid: u32, signal: rustix::process::Signal) {
    if let Some(pid) = i32::try_from(pid)
        .ok()
        .and_then(rustix::process::Pid::from_raw)
    {
        // It may be gone.
        rustix::process::kill_process(pid, signal).ok();
    }
}

fn program(pid: u32) -> String {
    fs::read_link(format!("/proc/{pid}/exe"))
        .map_or_else(|_| String::new(), |path| path.display().to_string())
}

/// A process and all below it.
fn tree(root: u32) -> Vec<u32> {
    let mut all = vec![root];
    let mut next = 0;
    while next < all.len() {
        let children = format!("/proc/{0}/task/{0}/children", all[next]);
        let children = fs::read_to_string(children).unwrap_or_default();
        all.extend(
            children
                .split_whitespace()
                .filter_map(|pid| pid.parse::<u32>().ok()),
        );
        next += 1;
    }
    all
}

/// Has a command use the cluster that a launch tells of.
pub(crate) fn on<'a>(command: &'a mut Command, up: &Value) -> &'a mut Command {
    let text = |key: &str| up[key].as_str().unwrap().to_owned();
    command
        .env("KOLO_HEAD", text("head"))
        .env("KOLO_CREDENTIALS", text("credentials"))
}

/// The ids of the processes of the nodes that a launch tells of.
pub(crate) fn node_pids(up: &Value) -> Vec<u32> {
    up["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| u32::try_from(node["pid"].as_u64().unwrap()).unwrap())
        .collect()
}

/// Text of both streams of a run that has ended.
pub(crate) fn texts(output: &Output) -> (String, String) {
    (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

/// An executable file with this text.
pub(crate) fn executable(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}
