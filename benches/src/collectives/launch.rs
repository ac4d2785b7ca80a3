//! Starting programs on one of the hosts.

use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::Context as _;
use rustix::process::{Signal, set_parent_process_death_signal, setpgid};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::raw::child::ROLE;

/// Role of a process that enters a host and becomes another program there.
pub(crate) const ENTER: &str = "enter";
/// The process whose network the program gets.
const HOST: &str = "KOLO_BENCH_HOST";

/// A command that runs `program` with the network of the process `host`, and ends when this process does.
pub(crate) fn command(program: impl AsRef<std::ffi::OsStr>, host: Option<u32>) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.env(ROLE, ENTER).arg(program);
    match host {
        Some(pid) => command.env(HOST, pid.to_string()),
        None => command.env_remove(HOST),
    };
    command
}

/// Moves the calling thread into the network of a process. Threads that it makes later are there too.
pub(crate) fn enter_host(pid: u32) -> anyhow::Result<()> {
    let path = format!("/proc/{pid}/ns/net");
    let namespace = std::fs::File::open(&path).with_context(|| format!("can't open {path}"))?;
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
        .with_context(|| format!("can't enter the network namespace of process {pid}"))
}

/// The role itself: its arguments are the program and what it gets.
pub(crate) fn enter() -> anyhow::Result<()> {
    // mpirun takes its ranks and their shared memory with it, if it gets to know, and if those do not hear of an interrupt at the
    // terminal before it.
    setpgid(None, None)?;
    set_parent_process_death_signal(Some(Signal::TERM))?;
    if let Ok(pid) = std::env::var(HOST) {
        enter_host(pid.parse().context("the number of a process")?)?;
    }
    let mut arguments = std::env::args_os().skip(1);
    let program = arguments.next().context("no program was named")?;
    let error = Command::new(&program)
        .args(arguments)
        .env_remove(ROLE)
        .env_remove(HOST)
        .exec();
    Err(error).with_context(|| format!("can't start {}", program.display()))
}
