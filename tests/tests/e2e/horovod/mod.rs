//! `kolo run --elastic horovod`, with workers that speak Horovod's elastic protocol and are no Python.

mod player;
mod wire;

use std::io::{BufRead as _, BufReader, Lines};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};

use anyhow::{Context as _, bail, ensure};
use kolo_harness::{TestCluster, kolo};
use rustix::process::{Pid, Signal, kill_process};

use crate::run::words;

/// Names the file whose presence ends a player.
const PLAYER: &str = "PLAYS_HOROVOD_UNTIL";

/// A file beside that one, whose presence lets a player fail at once.
const NO_LUCK: &str = "no-luck";

/// No test: a worker. It is this binary, started with this function's name as the filter.
#[test]
fn player_process() -> anyhow::Result<()> {
    match std::env::var_os(PLAYER) {
        Some(stop) if Path::new(&stop).with_file_name(NO_LUCK).exists() => {
            eprintln!("no luck");
            std::process::exit(3)
        }
        Some(stop) => player::play(stop.as_ref()),
        None => Ok(()),
    }
}

/// A job whose workers are players. It does not outlive its test.
struct Game {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    errors: Lines<BufReader<ChildStderr>>,
    stop: PathBuf,
    _dir: tempfile::TempDir,
}

impl Drop for Game {
    fn drop(&mut self) {
        // Its end is the wish, whether it has come already or not.
        drop(self.child.kill());
        drop(self.child.wait());
        for line in self.errors.by_ref().map_while(Result::ok) {
            eprintln!("{line}");
        }
    }
}

impl Game {
    fn start(mut kolo: Command, options: &[&str]) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let stop = dir.path().join("stop");
        let player = format!("{PLAYER}={}", stop.display());
        kolo.args(["run", "--prefix", "none", "--env", &player]);
        kolo.args(options).arg("--").arg(std::env::current_exe()?);
        kolo.args(["horovod::player_process", "--exact", "--nocapture"]);
        kolo.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = kolo.stderr(Stdio::piped()).spawn()?;
        let out = child.stdout.take().context("it is piped")?;
        let errors = child.stderr.take().context("it is piped")?;
        Ok(Self {
            child,
            lines: BufReader::new(out).lines(),
            errors: BufReader::new(errors).lines(),
            stop,
            _dir: dir,
        })
    }

    fn line(&mut self, word: &str) -> anyhow::Result<String> {
        loop {
            let line = self.lines.next().context("the job has ended")??;
            ensure!(
                !line.contains("bad notice") && !line.contains("panicked"),
                "{line}"
            );
            if let Some(rest) = line.strip_prefix(word) {
                return Ok(rest.to_owned());
            }
        }
    }

    /// The next group: the process of each rank.
    fn group(&mut self, size: usize) -> anyhow::Result<Vec<i32>> {
        let mut pids = vec![0; size];
        while pids.contains(&0) {
            let line = self.line("member ")?;
            let (place, pid) = line.split_once(' ').context("no pid")?;
            let (rank, of) = place.split_once('/').context("no place")?;
            ensure!(of.parse() == Ok(size), "{line} in a group of {size}");
            pids[rank.parse::<usize>()?] = pid.parse()?;
        }
        Ok(pids)
    }

    fn finish(mut self, size: usize) -> anyhow::Result<()> {
        std::fs::write(&self.stop, "")?;
        for _ in 0..size {
            self.line("done ")?;
        }
        let status = self.child.wait()?;
        ensure!(status.success(), "{status}");
        Ok(())
    }
}

fn kill(pid: i32) -> anyhow::Result<()> {
    let pid = Pid::from_raw(pid).context("no pid")?;
    Ok(kill_process(pid, Signal::KILL)?)
}

#[test]
fn survivors_keep_their_process_and_a_new_one_takes_the_place_of_the_lost() -> anyhow::Result<()> {
    let options = ["-n", "3", "--min-np", "1", "--elastic", "horovod"];
    let mut game = Game::start(kolo(), &options)?;
    let mut group = game.group(3)?;
    for rank in [1, 0, 2] {
        kill(group.remove(rank))?;
        ensure!(game.group(2)? == group, "the survivors, in their order");
        let whole = game.group(3)?;
        ensure!(whole[..2] == group, "{whole:?} after {group:?}");
        group = whole;
    }
    game.finish(3)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_node_and_a_new_node_change_the_group_in_place() -> anyhow::Result<()> {
    let builder = TestCluster::builder().nodes(2).slots(2);
    let mut cluster = builder.hostnames(["a", "b"]).start().await?;
    test_fault_tolerance_without_scaling(&cluster)?;
    let options = ["-n", "4", "--min-np", "2", "--on-change", "in-place"];
    let mut game = Game::start(cluster.kolo()?, &options)?;
    let whole = game.group(4)?;
    cluster.kill_node(1)?;
    let left = game.group(2)?;
    ensure!(
        left.iter().all(|pid| whole.contains(pid)),
        "{left:?} of {whole:?}"
    );
    cluster.add_node_with_slots(2).await?;
    let again = game.group(4)?;
    ensure!(again[..2] == left, "{again:?} after {left:?}");
    game.finish(4)?;
    Ok(cluster.stop().await?)
}

/// A host list that never changes: the failed worker comes back on its host, where Horovod goes on with the other host alone.
fn test_fault_tolerance_without_scaling(cluster: &TestCluster) -> anyhow::Result<()> {
    let options = words("-n 4 -H a:2,b:2 --min-np 2 --elastic horovod");
    let mut game = Game::start(cluster.kolo()?, &options)?;
    let mut group = game.group(4)?;
    kill(group.remove(3))?;
    ensure!(game.group(3)? == group, "the survivors, in their order");
    let whole = game.group(4)?;
    ensure!(whole[..3] == group, "{whole:?} after {group:?}");
    game.finish(4)
}

#[test]
fn too_few_survivors_wait_for_others() -> anyhow::Result<()> {
    let options = ["-n", "2", "--max-restarts", "1", "--elastic", "horovod"];
    let mut game = Game::start(kolo(), &options)?;
    let group = game.group(2)?;
    kill(group[0])?;
    let again = game.group(2)?;
    ensure!(again[0] == group[1], "{again:?} after {group:?}");
    kill(again[1])?;
    match game.group(2) {
        Ok(more) => bail!("{more:?} after as many failures as are allowed"),
        Err(_) => ensure!(game.child.wait()?.code() == Some(137)),
    }
    Ok(())
}

/// The launcher tells of each failure when it comes, and not at the end of the job.
#[test]
fn a_new_worker_that_fails_is_told_at_once_and_costs_a_restart() -> anyhow::Result<()> {
    let options = words("-n 2 --min-np 1 --max-restarts 9 --elastic horovod");
    let mut game = Game::start(kolo(), &options)?;
    let group = game.group(2)?;
    let no_luck = game.stop.with_file_name(NO_LUCK);
    std::fs::write(&no_luck, "")?;
    kill(group[1])?;
    ensure!(game.group(1)? == group[..1], "the survivor");
    let told = loop {
        let line = game.errors.next().context("the job has ended")??;
        if let Some(told) = line.strip_prefix("kolo: a new worker has failed: ") {
            break told.to_owned();
        }
    };
    ensure!(
        told.starts_with("rank 1 on ") && told.ends_with(" ended with exit code 3: no luck"),
        "{told}"
    );
    std::fs::remove_file(no_luck)?;
    let again = game.group(2)?;
    ensure!(again[0] == group[0], "{again:?} after {group:?}");
    game.finish(2)
}
