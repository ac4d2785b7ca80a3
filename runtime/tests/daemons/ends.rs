//! The ways in which a job can end, each with and without a wrapper between kolo and the program.
//!
//! The program saves its state when it is asked to end, which takes a moment. In every way but a kill it has the time for
//! that, whatever stands between kolo and the program; and in every way nothing of it is left.

use std::path::PathBuf;

use rustix::process::Signal;

use crate::process::{Daemon, KOLO, PATIENCE, Site, command};

/// What stands between kolo and the program, as the command line of `kolo run`. `$1` is the program.
const WRAPPERS: [(&str, &str); 4] = [
    ("no wrapper", "exec sh \"$1\""),
    ("a shell", "sh \"$1\"; exit $?"),
    ("a session of its own", "setsid --wait sh \"$1\"; exit $?"),
    (
        "two shells",
        "sh -c 'sh \"$1\"; exit $?' sh \"$1\"; exit $?",
    ),
];

/// Saves at a notice. Ends by itself when it is told with which code. Leaves a process in a session of its own behind.
const PROGRAM: &str = r#"
save() {
    : > "$DIR/saving.$RANK"
    if [ -e "$DIR/together" ]; then
        until [ -e "$DIR/saving.0" ] && [ -e "$DIR/saving.1" ]; do sleep 0.02; done
    fi
    sleep 0.3
    echo "$1" > "$DIR/saved.$RANK"
    exit 0
}
for signal in TERM INT HUP QUIT; do trap "save $signal" $signal; done
trap 'echo "checkpoint $RANK"' USR1
setsid --fork sh -c 'echo $$ >> "$DIR/pids"; exec sleep 1000' >/dev/null 2>&1
echo $$ >> "$DIR/pids"
until [ "$(wc -l < "$DIR/pids")" -ge 4 ]; do sleep 0.02; done
echo "ready $RANK"
until [ -e "$DIR/end.$RANK" ]; do sleep 0.02; done
exit "$(cat "$DIR/end.$RANK")"
"#;

/// Two ranks that run, on a node each or on this machine alone.
struct Bed {
    site: Option<Site>,
    nodes: Vec<Daemon>,
    kolo: Daemon,
    dir: tempfile::TempDir,
}

impl Bed {
    /// A head and two nodes, with a rank on each.
    fn cluster(wrapper: &str) -> Self {
        let site = Site::new(&[]);
        let token = site.token("token", &[]);
        let token = token.to_str().unwrap();
        let nodes = ["one", "two"].map(|name| {
            let node = site.node(
                name,
                &[
                    "--token-file",
                    token,
                    "--drain-timeout",
                    "100ms",
                    "--orphan-timeout",
                    "100ms",
                ],
            );
            node.ready();
            node
        });
        let mut kolo = command(KOLO);
        kolo.args(["--head", &site.address.to_string()])
            .arg("--credentials")
            .arg(site.admin())
            .args(["--connect-timeout", "30"]);
        Self::run(Some(site), nodes.into(), kolo, wrapper)
    }

    /// Without daemons.
    fn local(wrapper: &str) -> Self {
        Self::run(None, Vec::new(), command(KOLO), wrapper)
    }

    fn run(
        site: Option<Site>,
        nodes: Vec<Daemon>,
        mut kolo: std::process::Command,
        wrapper: &str,
    ) -> Self {
        let dir = tempfile::TempDir::with_prefix("kolo-test-").unwrap();
        let program = dir.path().join("program");
        std::fs::write(&program, PROGRAM).unwrap();
        let options = [
            "run",
            "-n",
            "2",
            "--cpus-per-worker",
            "0.5",
            "--grace",
            "60",
        ];
        kolo.args(options);
        if site.is_some() {
            kolo.args(["--nnodes", "2", "--nproc-per-node", "1"]);
        }
        kolo.arg("--env")
            .arg(format!("DIR={}", dir.path().display()))
            .args(["--", "sh", "-c", wrapper, "sh"])
            .arg(&program);
        let kolo = Daemon::spawn(kolo);
        for rank in 0..2 {
            kolo.says(&format!("ready {rank}"));
        }
        let bed = Self {
            site,
            nodes,
            kolo,
            dir,
        };
        if let Some(site) = &bed.site {
            // The programs may run before the head has heard of both of them.
            until("the job is healthy", || {
                site.json(&["jobs"])[0]["state"] == "healthy"
            });
        }
        bed
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn site(&self) -> &Site {
        self.site.as_ref().expect("a cluster")
    }

    /// A rank ends by itself.
    fn end(&self, rank: u32, code: i32) {
        // Whole at once: the program reads it as soon as it is there.
        let whole = self.path("code");
        std::fs::write(&whole, format!("{code}\n")).unwrap();
        std::fs::rename(whole, self.path(&format!("end.{rank}"))).unwrap();
    }

    /// The node that has a rank, and its warden.
    fn node_of(&self, rank: u32) -> (usize, u32) {
        let job = &self.site().json(&["jobs"])[0]["job"];
        let job = self.site().json(&["jobs", job.as_str().unwrap()]);
        let worker = &job["workers"][rank as usize];
        let pid = worker["pid"].as_u64().unwrap();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let mut after_name = stat.rsplit(')').next().unwrap().split_whitespace();
        let warden: u32 = after_name.nth(1).unwrap().parse().unwrap();
        let node = &worker["node"];
        let is_it = |daemon: &Daemon| daemon.ready()["node"] == *node;
        (self.nodes.iter().position(is_it).unwrap(), warden)
    }
}

/// What is expected of a way to end.
struct Expected {
    /// The signal at which each rank saved, if it did.
    saved: [Option<&'static str>; 2],
    /// The launcher's exit code, where it has one.
    code: Option<i32>,
}

fn expect(saved: [Option<&'static str>; 2], code: impl Into<Option<i32>>) -> Expected {
    let code = code.into();
    Expected { saved, code }
}

const BOTH: [Option<&str>; 2] = [Some("TERM"), Some("TERM")];

#[track_caller]
fn until(what: &str, mut is: impl FnMut() -> bool) {
    let begin = std::time::Instant::now();
    while !is() {
        assert!(begin.elapsed() < PATIENCE, "it is never so that {what}");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

fn is_running(pid: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        !stat
            .rsplit(')')
            .next()
            .is_some_and(|rest| rest.starts_with(" Z"))
    })
}

/// Ends a job in this way behind every wrapper, and looks at what is left.
fn try_all(start: fn(&str) -> Bed, end: impl Fn(&mut Bed) -> Expected) {
    for (name, wrapper) in WRAPPERS {
        let mut bed = start(wrapper);
        let pids = std::fs::read_to_string(bed.path("pids")).unwrap();
        assert_eq!(pids.lines().count(), 4, "{name}: {pids}");
        let expected = end(&mut bed);
        let status = bed.kolo.end();
        let text = bed.kolo.printed.text();
        if let Some(code) = expected.code {
            assert_eq!(status.code(), Some(code), "{name}: {text}");
        }
        for pid in pids.lines() {
            until(&format!("{pid} is gone, behind {name}"), || {
                !is_running(pid)
            });
        }
        for (rank, expected) in expected.saved.into_iter().enumerate() {
            let saved = std::fs::read_to_string(bed.path(&format!("saved.{rank}"))).ok();
            let saved = saved.as_deref().map(str::trim_end);
            let logs: Vec<String> = bed.nodes.iter().map(|node| node.printed.text()).collect();
            assert_eq!(
                saved,
                expected,
                "rank {rank} behind {name}: {text}\n{}",
                logs.join("\n")
            );
        }
    }
}

#[test]
fn all_ranks_end_by_themselves() {
    for start in [Bed::local, Bed::cluster] {
        try_all(start, |bed| {
            bed.end(0, 0);
            bed.end(1, 0);
            expect([None, None], 0)
        });
    }
}

#[test]
fn a_rank_fails() {
    for start in [Bed::local, Bed::cluster] {
        try_all(start, |bed| {
            bed.end(1, 3);
            expect([Some("TERM"), None], 3)
        });
    }
}

#[test]
fn an_operator_stops_the_job() {
    try_all(Bed::cluster, |bed| {
        let jobs = bed.site().json(&["jobs"]);
        bed.site()
            .operator(&["stop", jobs[0]["job"].as_str().unwrap()]);
        expect(BOTH, None)
    });
}

#[test]
fn the_launcher_is_signalled() {
    for start in [Bed::local, Bed::cluster] {
        for (signal, code, first) in [
            (Signal::TERM, 143, "TERM"),
            (Signal::INT, 130, "INT"),
            (Signal::ALARM, 142, "TERM"),
        ] {
            try_all(start, |bed| {
                // That is not an end.
                bed.kolo.signal(Signal::USR1);
                bed.kolo.says("checkpoint 0");
                bed.kolo.says("checkpoint 1");
                bed.kolo.signal(signal);
                expect([Some(first), Some(first)], code)
            });
        }
    }
}

#[test]
fn the_node_of_a_rank_is_drained() {
    try_all(Bed::cluster, |bed| {
        // A barrier before the checkpoint: no rank may have its notice later than another.
        std::fs::write(bed.path("together"), "").unwrap();
        let (node, _) = bed.node_of(1);
        bed.nodes[node].signal(Signal::TERM);
        expect(BOTH, None)
    });
}

#[test]
fn the_launcher_is_killed() {
    try_all(Bed::cluster, |bed| {
        bed.kolo.signal(Signal::KILL);
        expect(BOTH, None)
    });
    // Head and nodes are in the launcher: nobody is left to give the workers time.
    try_all(Bed::local, |bed| {
        bed.kolo.signal(Signal::KILL);
        expect([None, None], None)
    });
}

#[test]
fn the_head_is_killed() {
    // The launcher ends without it, and nodes end a job that has neither.
    try_all(Bed::cluster, |bed| {
        bed.site().head.signal(Signal::KILL);
        expect(BOTH, 4)
    });
}

#[test]
fn the_node_of_a_rank_is_killed() {
    try_all(Bed::cluster, |bed| {
        let (node, _) = bed.node_of(1);
        bed.nodes[node].signal(Signal::KILL);
        expect([Some("TERM"), None], 1)
    });
}

#[test]
fn the_warden_of_a_rank_is_killed() {
    try_all(Bed::cluster, |bed| {
        let (_, warden) = bed.node_of(1);
        let warden = rustix::process::Pid::from_raw(warden.cast_signed()).unwrap();
        rustix::process::kill_process(warden, Signal::KILL).unwrap();
        expect([Some("TERM"), None], 1)
    });
}
