//! What memory and sockets of this machine can do: no contestant can be faster.

use std::hint::black_box;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Barrier;
use std::time::Instant;

use kolo::collectives::reduce::{Store, copy};

use super::wire::LinkCosts;
use crate::report::Figure;
use crate::stats::{Times, median};

/// Of each copied buffer: more than caches hold.
const COPIED: usize = 128 << 20;
/// Written to a socket at once.
const CHUNK: usize = 256 << 10;
/// Chunks that go through a socket in one measurement.
const CHUNKS: usize = 1024;
/// Messages that go to and fro.
const ECHOES: u32 = 5000;
const TIMES: usize = 5;

/// Alpha, how long a rank is busy, and beta, for `plan --inside` and `--across`.
pub(crate) fn of_links(links: LinkCosts) -> Vec<Figure> {
    let classes = [
        ("kolo's links inside a host", links.inside),
        ("kolo's links between hosts", links.across),
    ];
    let figures = classes.into_iter().filter_map(|(case, class)| {
        let class = class?;
        Some([
            Figure::new("ceiling", case, "latency", "us", class.latency),
            Figure::new("ceiling", case, "busy", "us", class.busy),
            Figure::new("ceiling", case, "rate", "GB/s", class.rate),
        ])
    });
    figures.flatten().collect()
}

pub(crate) fn measure() -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for threads in [1, 2] {
        for (how, store) in [("", Store::Cached), (", past caches", Store::Streaming)] {
            let case = format!("memory copy{how}, {threads} threads");
            let case = if threads == 1 {
                case.replace("threads", "thread")
            } else {
                case
            };
            let rate = copy_rate(threads, store);
            figures.push(Figure::new("ceiling", case, "rate", "GB/s", rate));
        }
    }
    let unix = || Ok(UnixStream::pair()?);
    figures.extend(socket("Unix socket", unix)?);
    figures.extend(socket("TCP on the loopback", tcp)?);
    Ok(figures)
}

/// Bytes that all threads together copy, in GB/s.
fn copy_rate(threads: usize, store: Store) -> f64 {
    let barrier = Barrier::new(threads);
    let rates: Vec<Vec<f64>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    let (mut into, from) = (vec![0_u8; COPIED], vec![1_u8; COPIED]);
                    copy(&mut into, &from, store);
                    (0..TIMES)
                        .map(|_| {
                            barrier.wait();
                            let begun = Instant::now();
                            copy(black_box(&mut into), black_box(&from), store);
                            barrier.wait();
                            COPIED as f64 / begun.elapsed().as_secs_f64() / 1e9
                        })
                        .collect()
                })
            })
            .collect();
        threads
            .into_iter()
            .filter_map(|thread| thread.join().ok())
            .collect()
    });
    rates.iter().map(|rates| median(rates)).sum()
}

fn tcp() -> anyhow::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let one = TcpStream::connect(listener.local_addr()?)?;
    let (two, _) = listener.accept()?;
    one.set_nodelay(true)?;
    two.set_nodelay(true)?;
    Ok((one, two))
}

/// One way in bulk, and to and fro with 64 bytes, between two threads.
fn socket<S: Read + Write + Send>(
    name: &str,
    pair: impl Fn() -> anyhow::Result<(S, S)>,
) -> anyhow::Result<Vec<Figure>> {
    let mut rates = Vec::new();
    let mut times = Times::default();
    for _ in 0..TIMES {
        let (mut one, mut two) = pair()?;
        let (rate, echoes) = std::thread::scope(|scope| {
            let other = scope.spawn(move || -> std::io::Result<()> {
                let mut buffer = vec![0; CHUNK];
                for _ in 0..CHUNKS {
                    two.read_exact(&mut buffer)?;
                }
                two.write_all(&buffer[..1])?;
                for _ in 0..ECHOES {
                    two.read_exact(&mut buffer[..64])?;
                    two.write_all(&buffer[..64])?;
                }
                Ok(())
            });
            let mut work = || -> std::io::Result<(f64, Times)> {
                let mut buffer = vec![7; CHUNK];
                let begun = Instant::now();
                for _ in 0..CHUNKS {
                    one.write_all(&buffer)?;
                }
                one.read_exact(&mut buffer[..1])?;
                let rate = (CHUNK * CHUNKS) as f64 / begun.elapsed().as_secs_f64() / 1e9;
                let mut times = Times::default();
                for _ in 0..ECHOES {
                    let begun = Instant::now();
                    one.write_all(&buffer[..64])?;
                    one.read_exact(&mut buffer[..64])?;
                    times.push(begun.elapsed());
                }
                Ok((rate, times))
            };
            let done = work();
            // Otherwise the other thread waits for ever.
            drop(one);
            match other.join() {
                Ok(ended) => done.and_then(|done| ended.map(|()| done)),
                Err(_) => Err(std::io::Error::other("the other thread panicked")),
            }
        })?;
        rates.push(rate);
        times.extend(echoes);
    }
    let figure = |metric, unit, value| Figure::new("ceiling", name, metric, unit, value);
    Ok(vec![
        figure("rate", "GB/s", median(&rates)),
        figure("p50", "us", times.quantile(0.5) / 2.0),
    ])
}
