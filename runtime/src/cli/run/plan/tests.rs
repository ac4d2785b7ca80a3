//! From command lines to plans.

use clap::{CommandFactory, Parser};

use kolo_transport::wire::Placement;

use super::super::super::command::{Args, Command};
use super::super::synonyms::translate;
use super::*;

/// A line as the options read it.
pub(in super::super) fn parsed(line: &str) -> Result<Args, clap::Error> {
    let words = format!("kolo run {line}");
    let words = words.split(' ').map(Into::into).collect();
    Args::try_parse_from(translate(words, &Args::command()).unwrap())
}

pub(in super::super) fn options(line: &str) -> Run {
    match parsed(line).unwrap().command {
        Command::Run(options) => *options,
        other => panic!("{other:?}"),
    }
}

pub(in super::super) use super::plan as plan_of;

pub(in super::super) fn here() -> Surroundings {
    let vars = [
        ("PATH", "/bin"),
        ("NCCL_DEBUG", "INFO"),
        ("KOLO_HEAD", "h:1"),
        ("HOME", "/h"),
    ];
    Surroundings {
        vars: vars
            .iter()
            .map(|(name, value)| (name.into(), value.into()))
            .collect(),
        cwd: "/srv/data".into(),
        hostname: "me".to_owned(),
        has_head: false,
    }
}

pub(in super::super) fn planned(line: &str) -> Plan {
    plan(&options(line), &here()).unwrap()
}

pub(in super::super) fn refused(line: &str) -> String {
    let error = plan(&options(line), &here()).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    error.to_string()
}

pub(in super::super) fn on_cluster(line: &str) -> Result<Plan, CliError> {
    let here = Surroundings {
        has_head: true,
        ..here()
    };
    plan(&options(line), &here)
}

#[test]
fn the_defaults_are_one_worker_here() {
    let plan = planned("./train --epochs 3 -n 9");
    assert_eq!((plan.target, plan.workers), (Target::Local, 1));
    assert_eq!(plan.spec.args, ["--epochs", "3", "-n", "9"]);
    assert_eq!(plan.spec.name, "train");
    let installed = plan.spec.installed.unwrap();
    assert_eq!(
        (installed.program.as_str(), installed.cwd.as_deref()),
        ("./train", Some("/srv/data"))
    );
    assert!(installed.stream_output && installed.stdin && installed.search.is_none());
    assert!(plan.spec.env.is_empty() && plan.spec.rendezvous);
    assert_eq!(
        (plan.spec.grace_ms, plan.spec.start_timeout_ms),
        (5000, 30_000)
    );
}

#[test]
fn numbers_of_workers_in_all_dialects() {
    for (line, workers) in [
        ("-n 4 x", 4),
        ("--np 4 x", 4),
        ("--nproc-per-node 3 x", 3),
        ("--nproc_per_node=3 --nnodes 1 x", 3),
        ("--nnodes 1:1 --nproc-per-node 2 x", 2),
        ("-H a:2,b:3 x", 5),
        ("-H a:2,b:3 -n 4 x", 4),
        ("-H a:4,b:4 --nproc-per-node 2 x", 4),
        ("-H a:4,b:4,c:4 --nnodes 2 --nproc-per-node 2 x", 4),
    ] {
        assert_eq!(planned(line).workers, workers, "{line}");
    }
    for (line, message) in [
        (
            "--nproc-per-node auto x",
            "invalid value 'auto' for '--nproc-per-node'",
        ),
        ("--nnodes 2 x", "this machine is one host"),
        ("-n 3 --nproc-per-node 2 x", "make 2 workers"),
        ("-H a:2 -n 3 x", "the hosts have 2 slots"),
        ("-H a:2 --nnodes 2 x", "the hosts with slots are only 1;"),
        ("-H a:2,a:1 x", "are one machine"),
        (
            "-n 2 --ranks 1,5 x",
            "has rank 5; the job has the ranks 0 to 1",
        ),
        ("-e X x", "expected NAME=VALUE"),
        ("-e KOLO_RANK=1 x", "KOLO_"),
        ("-n 2", "no program is given"),
        ("--gpus-per-worker 4000000 x", "at most 1000000"),
    ] {
        let error = refused(line);
        assert!(error.contains(message), "{line}: {error}");
    }
}

#[test]
fn on_a_cluster_hosts_are_spread_if_they_are_asked_for() {
    let placement = |line: &str| on_cluster(line).unwrap().spec.placement;
    assert_eq!(placement("-n 4 x"), Placement::Pack { workers: 4 });
    let spread = |hosts, slots| Placement::Spread { hosts, slots };
    assert_eq!(placement("--nnodes 2 --nproc-per-node 4 x"), spread(2, 4));
    assert_eq!(placement("--nnodes 2 -n 6 x"), spread(2, 3));
    assert_eq!(placement("--nproc-per-node 2 -n 6 x"), spread(3, 2));
    assert_eq!(placement("--nproc-per-node 2 x"), spread(1, 2));
    assert!(on_cluster("--nnodes 2 -n 5 x").is_err());
    assert_eq!(on_cluster("--local -n 2 x").unwrap().target, Target::Local);
}

#[test]
fn hosts_are_nodes_of_the_cluster_where_there_is_one() {
    let plan = on_cluster("-H b:2,a:1 x").unwrap();
    let Target::Nodes(hosts) = &plan.target else {
        panic!("{plan:?}");
    };
    assert_eq!((hosts[0].host.as_str(), hosts[0].slots), ("b", 2));
    assert_eq!(plan.workers, 3);
    assert_eq!(plan.spec.placement, Placement::Pack { workers: 3 });
    let cpus = on_cluster("-H a:2 --cpus-per-worker 4 x").unwrap();
    assert_eq!(cpus.spec.per_worker.cpus, Milli::units(4));
    assert!(on_cluster("-H a:2 -n 3 x").is_err());
    assert!(matches!(planned("-H a:2 x").target, Target::Hosts(_)));
}

#[test]
fn a_number_of_threads_that_nobody_gave_is_told() {
    assert!(planned("-n 2 python3 x").limits_threads);
    assert!(planned("-n 2 env A=1 train.py").limits_threads);
    assert!(!planned("-n 2 x").limits_threads, "no Python");
    assert!(!planned("-n 2 -e OMP_NUM_THREADS=4 python3 x").limits_threads);
    let mut here = here();
    here.vars.push(("OMP_NUM_THREADS".into(), "4".into()));
    let limits = |line: &str| plan(&options(line), &here).unwrap().limits_threads;
    assert!(!limits("-n 2 python3 x"));
    assert!(limits("-H a:2 python3 x"), "other hosts have their own");
    assert!(!limits("-H a:2 --pass-env OMP_* python3 x"));
}

#[test]
fn files_are_in_a_folder_of_the_job_or_where_horovodrun_has_them() {
    let output = |line: &str| planned(line).output;
    let dir = || "/srv/data/out".into();
    assert_eq!(output("--output-dir out x"), Some(Destination::Jobs(dir())));
    assert_eq!(
        output("--output-filename out x"),
        Some(Destination::Ranks(dir()))
    );
    assert_eq!(output("x"), None);
}

#[test]
fn hosts_are_filled_in_order_or_evenly() {
    let given = |line: &str| plan(&options(line), &here()).map(|plan| plan.shares);
    assert_eq!(given("-H a:2,b:3 -n 4 x").unwrap(), [(0, 2), (1, 2)]);
    assert_eq!(given("-H a:2,b:3 -n 2 x").unwrap(), [(0, 2)]);
    for line in ["x", "--nproc-per-node 2 x", "--nnodes 1 -n 2 x"] {
        let line = format!("-H a:0,b:2 {line}");
        assert_eq!(given(&line).unwrap(), [(1, 2)], "{line}");
    }
    assert_eq!(
        given("-H a:4,b:4,c:4 --nproc-per-node 1 x").unwrap(),
        [(0, 1), (1, 1), (2, 1)]
    );
    assert_eq!(
        given("-H a:4,b:4,c:4 --nnodes 2 -n 6 x").unwrap(),
        [(0, 3), (1, 3)]
    );
    let error = given("-H a:1,b:8 --nproc-per-node 2 x")
        .unwrap_err()
        .to_string();
    assert!(error.contains("on a, which has 1 slot;"), "{error}");
}

#[test]
fn variables_are_given_and_passed_and_never_kolo_s_own() {
    let plan = planned("--pass-env * -e HOME=/x -e A=b=c x");
    let env: Vec<_> = plan
        .spec
        .env
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    assert_eq!(env, ["A=b=c", "HOME=/x", "NCCL_DEBUG=INFO", "PATH=/bin"]);
    assert_eq!(plan.spec.installed.unwrap().search.as_deref(), Some("/bin"));
    let plan = planned("--pass-env NCCL_* x");
    assert_eq!(plan.spec.env.len(), 1);
    assert_eq!(
        planned("--cwd sub x")
            .spec
            .installed
            .unwrap()
            .cwd
            .as_deref(),
        Some("/srv/data/sub")
    );
}

#[test]
fn a_pattern_never_overrides_what_kolo_sets_and_a_value_does_with_a_warning() {
    let mut here = here();
    for name in [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "HOROVOD_SIZE",
        "CUDA_VISIBLE_DEVICES",
        "NCCL_SOCKET_IFNAME",
        "SLURM_PROCID",
        "PMIX_RANK",
        "NOTIFY_SOCKET",
        "SLURM_JOB_ID",
    ] {
        here.vars.push((name.into(), "5".into()));
    }
    for head in [true, false] {
        here.has_head = head;
        let planned = |line: &str| {
            let plan = plan(&options(line), &here).unwrap();
            let names: Vec<String> = plan.spec.env.into_keys().collect();
            (names.join(" "), plan.notes)
        };
        for pattern in ["*", "**", "?*", "[A-Z]*"] {
            let (names, notes) = planned(&format!("--pass-env {pattern} x"));
            let expected = if pattern.starts_with('[') {
                ""
            } else {
                "HOME NCCL_DEBUG PATH SLURM_JOB_ID"
            };
            assert_eq!((names.as_str(), notes.len()), (expected, 0), "{pattern}");
        }
        for pattern in [
            "RAN?", "*_SIZE", "MASTER_*", "CUDA_*", "SLURM_P*", "PMIX*", "NOTIFY*",
        ] {
            let (names, notes) = planned(&format!("--pass-env {pattern} x"));
            assert_eq!((names.as_str(), notes.len()), ("", 0), "{pattern}");
        }
        assert_eq!(planned("--pass-env NCCL_* x").0, "NCCL_DEBUG");
        // A name is written on purpose, but many workers can't have one rank.
        for name in ["RANK", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "KOLO_HEAD"] {
            let (names, notes) = planned(&format!("--pass-env {name} x"));
            assert_eq!((names.as_str(), notes.len()), ("", 1), "{name}");
            let start = format!("--pass-env: {name} is not passed, since ");
            assert!(notes[0].starts_with(&start), "{notes:?}");
        }
        for name in ["NCCL_SOCKET_IFNAME", "SLURM_PROCID"] {
            let (names, notes) = planned(&format!("--pass-env {name} x"));
            assert_eq!((names.as_str(), notes.len()), (name, 0));
        }
        for (line, note) in [
            ("-e RANK=7 x", Some("all workers have RANK=7 in place of")),
            (
                "--pass-env * -e MASTER_PORT=1 x",
                Some("all workers have MASTER_PORT=1 in place of"),
            ),
            ("-e CUDA_VISIBLE_DEVICES=1 x", None),
            ("-e NCCL_SOCKET_IFNAME=eth0 x", None),
            ("-e HOROVOD_CONTROLLER=mpi x", None),
            ("-e SLURM_PROCID=1 x", None),
        ] {
            let (names, notes) = planned(line);
            let name = line.split(['=', ' ']).rev().nth(2).unwrap();
            assert!(names.contains(name), "{line}: {names}");
            match note {
                Some(note) => assert!(notes[0].contains(note), "{line}: {notes:?}"),
                None => assert!(notes.is_empty(), "{line}: {notes:?}"),
            }
        }
    }
}

#[test]
fn what_can_not_be_passed_is_told() {
    use std::os::unix::ffi::OsStringExt as _;
    assert!(
        planned("--pass-env NCCL_* --pass-env NOTHING_* x")
            .notes
            .is_empty()
    );
    let notes = planned("--pass-env NCCL_DEUBG x").notes;
    assert_eq!(
        notes,
        ["--pass-env: there is no variable `NCCL_DEUBG` here"]
    );
    let mut here = here();
    let bad = OsString::from_vec(vec![0xff]);
    here.vars.push(("BAD".into(), bad));
    let notes = |line: &str| plan(&options(line), &here).unwrap().notes;
    assert_eq!(
        notes("-H a:1 --pass-env B* x"),
        ["--pass-env: BAD is not passed, since its value is not UTF-8"]
    );
    assert!(notes("--pass-env B* x").is_empty());
}
