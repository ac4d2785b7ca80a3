//! `kolo run` of a shell script over three hosts, and what is left when a part of it is killed: nothing.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::Duration;

use kolo_harness::TestCluster;
use kolo_transport::wire::{JobInfo, JobState};
use rustix::process::{Pid, Signal, kill_process};

use crate::elastic::{cut, heal};
use crate::needs_namespaces;
use crate::world::World;

/// Says who and where it is, then stays, with a child that left its session.
const STAYS: &str = "setsid sh -c 'echo $$; sleep 1000' & echo $$; sleep 0.2; echo ready; wait";

fn world() -> anyhow::Result<World> {
    let world = World::new(&["a", "b", "c"])?;
    world.network("eth0", "10.1.0.", 1500)?;
    Ok(world)
}

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

/// A job of six workers that stays, the process ids of its workers and of their children.
struct Running {
    launcher: Child,
    /// In rank order, the worker's and its child's.
    pids: Vec<Vec<u32>>,
    _out: BufReader<ChildStdout>,
}

impl Running {
    async fn start(cluster: &TestCluster) -> anyhow::Result<Self> {
        let mut command = kolo_run(cluster, &["-n", "6", "--prefix", "{rank} "], STAYS)?;
        command.stdout(Stdio::piped());
        tokio::task::spawn_blocking(move || {
            let mut launcher = command.spawn()?;
            let Some(out) = launcher.stdout.take() else {
                anyhow::bail!("no output");
            };
            let mut out = BufReader::new(out);
            let mut pids = vec![Vec::new(); 6];
            let mut ready = 0;
            while ready < 6 {
                let mut line = String::new();
                anyhow::ensure!(
                    out.read_line(&mut line)? > 0,
                    "it ended: {:?}",
                    launcher.wait_with_output()
                );
                match line.trim().split_once(' ') {
                    Some((_, "ready")) => ready += 1,
                    Some((rank, pid)) => pids[rank.parse::<usize>()?].push(pid.parse()?),
                    None => anyhow::bail!("{line}"),
                }
            }
            anyhow::ensure!(pids.iter().all(|pids| pids.len() == 2), "{pids:?}");
            Ok(Self {
                launcher,
                pids,
                _out: out,
            })
        })
        .await?
    }

    /// Waits for the launcher's end and until nothing is left on any host.
    async fn end(self) -> anyhow::Result<(Option<i32>, String)> {
        let Self { launcher, pids, .. } = self;
        let out = tokio::task::spawn_blocking(move || launcher.wait_with_output()).await??;
        let left = || {
            let running = |pid: &&u32| {
                std::fs::read_to_string(format!("/proc/{pid}/stat"))
                    .is_ok_and(|stat| !stat.contains(") Z "))
            };
            pids.iter().flatten().filter(running).count()
        };
        tokio::time::timeout(Duration::from_secs(60), async {
            while left() > 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await
        .map_err(|_| anyhow::anyhow!("{} processes are left", left()))?;
        Ok((
            out.status.code(),
            String::from_utf8_lossy(&out.stderr).into_owned(),
        ))
    }
}

fn kill(pid: u32) -> anyhow::Result<()> {
    let pid = Pid::from_raw(pid.try_into()?).ok_or_else(|| anyhow::anyhow!("no process"))?;
    Ok(kill_process(pid, Signal::KILL)?)
}

/// All resources are free again.
async fn idle(cluster: &TestCluster, nodes: usize) -> anyhow::Result<()> {
    let is_idle = |info: &kolo_transport::wire::ClusterInfo| {
        let alive: Vec<_> = info.nodes.iter().filter(|node| node.alive).collect();
        info.running_jobs == 0
            && alive.len() == nodes
            && alive.iter().all(|node| node.available == node.total)
    };
    cluster.wait_until("the cluster is idle", is_idle).await?;
    Ok(())
}

#[test]
fn a_script_runs_on_three_hosts() -> anyhow::Result<()> {
    needs_namespaces!(Ok(()));
    world()?.run("10.1.0.100", async |cluster| {
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
        idle(cluster, 3).await
    })
}

#[test]
fn a_killed_launcher_leaves_nothing_on_any_host() -> anyhow::Result<()> {
    needs_namespaces!(Ok(()));
    world()?.run("10.1.0.100", async |cluster| {
        let running = Running::start(cluster).await?;
        kill(running.launcher.id())?;
        let (code, _) = running.end().await?;
        anyhow::ensure!(code.is_none());
        idle(cluster, 3).await
    })
}

#[test]
fn a_killed_rank_ends_the_others_on_all_hosts() -> anyhow::Result<()> {
    needs_namespaces!(Ok(()));
    world()?.run("10.1.0.100", async |cluster| {
        let running = Running::start(cluster).await?;
        // The script itself, whose last words are the launcher's.
        let stat = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/cmdline"));
        let rank = running.pids[3]
            .iter()
            .find(|pid| stat(**pid).is_ok_and(|line| line.contains("ready")));
        kill(*rank.ok_or_else(|| anyhow::anyhow!("rank 3 is gone"))?)?;
        let (code, err) = running.end().await?;
        anyhow::ensure!(code == Some(137), "{code:?} {err}");
        anyhow::ensure!(
            err.contains("kolo: rank 3 on b (pid ") && err.contains("signal 9 (SIGKILL)"),
            "{err}"
        );
        idle(cluster, 3).await
    })
}

#[test]
fn a_killed_node_ends_the_job_on_all_hosts() -> anyhow::Result<()> {
    needs_namespaces!(Ok(()));
    let world = world()?;
    let builder = TestCluster::builder()
        .on_lab(&world.boss, "10.1.0.100".parse()?, &world.hosts)
        .slots(2);
    world.boss.enter(|| {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()?;
        runtime.block_on(async {
            let mut cluster = builder.start().await?;
            let running = Running::start(&cluster).await?;
            cluster.kill_node(1)?;
            let (code, err) = running.end().await?;
            anyhow::ensure!(code == Some(1), "{code:?} {err}");
            anyhow::ensure!(
                err.contains("kolo: rank 2 on b (pid ") && err.contains("its node was lost"),
                "{err}"
            );
            idle(&cluster, 2).await
        })
    })?
}

#[test]
fn a_job_that_goes_on_does_without_a_host_that_is_cut_off() -> anyhow::Result<()> {
    needs_namespaces!(Ok(()));
    let world = world()?;
    let builder = TestCluster::builder()
        .slots(2)
        .lease(Duration::from_secs(3));
    world.run_with("10.1.0.100", builder, async |cluster| {
        let options = [
            "--nnodes",
            "1:3",
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "0",
            "--prefix",
            "none",
        ];
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
        let why = "kolo: rank 4 on c: its node was lost: no heartbeat";
        anyhow::ensure!(is_told && err.contains(why), "{err}");
        heal(&world.hosts[2])
    })
}
