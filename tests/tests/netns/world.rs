//! Hosts `a`, `b`, `c` and so on with a node each, and `boss`, which has the head and the driver.

use std::collections::BTreeMap;
use std::net::IpAddr;

use kolo::prelude::*;
use kolo_harness::netns::{Host, Lab, Segment};
use kolo_harness::{TestCluster, TestClusterBuilder};
use kolo_transport::wire::{JobInfo, NetworkChoice, NetworkReport};

/// What the worker is told of the network.
#[kolo::function]
pub(crate) fn told() -> BTreeMap<String, String> {
    std::env::vars()
        .filter(|(name, _)| {
            name.ends_with("IFNAME")
                || name.ends_with("IFACE")
                || name.starts_with("KOLO_")
                || name == "MASTER_ADDR"
        })
        .collect()
}

/// Sums a vector of `len` over all ranks, each of whose elements is the rank plus one, over the worker's own data plane.
#[kolo::function]
pub(crate) fn sum(ctx: &Context, len: usize) -> anyhow::Result<f32> {
    let mut values = vec![ctx.rank() as f32 + 1.0; len];
    ctx.comm().all_reduce(&mut values, ReduceOp::Sum)?;
    anyhow::ensure!(
        values
            .windows(2)
            .all(|pair| pair[0].to_bits() == pair[1].to_bits())
    );
    Ok(values[0])
}

/// Addresses on which the worker's process has UDP sockets for anybody, from the kernel's list.
#[kolo::function]
pub(crate) fn listens() -> anyhow::Result<Vec<String>> {
    let own: Vec<String> = std::fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter_map(|link| {
            let text = link.to_string_lossy().into_owned();
            Some(text.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
        })
        .collect();
    let mut found = Vec::new();
    for file in ["/proc/thread-self/net/udp", "/proc/thread-self/net/udp6"] {
        for line in std::fs::read_to_string(file)?.lines().skip(1) {
            let columns: Vec<&str> = line.split_whitespace().collect();
            // One that is connected only asks a peer something.
            let is_connected = !columns[2].ends_with(":0000");
            if !is_connected && own.iter().any(|inode| inode == columns[9]) {
                let hex = columns[1].split(':').next().unwrap_or_default();
                found.push(if hex.len() == 8 {
                    let bytes = u32::from_str_radix(hex, 16)?.to_ne_bytes();
                    IpAddr::from(bytes).to_string()
                } else {
                    hex.to_owned()
                });
            }
        }
    }
    found.sort();
    Ok(found)
}

/// A lab with a boss and hosts that have names only.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) lab: Lab,
    pub(crate) boss: Host,
    pub(crate) hosts: Vec<Host>,
}

impl World {
    pub(crate) fn new(hosts: &[&str]) -> anyhow::Result<Self> {
        let lab = Lab::new()?;
        Ok(Self {
            boss: lab.host("boss")?,
            hosts: hosts
                .iter()
                .map(|name| lab.host(name))
                .collect::<Result<_, _>>()?,
            lab,
        })
    }

    /// A network in which the boss has number 100 and the hosts 1, 2, 3 and so on: `10.1.0.`, `fd01::`.
    pub(crate) fn network(
        &self,
        interface: &str,
        prefix: &str,
        mtu: u32,
    ) -> anyhow::Result<Segment> {
        let segment = self.lab.segment(interface)?;
        let address = |number: usize| {
            let bits = if prefix.contains(':') { 64 } else { 24 };
            format!("{prefix}{number}/{bits}")
        };
        self.boss
            .attach_with_mtu(interface, &segment, &[&address(100)], mtu)?;
        for (number, host) in (1..).zip(&self.hosts) {
            host.attach_with_mtu(interface, &segment, &[&address(number)], mtu)?;
        }
        Ok(segment)
    }

    /// Runs `test` on the boss's host, with a cluster whose head is reached at `head`.
    pub(crate) fn run<T: Send>(
        &self,
        head: &str,
        test: impl AsyncFnOnce(&TestCluster) -> anyhow::Result<T> + Send,
    ) -> anyhow::Result<T> {
        self.run_with(head, TestCluster::builder().slots(2), test)
    }

    /// As [`World::run`], with a cluster of one's own.
    pub(crate) fn run_with<T: Send>(
        &self,
        head: &str,
        builder: TestClusterBuilder,
        test: impl AsyncFnOnce(&TestCluster) -> anyhow::Result<T> + Send,
    ) -> anyhow::Result<T> {
        let builder = builder.on_lab(&self.boss, head.parse()?, &self.hosts);
        self.boss.enter(|| {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()?;
            runtime.block_on(async {
                let cluster = builder.start().await?;
                let result = test(&cluster).await;
                if result.is_err() {
                    for (name, text) in cluster.logs() {
                        eprintln!("---- log of {name}\n{text}");
                    }
                }
                result
            })
        })?
    }
}

/// A started group, and what the head knows of it.
pub(crate) struct Group {
    pub(crate) executor: Executor,
    pub(crate) info: JobInfo,
}

impl Group {
    /// One worker on each of `hosts` hosts.
    pub(crate) async fn start(cluster: &TestCluster, hosts: u32) -> anyhow::Result<Self> {
        Self::with(cluster, Executor::builder().hosts(hosts).slots(1)).await
    }

    pub(crate) async fn with(
        cluster: &TestCluster,
        builder: kolo::ExecutorBuilder,
    ) -> anyhow::Result<Self> {
        let executor = builder.start(&cluster.connect().await?).await?;
        let info = cluster.job(executor.job()).await?;
        Ok(Self { executor, info })
    }

    pub(crate) fn report(&self) -> &NetworkReport {
        self.info.network.as_ref().expect("its network is known")
    }

    /// The interface that was chosen, if it is one for all.
    pub(crate) fn interface(&self) -> Option<&str> {
        match &self.report().choice {
            NetworkChoice::Interface(name) => Some(name),
            _ => None,
        }
    }

    /// Whether the data plane works.
    pub(crate) async fn check(&self) -> anyhow::Result<()> {
        let size = self.info.workers.len();
        let expected = (size * (size + 1) / 2) as f32;
        for len in [1, 300_000] {
            let sums = self.executor.run(sum, (len,)).await?;
            anyhow::ensure!(sums == vec![expected; size], "{sums:?}");
        }
        Ok(())
    }

    pub(crate) async fn told(&self) -> anyhow::Result<Vec<BTreeMap<String, String>>> {
        Ok(self.executor.run(told, ()).await?)
    }

    pub(crate) async fn listens(&self) -> anyhow::Result<Vec<Vec<String>>> {
        Ok(self.executor.run(listens, ()).await?)
    }

    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        self.executor.shutdown().await?;
        Ok(())
    }
}

/// Why an address was not chosen.
pub(crate) fn why(report: &NetworkReport, address: &str) -> String {
    let row = report
        .rows
        .iter()
        .find(|row| row.address.to_string() == address)
        .unwrap_or_else(|| panic!("{address} is not in {report:?}"));
    assert!(!row.chosen, "{address} is chosen");
    row.why_not.clone().unwrap_or_default()
}
