//! The whole environment of a worker process.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::net::IpAddr;
use std::os::unix::ffi::OsStrExt;

use kolo_wire::ids::ClusterId;
use kolo_wire::{Refusal, RefusalKind, SlotStart, StartWorkers};

use crate::env;

/// Names the descriptors of a worker's call socket and control socket.
pub const WORKER_FDS: &str = "KOLO_WORKER_FDS";

/// The value of [`WORKER_FDS`].
pub const WORKER_FD_NUMBERS: &str = "3,4";

/// The cluster's id.
pub const CLUSTER: &str = "KOLO_CLUSTER";

pub use crate::env::NODE_IP;

/// Where a worker runs and what it was given there.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// The cluster.
    pub cluster: ClusterId,
    /// The node's IP address.
    pub ip: IpAddr,
    /// The ids of the GPUs of all the job's workers on this node. `None`: whatever the daemon itself may use.
    pub devices: Option<&'a [String]>,
}

/// Refuses variables that no process can have.
///
/// # Errors
///
/// [`RefusalKind::Invalid`], naming the variable.
pub fn check(start: &StartWorkers) -> Result<(), Refusal> {
    let slots = start.slots.iter().flat_map(|slot| &slot.env);
    for (name, value) in start.env.iter().chain(slots).chain(&start.user_env) {
        let problem = match env::problem(name, value) {
            // The head sets some of these, and those of users are left out below.
            Some(_) if name.starts_with(env::RESERVED_PREFIX) && !value.contains('\0') => None,
            other => other,
        };
        if let Some(problem) = problem {
            return Err(Refusal::new(
                RefusalKind::Invalid,
                format!(
                    "the environment variable `{}`: {problem}",
                    name.escape_debug()
                ),
            ));
        }
    }
    Ok(())
}

/// Everything that a worker's environment holds, in rising precedence: defaults, the daemon's own
/// environment (`inherited`) less `KOLO_*`, what the service manager tells it, and what tells a place in a group that is not
/// this one (see [`env::tells_a_place`]), the directory, the job's, the slot's, the devices, the user's less `KOLO_*`, and the
/// worker's identity.
///
/// Devices are the union of the GPUs of the job's workers on this node, so none for a job that holds none.
#[must_use]
pub fn worker(
    inherited: impl IntoIterator<Item = (OsString, OsString)>,
    start: &StartWorkers,
    slot: &SlotStart,
    place: Place<'_>,
) -> Vec<(OsString, OsString)> {
    let mut all: BTreeMap<OsString, OsString> = env::defaults(slot.member.local_size)
        .iter()
        .map(|(name, value)| (OsString::from(name), OsString::from(value)))
        .collect();
    all.extend(self::inherited(inherited));
    let cwd = start
        .installed
        .as_ref()
        .and_then(|installed| installed.cwd.as_deref());
    if let Some(cwd) = cwd {
        // A shell believes these two.
        all.remove(OsStr::new("OLDPWD"));
        all.remove(OsStr::new("PWD"));
        if is_plain(cwd) {
            all.insert("PWD".into(), cwd.into());
        }
    }
    let mut put = |name: &str, value: &str| {
        all.insert(OsString::from(name), OsString::from(value));
    };
    for (name, value) in start.env.iter().chain(&slot.env) {
        put(name, value);
    }
    for (name, value) in place.devices.map(env::devices).iter().flatten() {
        put(name, value);
    }
    for (name, value) in &start.user_env {
        if !env::is_reserved(name) {
            put(name, value);
        }
    }
    let identity = env::identity(start.job, start.generation, start.world_size, &slot.member);
    for (name, value) in &identity {
        put(name, value);
    }
    put(CLUSTER, &place.cluster.to_string());
    // Where the head has found out what connects the nodes, it says so.
    let ip = slot.env.get(NODE_IP).cloned();
    put(NODE_IP, &ip.unwrap_or_else(|| place.ip.to_string()));
    if start.installed.is_none() {
        put(WORKER_FDS, WORKER_FD_NUMBERS);
    }
    all.into_iter().collect()
}

/// The part of the daemon's own environment that its processes get: see [`worker`].
pub fn inherited(
    all: impl IntoIterator<Item = (OsString, OsString)>,
) -> impl Iterator<Item = (OsString, OsString)> {
    let all = all.into_iter();
    all.filter(|(name, _)| !is_the_daemon_s(name))
}

/// Whether a path may be the value of `PWD`: absolute, without `.` and `..`. With any other a program finds out by itself.
fn is_plain(path: &str) -> bool {
    let mut parts = path.split('/');
    path.starts_with('/') && parts.all(|part| !matches!(part, "." | ".."))
}

/// Whether a variable means the daemon, and would mislead a worker.
fn is_the_daemon_s(name: &OsStr) -> bool {
    name.as_bytes().starts_with(env::RESERVED_PREFIX.as_bytes())
        || name
            .to_str()
            .is_some_and(|name| env::is_of_a_service(name) || env::tells_a_place(name))
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use kolo_wire::Installed;

    use super::*;
    use crate::node::testing;

    /// Variables, each as `NAME=value`.
    fn map(list: &[&str]) -> BTreeMap<String, String> {
        let pairs = list.iter().filter_map(|pair| pair.split_once('='));
        let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        pairs.map(owned).collect()
    }

    fn build(
        inherited: &[&str],
        start: &StartWorkers,
        devices: Option<&[&str]>,
    ) -> BTreeMap<String, String> {
        let devices = devices.map(|ids| ids.iter().map(ToString::to_string).collect());
        let devices: Option<Vec<String>> = devices;
        let place = Place {
            cluster: ClusterId(5),
            ip: "10.0.0.7".parse().unwrap(),
            devices: devices.as_deref(),
        };
        let inherited = map(inherited).into_iter();
        let inherited = inherited.map(|(name, value)| (name.into(), value.into()));
        let all = worker(inherited, start, &start.slots[0], place).into_iter();
        all.map(|(name, value)| (name.into_string().unwrap(), value.into_string().unwrap()))
            .collect()
    }

    #[test]
    fn each_source_overrides_those_before_it() {
        let mut start = testing::start(2);
        start.env = map(&["A=job", "B=job", "C=job", "RANK=9"]);
        start.slots[0].env = map(&["B=slot", "C=slot", "RANK=0"]);
        start.user_env = map(&["C=user", "KOLO_RANK=7", "KOLO_X=7", "KOLO_LANE=tls"]);
        let daemon = [
            "A=daemon",
            "PATH=/bin",
            "KOLO_HEAD=1.2.3.4:5",
            "OMP_NUM_THREADS=8",
        ];
        let all = build(&daemon, &start, None);
        for (name, value) in map(&[
            "A=job",
            "B=slot",
            "C=user",
            "RANK=0",
            "PATH=/bin",
            // Users can't change who a worker is.
            "KOLO_RANK=0",
            // A default gives way to the daemon's own.
            "OMP_NUM_THREADS=8",
            "PYTHONUNBUFFERED=1",
            "KOLO_WORKER_FDS=3,4",
            "KOLO_CLUSTER=cluster-0000000000000005",
            "KOLO_NODE_IP=10.0.0.7",
            // A setting that users have.
            "KOLO_LANE=tls",
        ]) {
            assert_eq!(all[&name], value, "{name}");
        }
        // The daemon's own variables stay its own.
        assert!(!all.contains_key("KOLO_HEAD") && !all.contains_key("KOLO_X"));
    }

    #[test]
    fn the_directory_is_the_worker_s_own() {
        let daemon = ["PWD=/var/lib/kolo-node", "OLDPWD=/root"];
        let mut start = testing::start(1);
        // Where the daemon is, if nothing else is said.
        assert_eq!(build(&daemon, &start, None)["PWD"], "/var/lib/kolo-node");
        for (cwd, pwd) in [
            ("/srv/data", Some("/srv/data")),
            ("/", Some("/")),
            ("/srv/../data", None),
            ("/srv/./data", None),
        ] {
            start.installed = Some(Installed {
                cwd: Some(cwd.to_owned()),
                ..Installed::default()
            });
            let all = build(&daemon, &start, None);
            assert_eq!(all.get("PWD").map(String::as_str), pwd, "{cwd}");
            assert!(!all.contains_key("OLDPWD"));
        }
        start.user_env = map(&["PWD=/elsewhere"]);
        assert_eq!(build(&daemon, &start, None)["PWD"], "/elsewhere");
    }

    #[test]
    fn what_the_service_manager_tells_the_daemon_is_not_passed_on() {
        let inherited = [
            "NOTIFY_SOCKET=x",
            "WATCHDOG_PID=x",
            "WATCHDOG_USEC=x",
            "LISTEN_FDS=x",
            "LISTEN_PID=x",
            "LISTEN_PIDFDID=x",
            "LISTEN_FDNAMES=x",
            "CREDENTIALS_DIRECTORY=x",
        ];
        let mut start = testing::start(1);
        let all = build(&inherited, &start, None);
        for name in map(&inherited).keys() {
            assert!(!all.contains_key(name), "{name}");
        }
        // A user may mean something by it.
        start.user_env = map(&["NOTIFY_SOCKET=mine"]);
        assert_eq!(build(&inherited, &start, None)["NOTIFY_SOCKET"], "mine");
    }

    #[test]
    fn gpus_are_the_union_and_hidden_when_none_is_used() {
        let mut start = testing::start(2);
        let daemon = &["CUDA_VISIBLE_DEVICES=0,1,2,3"][..];
        let two = &["1", "3"][..];
        for (inherited, devices, seen) in [
            (daemon, Some(&[][..]), Some("")),
            (&[], Some(&[]), Some("")),
            (daemon, Some(two), Some("1,3")),
            // What is not shared out is left as it is.
            (daemon, None, Some("0,1,2,3")),
            (&[], None, None),
        ] {
            let all = build(inherited, &start, devices);
            let there = all.get("CUDA_VISIBLE_DEVICES").map(String::as_str);
            assert_eq!(there, seen);
        }
        start.user_env = map(&["CUDA_VISIBLE_DEVICES=3"]);
        let all = build(daemon, &start, Some(two));
        assert_eq!(all["CUDA_VISIBLE_DEVICES"], "3");
    }

    #[test]
    fn a_place_in_another_group_is_not_inherited_but_may_be_given_on_purpose() {
        let outer = [
            "RANK=5",
            "SLURM_PROCID=3",
            "OMPI_COMM_WORLD_RANK=2",
            "PMIX_RANK=2",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR=10.9.9.9",
            "TORCHELASTIC_ERROR_FILE=/tmp/outer",
        ];
        let mut start = testing::start(1);
        start.env = BTreeMap::new();
        let all = build(&outer, &start, None);
        for name in map(&outer).keys() {
            assert!(!all.contains_key(name), "{name}");
        }
        // That is no place in a group.
        assert_eq!(
            build(&["SLURM_JOB_ID=77"], &start, None)["SLURM_JOB_ID"],
            "77"
        );
        start.user_env = map(&["SLURM_PROCID=9", "RANK=7"]);
        let all = build(&outer, &start, None);
        let given = ["SLURM_PROCID", "RANK", "KOLO_RANK"].map(|name| all[name].as_str());
        assert_eq!(given, ["9", "7", "0"]);
    }

    #[test]
    fn variables_that_are_not_unicode_are_inherited() {
        let start = testing::start(1);
        let odd = OsString::from_vec(vec![b'X', 0xff]);
        let place = Place {
            cluster: ClusterId(5),
            ip: "::1".parse().unwrap(),
            devices: None,
        };
        let all = worker([(odd.clone(), odd.clone())], &start, &start.slots[0], place);
        assert!(all.contains(&(odd.clone(), odd)));
    }

    #[test]
    fn what_no_process_can_have_is_refused() {
        for (name, value) in [
            ("", "x"),
            ("a=b", "x"),
            ("a\0b", "x"),
            ("a", "x\0"),
            ("KOLO_A", "\0"),
        ] {
            for place in 0..3 {
                let mut start = testing::start(1);
                let bad = BTreeMap::from([(name.to_owned(), value.to_owned())]);
                match place {
                    0 => start.env = bad,
                    1 => start.slots[0].env = bad,
                    _ => start.user_env = bad,
                }
                let refusal = check(&start).unwrap_err();
                assert_eq!(refusal.kind, RefusalKind::Invalid);
                assert!(!refusal.message.contains('\0'), "{}", refusal.message);
            }
        }
        let mut start = testing::start(1);
        start.env = map(&["KOLO_RANK=1", "fine=x"]);
        assert_eq!(check(&start), Ok(()));
    }
}
