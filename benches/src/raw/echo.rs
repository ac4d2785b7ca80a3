//! The echo at the end of a Unix socket, and the child that is only spawned.

use std::io::{Read, Write};

use super::child::parent;
use super::whole_frames;

/// Role of the echo at the end of a Unix socket.
pub(crate) const UNIX_ECHO: &str = "unix-echo";
/// Role of a child that says hello and waits.
pub(crate) const HELLO: &str = "hello";

/// The echo's child: sends back whole frames, as many as came with one read.
pub(crate) fn unix_echo() -> anyhow::Result<()> {
    let mut socket = parent()?;
    let mut buffer = vec![0; 256 * 1024];
    let mut filled = 0;
    loop {
        // The other end may be gone with something unread.
        let count = match socket.read(&mut buffer[filled..]) {
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return Ok(()),
            count => count?,
        };
        if count == 0 {
            return Ok(());
        }
        filled += count;
        let (_, bytes) = whole_frames(&buffer[..filled]);
        socket.write_all(&buffer[..bytes])?;
        buffer.copy_within(bytes..filled, 0);
        filled -= bytes;
    }
}

/// The spawn's child.
pub(crate) fn hello() -> anyhow::Result<()> {
    let mut socket = parent()?;
    socket.write_all(b"h")?;
    // Ends with the parent, or is killed by it.
    let _end = socket.read(&mut [0])?;
    Ok(())
}
