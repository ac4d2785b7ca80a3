//! What Horovod's `test/single/test_run.py` asserts, as far as it is about a launcher: each test has the name of its row.
//!
//! Not here, for kolo has nothing of the kind: knobs of Horovod's core as arguments, the choice between MPI, jsrun and Gloo
//! with their command lines, the hash of a command's parameters, threads in place of tasks.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::io::Read;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use kolo_harness::kolo;

use crate::run::{output, script, text};
use crate::support::gone;

/// `kolo run OPTIONS -- sh -c SCRIPT` on this machine.
fn run(options: &[&str], script_text: &str) -> Output {
    output(script(kolo(), options, script_text))
}

/// The workers that a command tells of as JSON.
fn planned(args: &[&str]) -> Vec<Vec<String>> {
    let mut command = kolo();
    command.args(["--format", "json"]).args(args);
    let out = output(command);
    assert!(out.status.success(), "{out:?}");
    let plan: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let workers = plan.get("workers").unwrap_or(&plan).as_array().unwrap();
    let fields = [
        "host",
        "rank",
        "local_rank",
        "local_size",
        "cross_rank",
        "cross_size",
    ];
    workers
        .iter()
        .map(|worker| {
            fields
                .iter()
                .map(|field| worker[field].to_string().trim_matches('"').to_owned())
                .collect()
        })
        .collect()
}

#[test]
fn test_config_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.toml");
    std::fs::write(
        &file,
        "num-proc = 2\nprefix = 'none'\ngrace = 1.5\n[env]\nA = 'file'\n",
    )
    .unwrap();
    let out = run(
        &["--config-file", file.to_str().unwrap()],
        "echo $A $WORLD_SIZE",
    );
    assert_eq!(text(&out.stdout), "file 2\nfile 2\n", "{out:?}");
}

#[test]
fn test_config_file_override_args() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.toml");
    std::fs::write(&file, "num-proc = 9\nprefix = 'none'\n[env]\nA = 'file'\n").unwrap();
    let file = file.to_str().unwrap();
    // The command line wins, in front of the file and behind it.
    for options in [
        ["-n", "1", "--config-file", file],
        ["--config-file", file, "-n", "1"],
    ] {
        let mut options = options.to_vec();
        options.extend(["-e", "A=line"]);
        let out = run(&options, "echo $A $WORLD_SIZE");
        assert_eq!(text(&out.stdout), "line 1\n", "{out:?}");
    }
}

#[test]
fn test_validate_config_args() {
    for options in [
        ["--grace", "-1"],
        ["--start-timeout", "-1"],
        ["--num-proc", "-1"],
        ["--cpus-per-worker", "-1"],
    ] {
        let out = run(&options, "true");
        assert_eq!(out.status.code(), Some(2), "{options:?}: {out:?}");
    }
}

#[test]
fn test_override_env() {
    let out = run(
        &[
            "-n",
            "1",
            "--prefix",
            "none",
            "-e",
            "HOROVOD_CONTROLLER=own",
        ],
        "echo $HOROVOD_CONTROLLER",
    );
    assert_eq!(text(&out.stdout), "own\n");
}

#[test]
fn test_prefix_connection() {
    let out = run(&["-n", "1"], "printf 'abc\\ndef\\n'");
    assert_eq!(text(&out.stdout), "[0]<stdout>:abc\n[0]<stdout>:def\n");
}

#[test]
fn test_prefix_connection_unicode() {
    let out = run(&["-n", "1"], "printf 'f\u{fc}r \u{1f600}\\n'");
    assert_eq!(text(&out.stdout), "[0]<stdout>:f\u{fc}r \u{1f600}\n");
}

#[test]
fn test_prefix_connection_multibyte_over_chunk_edges() {
    // 3 bytes each, so that no block of the way ends between two of them.
    let line = "\u{20ac}".repeat(50_000);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("text");
    std::fs::write(&file, format!("x{line}\n")).unwrap();
    let out = run(&["-n", "2"], &format!("cat {}", file.display()));
    let mut lines: Vec<_> = text(&out.stdout).lines().map(str::to_owned).collect();
    lines.sort();
    assert!(
        lines
            == [
                format!("[0]<stdout>:x{line}"),
                format!("[1]<stdout>:x{line}")
            ]
    );
}

#[test]
fn test_prefix_connection_with_timestamp() {
    let out = run(&["-n", "1", "--timestamps"], "echo a");
    let line = text(&out.stdout);
    let (time, rest) = line.split_once(' ').unwrap();
    assert_eq!(rest, "[0]<stdout>:a\n");
    assert!(
        time.len() == 24 && time.starts_with("20") && time.ends_with('Z'),
        "{line}"
    );
}

#[test]
fn test_prefix_connection_no_trailing_newline() {
    let out = run(&["-n", "1"], "printf 'a\\nb'");
    assert_eq!(text(&out.stdout), "[0]<stdout>:a\n[0]<stdout>:b");
}

#[test]
fn test_prefix_connection_carriage_return() {
    let out = run(&["-n", "1"], "printf '10%%\\r20%%\\r\\nend\\n'");
    assert_eq!(
        text(&out.stdout),
        "[0]<stdout>:10%\r[0]<stdout>:20%\r\n[0]<stdout>:end\n"
    );
}

#[test]
fn test_prefix_connection_without_prefix() {
    let out = run(&["-n", "1", "--prefix", "none"], "printf 'a\\r\\nb\\377'");
    assert_eq!(out.stdout, b"a\r\nb\xff");
}

#[test]
fn test_prefix_connection_streams_as_it_goes() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("seen");
    let waits = format!(
        "echo first; while [ ! -e {} ]; do sleep 0.02; done; echo second",
        file.display()
    );
    let mut child = script(kolo(), &["-n", "1"], &waits)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut first = [0; 18];
    stdout.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"[0]<stdout>:first\n");
    std::fs::write(file, "").unwrap();
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "[0]<stdout>:second\n");
    child.wait().unwrap();
}

#[test]
fn test_safe_shell_exec_captures_stdout() {
    let out = run(&["--prefix", "none"], "echo hello");
    assert_eq!(
        (text(&out.stdout).as_str(), out.stderr.len()),
        ("hello\n", 0)
    );
}

#[test]
fn test_safe_shell_exec_captures_stderr() {
    let out = run(&["--prefix", "none"], "echo hello >&2");
    assert_eq!(
        (text(&out.stderr).as_str(), out.stdout.len()),
        ("hello\n", 0)
    );
}

#[test]
fn test_safe_shell_exec_captures_last_line_wo_eol() {
    let out = run(&["--prefix", "none"], "printf hello; printf error >&2");
    assert_eq!(
        (text(&out.stdout).as_str(), text(&out.stderr).as_str()),
        ("hello", "error")
    );
}

#[test]
fn test_safe_shell_exec_returns_exit_code() {
    assert_eq!(run(&[], "exit 99").status.code(), Some(99));
    assert_eq!(run(&[], "kill -TERM $$").status.code(), Some(128 + 15));
}

#[tokio::test]
async fn test_safe_shell_exec_interrupts_on_parent_shutdown() {
    let command = "echo $$; sleep 1000 & echo $!; trap '' TERM; wait; sleep 1000";
    let mut child = script(kolo(), &["--prefix", "none"], command)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut pids = Vec::new();
    for _ in 0..2 {
        let mut line = String::new();
        std::io::BufRead::read_line(&mut stdout, &mut line).unwrap();
        pids.push(line.trim().parse().unwrap());
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let began = Instant::now();
    for pid in pids {
        gone(pid).await;
    }
    assert!(began.elapsed() < Duration::from_secs(11));
}

#[test]
fn test_gloo_run_minimal() {
    let out = run(
        &["-n", "2"],
        "echo $HOROVOD_CONTROLLER $HOROVOD_CPU_OPERATIONS $HOROVOD_SIZE ${HOROVOD_GLOO_RENDEZVOUS_PORT:+port} \
         $HOROVOD_GLOO_IFACE $PYTHONUNBUFFERED",
    );
    for line in text(&out.stdout).lines() {
        assert_eq!(line.split_once(':').unwrap().1, "gloo gloo 2 port lo 1");
    }
    assert_eq!(text(&out.stdout).lines().count(), 2, "{out:?}");
}

#[test]
fn test_gloo_run_with_os_environ() {
    let mut command = script(kolo(), &["--prefix", "none"], "echo $SET_BEFORE");
    command.env("SET_BEFORE", "it is here");
    assert_eq!(text(&output(command).stdout), "it is here\n");
}

#[test]
fn test_horovodrun_hostfile() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("hosts");
    std::fs::write(&file, "# mine\nhost1 slots=0\n\nlocalhost slots=2\n").unwrap();
    let file = file.to_str().unwrap();
    let rows = planned(&["run", "--hostfile", file, "--dry-run", "true"]);
    let sizes: Vec<_> = rows.iter().map(|row| (&*row[1], &*row[3])).collect();
    assert_eq!(sizes, [("0", "2"), ("1", "2")]);
}

#[test]
fn test_get_host_assignments() {
    let rows = planned(&["plan", "--hosts", "a:2,b:2", "--max", "3"]);
    assert_eq!(
        rows,
        [
            ["a", "0", "0", "2", "0", "2"],
            ["a", "1", "1", "2", "0", "1"],
            ["b", "2", "0", "1", "1", "2"]
        ]
    );
}

#[test]
fn test_get_host_assignments_heterogeneous() {
    let rows = planned(&["plan", "--hosts", "a:1,b:2"]);
    assert_eq!(
        rows,
        [
            ["a", "0", "0", "1", "0", "2"],
            ["b", "1", "0", "2", "1", "2"],
            ["b", "2", "1", "2", "0", "1"]
        ]
    );
}
