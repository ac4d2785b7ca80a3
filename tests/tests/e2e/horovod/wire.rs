//! The signed pickles of Horovod's services, as a worker sees them.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use anyhow::{Context as _, ensure};
use aws_lc_rs::hmac;

/// What a worker signs with.
pub struct Key {
    bytes: [u8; 32],
    key: hmac::Key,
}

impl Key {
    pub fn new(bytes: [u8; 32]) -> Self {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &bytes);
        Self { bytes, key }
    }

    pub fn bytes(&self) -> &[u8; 32] {
        &self.bytes
    }

    /// Takes one notice, and answers that it was taken: its number.
    pub fn serve(&self, mut stream: TcpStream) -> anyhow::Result<u64> {
        let mut head = [0; 36];
        stream.read_exact(&mut head)?;
        let (digest, length) = head.split_at(32);
        let length = i32::from_ne_bytes(length.try_into()?);
        let mut body = vec![0; usize::try_from(length)?];
        stream.read_exact(&mut body)?;
        let verified = hmac::verify(&self.key, &body, digest);
        ensure!(verified.is_ok(), "signed with another key");
        // Python's own reader takes it in the tests with Horovod.
        let class = b"chorovod.runner.elastic.worker\nHostsUpdatedRequest\n";
        let starts = body
            .strip_prefix(b"\x80\x02")
            .is_some_and(|body| body.starts_with(class));
        ensure!(starts, "{body:?}");
        let number = body.windows(2).position(|part| part == [0x8a, 9]);
        let number = number.and_then(|at| body.get(at + 2..at + 10));
        let number = u64::from_le_bytes(number.context("no number")?.try_into()?);
        // An AckResponse, which nobody reads but for its signature.
        let answer = b"\x80\x05N.";
        stream.write_all(hmac::sign(&self.key, answer).as_ref())?;
        stream.write_all(&(answer.len() as i32).to_ne_bytes())?;
        stream.write_all(answer)?;
        Ok(number)
    }
}

/// `({'lo': [('127.0.0.1', port)]}, key)` as Python pickles it by protocol 4, in base64.
pub fn pickled_addresses(port: u16, key: &[u8; 32]) -> Vec<u8> {
    let mut pickle = b"\x80\x04}\x94\x8c\x02lo\x94]\x94\x8c\x09127.0.0.1\x94M".to_vec();
    pickle.extend(port.to_le_bytes());
    pickle.extend(b"\x86\x94asC\x20");
    pickle.extend(key);
    pickle.extend(b"\x94\x86\x94.");
    base64(&pickle)
}

fn base64(bytes: &[u8]) -> Vec<u8> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = Vec::new();
    for group in bytes.chunks(3) {
        let bits = group
            .iter()
            .fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte));
        let bits = bits << (8 * (3 - group.len()));
        for digit in 0..4 {
            let is_there = digit <= group.len();
            let index = bits >> (18 - 6 * digit) & 63;
            text.push(if is_there {
                DIGITS[index as usize]
            } else {
                b'='
            });
        }
    }
    text
}
