//! Ranks in processes of their own, of which one is killed (`kill -9`) at any moment, over every kind of lane. The test's own
//! process is one of the survivors, again and again: what a loss leaves behind would add up in it. It also watches the others, as a
//! node does, and says which one was killed.

#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod process;
mod rank;
mod work;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::network::{door, join, slot_of};
use common::{GENERATION, JOB, LONG, hello};
use kolo_collectives::lane::{Connecting, Door, LaneChoice, OneHost, UnixLane};
use kolo_collectives::{
    CollectiveError, Communicator, Connector, GroupId, Handle, Lane, LaneError, ReduceOp,
    SharedBuffer,
};
use kolo_transport::ids::{ClusterId, Rank};
use kolo_transport::{Authority, Credentials, EndpointConfig, Identity, Role, TransportRuntime};
use process::{Certified, Process, fds, settled, start, threads, warm};
use rank::{LINKS, Seat, Way, host, sit};
use tokio::runtime::Runtime;
use work::{Plan, work};

/// The word that a rank was killed comes in this time after the end of its links.
const WORD: Duration = Duration::from_secs(1);

/// The time limit of every operation.
const LIMIT: Duration = Duration::from_secs(8);

/// More than ranks take to end when they have heard of a loss, on a busy host.
const SOON: Duration = Duration::from_secs(4);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lanes {
    Shared,
    Unix,
    Tls,
}

impl Lanes {
    const ALL: [Self; 3] = [Self::Shared, Self::Unix, Self::Tls];

    fn is_network(self) -> bool {
        self == Self::Tls
    }
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
    let (rank, world) = (number() as u32, number() as u32);
    let is_hasty = number() == 1;
    let plan = Plan {
        seed: number(),
        victim: number() as u32,
        simple: number() == 1,
        long: number() == 1,
    };
    warm();
    let before;
    let (way, addresses) = if lanes.is_network() {
        let credentials = Credentials::load(Path::new(next())).unwrap();
        before = (fds(), threads());
        let (door, runtime) = host(&credentials);
        println!("\nkolo: {}", door.address());
        let addresses = input()
            .split_whitespace()
            .map(|address| address.parse().unwrap())
            .collect();
        (Way::Network(door, runtime), addresses)
    } else {
        let mut socket = || {
            let fd = next().parse::<RawFd>().unwrap();
            // SAFETY: the parent made this descriptor for this process, and names it once.
            UnixStream::from(unsafe { OwnedFd::from_raw_fd(fd) })
        };
        let sockets: HashMap<u32, Vec<UnixStream>> = (0..world)
            .filter(|peer| *peer != rank)
            .map(|peer| (peer, (0..LINKS).map(|_| socket()).collect()))
            .collect();
        // The sockets go, too.
        before = (fds() - sockets.len() * LINKS, threads());
        println!();
        (Way::Sockets(sockets), Vec::new())
    };
    let seat = sit(rank, world, lanes, way, &addresses);
    println!("kolo: begun");
    let comm = seat.comm.clone();
    // As a worker hears it from its node.
    let told = std::thread::spawn(move || {
        while let Some(rank) = input().strip_prefix("lost ") {
            comm.rank_lost(Rank(rank.trim().parse().unwrap()), "killed");
        }
    });
    let (error, operations) = work(&seat.comm, plan, || println!("kolo: ready"));
    let lost = error.culprit_rank().map_or(-1, |rank| i64::from(rank.0));
    println!("kolo: lost {lost} after {operations}: {error}");
    if is_hasty {
        std::process::exit(0);
    }
    // The others see this one's end only when all have said what they saw.
    told.join().unwrap();
    drop(seat);
    settled(before);
    println!("kolo: clean");
    std::process::exit(0);
}

#[derive(Debug, Clone, Copy)]
struct Kill {
    lanes: Lanes,
    world: u32,
    /// This process's rank.
    own: u32,
    /// The victim may not have come so far that the others have a link to it.
    early: bool,
    moment: Duration,
    /// The others end their processes as soon as they know, but for this one.
    hasty: bool,
    /// Nobody says which rank was killed.
    untold: bool,
    plan: Plan,
}

/// Returns how long it took until all knew.
fn kill_one(kill: &Kill, certified: Option<&Certified>) -> Duration {
    let (mut processes, seat) = start(kill, certified);
    let took = watch_it(kill, &mut processes, &seat);
    end_all(processes, kill);
    took
}

fn watch_it(kill: &Kill, processes: &mut HashMap<u32, Process>, seat: &Seat) -> Duration {
    let (victim, own) = (kill.plan.victim, kill.own);
    std::thread::scope(|scope| {
        let comm = &seat.comm;
        let working = scope.spawn(move || work(comm, kill.plan, || ()));
        for process in processes.values_mut() {
            assert_eq!(process.line(), "begun", "{kill:?}");
            if !kill.early {
                assert_eq!(process.line(), "ready", "{kill:?}");
            }
        }
        std::thread::sleep(kill.moment);
        processes.get_mut(&victim).unwrap().child.kill().unwrap();
        let begun = Instant::now();
        if !kill.untold {
            for (_, process) in processes.iter_mut().filter(|(rank, _)| **rank != victim) {
                process.tell(&format!("lost {victim}"));
            }
            comm.rank_lost(Rank(victim), "killed");
        }
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
            (reports.iter()).all(|(_, said)| said.starts_with(&right)),
            "{kill:?}: {reports:#?}"
        );
        let took = begun.elapsed();
        let limit = if kill.untold { WORD + SOON } else { SOON };
        assert!(took < limit, "{kill:?}: {took:?}");
        took
    })
}

/// The ranks that are left end and leave nothing.
fn end_all(mut processes: HashMap<u32, Process>, kill: &Kill) {
    let victim = kill.plan.victim;
    for (rank, process) in &mut processes {
        process.tell("enough");
        if *rank != victim && !kill.hasty {
            assert_eq!(process.line(), "clean", "{kill:?}, rank {rank}");
        }
        let status = process.child.wait().unwrap();
        assert_eq!(status.success(), *rank != victim, "{kill:?}, rank {rank}");
    }
}

#[test]
fn a_rank_that_is_killed_is_named_and_leaves_nothing() {
    // A thorough run has 200.
    let given = std::env::var("KOLO_TEST_KILLS").ok();
    let given = given.and_then(|kills| kills.parse::<u64>().ok());
    for lanes in Lanes::ALL {
        let certified = lanes.is_network().then(|| Certified::new(lanes));
        let mut random = u64::from(std::process::id()) | 1;
        warm();
        let before = (fds(), threads());
        let mut times = Vec::new();
        for number in 0..given.unwrap_or(if lanes.is_network() { 6 } else { 10 }) {
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
                own: (victim + 1 + (random >> 50) as u32 % (world - 1)) % world,
                early,
                moment: if early { moment / 8 } else { moment },
                hasty: number % 2 == 1,
                untold: number % 8 == 2,
                plan: Plan {
                    seed: random >> 8,
                    victim,
                    simple: early,
                    long: lanes == Lanes::Shared && number % 6 == 3,
                },
            };
            times.push(kill_one(&kill, certified.as_ref()));
            settled(before);
        }
        times.sort_unstable();
        if let (Some(half), Some(longest)) = (times.get(times.len() / 2), times.last()) {
            println!("{lanes:?}: all knew within {longest:?}, of half within {half:?}");
        }
    }
}
