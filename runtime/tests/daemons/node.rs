//! `kolo-node` alone: its identity, and who else has it.

use rustix::process::Signal;

use crate::process::Site;

/// A token for one use is used up by then.
#[test]
fn a_start_that_fails_after_the_join_has_kept_the_identity() {
    let site = Site::new(&[]);
    let token = site.token("token", &["--uses", "1"]);
    let taken = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let listen = taken.local_addr().unwrap().to_string();
    let args = ["--token-file", token.to_str().unwrap(), "--listen", &listen];
    let mut node = site.node("node", &args);
    assert_eq!(node.end().code(), Some(1));
    node.says(&listen);
    site.node("node", &[]).ready();
}

/// Two that took turns would end each other's jobs every few seconds.
#[test]
fn a_copy_of_a_node_is_refused_and_says_what_to_do() {
    let site = Site::new(&["--lease", "4s"]);
    let token = site.token("token", &[]);
    let mut original = site.node("first", &["--token-file", token.to_str().unwrap()]);
    let ready = original.ready();
    std::fs::create_dir(site.path("second")).unwrap();
    let identity = |name| site.path(name).join("identity");
    let own = kolo_transport::Credentials::load(&identity("first")).unwrap();
    own.save(&identity("second")).unwrap();
    let mut copy = site.node("second", &["--join-timeout", "1s"]);
    assert_eq!(copy.end().code(), Some(1));
    for part in [
        &*format!("another daemon is registered as {}", own.identity().name),
        ready["address"].as_str().unwrap(),
        "stop one of the two, or give this one a state folder of its own and a token",
    ] {
        copy.says(part);
    }
    // The first has noticed nothing. When it is gone, be it without a goodbye, the second may have its place.
    assert_eq!(original.printed.count("is lost"), 0);
    original.signal(Signal::KILL);
    original.end();
    let copy = site.node("second", &[]);
    assert_eq!(copy.ready()["node"], ready["node"]);
}
