//! From options to what is to be run: everything that can be decided without a cluster.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kolo_core::env;
use kolo_core::head::validate::validate;
use kolo_transport::wire::{Installed, JobSpec, Milli, Program, ProgramHash, Resources};

use super::super::error::CliError;
use super::args::Run;
use super::files::Destination;
use super::layout::{local_size, placement, shares};
use super::prefix::{self, Prefix};
use super::ranks::Ranks;
use super::streams::Shown;
use super::target::{Surroundings, Target, target, usage};
use super::{elastic, glob, torchrun};
use crate::local::tells_workers_apart;

/// What is to be run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Plan {
    pub(crate) target: Target,
    pub(crate) spec: JobSpec,
    pub(crate) workers: u32,
    /// How many of them each host of a list gets that gets any, by its place in the list.
    pub(crate) shares: Vec<(usize, u32)>,
    pub(crate) prefix: Prefix,
    pub(crate) ranks: Ranks,
    pub(crate) shown: Shown,
    pub(crate) output: Option<Destination>,
    pub(crate) start_timeout: Duration,
    pub(crate) grace: Duration,
    /// The longest that the job may run.
    pub(crate) timeout: Option<Duration>,
    /// The longest that the job waits for room.
    pub(crate) wait: Duration,
    /// What is not done as it was asked for.
    pub(crate) notes: Vec<String>,
    /// Workers of Python that share a host get a number of threads that nobody has given.
    pub(crate) limits_threads: bool,
}

/// What to say of that.
pub(super) const THREADS: &str =
    "OMP_NUM_THREADS=1 for workers that share a host (--env OMP_NUM_THREADS=N)";

/// Until all workers must run, if nobody says.
const START_TIMEOUT: Duration = Duration::from_secs(30);

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
    let shares = match &target {
        Target::Hosts(hosts) | Target::Nodes(hosts) => shares(&most, hosts, workers)?,
        Target::Local | Target::Cluster | Target::Discovered => Vec::new(),
    };
    let ranks = options.ranks.clone().unwrap_or_default();
    if let Some(beyond) = ranks.beyond(workers) {
        return usage(format!(
            "--ranks {ranks} has rank {beyond}; the job has the ranks 0 to {}",
            workers - 1
        ));
    }
    let local_size = local_size(&target, placement);
    torchrun::check(options, &target, bounds.is_some(), local_size, here)?;
    if options.wait.is_some() && bounds.is_some() {
        return usage(
            "--wait is given for a job that may change, which waits for its fewest workers; give --elastic-timeout DURATION in its place",
        );
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
        per_worker: per_worker(options),
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
    let limits_threads =
        !inherits && !spec.env.contains_key(threads) && is_python(&options.program);
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
        shares,
        prefix: template,
        ranks,
        shown: options.torch.shown(),
        output: destination(options, here),
        start_timeout,
        grace,
        timeout: options.timeout,
        wait: options.wait.unwrap_or_default(),
        notes,
        limits_threads,
    })
}

/// Whether a program is one of Python, whose libraries would take a thread for each CPU.
fn is_python(words: &[OsString]) -> bool {
    words.iter().any(|word| {
        let path = Path::new(word);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("python") || name.ends_with(".py")
    })
}

/// Where files of the output go.
fn destination(options: &Run, here: &Surroundings) -> Option<Destination> {
    let to = |dir: &Option<PathBuf>, form: fn(PathBuf) -> Destination| {
        dir.as_ref().map(|dir| form(here.cwd.join(dir)))
    };
    to(&options.output_dir, Destination::Jobs)
        .or_else(|| to(&options.output_filename, Destination::Ranks))
        .or_else(|| to(&options.log_dir, Destination::Attempts))
}

fn parsed(template: &str) -> Result<Prefix, CliError> {
    Prefix::parse(template).map_err(CliError::Usage)
}

fn per_worker(options: &Run) -> Resources {
    Resources {
        cpus: options.cpus_per_worker.unwrap_or(Milli::units(1)),
        gpus: options.gpus_per_worker.unwrap_or(0),
        ..Resources::default()
    }
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
    for (name, value) in options.torch.variables() {
        if let Some(problem) = env::problem(name, &value) {
            return usage(format!("{name}: {problem}"));
        }
        all.entry(name.to_owned()).or_insert(value);
    }
    Ok((all, notes))
}

#[cfg(test)]
pub(super) mod tests;
