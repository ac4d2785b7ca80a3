//! How fast the two kinds of links inside a host are on this machine: rings in shared memory and Unix sockets, in turn.
//!
//! ```console
//! $ cargo run --release -p kolo-collectives --example lanes
//! ```
//!
//! Two threads with a runtime each stand for two processes. *Round trip*: one side sends, the other answers with as much.
//! *Exchange*: both send at once, as ranks do in a step of a ring. *Stream*: one side sends 64 messages, the other
//! answers with a byte.

#![allow(clippy::cast_precision_loss, missing_docs)]

use std::future::poll_fn;
use std::io::IoSlice;
use std::os::unix::net::UnixStream;
use std::task::Poll;
use std::time::{Duration, Instant};

use kolo_collectives::lane::UnixLane;
use kolo_collectives::{Generation, JobId, Lane, LaneError, LinkHello, Rank};

const LIMIT: Duration = Duration::from_secs(20);
const STREAM: usize = 64;

#[derive(Debug, Clone, Copy)]
enum Pattern {
    RoundTrip,
    Exchange,
    Stream,
}

/// One side.
#[derive(Debug)]
struct End {
    lane: UnixLane,
    first: bool,
    out: Vec<u8>,
    into: Vec<u8>,
}

impl End {
    /// Sends and receives so many bytes, at once.
    async fn move_bytes(&mut self, send: usize, receive: usize) -> Result<(), LaneError> {
        let (mut sent, mut got) = (0, 0);
        poll_fn(|cx| {
            while sent < send {
                let rest = &self.out[sent..send];
                match self.lane.poll_write(cx, &[IoSlice::new(rest)]) {
                    Poll::Ready(count) => sent += count?,
                    Poll::Pending => break,
                }
            }
            while got < receive {
                match self.lane.poll_read(cx, &mut self.into[got..receive]) {
                    Poll::Ready(Ok(0)) => {
                        let reason = "too early".to_owned();
                        return Poll::Ready(Err(LaneError::Ended { reason }));
                    }
                    Poll::Ready(count) => got += count?,
                    Poll::Pending => break,
                }
            }
            if sent == send && got == receive {
                Poll::Ready(Ok(()))
            } else {
                Poll::Pending
            }
        })
        .await
    }

    async fn once(&mut self, pattern: Pattern, size: usize) -> Result<(), LaneError> {
        match (pattern, self.first) {
            (Pattern::RoundTrip, true) => {
                self.move_bytes(size, 0).await?;
                self.move_bytes(0, size).await
            }
            (Pattern::RoundTrip, false) => {
                self.move_bytes(0, size).await?;
                self.move_bytes(size, 0).await
            }
            (Pattern::Exchange, _) => self.move_bytes(size, size).await,
            (Pattern::Stream, true) => {
                for _ in 0..STREAM {
                    self.move_bytes(size, 0).await?;
                }
                self.move_bytes(0, 1).await
            }
            (Pattern::Stream, false) => {
                for _ in 0..STREAM {
                    self.move_bytes(0, size).await?;
                }
                self.move_bytes(1, 0).await
            }
        }
    }
}

/// The median of so many times, in microseconds.
fn measure(rings: bool, pattern: Pattern, size: usize, count: usize) -> Result<f64, LaneError> {
    let (one, two) = UnixStream::pair().map_err(|error| LaneError::Unreachable {
        reason: error.to_string(),
    })?;
    let side = |socket: UnixStream, rank: u32| -> Result<Vec<f64>, LaneError> {
        let system = |error: std::io::Error| LaneError::Unreachable {
            reason: error.to_string(),
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .map_err(system)?;
        runtime.block_on(async {
            let lane = UnixLane::from_std(socket).map_err(system)?;
            let lane = if rings { lane } else { lane.without_rings() };
            let hello = LinkHello::new(JobId(1), Generation(1), Rank(rank));
            let mut end = End {
                lane: lane.greeted(&hello, Rank(1 - rank), LIMIT).await?,
                first: rank == 0,
                out: vec![1; size.max(1)],
                into: vec![0; size.max(1)],
            };
            let mut times = Vec::with_capacity(count);
            for round in 0..=count + count / 10 {
                let begun = Instant::now();
                end.once(pattern, size).await?;
                if round > count / 10 {
                    times.push(begun.elapsed().as_secs_f64() * 1e6);
                }
            }
            Ok(times)
        })
    };
    let mut times = std::thread::scope(|scope| {
        let other = scope.spawn(|| side(two, 1));
        let times = side(one, 0);
        if let Ok(Err(error)) = other.join() {
            return Err(error);
        }
        times
    })?;
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

fn main() -> Result<(), LaneError> {
    println!("{:<22}{:>12}{:>12}{:>8}", "us", "unix", "ring", "ratio");
    let cases = [
        (Pattern::RoundTrip, 64, 1500),
        (Pattern::RoundTrip, 4 << 10, 1500),
        (Pattern::RoundTrip, 64 << 10, 800),
        (Pattern::Exchange, 4 << 10, 1500),
        (Pattern::Exchange, 256 << 10, 400),
        (Pattern::Exchange, 4 << 20, 60),
        (Pattern::Stream, 16 << 10, 100),
        (Pattern::Stream, 256 << 10, 20),
    ];
    for (pattern, size, count) in cases {
        let mut figures = [Vec::new(), Vec::new()];
        for _ in 0..5 {
            for (rings, figures) in [false, true].into_iter().zip(&mut figures) {
                figures.push(measure(rings, pattern, size, count)?);
            }
        }
        let [unix, ring] = figures.map(|mut figures| {
            figures.sort_by(f64::total_cmp);
            figures[figures.len() / 2]
        });
        let name = format!("{pattern:?} {size} B");
        println!("{name:<22}{unix:>12.1}{ring:>12.1}{:>8.2}", ring / unix);
    }
    Ok(())
}
