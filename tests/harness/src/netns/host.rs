//! One host of a lab.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::process::Pid;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::{Inner, NetError, Segment, etc, finish, pids, run, write_etc};

/// A network namespace that plays a host. Clones are the same host. It lives as long as its
/// [`Lab`](super::Lab) or any of its hosts and segments.
#[derive(Debug, Clone)]
pub struct Host {
    lab: Arc<Inner>,
    name: String,
    namespace: String,
}

impl Host {
    pub(super) fn new(lab: &Arc<Inner>, name: &str, namespace: String) -> Result<Self, NetError> {
        let host = Self {
            lab: Arc::clone(lab),
            name: name.to_owned(),
            namespace,
        };
        host.ip("link set lo up")?;
        // An IPv6 address is usable at once, and not only when nobody has objected for a second.
        for scope in ["all", "default"] {
            host.set_sysctl(&format!("net/ipv6/conf/{scope}/accept_dad"), "0")?;
        }
        host.nft("add table inet test")?;
        for hook in ["input", "output", "forward"] {
            host.nft(&format!(
                "add chain inet test {hook} {{ type filter hook {hook} priority 0; }}"
            ))?;
        }
        Ok(host)
    }

    /// Its name in the lab.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The name of its namespace, for `ip netns exec`, `ip -n` and `nsenter --net=/run/netns/…`.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Plugs a new interface into `segment`, with these addresses (`10.1.0.1/24`, `fd00::1/64`), and sets it up.
    ///
    /// # Errors
    ///
    /// [`NetError`].
    pub fn attach(
        &self,
        interface: &str,
        segment: &Segment,
        addresses: &[&str],
    ) -> Result<(), NetError> {
        self.attach_with_mtu(interface, segment, addresses, 1500)
    }

    /// As [`Host::attach`], with an MTU in bytes.
    ///
    /// # Errors
    ///
    /// [`NetError`].
    pub fn attach_with_mtu(
        &self,
        interface: &str,
        segment: &Segment,
        addresses: &[&str],
        mtu: u32,
    ) -> Result<(), NetError> {
        let switch = self.lab.switch();
        let port = format!("p{}", self.lab.ports.fetch_add(1, Ordering::Relaxed));
        let mtu = mtu.to_string();
        let mut args = vec!["link", "add", interface, "netns", &self.namespace];
        args.extend(["mtu", &mtu, "type", "veth", "peer", "name", &port]);
        args.extend(["mtu", &mtu, "netns", &switch]);
        run("ip", &args)?;
        run(
            "ip",
            &[
                "-n",
                &switch,
                "link",
                "set",
                &port,
                "master",
                &segment.bridge,
                "up",
            ],
        )?;
        self.up(interface, addresses)
    }

    fn up(&self, interface: &str, addresses: &[&str]) -> Result<(), NetError> {
        self.ip(&format!("link set {interface} up"))?;
        for address in addresses {
            let nodad = if address.contains(':') { "nodad" } else { "" };
            self.ip(&format!("addr add {address} dev {interface} {nodad}"))?;
        }
        Ok(())
    }

    /// Runs `ip -n NAMESPACE` with these arguments, split at white space: `link set eth0 down`.
    ///
    /// # Errors
    ///
    /// [`NetError`] with what `ip` wrote.
    pub fn ip(&self, arguments: &str) -> Result<String, NetError> {
        let mut args = vec!["-n", &self.namespace];
        args.extend(arguments.split_ascii_whitespace());
        run("ip", &args)
    }

    /// Runs an `nft` command on the host. A table `inet test` with the filter chains `input`, `output` and `forward` is
    /// there: `add rule inet test input udp dport 7420 drop`.
    ///
    /// # Errors
    ///
    /// [`NetError`] with what `nft` wrote.
    pub fn nft(&self, command: &str) -> Result<String, NetError> {
        self.run("nft", &[command])
    }

    /// Sets a variable of the kernel's network: `net/ipv4/ip_forward`.
    ///
    /// # Errors
    ///
    /// [`NetError`].
    pub fn set_sysctl(&self, name: &str, value: &str) -> Result<(), NetError> {
        let path = format!("/proc/sys/{name}");
        Ok(self.enter(|| std::fs::write(path, value))??)
    }

    /// A command that will run on the host, as root, with the test's environment.
    #[must_use]
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace]);
        command.arg(program);
        command
    }

    /// Runs a program on the host to its end; gives its standard output.
    ///
    /// # Errors
    ///
    /// [`NetError`] with all that it wrote if it can't start or fails.
    pub fn run(&self, program: &str, args: &[&str]) -> Result<String, NetError> {
        finish(self.command(program).args(args))
    }

    /// Runs `inside` on a new thread of this process that is on the host, and waits for it. Sockets that it opens, and
    /// threads and processes that it starts, are on the host as well. A panic goes on in the caller.
    ///
    /// # Errors
    ///
    /// [`NetError::Io`] if the namespace can't be entered; `inside` then did not run.
    pub fn enter<T: Send>(&self, inside: impl FnOnce() -> T + Send) -> Result<T, NetError> {
        let namespace = File::open(PathBuf::from("/run/netns").join(&self.namespace))?;
        let moved = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                    .map(|()| inside())
            });
            thread.join()
        });
        match moved {
            Ok(result) => Ok(result.map_err(std::io::Error::from)?),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// The file that processes of [`Host::command`] find as `/etc/NAME`, if it was written.
    #[must_use]
    pub fn etc(&self, name: &str) -> PathBuf {
        etc(&self.namespace).join(name)
    }

    /// Writes [`Host::etc`]. The file must be there in the machine's `/etc`, too.
    ///
    /// # Errors
    ///
    /// [`NetError::Io`].
    pub fn write_etc(&self, name: &str, text: &str) -> Result<(), NetError> {
        write_etc(&self.namespace, name, text)
    }

    /// The processes that run on the host, less this one.
    #[must_use]
    pub fn pids(&self) -> Vec<Pid> {
        pids(&self.namespace)
    }
}
