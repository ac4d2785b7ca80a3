//! Hosts on one machine: network namespaces with interfaces of their own.
//!
//! ```no_run
//! use kolo_harness::netns::{self, Lab};
//!
//! # fn test() -> Result<(), netns::NetError> {
//! if let Err(reason) = netns::available() {
//!     eprintln!("skipped: {reason}");
//!     return Ok(());
//! }
//! let lab = Lab::new()?;
//! let wire = lab.segment("wire")?; // a switch
//! let a = lab.host("a")?; // a namespace with `lo` up
//! let b = lab.host("b")?;
//! a.attach("eth0", &wire, &["10.1.0.1/24", "fd00::1/64"])?;
//! b.attach("eth0", &wire, &["10.1.0.2/24", "fd00::2/64"])?;
//! b.nft("add rule inet test input udp dport 7420 drop")?; // a black hole
//! let out = a.run("ip", &["route", "get", "10.1.0.2"])?; // waits; an error has the output
//! let child = a.command("sshd").arg("-D").spawn()?; // a `std::process::Command`
//! let mtu = b.enter(|| std::fs::read_to_string("/proc/sys/net/ipv6/conf/eth0/mtu")); // in this process
//! # drop((out, child, mtu)); Ok(()) }
//! ```
//!
//! * Names are unique for each process and [`Lab`]: many tests can run at once. Addresses need not be unique, each lab
//!   is a world of its own.
//! * The segments of a lab are bridges in a namespace of its own. Nothing is added to the machine's own network.
//! * [`Host::command`] goes through `ip netns exec`, which also gives the process a `/sys` of the namespace and
//!   the files of [`Host::etc`] in place of those in `/etc`, so each host has its own `/etc/hosts`; all hosts know each other
//!   by name after [`Lab::name_hosts`].
//! * [`Host::enter`] moves one thread of this process. Threads that it starts, and processes, are there as well: a
//!   tokio runtime that is built inside is on that host, a driver included. `/sys` stays the machine's.
//! * Dropping a [`Lab`], also when a test panics, kills what runs in its namespaces and removes them. What a killed
//!   test process left is removed by the next [`Lab::new`] of any process.

mod host;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

pub use host::Host;

/// Start of the name of every namespace that is made here.
const PREFIX: &str = "kolo-test-";

/// What failed while namespaces were made or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetError {
    /// A command of the system failed; its output is in the message.
    #[error("`{command}` failed: {output}")]
    Command {
        /// The command line.
        command: String,
        /// What it wrote, or why it could not start.
        output: String,
    },
    /// The operating system refused something.
    #[error("network namespace: {0}")]
    Io(#[from] std::io::Error),
}

/// Whether this process can make network namespaces; if not, why, for the line that says that a test is skipped.
///
/// # Errors
///
/// What is missing and what to do.
pub fn available() -> Result<(), String> {
    // Once for all tests of a process: two at the same time would be in each other's way, and be skipped for that.
    static AVAILABLE: OnceLock<Result<(), String>> = OnceLock::new();
    AVAILABLE.get_or_init(look).clone()
}

fn look() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("network namespaces need root; run the test as root".to_owned());
    }
    for tool in ["ip", "nft"] {
        if let Err(error) = Command::new(tool).arg("-V").output() {
            return Err(format!(
                "network namespaces need `{tool}`: {error}; install iproute2 and nftables"
            ));
        }
    }
    let probe = format!("{PREFIX}{}-probe", std::process::id());
    run("ip", &["netns", "add", &probe])
        .and_then(|_| run("ip", &["netns", "del", &probe]))
        .map_err(|error| format!("network namespaces can't be made here: {error}"))?;
    Ok(())
}

/// Runs a command to its end; gives its standard output.
pub(crate) fn run(program: &str, args: &[&str]) -> Result<String, NetError> {
    finish(Command::new(program).args(args))
}

fn finish(command: &mut Command) -> Result<String, NetError> {
    let fail = |command: &Command, output: String| NetError::Command {
        command: format!("{command:?}"),
        output,
    };
    let output = command
        .output()
        .map_err(|error| fail(command, error.to_string()))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text).trim().to_owned();
        Err(fail(command, format!("{}: {text}", output.status)))
    }
}

/// A switch of a [`Lab`].
#[derive(Debug, Clone)]
pub struct Segment {
    lab: Arc<Inner>,
    bridge: String,
}

impl Segment {
    /// Limits the size of frames that the switch forwards, in bytes; larger ones are dropped without a word, as between
    /// hosts with jumbo frames on a switch without.
    ///
    /// # Errors
    ///
    /// [`NetError`].
    pub fn mtu(&self, mtu: u32) -> Result<(), NetError> {
        let switch = self.lab.switch();
        let ports = run(
            "ip",
            &["-n", &switch, "-o", "link", "show", "master", &self.bridge],
        )?;
        for port in ports.lines().filter_map(|line| line.split(": ").nth(1)) {
            let port = port.split('@').next().unwrap_or(port);
            run(
                "ip",
                &["-n", &switch, "link", "set", port, "mtu", &mtu.to_string()],
            )?;
        }
        Ok(())
    }
}

/// Hosts and the networks between them.
#[derive(Debug)]
pub struct Lab {
    inner: Arc<Inner>,
}

struct Inner {
    /// Start of the names of its namespaces.
    prefix: String,
    /// Namespaces that were made, by host.
    made: Mutex<BTreeMap<String, String>>,
    ports: AtomicU32,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lab")
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

impl Lab {
    /// An empty lab.
    ///
    /// # Errors
    ///
    /// [`NetError`] if namespaces can't be made; see [`available`].
    pub fn new() -> Result<Self, NetError> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        remove_orphans();
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let inner = Inner {
            prefix: format!("{PREFIX}{}-{number}-", std::process::id()),
            made: Mutex::default(),
            ports: AtomicU32::new(0),
        };
        let switch = inner.switch();
        inner.add("", &switch)?;
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// A switch.
    ///
    /// # Errors
    ///
    /// [`NetError`].
    pub fn segment(&self, name: &str) -> Result<Segment, NetError> {
        let switch = self.inner.switch();
        run(
            "ip",
            &["-n", &switch, "link", "add", name, "type", "bridge"],
        )?;
        run("ip", &["-n", &switch, "link", "set", name, "up"])?;
        Ok(Segment {
            lab: Arc::clone(&self.inner),
            bridge: name.to_owned(),
        })
    }

    /// A host without interfaces but `lo`. `name` has letters, digits and `-`.
    ///
    /// # Errors
    ///
    /// [`NetError`].
    pub fn host(&self, name: &str) -> Result<Host, NetError> {
        let namespace = format!("{}{name}", self.inner.prefix);
        self.inner.add(name, &namespace)?;
        Host::new(&self.inner, name, namespace)
    }

    /// Writes `/etc/hosts` of every host that was made so far: `localhost`, and these addresses and names.
    ///
    /// # Errors
    ///
    /// [`NetError`].
    pub fn name_hosts(&self, names: &[(&str, &str)]) -> Result<(), NetError> {
        let mut text = "127.0.0.1 localhost\n::1 localhost\n".to_owned();
        for (address, name) in names {
            text.push_str(address);
            text.push(' ');
            text.push_str(name);
            text.push('\n');
        }
        let made = self.inner.made.lock();
        for (host, namespace) in made.unwrap_or_else(PoisonError::into_inner).iter() {
            if !host.is_empty() {
                write_etc(namespace, "hosts", &text)?;
            }
        }
        Ok(())
    }
}

impl Inner {
    /// The namespace of the switches.
    fn switch(&self) -> String {
        format!("{}0switch", self.prefix)
    }

    fn add(&self, host: &str, namespace: &str) -> Result<(), NetError> {
        run("ip", &["netns", "add", namespace])?;
        self.made
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(host.to_owned(), namespace.to_owned());
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let made = std::mem::take(&mut self.made);
        for namespace in made
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
        {
            remove(namespace);
        }
    }
}

/// Kills what runs in a namespace and removes it. Errors are told, not given: this runs while dropping.
fn remove(namespace: &str) {
    for pid in pids(namespace) {
        // An error means that it has ended meanwhile.
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).ok();
    }
    if let Err(error) = run("ip", &["netns", "del", namespace]) {
        tracing::warn!(%error, namespace, "a test's network namespace is left behind");
    }
    drop(std::fs::remove_dir_all(etc(namespace)));
    // Only if no other namespace has files there.
    drop(std::fs::remove_dir("/etc/netns"));
}

/// The processes whose network is this namespace, less this process (which may be a guest there).
fn pids(namespace: &str) -> Vec<rustix::process::Pid> {
    let own = rustix::process::getpid();
    run("ip", &["netns", "pids", namespace])
        .unwrap_or_default()
        .lines()
        .filter_map(|line| rustix::process::Pid::from_raw(line.trim().parse().ok()?))
        .filter(|pid| *pid != own)
        .collect()
}

/// Removes what test processes left that are gone.
fn remove_orphans() {
    let Ok(entries) = std::fs::read_dir("/run/netns") else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let owner = name
            .strip_prefix(PREFIX)
            .and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            remove(&name);
        }
    }
}

fn etc(namespace: &str) -> PathBuf {
    Path::new("/etc/netns").join(namespace)
}

fn write_etc(namespace: &str, file: &str, text: &str) -> Result<(), NetError> {
    let dir = etc(namespace);
    std::fs::create_dir_all(&dir)?;
    std::fs::write(dir.join(file), text)?;
    Ok(())
}
