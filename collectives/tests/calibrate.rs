//! Measuring links, and choosing by what was found.

#![allow(clippy::unwrap_used)]

mod common;

use kolo_transport::RandomId as _;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Group, JOB, Kind, LONG};
use kolo_collectives::peers::{Authority, ClusterId, Credentials, Local, Network, Peer, issue};
use kolo_collectives::schedule::{Algorithm, Model, Tuning};
use kolo_collectives::{Calibration, CollectiveError, Communicator, Layout, Rank, ReduceOp};

const KINDS: [Kind; 5] = [
    Kind::Memory,
    Kind::Unix,
    Kind::Ring,
    Kind::Shared,
    Kind::Tls,
];

/// All bits.
fn bits(found: &Calibration) -> Vec<u64> {
    let Model {
        inside,
        across,
        gamma,
    } = found.model;
    let numbers = [
        inside.alpha,
        inside.overhead,
        inside.beta,
        across.alpha,
        across.overhead,
        across.beta,
        gamma,
    ];
    let pairs = [found.pairs_inside, found.pairs_across];
    let numbers = numbers.into_iter().map(f64::to_bits);
    numbers.chain(pairs.map(u64::from)).collect()
}

fn spread(comm: &Communicator, hosts: &[u32]) {
    comm.set_layout(Layout::of_hosts(hosts)).unwrap();
}

/// Operations of many sizes, so that all algorithms that are chosen agree.
fn work(comm: &Communicator) {
    let world = f64::from(comm.world_size());
    for power in 0..20 {
        let mut data = vec![1.0_f64; 3 << power >> 1];
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert!(data.iter().all(|value| (value - world).abs() < 1e-9));
        comm.broadcast(&mut data, Rank(0)).unwrap();
    }
}

#[test]
fn all_ranks_find_the_same_and_choose_by_it() {
    for kind in KINDS {
        for (hosts, pairs) in [
            (&[0, 0][..], (1, 0)),
            (&[0, 1], (0, 1)),
            (&[0, 0, 1, 2, 2], (2, 2)),
        ] {
            let group = Group::new(kind, hosts.len() as u32);
            let found = group.run(|comm| {
                spread(comm, hosts);
                let begun = Instant::now();
                let found = comm.calibrate().unwrap();
                assert!(begun.elapsed() < LONG / 2);
                assert_eq!(comm.tuning().model, found.model);
                work(comm);
                found
            });
            assert!(
                found.iter().all(|other| bits(other) == bits(&found[0])),
                "{kind:?}: {found:?}"
            );
            let found = found[0];
            assert_eq!((found.pairs_inside, found.pairs_across), pairs, "{kind:?}");
            let old = Model::default();
            assert_eq!(found.model.inside == old.inside, pairs.0 == 0, "{kind:?}");
            assert_eq!(found.model.across == old.across, pairs.1 == 0, "{kind:?}");
            assert!(found.model.gamma > 0.0 && found.model.inside.beta < 1e-5);
        }
    }
}

#[test]
fn a_world_of_one_rank_has_nothing_to_measure() {
    let group = Group::new(Kind::Memory, 1);
    let found = group.run(|comm| comm.calibrate().unwrap());
    assert_eq!((found[0].pairs_inside, found[0].pairs_across), (0, 0));
}

#[test]
fn what_was_forced_stays_and_groups_that_are_made_after_it_have_the_model() {
    let group = Group::new(Kind::Unix, 3);
    group.run(|comm| {
        let force = Some(Algorithm::Ring);
        let segment = Some(15);
        comm.set_tuning(Tuning {
            force,
            segment,
            ..Tuning::default()
        });
        let all = [Rank(0), Rank(1), Rank(2)];
        let before = comm.group(&all).unwrap().unwrap();
        let found = comm.calibrate().unwrap();
        let tuning = comm.tuning();
        assert_eq!((tuning.force, tuning.segment), (force, segment));
        assert_eq!(tuning.model, found.model);
        let after = comm.group(&all).unwrap().unwrap();
        assert_eq!(after.tuning(), tuning);
        assert_eq!(before.tuning().model, Model::default());
        // It measures for itself.
        let own = before.calibrate().unwrap();
        assert_eq!(before.tuning().model, own.model);
        work(&before);
        work(&after);
        comm.all_reduce(&mut [1_u8; 3], ReduceOp::Max).unwrap();
        let last = comm.records().pop().unwrap();
        assert_eq!(last.operation.algorithm, Algorithm::Ring);
    });
}

#[test]
fn it_may_be_done_again_and_beside_handles_and_in_a_group_of_some() {
    let group = Group::new(Kind::Unix, 4);
    group.run(|comm| {
        let handle = comm.start().all_reduce(vec![1_u32; 1000], ReduceOp::Sum);
        comm.calibrate().unwrap();
        comm.calibrate().unwrap();
        assert_eq!(handle.wait().unwrap(), [4; 1000]);
        let odd = comm.split(Some(comm.rank().0 % 2), 0).unwrap().unwrap();
        let found = odd.calibrate().unwrap();
        assert_eq!(found.pairs_inside, 1);
        // Messages of the caller's own have links of their own.
        if comm.rank().0 < 2 {
            let other = Rank(1 - comm.rank().0);
            let handle = comm.start().send(vec![5_u8], other);
            assert_eq!(comm.receive::<u8>(other).unwrap(), [5]);
            handle.wait().unwrap();
        }
        work(comm);
    });
}

/// Who had another model, as after a failure in the last moment, has the right one after it.
#[test]
fn ranks_whose_models_differ_agree_again() {
    for kind in [Kind::Unix, Kind::Shared] {
        let group = Group::new(kind, 4);
        group.run(|comm| {
            let factor = [1.0, 1000.0, 1.0, 1e-3][comm.rank().index()];
            comm.set_tuning(Tuning {
                model: Model::default().slowed(factor),
                ..Tuning::default()
            });
            let found = comm.calibrate().unwrap();
            assert_eq!(comm.tuning().model, found.model);
            work(comm);
        });
    }
}

#[test]
fn a_rank_that_does_something_else_or_does_not_come_is_named_and_nothing_changes() {
    for kind in [Kind::Unix, Kind::Shared] {
        let group = Group::new(kind, 3);
        let errors = group.run(|comm| {
            if comm.rank() == Rank(2) {
                comm.all_reduce(&mut [1_u8; 4], ReduceOp::Sum).unwrap_err()
            } else {
                comm.calibrate().unwrap_err()
            }
        });
        for error in errors {
            assert!(matches!(error, CollectiveError::Mismatch { .. }), "{error}");
            assert!(error.to_string().contains("calibrate"), "{error}");
        }
        let group = Group::new(kind, 3);
        group.run(|comm| {
            if comm.rank() == Rank(1) {
                return;
            }
            comm.set_timeout(Duration::from_millis(300));
            let error = comm.calibrate().unwrap_err();
            assert_eq!(error.culprit_rank(), Some(Rank(1)), "{error}");
            assert_eq!(comm.tuning(), Tuning::default());
        });
    }
}

#[test]
fn a_rank_that_dies_meanwhile_ends_it_on_all() {
    for kind in [Kind::Unix, Kind::Shared, Kind::Tls] {
        let mut group = Group::new(kind, 4);
        group.run(|comm| {
            spread(comm, &[0, 0, 1, 1]);
            comm.barrier().unwrap();
        });
        let dead = group.members.remove(1);
        drop(dead);
        group.run(|comm| {
            let begun = Instant::now();
            let error = comm.calibrate().unwrap_err();
            assert_eq!(error.culprit_rank(), Some(Rank(1)), "{kind:?}: {error}");
            assert!(begun.elapsed() < LONG / 2);
            assert_eq!(comm.tuning(), Tuning::default());
        });
    }
}

const WORLD: u32 = 4;

/// Takes a place in a folder that was made for it, with credentials of its own if there are addresses.
fn join(rank: u32, folder: &Path, addresses: &str) -> Communicator {
    let hosts = ["a", "b", "a", "b"];
    let comm = if addresses.is_empty() {
        Local::in_folder(folder).join(Rank(rank), WORLD).unwrap()
    } else {
        let peer = |(host, address): (_, &str)| Peer::new(host, address.parse().unwrap());
        let table: Vec<Peer> = hosts
            .into_iter()
            .zip(addresses.split(' '))
            .map(peer)
            .collect();
        let credentials = Credentials::load(&folder.join(rank.to_string())).unwrap();
        Network::new(credentials).join(&table).unwrap()
    };
    comm.set_layout(Layout::of_hosts(&hosts)).unwrap();
    comm.with_timeout(Duration::from_secs(20))
}

/// Measures again and again until a rank is lost. Returns which.
fn until_lost(comm: &Communicator, ready: impl FnOnce()) -> CollectiveError {
    let mut ready = Some(ready);
    loop {
        match comm.calibrate() {
            Ok(found) => assert_eq!(comm.tuning().model, found.model),
            Err(error) => return error,
        }
        if let Some(ready) = ready.take() {
            ready();
        }
    }
}

/// A rank in a process of its own.
#[test]
fn child() {
    let Ok(rank) = std::env::var("KOLO_TEST_RANK") else {
        return;
    };
    let given = |name: &str| std::env::var(format!("KOLO_TEST_{name}")).unwrap();
    let comm = join(
        rank.parse().unwrap(),
        &PathBuf::from(given("FOLDER")),
        &given("ADDRESSES"),
    );
    let lost = until_lost(&comm, || println!("\nkolo: ready"));
    let rank = lost.culprit_rank().map(|rank| rank.0);
    println!("kolo: lost {rank:?}: {lost}");
    // Others see the end of this one when all have said what they saw.
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(rank: u32, folder: &Path, addresses: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["child", "--exact", "--nocapture"])
            .env("KOLO_TEST_RANK", rank.to_string())
            .env("KOLO_TEST_FOLDER", folder)
            .env("KOLO_TEST_ADDRESSES", addresses)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    fn says(&mut self) -> String {
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
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn free_ports() -> String {
    let mut ports = Vec::new();
    while ports.len() < WORLD as usize {
        let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        if let Ok(tcp) = std::net::TcpListener::bind(udp.local_addr().unwrap()) {
            ports.push((udp, tcp));
        }
    }
    let addresses = ports
        .iter()
        .map(|(udp, _)| udp.local_addr().unwrap().to_string());
    addresses.collect::<Vec<_>>().join(" ")
}

#[test]
fn a_rank_that_is_killed_at_any_moment_is_named_by_all() {
    let authority = Authority::create(ClusterId::random()).unwrap();
    for round in 0..16_u32 {
        let name = format!("kolo-test-calibrate-{}-{round}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir(&folder).unwrap();
        let addresses = if round % 2 == 0 {
            String::new()
        } else {
            free_ports()
        };
        for rank in (0..WORLD).filter(|_| !addresses.is_empty()) {
            let credentials = issue(&authority, JOB, Rank(rank)).unwrap();
            credentials.save(&folder.join(rank.to_string())).unwrap();
        }
        let mut processes: Vec<Process> = (1..WORLD)
            .map(|rank| Process::start(rank, &folder, &addresses))
            .collect();
        let comm = join(0, &folder, &addresses);
        std::thread::scope(|scope| {
            let own = scope.spawn(|| until_lost(&comm, || ()));
            for process in &mut processes {
                assert_eq!(process.says(), "ready");
            }
            std::thread::sleep(Duration::from_millis(u64::from(round) * 7));
            let victim = 1 + round / 2 % 3;
            let begun = Instant::now();
            processes[victim as usize - 1].child.kill().unwrap();
            let others = (1..)
                .zip(&mut processes)
                .filter(|(rank, _)| *rank != victim);
            for (_, process) in others {
                let said = process.says();
                let named = said.starts_with(&format!("lost Some({victim})"));
                assert!(named, "round {round}: {said}");
            }
            let error = own.join().unwrap();
            let named = error.culprit_rank() == Some(Rank(victim));
            assert!(named, "{round}: {error}");
            assert!(begun.elapsed() < LONG, "{round}");
        });
        // The other way round its links would wait for the others to end theirs.
        drop((processes, comm));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

/// What a communicator has made for itself, for names and for sends, is no group of its own to the program.
#[test]
fn what_is_set_holds_for_names_and_sends_that_were_used_before() {
    let group = Group::new(Kind::Memory, 3);
    group.run(|comm| {
        let (me, world) = (comm.rank(), comm.world_size());
        let mut algorithms = Vec::new();
        for force in [None, Some(Algorithm::Ring), Some(Algorithm::Binomial)] {
            comm.set_tuning(Tuning {
                force,
                ..Tuning::default()
            });
            // Nobody names anything before all have set it.
            comm.barrier().unwrap();
            let named = comm.named("sum").all_reduce(vec![me.0; 99], ReduceOp::Sum);
            assert_eq!(named.wait().unwrap(), [3; 99]);
            let records = comm.records();
            let sum = records
                .iter()
                .rev()
                .find(|record| record.name.as_str() == "sum");
            algorithms.push(sum.unwrap().operation.algorithm);
            let next = Rank((me.0 + 1) % world);
            let sent = comm.start().send(vec![me.0; 5000], next);
            let before = (me.0 + world - 1) % world;
            let received = comm.receive::<u32>(Rank(before)).unwrap();
            assert_eq!(received, vec![before; 5000]);
            sent.wait().unwrap();
        }
        assert_eq!(algorithms[1..], [Algorithm::Ring, Algorithm::Binomial]);
    });
}
