//! What is wrong with a job before anything is done for it.

use std::time::Duration;

use kolo_wire::{JobHost, JobSpec, OnChange, Placement, Refusal, RefusalKind};

use crate::head::limits::limits;
use crate::placement::is_sane;
use crate::ranks::MAX_WORLD_SIZE;

/// Longest name of a job, in bytes.
pub const MAX_NAME: usize = 256;
/// Longest argument, and longest variable as `NAME=VALUE`, in bytes. What Linux takes.
pub const MAX_ENTRY: usize = (128 << 10) - 1;
/// Most bytes of arguments and variables together, as Linux counts them: each with a NUL byte and a pointer. Linux takes a quarter
/// of the stack limit, which is 2 MiB of the usual 8; a node that takes less says so. Frames have room for this much.
pub const MAX_ENTRIES_BYTES: usize = 2 << 20;
/// What each counts beside its own bytes.
const ENTRY_OVERHEAD: usize = 1 + size_of::<usize>();
/// Most custom resources.
pub const MAX_CUSTOM: usize = 64;
/// Longest start timeout.
pub const MAX_START_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
/// Longest time that elastic jobs have to leave a node that is drained.
pub const MAX_DRAIN: Duration = Duration::from_secs(24 * 3600);
/// Most hosts of a list of those that a job may use.
pub const MAX_HOSTS: usize = 4096;
/// Longest name of such a host, in bytes: what the domain name system allows.
const MAX_HOSTNAME: usize = 253;
/// Longest grace period.
pub const MAX_GRACE: Duration = Duration::from_secs(3600);

fn invalid(message: impl Into<String>) -> Refusal {
    Refusal::new(RefusalKind::Invalid, message)
}

/// Checks all that can be checked without the cluster.
///
/// # Errors
///
/// A [`RefusalKind::Invalid`] that names the value, what is allowed, and so what to change.
pub fn validate(spec: &JobSpec) -> Result<(), Refusal> {
    placement(spec.placement)?;
    if spec.name.len() > MAX_NAME {
        return Err(invalid(format!(
            "the job's name has {} bytes; allowed are {MAX_NAME}",
            spec.name.len()
        )));
    }
    program_name(&spec.program.name)?;
    if !is_sane(&spec.per_worker) {
        return Err(invalid(format!(
            "each worker asks for {}; allowed is at most 1000000 of a resource",
            spec.per_worker
        )));
    }
    if spec.per_worker.custom.len() > MAX_CUSTOM {
        return Err(invalid(format!(
            "each worker asks for {} custom resources; allowed are {MAX_CUSTOM}",
            spec.per_worker.custom.len()
        )));
    }
    if let Some(name) = spec
        .per_worker
        .custom
        .keys()
        .find(|name| name.len() > MAX_NAME)
    {
        return Err(invalid(format!(
            "the name of a custom resource has {} bytes; allowed are {MAX_NAME}",
            name.len()
        )));
    }
    installed(spec)?;
    layout(spec)?;
    elastic(spec)?;
    duration("start timeout", spec.start_timeout_ms, 1, MAX_START_TIMEOUT)?;
    duration("grace period", spec.grace_ms, 0, MAX_GRACE)?;
    entries(spec)
}

fn installed(spec: &JobSpec) -> Result<(), Refusal> {
    let Some(installed) = &spec.installed else {
        return Ok(());
    };
    if installed.program.is_empty() {
        return Err(invalid("the installed program has no name"));
    }
    for (what, text) in [
        ("the installed program", Some(&installed.program)),
        ("the directory", installed.cwd.as_ref()),
        ("the search path", installed.search.as_ref()),
    ] {
        if let Some(text) = text
            && (text.len() > MAX_ENTRY || text.contains('\0'))
        {
            return Err(invalid(format!(
                "{what} has {} bytes; allowed are {MAX_ENTRY}, and no NUL byte",
                text.len()
            )));
        }
    }
    Ok(())
}

fn layout(spec: &JobSpec) -> Result<(), Refusal> {
    if spec.layout.is_empty() {
        return Ok(());
    }
    let mut nodes = std::collections::BTreeSet::new();
    let mut workers = 0_u64;
    for share in &spec.layout {
        if share.workers == 0 || !nodes.insert(share.node) {
            return Err(invalid(format!(
                "the layout has {} twice, or without workers; each node is named once with at least 1",
                share.node
            )));
        }
        workers += u64::from(share.workers);
    }
    if spec.placement.workers().map(u64::from) != Some(workers) {
        return Err(invalid(format!(
            "the layout is for {workers} workers and the placement is not"
        )));
    }
    Ok(())
}

/// Checks a list of the hosts that a job may use.
///
/// # Errors
///
/// As [`validate`].
pub(super) fn hosts(hosts: &[JobHost]) -> Result<(), Refusal> {
    if hosts.len() > MAX_HOSTS {
        return Err(invalid(format!(
            "the list of hosts has {} hosts; allowed are {MAX_HOSTS}",
            hosts.len()
        )));
    }
    let is_name = |host: &&JobHost| (1..=MAX_HOSTNAME).contains(&host.name.len());
    match hosts.iter().find(|host| !is_name(host)) {
        Some(host) => Err(invalid(format!(
            "a host of the list has a name of {} bytes; allowed are 1 to {MAX_HOSTNAME}",
            host.name.len()
        ))),
        None => Ok(()),
    }
}

fn elastic(spec: &JobSpec) -> Result<(), Refusal> {
    let Some(elastic) = &spec.elastic else {
        return Ok(());
    };
    limits(elastic, spec)
        .check()
        .map_err(|error| invalid(error.to_string()))?;
    for (what, given_ms) in [
        ("join window", Some(elastic.join_window_ms)),
        ("acknowledge timeout", Some(elastic.ack_timeout_ms)),
        (
            "window of restarts",
            elastic.restarts_within.map(|window| window.within_ms),
        ),
    ] {
        duration(what, given_ms.unwrap_or_default(), 0, MAX_START_TIMEOUT)?;
    }
    hosts(elastic.hosts.as_deref().unwrap_or_default())?;
    if let Some(check) = &elastic.health_check {
        let most = Duration::from_millis(spec.start_timeout_ms);
        duration("time limit of the health check", check.timeout_ms, 1, most)?;
        if check.program.is_empty() {
            return Err(invalid(
                "the health check has no program; give a path, or a name that is in the PATH of the node daemons".to_owned(),
            ));
        }
        for text in check.args.iter().chain([&check.program]) {
            if text.contains('\0') {
                return Err(invalid(format!(
                    "the health check has a NUL byte in `{}`, which no process can take",
                    text.escape_debug()
                )));
            }
        }
    }
    let max = elastic.max;
    if spec.placement.workers() != Some(max) {
        return Err(invalid(format!(
            "max_workers={max} is given, and the placement asks for something else; it must be for {max} workers"
        )));
    }
    let in_place = elastic.on_change == OnChange::InPlace;
    if !in_place && spec.installed.is_none() {
        return Err(invalid(
            "on_change is restart or horovod for a program that calls kolo, whose processes go on; give on_change=in_place, or an \
             installed program",
        ));
    }
    for (is_given, what, instead) in [
        (
            spec.installed.is_some() && in_place,
            "an installed program",
            "on_change=restart, or a program that calls kolo",
        ),
        (
            spec.rendezvous && in_place,
            "the plain HTTP rendezvous",
            "on_change=restart, or num_workers in place of min_workers and max_workers",
        ),
        (
            !spec.rendezvous && elastic.on_change == OnChange::Horovod,
            "on_change=horovod and no plain HTTP rendezvous",
            "the rendezvous, too",
        ),
        (
            !spec.layout.is_empty(),
            "a layout",
            "a filter such as whole_hosts",
        ),
    ] {
        if is_given {
            return Err(invalid(format!(
                "min_workers={} is given together with {what}, for which the members must stay as they are; give {instead}",
                elastic.min
            )));
        }
    }
    Ok(())
}

fn placement(placement: Placement) -> Result<(), Refusal> {
    let given = match placement {
        Placement::Pack { workers } => format!("{workers} workers"),
        Placement::Spread { hosts, slots } => format!("{hosts} hosts with {slots} workers each"),
    };
    match placement.workers() {
        Some(workers) if (1..=MAX_WORLD_SIZE).contains(&workers) => Ok(()),
        _ => Err(invalid(format!(
            "{given} are requested; allowed are 1 to {MAX_WORLD_SIZE} workers in all"
        ))),
    }
}

fn program_name(name: &str) -> Result<(), Refusal> {
    if name.is_empty() || name.len() > MAX_NAME || name.contains(['\0', '/']) {
        return Err(invalid(format!(
            "the program's name is {name:?}; allowed is a file name of 1 to {MAX_NAME} bytes without `/` and NUL"
        )));
    }
    Ok(())
}

fn duration(what: &str, given_ms: u64, least_ms: u64, most: Duration) -> Result<(), Refusal> {
    if given_ms < least_ms || u128::from(given_ms) > most.as_millis() {
        return Err(invalid(format!(
            "the {what} is {given_ms} ms; allowed are {least_ms} to {} ms",
            most.as_millis()
        )));
    }
    Ok(())
}

fn entries(spec: &JobSpec) -> Result<(), Refusal> {
    let mut bytes = 0;
    for (index, arg) in spec.args.iter().enumerate() {
        if arg.contains('\0') {
            return Err(invalid(format!(
                "argument {} contains a NUL byte, which no process can take",
                index + 1
            )));
        }
        bytes += length(&format!("argument {}", index + 1), arg.len())?;
    }
    for (name, value) in &spec.env {
        if let Some(problem) = crate::env::problem(name, value) {
            return Err(invalid(format!(
                "the environment variable {name:?} can't be set: {problem}"
            )));
        }
        bytes += length(
            &format!("the environment variable {name:?}"),
            name.len() + 1 + value.len(),
        )?;
    }
    if bytes > MAX_ENTRIES_BYTES {
        return Err(invalid(format!(
            "{} arguments and {} variables have {bytes} bytes together, as the system counts them; allowed are \
             {MAX_ENTRIES_BYTES}: give less of them, or a file that the program reads",
            spec.args.len(),
            spec.env.len(),
        )));
    }
    Ok(())
}

fn length(what: &str, bytes: usize) -> Result<usize, Refusal> {
    if bytes > MAX_ENTRY {
        return Err(invalid(format!(
            "{what} has {bytes} bytes; allowed are {MAX_ENTRY}"
        )));
    }
    Ok(bytes + ENTRY_OVERHEAD)
}

#[cfg(test)]
mod tests {
    use kolo_wire::Milli;

    use super::*;
    use crate::head::job::fixtures::{elastic, spec};

    fn refused(change: impl FnOnce(&mut JobSpec)) -> String {
        let mut spec = spec(Placement::Pack { workers: 4 });
        change(&mut spec);
        let refusal = validate(&spec).unwrap_err();
        assert_eq!(refusal.kind, RefusalKind::Invalid);
        assert!(!refusal.is_retryable());
        refusal.message
    }

    #[test]
    fn a_sane_job_is_taken() {
        assert_eq!(validate(&spec(Placement::Pack { workers: 4 })), Ok(()));
        assert_eq!(
            validate(&spec(Placement::Spread { hosts: 2, slots: 2 })),
            Ok(())
        );
    }

    #[test]
    fn an_installed_program_and_a_layout_are_checked() {
        use kolo_wire::ids::NodeId;
        use kolo_wire::{Installed, NodeShare};
        let installed = |program: &str| {
            Some(Installed {
                program: program.to_owned(),
                ..Installed::default()
            })
        };
        assert!(refused(|spec| spec.installed = installed("")).contains("no name"));
        assert!(refused(|spec| spec.installed = installed("a\0")).contains("no NUL byte"));
        let share = |node, workers| NodeShare {
            node: NodeId(node),
            workers,
        };
        let twice = vec![share(1, 2), share(1, 2)];
        assert!(refused(|spec| spec.layout = twice).contains("twice"));
        assert!(refused(|spec| spec.layout = vec![share(1, 3)]).contains("for 3 workers"));
        let mut good = spec(Placement::Pack { workers: 4 });
        good.installed = installed("true");
        good.layout = vec![share(2, 1), share(1, 3)];
        assert_eq!(validate(&good), Ok(()));
    }

    #[test]
    fn limits_that_make_no_sense_are_refused() {
        type Change = fn(&mut JobSpec);
        let cases: [(Change, &str); 6] = [
            (
                |spec| spec.elastic = Some(Box::new(elastic(0, 4))),
                "min_workers=0",
            ),
            (
                |spec| spec.elastic = Some(Box::new(elastic(5, 4))),
                "max_workers must be at least min_workers",
            ),
            (
                |spec| spec.placement = Placement::Pack { workers: 3 },
                "must be for 4 workers",
            ),
            (|spec| spec.rendezvous = true, "the plain HTTP rendezvous"),
            (
                |spec| spec.elastic.as_mut().unwrap().spares = u32::MAX,
                "spares=4294967295",
            ),
            (
                |spec| spec.elastic.as_mut().unwrap().ack_timeout_ms = u64::MAX,
                "acknowledge timeout",
            ),
        ];
        for (change, part) in cases {
            let message = refused(|spec| {
                spec.elastic = Some(Box::new(elastic(2, 4)));
                change(spec);
            });
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn the_bounds_of_an_elastic_job_are_looked_at_before_its_sizes_are_tried() {
        use kolo_wire::{Elastic, GroupFilter};

        let refused = |max, filters| {
            refused(|spec| {
                spec.elastic = Some(Box::new(Elastic {
                    filters,
                    ..elastic(1, max)
                }));
            })
        };
        // No size passes, which takes four thousand million steps to find out.
        let none = vec![GroupFilter::DivisibleBy(3_000_000_000), GroupFilter::Max(1)];
        assert_eq!(
            refused(u32::MAX, none),
            "max_workers=4294967295 and spares=0 are given; allowed are 16384 workers in all"
        );
        let many = vec![GroupFilter::DivisibleBy(16_385); 100_000];
        assert_eq!(
            refused(16_384, many),
            "100000 filters are given; allowed are 16"
        );
    }

    #[test]
    fn there_may_be_as_many_arguments_as_the_system_takes() {
        let mut many = spec(Placement::Pack { workers: 1 });
        many.args = vec!["x".to_owned(); 200_000];
        assert_eq!(validate(&many), Ok(()));
        many.args = vec!["x".repeat(MAX_ENTRY); 15];
        assert_eq!(validate(&many), Ok(()));
    }

    #[test]
    fn each_wrong_value_is_named_with_what_is_allowed() {
        let most = u32::MAX;
        assert_eq!(
            refused(|spec| spec.placement = Placement::Pack { workers: 0 }),
            "0 workers are requested; allowed are 1 to 16384 workers in all"
        );
        assert_eq!(
            refused(|spec| spec.placement = Placement::Spread {
                hosts: most,
                slots: most
            }),
            "4294967295 hosts with 4294967295 workers each are requested; \
             allowed are 1 to 16384 workers in all"
        );
        assert_eq!(
            refused(|spec| spec.start_timeout_ms = 0),
            "the start timeout is 0 ms; allowed are 1 to 86400000 ms"
        );
        assert!(refused(|spec| spec.start_timeout_ms = u64::MAX).contains("start timeout"));
        assert!(refused(|spec| spec.grace_ms = u64::MAX).contains("grace period"));
        assert!(refused(|spec| spec.per_worker.cpus = Milli(u64::MAX)).contains("at most 1000000"));
        assert!(refused(|spec| spec.per_worker.gpus = most).contains("at most 1000000"));
        let message = refused(|spec| {
            let custom = &mut spec.per_worker.custom;
            custom.insert("x".repeat(257), Milli::units(1));
        });
        assert_eq!(
            message,
            "the name of a custom resource has 257 bytes; allowed are 256"
        );
        for name in ["", "../evil", "a\0b"] {
            assert!(refused(|spec| spec.program.name = name.to_owned()).contains("file name"));
        }
        assert!(refused(|spec| spec.name = "x".repeat(257)).contains("allowed are 256"));
        assert!(refused(|spec| spec.args = vec!["a\0".to_owned()]).contains("NUL byte"));
        let message = refused(|spec| spec.args = vec![String::new(); 300_000]);
        assert!(
            message.contains("300000 arguments and 1 variables"),
            "{message}"
        );
        for name in ["", "A=B", "A\0", "KOLO_RANK"] {
            let message = refused(|spec| {
                spec.env.insert(name.to_owned(), "1".to_owned());
            });
            assert!(message.contains("can't be set"), "{message}");
        }
        let message = refused(|spec| {
            spec.env.insert("BIG".to_owned(), "x".repeat(MAX_ENTRY));
        });
        assert_eq!(
            message,
            "the environment variable \"BIG\" has 131075 bytes; allowed are 131071"
        );
        let message = refused(|spec| spec.args = vec!["x".repeat(MAX_ENTRY); 17]);
        assert!(message.contains("bytes together"), "{message}");
    }
}
