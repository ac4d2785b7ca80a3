//! Daemons and commands as processes, and all that they print.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// A wait that is longer than this has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// What a process has printed, line by line.
#[derive(Default)]
pub(crate) struct Printed {
    lines: Mutex<(Vec<String>, usize)>,
    changed: Condvar,
}

impl Printed {
    fn read(self: &Arc<Self>, stream: impl std::io::Read + Send + 'static) {
        let this = Arc::clone(self);
        std::thread::spawn(move || {
            for line in BufReader::new(stream).lines() {
                let Ok(line) = line else { break };
                this.lines.lock().unwrap().0.push(line);
                this.changed.notify_all();
            }
            this.lines.lock().unwrap().1 += 1;
            this.changed.notify_all();
        });
    }

    pub(crate) fn text(&self) -> String {
        self.lines.lock().unwrap().0.join("\n")
    }

    pub(crate) fn count(&self, part: &str) -> usize {
        let lines = self.lines.lock().unwrap();
        lines.0.iter().filter(|line| line.contains(part)).count()
    }

    /// Waits until so many lines hold `part`, or the process has closed both streams.
    fn wait(&self, part: &str, count: usize) -> bool {
        let begin = Instant::now();
        let mut lines = self.lines.lock().unwrap();
        loop {
            if lines.0.iter().filter(|line| line.contains(part)).count() >= count {
                return true;
            }
            let left = PATIENCE.saturating_sub(begin.elapsed());
            if lines.1 == 2 || left.is_zero() {
                return false;
            }
            lines = self.changed.wait_timeout(lines, left).unwrap().0;
        }
    }
}

/// A daemon that does not outlive its test.
pub(crate) struct Daemon {
    child: Child,
    pub(crate) printed: Arc<Printed>,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Daemon {
    pub(crate) fn spawn(mut command: Command) -> Self {
        let mut child = command
            .env_remove("NO_COLOR")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let printed = Arc::new(Printed::default());
        printed.read(child.stdout.take().unwrap());
        printed.read(child.stderr.take().unwrap());
        Self { child, printed }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line with `part`.
    #[track_caller]
    pub(crate) fn says(&self, part: &str) {
        self.says_times(part, 1);
    }

    #[track_caller]
    pub(crate) fn says_times(&self, part: &str, count: usize) {
        assert!(
            self.printed.wait(part, count),
            "it did not say `{part}` {count} times:\n{}",
            self.printed.text()
        );
    }

    /// The JSON line that it prints when it is ready.
    #[track_caller]
    pub(crate) fn ready(&self) -> serde_json::Value {
        self.says("\"address\":");
        let text = self.printed.text();
        let line = text.lines().find(|line| line.starts_with('{')).unwrap();
        serde_json::from_str(line).unwrap()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    #[track_caller]
    pub(crate) fn end(&mut self) -> ExitStatus {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                // Until all of its output is read.
                self.printed.wait("\0", 1);
                return status;
            }
            assert!(
                begin.elapsed() < PATIENCE,
                "it does not end:\n{}",
                self.printed.text()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// A command of a program without the settings of whoever runs the tests.
pub(crate) fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("KOLO_") {
            command.env_remove(name);
        }
    }
    command
}

pub(crate) const HEAD: &str = env!("CARGO_BIN_EXE_kolo-head");
pub(crate) const NODE: &str = env!("CARGO_BIN_EXE_kolo-node");
pub(crate) const KOLO: &str = env!("CARGO_BIN_EXE_kolo");

/// A head with its folder, and what it takes to use it.
pub(crate) struct Site {
    pub(crate) dir: TempDir,
    pub(crate) head: Daemon,
    pub(crate) address: SocketAddr,
    pub(crate) http: SocketAddr,
    args: Vec<String>,
}

impl Site {
    pub(crate) fn new(args: &[&str]) -> Self {
        let dir = TempDir::with_prefix("kolo-test-").unwrap();
        let args: Vec<String> = args.iter().map(ToString::to_string).collect();
        let (head, address, http) = start_head(dir.path(), &args, "127.0.0.1:0", &[]);
        Self {
            dir,
            head,
            address,
            http,
            args,
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn admin(&self) -> PathBuf {
        self.path("head").join("admin")
    }

    /// Kills the head and starts it again at the same address.
    pub(crate) fn restart_head(&mut self) {
        self.restart_head_with(&[]);
    }

    /// As [`Site::restart_head`], with these variables.
    pub(crate) fn restart_head_with(&mut self, env: &[(&str, &OsStr)]) {
        self.head.signal(Signal::KILL);
        self.head.end();
        let (head, address, http) =
            start_head(self.dir.path(), &self.args, &self.address.to_string(), env);
        self.head = head;
        self.address = address;
        self.http = http;
    }

    /// Runs `kolo` with the credentials in a folder.
    pub(crate) fn kolo(&self, credentials: &Path, args: &[&str]) -> Output {
        command(KOLO)
            .args(["--head", &self.address.to_string()])
            .arg("--credentials")
            .arg(credentials)
            // A machine under load is no reason to fail.
            .args(["--connect-timeout", "30"])
            .args(args)
            .output()
            .unwrap()
    }

    /// As [`Site::kolo`] for the operator, which must do it. What it prints.
    #[track_caller]
    pub(crate) fn operator(&self, args: &[&str]) -> String {
        let output = self.kolo(&self.admin(), args);
        assert!(output.status.success(), "{args:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    #[track_caller]
    pub(crate) fn json(&self, args: &[&str]) -> serde_json::Value {
        let text = self.operator(&[args, &["--format", "json"]].concat());
        serde_json::from_str(&text).unwrap()
    }

    /// What `kolo doctor` finds, also if that is bad.
    #[track_caller]
    pub(crate) fn json_of(&self, args: &[&str]) -> Vec<serde_json::Value> {
        let output = self.kolo(&self.admin(), &[args, &["--format", "json"]].concat());
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
    }

    /// A new token in a file of the site.
    #[track_caller]
    pub(crate) fn token(&self, file: &str, args: &[&str]) -> PathBuf {
        let path = self.path(file);
        let out = path.to_str().unwrap().to_owned();
        self.operator(&[&["token", "create", "--out", &out], args].concat());
        path
    }

    /// A driver that has logged in with a token; the folder of its credentials.
    #[track_caller]
    pub(crate) fn login(&self, name: &str, token: &Path) -> PathBuf {
        let dir = self.path(name);
        let output = self.kolo(&dir, &["login", "--token-file", token.to_str().unwrap()]);
        assert!(output.status.success(), "{output:?}");
        dir
    }

    /// A node with a state folder of its own.
    pub(crate) fn node(&self, name: &str, args: &[&str]) -> Daemon {
        let mut node = command(NODE);
        node.args(["--head", &self.address.to_string(), "--format", "json"])
            .args(["--cpus", "1", "--gpus", "0"])
            .arg("--state-dir")
            .arg(self.path(name))
            .args(args);
        Daemon::spawn(node)
    }

    /// What the head says of a node.
    pub(crate) fn status_of(&self, node: &str) -> serde_json::Value {
        let status = self.json(&["status"]);
        let nodes = status["nodes"].as_array().unwrap();
        let found = nodes.iter().find(|known| known["node"] == node);
        found.cloned().unwrap_or_default()
    }

    /// Waits until a node is in this state.
    #[track_caller]
    pub(crate) fn wait_for(&self, node: &str, state: &str) {
        let begin = Instant::now();
        while self.status_of(node)["state"] != state {
            assert!(begin.elapsed() < PATIENCE, "{node} is never {state}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn start_head(
    dir: &Path,
    args: &[String],
    listen: &str,
    env: &[(&str, &OsStr)],
) -> (Daemon, SocketAddr, SocketAddr) {
    let mut head = command(HEAD);
    head.envs(env.iter().copied());
    head.arg("--state-dir")
        .arg(dir.join("head"))
        .args(["--listen", listen, "--http-listen", "127.0.0.1:0"])
        .args(["--format", "json"])
        .args(args);
    let head = Daemon::spawn(head);
    let ready = head.ready();
    let address = |key: &str| ready[key].as_str().unwrap().parse().unwrap();
    (head, address("address"), address("http"))
}
