//! Nodes are checked before workers of a group start there.

use std::time::Duration;

use kolo::prelude::*;
use kolo_harness::TestCluster;

use super::job::wait_for_job;
use crate::support::{gone, soon, whoami};

/// The start timeout of groups that never start.
const SHORT: Duration = Duration::from_secs(2);

#[tokio::test]
async fn a_node_gets_workers_when_its_health_check_succeeds() -> anyhow::Result<()> {
    let cluster = TestCluster::builder().start().await?;
    let folder = tempfile::tempdir()?;
    let well = folder.path().join("well");
    let script = format!(
        "test -e '{}' || {{ echo looks; echo no GPU >&2; exit 3; }}",
        well.display()
    );
    let second = Duration::from_secs(1);
    let builder = Executor::builder()
        .workers(1..=1)
        .health_check("sh", ["-c", &script], Duration::from_secs(10))
        .cooldown(second..=second)
        .output(Output::Silent);
    let driver = cluster.connect().await?;
    let starting = tokio::spawn(async move { builder.start(&driver).await });
    let jobs = cluster
        .wait_for_jobs("the job waits", |jobs| !jobs.is_empty())
        .await?;
    wait_for_job(&cluster, jobs[0].job, |info| {
        let left_out = info.membership.iter().flat_map(|info| &info.left_out);
        let mut failed = left_out.filter(|host| {
            host.why == "its health check has failed: `sh` ended with exit code 3: no GPU"
        });
        failed.next().is_some()
    })
    .await?;
    std::fs::write(well, "")?;
    let executor = soon(starting).await??;
    assert_eq!(soon(executor.run(whoami, ())).await?, [0]);
    soon(executor.shutdown()).await?;
    a_job_without_a_healthy_node_ends_and_says_why(&cluster).await?;
    cluster.stop().await?;
    Ok(())
}

async fn a_job_without_a_healthy_node_ends_and_says_why(
    cluster: &TestCluster,
) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let pid = folder.path().join("pid");
    let script = format!("echo $$ > '{}'; exec sleep 600", pid.display());
    let late = Duration::from_millis(400);
    for (program, within, why) in [
        ("sh", late, "`sh` did not end within 400ms"),
        ("no-such-check", SHORT, "`no-such-check` was not started"),
    ] {
        let builder = Executor::builder()
            .workers(1..=1)
            .health_check(program, ["-c", &script], within)
            .start_timeout(SHORT)
            .output(Output::Silent);
        let started = soon(builder.start(&cluster.connect().await?)).await;
        let error = started.err().map(|error| error.to_string());
        let error = error.unwrap_or_default();
        assert!(error.contains(why), "{error}");
    }
    let pid = std::fs::read_to_string(pid)?.trim().parse()?;
    gone(pid).await;
    Ok(())
}
