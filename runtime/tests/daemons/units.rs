//! The units for systemd fit the daemons.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::{HEAD, NODE, command};

fn packaging(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../packaging")
        .join(path)
}

fn unit(name: &str) -> String {
    std::fs::read_to_string(packaging(&format!("systemd/{name}.service"))).unwrap()
}

fn values<'a>(unit: &'a str, key: &str) -> Vec<&'a str> {
    unit.lines()
        .filter_map(|line| line.strip_prefix(key)?.strip_prefix('='))
        .collect()
}

fn seconds(text: &str) -> u64 {
    text.trim_end_matches('s').parse().unwrap()
}

/// A setting of a daemon, as it holds by default.
fn default(program: &str, key: &str) -> u64 {
    let output = command(program)
        .args(["--state-dir", "/x", "--print-config"])
        .args(if program == NODE {
            &["--head", "head:1"][..]
        } else {
            &[]
        })
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text
        .lines()
        .find(|line| line.starts_with(&format!("{key} = ")))
        .unwrap();
    seconds(line.split('"').nth(1).unwrap())
}

#[test]
fn units_wait_for_readiness_watch_and_leave_time_to_stop() {
    for (name, program) in [("kolo-head", HEAD), ("kolo-node", NODE)] {
        let unit = unit(name);
        assert_eq!(values(&unit, "Type"), ["notify"]);
        assert_eq!(values(&unit, "NotifyAccess"), ["main"]);
        assert!(seconds(values(&unit, "WatchdogSec")[0]) >= 10);
        assert_eq!(values(&unit, "NoNewPrivileges"), ["yes"]);
        // Their memory holds keys.
        assert_eq!(values(&unit, "LimitCORE"), ["0"], "{name}");
        let stop = seconds(values(&unit, "TimeoutStopSec")[0]);
        let needed = default(program, "drain_timeout") + default(program, "stop_timeout");
        assert!(stop > needed + 10, "{name}: {stop} s for {needed} s");
        // Every flag in it is one.
        let flags = values(&unit, "ExecStart")[0]
            .split_whitespace()
            .filter(|word| word.starts_with("--"));
        let help = command(program).arg("--help").output().unwrap();
        let help = String::from_utf8(help.stdout).unwrap();
        for flag in flags {
            assert!(help.contains(flag), "{flag}");
        }
    }
    // TERM must not reach wardens and workers before the daemon has ended them in order.
    assert_eq!(values(&unit("kolo-node"), "KillMode"), ["mixed"]);
    assert_eq!(
        values(&unit("kolo-node"), "RestartPreventExitStatus"),
        ["2 3"]
    );
}

#[test]
fn the_example_settings_are_good() {
    for (file, program) in [("config/head.toml", HEAD), ("config/node.toml", NODE)] {
        let output = command(program)
            .arg("--config")
            .arg(packaging(file))
            .args(["--state-dir", "/x", "--check-config"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        // What is commented out is good, too.
        let text = std::fs::read_to_string(packaging(file)).unwrap();
        let lines: Vec<&str> = text
            .lines()
            .map(|line| {
                let rest = line.strip_prefix("# ").unwrap_or(line);
                let is_setting = rest.contains(" = ") || rest.starts_with('[');
                if is_setting { rest } else { line }
            })
            .collect();
        let all = lines.join("\n");
        assert_ne!(all, text.trim_end());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("all.toml");
        std::fs::write(&path, all).unwrap();
        let output = command(program)
            .arg("--config")
            .arg(path)
            .args(["--state-dir", "/x", "--check-config"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
    }
}

/// Where systemd is installed, it reads the units itself.
#[test]
fn systemd_understands_the_units() {
    let has = Command::new("systemd-analyze").arg("--version").output();
    if !has.is_ok_and(|output| output.status.success()) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for name in ["kolo-head", "kolo-node"] {
        // The programs are not where the units expect them.
        let text = unit(name).replace(&format!("/usr/bin/{name}"), "/bin/true");
        let path = dir.path().join(format!("{name}.service"));
        std::fs::write(&path, text).unwrap();
        let output = Command::new("systemd-analyze")
            .args(["verify", "--man=no"])
            .arg(&path)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        let about: Vec<_> = text.lines().filter(|line| line.contains(name)).collect();
        assert!(about.is_empty(), "{text}");
    }
}
