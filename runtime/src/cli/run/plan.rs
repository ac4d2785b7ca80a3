//! From options to what is to be run: everything that can be decided without a cluster.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kolo_actors::env;
use kolo_actors::placement::MAX_PER_NODE;
use kolo_actors::ranks::MAX_WORLD_SIZE;
use kolo_transport::wire::{
    Installed, JobSpec, Milli, NodeShare, Placement, Program, ProgramHash, Resources,
};

use super::super::error::CliError;
use super::super::host_args::SshArgs;
use super::args::Run;
use super::glob;
use super::prefix::{self, Prefix};
use super::ranks::Ranks;
use crate::hosts::{HostSlots, parse_hostfile, parse_hosts};
use crate::ssh::SshOptions;

/// Where the workers run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// On this machine, with a cluster for this job alone.
    Local,
    /// On the cluster of a head that is there.
    Cluster,
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
    pub(crate) output_dir: Option<PathBuf>,
    pub(crate) start_timeout: Duration,
    pub(crate) grace: Duration,
}

fn usage<T>(message: impl Into<String>) -> Result<T, CliError> {
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
    let args = args
        .iter()
        .map(|arg| text("the argument", arg))
        .collect::<Result<Vec<_>, _>>()?;
    let target = target(options, here)?;
    let (placement, workers) = placement(options, &target)?;
    let ranks = options.ranks.clone().unwrap_or_default();
    if let Some(beyond) = ranks.beyond(workers) {
        return usage(format!(
            "--ranks {ranks} has rank {beyond}; the job has the ranks 0 to {}",
            workers - 1
        ));
    }
    let env = variables(options, here, &target)?;
    let cwd = match &options.cwd {
        Some(dir) => here.cwd.join(dir),
        None => here.cwd.clone(),
    };
    let name = Path::new(&program).file_name().map_or_else(
        || "program".to_owned(),
        |name| name.to_string_lossy().into_owned(),
    );
    let grace = options.grace.unwrap_or(Duration::from_secs(5));
    let start_timeout = options.start_timeout.unwrap_or(Duration::from_secs(30));
    let spec = JobSpec {
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
    };
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
        output_dir: options.output_dir.as_ref().map(|dir| here.cwd.join(dir)),
        start_timeout,
        grace,
    })
}

fn parsed(template: &str) -> Result<Prefix, CliError> {
    Prefix::parse(template).map_err(CliError::Usage)
}

fn target(options: &Run, here: &Surroundings) -> Result<Target, CliError> {
    let hosts = match (&options.hosts, &options.hostfile) {
        (Some(list), _) => parse_hosts(list).map_err(|error| CliError::Usage(error.to_string()))?,
        (None, Some(path)) => {
            let text = std::fs::read_to_string(path).map_err(|error| CliError::File {
                path: path.clone(),
                error,
            })?;
            parse_hostfile(&text)
                .map_err(|error| CliError::Usage(format!("{}: {error}", path.display())))?
        }
        (None, None) if here.has_head && !options.local => return Ok(Target::Cluster),
        (None, None) => return Ok(Target::Local),
    };
    Ok(Target::Hosts(hosts))
}

/// Whether a host is this machine by its name, so that neither ssh nor a network is needed.
pub(crate) fn is_here(host: &HostSlots, hostname: &str) -> bool {
    let name = host.host.as_str();
    host.user.is_none()
        && (name.eq_ignore_ascii_case("localhost")
            || name.eq_ignore_ascii_case(hostname)
            || name == "127.0.0.1"
            || name == "::1")
}

fn count(option: &str, given: &str) -> Result<u32, CliError> {
    match given.parse() {
        Ok(count) if count > 0 => Ok(count),
        _ => usage(format!(
            "--{option} is `{given}`; allowed is a whole number from 1 on"
        )),
    }
}

/// `N`, or `N:N` as torchrun writes it.
fn nodes(given: &str) -> Result<u32, CliError> {
    match given.split_once(':') {
        Some((least, most)) if least == most => count("nnodes", least),
        Some(_) => usage(format!(
            "--nnodes is `{given}`; the number of hosts of `kolo run` does not change: give one number"
        )),
        None => count("nnodes", given),
    }
}

fn placement(options: &Run, target: &Target) -> Result<(Placement, u32), CliError> {
    let per_node = options
        .nproc_per_node
        .as_deref()
        .map(|given| count("nproc-per-node", given))
        .transpose()?;
    let hosts = options.nnodes.as_deref().map(nodes).transpose()?;
    let slots: Option<u64> = match target {
        Target::Hosts(hosts) => Some(hosts.iter().map(|host| u64::from(host.slots)).sum()),
        Target::Local | Target::Cluster => None,
    };
    if options.num_proc == Some(0) {
        return usage("--num-proc is 0; allowed is a whole number from 1 on");
    }
    let product = match (hosts, per_node) {
        (Some(hosts), Some(per_node)) => Some(u64::from(hosts) * u64::from(per_node)),
        (None, Some(per_node)) => match target {
            Target::Hosts(hosts) => Some(hosts.len() as u64 * u64::from(per_node)),
            Target::Local => Some(u64::from(per_node)),
            Target::Cluster => match options.num_proc {
                Some(all) if all % per_node == 0 => Some(u64::from(all)),
                Some(all) => {
                    return usage(format!(
                        "{all} workers can't be {per_node} on each host; give a multiple of it"
                    ));
                }
                // One host, as torchrun has it.
                None => Some(u64::from(per_node)),
            },
        },
        (Some(hosts), None) => match options.num_proc {
            Some(all) if all % hosts == 0 => Some(u64::from(all)),
            Some(all) => {
                return usage(format!(
                    "{all} workers can't be spread evenly over {hosts} hosts; give a multiple of it"
                ));
            }
            None => Some(u64::from(hosts)),
        },
        (None, None) => None,
    };
    let workers = match (product, options.num_proc) {
        (Some(product), Some(all)) if product != u64::from(all) => {
            return usage(format!(
                "--num-proc is {all}, and the other options make {product} workers; give one of them, or what agrees"
            ));
        }
        (Some(product), _) => product,
        (None, Some(all)) => u64::from(all),
        (None, None) => slots.unwrap_or(1),
    };
    let workers = match u32::try_from(workers) {
        Ok(workers) if (1..=MAX_WORLD_SIZE).contains(&workers) => workers,
        _ => {
            return usage(format!(
                "{workers} workers are asked for; allowed are 1 to {MAX_WORLD_SIZE}"
            ));
        }
    };
    match target {
        Target::Local if hosts.is_some_and(|hosts| hosts > 1) => {
            return usage(
                "--nnodes is more than 1, and this machine is one host; give --hosts or --hostfile, or a cluster by KOLO_HEAD",
            );
        }
        Target::Local if workers > MAX_PER_NODE => {
            return usage(format!(
                "{workers} workers are asked for; one host takes at most {MAX_PER_NODE}"
            ));
        }
        Target::Hosts(list) => {
            if let Some(hosts) = hosts
                && hosts as usize > list.len()
            {
                return usage(format!(
                    "--nnodes is {hosts} and {} hosts are given",
                    list.len()
                ));
            }
            let all = slots.unwrap_or_default();
            if u64::from(workers) > all {
                return usage(format!(
                    "{workers} workers are asked for and the hosts have {all} slots"
                ));
            }
        }
        Target::Local | Target::Cluster => {}
    }
    let spread = match (target, hosts, per_node) {
        (Target::Cluster, Some(hosts), _) => Some((hosts, workers / hosts)),
        (Target::Cluster, None, Some(per_node)) => Some((workers / per_node, per_node)),
        _ => None,
    };
    let placement = match spread {
        Some((hosts, slots)) => Placement::Spread { hosts, slots },
        None => Placement::Pack { workers },
    };
    Ok((placement, workers))
}

/// How many workers each host gets: filled in order, or evenly if that is asked for. Hosts without any are left out.
pub(crate) fn shares(
    options: &Run,
    hosts: &[HostSlots],
    workers: u32,
) -> Result<Vec<(usize, u32)>, CliError> {
    let per_node = match (&options.nproc_per_node, &options.nnodes) {
        (Some(given), _) => Some(count("nproc-per-node", given)?),
        (None, Some(given)) => Some(workers / nodes(given)?),
        (None, None) => None,
    };
    let mut left = workers;
    let mut shares = Vec::new();
    for (index, host) in hosts.iter().enumerate() {
        let share = per_node.unwrap_or(host.slots).min(left);
        if share > host.slots {
            return usage(format!(
                "{share} workers are asked for on {}, which has {} slots",
                host.destination(),
                host.slots
            ));
        }
        if share > MAX_PER_NODE {
            return usage(format!(
                "{} would get {share} workers; one host takes at most {MAX_PER_NODE}",
                host.destination()
            ));
        }
        if share > 0 {
            shares.push((index, share));
            left -= share;
        }
    }
    if left > 0 {
        return usage(format!("the hosts have no slots for {left} of the workers"));
    }
    Ok(shares)
}

/// Lays the job over nodes that are known.
pub(crate) fn lay_out(spec: &mut JobSpec, layout: Vec<NodeShare>) {
    spec.layout = layout;
    // Each host declares a CPU for each slot.
    spec.per_worker.cpus = Milli::units(1);
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

fn variables(
    options: &Run,
    here: &Surroundings,
    target: &Target,
) -> Result<BTreeMap<String, String>, CliError> {
    let mut all = BTreeMap::new();
    for (name, value) in &here.vars {
        let (Some(name), Some(value)) = (name.to_str(), value.to_str()) else {
            continue;
        };
        let passed = options
            .pass_env
            .iter()
            .any(|pattern| glob::matches(pattern, name));
        // What this process may use is what its workers may use, if nothing is shared out.
        let devices = *target == Target::Local
            && options.gpus_per_worker.is_none()
            && name == "CUDA_VISIBLE_DEVICES";
        if (passed || devices) && env::problem(name, value).is_none() {
            all.insert(name.to_owned(), value.to_owned());
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
        all.insert(name.to_owned(), value.to_owned());
    }
    Ok(all)
}

/// Options of the command line over those of a file.
pub(crate) fn merge(line: Run, file: Run) -> Run {
    let places = line.hosts.is_some() || line.hostfile.is_some() || line.local;
    let looks = line.prefix.is_some() || line.timestamps;
    let joined = |first: Vec<String>, second: Vec<String>| [first, second].concat();
    Run {
        num_proc: line.num_proc.or(file.num_proc),
        nproc_per_node: line.nproc_per_node.or(file.nproc_per_node),
        nnodes: line.nnodes.or(file.nnodes),
        hosts: line.hosts.or(file.hosts.filter(|_| !places)),
        hostfile: line.hostfile.or(file.hostfile.filter(|_| !places)),
        local: line.local || (file.local && !places),
        cpus_per_worker: line.cpus_per_worker.or(file.cpus_per_worker),
        gpus_per_worker: line.gpus_per_worker.or(file.gpus_per_worker),
        // Of one name the last counts.
        env: joined(file.env, line.env),
        pass_env: joined(file.pass_env, line.pass_env),
        cwd: line.cwd.or(file.cwd),
        prefix: line.prefix.or(file.prefix.filter(|_| !looks)),
        timestamps: line.timestamps || (file.timestamps && !looks),
        ranks: line.ranks.or(file.ranks),
        output_dir: line.output_dir.or(file.output_dir),
        no_stdin: line.no_stdin || file.no_stdin,
        grace: line.grace.or(file.grace),
        start_timeout: line.start_timeout.or(file.start_timeout),
        name: line.name.or(file.name),
        no_rendezvous: line.no_rendezvous || file.no_rendezvous,
        interfaces: if line.interfaces.is_empty() {
            file.interfaces
        } else {
            line.interfaces
        },
        no_cache: line.no_cache || file.no_cache,
        ssh: merge_ssh(line.ssh, file.ssh),
        config_file: line.config_file,
        dry_run: line.dry_run,
        program: if line.program.is_empty() {
            file.program
        } else {
            line.program
        },
    }
}

fn merge_ssh(line: SshArgs, file: SshArgs) -> SshArgs {
    // What is at its default was not given, or might as well not have been.
    let usual = SshOptions::default();
    let installed = line.node_program.is_some() || line.remote_program.is_some();
    SshArgs {
        ssh_port: line.ssh_port.or(file.ssh_port),
        ssh_identity_file: line.ssh_identity_file.or(file.ssh_identity_file),
        ssh_config_file: line.ssh_config_file.or(file.ssh_config_file),
        ssh_program: if line.ssh_program == usual.program {
            file.ssh_program
        } else {
            line.ssh_program
        },
        ssh_connect_timeout: if line.ssh_connect_timeout == usual.connect_timeout {
            file.ssh_connect_timeout
        } else {
            line.ssh_connect_timeout
        },
        ssh_stall_timeout: if line.ssh_stall_timeout == usual.stall_timeout {
            file.ssh_stall_timeout
        } else {
            line.ssh_stall_timeout
        },
        ssh_local: line.ssh_local || file.ssh_local,
        node_program: line
            .node_program
            .or(file.node_program.filter(|_| !installed)),
        remote_program: line
            .remote_program
            .or(file.remote_program.filter(|_| !installed)),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::super::args::{Args, Command};
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
            ("--nnodes 1:4 x", "does not change"),
            ("--nnodes 2 x", "this machine is one host"),
            ("-n 3 --nproc-per-node 2 x", "make 2 workers"),
            ("-H a:2 -n 3 x", "the hosts have 2 slots"),
            ("-H a:2 --nnodes 2 x", "1 hosts are given"),
            ("-H a:2,a:1 x", "the host a is in"),
            (
                "-n 2 --ranks 1,5 x",
                "has rank 5; the job has the ranks 0 to 1",
            ),
            ("-e X x", "expected NAME=VALUE"),
            ("-e KOLO_RANK=1 x", "KOLO_"),
            ("-n 2", "no program is given"),
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
        assert!(is_here(&HostSlots::new("localhost", 1), "me"));
        assert!(is_here(&HostSlots::new("127.0.0.1", 1), "me"));
        assert!(
            !is_here(&HostSlots::new("127.0.0.2", 1), "me"),
            "it may have an ssh server of its own"
        );
        assert!(is_here(&HostSlots::new("ME", 1), "me"));
        assert!(!is_here(&HostSlots::new("you", 1), "me"));
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
