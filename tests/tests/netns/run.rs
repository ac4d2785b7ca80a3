//! `kolo run` of a shell script over three hosts, and without a host that is cut off.

use std::process::{Command, Output, Stdio};
use std::time::Duration;

use kolo_harness::TestCluster;
use kolo_transport::wire::{JobInfo, JobState};

use crate::elastic::{cut, heal};
use crate::needs_namespaces;
use crate::world::World;

/// `kolo run OPTIONS -- sh -c SCRIPT` on the boss's host.
fn kolo_run(cluster: &TestCluster, options: &[&str], script: &str) -> anyhow::Result<Command> {
    let mut command = cluster.kolo()?;
    command
        .arg("run")
        .args(options)
        .args(["--", "sh", "-c", script])
        .stdin(Stdio::null())
        .stderr(Stdio::piped());
    Ok(command)
}

async fn output(mut command: Command) -> anyhow::Result<Output> {
    Ok(tokio::task::spawn_blocking(move || command.output()).await??)
}

#[test]
fn a_script_runs_on_three_hosts_and_a_job_that_goes_on_does_without_one_that_is_cut_off()
-> anyhow::Result<()> {
    needs_namespaces!(Ok(()));
    let world = World::new(&["a", "b", "c"])?;
    world.network("eth0", "10.1.0.", 1500)?;
    let lease = Duration::from_secs(3);
    let builder = TestCluster::builder().slots(2).lease(lease);
    world.run_with("10.1.0.100", builder, async |cluster| {
        let script = "echo $GROUP_RANK $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR $KOLO_HOSTNAME; \
                      ip -4 -o address show dev eth0 | grep -o 'inet [0-9.]*'";
        let out = output(kolo_run(cluster, &["-n", "6"], script)?).await?;
        let mut lines: Vec<String> = String::from_utf8_lossy(&out.stdout)
            .lines()
            .map(str::to_owned)
            .collect();
        lines.sort();
        let expected: Vec<String> = (0..6)
            .flat_map(|rank| {
                let (host, local) = (rank / 2, rank % 2);
                let name = ["a", "b", "c"][host];
                [
                    format!("[{rank}]<stdout>:{host} {local}/2 10.1.0.1 {name}"),
                    format!("[{rank}]<stdout>:inet 10.1.0.{}", host + 1),
                ]
            })
            .collect();
        anyhow::ensure!(
            out.status.success() && lines == expected,
            "{lines:?} {out:?}"
        );

        let out = output(kolo_run(
            cluster,
            &["-n", "6"],
            "[ $RANK != 4 ] && sleep 1000; exit 5",
        )?)
        .await?;
        let err = String::from_utf8_lossy(&out.stderr).into_owned();
        anyhow::ensure!(out.status.code() == Some(5), "{out:?}");
        anyhow::ensure!(err.contains("kolo: rank 4 on c (pid "), "{err}");
        let is_idle = |info: &kolo_transport::wire::ClusterInfo| {
            let mut nodes = info.nodes.iter();
            info.running_jobs == 0 && nodes.all(|node| node.available == node.total)
        };
        cluster.wait_until("the cluster is idle", is_idle).await?;

        let options = "--nnodes 1:3 --nproc-per-node 2 --max-restarts 0 --prefix none";
        let options: Vec<&str> = options.split(' ').collect();
        let program = "if [ $WORLD_SIZE = 4 ]; then \
                       echo $RANK try $TORCHELASTIC_RESTART_COUNT on $KOLO_HOSTNAME; exit 0; fi; \
                       exec sleep 1000";
        let mut command = kolo_run(cluster, &options, program)?;
        let running = tokio::task::spawn_blocking(move || command.output());
        let is_whole = |jobs: &[JobInfo]| jobs.iter().any(|job| job.state == JobState::Healthy);
        cluster
            .wait_for_jobs("the job is healthy", is_whole)
            .await?;
        cut(&world.hosts[2])?;
        let out = running.await??;
        let err = String::from_utf8_lossy(&out.stderr);
        anyhow::ensure!(out.status.code() == Some(0), "{err}");
        let printed = String::from_utf8_lossy(&out.stdout);
        let mut lines: Vec<&str> = printed.lines().collect();
        lines.sort_unstable();
        let expected = [
            "0 try 0 on a",
            "1 try 0 on a",
            "2 try 0 on b",
            "3 try 0 on b",
        ];
        anyhow::ensure!(lines == expected, "{lines:?} {err}");
        let line = err.lines().find(|line| line.contains("started anew"));
        let is_told =
            line.is_some_and(|line| line.contains("6 -> 4 workers, failures so far 0 of 0"));
        let why = "kolo: rank 4 on c: its node was lost: ";
        anyhow::ensure!(is_told && err.contains(why), "{err}");
        heal(&world.hosts[2])
    })
}
