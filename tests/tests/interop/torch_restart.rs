//! A script of torch.distributed that is started anew after each loss, and goes on from its checkpoint.
//!
//! When something is lost depends on a seed. Each moment is an event of the script: a number of steps, or its beginning.

use std::process::Command;

use crate::jobs::{Ended, Random, Running, Script, kill, turn};
use anyhow::{Context as _, ensure};
use kolo_harness::{Framework, TestCluster, kolo};

const ROUNDS: u32 = 4;
/// Most steps before a loss.
const STEPS: u64 = 30;

/// What a rank says.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Line {
    word: String,
    rank: usize,
    size: usize,
    restarts: u32,
    group: u64,
    number: u64,
}

impl Line {
    fn parse(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split(' ').collect();
        let [word, place, restarts, group, number] = words[..] else {
            return None;
        };
        let (rank, size) = place.split_once('/')?;
        Some(Self {
            word: word.to_owned(),
            rank: rank.parse().ok()?,
            size: size.parse().ok()?,
            restarts: restarts.parse().ok()?,
            group: group.parse().ok()?,
            number: number.parse().ok()?,
        })
    }
}

/// The group that runs.
#[derive(Debug)]
struct Group {
    number: u64,
    pids: Vec<i32>,
}

/// A job under way.
struct Job {
    running: Running,
    folder: tempfile::TempDir,
    /// Failures so far.
    restarts: u32,
    group: Group,
    /// Steps that are in the checkpoint.
    saved: u64,
}

impl Job {
    /// `kolo run OPTIONS` of the script. Without torch there is none.
    fn start(kolo: Command, options: &[&str]) -> anyhow::Result<Option<Self>> {
        let Some(script) = Script::find(Framework::Torch, "torch_restart.py")? else {
            return Ok(None);
        };
        let folder = tempfile::tempdir()?;
        let mut command = script.command(kolo, options);
        command.arg(folder.path());
        Ok(Some(Self {
            running: Running::start(command)?,
            folder,
            restarts: 0,
            group: Group {
                number: 0,
                pids: Vec::new(),
            },
            saved: 0,
        }))
    }

    /// The next line. Each group has the right count of restarts, and begins with what was saved.
    fn line(&mut self) -> anyhow::Result<Line> {
        let text = self.running.line()?.context("the job has ended")?;
        let line = Line::parse(&text).context(text)?;
        let is_new = line.group > self.group.number;
        ensure!(
            !is_new || line.restarts == self.restarts,
            "{} restarts were expected: {line:?}",
            self.restarts
        );
        match line.word.as_str() {
            // Rank 0 alone: what others say comes another way, and may be late.
            "began" if line.rank == 0 => {
                ensure!(line.number >= self.saved, "{}: {line:?}", self.saved);
            }
            "step" => self.saved = self.saved.max(line.number),
            _ => {}
        }
        Ok(line)
    }

    /// Waits until torch is there in all ranks of a new group of this size.
    fn enters(&mut self, size: usize) -> anyhow::Result<()> {
        let mut pids = vec![None; size];
        let (before, mut number) = (self.group.number, self.group.number);
        while pids.iter().any(Option::is_none) {
            let line = self.line()?;
            if line.word != "entered" || line.size != size || line.group <= before {
                continue;
            }
            // A group may be lost before all have said so.
            if line.group > number {
                number = line.group;
                pids.fill(None);
            }
            if line.group == number {
                pids[line.rank] = Some(i32::try_from(line.number)?);
            }
        }
        let pids = pids.into_iter().flatten().collect();
        self.group = Group { number, pids };
        Ok(())
    }

    /// Waits for so many steps of the group, or for none of them.
    fn steps(&mut self, steps: u64) -> anyhow::Result<()> {
        let mut made = 0;
        while made < steps {
            let line = self.line()?;
            made += u64::from(line.word == "step" && line.group == self.group.number);
        }
        Ok(())
    }

    /// Waits for a group of this size, and for some moment of its life: a third of the time before it has met.
    fn some_moment(&mut self, size: usize, random: &mut Random) -> anyhow::Result<()> {
        self.enters(size)?;
        let early = random.below(3) == 0;
        let steps = random.below(STEPS);
        self.steps(if early { 0 } else { 1 + steps })
    }

    fn kill(&mut self, random: &mut Random) -> anyhow::Result<()> {
        let pids = &self.group.pids;
        let rank = random.below(pids.len() as u64) as usize;
        kill(pids[rank])?;
        self.restarts += 1;
        Ok(())
    }

    /// Has it stop after some steps of a group of this size, and all of it end well.
    fn end(mut self, size: usize) -> anyhow::Result<Ended> {
        self.enters(size)?;
        self.steps(3)?;
        std::fs::write(self.folder.path().join("stop"), "")?;
        let (group, restarts, saved) = (self.group.number, self.restarts, self.saved);
        let ended = self.running.end()?;
        let lines = ended.out.lines().filter_map(Line::parse);
        let mut last: Vec<Line> = lines.filter(|line| line.word == "ended").collect();
        last.sort_by_key(|line| line.rank);
        let ranks: Vec<usize> = last.iter().map(|line| line.rank).collect();
        let is_right = |line: &Line| {
            (line.size, line.restarts, line.group) == (size, restarts, group)
                && line.number == last[0].number
                && line.number >= saved
        };
        ensure!(
            ended.status.success()
                && ranks == (0..size).collect::<Vec<_>>()
                && last.iter().all(is_right),
            "{ended:?}"
        );
        Ok(ended)
    }
}

/// The lines of kolo about restarts.
fn told(ended: &Ended) -> Vec<&str> {
    let lines = ended.err.lines();
    lines
        .filter(|line| line.contains("the group is started anew: "))
        .collect()
}

#[tokio::test]
async fn a_torch_program_goes_on_after_killed_workers() -> anyhow::Result<()> {
    let _turn = turn().await;
    let most = ROUNDS.to_string();
    let Some(mut job) = Job::start(kolo(), &["-n", "2", "--max-restarts", &most])? else {
        return Ok(());
    };
    let mut random = Random::new()?;
    for _ in 0..ROUNDS {
        job.some_moment(2, &mut random)?;
        job.kill(&mut random)?;
    }
    let ended = job.end(2)?;
    let told = told(&ended);
    ensure!(told.len() == ROUNDS as usize, "{told:?}");
    for (count, line) in (1..).zip(told) {
        let expected = format!("failures so far {count} of {ROUNDS}");
        ensure!(line.contains(&expected), "{line}");
        let is_why = |line: &str| {
            line.contains("ended with signal 9 (SIGKILL)")
                && line.contains(&format!("; restart {count} of {ROUNDS}"))
        };
        ensure!(ended.err.lines().any(is_why), "{}", ended.err);
    }
    Ok(())
}

/// Nodes are lost and come back: no restart is used up, and none is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_torch_program_goes_on_after_lost_nodes() -> anyhow::Result<()> {
    let _turn = turn().await;
    let builder = TestCluster::builder().nodes(2).slots(1);
    let mut cluster = builder.hostnames(["a", "b"]).start().await?;
    let options = "--nnodes 1:2 --nproc-per-node 1 --max-restarts 0";
    let options: Vec<&str> = options.split(' ').collect();
    let Some(mut job) = Job::start(cluster.kolo()?, &options)? else {
        return Ok(cluster.stop().await?);
    };
    let mut random = Random::new()?;
    for _ in 0..ROUNDS {
        job.some_moment(2, &mut random)?;
        let node = random.below(2) as usize;
        cluster.kill_node(node)?;
        job.some_moment(1, &mut random)?;
        cluster.restart_node(node).await?;
    }
    let ended = job.end(2)?;
    let told = told(&ended);
    ensure!(told.len() == 2 * ROUNDS as usize, "{told:?}");
    ensure!(
        told.iter()
            .all(|line| line.contains("failures so far 0 of 0")),
        "{told:?}"
    );
    Ok(cluster.stop().await?)
}
