//! Two hosts on one machine: network namespaces without names, joined by a pair of interfaces.
//!
//! A namespace lives as long as a process is in it. Each is held by a `cat` that ends when this process does, however that
//! ends; the interfaces go with the namespaces. So nothing can be left behind, and no two runs can meet.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, Command, Stdio};

use anyhow::Context as _;

use super::launch;

/// The interface, by the same name on both hosts.
const INTERFACE: &str = "kolo0";

/// The hosts of a run.
#[derive(Debug)]
pub(crate) struct Hosts(Vec<Holder>);

impl Hosts {
    /// This machine itself, or two hosts whose network has this MTU.
    pub(crate) fn new(count: u32, mtu: u16) -> anyhow::Result<Self> {
        if count == 1 {
            return Ok(Self(Vec::new()));
        }
        anyhow::ensure!(
            rustix::process::geteuid().is_root(),
            "--hosts 2 makes two network namespaces, which needs root; run it as root, or leave --hosts out for one host"
        );
        let hosts = Self(vec![Holder::new()?, Holder::new()?]);
        let (one, two) = (hosts.0[0].id(), hosts.0[1].id());
        let peer = two.to_string();
        ip(
            one,
            &[
                "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", &peer,
            ],
        )?;
        for (host, id) in (0_u32..).zip([one, two]) {
            let address = format!("{}/24", hosts.address(host));
            ip(id, &["link", "set", "lo", "up"])?;
            ip(id, &["address", "add", &address, "dev", INTERFACE])?;
            ip(
                id,
                &["link", "set", INTERFACE, "mtu", &mtu.to_string(), "up"],
            )?;
        }
        Ok(hosts)
    }

    /// A process that has a host's network; none for this machine itself.
    pub(crate) fn holder(&self, host: u32) -> Option<u32> {
        self.0.get(host as usize).map(Holder::id)
    }

    /// Where a host is reached.
    pub(crate) fn address(&self, host: u32) -> IpAddr {
        if self.0.is_empty() {
            Ipv4Addr::LOCALHOST.into()
        } else {
            Ipv4Addr::from(Ipv4Addr::new(10, 77, 0, 1).to_bits() + host).into()
        }
    }
}

/// A process in a network namespace of its own.
#[derive(Debug)]
struct Holder(Child);

impl Holder {
    fn new() -> anyhow::Result<Self> {
        let started = Command::new("unshare")
            .args(["--net", "cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut holder = match started {
            Ok(child) => Self(child),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                anyhow::bail!(
                    "--hosts 2 needs `unshare` (Debian: util-linux), which is not installed"
                )
            }
            Err(error) => return Err(error).context("can't start `unshare`"),
        };
        // It answers from within.
        let mut byte = [b'!'];
        let sent = holder.0.stdin.as_mut().map(|stdin| stdin.write_all(&byte));
        let answer = holder
            .0
            .stdout
            .as_mut()
            .map(|stdout| stdout.read_exact(&mut byte));
        anyhow::ensure!(
            matches!((sent, answer), (Some(Ok(())), Some(Ok(())))),
            "--hosts 2 makes network namespaces, which this system refuses here; it needs the right CAP_SYS_ADMIN"
        );
        Ok(holder)
    }

    fn id(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        if self.0.kill().is_ok() {
            drop(self.0.wait());
        }
    }
}

/// Runs `ip` on a host.
fn ip(host: u32, arguments: &[&str]) -> anyhow::Result<()> {
    let shown = arguments.join(" ");
    let output = launch::command("ip", Some(host))
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .context("can't start `ip`")?;
    anyhow::ensure!(
        output.status.success(),
        "--hosts 2 needs `ip` (Debian: iproute2) and the right to use it; `ip {shown}` says: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_host_is_this_machine() {
        let hosts = Hosts::new(1, 1500).unwrap();
        assert_eq!(hosts.holder(0), None);
        assert!(hosts.address(0).is_loopback());
    }
}
