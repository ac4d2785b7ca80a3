//! Open MPI and Gloo: our own small programs in `benches/peers`, built when they are needed.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::Peer;
use super::group::{Group, Link, Processes, explain};
use super::hosts::Hosts;
use super::launch;
use super::scratch::Scratch;
use super::wire::Operation;

/// How long the ranks of a peer may take to find each other.
const START: Duration = Duration::from_secs(60);

/// A program of ours and how it is built.
struct Program {
    name: &'static str,
    /// Files by name; the first is what is compiled.
    sources: &'static [(&'static str, &'static str)],
    compiler: &'static str,
    arguments: &'static [&'static str],
    packages: &'static str,
}

const OPENMPI: Program = Program {
    name: "openmpi_collectives",
    sources: &[
        (
            "openmpi_collectives.c",
            include_str!("../../peers/openmpi_collectives.c"),
        ),
        ("rank.h", include_str!("../../peers/rank.h")),
    ],
    compiler: "mpicc",
    arguments: &["-O3"],
    packages: "openmpi-bin libopenmpi-dev",
};

const GLOO: Program = Program {
    name: "gloo_collectives",
    sources: &[
        (
            "gloo_collectives.cc",
            include_str!("../../peers/gloo_collectives.cc"),
        ),
        ("rank.h", include_str!("../../peers/rank.h")),
    ],
    compiler: "g++",
    arguments: &["-O3", "-std=c++17"],
    packages: "g++ libgloo-dev",
};

impl Program {
    /// Builds it, unless it was built before from the same sources: it is kept beside this program, or in the scratch folder where
    /// that can't be written.
    fn build(&self, scratch: &Scratch) -> anyhow::Result<PathBuf> {
        let beside = std::env::current_exe()
            .ok()
            .and_then(|exe| Some(exe.parent()?.join("kolo-bench-peers")));
        if let Some(folder) = beside.filter(|folder| std::fs::create_dir_all(folder).is_ok()) {
            let built = folder.join(self.name);
            if built.exists() && self.is_built_in(&folder) {
                return Ok(built);
            }
            // Runs may be at it at the same time: each builds by itself, and one of the same results stays.
            let own = scratch.path(self.name);
            std::fs::create_dir_all(&own)?;
            let made = self.compile(&own)?;
            let moved = folder.join(format!("{}.{}", self.name, std::process::id()));
            if std::fs::copy(&made, &moved).is_ok() && std::fs::rename(&moved, &built).is_ok() {
                self.write_sources(&folder)?;
                return Ok(built);
            }
            return Ok(made);
        }
        let own = scratch.path(self.name);
        std::fs::create_dir_all(&own)?;
        self.compile(&own)
    }

    fn is_built_in(&self, folder: &Path) -> bool {
        self.sources.iter().all(|(name, source)| {
            std::fs::read(folder.join(format!("{}.{name}", self.name)))
                .is_ok_and(|there| there == source.as_bytes())
        })
    }

    /// What the program beside them was made from.
    fn write_sources(&self, folder: &Path) -> anyhow::Result<()> {
        for (name, source) in self.sources {
            std::fs::write(folder.join(format!("{}.{name}", self.name)), source)?;
        }
        Ok(())
    }

    fn compile(&self, folder: &Path) -> anyhow::Result<PathBuf> {
        for (name, source) in self.sources {
            std::fs::write(folder.join(name), source)?;
        }
        let output = Command::new(self.compiler)
            .args(self.arguments)
            .args(["-o", self.name, self.sources[0].0])
            .args(if self.compiler == "g++" {
                &["-lgloo"][..]
            } else {
                &[]
            })
            .current_dir(folder)
            .stdin(Stdio::null())
            .output();
        let output = match output {
            Err(error) if error.kind() == ErrorKind::NotFound => anyhow::bail!(
                "`{}` is not installed (Debian: {})",
                self.compiler,
                self.packages
            ),
            output => output.with_context(|| format!("can't start `{}`", self.compiler))?,
        };
        let errors = String::from_utf8_lossy(&output.stderr);
        anyhow::ensure!(
            output.status.success(),
            "{} can't be built (Debian: {}): {}",
            self.sources[0].0,
            self.packages,
            errors
                .lines()
                .find(|line| line.contains("error"))
                .unwrap_or_else(|| errors.trim())
        );
        Ok(folder.join(self.name))
    }
}

/// Starts a peer's ranks and waits until they know each other.
pub(crate) fn start(
    peer: Peer,
    operation: Operation,
    host_of: &[u32],
    hosts: &Hosts,
    scratch: &Scratch,
) -> anyhow::Result<Group> {
    let socket = scratch.path(&format!("{}.sock", peer.name()));
    let log = scratch.path(&format!("{}.log", peer.name()));
    let listener = UnixListener::bind(&socket)?;
    let file = File::create(&log)?;
    let mut processes = Processes::default();
    let mut spawn = |mut command: Command| -> anyhow::Result<()> {
        let child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file.try_clone()?)
            .spawn()?;
        processes.push(child);
        Ok(())
    };
    match peer {
        Peer::Openmpi => {
            anyhow::ensure!(
                hosts.holder(0).is_none(),
                "Open MPI is compared on one host only"
            );
            let program = OPENMPI.build(scratch)?;
            anyhow::ensure!(
                is_there("mpirun"),
                "`mpirun` is not installed (Debian: {})",
                OPENMPI.packages
            );
            let mut command = launch::command("mpirun", None);
            command
                .args(["--allow-run-as-root", "--oversubscribe", "-np"])
                .arg(host_of.len().to_string())
                .arg("--mca")
                .arg("orte_tmpdir_base")
                .arg(scratch.path(""))
                .arg(program)
                .arg(&socket)
                .arg(operation.name());
            spawn(command)?;
        }
        Peer::Gloo => {
            let program = GLOO.build(scratch)?;
            let store = scratch.path("gloo-store");
            std::fs::create_dir_all(&store)?;
            for (rank, host) in host_of.iter().enumerate() {
                let mut command = launch::command(&program, hosts.holder(*host));
                command
                    .arg(&socket)
                    .arg(operation.name())
                    .arg(rank.to_string())
                    .arg(host_of.len().to_string())
                    .arg(&store)
                    .arg(hosts.address(*host).to_string());
                spawn(command)?;
            }
        }
        Peer::None => anyhow::bail!("nothing was asked for"),
    }
    let links = accept(&listener, host_of.len(), &mut processes)
        .map_err(|error| explain(error, Some(&log)))?;
    Group::ready(links, processes, Some(log))
}

fn is_there(program: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| {
        std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
    })
}

/// The ranks' connections, in any order.
fn accept(
    listener: &UnixListener,
    count: usize,
    processes: &mut Processes,
) -> anyhow::Result<Vec<Link>> {
    listener.set_nonblocking(true)?;
    let end = Instant::now() + START;
    let mut links = Vec::new();
    while links.len() < count {
        match listener.accept() {
            Ok((socket, _)) => links.push(Link::new(socket)?),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if let Some(status) = processes.ended() {
                    anyhow::bail!("a process of it ended with {status}");
                }
                anyhow::ensure!(
                    Instant::now() < end,
                    "{} of {count} ranks came within {} s",
                    links.len(),
                    START.as_secs()
                );
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(links)
}
