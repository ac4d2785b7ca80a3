//! Tiny runs of `kolo-bench` with real ranks, without peers.

#![allow(clippy::unwrap_used)]

use std::process::{Command, Output};

use serde_json::Value;

/// The program with these arguments, for a short time.
fn command(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kolo-bench"));
    command.args(line.split(' '));
    command.args(["--rounds", "2", "--seconds", "0.01"]);
    command
}

fn bench(line: &str) -> Output {
    command(line).output().unwrap()
}

fn lines(output: &Output) -> Vec<Value> {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn figures(operation: &str, options: &str) -> Vec<(String, String, f64)> {
    let output = bench(&format!("{operation} {options} --peers none --format json"));
    lines(&output)
        .iter()
        .map(|line| {
            assert_eq!(line["bench"], operation);
            assert!(line["peer"].is_null() && line["ratio"].is_null(), "{line}");
            let text = |key: &str| line[key].as_str().unwrap().to_owned();
            (
                text("case"),
                text("metric"),
                line["value"].as_f64().unwrap(),
            )
        })
        .collect()
}

#[test]
fn two_ranks_are_measured_and_their_results_are_right() {
    for operation in [
        "all-reduce",
        "all-gather",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "reduce-scatter",
        "all-to-all",
        "send-receive",
    ] {
        let figures = figures(operation, "--sizes 4,300KiB");
        let kinds: Vec<_> = figures
            .iter()
            .map(|(case, metric, _)| (case.as_str(), metric.as_str()))
            .collect();
        let metrics = ["p50", "p99", "algbw"];
        let expected: Vec<_> = ["4", "307200"]
            .iter()
            .flat_map(|case| metrics.map(|metric| (*case, metric)))
            .collect();
        assert_eq!(kinds, expected, "{operation}");
        assert!(
            figures.iter().all(|(_, _, value)| *value > 0.0),
            "{figures:?}"
        );
    }
    let barrier = figures("barrier", "--ranks 3");
    assert_eq!(barrier.len(), 2, "{barrier:?}");
    for lane in ["quic", "tls"] {
        let figures = figures("all-reduce", &format!("--sizes 64K --lane {lane}"));
        assert_eq!(figures.len(), 3, "{lane}");
    }
    let shared = figures("all-reduce", "--sizes 64K --shared");
    assert_eq!(shared.len(), 3);
}

/// Where it can't be found. (Gloo's program may be there from before.)
#[test]
fn a_peer_that_is_not_installed_is_said_to_be_missing() {
    let output = command("all-reduce --sizes 4 --peers openmpi")
        .env("PATH", "")
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert!(errors.contains("openmpi is missing: "), "{errors}");
}

#[test]
fn a_table_says_what_was_measured() {
    let output = bench("all-reduce --ranks 3 --sizes 1KiB --peers none");
    let text = String::from_utf8_lossy(&output.stdout);
    for part in [
        "all-reduce of f32, sum: 3 ranks on one host, lane auto, own buffers, 2 rounds",
        "algbw",
        "load",
        "1 KiB      kolo",
    ] {
        assert!(text.contains(part), "`{part}` is not in:\n{text}");
    }
}

/// A peer that is there is measured in the same run, one that is not is said to be missing.
#[test]
fn peers_are_measured_or_missing() {
    for operation in ["all-reduce", "reduce", "gather", "scatter", "send-receive"] {
        peers_of(operation);
    }
}

fn peers_of(operation: &str) {
    let output = bench(&format!(
        "{operation} --sizes 64K --peers openmpi,gloo --format json"
    ));
    let lines = lines(&output);
    let errors = String::from_utf8_lossy(&output.stderr);
    for peer in ["openmpi", "gloo"] {
        let of_peer: Vec<&Value> = lines.iter().filter(|line| line["peer"] == peer).collect();
        if errors.contains(&format!("{peer} is missing: ")) {
            assert!(of_peer.is_empty(), "{of_peer:?}");
            continue;
        }
        let metrics: Vec<&str> = of_peer
            .iter()
            .filter_map(|line| line["metric"].as_str())
            .collect();
        let expected = ["p50", "p99", "algbw"];
        assert_eq!(metrics, expected, "{operation}: {errors}");
        for line in of_peer {
            let of = |key: &str| line[key].as_f64().unwrap();
            assert!(
                (of("value") / of("peer_value") - of("ratio")).abs() < 1e-9,
                "{line}"
            );
        }
    }
}

#[test]
fn commits_are_measured_beside_an_all_reduce_and_a_copy() {
    let lines = lines(&bench("commit --workers 2 --bytes 100KiB --format json"));
    let text = |line: &Value, key: &str| line[key].as_str().unwrap_or("-").to_owned();
    let rows: Vec<_> = (lines.iter())
        .map(|line| {
            assert_eq!(
                (text(line, "bench"), text(line, "unit")),
                ("commit".to_owned(), "us".to_owned())
            );
            assert!(line["value"].is_f64(), "{line}");
            (text(line, "case"), text(line, "peer"))
        })
        .collect();
    let rows: Vec<_> = (rows.iter())
        .map(|(case, peer)| (case.as_str(), peer.as_str()))
        .collect();
    let expected = [
        ("all-reduce of 4 B, 2 workers", "-"),
        ("empty state, 2 workers", "all-reduce of 4 B"),
        ("100 KiB, 2 workers", "copy"),
        ("100 KiB, 2 workers", "copy and all-reduce"),
    ];
    assert_eq!(rows, expected);
}

/// Two hosts need rights that not every machine gives: then that is what it says, completely.
#[test]
fn two_hosts_work_or_say_what_they_need() {
    let output = bench("all-reduce --hosts 2 --mtu 9000 --sizes 64K --peers none");
    let errors = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        assert!(String::from_utf8_lossy(&output.stdout).contains("MTU 9000"));
    } else {
        assert!(
            errors.contains("--hosts 2") && errors.contains("needs"),
            "{errors}"
        );
    }
}

/// As `kolo-bench … | head` does.
#[test]
fn a_reader_that_goes_ends_it_quietly() {
    for format in ["table", "json"] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let line = format!("all-reduce --sizes 4 --peers none --format {format}");
        let output = command(&line).stdout(writer).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {errors}", output.status);
        let other = errors.lines().find(|line| !line.contains("debug build"));
        assert_eq!(other, None);
    }
}
