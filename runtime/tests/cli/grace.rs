//! `kolo run` on this machine: what is below a worker has the grace time too, and nothing outlives a warden that is killed.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

const LIMIT: Duration = Duration::from_secs(60);

/// Saves when it is asked to end, which takes a moment.
const SAVES: &str = "#!/bin/sh
save() { sleep 0.3; echo saved by $1; exit 0; }
for signal in TERM INT; do trap \"save $signal\" $signal; done
echo ready
while :; do sleep 0.02; done
";

/// What may stand between `kolo run` and the program, which is `$1`; and how the program hears of Ctrl-C. What stands there
/// more often is in the tests of daemons.
const WRAPPERS: [(&[&str], &str); 3] = [
    (&["bash", "-c", "\"$1\"; true", "bash"], "INT"),
    // A shell has what is in its background ignore an interrupt.
    (&["sh", "-c", "\"$1\" & sleep 1000", "sh"], "TERM"),
    (&["sh", "-c", "(setsid \"$1\" &); sleep 1000", "sh"], "TERM"),
];

/// `kolo run` that is ended with its test.
struct Launcher {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Drop for Launcher {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Launcher {
    fn start(options: &[&str], program: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_kolo"))
            .env_remove("KOLO_HEAD")
            .args(["run", "--local", "--prefix", "none"])
            .args(options)
            .arg("--")
            .args(program)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        Self { child, out }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().try_into().unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// The rest of its output, until it has ended.
    fn end(mut self) -> (String, Option<i32>) {
        let mut rest = String::new();
        self.out.read_to_string(&mut rest).unwrap();
        (rest, self.child.wait().unwrap().code())
    }
}

/// Fields of `/proc/PID/stat` after the name: state, parent. `None` if there is no such process, or only its remains.
fn stat(pid: u32) -> Option<Vec<String>> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<String> = stat[stat.rfind(')')? + 2..]
        .split(' ')
        .map(str::to_owned)
        .collect();
    (fields[0] != "Z").then_some(fields)
}

fn gone(pid: u32) {
    let began = Instant::now();
    while stat(pid).is_some() {
        assert!(began.elapsed() < LIMIT, "{pid} is left");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn whatever_is_between_kolo_and_a_program_it_has_its_grace() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("program");
    std::fs::write(&program, SAVES).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&program, mode).unwrap();
    let program = program.to_str().unwrap();
    for (wrapper, at_interrupt) in WRAPPERS {
        for (signal, saved_by, expected) in [
            (Signal::TERM, "TERM", 143),
            (Signal::INT, at_interrupt, 130),
        ] {
            let command = [wrapper, &[program]].concat();
            let mut launcher = Launcher::start(&["-n", "2", "--grace", "60"], &command);
            for _ in 0..2 {
                assert_eq!(launcher.line(), "ready", "{wrapper:?}");
            }
            launcher.signal(signal);
            let (rest, code) = launcher.end();
            assert_eq!(rest, format!("saved by {saved_by}\n").repeat(2));
            assert_eq!(code, Some(expected), "{wrapper:?}");
        }
    }
}

#[test]
fn a_killed_warden_leaves_nothing_and_the_launcher_says_so_soon() {
    // The last has nothing any more by which it can be known.
    for detached in ["setsid -f", "env -i setsid"] {
        let text = format!("{detached} sh -c 'echo $$; exec sleep 917' & echo $$; exec sleep 60");
        let mut launcher = Launcher::start(&["-n", "4"], &["sh", "-c", &text]);
        let pids: Vec<u32> = (0..8).map(|_| launcher.line().parse().unwrap()).collect();
        let warden: u32 = pids
            .iter()
            .filter_map(|pid| stat(*pid)?[1].parse().ok())
            .find(|parent| !pids.contains(parent))
            .unwrap();
        let began = Instant::now();
        kill_process(Pid::from_raw(warden.cast_signed()).unwrap(), Signal::KILL).unwrap();
        let (_, code) = launcher.end();
        assert_eq!(code, Some(1), "{detached}");
        assert!(
            began.elapsed() < Duration::from_secs(8),
            "{detached}: {:?}",
            began.elapsed()
        );
        for pid in pids {
            gone(pid);
        }
    }
}
