//! Calls over two hops: driver, node daemon, worker process, and back.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use kolo::prelude::*;
use kolo_harness::TestCluster;

use crate::raw::{Measured, PAYLOAD, quic};
use crate::report::Figure;
use crate::stats::{Times, Window, median};

#[kolo::function]
fn echo_text(text: String) -> String {
    text
}

/// Calls in flight for the rate.
const IN_FLIGHT: usize = 64;

struct Kolo {
    one: Measured,
    fan_out: f64,
}

async fn measure_kolo(executor: &Executor, length: Duration) -> anyhow::Result<Kolo> {
    let text = "x".repeat(PAYLOAD);
    let mut times = [Times::default(), Times::default()];
    for (index, times) in times.iter_mut().enumerate() {
        let mut warm_up = 200;
        let mut window = Window::new(length);
        while window.is_open() {
            let start = Instant::now();
            if index == 0 {
                let back = executor.on(Rank(0)).run(echo_text, (text.clone(),)).await?;
                debug_assert_eq!(back, text);
            } else {
                let back = executor.run(echo_text, (text.clone(),)).await?;
                debug_assert_eq!(back.len(), 4);
            }
            if warm_up > 0 {
                warm_up -= 1;
                window = Window::new(length);
            } else {
                times.push(start.elapsed());
            }
        }
    }

    let one = executor.on(Rank(0));
    let call = || one.run(echo_text, (text.clone(),)).into_future();
    let mut in_flight: FuturesUnordered<_> = (0..IN_FLIGHT).map(|_| call()).collect();
    let window = Window::new(length);
    let start = Instant::now();
    let mut done = 0_u64;
    while window.is_open() {
        in_flight.next().await.context("calls ran out")??;
        done += 1;
        in_flight.push(call());
    }
    let rate = done as f64 / start.elapsed().as_secs_f64();
    while let Some(rest) = in_flight.next().await {
        rest?;
    }
    let [mut one, mut all] = times;
    let one = Measured {
        p50: one.quantile(0.5),
        p99: one.quantile(0.99),
        rate,
    };
    Ok(Kolo {
        one,
        fan_out: all.quantile(0.5),
    })
}

/// What awaits the driver's calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Driver {
    /// A runtime of one thread, as in the raw peer.
    Default,
    /// The main function of a runtime with a thread for each core, as `#[tokio::main]` makes it. It is on
    /// none of these threads.
    ManyThreads,
    /// A task that was spawned there.
    Spawned,
}

impl Driver {
    const ALL: [Self; 3] = [Self::ManyThreads, Self::Default, Self::Spawned];

    /// Follows the case's name.
    fn suffix(self) -> &'static str {
        match self {
            Self::Default => "",
            Self::ManyThreads => ", many threads",
            Self::Spawned => ", spawned",
        }
    }
}

/// A group of 2 x 2 workers on daemons in other processes, measured and stopped.
fn round(cluster: &TestCluster, driver: Driver, length: Duration) -> anyhow::Result<Kolo> {
    let mut builder = match driver {
        Driver::ManyThreads | Driver::Spawned => tokio::runtime::Builder::new_multi_thread(),
        Driver::Default => tokio::runtime::Builder::new_current_thread(),
    };
    let runtime = builder.enable_all().build()?;
    runtime.block_on(async {
        let connected = cluster.connect().await?;
        let work = async move {
            let executor = Executor::builder()
                .hosts(2)
                .slots(2)
                .start(&connected)
                .await?;
            let measured = measure_kolo(&executor, length).await?;
            executor.shutdown().await?;
            Ok(measured)
        };
        match driver {
            Driver::Spawned => tokio::spawn(work).await?,
            _ => work.await,
        }
    })
}

/// Measures everything in turn, `rounds` times.
pub(crate) fn run(rounds: u32, length: Duration) -> anyhow::Result<Vec<Figure>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let cluster = runtime.block_on(TestCluster::builder().nodes(2).slots(2).start())?;
    let mut drivers = Driver::ALL.map(|driver| (driver, Vec::new()));
    let mut raw = Vec::new();
    for number in 1..=rounds {
        eprintln!("round {number} of {rounds}");
        for (driver, rounds) in &mut drivers {
            rounds.push(round(&cluster, *driver, length)?);
            if *driver == Driver::Default {
                // In the middle of what is compared with it.
                raw.push(quic::measure(length)?);
            }
        }
    }
    runtime.block_on(cluster.stop())?;

    let mut figures = Vec::new();
    for (driver, kolo) in &drivers {
        let of = |pick: fn(&Kolo) -> f64| median(&kolo.iter().map(pick).collect::<Vec<_>>());
        let figure = |case: &str, metric, unit, value| {
            Figure::new(
                "call",
                format!("{case}{}", driver.suffix()),
                metric,
                unit,
                value,
            )
        };
        let p50 = figure("sequential", "p50", "us", of(|k| k.one.p50));
        let p99 = figure("sequential", "p99", "us", of(|k| k.one.p99));
        let rate = figure("64 in flight", "rate", "calls/s", of(|k| k.one.rate));
        let fan_out = figure("fan-out to 4", "p50", "us", of(|k| k.fan_out));
        let raw_of = |pick: fn(&Measured) -> f64| median(&raw.iter().map(pick).collect::<Vec<_>>());
        figures.push(p50.beside("raw", raw_of(|m| m.p50)));
        figures.push(p99.beside("raw", raw_of(|m| m.p99)));
        figures.push(rate.beside("raw", raw_of(|m| m.rate)));
        figures.push(fan_out.beside("one call", p50.value));
    }
    Ok(figures)
}
