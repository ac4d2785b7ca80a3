//! `kolo run`, elastic: how much a group may change, and how often it is started anew.

use std::time::Duration;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use kolo_core::env::GLOO_TIMEOUT;
use kolo_transport::wire::span::Span;
use kolo_transport::wire::{Cooldown, Elastic, JobSpec, OnChange, Placement};

use super::super::error::CliError;
use super::args::{ElasticArg, ElasticArgs, OnChangeArg, Run};
use super::layout;
use super::target::{Surroundings, Target, usage};

/// Restarts after failures, where the group may change and nobody says how many.
const MAX_RESTARTS: u32 = 3;

/// How long a job waits for its fewest workers, if nobody says; as torchrun and horovodrun.
const ELASTIC_TIMEOUT: Duration = Duration::from_secs(600);

/// How long room on one host waits for room on another one, so that both join together.
const JOIN_WINDOW_MS: u64 = 1000;

/// The value of [`GLOO_TIMEOUT`] for a small group, for where a node can't end the connections that survivors of a loss keep open. A large
/// group takes longer to meet.
const GLOO_SECONDS: u32 = 10;

/// Options of torchrun and horovodrun that have no meaning here, and what to write in their place.
const ELSEWHERE: &[(&str, &str)] = &[
    ("rdzv-conf", "--elastic-timeout DURATION"),
    ("local-addr", "--interfaces NAME"),
    ("m", "`-- python3 -m MODULE`"),
    ("module", "`-- python3 -m MODULE`"),
    (
        "mpi",
        "nothing: Horovod's workers meet by Gloo, and `mpirun` runs programs for MPI",
    ),
    (
        "use-mpi",
        "nothing: Horovod's workers meet by Gloo, and `mpirun` runs programs for MPI",
    ),
    ("gloo", "nothing: Horovod's workers meet by Gloo"),
    ("use-gloo", "nothing: Horovod's workers meet by Gloo"),
    ("no-python", "nothing: the program is run as it is"),
];

/// For a line of `kolo run` that was not understood: an option of another launcher, with what to write instead.
pub(crate) fn elsewhere(error: &clap::Error) -> Option<CliError> {
    let (ErrorKind::UnknownArgument, Some(ContextValue::String(given))) =
        (error.kind(), error.get(ContextKind::InvalidArg))
    else {
        return None;
    };
    let given = given.split(['=', ' ']).next().unwrap_or_default();
    let name = given.trim_start_matches('-').replace('_', "-");
    let (_, instead) = ELSEWHERE.iter().find(|(other, _)| *other == name)?;
    Some(CliError::Usage(format!(
        "{given} has no meaning for `kolo run`; write {instead}"
    )))
}

/// How far a group may change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Bounds {
    min: u32,
    max: u32,
    /// Each host has so many workers, or none.
    per_host: Option<u32>,
}

/// `MIN:MAX` of `--nnodes`, if these differ.
fn range(options: &Run) -> Result<Option<(u32, u32)>, CliError> {
    let Some((given, (least, most))) = options
        .nnodes
        .as_deref()
        .and_then(|given| Some((given, given.split_once(':')?)))
    else {
        return Ok(None);
    };
    match (least.parse(), most.parse()) {
        (Ok(least), Ok(most)) if least == most => Ok(None),
        (Ok(least), Ok(most)) if 0 < least && least < most => Ok(Some((least, most))),
        _ => layout::count("nnodes", given).map(|_| None),
    }
}

/// The options with the most workers as their number, and how far the group may change if it may.
pub(super) fn bounds(options: &Run, target: &Target) -> Result<(Run, Option<Bounds>), CliError> {
    let given = &options.elastic;
    if given.elastic.is_some() && given.on_change == Some(OnChangeArg::Restart) {
        return usage(
            "--elastic horovod and --on-change restart are given; give one of them: with Horovod's protocol workers go on in place",
        );
    }
    let hosts = range(options)?;
    let sizes = given.min_np.is_some() || given.max_np.is_some();
    let looks_for_hosts = given.host_discovery_script.is_some();
    if let Some("") = given.host_discovery_script.as_deref().map(str::trim) {
        return usage(
            "--host-discovery-script is empty; give a command that prints the hosts, HOST or HOST:SLOTS on each line",
        );
    }
    if looks_for_hosts
        && options.num_proc.is_none()
        && options.nproc_per_node.is_none()
        && hosts.is_none()
        && !sizes
    {
        return usage(
            "--host-discovery-script is given without a number of workers; give -n, or --min-np and --max-np, too",
        );
    }
    let is_elastic = hosts.is_some()
        || looks_for_hosts
        || sizes
        || given.max_restarts.is_some_and(|most| most > 0)
        || given.on_change.is_some()
        || given.elastic.is_some();
    let mut most = options.clone();
    if !is_elastic {
        if let Some(option) = [
            given.reset_limit.map(|_| "--reset-limit"),
            given.elastic_timeout.map(|_| "--elastic-timeout"),
            (given.blacklist_cooldown_range.as_ref()).map(|_| "--blacklist-cooldown-range"),
        ]
        .into_iter()
        .flatten()
        .next()
        {
            return usage(format!(
                "{option} is given for a job that never changes; give --max-restarts, --nnodes MIN:MAX, or --min-np and --max-np, too"
            ));
        }
        return Ok((most, None));
    }
    if hosts.is_some() && sizes {
        return usage("--nnodes MIN:MAX and --min-np or --max-np are given; give one of them");
    }
    if options.dry_run && *target == Target::Discovered {
        return usage(
            "--dry-run is given for hosts over ssh that a script tells, where nodes come when the job runs; give the hosts by -H",
        );
    }
    let mut fewest = None;
    if let Some((min, max)) = hosts {
        if options.num_proc.is_some() {
            return usage(
                "-n and --nnodes MIN:MAX are given; give --nproc-per-node, the workers on each host, in place of -n",
            );
        }
        // This machine is one host, whatever others could join.
        let max = if *target == Target::Local { min } else { max };
        most.nnodes = Some(max.to_string());
        fewest = Some((min, max));
    }
    if sizes {
        let max = given.max_np.or(options.num_proc);
        let min = given.min_np.or(options.num_proc);
        let (Some(min), Some(max)) = (min, max) else {
            return usage("--min-np or --max-np is given alone; give both, or one of them and -n");
        };
        if given.min_np > given.max_np && given.max_np.is_some() {
            return usage(format!(
                "--min-np is {min} and --max-np is {max}; the fewest can be no more than the most"
            ));
        }
        if options
            .num_proc
            .is_some_and(|wanted| wanted < min || wanted > max)
        {
            let workers = options.num_proc.unwrap_or_default();
            return usage(match (given.min_np, given.max_np) {
                (Some(min), None) => format!("-n is {workers}, which is less than --min-np {min}"),
                (None, Some(max)) => format!("-n is {workers}, which is more than --max-np {max}"),
                _ => format!(
                    "-n is {workers}, which is not between --min-np {min} and --max-np {max}"
                ),
            });
        }
        most.num_proc = Some(max);
        fewest = Some((min, max));
    }
    let placed = layout::placement(&most, target)?;
    let per_host = per_host(&most, target, placed)?;
    let (_, max) = placed;
    let min = match fewest {
        None => max,
        Some((min, _)) if sizes => min,
        Some((min, hosts)) => max / hosts * min,
    };
    let unit = per_host.unwrap_or(1);
    for (option, given) in [("--min-np", min), ("--max-np", max)] {
        if given % unit != 0 {
            return usage(format!(
                "{option} is {given}, which is not a multiple of the {unit} workers on each host"
            ));
        }
    }
    Ok((most, Some(Bounds { min, max, per_host })))
}

/// The number of workers on each host, if that is asked for.
fn per_host(
    options: &Run,
    target: &Target,
    (placement, workers): (Placement, u32),
) -> Result<Option<u32>, CliError> {
    let is_even = options.nproc_per_node.is_some() || options.nnodes.is_some();
    Ok(match (target, placement) {
        (_, Placement::Spread { slots, .. }) => Some(slots),
        (Target::Hosts(hosts) | Target::Nodes(hosts), Placement::Pack { .. }) if is_even => {
            let shares = layout::shares(options, hosts, workers)?;
            shares.first().map(|(_, share)| *share)
        }
        (_, Placement::Pack { .. }) => None,
    })
}

/// Makes a job elastic.
pub(super) fn apply(
    options: &Run,
    here: &Surroundings,
    bounds: &Bounds,
    spec: &mut JobSpec,
) -> Result<(), CliError> {
    let given = &options.elastic;
    let Bounds { min, max, per_host } = *bounds;
    let usual = if min < max { MAX_RESTARTS } else { 0 };
    spec.placement = match per_host {
        Some(slots) => Placement::Spread {
            hosts: max / slots,
            slots,
        },
        None => Placement::Pack { workers: max },
    };
    if let Some(installed) = &mut spec.installed {
        // Which process of rank 0 should have it?
        installed.stdin = false;
    }
    let on_change = on_change(options, here, spec.rendezvous)?;
    if on_change == OnChange::Horovod && !here.vars.iter().any(|(name, _)| name == GLOO_TIMEOUT) {
        let seconds = GLOO_SECONDS + max / 16;
        let given = spec.env.entry(GLOO_TIMEOUT.to_owned());
        given.or_insert_with(|| seconds.to_string());
    }
    spec.elastic = Some(Box::new(Elastic {
        min,
        max,
        spares: 0,
        max_resets: given.reset_limit,
        restarts_within: None,
        restarts_without_progress: given.max_restarts.unwrap_or(usual),
        cooldown: cooldown(given)?,
        join_window_ms: JOIN_WINDOW_MS,
        // No process is asked: those of a group are started for it.
        ack_timeout_ms: spec.start_timeout_ms,
        filters: Vec::new(),
        health_check: None,
        on_change,
        hosts: None,
    }));
    Ok(())
}

/// What happens to the workers at a change. `HOROVOD_ELASTIC` in the environment of `kolo run` asks for Horovod's protocol, too, unless
/// an option says something else.
fn on_change(
    options: &Run,
    here: &Surroundings,
    has_rendezvous: bool,
) -> Result<OnChange, CliError> {
    let given = &options.elastic;
    let of_variable = || {
        let mut vars = here.vars.iter();
        vars.any(|(name, value)| {
            name == "HOROVOD_ELASTIC" && !matches!(value.to_str(), Some("" | "0"))
        })
    };
    let in_place = match (given.on_change, given.elastic) {
        (_, Some(ElasticArg::Horovod)) | (Some(OnChangeArg::InPlace), None) => true,
        (Some(OnChangeArg::Restart), None) => false,
        (None, None) => of_variable(),
    };
    if !in_place {
        return Ok(OnChange::Restart);
    }
    if !has_rendezvous {
        return usage(
            "--no-rendezvous is given for workers that go on in place; they hear of each change by the rendezvous: leave one out",
        );
    }
    Ok(OnChange::Horovod)
}

/// How long hosts cool down, from the shortest to the longest.
fn cooldown(given: &ElasticArgs) -> Result<Option<Cooldown>, CliError> {
    let Some([least, most]) = given.blacklist_cooldown_range.as_deref() else {
        return Ok(None);
    };
    if least > most {
        return usage(format!(
            "--blacklist-cooldown-range is {} {}; the first is the shortest time and the second the longest",
            Span(*least),
            Span(*most)
        ));
    }
    Ok(Some(Cooldown {
        least_ms: least.as_millis() as u64,
        most_ms: most.as_millis() as u64,
    }))
}

/// How long the workers may take until all run, or until enough of them do.
pub(super) fn start_timeout(options: &Run, is_elastic: bool, usual: Duration) -> Duration {
    let given = options.elastic.elastic_timeout.or(options.start_timeout);
    given.unwrap_or(if is_elastic { ELASTIC_TIMEOUT } else { usual })
}

#[cfg(test)]
mod tests;
