//! kolo's ranks, started by the bench: without daemons, as anybody can use `kolo-collectives`.
//!
//! A rank is this binary again. Its standard input is a socket to the bench, over which it gets its ends of the socket pairs to the
//! other ranks of its host, its part, and a certificate for a key that it makes itself.

use std::io::{IoSlice, Write as _};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use kolo_transport::identity::{Identity, Role};
use kolo_transport::ids::{ClusterId, JobId, Slot};
use kolo_transport::{Authority, RandomId as _};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::de::DeserializeOwned;

use super::Options;
use super::group::{Group, Link, Processes};
use super::hosts::Hosts;
use super::rank::{Admission, MOST_SOCKETS, RANK, Request, Setup};
use super::wire::{Lane, Operation};
use crate::raw::child::ROLE;

/// Certificates are for one run.
const VALID: Duration = Duration::from_secs(24 * 3600);

pub(crate) fn start(
    operation: Operation,
    options: &Options,
    hosts: &Hosts,
) -> anyhow::Result<Group> {
    let host_of = options.host_of();
    let job = JobId::random();
    let authority = Authority::create(ClusterId::random())?;
    let mut sockets = sockets(&host_of, options, operation)?;
    let mut processes = Processes::default();
    let mut links = Vec::new();
    for (rank, host) in host_of.iter().enumerate() {
        let (ours, theirs) = UnixStream::pair()?;
        let child = Command::new("/proc/self/exe")
            .env(ROLE, RANK)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .spawn()
            .context("can't start a rank")?;
        processes.push(child);
        let mut link = Link::new(ours)?;
        let (peers, ends): (Vec<u32>, Vec<OwnedFd>) =
            std::mem::take(&mut sockets[rank]).into_iter().unzip();
        pass(link.socket(), &ends)?;
        say(
            &mut link,
            &Setup {
                rank: rank as u32,
                host_of: host_of.clone(),
                operation,
                lane: options.lane,
                shared: options.shared,
                host: hosts.holder(*host),
                listen: hosts.address(*host),
                mtu: hosts.holder(*host).map(|_| options.mtu()),
                job: job.0,
                sockets: peers,
            },
        )?;
        links.push(link);
    }
    for (rank, link) in (0..).zip(&mut links) {
        let request: Request = hear(link)?;
        let name = Identity::worker_name(job, Slot(rank));
        let certificate = authority.sign(&request.key, Role::Worker, &name, VALID)?;
        say(
            link,
            &Admission {
                certificate: certificate.to_vec(),
                authority: authority.certificate().to_vec(),
            },
        )?;
    }
    let addresses = links
        .iter_mut()
        .map(hear)
        .collect::<anyhow::Result<Vec<SocketAddr>>>()?;
    for link in &mut links {
        say(link, &addresses)?;
    }
    Group::ready(links, processes, None)
}

/// For each rank its ends of the socket pairs to others of its host, with their ranks. What one rank sends to one other has
/// links of its own, one each way: ranks that do that have more sockets.
fn sockets(
    host_of: &[u32],
    options: &Options,
    operation: Operation,
) -> anyhow::Result<Vec<Vec<(u32, OwnedFd)>>> {
    let mut all: Vec<Vec<(u32, OwnedFd)>> = host_of.iter().map(|_| Vec::new()).collect();
    if options.lane != Lane::Auto {
        return Ok(all);
    }
    for high in 1..host_of.len() {
        for low in 0..high {
            if host_of[high] != host_of[low] {
                continue;
            }
            let talk = operation == Operation::SendReceive && high == low ^ 1;
            for _ in 0..if talk { 3 } else { 1 } {
                let (one, two) = UnixStream::pair().context("a pair of sockets")?;
                all[high].push((low as u32, one.into()));
                all[low].push((high as u32, two.into()));
            }
        }
    }
    Ok(all)
}

/// The first byte to a rank, with its sockets.
fn pass(socket: &UnixStream, sockets: &[OwnedFd]) -> anyhow::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_SOCKETS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let borrowed: Vec<_> = sockets.iter().map(|socket| socket.as_fd()).collect();
    if !borrowed.is_empty() {
        anyhow::ensure!(
            control.push(SendAncillaryMessage::ScmRights(&borrowed)),
            "{} sockets are too many for one message",
            borrowed.len()
        );
    }
    sendmsg(
        socket,
        &[IoSlice::new(b"!")],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

fn say(link: &mut Link, message: &impl serde::Serialize) -> anyhow::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    link.socket().write_all(&line).context("a rank ended")
}

fn hear<T: DeserializeOwned>(link: &mut Link) -> anyhow::Result<T> {
    let line = link.line()?;
    serde_json::from_str(&line).with_context(|| format!("a rank said `{line}`"))
}
