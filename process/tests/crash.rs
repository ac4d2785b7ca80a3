//! Nothing outlives a daemon that is killed. This program plays all parts: the tests, the daemon (with this very
//! program as the warden, as `/proc/self/exe`) and some workers.
#![allow(clippy::unwrap_used)] // a failed step is a failed test

mod common;

use std::ffi::OsString;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use common::{LIMIT, LineReader, program, script, within};
use kolo_process::{Warden, pipe, run_if_warden};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

/// Names the part that this process plays.
const ROLE: &str = "TEST_ROLE";

/// What a daemon is called.
const OWNER: &str = "TEST_OWNER";

/// What a daemon starts in place of a warden.
const EXE: &str = "TEST_EXE";

/// Where a daemon's warden sends its will.
const HEIR: &str = "TEST_HEIR";

/// The will.
const WILL: &[u8] = b"dead";

/// How many processes a daemon starts, its warden included.
const FAMILY: usize = 11;

/// How many workers the hasty daemon starts.
const HASTY: usize = 100;

fn main() -> ExitCode {
    run_if_warden();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    match std::env::var(ROLE).as_deref() {
        Ok("daemon") => runtime.block_on(daemon()),
        Ok("adopting daemon") => {
            kolo_process::adopt_orphans().unwrap();
            runtime.block_on(daemon());
        }
        Ok("daemon that lives on") => runtime.block_on(daemon_that_lives_on()),
        Ok("daemon of no warden") => runtime.block_on(daemon_of_no_warden()),
        Ok("hasty daemon") => runtime.block_on(hasty_daemon()),
        Ok("worker with a group apart") => worker_with_a_group_apart(),
        Ok(role) => panic!("{role}"),
        Err(_) => return run_tests(&runtime),
    }
    ExitCode::SUCCESS
}

/// Workers that are hard to get rid of, one of each kind, all with this process's standard output.
async fn daemon() {
    let warden = Warden::start(Path::new("/proc/self/exe"), &owner())
        .await
        .unwrap();
    println!("warden {}", warden.pid());
    warden.folder().await.unwrap();
    if let Some(heir) = heir() {
        warden.will(heir, WILL.to_vec()).await.unwrap();
    }
    let exe = std::env::current_exe().unwrap();
    let mut apart = program(exe.to_str().unwrap(), &[]);
    let role = OsString::from("worker with a group apart");
    apart.request.env.push((ROLE.into(), role));
    let stubborn = "trap '' TERM HUP INT; echo stubborn $$; while :; do sleep 1000; done";
    let stray =
        "setsid sh -c 'echo stray $$; exec sleep 1000' & echo with-stray $$; exec sleep 1000";
    let lost_stray = "(setsid sh -c 'echo lost-stray $$; exec sleep 1000' &); echo with-lost-stray $$; exec sleep 1000";
    let stopped = "echo stopped $$; kill -STOP $$";
    // Nobody can tell whose it is, but for its place.
    let wiped = "(env -i setsid sh -c 'echo wiped $$; exec sleep 1000' &); echo with-wiped $$; exec sleep 1000";
    let mut children = Vec::new();
    for mut request in [
        script(stubborn),
        script(stray),
        script(lost_stray),
        script(stopped),
        script(wiped),
        apart,
    ] {
        request.request.stdout = std::io::stdout().as_fd().try_clone_to_owned().unwrap();
        children.push(warden.spawn(request.request).await.unwrap());
    }
    std::future::pending::<()>().await;
}

/// The name of the daemon, which the test knows.
fn owner() -> String {
    std::env::var(OWNER).unwrap()
}

fn heir() -> Option<SocketAddr> {
    std::env::var(HEIR).ok()?.parse().ok()
}

/// Closes one warden and drops another one, and then says so to the heir.
async fn daemon_that_lives_on() {
    let heir = heir().unwrap();
    for closes in [true, false] {
        let warden = Warden::start(Path::new("/proc/self/exe"), &owner())
            .await
            .unwrap();
        warden.will(heir, WILL.to_vec()).await.unwrap();
        let request = script("exec sleep 1000").request;
        let _child = warden.spawn(request).await.unwrap();
        let gone = warden.gone();
        if closes {
            warden.close().await;
        } else {
            drop(warden);
        }
        gone.await;
    }
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.send_to(b"alive", heir).unwrap();
    std::future::pending::<()>().await;
}

/// Waits for a program that does not say whether it is a warden.
async fn daemon_of_no_warden() {
    let exe = std::env::var_os(EXE).unwrap();
    let warden = Warden::start(Path::new(&exe), &owner()).await;
    panic!("{warden:?}");
}

/// Is killed while it starts workers.
async fn hasty_daemon() {
    let warden = Warden::start(Path::new("/proc/self/exe"), &owner())
        .await
        .unwrap();
    println!("warden {}", warden.pid());
    let warden = std::sync::Arc::new(warden);
    let mut starts = tokio::task::JoinSet::new();
    for _ in 0..HASTY {
        let mut request = script("echo worker $$; exec sleep 1000").request;
        request.stdout = std::io::stdout().as_fd().try_clone_to_owned().unwrap();
        let warden = warden.clone();
        starts.spawn(async move { warden.spawn(request).await });
    }
    let _children = starts.join_all().await;
    std::future::pending::<()>().await;
}

fn worker_with_a_group_apart() {
    let mut child = Command::new("/bin/sleep")
        .arg("1000")
        .process_group(0)
        .spawn()
        .unwrap();
    println!("apart {}\nwith-apart {}", child.id(), std::process::id());
    child.wait().unwrap();
}

/// A started daemon, and the pipe that it and all its descendants have as standard output.
struct Daemon {
    child: std::process::Child,
    owner: String,
    lines: LineReader,
    /// The processes that said their ids.
    named: Vec<(String, OwnedFd)>,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Daemon {
    fn start(role: &str) -> Self {
        Self::start_with(role, Path::new(""), None)
    }

    fn start_with(role: &str, exe: &Path, heir: Option<&UdpSocket>) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let owner = format!("crash-{}-{number}", std::process::id());
        let (read, write) = pipe().unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .env(ROLE, role)
            .env(OWNER, &owner)
            .env(EXE, exe)
            .envs(heir.map(|heir| (HEIR, heir.local_addr().unwrap().to_string())))
            .stdin(Stdio::null())
            .stderr(write.try_clone().unwrap())
            .stdout(write)
            .spawn()
            .unwrap();
        Self {
            child,
            owner,
            lines: LineReader::new(read),
            named: Vec::new(),
        }
    }

    /// The next line is a name and a process id.
    async fn meet(&mut self) {
        let line = within(self.lines.next_line())
            .await
            .expect("the daemon runs");
        let (name, pid) = line.split_once(' ').unwrap();
        let pid = Pid::from_raw(pid.parse().unwrap()).unwrap();
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        self.named.push((name.to_owned(), pidfd));
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    async fn meet_all(&mut self) {
        for _ in 0..FAMILY {
            self.meet().await;
        }
    }

    fn signal_to(&self, name: &str, signal: Signal) {
        let (_, pidfd) = self.named.iter().find(|(other, _)| other == name).unwrap();
        pidfd_send_signal(pidfd, signal).unwrap();
    }

    fn has_ended(&self, name: &str) -> bool {
        let (_, pidfd) = self.named.iter().find(|(other, _)| other == name).unwrap();
        let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
    }

    fn see_the_end_of(&self, name: &str) {
        for (_, pidfd) in self.named.iter().filter(|(other, _)| other == name) {
            let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
            let limit = Timespec::try_from(LIMIT).unwrap();
            let ready = rustix::event::poll(&mut fds, Some(&limit)).unwrap();
            assert_eq!(ready, 1, "{name} lives");
        }
    }

    async fn kill_and_see_the_end(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        // The pipe ends when nobody has it any more: no worker and nobody whom a worker started.
        while within(self.lines.next_line()).await.is_some() {}
        for (name, _) in &self.named {
            self.see_the_end_of(name);
        }
        assert!(!self.folder().exists());
    }

    /// The directory of its warden.
    fn folder(&self) -> PathBuf {
        std::env::temp_dir().join(format!("kolo-{}-{}.0", self.owner, self.child.id()))
    }
}

fn heir_of(role: &str) -> (Daemon, UdpSocket) {
    let heir = UdpSocket::bind("127.0.0.1:0").unwrap();
    heir.set_read_timeout(Some(LIMIT)).unwrap();
    (Daemon::start_with(role, Path::new(""), Some(&heir)), heir)
}

fn inherited(heir: &UdpSocket) -> Vec<u8> {
    let mut datagram = [0; 64];
    let length = heir.recv(&mut datagram).unwrap();
    datagram[..length].to_vec()
}

async fn the_will_of_a_killed_daemon_is_done_when_nothing_is_left() {
    let (mut daemon, heir) = heir_of("daemon");
    daemon.meet_all().await;
    let mut names: Vec<&str> = daemon.named.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    let expected = "apart lost-stray stopped stray stubborn warden wiped with-apart with-lost-stray \
                    with-stray with-wiped";
    assert_eq!(names.join(" "), expected);
    daemon.child.kill().unwrap();
    assert_eq!(inherited(&heir), WILL);
    for (name, _) in &daemon.named {
        assert!(name == "warden" || daemon.has_ended(name), "{name}");
    }
    // Datagrams get lost.
    assert_eq!(inherited(&heir), WILL);
    daemon.kill_and_see_the_end().await;
}

async fn a_daemon_that_lives_has_no_will() {
    let (_daemon, heir) = heir_of("daemon that lives on");
    assert_eq!(inherited(&heir), b"alive");
}

async fn a_daemon_killed_while_it_starts_workers_leaves_none() {
    for met in [1, 2, 20] {
        let mut daemon = Daemon::start("hasty daemon");
        for _ in 0..met {
            daemon.meet().await;
        }
        daemon.kill_and_see_the_end().await;
    }
}

async fn a_killed_warden_takes_its_workers_with_it_though_the_daemon_sleeps() {
    let mut daemon = Daemon::start("hasty daemon");
    for _ in 0..=HASTY {
        daemon.meet().await;
    }
    // It can't help.
    daemon.signal(Signal::STOP);
    let (name, warden) = &daemon.named[0];
    assert_eq!(name, "warden");
    pidfd_send_signal(warden, Signal::KILL).unwrap();
    daemon.see_the_end_of("worker");
    daemon.kill_and_see_the_end().await;
}

async fn a_killed_warden_leaves_nothing_but_what_hides_from_a_daemon_that_does_not_adopt() {
    for (role, adopts) in [("daemon", false), ("adopting daemon", true)] {
        let mut daemon = Daemon::start(role);
        daemon.meet_all().await;
        daemon.signal_to("warden", Signal::KILL);
        for (name, _) in &daemon.named {
            if name != "wiped" {
                daemon.see_the_end_of(name);
            }
        }
        if !adopts {
            assert!(!daemon.has_ended("wiped"));
            daemon.signal_to("wiped", Signal::KILL);
        }
        daemon.see_the_end_of("wiped");
        assert!(daemon.child.try_wait().unwrap().is_none(), "it lives on");
        // What came to it was reaped, and the directory was removed.
        let daemon_id = daemon.child.id();
        within(async {
            while !common::children(daemon_id).is_empty() || daemon.folder().exists() {
                tokio::task::yield_now().await;
            }
        })
        .await;
        daemon.kill_and_see_the_end().await;
    }
}

async fn the_next_daemon_of_the_name_ends_what_one_that_was_killed_with_its_warden_has_left() {
    let mut daemon = Daemon::start("daemon");
    daemon.meet_all().await;
    let mut other = Daemon::start("daemon");
    other.meet_all().await;
    // So that it can't help.
    daemon.signal_to("warden", Signal::STOP);
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    daemon.signal_to("warden", Signal::KILL);
    daemon.see_the_end_of("with-stray");
    for name in ["stray", "lost-stray", "wiped"] {
        assert!(!daemon.has_ended(name));
    }
    assert!(daemon.folder().exists());
    assert_eq!(
        kolo_process::sweep_left_by("crash"),
        0,
        "a name, not a beginning"
    );
    assert!(kolo_process::sweep_left_by(&daemon.owner) >= 2);
    assert!(!daemon.folder().exists());
    daemon.see_the_end_of("stray");
    daemon.see_the_end_of("lost-stray");
    daemon.signal_to("wiped", Signal::KILL);
    assert!(!other.has_ended("stray"));
    other.kill_and_see_the_end().await;
}

async fn a_warden_that_stands_still_is_ended_by_the_next_daemon_of_the_name() {
    let mut daemon = Daemon::start("daemon");
    daemon.meet_all().await;
    daemon.signal_to("warden", Signal::STOP);
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    assert!(!daemon.has_ended("stubborn"));
    kolo_process::sweep_left_by(&daemon.owner);
    for (name, _) in &daemon.named {
        if name != "wiped" {
            daemon.see_the_end_of(name);
        }
    }
    daemon.signal_to("wiped", Signal::KILL);
}

async fn a_program_that_is_started_as_a_warden_dies_with_its_daemon_before_it_says_hello() {
    let dir = tempfile::tempdir().unwrap();
    let exe = dir.path().join("program");
    std::fs::write(
        &exe,
        "#!/bin/sh\necho \"program $$\" >&2\nexec sleep 1000\n",
    )
    .unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&exe, mode).unwrap();
    let mut daemon = Daemon::start_with("daemon of no warden", &exe, None);
    daemon.meet().await;
    daemon.kill_and_see_the_end().await;
}

/// As little of a test harness as `cargo test` needs: filters, `--list`, a line for each test.
fn run_tests(runtime: &tokio::runtime::Runtime) -> ExitCode {
    macro_rules! tests {
        ($($name:ident)*) => {
            [$((
                stringify!($name),
                (|runtime| runtime.block_on($name())) as fn(&tokio::runtime::Runtime),
            ),)*]
        };
    }
    let tests = tests![
        the_will_of_a_killed_daemon_is_done_when_nothing_is_left
        a_daemon_that_lives_has_no_will
        a_killed_warden_leaves_nothing_but_what_hides_from_a_daemon_that_does_not_adopt
        the_next_daemon_of_the_name_ends_what_one_that_was_killed_with_its_warden_has_left
        a_warden_that_stands_still_is_ended_by_the_next_daemon_of_the_name
        a_program_that_is_started_as_a_warden_dies_with_its_daemon_before_it_says_hello
        a_killed_warden_takes_its_workers_with_it_though_the_daemon_sleeps
        a_daemon_killed_while_it_starts_workers_leaves_none
    ];
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let filters: Vec<&String> = arguments.iter().filter(|a| !a.starts_with("--")).collect();
    let mut failed = false;
    for (name, test) in tests {
        if !filters.is_empty() && !filters.iter().any(|filter| name.contains(filter.as_str())) {
            continue;
        }
        if arguments.iter().any(|argument| argument == "--list") {
            println!("{name}: test");
            continue;
        }
        let passed =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(runtime))).is_ok();
        println!("test {name} ... {}", if passed { "ok" } else { "FAILED" });
        failed |= !passed;
    }
    if failed {
        ExitCode::from(101)
    } else {
        ExitCode::SUCCESS
    }
}
