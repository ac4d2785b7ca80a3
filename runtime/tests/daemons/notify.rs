//! What the daemons tell the service manager, and what they do at its signals.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::process::{Daemon, HEAD, NODE, PATIENCE, Site, command};

/// A service manager.
struct Manager {
    socket: UnixDatagram,
    name: String,
}

impl Manager {
    fn at(path: &Path) -> Self {
        Self {
            socket: UnixDatagram::bind(path).unwrap(),
            name: path.to_str().unwrap().to_owned(),
        }
    }

    fn hidden(name: &str) -> Self {
        let name = format!("kolo-test-{name}-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        Self {
            socket: UnixDatagram::bind_addr(&address).unwrap(),
            name: format!("@{name}"),
        }
    }

    fn watch(&self, command: &mut Command, watchdog: Duration) {
        command
            .env("NOTIFY_SOCKET", &self.name)
            .env("WATCHDOG_USEC", watchdog.as_micros().to_string());
    }

    /// The next message that is no ping of the watchdog, and how many of these came before it.
    #[track_caller]
    fn hears(&self, part: &str) -> usize {
        let begin = Instant::now();
        let mut pings = 0;
        let mut buffer = [0; 1024];
        self.socket.set_read_timeout(Some(PATIENCE)).unwrap();
        while begin.elapsed() < PATIENCE {
            let length = self.socket.recv(&mut buffer).unwrap();
            let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
            if text == "WATCHDOG=1" {
                pings += 1;
                continue;
            }
            assert!(text.contains(part), "{text:?} and not {part:?}");
            return pings;
        }
        panic!("it does not say {part}");
    }

    /// Waits for pings.
    fn is_pinged(&self, times: usize) {
        let mut buffer = [0; 1024];
        self.socket.set_read_timeout(Some(PATIENCE)).unwrap();
        for _ in 0..times {
            let length = self.socket.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..length], b"WATCHDOG=1");
        }
    }

    fn is_silent_for(&self, time: Duration) -> bool {
        let mut buffer = [0; 1024];
        // What was sent before.
        self.socket.set_nonblocking(true).unwrap();
        while self.socket.recv(&mut buffer).is_ok() {}
        self.socket.set_nonblocking(false).unwrap();
        self.socket.set_read_timeout(Some(time)).unwrap();
        self.socket.recv(&mut buffer).is_err()
    }
}

const WATCHDOG: Duration = Duration::from_millis(300);

#[test]
fn both_daemons_tell_when_they_are_ready_well_reloading_and_stopping() {
    let dir = tempfile::tempdir().unwrap();
    let of_head = Manager::at(&dir.path().join("notify"));
    let config = dir.path().join("head.toml");
    std::fs::write(&config, "log = 'warn'\n").unwrap();
    let mut start = command(HEAD);
    start
        .arg("--config")
        .arg(&config)
        .arg("--state-dir")
        .arg(dir.path().join("head"))
        .args(["--listen", "127.0.0.1:0", "--format", "json"])
        .arg("--node-token-file")
        .arg(dir.path().join("token"));
    of_head.watch(&mut start, WATCHDOG);
    let mut head = Daemon::spawn(start);
    let ready = head.ready();
    of_head.hears("READY=1\nSTATUS=cluster-");
    of_head.is_pinged(3);

    let of_node = Manager::hidden("node");
    let mut start = command(NODE);
    start
        .args(["--head", ready["address"].as_str().unwrap()])
        .arg("--token-file")
        .arg(dir.path().join("token"))
        .arg("--state-dir")
        .arg(dir.path().join("node"))
        .args(["--format", "json"]);
    of_node.watch(&mut start, WATCHDOG);
    let mut node = Daemon::spawn(start);
    node.ready();
    of_node.hears("READY=1\nSTATUS=node-");
    of_node.is_pinged(3);

    // A daemon that stands still says nothing, and the manager would end it.
    node.signal(Signal::STOP);
    let quiet = of_node.is_silent_for(WATCHDOG * 4);
    node.signal(Signal::CONT);
    assert!(quiet);
    of_node.is_pinged(1);

    // SIGHUP: another log level, and new certificates.
    assert_eq!(head.printed.count("INFO"), 0, "{}", head.printed.text());
    std::fs::write(&config, "log = 'info'\n").unwrap();
    head.signal(Signal::HUP);
    of_head.hears("RELOADING=1\nMONOTONIC_USEC=");
    of_head.hears("READY=1");
    head.says("the log level is read again");
    // Wrong settings change nothing.
    std::fs::write(&config, "log = 'info'\nlisten_to = 1\n").unwrap();
    head.signal(Signal::HUP);
    head.says("did you mean `listen`?");
    of_head.hears("RELOADING=1");
    of_head.hears("READY=1");
    node.signal(Signal::HUP);
    of_node.hears("RELOADING=1");
    of_node.hears("READY=1");
    node.says("the identity is read again");

    node.signal(Signal::TERM);
    of_node.hears("STOPPING=1\nSTATUS=waiting for jobs");
    of_node.hears("STOPPING=1\nSTATUS=stopping");
    assert!(node.end().success());
    head.signal(Signal::TERM);
    of_head.hears("STOPPING=1\nSTATUS=waiting for jobs");
    of_head.hears("STOPPING=1\nSTATUS=stopping");
    assert!(head.end().success());
}

/// Certificates that were put into the folder by somebody else are taken at a SIGHUP.
#[test]
fn a_node_takes_a_certificate_that_was_put_into_its_folder() {
    let site = Site::new(&[]);
    let token = site.token("token", &[]);
    let node = site.node("node", &["--token-file", token.to_str().unwrap()]);
    node.ready();
    let identity = site.path("node").join("identity");
    let own = kolo_transport::Credentials::load(&identity).unwrap();
    // Another identity is not taken.
    let backup = site.path("backup");
    own.save(&backup).unwrap();
    let other = kolo_transport::Credentials::load(&site.admin()).unwrap();
    other.save(&identity).unwrap();
    node.signal(Signal::HUP);
    node.says("the identity was not read again");
    own.save(&identity).unwrap();
    node.signal(Signal::HUP);
    node.says("the identity is read again");
}
