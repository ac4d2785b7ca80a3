//! Clusters inside this process, end to end, with real worker processes.
//!
//! The workers are this program again, so it has a `main` of its own in place of the test runner's. Arguments that are no
//! options choose the tests whose names contain one of them.

// Clippy does not see that this is a test.
#![allow(clippy::unwrap_used)]

mod elastic;

use std::future::Future;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use elastic::{
    a_driver_goes_on_after_a_generation_that_ends_without_a_loss,
    an_elastic_run_goes_on_when_the_node_of_half_its_workers_is_killed,
    values_of_elastic_groups_go_back_to_their_last_commit,
};
use kolo::prelude::*;
use kolo::{Exit, LocalCluster};
use tokio::net::UnixListener;

type Outcome = kolo::Result<()>;
type Test = (
    &'static str,
    fn() -> Pin<Box<dyn Future<Output = Outcome> + Send>>,
);

macro_rules! tests {
    ($($name:ident)*) => { [$((stringify!($name), || Box::pin($name())),)*] };
}

fn main() {
    kolo::rt::main_with_init(|| INITS.store(1, Ordering::Relaxed), async {
        tracing_subscriber::fmt().with_writer(|| Log).init();
        let tests: [Test; 13] = tests![
            a_local_start_logs_no_news_of_kolo
            functions_run_on_all_one_and_some
            what_workers_print_reaches_the_user
            nothing_leaks_to_other_programs
            a_call_behind_one_that_still_runs_says_so
            the_last_handle_ends_a_cluster_and_its_workers
            a_group_that_was_shut_down_has_succeeded_and_no_other
            the_default_cluster_has_room_for_four
            few_descriptors_are_told_and_panic_nothing
            nodes_are_added_and_killed
            an_elastic_run_goes_on_when_the_node_of_half_its_workers_is_killed
            a_driver_goes_on_after_a_generation_that_ends_without_a_loss
            values_of_elastic_groups_go_back_to_their_last_commit
        ];
        let filters: Vec<String> = std::env::args()
            .skip(1)
            .filter(|arg| !arg.starts_with('-'))
            .collect();
        let mut failed = 0;
        for (name, test) in tests {
            if !filters.is_empty() && !filters.iter().any(|filter| name.contains(filter)) {
                continue;
            }
            // In a task of its own, so that a panic is that test's.
            let ended = tokio::spawn(tokio::time::timeout(Duration::from_secs(60), test())).await;
            let wrong = match ended {
                Ok(Ok(Ok(()))) => None,
                Ok(Ok(Err(error))) => Some(format!("{error:?}")),
                Ok(Err(_)) => Some("it hangs".to_owned()),
                Err(panic) => Some(panic.to_string()),
            };
            match wrong {
                None => println!("test {name} ... ok"),
                Some(wrong) => {
                    println!("test {name} ... FAILED: {wrong}");
                    failed += 1;
                }
            }
        }
        if failed > 0 {
            println!("{failed} failed");
            std::process::exit(1);
        }
    });
}

/// How often this process was initialised.
static INITS: AtomicU32 = AtomicU32::new(0);

/// What the driver has logged.
static LOGGED: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Log;

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LOGGED.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

async fn a_local_start_logs_no_news_of_kolo() -> Outcome {
    tracing::info!("news of the program");
    let executor = two_by_two().await?;
    executor.run(whoami, ()).await?;
    executor.shutdown().await?;
    drop(executor);
    let logged = String::from_utf8(LOGGED.lock().unwrap().clone()).unwrap();
    let news: Vec<&str> = logged
        .lines()
        .filter(|line| line.contains("INFO"))
        .collect();
    assert!(
        matches!(news[..], [own] if own.contains("news of the program")),
        "{logged}"
    );
    Ok(())
}

#[kolo::function]
fn prints(ctx: &Context) -> u32 {
    println!("a line of rank {}", ctx.rank());
    print!("no end, then ");
    eprintln!("a line of errors");
    tracing::info!("epoch {}", 5);
    tracing::debug!("nobody wants to see this");
    INITS.load(Ordering::Relaxed)
}

#[kolo::function]
fn panics() {
    panic!("in a worker");
}

struct Last;

#[kolo::executable]
impl Last {
    fn new() -> Self {
        Self
    }
}

impl Drop for Last {
    fn drop(&mut self) {
        println!("dropped at the end");
    }
}

async fn what_workers_print_reaches_the_user() -> Outcome {
    let cluster = LocalCluster::builder().slots(1).start().await?;
    let lines = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&lines);
    let output = Output::callback(move |line| heard.lock().unwrap().push(line));
    let executor = Executor::builder().workers(1).output(output);
    let executor = executor.start(&cluster).await?;
    let last = executor.create::<Last>(()).await?;
    assert_eq!(
        executor.run(prints, ()).await?,
        [1],
        "`init` was called here, too"
    );
    let error = executor.run(panics, ()).await.unwrap_err();
    assert!(
        error.message().starts_with("panicked: in a worker ("),
        "{error}"
    );
    assert!(error.backtrace().unwrap().contains("panics"), "{error:#}");
    // All lines have come then.
    let exits = executor.shutdown().await?;
    assert_eq!(exits[0].exit, Some(Exit::Code(0)));
    drop(last);
    let lines = lines.lock().unwrap();
    let said = |stream| -> Vec<String> {
        let lines = lines.iter().filter(|line| line.stream == stream);
        lines
            .map(|line| String::from_utf8_lossy(&line.text).into_owned())
            .collect()
    };
    let printed = ["a line of rank 0", "no end, then dropped at the end"];
    assert_eq!(said(Stdio::Stdout), printed);
    let errors = said(Stdio::Stderr);
    assert_eq!(errors[..2], ["a line of errors", " INFO local: epoch 5"]);
    // The usual message of a panic, and once.
    let times = errors
        .iter()
        .filter(|line| line.contains("in a worker"))
        .count();
    assert_eq!(times, 1, "{errors:?}");
    assert!(
        errors.iter().all(|line| !line.contains("DEBUG")),
        "{errors:?}"
    );
    Ok(())
}

#[kolo::function]
fn runs(command: String) -> Result<String> {
    let output = std::process::Command::new("sh")
        .args(["-c", &command])
        .output()?;
    Ok(String::from_utf8(output.stdout)?)
}

async fn nothing_leaks_to_other_programs() -> Outcome {
    let cluster = LocalCluster::builder().slots(1).start().await?;
    let executor = Executor::builder().workers(1).start(&cluster).await?;
    let variable = executor.run(runs, "echo ${KOLO_WORKER_FDS-none}".to_owned());
    assert_eq!(variable.await?, ["none\n"]);
    // `ls` has its own descriptor of the directory.
    let open = executor.run(runs, "ls -l /proc/self/fd".to_owned()).await?;
    assert!(!open[0].contains("socket:"), "{open:?}");
    executor.shutdown().await?;
    Ok(())
}

/// One rank waits until nobody listens at a socket any more.
#[kolo::function]
fn blocks(ctx: &Context, rank: usize, socket: PathBuf) -> Result<()> {
    if ctx.rank() == rank {
        UnixStream::connect(socket)?.read_to_end(&mut Vec::new())?;
    }
    Ok(())
}

async fn a_call_behind_one_that_still_runs_says_so() -> Outcome {
    let executor = two_by_two().await?;
    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("socket");
    let listener = UnixListener::bind(&socket)?;
    let blocked = tokio::select! {
        ended = executor.run(blocks, (1, socket)).into_future() => panic!("{ended:?}"),
        blocked = listener.accept() => blocked?,
    };
    let late = executor
        .run(whoami, ())
        .deadline(Duration::from_millis(200));
    let error = late.await.unwrap_err();
    let text = error.to_string();
    let busy = "from rank 1 after 200ms, its deadline: rank 1 (";
    assert!(
        text.contains(busy) && text.contains(") is still in `local::blocks`, sent "),
        "{text}"
    );
    drop(blocked);
    assert_eq!(executor.run(whoami, ()).await?, [0, 1, 2, 3]);
    executor.shutdown().await?;
    Ok(())
}

#[kolo::function]
fn whoami(ctx: &Context) -> usize {
    ctx.rank()
}

/// This program again, under each limit of open files: it says what is missing, or does its work.
async fn few_descriptors_are_told_and_panic_nothing() -> Outcome {
    let program = std::env::current_exe()?;
    let script = r#"ulimit -n "$0" && exec "$@""#;
    let mut worked = false;
    for limit in (8..=64).chain([96_u32]) {
        let output = std::process::Command::new("sh")
            .args(["-c", script, &limit.to_string()])
            .arg(&program)
            .arg("functions_run_on_all_one_and_some")
            .output()?;
        let text = format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(!text.contains("panicked"), "{limit}: {text}");
        worked = output.status.success();
        assert!(worked || text.contains("open files"), "{limit}: {text}");
    }
    assert!(worked, "96 are enough");
    Ok(())
}

#[kolo::function]
fn process_id() -> u32 {
    std::process::id()
}

#[kolo::function]
fn exit_on(ctx: &Context, rank: usize) {
    if ctx.rank() == rank {
        eprintln!("leaving");
        std::process::exit(3);
    }
}

#[kolo::function]
async fn never_ends() {
    std::future::pending::<()>().await;
}

async fn two_by_two() -> kolo::Result<Executor> {
    let cluster = LocalCluster::builder().nodes(2).slots(2).start().await?;
    Ok(Executor::builder()
        .hosts(2)
        .slots(2)
        .output(Output::Silent)
        .start(&cluster)
        .await?)
}

async fn functions_run_on_all_one_and_some() -> Outcome {
    let executor = two_by_two().await?;
    assert_eq!(executor.world_size(), 4);
    assert_eq!(executor.run(whoami, ()).await?, [0, 1, 2, 3]);
    assert_eq!(executor.on(Rank(2)).run(whoami, ()).await?, 2);
    assert_eq!(
        executor
            .on_ranks(&[Rank(3), Rank(1)])
            .run(whoami, ())
            .await?,
        [1, 3]
    );
    let mut all = Vec::new();
    for _ in 0..200 {
        all.push(executor.submit(whoami, ()));
    }
    for calls in all {
        for (rank, call) in calls.into_iter().enumerate() {
            assert_eq!(call.await?, rank);
        }
    }
    let info = executor.cluster().status().await?;
    assert_eq!((info.nodes.len(), info.running_jobs), (2, 1));
    let exits = executor.shutdown().await?;
    assert!(
        exits
            .iter()
            .all(|worker| worker.exit == Some(Exit::Code(0))),
        "{exits:?}"
    );
    Ok(())
}

async fn the_last_handle_ends_a_cluster_and_its_workers() -> Outcome {
    let cluster = LocalCluster::builder().slots(1).start().await?;
    // The cluster's last handle goes with the executor; its workers go with it.
    let executor = Executor::builder()
        .workers(1)
        .output(Output::Silent)
        .start(&cluster)
        .await?;
    let pid = executor.run(process_id, ()).await?[0];
    drop((cluster, executor));
    while std::path::Path::new(&format!("/proc/{pid}")).exists() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    Ok(())
}

async fn a_group_that_was_shut_down_has_succeeded_and_no_other() -> Outcome {
    let cluster = LocalCluster::builder().slots(2).start().await?;
    let start = || {
        Executor::builder()
            .workers(2)
            .output(Output::Silent)
            .start(&cluster)
    };
    let ended = async |job| {
        loop {
            let state = cluster.job(job).await?.state;
            if state.is_final() {
                return Ok::<_, kolo::Error>(state.to_string());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };

    let executor = start().await?;
    executor.shutdown().await?;
    assert_eq!(ended(executor.job()).await?, "succeeded");

    let executor = start().await?;
    assert!(executor.run(exit_on, 1).await.is_err());
    executor.shutdown().await?;
    assert_eq!(ended(executor.job()).await?, "stopped");

    let executor = start().await?;
    let job = executor.job();
    drop(executor);
    assert_eq!(ended(job).await?, "stopped");

    let executor = start().await?;
    cluster.stop_job(executor.job()).await?;
    executor.shutdown().await?;
    assert_eq!(ended(executor.job()).await?, "stopped");
    Ok(())
}

async fn nodes_are_added_and_killed() -> Outcome {
    let cluster = LocalCluster::builder().slots(2).start().await?;
    let added = cluster.add_local_node().await?;
    let executor = Executor::builder().hosts(2).slots(2).output(Output::Silent);
    let executor = executor.start(&cluster).await?;
    let on_added = |member: &&kolo::Member| member.node == added;
    let lost = executor.table().members.iter().find(on_added).unwrap().rank;
    let call = executor.on(lost).run(never_ends, ()).into_future();

    cluster.kill_local_node(added).await?;
    let error = call.await.unwrap_err().to_string();
    assert!(error.contains(&format!("rank {lost}")), "{error}");
    let is_there = |node: &kolo::NodeInfo| node.node == added && node.alive;
    while cluster.status().await?.nodes.iter().any(is_there) {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let error = cluster
        .kill_local_node(added)
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("no node of this process"), "{error}");
    Ok(())
}

async fn the_default_cluster_has_room_for_four() -> Outcome {
    let cluster = Cluster::local().await?;
    let executor = Executor::builder()
        .workers(4)
        .output(Output::Silent)
        .start(&cluster)
        .await?;
    assert_eq!(executor.run(whoami, ()).await?, [0, 1, 2, 3]);
    executor.shutdown().await?;
    Ok(())
}
