//! Few descriptors: one line says so, and nothing panics.

use std::process::{Command, Output, Stdio};

use crate::process::{HEAD, KOLO, NODE, Site, command};

/// A program under a limit of open files. Daemons that do start are ended again.
fn limited(limit: u32, program: &str, args: &[&str]) -> Output {
    let script = r#"ulimit -n "$0" && exec "$@""#;
    let mut shell: Command = command("sh");
    shell
        .args(["-c", script, &limit.to_string()])
        .args(["timeout", "--signal", "INT", "0.5", program])
        .args(args)
        .stdin(Stdio::null());
    shell.output().unwrap()
}

/// Whether it did what it should. If not it must have said why in one line.
#[track_caller]
fn works(limit: u32, name: &str, output: &Output) -> bool {
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(!err.contains("panicked"), "{name} with {limit}: {err}");
    match output.status.code() {
        // What `timeout` says of a daemon that ran.
        Some(0 | 124) => true,
        Some(1) => {
            let line = err.trim_end();
            assert!(
                !line.contains('\n')
                    && line.contains("open files more")
                    && line.contains(&format!("of the {limit} that are the limit"))
                    && line.contains("ulimit -n"),
                "{name} with {limit}: {err}"
            );
            false
        }
        other => panic!("{name} with {limit}: {other:?}: {err}"),
    }
}

/// From which of these limits on it works: three in a row show that.
#[track_caller]
fn least(name: &str, program: &str, args: &[&str]) -> u32 {
    let mut in_a_row = 0;
    for limit in 8..=72 {
        let works = works(limit, name, &limited(limit, program, args));
        assert!(
            works || in_a_row == 0,
            "{name} works with less than {limit}"
        );
        in_a_row += u32::from(works);
        if in_a_row == 3 {
            return limit - 2;
        }
    }
    panic!("{name} does not work with 72");
}

#[test]
fn a_job_here_starts_or_says_how_many_descriptors_it_needs() {
    let run = ["run", "--local", "-n", "2", "--", "true"];
    assert!(least("kolo run", KOLO, &run) > 48);
    // The soft limit is raised where it is in the way.
    let soft = r#"ulimit -Sn 24 && exec "$@""#;
    let output = command("sh")
        .args(["-c", soft, "sh", KOLO])
        .args(run)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn daemons_start_or_say_how_many_descriptors_they_need() {
    let site = Site::new(&[]);
    let state = site.path("other");
    let state = state.to_str().unwrap();
    let head = ["--state-dir", state, "--listen", "127.0.0.1:0"];
    let head = [&head[..], &["--http-listen", "127.0.0.1:0"]].concat();
    assert!(least("kolo-head", HEAD, &head) > 40);
    let token = site.token("node.token", &[]);
    let address = site.address.to_string();
    let node = ["--head", &address, "--token-file", token.to_str().unwrap()];
    assert!(least("kolo-node", NODE, &node) > 40);
}

#[test]
fn commands_work_or_say_how_many_descriptors_they_need() {
    let site = Site::new(&[]);
    let (address, admin) = (site.address.to_string(), site.admin());
    let credentials = admin.to_str().unwrap();
    let at = ["--head", &address, "--credentials", credentials];
    assert!(least("kolo status", KOLO, &[&at[..], &["status"]].concat()) < 32);
    // The doctor looks at what it can, and names the limit.
    for limit in (8..=64).step_by(2) {
        let doctor = limited(limit, KOLO, &[&at[..], &["doctor"]].concat());
        let told = [&doctor.stdout[..], &doctor.stderr].concat();
        let told = String::from_utf8_lossy(&told);
        assert!(!told.contains("panicked"), "{limit}: {told}");
        assert_eq!(doctor.status.code(), Some(1), "{limit}: {told}");
        assert!(told.contains(&limit.to_string()), "{limit}: {told}");
    }
}
