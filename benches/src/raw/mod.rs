//! What kolo is compared with: the same bytes over the same kinds of links with nothing around them.
//! No serialisation, no actors, no lookup; a four-byte length in front of each message.

pub(crate) mod child;
pub(crate) mod echo;
pub(crate) mod quic;

use std::time::{Duration, Instant};

use bytes::{Buf, BufMut, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::stats::{Times, Window};

/// Payload of every message.
pub(crate) const PAYLOAD: usize = 64;

/// A latency and a throughput.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Measured {
    /// Median of a lone round trip, in microseconds.
    pub(crate) p50: f64,
    /// 99th percentile of the same.
    pub(crate) p99: f64,
    /// Round trips per second with 64 in flight.
    pub(crate) rate: f64,
}

/// Whole frames at the front of `buffer`, as (count, bytes).
pub(crate) fn whole_frames(buffer: &[u8]) -> (usize, usize) {
    let (mut count, mut end) = (0, 0);
    while let Some(mut prefix) = buffer.get(end..end + 4) {
        let next = end + 4 + prefix.get_u32() as usize;
        if next > buffer.len() {
            break;
        }
        count += 1;
        end = next;
    }
    (count, end)
}

/// Measures an echo at the other end of a pair of streams.
pub(crate) async fn measure<R, W>(
    mut recv: R,
    mut send: W,
    length: Duration,
) -> anyhow::Result<Measured>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut frame = BytesMut::new();
    frame.put_u32(PAYLOAD as u32);
    frame.put_bytes(b'x', PAYLOAD);
    let mut buffer = BytesMut::with_capacity(64 * 1024);

    let mut times = Times::default();
    let mut warm_up = 200;
    let mut window = Window::new(length);
    while window.is_open() {
        let start = Instant::now();
        send.write_all(&frame).await?;
        while whole_frames(&buffer).0 == 0 {
            anyhow::ensure!(recv.read_buf(&mut buffer).await? > 0, "the echo ended");
        }
        buffer.clear();
        if warm_up > 0 {
            warm_up -= 1;
            window = Window::new(length);
        } else {
            times.push(start.elapsed());
        }
    }

    let mut batch = BytesMut::new();
    let mut done = 0_u64;
    (0..64).for_each(|_| batch.extend_from_slice(&frame));
    let start = Instant::now();
    let window = Window::new(length);
    loop {
        send.write_all(&batch).await?;
        batch.clear();
        let count = loop {
            let (count, bytes) = whole_frames(&buffer);
            if count > 0 {
                buffer.advance(bytes);
                break count;
            }
            anyhow::ensure!(recv.read_buf(&mut buffer).await? > 0, "the echo ended");
        };
        done += count as u64;
        if !window.is_open() {
            break;
        }
        (0..count).for_each(|_| batch.extend_from_slice(&frame));
    }
    let rate = done as f64 / start.elapsed().as_secs_f64();
    Ok(Measured {
        p50: times.quantile(0.5),
        p99: times.quantile(0.99),
        rate,
    })
}
