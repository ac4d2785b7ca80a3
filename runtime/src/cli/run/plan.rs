//! From options to what is to be run: everything that can be decided without a cluster.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kolo_core::env;
use kolo_core::head::validate::validate;
use kolo_transport::wire::{Installed, JobSpec, Milli, Program, ProgramHash, Resources};

use super::super::error::CliError;
use super::super::host_args::HostArgs;
use super::args::Run;
use super::files::Destination;
use super::layout::placement;
use super::prefix::{self, Prefix};
use super::ranks::Ranks;
use super::{elastic, glob};
use crate::hosts::HostSlots;
use crate::local::tells_workers_apart;

/// Where the workers run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// On this machine, with a cluster for this job alone.
    Local,
    /// On the cluster of a head that is there.
    Cluster,
    /// On these nodes of that cluster.
    Nodes(Vec<HostSlots>),
    /// On these hosts, by ssh, with a cluster for this job alone.
    Hosts(Vec<HostSlots>),
}

/// What the environment of the command says.
#[derive(Debug)]
pub(crate) struct Surroundings {
    /// Its variables.
    pub(crate) vars: Vec<(OsString, OsString)>,
    /// Its directory.
    pub(crate) cwd: PathBuf,
    /// What this machine is called.
    pub(crate) hostname: String,
    /// Whether a head is given.
    pub(crate) has_head: bool,
}

/// What is to be run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Plan {
    pub(crate) target: Target,
    pub(crate) spec: JobSpec,
    pub(crate) workers: u32,
    pub(crate) prefix: Prefix,
    pub(crate) ranks: Ranks,
    pub(crate) output: Option<Destination>,
    pub(crate) start_timeout: Duration,
    pub(crate) grace: Duration,
    /// What is not done as it was asked for.
    pub(crate) notes: Vec<String>,
    /// Workers that share a host get a number of threads that nobody has given.
    pub(crate) limits_threads: bool,
}

/// What to say of that.
pub(super) const THREADS: &str = "workers that share a host have OMP_NUM_THREADS=1, unless the host sets it, so that they do not compete for its CPUs; \
     --env OMP_NUM_THREADS=N sets another number";

/// Until all workers must run, if nobody says.
const START_TIMEOUT: Duration = Duration::from_secs(30);

pub(super) fn usage<T>(message: impl Into<String>) -> Result<T, CliError> {
    Err(CliError::Usage(message.into()))
}

fn text(what: &str, given: &OsStr) -> Result<String, CliError> {
    match given.to_str() {
        Some(text) => Ok(text.to_owned()),
        None => usage(format!(
            "{what} `{}` is not UTF-8, which kolo can't pass on",
            given.display()
        )),
    }
}

/// Decides what is to be run.
pub(crate) fn plan(options: &Run, here: &Surroundings) -> Result<Plan, CliError> {
    let Some((program, args)) = options.program.split_first() else {
        return usage("no program is given: kolo run -n 4 -- PROGRAM ARGS...");
    };
    let program = text("the program", program)?;
    if program.is_empty() {
        return usage("the program is an empty word; is a variable of the shell not set?");
    }
    let args = args
        .iter()
        .map(|arg| text("the argument", arg))
        .collect::<Result<Vec<_>, _>>()?;
    let target = target(options, here)?;
    let (most, bounds) = elastic::bounds(options, &target)?;
    let (placement, workers) = placement(&most, &target)?;
    let ranks = options.ranks.clone().unwrap_or_default();
    if let Some(beyond) = ranks.beyond(workers) {
        return usage(format!(
            "--ranks {ranks} has rank {beyond}; the job has the ranks 0 to {}",
            workers - 1
        ));
    }
    let (env, notes) = variables(options, here, &target)?;
    let cwd = match &options.cwd {
        Some(dir) => here.cwd.join(dir),
        None => here.cwd.clone(),
    };
    let name = Path::new(&program).file_name().map_or_else(
        || "program".to_owned(),
        |name| name.to_string_lossy().into_owned(),
    );
    let grace = options.grace.unwrap_or(Duration::from_secs(5));
    let start_timeout = elastic::start_timeout(options, bounds.is_some(), START_TIMEOUT);
    let mut spec = JobSpec {
        name: options.name.clone().unwrap_or_else(|| name.clone()),
        program: Program {
            hash: ProgramHash([0; 32]),
            size: 0,
            name,
        },
        args,
        placement,
        per_worker: per_worker(options)?,
        installed: Some(Installed {
            program,
            search: env.get("PATH").cloned(),
            cwd: Some(text("the directory", cwd.as_os_str())?),
            stream_output: true,
            stdin: !options.no_stdin,
        }),
        env,
        start_timeout_ms: start_timeout.as_millis() as u64,
        grace_ms: grace.as_millis() as u64,
        rendezvous: !options.no_rendezvous,
        layout: Vec::new(),
        interfaces: super::super::interfaces::selection(&options.interfaces)?,
        no_cache: options.no_cache,
        elastic: None,
    };
    if let Some(bounds) = &bounds {
        elastic::apply(options, here, bounds, &mut spec)?;
    }
    let threads = "OMP_NUM_THREADS";
    let inherits = target == Target::Local && here.vars.iter().any(|(name, _)| name == threads);
    let limits_threads = !inherits && !spec.env.contains_key(threads);
    // As the head does, whose words they are: what it refuses of the arguments alone is refused before anybody is asked, and by
    // `--dry-run` as well.
    validate(&spec)?;
    let template = match (&options.prefix, options.timestamps) {
        (Some(prefix), _) => prefix.clone(),
        (None, true) => parsed(prefix::WITH_TIME)?,
        (None, false) => parsed(prefix::DEFAULT)?,
    };
    Ok(Plan {
        target,
        spec,
        workers,
        prefix: template,
        ranks,
        output: match (&options.output_dir, &options.output_filename) {
            (Some(dir), _) => Some(Destination::Jobs(here.cwd.join(dir))),
            (None, Some(dir)) => Some(Destination::Ranks(here.cwd.join(dir))),
            (None, None) => None,
        },
        start_timeout,
        grace,
        notes,
        limits_threads,
    })
}

fn parsed(template: &str) -> Result<Prefix, CliError> {
    Prefix::parse(template).map_err(CliError::Usage)
}

fn target(options: &Run, here: &Surroundings) -> Result<Target, CliError> {
    let given = HostArgs {
        hosts: options.hosts.clone(),
        hostfile: options.hostfile.clone(),
    };
    Ok(match given.read()? {
        Some(hosts) if here.has_head => Target::Nodes(hosts),
        Some(hosts) => Target::Hosts(hosts),
        None if here.has_head && !options.local => Target::Cluster,
        None => Target::Local,
    })
}

fn per_worker(options: &Run) -> Result<Resources, CliError> {
    let cpus = Milli::from_f64("cpus-per-worker", options.cpus_per_worker.unwrap_or(1.0))
        .map_err(|error| CliError::Usage(error.to_string()))?;
    Ok(Resources {
        cpus,
        gpus: options.gpus_per_worker.unwrap_or(0),
        ..Resources::default()
    })
}

/// The environment that the workers are given, and what there is to say about it: variables that are to be passed and are
/// not, names that are none, and values in place of kolo's own.
fn variables(
    options: &Run,
    here: &Surroundings,
    target: &Target,
) -> Result<(BTreeMap<String, String>, Vec<String>), CliError> {
    let (mut all, mut notes) = (BTreeMap::new(), Vec::new());
    for pattern in &options.pass_env {
        let by_name = !pattern.contains(['*', '?']);
        let mut any = !by_name;
        for (name, value) in &here.vars {
            // A name that is no text can't be meant by one that is.
            let Some(name) = name.to_str().filter(|name| glob::matches(pattern, name)) else {
                continue;
            };
            any = true;
            let why = match (env::not_passed(name, by_name), value.to_str()) {
                (Some(why), _) if by_name => why,
                // On this machine they have it anyway.
                (None, None) if *target != Target::Local => "its value is not UTF-8",
                (None, Some(value)) => {
                    // One that is empty, or has a `=`, is none of a shell.
                    if env::problem(name, value).is_none() {
                        all.insert(name.to_owned(), value.to_owned());
                    }
                    continue;
                }
                _ => continue,
            };
            notes.push(format!("--pass-env: {name} is not passed, since {why}"));
        }
        if !any {
            notes.push(format!(
                "--pass-env: there is no variable `{}` here",
                pattern.escape_debug()
            ));
        }
    }
    for given in &options.env {
        let Some((name, value)) = given.split_once('=') else {
            return usage(format!(
                "--env is `{}`; expected NAME=VALUE (--pass-env NAME passes one of this environment)",
                given.escape_debug()
            ));
        };
        if let Some(problem) = env::problem(name, value) {
            return usage(format!("--env {}: {problem}", name.escape_debug()));
        }
        if tells_workers_apart(name) {
            notes.push(format!(
                "--env: all workers have {name}={} in place of what kolo sets; they may not find each other",
                value.escape_debug()
            ));
        }
        all.insert(name.to_owned(), value.to_owned());
    }
    Ok((all, notes))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use kolo_transport::wire::Placement;

    use super::super::super::args::{Args, Command};
    use super::super::layout::shares;
    use super::super::merge::merge;
    use super::*;

    fn options(line: &str) -> Run {
        let words = format!("kolo run {line}");
        match Args::try_parse_from(words.split(' ')).unwrap().command {
            Command::Run(options) => *options,
            other => panic!("{other:?}"),
        }
    }

    fn here() -> Surroundings {
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

    fn planned(line: &str) -> Plan {
        plan(&options(line), &here()).unwrap()
    }

    fn refused(line: &str) -> String {
        let error = plan(&options(line), &here()).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    }

    fn on_cluster(line: &str) -> Result<Plan, CliError> {
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
            ("-n 0 x", "--num-proc is 0"),
            ("-n 99999 x", "allowed are 1 to 16384"),
            ("--nproc-per-node auto x", "--nproc-per-node is `auto`"),
            ("--nnodes 2 x", "this machine is one host"),
            ("-n 3 --nproc-per-node 2 x", "make 2 workers"),
            ("-H a:2 -n 3 x", "the hosts have 2 slots"),
            ("-H a:2 --nnodes 2 x", "1 hosts with slots are given"),
            ("-H a:2,a:1 x", "are one machine"),
            (
                "-n 2 --ranks 1,5 x",
                "has rank 5; the job has the ranks 0 to 1",
            ),
            ("-e X x", "expected NAME=VALUE"),
            ("-e KOLO_RANK=1 x", "KOLO_"),
            ("-n 2", "no program is given"),
            ("--start-timeout 0.0001 x", "the start timeout is 0 ms"),
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
        assert!(planned("-n 2 x").limits_threads);
        assert!(!planned("-n 2 -e OMP_NUM_THREADS=4 x").limits_threads);
        let mut here = here();
        here.vars.push(("OMP_NUM_THREADS".into(), "4".into()));
        let limits = |line: &str| plan(&options(line), &here).unwrap().limits_threads;
        assert!(!limits("-n 2 x"));
        assert!(limits("-H a:2 x"), "other hosts have their own");
        assert!(!limits("-H a:2 --pass-env OMP_* x"));
    }

    #[test]
    fn files_are_in_a_folder_of_the_job_or_where_horovodrun_has_them() {
        let output = |line: &str| planned(line).output;
        let dir = || "/srv/data/out".into();
        assert_eq!(output("--output-dir out x"), Some(Destination::Jobs(dir())));
        let ranks = Some(Destination::Ranks(dir()));
        assert_eq!(output("--output-filename out x"), ranks);
        assert_eq!(output("x"), None);
        let file = options("--output-dir elsewhere -- x");
        let merged = merge(options("--output-filename out x"), file);
        assert_eq!(plan(&merged, &here()).unwrap().output, ranks);
    }

    #[test]
    fn hosts_are_filled_in_order_or_evenly() {
        let given = |line: &str| {
            let options = options(line);
            let plan = plan(&options, &here()).unwrap();
            let Target::Hosts(hosts) = &plan.target else {
                panic!("{plan:?}");
            };
            shares(&options, hosts, plan.workers)
        };
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
        assert!(error.contains("on a, which has 1 slots"), "{error}");
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

    #[test]
    fn the_command_line_counts_more_than_the_file() {
        let file = options("-n 8 -H a:8 --timestamps -e A=1 -e B=1 --no-stdin -- ./from-file 1");
        let merged = merge(options("-n 2 --local --prefix none -e B=2"), file.clone());
        let plan = plan(&merged, &here()).unwrap();
        assert_eq!((plan.workers, &plan.target), (2, &Target::Local));
        assert_eq!(plan.prefix, Prefix::parse("none").unwrap());
        assert_eq!(plan.spec.env["A"], "1");
        assert_eq!(plan.spec.env["B"], "2");
        assert!(!plan.spec.installed.as_ref().unwrap().stdin);
        assert_eq!(plan.spec.args, ["1"]);
        let merged = merge(options("./own 2"), file);
        assert_eq!((merged.num_proc, merged.program.len()), (Some(8), 2));
        assert!(merged.timestamps && merged.hosts.is_some());
    }
}
