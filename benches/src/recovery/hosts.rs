//! Hosts of their own on this machine: one that is cut off, and all of them with packets that are lost.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use kolo::prelude::*;
use kolo_harness::netns::{self, Host, Lab};
use kolo_harness::{TestCluster, TestClusterBuilder};
use tokio::time::Instant;

use super::bed::Bed;
use super::{Case, Options, here};
use crate::launchers::now;
use crate::report::Figure;

/// The lease of nodes that daemons have by default.
const LEASE: Duration = Duration::from_millis(1250);

/// The driver and the head are on a host of their own. Each worker's host has one slot.
struct Hosts {
    boss: Host,
    hosts: Vec<Host>,
}

impl Hosts {
    fn new(count: u32) -> anyhow::Result<Self> {
        let lab = Lab::new()?;
        let wire = lab.segment("wire")?;
        let host = |name: &str, number: u32| {
            let host = lab.host(name)?;
            host.attach("eth0", &wire, &[&format!("10.1.0.{number}/24")])?;
            anyhow::Ok(host)
        };
        Ok(Self {
            boss: host("boss", 100)?,
            hosts: (1..=count)
                .map(|number| host(&format!("h{number}"), number))
                .collect::<Result<_, _>>()?,
        })
    }

    fn cluster(&self) -> TestClusterBuilder {
        TestCluster::builder().slots(1).lease(LEASE).on_lab(
            &self.boss,
            [10, 1, 0, 100].into(),
            &self.hosts,
        )
    }
}

/// Nothing comes to the host or leaves the host any more.
fn drop_packets(host: &Host) -> anyhow::Result<()> {
    for rule in ["input iifname eth0 drop", "output oifname eth0 drop"] {
        host.nft(&format!("add rule inet test {rule}"))?;
    }
    Ok(())
}

/// The host of the youngest rank is cut off, again and again.
pub(super) fn cut(options: &Options) -> anyhow::Result<Vec<Case>> {
    let count = options.workers;
    if let Err(reason) = netns::available() {
        eprintln!("the case `cut` is missing: {reason}");
        return Ok(Vec::new());
    }
    if count < 3 {
        eprintln!(
            "the case `cut` is missing: a group goes on without delay if it keeps more than half of its workers; --workers is {count}"
        );
        return Ok(Vec::new());
    }
    let hosts = Hosts::new(count)?;
    let cut = async {
        let mut cut = Case::new("cut");
        let group = |builder: kolo::ExecutorBuilder| builder.workers(count - 1..=count);
        let mut bed = Bed::start(hosts.cluster(), group, (count, 0)).await?;
        for number in 1..=options.n {
            eprintln!("cut {number} of {}", options.n);
            let host = &hosts.hosts[bed.youngest_node()?];
            let at = now();
            drop_packets(host)?;
            cut.samples.push((at, bed.until(count as usize - 1).await?));
            for chain in ["input", "output"] {
                host.nft(&format!("flush chain inet test {chain}"))?;
            }
            bed.until(count as usize).await?;
        }
        bed.stop().await?;
        Ok(vec![cut])
    };
    hosts.boss.enter(|| here(cut))?
}

/// A group that nothing happens to, for a time, while processors are busy and packets are lost.
pub(super) fn calm(options: &Options, time: Duration) -> anyhow::Result<Vec<Figure>> {
    let count = options.workers;
    netns::available().map_err(anyhow::Error::msg)?;
    let hosts = Hosts::new(count)?;
    let calm = async {
        let group = |builder: kolo::ExecutorBuilder| builder.workers(count - 1..=count);
        let mut bed = Bed::start(hosts.cluster(), group, (count, 0)).await?;
        // Not before, as a program of many megabytes is sent at the start.
        for host in hosts.hosts.iter().chain([&hosts.boss]) {
            host.nft("add rule inet test input iifname eth0 numgen random mod 10 == 0 drop")?;
        }
        let mut changes = bed.executor.generations();
        let mut alarms = 0_u32;
        let ended = Instant::now() + time;
        // The first is the present one.
        changes.next().await.context("the group has ended")?;
        while let Ok(change) = tokio::time::timeout_at(ended, changes.next()).await {
            let table = change.context("the group has ended")?.table;
            let left = ended.saturating_duration_since(Instant::now());
            eprintln!("{left:.0?} before the end: {}", table.cause);
            alarms += 1;
        }
        // A change that is none of its own tells how many steps the group has made.
        bed.kill_worker().await?;
        let steps = bed.until(count as usize - 1).await?.steps;
        bed.stop().await?;
        anyhow::Ok((alarms, steps))
    };
    let done = AtomicBool::new(false);
    let (alarms, steps) = std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism()?.get() {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let result = hosts.boss.enter(|| here(calm));
        done.store(true, Ordering::Relaxed);
        result?
    })?;
    ensure!(
        alarms == 0,
        "{alarms} false alarms within {time:?}, in {steps} steps"
    );
    let case = format!("calm, {count} workers");
    let figure =
        |metric, value| Figure::new("recovery", case.clone(), metric, "", f64::from(value));
    Ok(vec![
        figure("alarms", alarms),
        figure("steps", u32::try_from(steps).unwrap_or(u32::MAX)),
    ])
}
