//! Scripts for Horovod's elastic launcher: as static jobs, and as jobs that heal in place.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::jobs::{Random, Running, Script, Shape, kill, turn};
use anyhow::{Context as _, ensure};
use kolo_harness::{Framework, TestCluster, kolo};

/// Nobody leaves and nobody comes: it is a script like others, as under `horovodrun`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_elastic_horovod_program_runs_as_a_static_job() -> anyhow::Result<()> {
    let Some(script) = Script::find(Framework::Horovod, "horovod_elastic.py")? else {
        return Ok(());
    };
    let _turn = turn().await;
    script.check(kolo(), &["-n", "2"], Shape { size: 2, hosts: 1 })
}

/// A line of a script that takes steps.
#[derive(Debug, Clone, Copy)]
struct Step {
    number: u64,
    rank: usize,
    size: usize,
    pid: i32,
}

impl Step {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.strip_prefix("step ")?.split(' ');
        let number = words.next()?.parse().ok()?;
        let (rank, size) = words.next()?.split_once('/')?;
        Some(Self {
            number,
            rank: rank.parse().ok()?,
            size: size.parse().ok()?,
            pid: words.next()?.parse().ok()?,
        })
    }
}

/// A job that takes steps until it is told to stop.
struct Steps {
    running: Running,
    stop: PathBuf,
    /// The highest step so far.
    last: u64,
    _dir: tempfile::TempDir,
}

impl Steps {
    fn start(
        script: Script,
        kolo: std::process::Command,
        options: &[&str],
    ) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let stop = dir.path().join("stop");
        let mut command = script.command(kolo, options);
        command.arg(&stop);
        Ok(Self {
            running: Running::start(command)?,
            stop,
            last: 0,
            _dir: dir,
        })
    }

    /// The next step of any rank. No step is lost but those that were not committed by all.
    fn next(&mut self) -> anyhow::Result<Step> {
        loop {
            let line = self.running.line()?;
            let line = line.with_context(|| format!("the job has ended: {:?}", self.running))?;
            let Some(step) = Step::parse(&line) else {
                continue;
            };
            ensure!(
                step.number + 1 >= self.last && step.number <= self.last + 1,
                "{step:?} after step {}",
                self.last
            );
            self.last = self.last.max(step.number);
            return Ok(step);
        }
    }

    /// The process of each rank, once the group has so many members.
    fn group(&mut self, size: usize) -> anyhow::Result<Vec<i32>> {
        let mut pids = BTreeMap::new();
        while pids.len() < size {
            let step = self.next()?;
            if step.size == size {
                pids.insert(step.rank, step.pid);
            } else {
                pids.clear();
            }
        }
        Ok(pids.into_values().collect())
    }

    /// Some more steps of the group.
    fn work(&mut self, steps: u64) -> anyhow::Result<()> {
        let until = self.last + steps;
        while self.last < until {
            self.next()?;
        }
        Ok(())
    }

    /// All members end with success.
    fn finish(mut self, size: usize) -> anyhow::Result<()> {
        std::fs::write(&self.stop, "")?;
        let mut done = 0;
        while let Some(line) = self.running.line()? {
            done += usize::from(line.starts_with("done ") && line.contains(&format!("/{size} ")));
        }
        let ended = self.running.end()?;
        ensure!(ended.status.success() && done == size, "{done}, {ended:?}");
        Ok(())
    }
}

fn steps() -> anyhow::Result<Option<Script>> {
    Script::find(Framework::Horovod, "horovod_steps.py")
}

/// Each round one host is lost, drained or no longer told by the discovery script, and comes back the same way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn horovod_workers_go_on_while_hosts_leave_and_come() -> anyhow::Result<()> {
    let Some(script) = steps()? else {
        return Ok(());
    };
    let _turn = turn().await;
    let mut random = Random::new()?;
    let builder = TestCluster::builder().nodes(2).slots(1);
    let mut cluster = builder.hostnames(["a", "b"]).start().await?;
    let dir = tempfile::tempdir()?;
    let told = dir.path().join("hosts");
    let tell = |hosts: &str| {
        let new = dir.path().join("new");
        std::fs::write(&new, hosts)?;
        std::fs::rename(&new, &told)
    };
    // At first the script knows one host; it adds the other one.
    tell("a:1\n")?;
    let discovery = format!("cat {}", told.display());
    let options = [
        "--min-np",
        "1",
        "--max-np",
        "2",
        "--elastic",
        "horovod",
        "--host-discovery-script",
        &discovery,
    ];
    let mut job = Steps::start(script, cluster.kolo()?, &options)?;
    let mut survivor = job.group(1)?[0];
    job.work(1 + random.below(10))?;
    tell("a:1\nb:1\n")?;
    for round in 0..4 {
        let both = job.group(2)?;
        // whoever has been there longest is first, and hands its state on.
        ensure!(both[0] == survivor, "round {round}: {both:?}, {survivor}");
        job.work(1 + random.below(10))?;
        match round % 3 {
            0 => cluster.kill_node(1)?,
            1 => node(&cluster, "drain")?,
            _ => tell("a:1\n")?,
        }
        let alone = job.group(1)?;
        ensure!(alone == [survivor], "round {round}: {alone:?} of {both:?}");
        survivor = alone[0];
        job.work(1 + random.below(10))?;
        match round % 3 {
            0 => cluster.restart_node(1).await?,
            1 => node(&cluster, "undrain")?,
            _ => tell("a:1\nb:1\n")?,
        }
    }
    job.group(2)?;
    job.finish(2)?;
    Ok(cluster.stop().await?)
}

/// `kolo node drain|undrain b`.
fn node(cluster: &TestCluster, word: &str) -> anyhow::Result<()> {
    let out = cluster.kolo()?.args(["node", word, "b"]).output()?;
    ensure!(out.status.success(), "{out:?}");
    Ok(())
}

/// In every second round another worker is killed while the group is smaller. A survivor that waits for Gloo's time-out to notice a loss
/// waits longer than the job may take.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn horovod_workers_survive_losses_at_random_moments() -> anyhow::Result<()> {
    let Some(script) = steps()? else {
        return Ok(());
    };
    let _turn = turn().await;
    let mut random = Random::new()?;
    let options = "-n 3 --min-np 1 --max-restarts 50 --elastic horovod \
                   --env HOROVOD_GLOO_TIMEOUT_SECONDS=600";
    let options: Vec<&str> = options.split(' ').collect();
    let mut job = Steps::start(script, kolo(), &options)?;
    for round in 0..4 {
        let mut left = job.group(3)?;
        job.work(1 + random.below(40))?;
        kill(left.remove(random.below(3) as usize))?;
        if round % 2 == 1 {
            let smaller = job.group(2)?;
            ensure!(
                smaller == left,
                "round {round}: {smaller:?} instead of {left:?}"
            );
            kill(left.remove(random.below(2) as usize))?;
        }
        let size = left.len();
        let smaller = job.group(size)?;
        ensure!(
            smaller == left,
            "round {round}: {smaller:?} instead of {left:?}"
        );
    }
    job.group(3)?;
    job.finish(3)
}
