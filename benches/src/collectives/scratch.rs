//! A folder for sockets, stores and logs that is gone after the run, interrupted or not.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};

/// The folder.
#[derive(Debug)]
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// Makes it, and sees to it that it goes when a signal ends this process.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("kolo-bench-")
            .tempdir()
            .context("no folder for sockets can be made")?;
        let scratch = Self(folder.keep());
        let path = scratch.0.clone();
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                let code = wait_for_signal();
                remove(&path);
                // Ranks, peers and hosts end with this process.
                std::process::exit(code);
            })?;
        Ok(scratch)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_dir_all(path)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        eprintln!("{} is left: {error}", path.display());
    }
}

/// The status to end with. Without signals it waits for ever: then they end the process themselves.
fn wait_for_signal() -> i32 {
    let waited = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .and_then(|runtime| {
            runtime.block_on(async {
                let mut interrupt = signal(SignalKind::interrupt())?;
                let mut terminate = signal(SignalKind::terminate())?;
                let (mut hangup, mut quit) =
                    (signal(SignalKind::hangup())?, signal(SignalKind::quit())?);
                Ok(tokio::select! {
                    _ = hangup.recv() => 129,
                    _ = interrupt.recv() => 130,
                    _ = quit.recv() => 131,
                    _ = terminate.recv() => 143,
                })
            })
        });
    match waited {
        Ok(code) => code,
        Err(_) => loop {
            std::thread::park();
        },
    }
}
