//! Ready-made ways to the peers, as a program uses them that has nothing else: processes of one host, and ranks on several
//! hosts (of which all are this one, on addresses of their own).

#![allow(clippy::unwrap_used)]

mod children;
mod descriptors;
mod leaving;

use kolo_transport::RandomId as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use children::{Process, processes};
use kolo_collectives::lane::LaneChoice;
use kolo_collectives::peers::{
    Authority, ClusterId, Credentials, Listening, Local, Network, Peer, PeersError, issue,
};
use kolo_collectives::record::Record;
use kolo_collectives::{CollectiveError, Communicator, Generation, JobId, Rank, ReduceOp};

const JOB: JobId = JobId(7);

/// Longer than anything takes.
const LONG: Duration = Duration::from_secs(40);

/// A folder of a test's own, which must be empty at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("kolo-test-peers-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        drop(std::fs::remove_dir_all(&path));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let left = self.files();
        drop(std::fs::remove_dir_all(&self.0));
        if !std::thread::panicking() {
            assert_eq!(left, Vec::<PathBuf>::new(), "nothing is left behind");
        }
    }
}

/// Runs all ranks, on threads.
fn run<T: Send, R: Send>(
    ranks: impl IntoIterator<Item = T>,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let work = &work;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = ranks
            .into_iter()
            .map(|rank| scope.spawn(move || work(rank)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Operations of all ranks and of a group, over all ways there are.
fn work(comm: &Communicator) {
    comm.set_timeout(LONG);
    let (me, world) = (comm.rank().0, comm.world_size());
    let sum = f64::from(world * (world - 1) / 2);
    for length in [1, 1000, 300_000] {
        let mut data = vec![f64::from(me); length];
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert!(data.iter().all(|value| (value - sum).abs() < 1e-9));
    }
    let ends = [Rank(world - 1), Rank(0)];
    if world > 1
        && let Some(ends) = comm.group(&ends).unwrap()
    {
        ends.set_timeout(LONG);
        assert_eq!(ends.all_gather(&[me]).unwrap(), [world - 1, 0]);
    }
    comm.barrier().unwrap();
}

/// The kinds of lanes that operations have used.
fn lanes(comm: &Communicator) -> Vec<&'static str> {
    let lanes = comm.counters().lanes;
    lanes.into_iter().map(|(kind, _)| kind).collect()
}

#[test]
fn processes_of_one_host_meet_in_a_folder_and_leave_nothing_behind() {
    let folder = Folder::new("works");
    for process in processes("works", &folder, 4) {
        process.ends_well();
    }
}

#[test]
fn what_killed_processes_left_is_replaced_by_the_next_generation() {
    let folder = Folder::new("killed");
    let mut killed = processes("hangs", &folder, 3);
    for process in &mut killed {
        process.says("kolo: there");
    }
    drop(killed);
    assert_eq!(folder.files().len(), 3);
    run(0..3, |rank| {
        let local = Local::in_folder(&folder.0).generation(Generation(2));
        work(&local.join(Rank(rank), 3).unwrap());
    });
}

#[test]
fn sockets_may_be_anywhere_and_the_runtime_the_callers() {
    let (one, two) = (Folder::new("table-1"), Folder::new("table-2"));
    let paths = [one.0.join("zero"), two.0.join("one"), one.0.join("two")];
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    run(0..3, |rank| {
        let local = Local::at_sockets(&paths)
            .job(JOB)
            .runtime(runtime.handle().clone());
        work(&local.join(Rank(rank), 3).unwrap());
    });
    let error = Local::at_sockets(&paths).join(Rank(0), 4).unwrap_err();
    assert!(
        error.to_string().contains("3 sockets for 4 ranks"),
        "{error}"
    );
}

#[test]
fn a_rank_that_comes_late_is_waited_for() {
    let folder = Folder::new("late");
    run(0..2, |rank| {
        if rank == 0 {
            std::thread::sleep(Duration::from_millis(300));
        }
        work(&Local::in_folder(&folder.0).join(Rank(rank), 2).unwrap());
    });
}

/// As from a variable that is not set.
#[test]
fn an_empty_path_is_no_folder() {
    let error = Local::in_folder("").join(Rank(0), 2).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("the path of the folder is empty"), "{text}");
}

#[test]
fn a_peer_that_never_comes_is_named() {
    let folder = Folder::new("never");
    let local = || Local::in_folder(&folder.0).wait(Duration::from_millis(200));
    // The higher rank makes the link.
    let comm = local().join(Rank(1), 2).unwrap();
    let error = comm.barrier().unwrap_err();
    assert_eq!(error.culprit_rank(), Some(Rank(0)), "{error}");
    let text = error.to_string();
    assert!(text.contains("0.sock") && text.contains("rank 0"), "{text}");
    drop(comm);
    // The lower one waits for it, for as long as an operation may take.
    let comm = local().join(Rank(0), 2).unwrap();
    comm.set_timeout(Duration::from_millis(300));
    let error = comm.barrier().unwrap_err();
    assert!(matches!(error, CollectiveError::Deadline { .. }), "{error}");
    assert_eq!(error.culprit_rank(), Some(Rank(1)), "{error}");
}

#[test]
fn a_stale_generation_and_another_job_are_refused() {
    let folder = Folder::new("stale");
    let zero = Local::in_folder(&folder.0)
        .generation(Generation(5))
        .join(Rank(0), 2)
        .unwrap();
    zero.set_timeout(Duration::from_millis(500));
    for (other, reason) in [
        (
            Local::in_folder(&folder.0).generation(Generation(4)),
            "generation 4",
        ),
        (
            Local::in_folder(&folder.0)
                .generation(Generation(5))
                .job(JOB),
            "job-0000000000000007",
        ),
    ] {
        let one = other.join(Rank(1), 2).unwrap();
        let begun = Instant::now();
        let error = one.barrier().unwrap_err();
        assert!(matches!(error, CollectiveError::Connect { .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
        // At once, and not when nobody has come for long.
        assert!(begun.elapsed() < LONG / 2);
    }
    // And rank 0 takes the right one still.
    let one = Local::in_folder(&folder.0)
        .generation(Generation(5))
        .join(Rank(1), 2)
        .unwrap();
    zero.set_timeout(LONG);
    run([&zero, &one], work);
}

/// Who hears of a loss first begins the next generation while others are in the last one.
#[test]
fn ranks_that_disagree_about_their_number_have_no_link() {
    let folder = Folder::new("worlds");
    let errors = run([(0, 2), (1, 3)], |(rank, world)| {
        let comm = Local::in_folder(&folder.0).join(Rank(rank), world).unwrap();
        comm.set_timeout(Duration::from_secs(2));
        comm.barrier().unwrap_err()
    });
    // Rank 1 has tried to make the link.
    let text = errors[1].to_string();
    assert!(
        text.contains("one of 2") && text.contains("one of 3"),
        "{text}"
    );
    // Its communicator may have gone before rank 0's deadline.
    assert_eq!(errors[0].culprit_rank(), Some(Rank(1)), "{}", errors[0]);
}

#[test]
fn a_peer_that_is_a_generation_behind_is_waited_for() {
    let folder = Folder::new("behind");
    let local = |generation| Local::in_folder(&folder.0).generation(Generation(generation));
    let join = |rank, generation| local(generation).join(Rank(rank), 3).unwrap();
    let old = [join(0, 1), join(1, 1)];
    // For as long as it is to wait: it is not refused at once.
    let hasty = local(2).wait(Duration::from_millis(50));
    let error = hasty.join(Rank(2), 3).unwrap().barrier().unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("for 0.05 s") && text.contains("generation 1"),
        "{text}"
    );
    std::thread::scope(|scope| {
        scope.spawn(|| work(&join(2, 2)));
        drop(old);
        for rank in [1, 0] {
            scope.spawn(move || work(&join(rank, 2)));
        }
    });
}

#[test]
fn a_place_that_is_taken_is_named() {
    let folder = Folder::new("taken");
    let local = || Local::in_folder(&folder.0).wait(Duration::from_millis(50));
    let _first = local().join(Rank(0), 2).unwrap();
    let begun = Instant::now();
    let error = local().join(Rank(0), 2).unwrap_err();
    assert!(matches!(error, PeersError::InUse { .. }), "{error}");
    // Nothing is to be waited for.
    assert!(begun.elapsed() < Duration::from_secs(2));
    let error = local().join(Rank(2), 2).unwrap_err();
    assert!(error.to_string().contains("rank 2"), "{error}");
    let folder = Path::new("/proc/kolo/nowhere");
    let error = Local::in_folder(folder).join(Rank(0), 2).unwrap_err();
    assert!(error.to_string().contains("/proc/kolo/nowhere"), "{error}");
}

fn authority() -> Authority {
    Authority::create(ClusterId::random()).unwrap()
}

/// Ranks that listen, and their table: `hosts` has the name of each one's host.
fn listening(
    authority: &Authority,
    hosts: &[&str],
    network: impl Fn(Credentials) -> Network,
) -> (Vec<Listening>, Vec<Peer>) {
    let ranks: Vec<Listening> = (0..)
        .zip(hosts)
        .map(|(rank, _)| {
            let credentials = issue(authority, JOB, Rank(rank)).unwrap();
            let any = SocketAddr::from(([127, 0, 0, 1], 0));
            network(credentials).listen(any).unwrap()
        })
        .collect();
    let table = ranks
        .iter()
        .zip(hosts)
        .map(|(rank, host)| Peer::new(*host, rank.address()))
        .collect();
    (ranks, table)
}

#[test]
fn ranks_on_several_hosts_use_the_lanes_that_are_asked_for() {
    for choice in [LaneChoice::Quic, LaneChoice::Tls, LaneChoice::Auto] {
        let (ranks, table) = listening(&authority(), &["a", "b", "c"], |credentials| {
            Network::new(credentials).lane(choice)
        });
        run(ranks, |rank| {
            let comm = rank.join(&table).unwrap();
            assert_eq!(comm.layout().hosts(), 3);
            work(&comm);
            let used = lanes(&comm);
            match choice {
                LaneChoice::Auto => assert!(!used.is_empty() && !used.contains(&"unix")),
                one => assert_eq!(used, [one.to_string()]),
            }
        });
    }
}

/// Every rank sends to the next one, which sends, too: all end at their deadlines. Before that nobody had a link to anybody, and
/// who waits for a higher rank has none to make.
fn send_round(comm: &Communicator) {
    comm.set_timeout(Duration::from_secs(4));
    let (me, world) = (comm.rank().0, comm.world_size());
    let (next, after) = ((me + 1) % world, (me + 2) % world);
    let error = comm.send(&[1.0_f64], Rank(next)).unwrap_err();
    let does = format!("rank {next}: it is in send f64 to rank {after}");
    assert!(error.to_string().contains(&does), "rank {me}: {error}");
    // The links are of use.
    comm.set_timeout(LONG);
    comm.barrier().unwrap();
}

#[test]
fn higher_ranks_are_asked_for_their_links() {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let folder = Folder::new("asked");
            run(0..3, |rank| {
                send_round(&Local::in_folder(&folder.0).join(Rank(rank), 3).unwrap());
            });
        });
        for choice in [LaneChoice::Quic, LaneChoice::Tls, LaneChoice::Auto] {
            scope.spawn(move || {
                let (ranks, table) = listening(&authority(), &["a", "b", "c"], |credentials| {
                    Network::new(credentials).lane(choice)
                });
                run(ranks, |rank| send_round(&rank.join(&table).unwrap()));
            });
        }
    });
}

#[test]
fn ranks_of_one_of_several_hosts_meet_in_their_folder() {
    // Two folders, as there would be with two hosts.
    let folders = [Folder::new("host-a"), Folder::new("host-b")];
    let hosts = ["a", "b", "a", "b", "a"];
    let (authority, any) = (authority(), SocketAddr::from(([127, 0, 0, 1], 0)));
    let ranks: Vec<Listening> = (0..)
        .zip(hosts)
        .map(|(rank, host)| {
            let folder = &folders[usize::from(host == "b")].0;
            let credentials = issue(&authority, JOB, Rank(rank)).unwrap();
            Network::new(credentials)
                .folder(folder)
                .listen(any)
                .unwrap()
        })
        .collect();
    let peers = ranks.iter().zip(hosts);
    let table: Vec<Peer> = peers
        .map(|(rank, host)| Peer::new(host, rank.address()))
        .collect();
    run(ranks, |rank| {
        let comm = rank.join(&table).unwrap();
        work(&comm);
        let layout = comm.layout();
        assert_eq!((layout.hosts(), layout.ranks_on(0)), (2, &[0, 2, 4][..]));
        let near = ["unix", "shm-ring"];
        let used = lanes(&comm);
        assert!(used.iter().any(|kind| near.contains(kind)), "{used:?}");
        let local = comm.local().unwrap();
        work(&local);
        work(&comm.cross().unwrap_or_else(|error| panic!("{error}")));
        let shm = |record: &Record| record.lanes.names().eq(["shm"]);
        let (records, local) = (comm.records(), local.group_id());
        assert!(
            records
                .iter()
                .any(|record| record.group == local && shm(record))
        );
    });
}

#[test]
fn a_rank_of_another_authority_is_refused_and_named() {
    let (ranks, mut table) = listening(&authority(), &["a"], Network::new);
    let (mut others, theirs) = listening(&authority(), &["a", "b"], |credentials| {
        Network::new(credentials).wait(LONG)
    });
    table.push(theirs[1].clone());
    let zero = ranks.into_iter().next().unwrap().join(&table).unwrap();
    let one = others.pop().unwrap().join(&table).unwrap();
    let begun = Instant::now();
    let error = one.barrier().unwrap_err();
    assert!(
        matches!(error, CollectiveError::Connect { rank: Rank(0), .. }),
        "{error}"
    );
    assert!(
        error.to_string().contains("not a member of this cluster"),
        "{error}"
    );
    assert!(begun.elapsed() < LONG / 2);
    drop(zero);
}

#[test]
fn a_rank_in_the_place_of_another_one_or_of_another_generation_is_refused() {
    let authority = authority();
    let (mut ranks, table) = listening(&authority, &["a", "b", "c"], |credentials| {
        Network::new(credentials).wait(LONG)
    });
    // Rank 2's table has rank 0 where rank 1 is.
    let wrong = [table[1].clone(), table[1].clone(), table[2].clone()];
    let two = ranks.pop().unwrap().join(&wrong).unwrap();
    let one = ranks.pop().unwrap().join(&table).unwrap();
    let pair = two.group(&[Rank(0), Rank(2)]).unwrap().unwrap();
    let error = pair.barrier().unwrap_err();
    assert!(error.to_string().contains("was looked for"), "{error}");
    drop((one, two, pair));

    let zero = ranks.pop().unwrap().join(&table).unwrap();
    let credentials = issue(&authority, JOB, Rank(1)).unwrap();
    // It waits for rank 0, which could come after it.
    let stale = Network::new(credentials)
        .generation(Generation(9))
        .wait(Duration::from_millis(200));
    let one = stale.listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let one = one.join(&table).unwrap();
    let pair = one.group(&[Rank(0), Rank(1)]).unwrap().unwrap();
    let error = pair.barrier().unwrap_err().to_string();
    assert!(
        error.contains("generation 9") && error.contains("generation 1"),
        "{error}"
    );
    drop(zero);
}

#[test]
fn a_peer_on_another_host_that_never_comes_is_named() {
    let credentials = issue(&authority(), JOB, Rank(1)).unwrap();
    let network = Network::new(credentials)
        .lane(LaneChoice::Tls)
        .wait(Duration::from_millis(100));
    let one = network
        .listen(SocketAddr::from(([127, 0, 0, 1], 0)))
        .unwrap();
    // Nobody listens at the address of a socket that has gone.
    let gone = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let table = [
        Peer::new("far-away", gone),
        Peer::new("here", one.address()),
    ];
    let comm = one.join(&table).unwrap();
    let error = comm.barrier().unwrap_err();
    assert_eq!(error.culprit_rank(), Some(Rank(0)), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("far-away") && text.contains(&gone.to_string()),
        "{text}"
    );
}

#[test]
fn credentials_that_are_of_no_rank_and_addresses_that_are_taken_are_named() {
    use kolo_collectives::peers::{Identity, Role};
    let authority = authority();
    let head = authority.issue(Role::Head, "head").unwrap();
    let error = Network::new(head).join(&[]).unwrap_err();
    assert!(error.to_string().contains("peers::issue"), "{error}");
    let credentials = issue(&authority, JOB, Rank(3)).unwrap();
    assert_eq!(
        credentials
            .identity()
            .to_string()
            .parse::<Identity>()
            .unwrap()
            .worker()
            .unwrap()
            .0,
        JOB
    );
    let taken = std::net::UdpSocket::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let table = vec![Peer::new("a", taken); 3];
    let error = Network::new(credentials.clone()).join(&table).unwrap_err();
    assert!(
        error.to_string().contains("rank 3 is not in a world of 3"),
        "{error}"
    );
    let held = std::net::UdpSocket::bind(taken).unwrap();
    let table = vec![Peer::new("a", taken); 4];
    let error = Network::new(credentials).join(&table).unwrap_err();
    assert!(matches!(error, PeersError::Listen { .. }), "{error}");
    assert!(error.to_string().contains(&taken.to_string()), "{error}");
    drop(held);
}

/// Ports that are free for UDP and TCP, until they are closed.
fn free_ports(count: u32) -> Vec<(std::net::UdpSocket, std::net::TcpListener)> {
    let mut ports = Vec::new();
    while ports.len() < count as usize {
        let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        if let Ok(tcp) = std::net::TcpListener::bind(udp.local_addr().unwrap()) {
            ports.push((udp, tcp));
        }
    }
    ports
}

/// Ranks of several hosts in processes of their own. `given` is what one does, from its credentials on; the addresses come behind.
fn on_hosts(folder: &Folder, world: u32, given: impl Fn(u32, &Path) -> String) -> Vec<Process> {
    let authority = authority();
    let ports = free_ports(world);
    let addresses: Vec<String> = ports
        .iter()
        .map(|(udp, _)| udp.local_addr().unwrap().to_string())
        .collect();
    drop(ports);
    (0..world)
        .map(|rank| {
            let credentials = folder.0.join(rank.to_string());
            let issued = issue(&authority, JOB, Rank(rank)).unwrap();
            issued.save(&credentials).unwrap();
            let addresses = addresses.join(",");
            Process::start(&format!("{},{addresses}", given(rank, &credentials)))
        })
        .collect()
}

#[test]
fn a_program_may_end_right_after_its_last_operation() {
    const WORLD: u32 = 3;
    let folder = Folder::new("ends");
    let given =
        |rank: u32, place: &Path| format!("sends and ends,{},{rank},{WORLD}", place.display());
    for rank in on_hosts(&folder, WORLD, given) {
        rank.ends_well();
    }
    for credentials in folder.files() {
        std::fs::remove_dir_all(credentials).unwrap();
    }
}
