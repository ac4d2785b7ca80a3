//! The ways in which a job can end, each with and without a wrapper between kolo and the program, side by side.
//!
//! The program saves its state when it is asked to end, which takes a moment. In every way but a kill it has the time for
//! that, whatever stands between kolo and the program; and in every way nothing of it is left.

use std::collections::BTreeSet;
use std::path::PathBuf;

use rustix::process::{Pid, Signal, kill_process};

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
until [ "$(wc -l < "$DIR/pids")" -ge 4 ]; do sleep 0.05; done
echo "ready $RANK"
until [ -e "$DIR/end.$RANK" ]; do sleep 0.05; done
exit "$(cat "$DIR/end.$RANK")"
"#;

/// A head and two nodes, or this machine alone.
struct Bed {
    site: Option<Site>,
    nodes: Vec<Daemon>,
}

/// A job of two ranks, with a wrapper. On a cluster each has a node of its own.
struct Run {
    wrapper: &'static str,
    kolo: Daemon,
    dir: tempfile::TempDir,
}

impl Run {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn name(&self) -> &str {
        self.dir.path().file_name().unwrap().to_str().unwrap()
    }

    /// A rank ends by itself.
    fn end(&self, rank: u32, code: i32) {
        // Whole at once: the program reads it as soon as it is there.
        let whole = self.path("code");
        std::fs::write(&whole, format!("{code}\n")).unwrap();
        std::fs::rename(whole, self.path(&format!("end.{rank}"))).unwrap();
    }
}

impl Bed {
    fn cluster() -> Self {
        let site = Site::new(&[]);
        let token = site.token("token", &[]);
        let token = ["--token-file", token.to_str().unwrap()];
        let short = ["--drain-timeout", "100ms", "--orphan-timeout", "100ms"];
        let nodes = ["one", "two"].map(|name| site.node(name, &[&token[..], &short].concat()));
        for node in &nodes {
            node.ready();
        }
        Self {
            site: Some(site),
            nodes: nodes.into(),
        }
    }

    fn local() -> Self {
        Self {
            site: None,
            nodes: Vec::new(),
        }
    }

    fn site(&self) -> &Site {
        self.site.as_ref().expect("a cluster")
    }

    fn start(&self, (name, wrapper): (&'static str, &str)) -> Run {
        let dir = tempfile::TempDir::with_prefix("kolo-test-").unwrap();
        let program = dir.path().join("program");
        std::fs::write(&program, PROGRAM).unwrap();
        let mut kolo = command(KOLO);
        if let Some(site) = &self.site {
            kolo.args(["--head", &site.address.to_string()]);
            kolo.arg("--credentials").arg(site.admin());
            kolo.args(["--connect-timeout", "30"]);
        }
        kolo.args(["run", "-n", "2", "--cpus-per-worker", "0.1"]);
        if self.site.is_some() {
            kolo.args(["--nnodes", "2", "--nproc-per-node", "1"]);
        }
        kolo.args(["--grace", "60", "--name"]);
        kolo.arg(dir.path().file_name().unwrap());
        kolo.arg("--env");
        kolo.arg(format!("DIR={}", dir.path().display()));
        kolo.args(["--", "sh", "-c", wrapper, "sh"]).arg(&program);
        Run {
            wrapper: name,
            kolo: Daemon::spawn(kolo),
            dir,
        }
    }

    /// What the head says of a job.
    fn job_of(&self, run: &Run) -> serde_json::Value {
        let jobs = self.site().json(&["jobs"]);
        let mut jobs = jobs.as_array().unwrap().iter();
        jobs.find(|job| job["name"] == run.name()).unwrap().clone()
    }

    /// The nodes that the ranks of a job have, and their wardens.
    fn places_of(&self, run: &Run) -> [(usize, i32); 2] {
        let job = self.job_of(run);
        [0, 1].map(|rank| {
            let worker = &job["workers"][rank];
            let pid = worker["pid"].as_u64().unwrap();
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            let mut after_name = stat.rsplit(')').next().unwrap().split_whitespace();
            let warden = after_name.nth(1).unwrap().parse().unwrap();
            let is_it = |daemon: &Daemon| daemon.ready()["node"] == worker["node"];
            let node = self.nodes.iter().position(is_it).unwrap();
            (node, warden)
        })
    }

    /// Ends a job behind every wrapper in this way, and looks at what is left.
    fn try_all(&self, end: impl Fn(&[Run]) -> Vec<Expected>) {
        let mut runs: Vec<Run> = WRAPPERS.map(|wrapper| self.start(wrapper)).into();
        for run in &runs {
            run.kolo.says("ready 0");
            run.kolo.says("ready 1");
            // The programs may run before the head has heard of both of them.
            if self.site.is_some() {
                until("the job is healthy", || {
                    self.job_of(run)["state"] == "healthy"
                });
            }
        }
        let expected = end(&runs);
        assert_eq!(expected.len(), runs.len());
        for (run, expected) in runs.iter_mut().zip(expected) {
            let name = run.wrapper;
            let status = run.kolo.end();
            let text = run.kolo.printed.text();
            if let Some(code) = expected.code {
                assert_eq!(status.code(), Some(code), "{name}: {text}");
            }
            let pids = std::fs::read_to_string(run.path("pids")).unwrap();
            assert_eq!(pids.lines().count(), 4, "{name}: {pids}");
            for pid in pids.lines() {
                until(&format!("{pid} is gone, behind {name}"), || {
                    !is_running(pid)
                });
            }
            for (rank, expected) in expected.saved.into_iter().enumerate() {
                let saved = std::fs::read_to_string(run.path(&format!("saved.{rank}"))).ok();
                let saved = saved.as_deref().map(str::trim_end);
                let logs: Vec<String> = self.nodes.iter().map(|it| it.printed.text()).collect();
                let logs = logs.join("\n");
                assert_eq!(saved, expected, "rank {rank} behind {name}: {text}\n{logs}");
            }
        }
    }

    /// As [`Bed::try_all`], with something that happens to one job after the other.
    fn try_each(&self, end: impl Fn(&Run) -> Expected) {
        self.try_all(|runs| runs.iter().map(&end).collect());
    }

    /// The ways that do the daemons no harm.
    fn end_by_itself_and_by_the_launcher(&self) {
        self.try_each(|run| {
            run.end(0, 0);
            run.end(1, 0);
            expect([None, None], 0)
        });
        self.try_each(|run| {
            run.end(1, 3);
            expect([Some("TERM"), None], 3)
        });
        for (signal, code, first) in [
            (Signal::TERM, 143, "TERM"),
            (Signal::INT, 130, "INT"),
            (Signal::ALARM, 142, "TERM"),
        ] {
            self.try_each(|run| {
                // That is not an end.
                run.kolo.signal(Signal::USR1);
                run.kolo.says("checkpoint 0");
                run.kolo.says("checkpoint 1");
                run.kolo.signal(signal);
                expect([Some(first), Some(first)], code)
            });
        }
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

/// The ranks at lost places can't save.
fn without<T>(places: &[[T; 2]], is_lost: impl Fn(&T) -> bool) -> Vec<Expected> {
    let saved = |place: &T| (!is_lost(place)).then_some("TERM");
    let each = places.iter();
    each.map(|[one, other]| expect([saved(one), saved(other)], 1))
        .collect()
}

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
        let after_name = stat.rsplit(')').next();
        !after_name.is_some_and(|rest| rest.starts_with(" Z"))
    })
}

#[test]
fn jobs_on_this_machine_end() {
    let bed = Bed::local();
    bed.end_by_itself_and_by_the_launcher();
    // Head and nodes are in the launcher: nobody is left to give the workers time.
    bed.try_each(|run| {
        run.kolo.signal(Signal::KILL);
        expect([None, None], None)
    });
}

#[test]
fn jobs_on_a_cluster_end() {
    let bed = Bed::cluster();
    bed.end_by_itself_and_by_the_launcher();
    // An operator stops them.
    bed.try_each(|run| {
        let job = bed.job_of(run);
        bed.site().operator(&["stop", job["job"].as_str().unwrap()]);
        expect(BOTH, None)
    });
    bed.try_each(|run| {
        run.kolo.signal(Signal::KILL);
        expect(BOTH, None)
    });
}

#[test]
fn the_warden_of_a_rank_is_killed() {
    let bed = Bed::cluster();
    bed.try_all(|runs| {
        let places: Vec<_> = runs.iter().map(|run| bed.places_of(run)).collect();
        let killed: BTreeSet<i32> = places.iter().map(|[_, (_, warden)]| *warden).collect();
        for warden in &killed {
            kill_process(Pid::from_raw(*warden).unwrap(), Signal::KILL).unwrap();
        }
        without(&places, |(_, warden)| killed.contains(warden))
    });
}

#[test]
fn the_node_of_a_rank_is_drained() {
    let bed = Bed::cluster();
    bed.try_all(|runs| {
        // A barrier before the checkpoint: no rank may have its notice later than another.
        for run in runs {
            std::fs::write(run.path("together"), "").unwrap();
        }
        let [_, (node, _)] = bed.places_of(&runs[0]);
        bed.nodes[node].signal(Signal::TERM);
        runs.iter().map(|_| expect(BOTH, None)).collect()
    });
}

#[test]
fn the_head_is_killed() {
    // The launcher ends without it, and nodes end a job that has neither.
    let bed = Bed::cluster();
    bed.try_all(|runs| {
        bed.site().head.signal(Signal::KILL);
        runs.iter().map(|_| expect(BOTH, 4)).collect()
    });
}

#[test]
fn the_node_of_a_rank_is_killed() {
    let bed = Bed::cluster();
    bed.try_all(|runs| {
        let places: Vec<_> = runs.iter().map(|run| bed.places_of(run)).collect();
        let [_, (lost, _)] = places[0];
        bed.nodes[lost].signal(Signal::KILL);
        without(&places, |(node, _)| *node == lost)
    });
}
