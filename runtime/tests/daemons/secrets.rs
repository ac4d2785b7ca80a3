//! Files with secrets that others can read.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use crate::process::{Daemon, HEAD, Site, command};

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

const WARNING: &str = "so others on this machine can read the secret in it; `chmod 600` it";

#[test]
fn tokens_and_bearer_secrets_that_others_can_read_are_taken_with_a_warning() {
    let site = Site::new(&[]);
    for (mode, times) in [(0o600, 0), (0o644, 1)] {
        let token = site.token(&format!("node-{mode:o}"), &[]);
        set_mode(&token, mode);
        let file = token.to_str().unwrap();
        let node = site.node(&format!("state-{mode:o}"), &["--token-file", file]);
        node.ready();
        assert_eq!(
            node.printed.count(WARNING),
            times,
            "{}",
            node.printed.text()
        );

        let token = site.token(&format!("driver-{mode:o}"), &["--role", "driver"]);
        set_mode(&token, mode);
        let args = ["login", "--token-file", token.to_str().unwrap()];
        let out = site.kolo(&site.path(&format!("login-{mode:o}")), &args);
        assert!(out.status.success(), "{out:?}");
        let err = String::from_utf8(out.stderr).unwrap();
        assert_eq!(err.matches(WARNING).count(), times, "{err}");
        assert!(err.is_empty() || err.starts_with("kolo: "), "{err}");

        let bearer = site.path("bearer");
        let secret = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822c";
        std::fs::write(&bearer, secret).unwrap();
        set_mode(&bearer, mode);
        let mut head = command(HEAD);
        head.arg("--state-dir")
            .arg(site.path(&format!("head-{mode:o}")))
            .args(["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"])
            .args(["--format", "json", "--bearer-file"])
            .arg(&bearer);
        let head = Daemon::spawn(head);
        head.ready();
        assert_eq!(
            head.printed.count(WARNING),
            times,
            "{}",
            head.printed.text()
        );
        assert_eq!(head.printed.count(secret), 0);
    }
}
