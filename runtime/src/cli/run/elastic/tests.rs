use clap::Parser;

use super::super::super::command::{Args, Command};
use super::super::plan::tests::parsed;
use super::super::plan::{Plan, plan};
use super::super::target::Surroundings;
use super::*;

fn planned(line: &str, has_head: bool) -> Result<Plan, String> {
    planned_with(line, has_head, &[])
}

fn planned_with(line: &str, has_head: bool, vars: &[(&str, &str)]) -> Result<Plan, String> {
    let parsed = parsed(line).map_err(|error| error.to_string())?;
    let Command::Run(options) = parsed.command else {
        panic!("{line}");
    };
    let here = Surroundings {
        vars: vars
            .iter()
            .map(|(name, value)| (name.into(), value.into()))
            .collect(),
        cwd: "/srv".into(),
        hostname: "me".to_owned(),
        has_head,
    };
    plan(&options, &here).map_err(|error| {
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    })
}

/// The fewest and the most workers, the restarts, and the workers on each host.
fn wanted(line: &str, has_head: bool) -> (u32, u32, u32, Option<u32>) {
    let plan = planned(line, has_head).unwrap_or_else(|error| panic!("{line}: {error}"));
    let elastic = plan.spec.elastic.unwrap_or_else(|| panic!("{line}"));
    let per_host = match plan.spec.placement {
        Placement::Spread { hosts, slots } => {
            assert_eq!(hosts * slots, elastic.max);
            Some(slots)
        }
        Placement::Pack { workers } => {
            assert_eq!(workers, elastic.max);
            None
        }
    };
    assert_eq!(plan.workers, elastic.max);
    assert!(!plan.spec.installed.unwrap().stdin);
    let restarts = elastic.restarts_without_progress;
    (elastic.min, elastic.max, restarts, per_host)
}

#[test]
fn elastic_jobs_in_the_words_of_torchrun_and_horovodrun() {
    for (line, head, expected) in [
        ("-n 4 --max-restarts 2 x", false, (4, 4, 2, None)),
        (
            "--nproc-per-node 2 --max_restarts=1 x",
            false,
            (2, 2, 1, None),
        ),
        (
            "--nnodes 1:4 --nproc-per-node 2 x",
            true,
            (2, 8, 3, Some(2)),
        ),
        (
            "--nnodes 1:4 --nproc_per_node 2 --max-restarts 0 x",
            true,
            (2, 8, 0, Some(2)),
        ),
        ("--nnodes 2:3 x", true, (2, 3, 3, Some(1))),
        (
            "--nnodes 1:4 --nproc-per-node 2 --max-restarts 1 x",
            false,
            (2, 2, 1, None),
        ),
        ("-n 4 --min-np 2 --max-np 8 x", true, (2, 8, 3, None)),
        ("--min 2 --max 8 x", true, (2, 8, 3, None)),
        ("-n 4 --min-np 2 x", false, (2, 4, 3, None)),
        ("-n 4 --max-np 8 x", true, (4, 8, 3, None)),
        (
            "--nnodes 2 --nproc-per-node 4 --max-restarts 1 x",
            true,
            (8, 8, 1, Some(4)),
        ),
        ("-H a:3,b:2 --min-np 1 --max-np 5 x", false, (1, 5, 3, None)),
        ("-H a:2,b:2 --max-restarts 1 x", true, (4, 4, 1, None)),
        (
            "-H a:2,b:2 --nproc-per-node 2 --max-restarts 1 x",
            true,
            (4, 4, 1, Some(2)),
        ),
        (
            "-H a:2,b:2 --nnodes 1:2 --nproc-per-node 2 x",
            false,
            (2, 4, 3, Some(2)),
        ),
    ] {
        assert_eq!(wanted(line, head), expected, "{line}");
    }
    for line in [
        "-n 4 x",
        "-n 4 --max-restarts 0 x",
        "--nnodes 1:1 --nproc-per-node 2 x",
    ] {
        assert_eq!(planned(line, false).unwrap().spec.elastic, None, "{line}");
    }
}

#[test]
fn a_script_that_tells_hosts_makes_a_job_elastic_and_says_where() {
    for (head, target) in [(true, Target::Cluster), (false, Target::Discovered)] {
        for (line, expected) in [
            ("-n 4 --host-discovery-script f x", (4, 4, 0, None)),
            (
                "--min-np 2 --max-np 8 --host-discovery-script f x",
                (2, 8, 3, None),
            ),
            (
                "--nnodes 1:4 --nproc-per-node 2 --host-discovery-script f x",
                (2, 8, 3, Some(2)),
            ),
        ] {
            assert_eq!(wanted(line, head), expected, "{line}");
            assert_eq!(planned(line, head).unwrap().target, target, "{line}");
        }
    }
}

#[test]
fn times_and_limits() {
    let plan = planned("-n 2 --min-np 1 --reset-limit 7 x", true).unwrap();
    assert_eq!(plan.start_timeout, ELASTIC_TIMEOUT);
    assert_eq!(plan.spec.elastic.unwrap().max_resets, Some(7));
    let cooldown = |line: &str| {
        let line = format!("-n 2 --min-np 1 --blacklist-cooldown-range {line} x");
        planned(&line, true).map(|plan| plan.spec.elastic.unwrap().cooldown.unwrap())
    };
    let range = |least_ms, most_ms| Cooldown { least_ms, most_ms };
    assert_eq!(cooldown("1 10").unwrap(), range(1000, 10_000));
    assert_eq!(cooldown("1.5 3600").unwrap(), range(1500, 3_600_000));
    for line in ["0.5 10", "10 3601", "x 10", "1", "10 5"] {
        assert!(cooldown(line).is_err(), "{line}");
    }
    let timeout = |line: &str| planned(line, true).unwrap().spec.start_timeout_ms;
    assert_eq!(timeout("-n 2 --min-np 1 --elastic-timeout 5 x"), 5000);
    assert_eq!(timeout("-n 2 --min-np 1 --start-timeout 6 x"), 6000);
    assert_eq!(timeout("-n 2 x"), 30_000);
}

#[test]
fn workers_of_horovod_go_on_in_place() {
    let on_change = |line: &str, vars: &[(&str, &str)]| {
        let plan = planned_with(line, true, vars).unwrap();
        let timeout = plan.spec.env.get(GLOO_TIMEOUT).cloned();
        (plan.spec.elastic.unwrap().on_change, timeout)
    };
    let horovod = |seconds: &str| (OnChange::Horovod, Some(seconds.to_owned()));
    assert_eq!(on_change("-n 2 --elastic horovod x", &[]), horovod("10"));
    assert_eq!(
        on_change("-n 32 --on-change in-place x", &[]),
        horovod("12")
    );
    let given = "--env HOROVOD_GLOO_TIMEOUT_SECONDS=3 -n 2 --elastic horovod x";
    assert_eq!(on_change(given, &[]), horovod("3"));
    let restart = (OnChange::Restart, None);
    assert_eq!(on_change("-n 2 --min-np 1 x", &[]), restart);
    let elastic = [("HOROVOD_ELASTIC", "1")];
    assert_eq!(on_change("-n 2 --min-np 1 x", &elastic), horovod("10"));
    assert_eq!(
        on_change("-n 2 --min-np 1 x", &[("HOROVOD_ELASTIC", "0")]),
        restart
    );
    assert_eq!(on_change("-n 2 --on-change restart x", &elastic), restart);
    assert_eq!(
        planned_with("-n 2 x", true, &elastic).unwrap().spec.elastic,
        None
    );
}

#[test]
fn what_makes_no_sense_is_refused() {
    for (line, head, message) in [
        ("--nnodes 2:3 x", false, "this machine is one host"),
        ("--nnodes 1:2 -n 4 x", true, "--nproc-per-node"),
        ("--nnodes 1:2 --min-np 1 x", true, "give one of them"),
        ("--min-np 2 x", true, "give both"),
        ("-n 9 --min-np 2 --max-np 4 x", true, "-n is 9"),
        ("-n 4 --min-np 0 x", true, "from 1 to 16384"),
        (
            "-n 4 --reset-limit 2 x",
            true,
            "--reset-limit is given for a job that never changes",
        ),
        (
            "-n 4 --elastic-timeout 2 x",
            true,
            "--elastic-timeout is given",
        ),
        (
            "-n 4 --blacklist-cooldown-range 1 2 x",
            true,
            "--blacklist-cooldown-range is given",
        ),
        (
            "-n 4 --on-change maybe x",
            true,
            "[possible values: restart, in-place]",
        ),
        ("-n 4 --elastic torch x", true, "[possible values: horovod]"),
        (
            "-n 4 --elastic horovod --on-change restart x",
            true,
            "give one of them",
        ),
        (
            "-n 4 --elastic horovod --no-rendezvous x",
            true,
            "leave one out",
        ),
        (
            "--nproc-per-node 4 --min-np 2 --max-np 8 x",
            true,
            "not a multiple of the 4 workers on each host",
        ),
        (
            "-n 2 --host-discovery-script f --dry-run x",
            false,
            "--dry-run",
        ),
        ("--host-discovery-script f x", true, "give -n"),
        ("-n 2 --slots-per-host 4 x", true, "--host-discovery-script"),
        (
            "-n 2 --host-discovery-script= x",
            true,
            "--host-discovery-script is empty",
        ),
        (
            "-n 2 --min-np 1 --blacklist-cooldown-range 5 1 x",
            true,
            "--blacklist-cooldown-range is 5s 1s; the first is the shortest time",
        ),
        (
            "-n 2 --local-ranks-filter 9 x",
            false,
            "--local-ranks-filter has local rank 9; the workers of a host have the local ranks 0 to 1",
        ),
        (
            "--nnodes 2 --nproc-per-node 4 --local-ranks-filter 0-4 x",
            true,
            "local rank 4; the workers of a host have the local ranks 0 to 3",
        ),
        (
            "-H a:2,b:3 --local-ranks-filter 3 x",
            false,
            "the local ranks 0 to 2",
        ),
        (
            "-n 2 --log-dir d -r 0:1,5:3 x",
            false,
            "--redirects has local rank 5",
        ),
        ("-n 2 --log-dir d -t 2:3 x", false, "--tee has local rank 2"),
        ("-n 2 --rdzv-id= x", false, "--rdzv-id is empty"),
        ("-n 2 --local --host-discovery-script f x", true, "--local"),
        (
            "--nproc-per-node gpu --host-discovery-script f x",
            false,
            "invalid value 'gpu' for '--nproc-per-node'",
        ),
    ] {
        let error = planned(line, head).unwrap_err();
        assert!(error.contains(message), "{line}: {error}");
    }
}

/// By the name that torch's own test has.
#[test]
fn test_min_max_nodes_parse() {
    for bad in ["a", "a:b", "1:2:3", "2:1", "0:1", ":2", "1:"] {
        let error = planned(&format!("--nnodes {bad} x"), true).unwrap_err();
        let start = format!("invalid value '{bad}' for '--nnodes': expected a ");
        assert!(error.starts_with(&start), "{error}");
    }
}

#[test]
fn options_without_a_meaning_say_what_to_write() {
    for (line, instead) in [
        ("-n 2 --rdzv_conf=join_timeout=5 x", "--elastic-timeout"),
        ("--local-addr h x", "--interfaces NAME"),
        ("-m train", "python3 -m MODULE"),
        ("--mpi x", "Gloo"),
        ("--gloo x", "write nothing"),
    ] {
        let words = format!("kolo run {line}");
        let error = Args::try_parse_from(words.split(' ')).unwrap_err();
        let error = elsewhere(&error).unwrap_or_else(|| panic!("{line}"));
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(instead), "{error}");
    }
    let error = Args::try_parse_from(["kolo", "run", "--nonsense", "x"]).unwrap_err();
    assert!(elsewhere(&error).is_none());
}
