//! `kolo login` writes over nothing that a login does not give back.

use std::path::Path;

use crate::process::Site;

fn login(site: &Site, dir: &Path, token: &Path, more: &[&str]) -> (Option<i32>, String) {
    let args = ["login", "--token-file", token.to_str().unwrap()];
    let output = site.kolo(dir, &[&args, more].concat());
    let err = String::from_utf8(output.stderr).unwrap();
    (output.status.code(), err)
}

fn identity(dir: &Path) -> String {
    std::fs::read_to_string(dir.join("identity.pem")).unwrap()
}

#[test]
fn a_login_takes_the_place_of_what_it_can_not_give_back_only_if_it_is_told_to() {
    let site = Site::new(&[]);
    let other = Site::new(&[]);
    let token = site.token("driver.token", &["--role", "driver"]);
    let admin_token = site.token("admin.token", &["--role", "driver", "--admin"]);
    let there = other.token("driver.token", &["--role", "driver"]);
    // A driver's own is what a login gives.
    let me = site.login("me", &token);
    let before = identity(&me);
    assert_eq!(login(&site, &me, &token, &[]), (Some(0), String::new()));
    assert_ne!(identity(&me), before);
    // That of another driver, of an administrator, of the operator, of a node is not.
    let far = other.login("far", &there);
    let admin = site.login("admin", &admin_token);
    let node_token = site.token("node.token", &[]);
    let node = site.node("node", &["--token-file", node_token.to_str().unwrap()]);
    node.ready();
    let damaged = site.login("damaged", &token);
    std::fs::write(damaged.join("identity.pem"), "no key").unwrap();
    for (dir, what) in [
        (far, "of another cluster (cluster-"),
        (admin, "which is an administrator's"),
        (site.admin(), "which is an administrator's"),
        (site.path("node/identity"), "the identity of the node node-"),
        (damaged, "an identity that can't be read"),
    ] {
        let before = identity(&dir);
        let (code, line) = login(&site, &dir, &token, &[]);
        assert_eq!((code, line.lines().count()), (Some(2), 1), "{line}");
        assert!(line.contains(what) && line.contains("--replace"), "{line}");
        assert!(line.contains(dir.to_str().unwrap()), "{line}");
        assert_eq!(identity(&dir), before);
        assert_eq!(login(&site, &dir, &token, &["--replace"]).0, Some(0));
        assert_ne!(identity(&dir), before);
    }
}
