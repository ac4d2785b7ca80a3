//! The bench binary started again in another role, with a socket to it as its standard input.

use std::io::Read as _;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use anyhow::Context as _;

/// Names the role of a child.
pub(crate) const ROLE: &str = "KOLO_BENCH_ROLE";

/// A child that is gone when this is dropped.
#[derive(Debug)]
pub(crate) struct RawChild {
    process: Child,
    /// Connected to the child's standard input.
    pub(crate) socket: UnixStream,
}

impl RawChild {
    /// Starts this binary as `role`. `std::process` takes `posix_spawn` for this.
    pub(crate) fn spawn(role: &str, env: &[(&str, &str)]) -> anyhow::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let process = Command::new("/proc/self/exe")
            .env(ROLE, role)
            .envs(env.iter().copied())
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .spawn()
            .with_context(|| format!("can't start the {role} child"))?;
        Ok(Self {
            process,
            socket: ours,
        })
    }

    /// Waits for the child's first byte.
    pub(crate) fn wait_hello(&mut self) -> anyhow::Result<()> {
        let mut byte = [0];
        self.socket
            .read_exact(&mut byte)
            .context("a child ended before it said hello")
    }
}

impl Drop for RawChild {
    fn drop(&mut self) {
        // It may have ended with its socket already.
        if self.process.kill().is_ok() {
            drop(self.process.wait());
        }
    }
}

/// In a child: the socket to the parent.
pub(crate) fn parent() -> anyhow::Result<UnixStream> {
    Ok(UnixStream::from(
        std::io::stdin().as_fd().try_clone_to_owned()?,
    ))
}
