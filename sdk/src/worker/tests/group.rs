//! Whole workers in this process, with a node that is made by hand: introduction, data plane, losses, ends.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kolo_collectives::{CollectiveError, ReduceOp};
use kolo_transport::identity::{Identity, Role};
use kolo_transport::ids::{ClusterId, CrossRank, Generation, JobId, LocalRank, NodeId, Rank, Slot};
use kolo_transport::local::ControlSocket;
use kolo_transport::wire::worker::LOCAL_PROTOCOL;
use kolo_transport::wire::{
    CallFailure, Exit, FailureKind, FromWorker, GenerationTable, Member, RankFailure, ToWorker,
};
use kolo_transport::{Authority, TransportRuntime};

use super::caller::{Caller, function};
use crate::context::Context;
use crate::registry::Registry;
use crate::worker::control::{self, ControlError};
use crate::worker::{EXIT_NODE_GONE, EXIT_PROTOCOL, Fatal, serve};
use crate::{Function, codec};

const JOB: JobId = JobId(77);
const LIMIT: Duration = Duration::from_secs(60);

#[kolo::function]
fn sum(ctx: &Context, mine: i64) -> Result<(i64, usize, usize), CollectiveError> {
    let mut data = [mine + i64::try_from(ctx.rank()).unwrap()];
    ctx.comm().all_reduce(&mut data, ReduceOp::Sum)?;
    Ok((data[0], ctx.rank(), ctx.local_rank()))
}

/// Groups, names and messages from one rank to one other, all at once.
#[kolo::function]
fn many_groups(ctx: &Context, _round: usize) -> Result<(Vec<u32>, Vec<u32>, i64), CollectiveError> {
    let numbers = |members: Vec<Rank>| members.into_iter().map(|rank| rank.0).collect();
    let (local, cross) = (ctx.local()?, ctx.cross()?);
    assert_eq!(local.rank().index(), ctx.local_rank());
    assert_eq!(cross.rank().index(), ctx.cross_rank());
    let comm = ctx.comm();
    let name = comm.named("sum").all_reduce(vec![1_i64], ReduceOp::Sum);
    let mut data = [1_i64];
    std::thread::scope(|scope| {
        let crossing = scope.spawn(|| cross.barrier());
        local.all_reduce(&mut data, ReduceOp::Sum)?;
        crossing.join().expect("a barrier does not panic")
    })?;
    assert_eq!(data[0], i64::try_from(ctx.local_size()).unwrap());
    let last = Rank(comm.world_size() - 1);
    match comm.rank() {
        Rank(0) => comm.send(&[5_u8], last)?,
        rank if rank == last => assert_eq!(comm.receive::<u8>(Rank(0))?, [5]),
        _ => {}
    }
    Ok((
        numbers(local.members()),
        numbers(cross.members()),
        name.wait()?[0],
    ))
}

/// Every rank sends to the next one, and none receives.
#[kolo::function]
fn sends_round(ctx: &Context) -> Result<String, String> {
    let comm = ctx.comm();
    comm.set_timeout(Duration::from_secs(4));
    let next = Rank((comm.rank().0 + 1) % comm.world_size());
    match comm.send(&[1_u8], next) {
        Ok(()) => Err("somebody has received it".to_owned()),
        Err(error) => Ok(error.to_string()),
    }
}

#[kolo::function]
fn fails_on(ctx: &Context, rank: usize) -> Result<(), String> {
    if ctx.rank() == rank {
        return Err("this rank does not want to".to_owned());
    }
    ctx.comm().barrier().map_err(|error| error.to_string())
}

#[kolo::function]
async fn waits_for_ever(ctx: &Context) -> Result<(), CollectiveError> {
    std::future::pending::<()>().await;
    ctx.comm().barrier_async().await
}

/// A worker's two ends at the node.
struct Worker {
    calls: Caller,
    control: Arc<ControlSocket>,
    thread: JoinHandle<Result<(), Fatal>>,
}

fn start_worker() -> Worker {
    let (calls, theirs) = UnixStream::pair().unwrap();
    let (control, fd) = ControlSocket::pair().unwrap();
    let thread = std::thread::spawn(move || run_worker(theirs, fd));
    Worker {
        calls: Caller::new(calls),
        control: Arc::new(control),
        thread,
    }
}

/// As `work` does, without ends of the process.
fn run_worker(calls: UnixStream, control: OwnedFd) -> Result<(), Fatal> {
    let registry = Registry::get().unwrap();
    let runtime = TransportRuntime::new(1).unwrap();
    let clone = calls.try_clone().unwrap();
    let control = control::start(&runtime, control, clone, registry.digest(), |_| {});
    serve(registry, &runtime, &control, calls)
}

async fn hear(control: &ControlSocket) -> FromWorker {
    let heard = tokio::time::timeout(LIMIT, control.recv())
        .await
        .expect("in time");
    heard.unwrap().expect("the worker lives").0
}

async fn tell(control: &ControlSocket, message: ToWorker) {
    control.send(&message, &[]).await.unwrap();
}

/// How many nodes before this rank's have a rank with its place.
fn cross_rank(nodes: &[u64], rank: usize) -> u32 {
    let place = nodes[..rank]
        .iter()
        .filter(|node| **node == nodes[rank])
        .count();
    let mut before: Vec<u64> = Vec::new();
    for node in nodes.iter().take_while(|node| **node != nodes[rank]) {
        if !before.contains(node) && nodes.iter().filter(|other| *other == node).count() > place {
            before.push(*node);
        }
    }
    before.len() as u32
}

/// A group whose node does what nodes do.
struct Group {
    workers: Vec<Worker>,
    table: GenerationTable,
}

impl Group {
    /// Starts a worker for each entry: the number of its node.
    async fn start(nodes: &[u64]) -> Self {
        let authority = Authority::create(ClusterId(5)).unwrap();
        let needs_data_plane = nodes.windows(2).any(|pair| pair[0] != pair[1]);
        let world_size = nodes.len() as u32;
        let workers: Vec<Worker> = nodes.iter().map(|_| start_worker()).collect();
        let mut seen: HashMap<u64, u32> = HashMap::new();
        let mut members = Vec::new();
        for (rank, (node, worker)) in nodes.iter().zip(&workers).enumerate() {
            let local_rank = seen.entry(*node).or_default();
            let mut member = Member {
                rank: Rank(rank as u32),
                local_rank: LocalRank(*local_rank),
                local_size: nodes.iter().filter(|other| *other == node).count() as u32,
                cross_rank: CrossRank(cross_rank(nodes, rank)),
                cross_size: 1,
                // Slots are not ranks.
                slot: Slot(rank as u32 + 10),
                node: NodeId(*node),
                hostname: format!("host{node}"),
                address: None,
            };
            *local_rank += 1;
            let FromWorker::Hello {
                protocol,
                pid,
                registry,
            } = hear(&worker.control).await
            else {
                panic!("hello comes first");
            };
            assert_eq!(
                (protocol, pid, registry),
                (LOCAL_PROTOCOL, std::process::id(), crate::registry_digest())
            );
            tell(
                &worker.control,
                welcome(member.clone(), world_size, needs_data_plane),
            )
            .await;
            if needs_data_plane {
                let FromWorker::Sign { csr } = hear(&worker.control).await else {
                    panic!("it needs a certificate");
                };
                let name = Identity::worker_name(JOB, member.slot);
                let hour = Duration::from_secs(3600);
                let certificate = authority.sign(&csr, Role::Worker, &name, hour).unwrap();
                let message = ToWorker::Certificate {
                    certificate: certificate.to_vec(),
                    authority: authority.certificate().to_vec(),
                };
                tell(&worker.control, message).await;
            }
            let FromWorker::Ready { address } = hear(&worker.control).await else {
                panic!("it is ready");
            };
            assert_eq!(address.is_some(), needs_data_plane);
            member.address = address;
            members.push(member);
        }
        let group = Self {
            workers,
            table: GenerationTable {
                job: JOB,
                generation: Generation(1),
                members,
            },
        };
        group.make_sockets();
        group
    }

    /// Makes sockets between workers as they ask for them.
    fn make_sockets(&self) {
        let controls: Vec<_> = self
            .workers
            .iter()
            .map(|worker| Arc::clone(&worker.control))
            .collect();
        for (rank, control) in controls.clone().into_iter().enumerate() {
            let controls = controls.clone();
            tokio::spawn(async move {
                while let Ok(Some((message, _))) = control.recv::<FromWorker>().await {
                    let (peer, generation) = match message {
                        FromWorker::ConnectPeer { rank, generation } => (rank, generation),
                        FromWorker::RequestLink {
                            rank: of,
                            generation,
                            group,
                        } => {
                            let message = ToWorker::LinkRequested {
                                rank: Rank(rank as u32),
                                generation,
                                group,
                            };
                            controls[of.index()].send(&message, &[]).await.unwrap();
                            continue;
                        }
                        FromWorker::Taken { .. } => continue,
                        other => panic!("{other:?}"),
                    };
                    let (a, b) = UnixStream::pair().unwrap();
                    for (to, of, end) in [(rank, peer, a), (peer.index(), Rank(rank as u32), b)] {
                        let message = ToWorker::Peer {
                            rank: of,
                            generation,
                        };
                        controls[to].send(&message, &[end.as_fd()]).await.unwrap();
                    }
                }
            });
        }
    }

    async fn complete(&self) {
        for worker in &self.workers {
            tell(&worker.control, ToWorker::Membership(self.table.clone())).await;
        }
    }

    /// Calls a function on all ranks at once.
    fn call<F: Function>(
        &mut self,
        _: impl FnOnce() -> F,
        args: F::Args,
    ) -> Vec<Result<Vec<u8>, CallFailure>>
    where
        F::Args: serde::Serialize,
    {
        let args = codec::encode(&args).unwrap();
        for worker in &mut self.workers {
            worker.calls.send(function(F::NAME), &args);
        }
        self.workers
            .iter_mut()
            .map(|worker| worker.calls.receive().1)
            .collect()
    }

    fn sums(&mut self) -> Vec<(i64, usize, usize)> {
        let results = self.call(sum, (10,));
        results
            .into_iter()
            .map(|result| codec::decode(&result.unwrap()).unwrap())
            .collect()
    }

    async fn stop(self) {
        for worker in &self.workers {
            tell(
                &worker.control,
                ToWorker::Stop {
                    reason: "the test ends".to_owned(),
                },
            )
            .await;
        }
        for worker in self.workers {
            worker.thread.join().unwrap().unwrap();
        }
    }
}

fn welcome(member: Member, world_size: u32, needs_data_plane: bool) -> ToWorker {
    ToWorker::Welcome {
        cluster: ClusterId(5),
        job: JOB,
        generation: Generation(1),
        member,
        world_size,
        needs_data_plane,
        next_within_ms: None,
    }
}

fn runtime() -> tokio::runtime::Runtime {
    // The workers' blocking calls are on threads of their own, as are those of the test.
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

#[test]
fn ranks_of_one_node_reduce_over_sockets_that_the_node_makes() {
    runtime().block_on(async {
        let mut group = Group::start(&[1, 1, 1]).await;
        group.complete().await;
        for _ in 0..3 {
            assert_eq!(group.sums(), [(33, 0, 0), (33, 1, 1), (33, 2, 2)]);
        }
        group.stop().await;
    });
}

#[test]
fn ranks_of_two_nodes_reduce_over_connections_with_certificates() {
    runtime().block_on(async {
        let mut group = Group::start(&[1, 1, 2, 2]).await;
        group.complete().await;
        for _ in 0..3 {
            assert_eq!(
                group.sums(),
                [(46, 0, 0), (46, 1, 1), (46, 2, 0), (46, 3, 1)]
            );
        }
        group.stop().await;
    });
}

#[test]
fn groups_have_links_of_their_own_inside_nodes_and_between_them() {
    runtime().block_on(async {
        let mut group = Group::start(&[1, 1, 2, 2, 2]).await;
        group.complete().await;
        for round in 0..2_usize {
            let results = group.call(many_groups, (round,));
            let results: Vec<(Vec<u32>, Vec<u32>, i64)> = results
                .into_iter()
                .map(|result| codec::decode(&result.unwrap()).unwrap())
                .collect();
            let (one, two) = (vec![0, 1], vec![2, 3, 4]);
            let expected = [
                (one.clone(), vec![0, 2], 5),
                (one, vec![1, 3], 5),
                (two.clone(), vec![0, 2], 5),
                (two.clone(), vec![1, 3], 5),
                (two, vec![4], 5),
            ];
            assert_eq!(results, expected);
        }
        group.stop().await;
    });
}

/// Ranks that had no link to each other, and of which each waits for a higher one that does something else.
#[test]
fn higher_ranks_are_asked_for_their_links_inside_nodes_and_between_them() {
    runtime().block_on(async {
        let mut group = Group::start(&[1, 1, 2]).await;
        group.complete().await;
        for (rank, result) in (0..).zip(group.call(sends_round, ())) {
            let error: String = codec::decode(&result.unwrap()).unwrap();
            let (next, after) = ((rank + 1) % 3, (rank + 2) % 3);
            let does = format!("rank {next}: it is in send u8 to rank {after}");
            assert!(error.contains(&does), "rank {rank}: {error}");
        }
        group.stop().await;
    });
}

#[test]
fn a_call_that_comes_before_the_members_are_known_waits_for_them() {
    runtime().block_on(async {
        let mut group = Group::start(&[1, 2]).await;
        let args = codec::encode(&(0_i64,)).unwrap();
        for worker in &mut group.workers {
            worker.calls.send(function(sum::NAME), &args);
        }
        group.complete().await;
        for worker in &mut group.workers {
            let (sum, _, _): (i64, usize, usize) =
                codec::decode(&worker.calls.receive().1.unwrap()).unwrap();
            assert_eq!(sum, 1);
        }
        group.stop().await;
    });
}

#[test]
fn a_rank_that_fails_is_the_cause_of_the_others_failures_and_the_next_call_works() {
    runtime().block_on(async {
        let mut group = Group::start(&[1, 1, 2]).await;
        group.complete().await;
        // Linked before, and not.
        for culprit in [1_usize, 2, 0] {
            let results = group.call(fails_on, (culprit,));
            for (rank, result) in results.into_iter().enumerate() {
                let failure = result.unwrap_err();
                assert_eq!(failure.kind, FailureKind::Error);
                if rank == culprit {
                    assert_eq!(failure.message, "this rank does not want to");
                    assert_eq!(failure.caused_by, None);
                } else {
                    assert_eq!(failure.caused_by, Some(Rank(culprit as u32)), "{failure:?}");
                    assert!(
                        failure.message.contains("this rank does not want to"),
                        "{failure:?}"
                    );
                }
            }
            assert_eq!(group.sums()[0].0, 33);
        }
        group.stop().await;
    });
}

#[test]
fn a_lost_rank_ends_the_waits_on_it_with_its_name() {
    runtime().block_on(async {
        let mut group = Group::start(&[1, 1, 1]).await;
        group.complete().await;
        assert_eq!(group.sums()[0].0, 33);
        // Rank 2 never gets the call.
        let args = codec::encode(&(0_i64,)).unwrap();
        for worker in &mut group.workers[..2] {
            worker.calls.send(function(sum::NAME), &args);
        }
        let failure = RankFailure {
            rank: Rank(2),
            node: NodeId(1),
            hostname: "host1".to_owned(),
            pid: 4711,
            exit: Exit::Signal(9),
            reason: None,
            stderr_tail: Vec::new(),
        };
        for worker in &group.workers[..2] {
            // One of another generation changes nothing.
            for generation in [Generation(9), Generation(1)] {
                let failure = failure.clone();
                tell(
                    &worker.control,
                    ToWorker::RankLost {
                        generation,
                        failure,
                    },
                )
                .await;
            }
        }
        for worker in &mut group.workers[..2] {
            let failure = worker.calls.receive().1.unwrap_err();
            assert_eq!(failure.caused_by, Some(Rank(2)), "{failure:?}");
            for part in ["rank 2 is lost", "pid 4711", "SIGKILL"] {
                assert!(failure.message.contains(part), "{failure:?}");
            }
        }
        group.stop().await;
    });
}

#[test]
fn cancel_and_stop_are_heard_while_user_code_runs() {
    runtime().block_on(async {
        let mut group = Group::start(&[1]).await;
        group.complete().await;
        let worker = &mut group.workers[0];
        let call = worker
            .calls
            .send(function(waits_for_ever::NAME), &codec::encode(&()).unwrap());
        tell(&worker.control, ToWorker::Cancel { call }).await;
        assert_eq!(
            worker.calls.receive().1.unwrap_err().kind,
            FailureKind::Cancelled
        );
        group.stop().await;
    });
}

#[test]
fn a_notice_before_the_welcome_ends_the_worker_well() {
    runtime().block_on(async {
        let worker = start_worker();
        hear(&worker.control).await;
        tell(
            &worker.control,
            ToWorker::Stop {
                reason: "not needed".to_owned(),
            },
        )
        .await;
        drop(worker.control);
        worker.thread.join().unwrap().unwrap();
    });
}

#[test]
fn a_node_that_goes_ends_the_worker_with_a_code_of_its_own() {
    runtime().block_on(async {
        // Before the worker is ready, and after.
        let early = start_worker();
        hear(&early.control).await;
        let late = Group::start(&[1]).await.workers.remove(0);
        for (worker, ready) in [(early, false), (late, true)] {
            // What another task holds of the socket ends with it.
            worker.control.shutdown().unwrap();
            drop(worker.control);
            drop(worker.calls);
            let error = worker.thread.join().unwrap().unwrap_err();
            assert_eq!(error.code(), EXIT_NODE_GONE, "{error} (ready: {ready})");
            assert!(
                error.to_string().starts_with("the node closed the "),
                "{error}"
            );
        }
    });
}

#[test]
fn messages_at_the_wrong_time_are_protocol_errors() {
    runtime().block_on(async {
        let nonsense = ToWorker::Certificate {
            certificate: vec![1],
            authority: vec![2],
        };
        let worker = start_worker();
        hear(&worker.control).await;
        tell(&worker.control, nonsense.clone()).await;
        let error = worker.thread.join().unwrap().unwrap_err();
        assert_eq!(error.code(), EXIT_PROTOCOL);
        assert!(
            matches!(error, Fatal::Control(ControlError::OutOfTurn { .. })),
            "{error}"
        );

        let worker = Group::start(&[1]).await.workers.remove(0);
        tell(&worker.control, nonsense).await;
        drop(worker.calls);
        let error = worker.thread.join().unwrap().unwrap_err();
        assert!(
            error
                .to_string()
                .contains("a certificate at the wrong time"),
            "{error}"
        );
    });
}
