//! What can be seen on this host alone.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use kolo_transport::wire::counted::Counted;
use kolo_transport::wire::span::Span;
use kolo_transport::{Credentials, interfaces};
use rustix::net::sockopt;
use rustix::process::{Resource, getrlimit};

use super::super::args::Connect;
use super::super::output::human;
use super::surroundings::{STATE_FOLDER, Whose, judge};
use super::{Doctor, Finding};
use crate::NodeResources;
use crate::hosts::own_name;
use crate::node::whence_gpus;
use crate::ssh::state::state_home;
use crate::surroundings::{addresses, look, problem_of_name};

/// What kolo asks the system for, for each of its sockets.
const SOCKET_BUFFER: usize = 32 << 20;
/// Less than this loses packets at some gigabits a second.
const SMALL_BUFFER: usize = 4 << 20;
/// A node needs about eight descriptors for each worker.
const FEW_FILES: u64 = 4096;
/// A certificate that ends so soon should have been renewed.
const SOON: Duration = Duration::from_secs(3 * 24 * 3600);

pub(super) fn examine(identity: Option<&Path>) -> Vec<Finding> {
    let mut findings = vec![
        open_files(),
        udp_buffers(),
        gpus(),
        clock(Path::new("/run/systemd/timesync/synchronized")),
    ];
    findings.extend(network());
    if let Some(dir) = identity {
        findings.push(certificate("certificate of the identity", dir));
    }
    findings
}

/// What `kolo` and what it starts here find around them.
pub(super) async fn surroundings(options: &Doctor, connect: &Connect) -> Vec<Finding> {
    // Identities lie in state folders.
    let of_node = options.identity.as_deref().and_then(Path::parent);
    let mut folders: Vec<(&str, PathBuf)> = [
        (
            "credentials folder",
            connect.config().credentials_dir().ok(),
        ),
        ("state folder", state_home().ok()),
        ("node's folder", of_node.map(Path::to_path_buf)),
    ]
    .into_iter()
    .filter_map(|(name, path)| Some((name, path?)))
    .collect();
    folders.dedup_by(|one, before| one.1 == before.1);
    let paths = folders.iter().map(|(_, path)| path.clone()).collect();
    let name = own_name();
    let (state, addresses) = tokio::join!(look(paths), addresses(&name));
    let mut findings = judge(Whose::Here, &state);
    let of_folders = findings.iter_mut().filter(|it| it.check == STATE_FOLDER);
    for (finding, (name, _)) in of_folders.zip(folders) {
        finding.check = name;
    }
    findings.push(name_of_host(&name, &addresses));
    findings
}

fn name_of_host(name: &str, addresses: &[IpAddr]) -> Finding {
    const CHECK: &str = "name of the host";
    if let Some((found, to_do)) = problem_of_name(name, addresses) {
        return Finding::warning(CHECK, found, to_do);
    }
    let all: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
    Finding::good(CHECK, format!("{name} is {}", all.join(", ")))
}

fn open_files() -> Finding {
    const CHECK: &str = "open files";
    let limit = getrlimit(Resource::Nofile);
    match limit.maximum {
        Some(most) if most < FEW_FILES => Finding::bad(
            CHECK,
            format!("at most {most}"),
            format!(
                "raise the hard limit to {FEW_FILES} or more: LimitNOFILE= in the unit, `ulimit -Hn`, or limits.conf; a node \
                 needs about 8 for each worker"
            ),
        ),
        Some(most) => Finding::good(
            CHECK,
            format!("at most {most}; daemons raise their limit to it"),
        ),
        None => Finding::good(CHECK, "no limit"),
    }
}

fn udp_buffers() -> Finding {
    const CHECK: &str = "udp buffers";
    const REMEDY: &str = "sysctl -w net.core.rmem_max=33554432 net.core.wmem_max=33554432 (and in /etc/sysctl.d to keep it); \
                          small buffers lose packets under load, which costs throughput";
    let socket = match UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)) {
        Ok(socket) => socket,
        Err(error) => {
            return Finding::bad(
                CHECK,
                format!("no UDP socket can be made: {error}"),
                "kolo speaks QUIC, which is UDP: allow it",
            );
        }
    };
    // As the daemons do: past the limits with root's rights, up to them without.
    for set in [
        sockopt::set_socket_recv_buffer_size_force(&socket, SOCKET_BUFFER)
            .or_else(|_| sockopt::set_socket_recv_buffer_size(&socket, SOCKET_BUFFER)),
        sockopt::set_socket_send_buffer_size_force(&socket, SOCKET_BUFFER)
            .or_else(|_| sockopt::set_socket_send_buffer_size(&socket, SOCKET_BUFFER)),
    ] {
        if let Err(error) = set {
            return Finding::warning(CHECK, format!("can't be set: {error}"), REMEDY);
        }
    }
    // The kernel reports twice what was set, for its own needs.
    let granted = |size: rustix::io::Result<usize>| size.unwrap_or(0) / 2;
    let receive = granted(sockopt::socket_recv_buffer_size(&socket));
    let send = granted(sockopt::socket_send_buffer_size(&socket));
    let found = format!(
        "{} KiB to receive, {} KiB to send",
        receive >> 10,
        send >> 10
    );
    if receive.min(send) < SMALL_BUFFER {
        Finding::warning(CHECK, found, REMEDY)
    } else {
        Finding::good(CHECK, found)
    }
}

/// The GPUs that a node of this host offers if nothing is declared.
fn gpus() -> Finding {
    const CHECK: &str = "gpus";
    match NodeResources::default().find() {
        Ok(found) => {
            let count = found.resources.gpus;
            let by = whence_gpus(std::env::var_os("CUDA_VISIBLE_DEVICES"));
            Finding::good(CHECK, format!("{} ({by})", Counted(count, "GPU")))
        }
        Err(error) => Finding::bad(
            CHECK,
            error.to_string(),
            "set CUDA_VISIBLE_DEVICES to devices of this host",
        ),
    }
}

/// Whether something keeps the clock right. Certificates have a first and a last day.
fn clock(synchronized: &Path) -> Finding {
    const CHECK: &str = "clock";
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    // The day on which this was written.
    if now < 1_763_683_200 {
        return Finding::bad(
            CHECK,
            format!("it is {} after 1970", Span(Duration::from_secs(now))),
            "set the clock, and keep it right: `timedatectl set-ntp true`, chrony or ntpd; certificates are not valid yet",
        );
    }
    if synchronized.exists() {
        Finding::good(CHECK, "kept right by systemd-timesyncd")
    } else {
        Finding::good(CHECK, "plausible; what keeps it right is not known")
    }
}

fn network() -> Vec<Finding> {
    const CHECK: &str = "interfaces";
    let interfaces = match interfaces::here() {
        Ok(interfaces) => interfaces,
        Err(error) => {
            return vec![Finding::bad(
                CHECK,
                format!("the kernel does not list them: {error}"),
                "allow netlink sockets (AF_NETLINK), which containers may filter; jobs on several hosts then use the address \
                 that the node advertises",
            )];
        }
    };
    let (up, down): (Vec<_>, Vec<_>) = interfaces
        .iter()
        .filter(|interface| !interface.loopback)
        .partition(|interface| interface.up);
    let mut findings = Vec::new();
    if up.is_empty() {
        findings.push(Finding::warning(
            CHECK,
            "none but the loopback is up",
            "jobs on several hosts need one: `ip addr` shows what there is",
        ));
    } else {
        let names: Vec<String> = up
            .iter()
            .map(|interface| {
                let addresses: Vec<String> = interface
                    .addresses
                    .iter()
                    .map(|address| address.ip.to_string())
                    .collect();
                format!(
                    "{} (MTU {}: {})",
                    interface.name,
                    interface.mtu,
                    addresses.join(", ")
                )
            })
            .collect();
        findings.push(Finding::good(CHECK, names.join("; ")));
    }
    for interface in down {
        findings.push(Finding::warning(
            CHECK,
            format!("{} has addresses and is down", interface.name),
            format!(
                "`ip link set {} up`, look at its cable, or remove its addresses",
                interface.name
            ),
        ));
    }
    findings
}

/// The dates of a certificate.
pub(super) fn certificate(check: &'static str, dir: &Path) -> Finding {
    let credentials = match Credentials::load_undated(dir) {
        Ok(credentials) => credentials,
        Err(error) => {
            return Finding::bad(
                check,
                error.to_string(),
                "join again with a token: `kolo login` for a driver, --token-file for a node",
            );
        }
    };
    let validity = credentials.validity();
    dates(
        check,
        &credentials.identity().to_string(),
        validity.start,
        validity.end,
        SystemTime::now(),
    )
}

fn dates(
    check: &'static str,
    who: &str,
    start: SystemTime,
    end: SystemTime,
    now: SystemTime,
) -> Finding {
    const AGAIN: &str = "if this host's clock is right, a new one comes with a token: `kolo login` for a driver, --token-file for a \
                         node";
    let span = |duration: Duration| human(duration.as_secs() / 60 * 60_000);
    if let Ok(early) = start.duration_since(now)
        && !early.is_zero()
    {
        return Finding::bad(
            check,
            format!("{who}: valid only in {}", span(early)),
            "this host's clock is behind that of the head: set it right",
        );
    }
    match end.duration_since(now) {
        Ok(left) if left >= SOON.min(life(start, end) / 4) => {
            Finding::good(check, format!("{who}: valid for {} more", span(left)))
        }
        Ok(left) => Finding::warning(
            check,
            format!("{who}: ends in {}", span(left)),
            "it is renewed by itself at the next use; if it stays so, look at the clock and at the head's log",
        ),
        Err(_) => Finding::bad(check, format!("{who}: has ended"), AGAIN),
    }
}

fn life(start: SystemTime, end: SystemTime) -> Duration {
    end.duration_since(start).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    #[test]
    fn this_host_is_examined_and_what_is_wrong_has_a_remedy() {
        for finding in examine(Some(Path::new("/no/such/folder"))) {
            assert!(!finding.found.is_empty());
            assert_eq!(finding.remedy.is_none(), finding.level == Level::Good);
            if finding.check.contains("identity") {
                assert_eq!(finding.level, Level::Bad);
            }
        }
    }

    #[test]
    fn a_host_s_own_name_is_looked_at() {
        let level = |address: [u8; 4]| name_of_host("a", &[address.into()]).level;
        assert_eq!(level([127, 0, 1, 1]), Level::Warning);
        assert_eq!(level([10, 0, 0, 1]), Level::Good);
        assert_eq!(name_of_host("a", &[]).level, Level::Warning);
    }

    #[test]
    fn a_certificate_is_early_good_ending_or_over() {
        let day = Duration::from_secs(24 * 3600);
        let start = SystemTime::UNIX_EPOCH + day * 20_000;
        let end = start + day * 30;
        for (now, level, part) in [
            (start - day, Level::Bad, "valid only in 1d"),
            (start, Level::Good, "valid for 30d more"),
            (end - day * 4, Level::Good, "4d more"),
            (end - day, Level::Warning, "ends in 1d"),
            (end + day, Level::Bad, "has ended"),
        ] {
            let finding = dates("certificate", "driver", start, end, now);
            assert_eq!(finding.level, level, "{finding:?}");
            assert!(finding.found.contains(part), "{finding:?}");
        }
        // One that lives for an hour is not always about to end.
        let hour = Duration::from_secs(3600);
        let finding = dates(
            "certificate",
            "driver",
            start,
            start + hour,
            start + hour / 2,
        );
        assert_eq!(finding.level, Level::Good);
    }
}
