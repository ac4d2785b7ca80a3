//! `kolo plan`, and what needs no cluster.

use serde_json::{Value, json};

use crate::kolo::kolo;

#[test]
fn hosts_are_filled_in_order() {
    assert_eq!(
        kolo(&["plan", "--hosts", "a:2,b:1,c:3"]).good(),
        "\
RANK  HOST  LOCAL_RANK  LOCAL_SIZE  CROSS_RANK  CROSS_SIZE
0     a     0           2           0           3
1     a     1           2           0           2
2     b     0           1           1           3
3     c     0           3           2           3
4     c     1           3           1           2
5     c     2           3           0           1
"
    );
}

#[test]
fn a_maximum_cuts_a_host_and_its_local_size() {
    assert_eq!(
        kolo(&["plan", "--hosts", "a:2,b:1,c:3", "--min", "2", "--max", "4"]).good(),
        "\
RANK  HOST  LOCAL_RANK  LOCAL_SIZE  CROSS_RANK  CROSS_SIZE
0     a     0           2           0           3
1     a     1           2           0           1
2     b     0           1           1           3
3     c     0           1           2           3
"
    );
}

fn row(host: &str, numbers: [u32; 6]) -> Value {
    let [rank, size, local_rank, local_size, cross_rank, cross_size] = numbers;
    json!({
        "host": host, "rank": rank, "size": size, "local_rank": local_rank,
        "local_size": local_size, "cross_rank": cross_rank, "cross_size": cross_size,
    })
}

#[test]
fn json_is_an_array_in_rank_order() {
    let found = kolo(&["plan", "--registration", "a,b,a,c", "--format", "json"]).json();
    let expected = json!([
        row("a", [0, 4, 0, 2, 0, 3]),
        row("b", [1, 4, 0, 1, 1, 3]),
        row("a", [2, 4, 1, 2, 0, 1]),
        row("c", [3, 4, 0, 1, 2, 3]),
    ]);
    assert_eq!(found, expected);
    // The format may also come first.
    let first = kolo(&["--format", "json", "plan", "--registration", "a,b,a,c"]).json();
    assert_eq!(first, expected);
}

#[test]
fn spellings_of_one_machine_are_one_host() {
    for (given, hosts) in [
        ("a,A", ["a", "a"]),
        ("a.example,A.Example.", ["a.example", "a.example"]),
        ("[fd00::2],[FD00:0::2]", ["fd00::2", "fd00::2"]),
        ("10.0.0.1,10.1", ["10.0.0.1", "10.0.0.1"]),
        ("localhost,127.0.0.1", ["localhost", "localhost"]),
    ] {
        let found = kolo(&["plan", "--registration", given, "--format", "json"]).json();
        let expected = json!([
            row(hosts[0], [0, 2, 0, 2, 0, 1]),
            row(hosts[1], [1, 2, 1, 2, 0, 1]),
        ]);
        assert_eq!(found, expected, "{given}");
    }
    let own = rustix::system::uname();
    let own = own.nodename().to_str().unwrap();
    let both = format!("{own},localhost");
    let table = kolo(&["plan", "--registration", &both, "--format", "json"]).json();
    assert_eq!(table[1]["local_rank"], 1, "{table}");
    // As --hosts, kolo run and its --dry-run have it.
    let slots = format!("{own}:1,localhost:1");
    for args in [
        &["plan", "--hosts", &slots][..],
        &["run", "-H", &slots, "--dry-run", "true"],
        &["run", "-H", &slots, "true"],
        &["up", "-H", &slots],
    ] {
        let line = kolo(args).bad(2);
        assert!(line.contains("in entry 2 are one machine"), "{line}");
    }
}

#[test]
fn a_host_without_slots_is_not_used() {
    let expected = json!([row("b", [0, 2, 0, 2, 0, 1]), row("b", [1, 2, 1, 2, 0, 1])]);
    let planned = kolo(&["plan", "--hosts", "a:0,b:2", "--format", "json"]).json();
    assert_eq!(planned, expected);
    let line = kolo(&["run", "-H", "a:0,b:2", "--nnodes", "2", "true"]).bad(2);
    assert!(line.contains("the hosts with slots are only 1;"), "{line}");
}

#[test]
fn what_can_not_be_placed_ends_with_2_and_names_requested_and_available() {
    let line = kolo(&["plan", "--hosts", "a:2,b:1", "--min", "4"]).bad(2);
    assert_eq!(
        line,
        "requested at least 4 workers, available: 3 slots on 2 hosts"
    );
    for (args, part) in [
        (&["--hosts", "a:2", "--max", "0"][..], "requested 0 workers"),
        (&["--hosts", "a:0,b:0"], "no host in it has a slot"),
        (
            &["--hosts", "a:2", "--min", "2", "--max", "1"],
            "at least 2 and at most 1",
        ),
        (
            &["--hosts", "localhost:2,b:1,127.1:2"],
            "`localhost` in entry 1 and `127.1` in entry 3 are one machine",
        ),
        (&["--hosts", "a:65536,b:65536"], "at most"),
        (&["--registration", "a,,b"], "is empty"),
        (&["--registration", "a b"], "neither a name nor an address"),
    ] {
        let args: Vec<&str> = ["plan"].iter().chain(args).copied().collect();
        let line = kolo(&args).bad(2);
        assert!(line.contains(part), "{args:?}: {line}");
    }
}

#[test]
fn a_wrong_command_line_ends_with_2() {
    for args in [
        &["plan"][..],
        &["plan", "--hosts", "a:1", "--registration", "a"],
        &["plan", "--registration", "a", "--min", "1"],
        &["plan", "--hosts", "a:1", "--min", "-1"],
        &["plan", "--hosts", "a:1", "--max", "nan"],
        &["plan", "--hosts", "a:1", "--max", "4294967296"],
        &["plan", "--hosts", "a:1", "--format", "xml"],
        &["frobnicate"],
        &["logs"],
        &["logs", "job-1", "--rank", "x"],
        &["stop"],
        &["stop", "job-1", "--timeout", "nan"],
        &["login"],
        &["status", "--connect-timeout", "0"],
        &[],
    ] {
        let ran = kolo(args);
        assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{args:?}: {ran:?}");
        assert!(!ran.err.is_empty(), "{args:?}");
    }
    for (args, parts) in [
        (
            &["run", "-n", "abc", "true"][..],
            ["'abc'", "expected a whole number from 1 to 16384"],
        ),
        (&["rnu", "-n", "2", "true"], ["'rnu'", "'run'"]),
        (&["job"], ["'job'", "'jobs'"]),
        (&["top"], ["'top'", "kolo jobs --watch"]),
        (
            &["stop", "job-1", "--timeout", "x"],
            ["'x'", "such as 250ms, 5s"],
        ),
    ] {
        let err = kolo(args).err;
        assert!(err.starts_with("kolo: "), "{err}");
        assert!(parts.iter().all(|part| err.contains(part)), "{err}");
    }
}

#[test]
fn shells_and_man_learn_the_command_line() {
    let script = kolo(&["completions", "bash"]).good();
    assert!(script.contains("complete ") && script.contains("--nproc-per-node"));
    let dir = tempfile::tempdir().unwrap();
    let text = kolo(&["man", dir.path().to_str().unwrap()]).good();
    assert!(text.contains("man -M "), "{text}");
    for page in ["man1/kolo-logs.1", "man8/kolo-head.8", "man8/kolo-node.8"] {
        assert!(dir.path().join(page).exists(), "{page}: {text}");
    }
}

#[test]
fn the_help_says_what_the_exit_codes_mean() {
    let help = kolo(&["--help"]).good();
    assert!(
        help.starts_with("Run any program on many machines"),
        "{help}"
    );
    for part in ["Exit codes:", "KOLO_HEAD", "Examples:"] {
        assert!(help.contains(part), "{help}");
    }
    assert!(kolo(&["--version"]).good().starts_with("kolo 0."));
}
