//! What several tests share: functions to call and small helpers.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kolo::prelude::*;
use kolo_harness::TestCluster;
use kolo_transport::Credentials;
use tempfile::TempDir;

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

/// So many workers on each of so many nodes. One that hangs at the end is not waited for.
pub async fn start(cluster: &TestCluster, hosts: u32, slots: u32) -> anyhow::Result<Executor> {
    let builder = Executor::builder().hosts(hosts).slots(slots);
    let builder = builder.grace(Duration::from_secs(1));
    let driver = cluster.connect().await?;
    Ok(soon(builder.output(Output::Silent).start(&driver)).await?)
}

/// A cluster of daemon processes and a group of workers on it.
pub async fn group(nodes: usize, slots: u32) -> anyhow::Result<(TestCluster, Executor)> {
    let cluster = TestCluster::builder().nodes(nodes).slots(slots);
    let cluster = cluster.start().await?;
    let executor = start(&cluster, nodes as u32, slots).await?;
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

/// Names the head's address and the folder of the credentials, for a driver in a process of its own.
const DRIVER: &str = "KOLO_TEST_DRIVER";
/// What stands before the words that such a driver says once its job runs.
const SAYS: &str = "driver says ";

/// A driver in a process of its own, which does not outlive its test.
pub struct Driver {
    pub child: Child,
    _folder: TempDir,
}

impl Driver {
    /// Starts this binary with a test as the filter, which is no test but begins with [`Driver::connect`]. Also gives its words.
    pub async fn start(cluster: &TestCluster, test: &str) -> anyhow::Result<(Self, String)> {
        let folder = tempfile::tempdir()?;
        let credentials = folder.path().join("driver");
        cluster.credentials()?.save(&credentials)?;
        let task = format!("{} {}", cluster.address()?, credentials.display());
        let mut child = Command::new(std::env::current_exe()?)
            .args([test, "--exact", "--nocapture"])
            .env(DRIVER, task)
            // What the driver leaves of its folder goes with that of the test.
            .env("TMPDIR", folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().expect("it is piped");
        let driver = Self {
            child,
            _folder: folder,
        };
        let words = tokio::task::spawn_blocking(move || {
            let mut lines = BufReader::new(stdout).lines().map_while(Result::ok);
            lines.find_map(|line| Some(line.strip_prefix(SAYS)?.to_owned()))
        });
        let words = soon(words).await?;
        Ok((driver, words.expect("the driver has ended early")))
    }

    /// In the driver's process: its cluster. Nothing in the test run itself.
    pub async fn connect() -> anyhow::Result<Option<Cluster>> {
        let Ok(task) = std::env::var(DRIVER) else {
            return Ok(None);
        };
        let (address, folder) = task.split_once(' ').unwrap_or_default();
        let credentials = Credentials::load(Path::new(folder))?;
        let cluster = Cluster::connect(address.parse::<SocketAddr>()?, credentials).await?;
        Ok(Some(cluster))
    }

    /// In the driver's process: its job runs.
    pub fn says(words: &str) {
        println!("\n{SAYS}{words}");
    }

    pub fn kill(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.kill();
    }
}
