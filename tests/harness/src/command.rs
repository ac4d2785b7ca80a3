//! The `kolo` command, as a process of its own.

use std::process::Command;

use crate::cluster::TestCluster;
use crate::error::HarnessError;
use crate::member::{CLI, TASK};

/// The `kolo` command, without a cluster: `kolo run` runs on this machine.
///
/// It is this very program again, with the code of the `kolo` binary, as the daemons of a [`TestCluster`] are.
///
/// # Panics
///
/// If the path of this program is not known.
#[must_use]
pub fn kolo() -> Command {
    let exe = std::env::current_exe().expect("the path of this program is known");
    let mut command = Command::new(exe);
    for name in ["KOLO_HEAD", "KOLO_CREDENTIALS", "KOLO_LOG"] {
        command.env_remove(name);
    }
    command.env(TASK, CLI);
    command
}

impl TestCluster {
    /// The `kolo` command, as an operator of this cluster would start it. Only in
    /// [`Mode::Processes`](crate::Mode::Processes).
    ///
    /// # Errors
    ///
    /// [`HarnessError::Fault`] if the head was killed.
    pub fn kolo(&self) -> Result<Command, HarnessError> {
        let mut command = kolo();
        command
            .env("KOLO_HEAD", self.address()?.to_string())
            .env("KOLO_CREDENTIALS", self.admin_dir());
        Ok(command)
    }
}
