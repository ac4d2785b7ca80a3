//! Finding the network interfaces that connect hosts: the ring probe over real networks, and the part that only thinks.

use std::net::SocketAddr;
use std::time::Instant;

use anyhow::Context as _;
use kolo_core::interfaces::{Host, Plan, Step, plan};
use kolo_harness::TestCluster;
use kolo_harness::netns::{self, Lab};
use kolo_transport::ids::NodeId;
use kolo_transport::wire::{
    Echo, Interface, InterfaceAddress, InterfaceSelection, NodeNetwork, ProbeResult,
};

use crate::report::Figure;
use crate::stats::median;

const HOSTS: u64 = 1000;
const INTERFACES: u64 = 8;
const LAB_HOSTS: usize = 4;
const LAB_INTERFACES: u8 = 3;

fn address(host: u64, interface: u64) -> std::net::IpAddr {
    let host = host + 1;
    [10, interface as u8, (host >> 8) as u8, host as u8].into()
}

fn hosts() -> Vec<Host> {
    (0..HOSTS)
        .map(|host| Host {
            node: NodeId(host),
            hostname: format!("host-{host}"),
            address: SocketAddr::new(address(host, 0), 7420),
            network: Some(NodeNetwork {
                listen: SocketAddr::from(([0; 16], 7420)),
                host: host.to_string(),
                interfaces: (0..INTERFACES)
                    .map(|interface| Interface {
                        name: format!("eth{interface}"),
                        up: true,
                        loopback: false,
                        mtu: 9000,
                        speed: Some(100_000),
                        addresses: vec![InterfaceAddress {
                            ip: address(host, interface),
                            prefix: 16,
                        }],
                    })
                    .collect(),
            }),
        })
        .collect()
}

/// Everything but the network: orders, matching, intersection, choice, report. Milliseconds.
fn think() -> anyhow::Result<f64> {
    let hosts = hosts();
    let start = Instant::now();
    let Plan::Probe(mut discovery) = plan(hosts, &InterfaceSelection::default(), false)? else {
        anyhow::bail!("a thousand hosts are not one");
    };
    let mut spent = start.elapsed();
    let again = Instant::now();
    let Step::Probe(orders) = discovery.start() else {
        anyhow::bail!("nothing is asked");
    };
    spent += again.elapsed();
    for order in orders {
        let results = order
            .targets
            .iter()
            .map(|target| {
                let std::net::IpAddr::V4(ip) = target.address.ip() else {
                    unreachable!("all addresses are IPv4")
                };
                let interface = u64::from(ip.octets()[1]);
                ProbeResult::Reached {
                    rtt_us: 200,
                    echo: Echo {
                        seen: SocketAddr::new(address(order.node.0, interface), 1),
                        local: Some(target.address.ip()),
                        interface: Some(format!("eth{interface}")),
                        time_ms: 0,
                    },
                }
            })
            .collect();
        let again = Instant::now();
        let step = discovery.answered(order.node, Ok(results));
        spent += again.elapsed();
        if let Step::Done(result) = step {
            (*result).ok().context("nothing connects them")?;
        }
    }
    Ok(spent.as_secs_f64() * 1e3)
}

/// The probe itself, as `kolo interfaces --no-cache` has it done. Milliseconds.
fn probe(cluster: &TestCluster) -> anyhow::Result<f64> {
    let output = cluster
        .kolo()?
        .args(["interfaces", "--no-cache", "--format", "json"])
        .output()?;
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)
        .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    report["took_ms"].as_f64().context("no time")
}

fn real(rounds: u32) -> anyhow::Result<[f64; 2]> {
    let lab = Lab::new()?;
    let boss = lab.host("boss")?;
    let hosts = (0..LAB_HOSTS)
        .map(|number| lab.host(&format!("h{number}")))
        .collect::<Result<Vec<_>, _>>()?;
    for net in 1..=LAB_INTERFACES {
        let segment = lab.segment(&format!("net{net}"))?;
        let name = format!("eth{net}");
        boss.attach(&name, &segment, &[&format!("10.{net}.0.100/24")])?;
        for (number, host) in (1..).zip(&hosts) {
            host.attach(&name, &segment, &[&format!("10.{net}.0.{number}/24")])?;
        }
    }
    let builder = TestCluster::builder().on_lab(&boss, [10, 1, 0, 100].into(), &hosts);
    boss.enter(|| {
        let runtime = tokio::runtime::Runtime::new()?;
        let cluster = runtime.block_on(builder.start())?;
        let free = (0..rounds)
            .map(|_| probe(&cluster))
            .collect::<anyhow::Result<Vec<f64>>>()?;
        // Whatever comes to one host over one network.
        hosts[1].nft("add rule inet test input ip daddr 10.3.0.2 drop")?;
        let holed = (0..rounds)
            .map(|_| probe(&cluster))
            .collect::<anyhow::Result<Vec<f64>>>()?;
        Ok([median(&free), median(&holed)])
    })?
}

/// Measures both.
pub(crate) fn run(rounds: u32) -> anyhow::Result<Vec<Figure>> {
    let thoughts = (0..rounds)
        .map(|_| think())
        .collect::<anyhow::Result<Vec<f64>>>()?;
    let figure = |case: &str, value| Figure::new("interfaces", case, "p50", "ms", value);
    let mut figures = vec![figure("plan 1000 hosts x 8", median(&thoughts))];
    match netns::available() {
        Ok(()) => {
            let [free, holed] = real(rounds)?;
            figures.push(figure("ring 4 hosts x 3", free));
            figures.push(figure("same, 1 black hole", holed));
        }
        Err(reason) => eprintln!("no ring probe: {reason}"),
    }
    Ok(figures)
}
