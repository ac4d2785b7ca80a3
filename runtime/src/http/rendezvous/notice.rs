//! The wire of Horovod's services: requests and answers that are signed with a key.
//!
//! ```text
//! HMAC-SHA256 of the body: 32 bytes | length: 4 bytes, little-endian | body: a pickle
//! ```

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use aws_lc_rs::hmac;
use kolo_core::rendezvous::{Ear, hosts_updated};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How long a worker may take for a notice.
const PATIENCE: Duration = Duration::from_secs(5);

/// Longest answer, in bytes. An acknowledgement has less than 100.
const LONGEST: usize = 4 << 10;

const DIGEST: usize = 32;

/// A notice that hosts have changed.
#[derive(Debug)]
pub(super) struct Notice {
    /// Where the worker is.
    pub(super) ip: IpAddr,
    /// Where it listens there.
    pub(super) ear: Ear,
    /// Its number.
    pub(super) number: u64,
}

/// Gives a worker a notice. An answer that is signed as it should be says that it was taken; what it holds is not read.
pub(super) async fn give(notice: Notice) -> io::Result<()> {
    timeout(PATIENCE, exchange(notice)).await?
}

async fn exchange(Notice { ip, ear, number }: Notice) -> io::Result<()> {
    let key = hmac::Key::new(hmac::HMAC_SHA256, &ear.key);
    let mut stream = TcpStream::connect((ip, ear.port)).await?;
    stream
        .write_all(&frame(&key, &hosts_updated(number)))
        .await?;
    let mut digest = [0; DIGEST];
    stream.read_exact(&mut digest).await?;
    let length = stream.read_i32_le().await?;
    let length = usize::try_from(length)
        .ok()
        .filter(|length| *length <= LONGEST);
    let length = length.ok_or_else(|| io::Error::other("its answer is too long"))?;
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    hmac::verify(&key, &body, &digest)
        .map_err(|_| io::Error::other("its answer is signed with another key"))
}

fn frame(key: &hmac::Key, body: &[u8]) -> Vec<u8> {
    let mut frame = hmac::sign(key, body).as_ref().to_vec();
    frame.extend((body.len() as i32).to_le_bytes());
    frame.extend(body);
    frame
}
