//! Ranks in processes of their own, and what is left in a process.

use super::*;
use kolo_transport::RandomId as _;

/// A rank in a process, and what it says.
pub(crate) struct Process {
    pub(crate) child: Child,
    pub(crate) output: BufReader<ChildStdout>,
}

impl Process {
    pub(crate) fn start(given: &str, inherited: Vec<RawFd>) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["child", "--exact", "--nocapture"])
            .env("KOLO_TEST_CHILD", given)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let inherit = move || {
            for fd in &inherited {
                // SAFETY: the parent keeps it open until the child runs.
                let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
                rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
            }
            Ok(())
        };
        // SAFETY: between fork and exec it makes system calls alone.
        unsafe { command.pre_exec(inherit) };
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    pub(crate) fn tell(&mut self, line: &str) {
        let stdin = self.child.stdin.as_mut().unwrap();
        // One that was killed reads nothing.
        drop(writeln!(stdin, "{line}"));
    }

    /// The next line that is for this test; empty if there is none.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            if let Some(said) = line.trim().strip_prefix("kolo: ") {
                return said.to_owned();
            }
            line.clear();
        }
        String::new()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It has ended, unless the test failed.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Credentials of all ranks, in files.
pub(crate) struct Certified {
    pub(crate) dir: PathBuf,
}

impl Certified {
    pub(crate) const MOST: u32 = 4;

    pub(crate) fn new(lanes: Lanes) -> Self {
        let dir =
            std::env::temp_dir().join(format!("kolo-test-kills-{}-{lanes:?}", std::process::id()));
        let authority = Authority::create(ClusterId::random()).unwrap();
        std::fs::create_dir_all(&dir).unwrap();
        let certified = Self { dir };
        for slot in 0..Self::MOST {
            let name = Identity::worker_name(JOB, kolo_transport::ids::Slot(slot));
            let credentials = authority.issue(Role::Worker, &name).unwrap();
            credentials.save(&certified.of(slot)).unwrap();
        }
        certified
    }

    pub(crate) fn of(&self, slot: u32) -> PathBuf {
        self.dir.join(slot.to_string())
    }
}

impl Drop for Certified {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.dir));
    }
}

/// The ranks in processes of their own, by rank, and this one's way to them.
pub(crate) fn start(kill: &Kill, certified: Option<&Certified>) -> (HashMap<u32, Process>, Seat) {
    let Kill {
        lanes, world, own, ..
    } = *kill;
    let place = Lanes::ALL.iter().position(|other| *other == lanes).unwrap();
    let hasty = u32::from(kill.hasty);
    let Plan {
        seed,
        victim,
        simple,
        long,
    } = kill.plan;
    let plan = format!("{seed},{victim},{},{}", u32::from(simple), u32::from(long));
    let given = |rank: u32| format!("{place},{rank},{world},{hasty},{plan}");
    let ranks = (0..world).filter(|rank| *rank != own);
    let mut processes = HashMap::new();
    let (way, addresses) = if let Some(certified) = certified {
        let credentials = |rank| certified.of(slot_of(rank, world).0);
        let mut addresses = Vec::new();
        let (door, runtime) = host(&Credentials::load(&credentials(own)).unwrap());
        for rank in ranks {
            let given = format!("{},{}", given(rank), credentials(rank).display());
            processes.insert(rank, Process::start(&given, Vec::new()));
        }
        for rank in 0..world {
            addresses.push(match processes.get_mut(&rank) {
                Some(process) => process.line().parse().unwrap(),
                None => door.address(),
            });
        }
        let all: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        for process in processes.values_mut() {
            process.tell(&all.join(" "));
        }
        (Way::Network(door, runtime), addresses)
    } else {
        let mut ends: HashMap<(u32, u32), Vec<UnixStream>> = HashMap::new();
        for low in 0..world {
            for high in low + 1..world {
                for _ in 0..LINKS {
                    let (one, other) = UnixStream::pair().unwrap();
                    ends.entry((low, high)).or_default().push(one);
                    ends.entry((high, low)).or_default().push(other);
                }
            }
        }
        for rank in ranks {
            let fds: Vec<RawFd> = (0..world)
                .filter(|peer| *peer != rank)
                .flat_map(|peer| &ends[&(rank, peer)])
                .map(AsRawFd::as_raw_fd)
                .collect();
            let numbers: Vec<String> = fds.iter().map(ToString::to_string).collect();
            let given = format!("{},{}", given(rank), numbers.join(","));
            processes.insert(rank, Process::start(&given, fds));
        }
        let mine = ends
            .into_iter()
            .filter(|((from, _), _)| *from == own)
            .map(|((_, to), sockets)| (to, sockets))
            .collect();
        (Way::Sockets(mine), Vec::new())
    };
    (processes, sit(own, world, lanes, way, &addresses))
}

pub(crate) fn fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// What a process makes once, with its first runtime, and a thread when it blocks for the first time.
pub(crate) fn warm() {
    drop(Runtime::new().unwrap());
    kolo_transport::direct::block_on(|| None, || false, async {});
}

/// But for those of tests, which are named after them.
pub(crate) fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")));
    let is_test = |name: &String| name.starts_with("a_rank") || name.starts_with("child");
    // One that has ended meanwhile has no name.
    names.flatten().filter(|name| !is_test(name)).count()
}

/// Waits until there are no more descriptors and threads than before: runtimes end in the background.
pub(crate) fn settled(before: (usize, usize)) {
    let begun = Instant::now();
    while fds() > before.0 || threads() > before.1 {
        let left = (fds(), threads());
        assert!(
            begun.elapsed() < LONG / 2,
            "descriptors and threads: {before:?} before, {left:?} after"
        );
        std::thread::sleep(Duration::from_millis(2));
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("memfd:kolo-"), "shared memory is left");
}
