//! The fixture itself.

use kolo_harness::netns::Lab;

use crate::needs_namespaces;

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
