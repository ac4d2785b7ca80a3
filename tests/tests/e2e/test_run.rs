//! What Horovod's `test/single/test_run.py` asserts, as far as it is about a launcher: each test has the name of its row.
//!
//! Rows about assignments of hosts are in `runtime/tests/cli/plan.rs`, about variables in `runtime/tests/cli/environment.rs`, about a
//! launcher that is killed in `runtime/tests/daemons/ends.rs`. Not here, for kolo has nothing of the kind: knobs of Horovod's core as arguments, the choice between MPI, jsrun and Gloo
//! with their command lines, the hash of a command's parameters, threads in place of tasks.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::io::Read;
use std::process::{Output, Stdio};

use kolo_harness::kolo;

use crate::run::{output, script, sorted, text};

/// `kolo run OPTIONS -- sh -c SCRIPT` on this machine.
fn run(options: &[&str], script_text: &str) -> Output {
    output(script(kolo(), options, script_text))
}

/// Also `test_config_file_override_args`.
#[test]
fn test_config_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.toml");
    let content = "num-proc = 2\nprefix = 'none'\ngrace = 1.5\n[env]\nA = 'file'\n";
    std::fs::write(&file, content).unwrap();
    let file = file.to_str().unwrap();
    let line = ["-n", "1", "-e", "A=line"];
    // The command line wins, in front of the file and behind it.
    for (before, after, expected) in [
        (&[][..], &[][..], "file 2\nfile 2\n"),
        (&line, &[], "line 1\n"),
        (&[], &line, "line 1\n"),
    ] {
        let options = [before, &["--config-file", file], after].concat();
        let out = run(&options, "echo $A $WORLD_SIZE");
        assert_eq!(text(&out.stdout), expected, "{out:?}");
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

/// `test_prefix_connection` of all kinds, and `test_safe_shell_exec_captures` of both streams.
#[test]
fn test_prefix_connection() {
    let bare = &["--prefix", "none"][..];
    for (options, program, stdout, stderr) in [
        (
            &[][..],
            "printf 'abc\\ndef\\n'",
            &b"[0]<stdout>:abc\n[0]<stdout>:def\n"[..],
            "",
        ),
        (
            &[],
            "echo 'f\u{fc}r \u{1f600}'",
            "[0]<stdout>:f\u{fc}r \u{1f600}\n".as_bytes(),
            "",
        ),
        (&[], "printf 'a\\nb'", b"[0]<stdout>:a\n[0]<stdout>:b", ""),
        (
            &[],
            "printf '10%%\\r20%%\\r\\nend\\n'",
            b"[0]<stdout>:10%\r[0]<stdout>:20%\r\n[0]<stdout>:end\n",
            "",
        ),
        (bare, "printf 'a\\r\\nb\\377'", b"a\r\nb\xff", ""),
        (bare, "printf hello; printf error >&2", b"hello", "error"),
    ] {
        let out = run(options, program);
        assert_eq!(out.stdout, stdout, "{program}: {out:?}");
        assert_eq!(text(&out.stderr), stderr, "{program}: {out:?}");
    }
    let line = text(&run(&["--timestamps"], "echo a").stdout);
    let (time, rest) = line.split_once(' ').unwrap();
    assert_eq!(rest, "[0]<stdout>:a\n");
    assert!(
        time.len() == 24 && time.starts_with("20") && time.ends_with('Z'),
        "{line}"
    );
}

#[test]
fn test_prefix_connection_multibyte_over_chunk_edges() {
    // 3 bytes each, so that no block of the way ends between two of them.
    let line = "\u{20ac}".repeat(50_000);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("text");
    std::fs::write(&file, format!("x{line}\n")).unwrap();
    let out = run(&["-n", "2"], &format!("cat {}", file.display()));
    let expected = [0, 1].map(|rank| format!("[{rank}]<stdout>:x{line}"));
    assert!(sorted(&out.stdout) == expected);
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
fn test_safe_shell_exec_returns_exit_code() {
    assert_eq!(run(&[], "exit 99").status.code(), Some(99));
    assert_eq!(run(&[], "kill -TERM $$").status.code(), Some(128 + 15));
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
fn test_horovodrun_hostfile() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("hosts");
    std::fs::write(&file, "# mine\nhost1 slots=0\n\nlocalhost slots=2\n").unwrap();
    let file = file.to_str().unwrap();
    let mut command = kolo();
    command.args([
        "--format",
        "json",
        "run",
        "--hostfile",
        file,
        "--dry-run",
        "true",
    ]);
    let plan: serde_json::Value = serde_json::from_slice(&output(command).stdout).unwrap();
    let of = |worker: &serde_json::Value| (worker["rank"].clone(), worker["local_size"].clone());
    let workers: Vec<_> = plan["workers"].as_array().unwrap().iter().map(of).collect();
    assert_eq!(workers, [(0.into(), 2.into()), (1.into(), 2.into())]);
}
