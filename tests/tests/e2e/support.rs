//! What several tests share: functions to call and small helpers.

use std::collections::BTreeMap;
use std::time::Duration;

use kolo::prelude::*;
use kolo_harness::TestCluster;

/// The world rank.
#[kolo::function]
pub fn whoami(ctx: &Context) -> usize {
    ctx.rank()
}

/// All six numbers: rank, size, local rank, local size, cross rank, cross size.
#[kolo::function]
pub fn ranks(ctx: &Context) -> [usize; 6] {
    [
        ctx.rank(),
        ctx.world_size(),
        ctx.local_rank(),
        ctx.local_size(),
        ctx.cross_rank(),
        ctx.cross_size(),
    ]
}

/// The process id.
#[kolo::function]
pub fn pid() -> u32 {
    std::process::id()
}

/// The environment.
#[kolo::function]
pub fn environment() -> BTreeMap<String, String> {
    std::env::vars().collect()
}

/// Blocks until the process is killed.
#[kolo::function]
pub fn hang() {
    loop {
        std::thread::park();
    }
}

/// Ends the process.
#[kolo::function]
pub fn exit_with(ctx: &Context, rank: usize, code: i32) {
    if ctx.rank() == rank {
        eprintln!("about to exit with {code}");
        std::process::exit(code);
    }
}

/// A cluster of daemon processes and a group of workers on it.
pub async fn group(nodes: usize, slots: u32) -> anyhow::Result<(TestCluster, Executor)> {
    let cluster = TestCluster::builder()
        .nodes(nodes)
        .slots(slots)
        .start()
        .await?;
    let executor = Executor::builder()
        .hosts(nodes as u32)
        .slots(slots)
        .output(Output::Silent)
        .start(&cluster.connect().await?)
        .await?;
    Ok((cluster, executor))
}

/// Fails the test if `future` takes a minute: a hang must not look like patience.
pub async fn soon<T>(future: impl IntoFuture<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), future)
        .await
        .expect("it hangs")
}

/// Whether a process is there and not a zombie.
pub fn is_running(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        !stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .trim_start()
            .starts_with('Z')
    })
}

/// Waits until a process is gone.
pub async fn gone(pid: u32) {
    soon(async {
        while is_running(pid) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}
