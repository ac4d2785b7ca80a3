//! `kolo doctor` on a cluster of processes: it tells causes.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rustix::process::Signal;
use serde_json::Value;

use crate::process::{Daemon, KOLO, NODE, Site, command};

/// A library that moves the wall clock of a process by `TEST_CLOCK_OFFSET` seconds.
const CLOCK: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int done = real(id, at);
    const char *offset = getenv("TEST_CLOCK_OFFSET");
    if (id == CLOCK_REALTIME && offset) at->tv_sec += atol(offset);
    return done;
}
"#;

fn clock_library(dir: &Path) -> PathBuf {
    let source = dir.join("clock.c");
    let library = dir.join("clock.so");
    std::fs::write(&source, CLOCK).unwrap();
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .args([&library, &source])
        .arg("-ldl")
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{compiled:?}");
    library
}

/// What it found, and its exit code.
fn findings(output: &Output) -> (Vec<Value>, i32) {
    let found: Vec<Value> = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (found, output.status.code().unwrap())
}

fn text<'a>(finding: &'a Value, key: &str) -> &'a str {
    finding[key].as_str().unwrap_or_default()
}

/// The finding of this check whose text holds `part`.
#[track_caller]
fn find<'a>(found: &'a [Value], check: &str, part: &str) -> &'a Value {
    found
        .iter()
        .find(|finding| finding["check"] == check && text(finding, "found").contains(part))
        .unwrap_or_else(|| panic!("no `{part}` of {check} in {found:#?}"))
}

const DAY: i64 = 86_400;

#[test]
fn a_clock_that_is_days_off_is_told_with_the_difference_and_not_as_a_login_that_is_missing() {
    let mut site = Site::new(&[]);
    let token = site.token("driver.token", &["--role", "driver"]);
    let me = site.login("me", &token);
    let library = clock_library(site.dir.path());
    let head = site.address.to_string();
    let doctor = |offset: i64| {
        command(KOLO)
            .args(["--head", &head, "--connect-timeout", "30", "--credentials"])
            .arg(&me)
            .args(["doctor", "--format", "json"])
            .env("LD_PRELOAD", &library)
            .env("TEST_CLOCK_OFFSET", offset.to_string())
            .output()
            .unwrap()
    };
    // Of this host: by its own certificate it is early, right, or late.
    for (offset, part) in [
        (-2 * DAY, "that of the head is 2d ahead of this one"),
        (2 * DAY, "that of the head is 2d behind this one"),
        (200 * DAY, "that of the head is 200d behind this one"),
    ] {
        let (found, code) = findings(&doctor(offset));
        let clock = find(&found, "clock", part);
        assert_eq!((clock["level"].as_str(), code), (Some("bad"), 1));
        assert!(text(clock, "do").contains("set-ntp"), "{clock}");
        for finding in &found {
            for wrong in ["log in again", "join again"] {
                assert!(!text(finding, "do").contains(wrong), "{finding}");
            }
        }
    }
    // Of a node: one that is ahead can join, one that is behind can't.
    let node_token = site.token("node.token", &[]);
    let node = |name: &str, offset: i64| {
        let mut node = command(NODE);
        node.args(["--head", &head, "--format", "json", "--hostname", name])
            .args(["--cpus", "1", "--gpus", "0", "--state-dir"])
            .arg(site.path(name))
            .arg("--token-file")
            .arg(&node_token)
            .env("LD_PRELOAD", &library)
            .env("TEST_CLOCK_OFFSET", offset.to_string());
        Daemon::spawn(node)
    };
    let ahead = node("ahead", 2 * DAY);
    ahead.ready();
    let (found, _) = findings(&doctor(0));
    let clock = find(&found, "clock", "that of ahead is 2d ahead of this one");
    assert_eq!(clock["level"], "bad");
    drop(ahead);
    let mut behind = node("behind", -2 * DAY);
    assert!(!behind.end().success());
    behind.says("one of the two clocks is wrong");
    // Of the head: its certificate is early here, or mine is there.
    for (offset, part) in [
        (2 * DAY, "that of the head is 2d ahead of this one"),
        (-2 * DAY, "that of the head is 2d behind this one"),
    ] {
        let offset = offset.to_string();
        site.restart_head_with(&[
            ("LD_PRELOAD", library.as_os_str()),
            ("TEST_CLOCK_OFFSET", offset.as_ref()),
        ]);
        let (found, code) = findings(&doctor(0));
        assert_eq!(find(&found, "clock", part)["level"], "bad");
        assert_eq!(code, 1);
        // Other commands say what to look at.
        let status = site.kolo(&me, &["status"]);
        let line = String::from_utf8(status.stderr).unwrap();
        assert_eq!(
            (status.status.code(), line.lines().count()),
            (Some(5), 2),
            "{line}"
        );
        assert!(line.contains("one of the two clocks is wrong") && line.contains("kolo doctor"));
    }
}

#[test]
fn a_node_that_is_being_stopped_is_told() {
    let site = Site::new(&[]);
    let token = site.token("node.token", &[]);
    let args = ["--token-file", token.to_str().unwrap(), "--hostname", "b"];
    let mut node = site.node("node", &args);
    let id = node.ready()["node"].as_str().unwrap().to_owned();
    let mut run = command(KOLO);
    run.args(["--head", &site.address.to_string(), "--credentials"])
        .arg(site.admin())
        .args(["run", "--cwd", "/", "--", "sh", "-c", "echo up; sleep 600"]);
    let run = Daemon::spawn(run);
    run.says("up");
    node.signal(Signal::TERM);
    site.wait_for(&id, "draining");
    let found: Vec<Value> = site.json_of(&["doctor"]);
    let draining = find(&found, "state", "it takes no new work");
    assert_eq!(draining["level"], "warning");
    assert_eq!(draining["at"], "b");
    drop(run);
    node.signal(Signal::TERM);
    node.end();
}

/// Whether this test may mount file systems of its own, in namespaces.
fn may_mount() -> bool {
    let tried = Command::new("unshare").args(["-rm", "true"]).output();
    let may = tried.is_ok_and(|output| output.status.success());
    if !may {
        eprintln!("skipped: `unshare -rm` is not allowed here");
    }
    may
}

/// A command in which `dir` is another file system.
fn with_mount(options: &str, dir: &Path, program: &str, args: &[&str]) -> Command {
    let mut shell = command("unshare");
    shell
        .args(["-rm", "sh", "-c"])
        .arg(r#"mount -t tmpfs -o "$0" none "$1" && shift && exec "$@""#)
        .arg(options)
        .arg(dir)
        .arg(program)
        .args(args);
    shell
}

#[test]
fn shared_memory_and_state_that_are_read_only_or_full_are_bad() {
    if !may_mount() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let args = ["doctor", "--local", "--format", "json"];
    let shm = Path::new("/dev/shm");
    for (options, dir, check, part, to_do) in [
        (
            "ro",
            shm,
            "shared memory",
            "Read-only file system",
            "remount,rw",
        ),
        (
            "nr_inodes=1",
            home.path(),
            "state folder",
            "No space left",
            "make room",
        ),
    ] {
        let output = with_mount(options, dir, KOLO, &args)
            .env("HOME", home.path())
            .output()
            .unwrap();
        let (found, _) = findings(&output);
        let finding = find(&found, check, part);
        assert_ne!(finding["level"], "good", "{finding}");
        assert!(text(finding, "do").contains(to_do), "{finding}");
    }
}

#[test]
fn what_head_and_nodes_suffer_from_is_told_from_afar() {
    if !may_mount() {
        return;
    }
    let site = Site::new(&[]);
    let token = site.token("node.token", &[]);
    let state = site.path("node");
    std::fs::create_dir(&state).unwrap();
    // It keeps its identity and then is full.
    let fill = r#"mount -t tmpfs -o size=64k none "$1" && dd if=/dev/zero of="$1/fill" bs=1k count=40 2>/dev/null; shift; exec "$@""#;
    let mut node = command("unshare");
    node.args(["-rm", "sh", "-c", fill, "sh"])
        .arg(&state)
        .args([
            NODE,
            "--head",
            &site.address.to_string(),
            "--format",
            "json",
        ])
        .args(["--cpus", "1", "--gpus", "0", "--hostname", "b"])
        .args(["--token-file", token.to_str().unwrap(), "--state-dir"])
        .arg(&state);
    let node = Daemon::spawn(node);
    node.ready();
    let found = site.json_of(&["doctor"]);
    let of_b: Vec<Value> = found.into_iter().filter(|it| it["at"] == "b").collect();
    let folder = find(&of_b, "state folder", "");
    assert_ne!(folder["level"], "good");
    assert!(text(folder, "do").contains("make room"), "{folder}");
    let user = find(&of_b, "user", "");
    assert!(text(user, "found").contains("run as root"), "{user}");
    assert!(text(user, "do").contains("User=kolo"), "{user}");
}

#[test]
fn core_dumps_that_would_hold_keys_are_told() {
    let pattern = std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap_or_default();
    for (limit, may) in [("unlimited", true), ("0", false)] {
        let script = format!(r#"ulimit -Sc {limit} 2>/dev/null && exec "$0" "$@""#);
        let output = command("sh")
            .args(["-c", &script, KOLO, "doctor", "--local", "--format", "json"])
            .output()
            .unwrap();
        if output.stdout.is_empty() {
            eprintln!("skipped: core dumps are not allowed here");
            continue;
        }
        let (found, _) = findings(&output);
        let finding = find(&found, "core dumps", "");
        // A program behind a pipe gets the dump whatever the limit is.
        let piped = pattern.starts_with('|') && !pattern.contains("/systemd-coredump ");
        let expected = if (may || piped) && !pattern.trim().is_empty() {
            "warning"
        } else {
            "good"
        };
        assert_eq!(finding["level"], expected, "{finding}");
    }
}
