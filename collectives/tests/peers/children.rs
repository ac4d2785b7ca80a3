//! Ranks in processes of their own, which this test starts of itself.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, ChildStdout, Command, Stdio};

use super::*;

fn fds_and_threads() -> [usize; 2] {
    let count = |path| std::fs::read_dir(path).unwrap().count();
    [count("/proc/self/fd"), count("/proc/self/task")]
}

/// What a rank in a process of its own does, by name. Returns what it says.
#[test]
fn child() {
    let Ok(given) = std::env::var("KOLO_TEST_CHILD") else {
        return;
    };
    let mut given = given.split(',');
    let mut next = || given.next().unwrap();
    let (what, path) = (next(), PathBuf::from(next()));
    let mut number = || next().parse::<u32>().unwrap();
    let (rank, world) = (Rank(number()), number());
    let mut next = || given.next().unwrap();
    match what {
        "works" => {
            // What a process makes once, with its first runtime.
            drop(tokio::runtime::Runtime::new().unwrap());
            // And a thread when it blocks for the first time.
            kolo_transport::direct::block_on(|| None, || false, async {});
            let before = fds_and_threads();
            let comm = Local::in_folder(&path).join(rank, world).unwrap();
            work(&comm);
            let records = comm.records();
            let shm = |record: &Record| record.lanes.names().eq(["shm"]);
            assert!(records.iter().any(shm), "{records:?}");
            drop(comm);
            assert_eq!(fds_and_threads(), before, "nothing is left behind");
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            assert!(!maps.contains("kolo-arena"), "shared memory is left");
        }
        "hangs" => {
            let comm = Local::in_folder(&path).join(rank, world).unwrap();
            comm.barrier().unwrap();
            println!("\nkolo: there");
            std::thread::sleep(LONG);
            panic!("it was not killed");
        }
        "exhausts" => {
            let comm = Local::in_folder(&path).join(rank, world).unwrap();
            descriptors::exhaust(&comm, next() == "named");
        }
        "leaves" => {
            let (way, work, dies) = (next(), next(), next().parse().unwrap());
            let comm = if way == "local" {
                Local::in_folder(&path).join(rank, world).unwrap()
            } else {
                let table: Vec<Peer> = (0..world)
                    .map(|rank| Peer::new(format!("host-{rank}"), next().parse().unwrap()))
                    .collect();
                let credentials = Credentials::load(&path).unwrap();
                let lane = if way == "tls" {
                    LaneChoice::Tls
                } else {
                    LaneChoice::Quic
                };
                Network::new(credentials).lane(lane).join(&table).unwrap()
            };
            leaving::leave(&comm, work, dies);
        }
        "sends and ends" => {
            // No operation is a farewell here: what is on its way is delivered all the same.
            let table: Vec<Peer> = (0..world)
                .map(|_| Peer::new("host", next().parse().unwrap()))
                .collect();
            let credentials = Credentials::load(&path).unwrap();
            let network = Network::new(credentials).lane(LaneChoice::Quic);
            let comm = network.join(&table).unwrap();
            comm.set_timeout(LONG);
            let mut data = vec![rank.0; 3 << 20];
            comm.broadcast(&mut data, Rank(0)).unwrap();
            assert!(data.iter().all(|value| *value == 0));
            // As much as a link takes before anything of it has come.
            let data = &data[..180_000];
            if rank.0 == world - 1 {
                comm.send(data, Rank(1)).unwrap();
            } else if rank.0 == 1 {
                assert_eq!(comm.receive::<u32>(Rank(world - 1)).unwrap(), data);
            }
            drop(comm);
            println!("\nkolo: done");
            std::process::exit(0);
        }
        other => panic!("{other} is nothing that a child does"),
    }
    println!("\nkolo: done");
}

/// A rank in a process, and what it says.
pub(crate) struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Process {
    pub(crate) fn start(given: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let command = command
            .args(["children::child", "--exact", "--nocapture"])
            .env("KOLO_TEST_CHILD", given)
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    /// Waits until it says this.
    pub(crate) fn says(&mut self, expected: &str) {
        let said = self
            .output
            .by_ref()
            .lines()
            .any(|line| line.unwrap() == expected);
        assert!(said, "{expected}");
    }

    /// The next line that begins with this.
    pub(crate) fn line(&mut self, begins: &str) -> String {
        let mut lines = self.output.by_ref().lines().map(Result::unwrap);
        lines
            .find(|line| line.starts_with(begins))
            .unwrap_or_else(|| panic!("{begins}"))
    }

    /// Waits for its end.
    pub(crate) fn ends_well(mut self) {
        self.says("kolo: done");
        std::io::copy(&mut self.output, &mut std::io::sink()).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

pub(crate) fn processes(what: &str, folder: &Folder, world: u32) -> Vec<Process> {
    (0..world)
        .map(|rank| Process::start(&format!("{what},{},{rank},{world}", folder.0.display())))
        .collect()
}
