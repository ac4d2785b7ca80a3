//! The rows of Horovod's `test/single/test_task_service.py` about a stream that fails on its way, by name. The others are
//! in `tests/tests/e2e/test_task_service.rs`.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, ChildStdout, Stdio};
use std::time::Duration;

use kolo_harness::TestCluster;
use kolo_harness::netns::Host;

use crate::needs_namespaces;
use crate::world::World;

/// How many lines are written before the network fails, and how many after.
const LINES: usize = 5_000;

/// A command on the only host, whose output has begun to arrive, and what it is to write in all.
struct Streaming {
    kolo: Child,
    out: BufReader<ChildStdout>,
    seen: String,
    all: String,
    go: tempfile::TempDir,
}

impl Streaming {
    /// It writes the second half when [`go`](Self::go) is called.
    fn start(cluster: &TestCluster) -> anyhow::Result<Self> {
        let go = tempfile::tempdir()?;
        let script = format!(
            "seq -f 'a very very useful log line #%.0f' {LINES}; until [ -e {}/go ]; do sleep 0.02; done; \
             seq -f 'and another one #%.0f' {LINES}",
            go.path().display()
        );
        let mut kolo = cluster
            .kolo()?
            .args(["run", "--prefix", "none", "--", "sh", "-c", &script])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let out = kolo.stdout.take().map(BufReader::new);
        let mut out = out.ok_or_else(|| anyhow::anyhow!("no output"))?;
        let mut seen = String::new();
        for _ in 0..LINES {
            out.read_line(&mut seen)?;
        }
        let all = (1..=LINES)
            .map(|number| format!("a very very useful log line #{number}\n"))
            .chain((1..=LINES).map(|number| format!("and another one #{number}\n")))
            .collect();
        Ok(Self {
            kolo,
            out,
            seen,
            all,
            go,
        })
    }

    fn go(&self) -> anyhow::Result<()> {
        Ok(std::fs::write(self.go.path().join("go"), "")?)
    }

    /// Its exit code and what it wrote to standard error, when it has ended. [`Streaming::seen`] is complete then.
    fn end(&mut self) -> anyhow::Result<(Option<i32>, String)> {
        self.out.read_to_string(&mut self.seen)?;
        let mut text = String::new();
        if let Some(mut stderr) = self.kolo.stderr.take() {
            stderr.read_to_string(&mut text)?;
        }
        Ok((self.kolo.wait()?.code(), text))
    }
}

impl Drop for Streaming {
    fn drop(&mut self) {
        self.kolo.kill().ok();
        self.kolo.wait().ok();
    }
}

#[test]
fn streams_that_fail_on_their_way() {
    needs_namespaces!();
    let world = World::new(&["a"]).unwrap();
    world.network("eth0", "10.1.0.", 1500).unwrap();
    let host = &world.hosts[0];
    world
        .run("10.1.0.100", async |cluster| {
            test_stream_command_output_reconnect(cluster, host)?;
            test_stream_command_output_no_reconnect(cluster, host)
        })
        .unwrap();
}

/// The network fails for a moment, and the command succeeds. Unlike there, no line is lost.
fn test_stream_command_output_reconnect(cluster: &TestCluster, host: &Host) -> anyhow::Result<()> {
    let mut streaming = Streaming::start(cluster)?;
    host.ip("link set eth0 down")?;
    streaming.go()?;
    // Less than what makes a member lost.
    std::thread::sleep(Duration::from_millis(800));
    host.ip("link set eth0 up")?;
    let (code, err) = streaming.end()?;
    anyhow::ensure!(code == Some(0), "{code:?} {err}");
    anyhow::ensure!(streaming.seen == streaming.all, "{}", streaming.seen.len());
    Ok(())
}

/// The network fails for good. The command fails, and what had come is there.
fn test_stream_command_output_no_reconnect(
    cluster: &TestCluster,
    host: &Host,
) -> anyhow::Result<()> {
    let mut streaming = Streaming::start(cluster)?;
    host.ip("link set eth0 down")?;
    streaming.go()?;
    let (code, err) = streaming.end()?;
    anyhow::ensure!(code == Some(1), "{code:?} {err}");
    anyhow::ensure!(err.contains("kolo: rank 0 on a (pid "), "{err}");
    anyhow::ensure!(
        streaming.all.starts_with(&streaming.seen) && streaming.seen.len() > 1024,
        "{}",
        streaming.seen
    );
    Ok(())
}
