//! Ranks in processes of their own, of which one is killed (`kill -9`) at any moment, over every kind of lane. The test's own
//! process is one of the survivors, again and again: what a loss leaves behind would add up in it.

#![allow(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    clippy::float_cmp
)]

mod common;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::network::{NetworkConnector, member, serve, slot_of};
use common::{GENERATION, JOB, LONG, hello};
use kolo_collectives::lane::{Connecting, LaneChoice, NetworkLanes, OneHost, UnixLane};
use kolo_collectives::{CollectiveError, Communicator, Connector, Lane, LaneError, ReduceOp};
use kolo_transport::ids::{ClusterId, Rank};
use kolo_transport::wire::GenerationTable;
use kolo_transport::{
    Authority, Credentials, Endpoint, EndpointConfig, Identity, Role, TlsListener, TransportRuntime,
};
use tokio::runtime::Runtime;

/// What ranks take at most to end when their time is up: they ask each other first.
const ANSWERS: Duration = Duration::from_secs(3);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lanes {
    Shared,
    Unix,
    Quic,
    Tls,
}

impl Lanes {
    const ALL: [Self; 4] = [Self::Shared, Self::Unix, Self::Quic, Self::Tls];

    fn is_network(self) -> bool {
        matches!(self, Self::Quic | Self::Tls)
    }

    /// Longer than it takes to see that a process is gone. In shared memory all ranks have links to all. Elsewhere a rank may
    /// wait for a link that the one that is gone would make, and this has to pass: only the control plane, which is not
    /// here, could tell it more.
    fn limit(self) -> Duration {
        Duration::from_secs(if self == Self::Shared { 8 } else { 4 })
    }
}

/// How a rank reaches the others, before it has a communicator.
enum Way {
    /// By peer.
    Sockets(HashMap<u32, UnixStream>),
    Network(Endpoint, TlsListener),
}

/// A rank at work. Fields drop in order.
struct Seat {
    comm: Communicator,
    network: Option<(Endpoint, TlsListener)>,
    _runtime: Option<Runtime>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Some((endpoint, listener)) = &self.network {
            listener.close();
            endpoint.close(kolo_transport::CloseCode::Done, "the test ends");
        }
    }
}

/// The sockets of one rank to lower ones.
#[derive(Debug)]
struct Sockets {
    rank: Rank,
    shares: bool,
    left: Mutex<HashMap<u32, UnixStream>>,
}

impl Connector for Sockets {
    fn connect(&self, peer: Rank) -> Connecting {
        let socket = self.left.lock().unwrap().remove(&peer.0);
        let own = hello(self.rank);
        Box::pin(async move {
            let socket = socket.ok_or_else(|| LaneError::Unreachable {
                reason: "the socket was used before".to_owned(),
            })?;
            let lane = UnixLane::open(socket, &own, peer, LONG).await?;
            Ok(Box::new(lane) as Box<dyn Lane>)
        })
    }

    fn is_one_host(&self, _ranks: &[Rank]) -> Option<OneHost> {
        let shares = self.shares;
        Some(Box::pin(async move { shares }))
    }
}

fn sit(rank: u32, world: u32, lanes: Lanes, way: Way, addresses: &[SocketAddr]) -> Seat {
    match way {
        Way::Sockets(sockets) => {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .unwrap();
            let (lower, higher) = sockets.into_iter().partition(|(peer, _)| *peer < rank);
            let connector = Arc::new(Sockets {
                rank: Rank(rank),
                shares: lanes == Lanes::Shared,
                left: Mutex::new(lower),
            });
            let handle = runtime.handle().clone();
            let comm =
                Communicator::new(Rank(rank), world, GENERATION, JOB, connector, handle).unwrap();
            let higher: HashMap<u32, UnixStream> = higher;
            for (peer, socket) in higher {
                let acceptor = comm.acceptor();
                runtime.spawn(async move {
                    let own = hello(Rank(rank));
                    if let Ok(lane) = UnixLane::open(socket, &own, Rank(peer), LONG).await {
                        drop(acceptor.accept(Rank(peer), Box::new(lane)));
                    }
                });
            }
            Seat {
                comm: comm.with_timeout(lanes.limit()),
                network: None,
                _runtime: Some(runtime),
            }
        }
        Way::Network(endpoint, listener) => {
            let table = Arc::new(GenerationTable {
                job: JOB,
                generation: GENERATION,
                members: (0..)
                    .zip(addresses)
                    .map(|(rank, address)| member(rank, world, *address))
                    .collect(),
            });
            let choice = match lanes {
                Lanes::Quic => LaneChoice::Quic,
                _ => LaneChoice::Tls,
            };
            let connector = NetworkConnector {
                lanes: Arc::new(NetworkLanes::new(endpoint.clone(), choice)),
                table: Arc::clone(&table),
                hello: hello(Rank(rank)),
            };
            let runtime = endpoint.runtime().clone();
            let comm = Communicator::new(
                Rank(rank),
                world,
                GENERATION,
                JOB,
                Arc::new(connector),
                runtime.handle().clone(),
            )
            .unwrap()
            .with_timeout(lanes.limit());
            serve(&runtime, (&endpoint, &listener), &table, &comm);
            Seat {
                comm,
                network: Some((endpoint, listener)),
                _runtime: None,
            }
        }
    }
}

fn endpoint(credentials: &Credentials) -> (Endpoint, TlsListener) {
    let runtime = TransportRuntime::new(1).unwrap();
    let config = EndpointConfig {
        // So that the test does not take minutes.
        idle_timeout: Duration::from_millis(900),
        keep_alive: Duration::from_millis(200),
        ..EndpointConfig::default()
    };
    // Somebody may have the TCP port.
    loop {
        let endpoint = Endpoint::bind(&runtime, credentials.clone(), config.clone()).unwrap();
        if let Ok(listener) = endpoint.listen_tls() {
            return (endpoint, listener);
        }
    }
}

/// Works until a rank is lost. Returns the error and how many operations went well before.
fn work(comm: &Communicator, mut seed: u64, ready: impl FnOnce()) -> (CollectiveError, u32) {
    let (rank, world) = (comm.rank().0, comm.world_size());
    let mut ready = Some(ready);
    let mut operations = 0_u32;
    loop {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let length = [1, 40, 3000, 60_000, 400_000][(seed >> 33) as usize % 5];
        let value = (operations % 5 + rank) as f32;
        let mut data = vec![value; length];
        let sum = (operations % 5 * world + world * (world - 1) / 2) as f32;
        let root = operations % world;
        let of_root = (operations % 5 + root) as f32;
        let (result, expected) = match (seed >> 40) % 6 {
            0 => (comm.barrier(), value),
            1 => (comm.broadcast(&mut data, Rank(root)), of_root),
            2 => {
                let handle = comm.start().all_reduce(data, ReduceOp::Sum);
                match handle.wait_or_reclaim() {
                    Ok(all) => {
                        data = all;
                        (Ok(()), sum)
                    }
                    Err(failure) => {
                        data = failure.input.unwrap();
                        (Err(failure.error), value)
                    }
                }
            }
            3 => {
                let mine = &data[..=length / 4];
                let result = comm.all_gather_varcount(&mine[..mine.len() - rank as usize % 2]);
                (result.map(drop), value)
            }
            _ => (comm.all_reduce(&mut data, ReduceOp::Sum), sum),
        };
        let expected = if result.is_ok() { expected } else { value };
        assert!(data.iter().all(|value| *value == expected), "{result:?}");
        if let Err(error) = result {
            return (error, operations);
        }
        operations += 1;
        if let Some(ready) = ready.take() {
            ready();
        }
    }
}

fn fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// What a process makes once, with its first runtime.
fn warm() {
    drop(Runtime::new().unwrap());
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Of this process, in bytes.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

/// Waits until there are no more descriptors and threads than before: runtimes end in the background.
fn settled(before: (usize, usize)) {
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
    assert!(!maps.contains("kolo-arena"), "shared memory is left");
}

fn input() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line
}

/// One rank, in a process of its own. It works until a rank is lost, and says which.
#[test]
fn child() {
    let Ok(given) = std::env::var("KOLO_TEST_CHILD") else {
        return;
    };
    let mut given = given.split(',');
    let mut next = || given.next().unwrap();
    let lanes = Lanes::ALL[next().parse::<usize>().unwrap()];
    let mut number = || next().parse::<u64>().unwrap();
    let (rank, world, seed) = (number() as u32, number() as u32, number());
    warm();
    let before;
    let (way, addresses) = if lanes.is_network() {
        let credentials = Credentials::load(Path::new(next())).unwrap();
        before = (fds(), threads());
        let (endpoint, listener) = endpoint(&credentials);
        println!("\nkolo: {}", endpoint.local_addr());
        let addresses = input()
            .split_whitespace()
            .map(|address| address.parse().unwrap())
            .collect();
        (Way::Network(endpoint, listener), addresses)
    } else {
        let sockets: HashMap<u32, UnixStream> = (0..world)
            .filter(|peer| *peer != rank)
            .map(|peer| {
                let fd = next().parse::<RawFd>().unwrap();
                // SAFETY: the parent made this descriptor for this process, and names it once.
                let socket = unsafe { OwnedFd::from_raw_fd(fd) };
                (peer, UnixStream::from(socket))
            })
            .collect();
        // The sockets go, too.
        before = (fds() - sockets.len(), threads());
        println!();
        (Way::Sockets(sockets), Vec::new())
    };
    let seat = sit(rank, world, lanes, way, &addresses);
    println!("kolo: begun");
    let (error, operations) = work(&seat.comm, seed, || println!("kolo: ready"));
    let lost = error.culprit_rank().map_or(-1, |rank| i64::from(rank.0));
    println!("kolo: lost {lost} after {operations}: {error}");
    // The others see this one's end only when all have said what they saw.
    input();
    drop(seat);
    settled(before);
    println!("kolo: clean");
    std::process::exit(0);
}

/// A rank in a process, and what it says.
struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(given: &str, inherited: Vec<RawFd>) -> Self {
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

    fn tell(&mut self, line: &str) {
        let stdin = self.child.stdin.as_mut().unwrap();
        // One that was killed reads nothing.
        drop(writeln!(stdin, "{line}"));
    }

    /// The next line that is for this test; empty if there is none.
    fn line(&mut self) -> String {
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
struct Certified {
    dir: PathBuf,
}

impl Certified {
    const MOST: u32 = 4;

    fn new(lanes: Lanes) -> Self {
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

    fn of(&self, slot: u32) -> PathBuf {
        self.dir.join(slot.to_string())
    }
}

impl Drop for Certified {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.dir));
    }
}

#[derive(Debug, Clone, Copy)]
struct Kill {
    lanes: Lanes,
    world: u32,
    victim: u32,
    /// This process's rank.
    own: u32,
    /// The victim may not have come so far that the others have a link to it.
    early: bool,
    moment: Duration,
    seed: u64,
}

/// The ranks in processes of their own, by rank, and this one's way to them.
fn start(kill: &Kill, certified: Option<&Certified>) -> (HashMap<u32, Process>, Seat) {
    let Kill {
        lanes, world, own, ..
    } = *kill;
    let place = Lanes::ALL.iter().position(|other| *other == lanes).unwrap();
    let given = |rank: u32| format!("{place},{rank},{world},{}", kill.seed);
    let ranks = (0..world).filter(|rank| *rank != own);
    let mut processes = HashMap::new();
    let (way, addresses) = if let Some(certified) = certified {
        let credentials = |rank| certified.of(slot_of(rank, world).0);
        let mut addresses = Vec::new();
        let (endpoint, listener) = endpoint(&Credentials::load(&credentials(own)).unwrap());
        for rank in ranks {
            let given = format!("{},{}", given(rank), credentials(rank).display());
            processes.insert(rank, Process::start(&given, Vec::new()));
        }
        for rank in 0..world {
            addresses.push(match processes.get_mut(&rank) {
                Some(process) => process.line().parse().unwrap(),
                None => endpoint.local_addr(),
            });
        }
        let all: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        for process in processes.values_mut() {
            process.tell(&all.join(" "));
        }
        (Way::Network(endpoint, listener), addresses)
    } else {
        let mut ends: HashMap<(u32, u32), UnixStream> = HashMap::new();
        for low in 0..world {
            for high in low + 1..world {
                let (one, other) = UnixStream::pair().unwrap();
                ends.insert((low, high), one);
                ends.insert((high, low), other);
            }
        }
        for rank in ranks {
            let fds: Vec<RawFd> = (0..world)
                .filter(|peer| *peer != rank)
                .map(|peer| ends[&(rank, peer)].as_raw_fd())
                .collect();
            let numbers: Vec<String> = fds.iter().map(ToString::to_string).collect();
            let given = format!("{},{}", given(rank), numbers.join(","));
            processes.insert(rank, Process::start(&given, fds));
        }
        let mine = ends
            .into_iter()
            .filter(|((from, _), _)| *from == own)
            .map(|((_, to), socket)| (to, socket))
            .collect();
        (Way::Sockets(mine), Vec::new())
    };
    (processes, sit(own, world, lanes, way, &addresses))
}

fn kill_one(kill: &Kill, certified: Option<&Certified>) {
    let Kill { victim, own, .. } = *kill;
    let (mut processes, seat) = start(kill, certified);
    std::thread::scope(|scope| {
        let comm = &seat.comm;
        let working = scope.spawn(move || work(comm, kill.seed, || ()));
        for process in processes.values_mut() {
            assert_eq!(process.line(), "begun", "{kill:?}");
            if !kill.early {
                assert_eq!(process.line(), "ready", "{kill:?}");
            }
        }
        std::thread::sleep(kill.moment);
        processes.get_mut(&victim).unwrap().child.kill().unwrap();
        let begun = Instant::now();
        let mut reports = Vec::new();
        for (rank, process) in processes.iter_mut().filter(|(rank, _)| **rank != victim) {
            let mut said = process.line();
            if said == "ready" {
                said = process.line();
            }
            reports.push((*rank, said));
        }
        let (error, operations) = working.join().unwrap();
        let lost = error.culprit_rank().map_or(-1, |rank| i64::from(rank.0));
        reports.push((own, format!("lost {lost} after {operations}: {error}")));
        let right = format!("lost {victim} after");
        assert!(
            reports.iter().all(|(_, said)| said.starts_with(&right)),
            "{kill:?}: {reports:#?}"
        );
        let took = begun.elapsed();
        let (limit, shared) = (kill.lanes.limit(), kill.lanes == Lanes::Shared);
        assert!(took < limit + ANSWERS, "{kill:?}: {took:?}");
        // Not even by the deadline, but for who had no link yet.
        assert!(
            took < limit || operations == 0 || !shared,
            "{kill:?}: {took:?}, {reports:#?}"
        );
    });
    for (rank, process) in &mut processes {
        process.tell("enough");
        if *rank != victim {
            assert_eq!(process.line(), "clean", "{kill:?}, rank {rank}");
        }
        let status = process.child.wait().unwrap();
        assert_eq!(status.success(), *rank != victim, "{kill:?}, rank {rank}");
    }
}

/// One after the other: descriptors and threads are counted.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn check(lanes: Lanes) {
    let _alone = alone();
    // A thorough run has 200.
    let kills = std::env::var("KOLO_TEST_KILLS")
        .ok()
        .and_then(|kills| kills.parse().ok())
        .unwrap_or(if lanes.is_network() { 8_u64 } else { 25 });
    let certified = lanes.is_network().then(|| Certified::new(lanes));
    let mut random = u64::from(std::process::id()) | 1;
    warm();
    let before = (fds(), threads());
    let mut memory = 0;
    for number in 0..kills {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let world = 2 + (number % 3) as u32;
        let victim = (random >> 20) as u32 % world;
        let early = number % 4 == 0;
        let moment = Duration::from_micros((random >> 30) % 60_000);
        let kill = Kill {
            lanes,
            world,
            victim,
            own: (victim + 1 + (random >> 50) as u32 % (world - 1)) % world,
            early,
            moment: if early { moment / 8 } else { moment },
            seed: random >> 8,
        };
        kill_one(&kill, certified.as_ref());
        settled(before);
        if number == 20 {
            memory = resident();
        }
    }
    if memory > 0 {
        let grown = resident().saturating_sub(memory);
        println!("{lanes:?}: {grown} bytes more after {kills} kills");
        // 100 KiB for each at most, and what the allocator keeps.
        let most = (16 << 20) + (kills << 10) * 100;
        assert!(
            grown < most,
            "{lanes:?}: {grown} bytes more after {kills} kills"
        );
    }
}

#[test]
fn a_rank_in_shared_memory_that_is_killed_is_named_and_leaves_nothing() {
    check(Lanes::Shared);
}

#[test]
fn a_rank_on_unix_sockets_that_is_killed_is_named_and_leaves_nothing() {
    check(Lanes::Unix);
}

#[test]
fn a_rank_on_quic_that_is_killed_is_named_and_leaves_nothing() {
    check(Lanes::Quic);
}

#[test]
fn a_rank_on_tls_that_is_killed_is_named_and_leaves_nothing() {
    check(Lanes::Tls);
}
