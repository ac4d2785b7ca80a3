//! Nothing is left behind (O-1), and processes see what they should.

use kolo::prelude::*;
use kolo_harness::TestCluster;

use crate::support::{environment, gone, group, is_running, soon};

/// Starts a child that leaves the worker's session, with a child of its own; gives both ids.
#[kolo::function]
fn daemonize() -> anyhow::Result<Vec<u32>> {
    let output = std::process::Command::new("sh")
        .args([
            "-c",
            "setsid sh -c 'sleep 1000 & echo $$ $!; wait' & read x < /dev/zero & wait $!",
        ])
        .stdout(std::process::Stdio::piped())
        .spawn();
    // The shell above never ends, so its first line is read by hand.
    let mut child = output?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line)?;
    }
    let mut pids = line
        .split_whitespace()
        .map(str::parse)
        .collect::<Result<Vec<u32>, _>>()?;
    pids.push(child.id());
    Ok(pids)
}

async fn family(executor: &Executor) -> anyhow::Result<Vec<u32>> {
    let pids: Vec<u32> = soon(executor.run(daemonize, ())).await?.concat();
    assert_eq!(pids.len(), 6);
    assert!(pids.iter().all(|pid| is_running(*pid)), "{pids:?}");
    Ok(pids)
}

#[tokio::test]
async fn grandchildren_are_gone_after_a_shutdown() -> anyhow::Result<()> {
    let (cluster, executor) = group(1, 2).await?;
    let pids = family(&executor).await?;
    executor.shutdown().await?;
    for pid in pids {
        gone(pid).await;
    }
    cluster.stop().await?;
    Ok(())
}

#[tokio::test]
async fn grandchildren_are_gone_when_the_daemon_is_killed() -> anyhow::Result<()> {
    let (mut cluster, executor) = group(1, 2).await?;
    let pids = family(&executor).await?;
    cluster.kill_node(0)?;
    for pid in pids {
        gone(pid).await;
    }
    Ok(())
}

#[tokio::test]
async fn the_environment_is_that_of_both_families_and_of_kolo() -> anyhow::Result<()> {
    let cluster = TestCluster::builder().nodes(2).slots(2).start().await?;
    let executor = Executor::builder()
        .hosts(2)
        .slots(2)
        .env("MINE", "yes")
        .env("OMP_NUM_THREADS", "3")
        .output(Output::Silent)
        .start(&cluster.connect().await?)
        .await?;
    let seen = soon(executor.run(environment, ())).await?;
    for (rank, env) in seen.iter().enumerate() {
        let get = |name: &str| env.get(name).map(String::as_str).unwrap_or_default();
        for (names, value) in [
            (&["HOROVOD_RANK", "RANK", "KOLO_RANK"][..], rank),
            (&["HOROVOD_SIZE", "WORLD_SIZE", "KOLO_SIZE"], 4),
            (&["HOROVOD_LOCAL_RANK", "LOCAL_RANK"], rank % 2),
            (&["HOROVOD_LOCAL_SIZE", "LOCAL_WORLD_SIZE"], 2),
            (&["HOROVOD_CROSS_RANK", "GROUP_RANK"], rank / 2),
            (&["HOROVOD_CROSS_SIZE", "GROUP_WORLD_SIZE"], 2),
        ] {
            for name in names {
                assert_eq!(get(name), value.to_string(), "{name} of rank {rank}");
            }
        }
        assert_eq!((get("MINE"), get("OMP_NUM_THREADS")), ("yes", "3"));
        assert_eq!(
            (get("HOROVOD_CONTROLLER"), get("HOROVOD_CPU_OPERATIONS")),
            ("gloo", "gloo")
        );
        assert!(get("MASTER_PORT").parse::<u16>().is_ok_and(|port| port > 0));
        assert_eq!(get("MASTER_ADDR"), seen[0]["MASTER_ADDR"]);
        assert!(env.get("CUDA_VISIBLE_DEVICES").is_none_or(String::is_empty));
        assert!(
            !env.keys().any(|name| name.contains("TOKEN")),
            "no secret in an environment"
        );
    }
    executor.shutdown().await?;
    cluster.stop().await?;
    Ok(())
}
