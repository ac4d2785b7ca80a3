//! The fixture itself.

use std::net::UdpSocket;
use std::time::Duration;

use kolo_harness::netns::Lab;

use crate::needs_namespaces;

fn say(from: &UdpSocket, to: &str) -> std::io::Result<usize> {
    from.send_to(b"hello", to)
}

#[test]
fn hosts_reach_each_other_through_a_segment_and_a_firewall_is_a_black_hole() {
    needs_namespaces!();
    let lab = Lab::new().unwrap();
    let wire = lab.segment("wire").unwrap();
    let (a, b) = (lab.host("a").unwrap(), lab.host("b").unwrap());
    a.attach("eth0", &wire, &["10.1.0.1/24", "fd00::1/64"])
        .unwrap();
    b.attach("eth0", &wire, &["10.1.0.2/24", "fd00::2/64"])
        .unwrap();

    let at_a = a.enter(|| UdpSocket::bind("[::]:0")).unwrap().unwrap();
    let at_b = b.enter(|| UdpSocket::bind("[::]:0")).unwrap().unwrap();
    let port = at_b.local_addr().unwrap().port();
    let mut buffer = [0; 16];
    for to in [
        format!("[fd00::2]:{port}"),
        format!("[::ffff:10.1.0.2]:{port}"),
    ] {
        at_b.set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        say(&at_a, &to).unwrap();
        at_b.recv_from(&mut buffer).unwrap();
    }
    b.nft(&format!(
        "add rule inet test input udp dport {port} counter drop"
    ))
    .unwrap();
    say(&at_a, &format!("[fd00::2]:{port}")).unwrap();
    // The firewall counts what it drops: that is the event to wait for.
    let seen = || {
        b.nft("list chain inet test input")
            .unwrap()
            .contains("packets 1 ")
    };
    while !seen() {
        std::thread::yield_now();
    }
    at_b.set_nonblocking(true).unwrap();
    assert!(at_b.recv_from(&mut buffer).is_err());
}

#[test]
fn a_lab_leaves_nothing_behind_even_if_the_test_panics() {
    needs_namespaces!();
    let (send, recv) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let lab = Lab::new().unwrap();
        let a = lab.host("a").unwrap();
        a.write_etc("hosts", "127.0.0.1 localhost\n").unwrap();
        let mut sleeper = a.command("sleep").arg("1000").spawn().unwrap();
        while a.pids().is_empty() {
            std::thread::yield_now();
        }
        send.send((a.namespace().to_owned(), a.etc("hosts")))
            .unwrap();
        let reaper = std::thread::spawn(move || sleeper.wait().unwrap());
        drop(a);
        let _lab = (lab, Reap(Some(reaper)));
        panic!("as a test that fails");
    });
    assert!(thread.join().is_err());
    let (namespace, etc) = recv.recv().unwrap();
    assert!(!std::path::Path::new("/run/netns").join(namespace).exists());
    assert!(!etc.exists());
}

/// Waits for a process's end when dropped: the process must end by itself.
struct Reap(Option<std::thread::JoinHandle<std::process::ExitStatus>>);

impl Drop for Reap {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            drop(thread.join());
        }
    }
}

#[test]
fn hosts_have_names_and_files_of_their_own() {
    needs_namespaces!();
    let lab = Lab::new().unwrap();
    let (a, b) = (lab.host("a").unwrap(), lab.host("b").unwrap());
    lab.name_hosts(&[("10.1.0.1", "a"), ("10.1.0.2", "b")])
        .unwrap();
    for host in [&a, &b] {
        let text = host.run("cat", &["/etc/hosts"]).unwrap();
        assert!(text.contains("10.1.0.2 b\n"), "{text}");
    }
    assert!(
        !std::fs::read_to_string("/etc/hosts")
            .unwrap()
            .contains("10.1.0.2 b\n")
    );
    a.write_etc("hosts", "127.0.0.1 elsewhere\n").unwrap();
    assert!(a.run("cat", &["/etc/hosts"]).unwrap().contains("elsewhere"));
    assert!(!b.run("cat", &["/etc/hosts"]).unwrap().contains("elsewhere"));
}
