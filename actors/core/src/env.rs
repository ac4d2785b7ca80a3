//! The environment of a worker: Horovod's variables, torch's, and kolo's own.
//!
//! Unmodified scripts of both families find what their launcher would have set. What a node adds or
//! leaves out is in [`defaults`]; the order of precedence is the node's. Which names kolo sets is asked of the functions
//! that set them: see [`assigned`].

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::LazyLock;

use kolo_wire::Member;
use kolo_wire::ids::{CrossRank, Generation, Incarnation, JobId, LocalRank, NodeId, Rank, Slot};

use crate::interfaces::Network;

/// The variable that says how long Horovod waits for an answer of another worker, in seconds. 30 if it is not there.
pub const GLOO_TIMEOUT: &str = "HOROVOD_GLOO_TIMEOUT_SECONDS";

/// Variables by name.
pub type Env = BTreeMap<String, String>;

/// Prefix of kolo's own variables, which users can't set.
pub const RESERVED_PREFIX: &str = "KOLO_";

/// The IP address under which other nodes reach this one, where a worker's data plane listens.
pub const NODE_IP: &str = "KOLO_NODE_IP";

/// All addresses on which a worker's data plane listens, each with its interface: `10.0.0.1%eth0,10.1.0.1%eth1`.
pub const LISTEN: &str = "KOLO_LISTEN";

/// The smallest MTU of the interfaces that connect the job's nodes, in bytes.
pub const MTU: &str = "KOLO_MTU";

/// The path of the file in which a worker leaves its error, as torch's `@record` writes it. A node names one for each worker.
pub const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";

/// What the members of a job have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobEnv {
    /// The job.
    pub job: JobId,
    /// The generation that is being formed.
    pub generation: Generation,
    /// Members in all.
    pub world_size: u32,
    /// Number of nodes.
    pub nodes: u32,
    /// Address of the node of rank 0.
    pub master: IpAddr,
    /// A port that was free there.
    pub master_port: u16,
    /// The job's plain HTTP rendezvous, if one is open.
    pub rendezvous: Option<SocketAddr>,
    /// Whether all nodes are reached over the loopback, which is then the interface to use.
    pub loopback: bool,
    /// How often the group was restarted.
    pub restarts: u32,
    /// How often it may be.
    pub max_restarts: u32,
    /// The names of nodes for Horovod; see [`horovod_hostnames`]. A node that is not in here has its own hostname.
    pub hostnames: BTreeMap<NodeId, String>,
}

fn set(env: &mut Env, name: &str, value: impl ToString) {
    env.insert(name.to_owned(), value.to_string());
}

/// The variables that are the same for every worker of a job.
#[must_use]
pub fn job(job: &JobEnv) -> Env {
    let mut env = group(job);
    env.extend(settings(job));
    env
}

/// Sizes and addresses.
fn group(job: &JobEnv) -> Env {
    let mut env = Env::new();
    let size = job.world_size;
    set(&mut env, "HOROVOD_SIZE", size);
    if let Some(address) = job.rendezvous {
        set(&mut env, "HOROVOD_GLOO_RENDEZVOUS_ADDR", address.ip());
        set(&mut env, "HOROVOD_GLOO_RENDEZVOUS_PORT", address.port());
    }
    set(&mut env, "WORLD_SIZE", size);
    set(&mut env, "ROLE_WORLD_SIZE", size);
    set(&mut env, "GROUP_WORLD_SIZE", job.nodes);
    set(&mut env, "MASTER_ADDR", job.master);
    set(&mut env, "MASTER_PORT", job.master_port);
    env
}

/// How the frameworks are to work.
fn settings(job: &JobEnv) -> Env {
    let mut env = Env::new();
    set(&mut env, "HOROVOD_CONTROLLER", "gloo");
    set(&mut env, "HOROVOD_CPU_OPERATIONS", "gloo");
    if job.loopback {
        set(&mut env, "HOROVOD_GLOO_IFACE", "lo");
        set(&mut env, "NCCL_SOCKET_IFNAME", "lo");
    }
    set(&mut env, "ROLE_NAME", "default");
    set(&mut env, "TORCHELASTIC_RESTART_COUNT", job.restarts);
    set(&mut env, "TORCHELASTIC_MAX_RESTARTS", job.max_restarts);
    set(&mut env, "TORCHELASTIC_RUN_ID", job.job);
    set(
        &mut env,
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    );
    // "True" would make torch connect to a store that nobody serves.
    set(&mut env, "TORCHELASTIC_USE_AGENT_STORE", "False");
    env
}

/// The variables of one worker. `group_rank` is the number of its node in the job.
#[must_use]
pub fn member(job: &JobEnv, member: &Member, group_rank: u32) -> Env {
    let mut env = Env::new();
    let hostname = job.hostnames.get(&member.node);
    set(
        &mut env,
        "HOROVOD_HOSTNAME",
        hostname.unwrap_or(&member.hostname),
    );
    set(&mut env, "HOROVOD_RANK", member.rank);
    set(&mut env, "HOROVOD_LOCAL_RANK", member.local_rank);
    set(&mut env, "HOROVOD_LOCAL_SIZE", member.local_size);
    set(&mut env, "HOROVOD_CROSS_RANK", member.cross_rank);
    set(&mut env, "HOROVOD_CROSS_SIZE", member.cross_size);

    set(&mut env, "RANK", member.rank);
    set(&mut env, "ROLE_RANK", member.rank);
    set(&mut env, "LOCAL_RANK", member.local_rank);
    set(&mut env, "LOCAL_WORLD_SIZE", member.local_size);
    set(&mut env, "GROUP_RANK", group_rank);

    env.extend(identity(job.job, job.generation, job.world_size, member));
    env
}

/// The variables of a worker of Horovod that has a rendezvous of its own, and may be in several groups.
#[must_use]
pub fn door(hostname: &str, address: SocketAddr) -> Env {
    let mut env = Env::new();
    set(&mut env, "HOROVOD_ELASTIC", 1);
    set(&mut env, "HOROVOD_HOSTNAME", hostname);
    set(&mut env, "HOROVOD_GLOO_RENDEZVOUS_ADDR", address.ip());
    set(&mut env, "HOROVOD_GLOO_RENDEZVOUS_PORT", address.port());
    env
}

/// What workers on a node are told of the network: which interface to use, if there is one for all, and where kolo's own
/// data plane listens.
#[must_use]
pub fn network(network: &Network, node: NodeId) -> Env {
    let mut env = Env::new();
    if let Some(name) = network.interface(node) {
        // NCCL takes a name for the beginning of one, unless it is told otherwise.
        let longer = network.report.rows.iter().any(|row| {
            row.node == node && row.interface != name && row.interface.starts_with(name)
        });
        env.extend(interface(name, longer));
    }
    let listen = network.listen(node);
    if let Some(first) = listen.first() {
        set(&mut env, NODE_IP, first.ip);
        let all: Vec<String> = listen.iter().map(ToString::to_string).collect();
        set(&mut env, LISTEN, all.join(","));
        let mtu = network
            .report
            .rows
            .iter()
            .filter(|row| row.chosen)
            .map(|row| row.mtu);
        if let Some(mtu) = mtu.min() {
            set(&mut env, MTU, mtu);
        }
    }
    env
}

/// The interface to use. `exact`: other names begin with this one.
fn interface(name: &str, exact: bool) -> Env {
    let mut env = Env::new();
    set(&mut env, "HOROVOD_GLOO_IFACE", name);
    set(&mut env, "GLOO_SOCKET_IFNAME", name);
    let exact = if exact { "=" } else { "" };
    set(&mut env, "NCCL_SOCKET_IFNAME", format!("{exact}{name}"));
    env
}

/// The GPUs that a worker may use, none if the list is empty.
#[must_use]
pub fn devices(ids: &[String]) -> Env {
    Env::from([("CUDA_VISIBLE_DEVICES".to_owned(), ids.join(","))])
}

/// The `HOROVOD_HOSTNAME` of workers on each node, which names the node's scope in the rendezvous: its hostname. If several nodes
/// have one hostname, all but the first one by slots have their id behind it. A hostname that can't stand in the path of a
/// request is replaced by the id.
#[must_use]
pub fn horovod_hostnames<'a>(
    members: impl IntoIterator<Item = &'a Member>,
) -> BTreeMap<NodeId, String> {
    let mut members: Vec<&Member> = members.into_iter().collect();
    members.sort_by_key(|member| member.slot);
    let (mut names, mut taken) = (BTreeMap::new(), BTreeSet::new());
    for member in members {
        if names.contains_key(&member.node) {
            continue;
        }
        let mut name = member.hostname.clone();
        if !name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte))
        {
            name = member.node.to_string();
        }
        while !taken.insert(name.clone()) {
            name = format!("{name}-{}", member.node);
        }
        names.insert(member.node, name);
    }
    names
}

/// kolo's own variables, which nothing overrides.
#[must_use]
pub fn identity(job: JobId, generation: Generation, world_size: u32, member: &Member) -> Env {
    let mut env = Env::new();
    set(&mut env, "KOLO_JOB", job);
    set(&mut env, "KOLO_GENERATION", generation);
    set(&mut env, "KOLO_NODE", member.node);
    set(&mut env, "KOLO_HOSTNAME", &member.hostname);
    set(&mut env, "KOLO_SLOT", member.slot);
    set(&mut env, "KOLO_RANK", member.rank);
    set(&mut env, "KOLO_SIZE", world_size);
    set(&mut env, "KOLO_LOCAL_RANK", member.local_rank);
    set(&mut env, "KOLO_LOCAL_SIZE", member.local_size);
    set(&mut env, "KOLO_CROSS_RANK", member.cross_rank);
    set(&mut env, "KOLO_CROSS_SIZE", member.cross_size);
    env
}

/// Variables that a node sets only where neither its own environment nor the user has them, as torchrun does.
#[must_use]
pub fn defaults(local_size: u32) -> &'static [(&'static str, &'static str)] {
    const ALL: &[(&str, &str)] = &[
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("PYTHONUNBUFFERED", "1"),
        ("OMP_NUM_THREADS", "1"),
    ];
    // A worker that has its node to itself may use all its CPUs.
    if local_size > 1 {
        ALL
    } else {
        &ALL[..ALL.len() - 1]
    }
}

/// Variables of kolo's own that users may give: settings of the worker's side.
const SETTINGS: [&str; 2] = ["KOLO_LANE", "KOLO_RINGS"];

/// Whether users can't give a variable of this name.
#[must_use]
pub fn is_reserved(name: &str) -> bool {
    name.starts_with(RESERVED_PREFIX) && !SETTINGS.contains(&name)
}

/// What a variable that kolo sets for workers is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Assigned {
    /// Where a worker stands in its group: ranks, sizes and addresses.
    Place,
    /// The GPUs that it was given.
    Devices,
    /// How a framework is to work.
    Setting,
}

/// What kolo sets a variable of this name for, if it does.
#[must_use]
pub fn assigned(name: &str) -> Option<Assigned> {
    /// All names, from the functions that set them; what they are told here is of no matter but that nothing is left out.
    static NAMES: LazyLock<BTreeMap<String, Assigned>> = LazyLock::new(|| {
        let everything = JobEnv {
            job: JobId(0),
            generation: Generation(0),
            world_size: 1,
            nodes: 1,
            master: IpAddr::V4(Ipv4Addr::LOCALHOST),
            master_port: 1,
            rendezvous: Some((Ipv4Addr::LOCALHOST, 1).into()),
            loopback: true,
            restarts: 0,
            max_restarts: 0,
            hostnames: BTreeMap::new(),
        };
        let anybody = Member {
            rank: Rank(0),
            local_rank: LocalRank(0),
            local_size: 1,
            cross_rank: CrossRank(0),
            cross_size: 1,
            slot: Slot(0),
            node: NodeId(0),
            hostname: String::new(),
            address: None,
            incarnation: Incarnation::FIRST,
        };
        let of = |env: Env, what| env.into_keys().map(move |name| (name, what));
        of(settings(&everything), Assigned::Setting)
            .chain(of(interface("lo", false), Assigned::Setting))
            .chain(of(devices(&[]), Assigned::Devices))
            .chain(of(group(&everything), Assigned::Place))
            .chain([(ERROR_FILE.to_owned(), Assigned::Place)])
            .chain(of(member(&everything, &anybody, 0), Assigned::Place))
            .collect()
    });
    NAMES.get(name).copied()
}

/// What other launchers tell their processes of the place in a group, which is not the group of a worker that inherits it. A
/// `*` ends the beginning of a name. Settings such as `OMPI_MCA_btl` and `SLURM_JOB_ID` mislead nobody.
const OF_OTHER_LAUNCHERS: [&str; 39] = [
    // Open MPI and PMIx
    "OMPI_APP_CTX_NUM_PROCS",
    "OMPI_COMM_WORLD_*",
    "OMPI_FIRST_RANKS",
    "OMPI_MCA_ess*",
    "OMPI_MCA_orte_*",
    "OMPI_NUM_APP_CTX",
    "OMPI_UNIVERSE_SIZE",
    "PMIX_*",
    "PRTE_*",
    // MPICH, Intel MPI, MVAPICH
    "HYDI_CONTROL_FD",
    "MPISPAWN_*",
    "MPI_LOCALNRANKS",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_*",
    "PMI_*",
    // Slurm: a batch script is task 0 of its first step
    "SLURM_GTIDS",
    "SLURM_LAUNCH_NODE_IPADDR",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NPROCS",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_SRUN_COMM_*",
    "SLURM_STEPID",
    "SLURM_STEP_*",
    "SLURM_TASK_PID",
    // Cray, Flux, LSF
    "ALPS_APP_*",
    "FLUX_TASK_*",
    "JSM_NAMESPACE_*",
    "LSF_PM_*",
    "PALS_*",
    // torchrun, Horovod and what is made with them
    "CROSS_RANK",
    "CROSS_SIZE",
    "HOROVOD_ELASTIC",
    "HOROVOD_GLOO_RENDEZVOUS_*",
    "LOCAL_SIZE",
    "NODE_RANK",
    "NODE_SIZE",
    "TORCHELASTIC_*",
];

/// Whether a variable of an environment tells the place in a group. A worker does not inherit it: it has a place of its own.
#[must_use]
pub fn tells_a_place(name: &str) -> bool {
    assigned(name) == Some(Assigned::Place)
        || OF_OTHER_LAUNCHERS
            .iter()
            .any(|known| match known.strip_suffix('*') {
                Some(beginning) => name.starts_with(beginning),
                None => name == *known,
            })
}

/// What a service manager tells a daemon alone: with these a worker could speak for the daemon, or read its secrets.
const OF_A_SERVICE: [&str; 8] = [
    "CREDENTIALS_DIRECTORY",
    "LISTEN_FDNAMES",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_PIDFDID",
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
];

/// Whether a variable of an environment is a service manager's word to whoever has that environment. A worker does not
/// inherit it.
#[must_use]
pub fn is_of_a_service(name: &str) -> bool {
    OF_A_SERVICE.contains(&name)
}

/// Why a variable of the launcher's environment is not passed on to workers, if it is not. What kolo sets is not overridden
/// by what happens to be there; `by_name` means that somebody has written the name, and not a pattern.
#[must_use]
pub fn not_passed(name: &str, by_name: bool) -> Option<&'static str> {
    if is_reserved(name) {
        return Some("names that begin with KOLO_ are kolo's own");
    }
    match assigned(name) {
        Some(Assigned::Place) => Some("kolo sets it for each worker; --env sets it all the same"),
        Some(Assigned::Devices) => {
            Some("kolo sets it on each host; --gpus-per-worker asks for GPUs")
        }
        Some(Assigned::Setting) if !by_name => Some("kolo sets it, and a pattern does not mean it"),
        None if !by_name && tells_a_place(name) => {
            Some("it tells a place in the group of another launcher")
        }
        None if !by_name && is_of_a_service(name) => {
            Some("a service manager has set it for this process alone")
        }
        Some(Assigned::Setting) | None => None,
    }
}

/// What is wrong with a variable that a user gives, if anything.
#[must_use]
pub fn problem(name: &str, value: &str) -> Option<&'static str> {
    if name.is_empty() {
        Some("its name is empty")
    } else if name.contains('=') {
        Some("its name contains `=`")
    } else if name.contains('\0') {
        Some("its name contains a NUL byte")
    } else if value.contains('\0') {
        Some("its value contains a NUL byte")
    } else if is_reserved(name) {
        Some("names that begin with KOLO_ are kolo's own")
    } else {
        None
    }
}
