//! Settings of a node.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use kolo_actors::node::logs::LogLimits;
use kolo_transport::wire::{Milli, ResourceError, Resources};
use kolo_transport::{Credentials, JoinToken, TransportRuntime};

use super::programs::ProgramSource;

/// How a node proves who it is.
#[derive(Debug, Clone)]
pub enum NodeCredentials {
    /// It has joined before.
    Have(Credentials),
    /// It joins with this token. [`Node::credentials`](super::Node::credentials) gives what to keep for
    /// the next time.
    Token(JoinToken),
}

impl From<Credentials> for NodeCredentials {
    fn from(credentials: Credentials) -> Self {
        Self::Have(credentials)
    }
}

impl From<JoinToken> for NodeCredentials {
    fn from(token: JoinToken) -> Self {
        Self::Token(token)
    }
}

/// What a node offers to jobs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeResources {
    /// Logical CPUs. Default: what this process may use.
    pub cpus: Option<f64>,
    /// GPUs. Default: what `CUDA_VISIBLE_DEVICES` names, or else as many as there are `/dev/nvidia*`. A number
    /// declares devices `0` to `n-1`, whether they exist or not.
    pub gpus: Option<u32>,
    /// Everything else, by name.
    pub custom: BTreeMap<String, f64>,
}

/// Names that no custom resource may have.
const BUILT_IN: [&str; 2] = ["cpus", "gpus"];

impl NodeResources {
    /// What is declared, and what is found where nothing is: the amounts, and the ids of the GPUs.
    ///
    /// # Errors
    ///
    /// [`ResourcesError`] if an amount is no amount or a name no name.
    pub fn find(&self) -> Result<(Resources, Vec<String>), ResourcesError> {
        let cpus = match self.cpus {
            Some(cpus) => Milli::from_f64("cpus", cpus)?,
            None => Milli::units(
                std::thread::available_parallelism().map_or(1, |count| count.get() as u64),
            ),
        };
        let devices = match self.gpus {
            Some(count) if count > MAX_GPUS => return Err(ResourcesError::Gpus(count)),
            Some(count) => (0..count).map(|id| id.to_string()).collect(),
            None => find_gpus(),
        };
        let mut custom = BTreeMap::new();
        for (name, amount) in &self.custom {
            let fits = !name.is_empty()
                && name.len() <= 64
                && name
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c));
            if !fits || BUILT_IN.contains(&name.as_str()) {
                return Err(ResourcesError::Name(name.clone()));
            }
            custom.insert(name.clone(), Milli::from_f64(name, *amount)?);
        }
        let resources = Resources {
            cpus,
            gpus: devices.len() as u32,
            custom,
        };
        Ok((resources, devices))
    }
}

/// The most GPUs that a node declares.
const MAX_GPUS: u32 = 4096;

/// Resources that a node can't have.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ResourcesError {
    /// An amount that is none.
    #[error(transparent)]
    Amount(#[from] ResourceError),
    /// Too many GPUs.
    #[error("gpus is {0}; allowed is 0 to {MAX_GPUS}")]
    Gpus(u32),
    /// A name that a custom resource can't have.
    #[error(
        "`{}` is no name for a resource; allowed are 1 to 64 letters, digits and `-_./`, other than cpus and gpus",
        .0.escape_debug()
    )]
    Name(String),
}

/// The GPUs that this process may use.
fn find_gpus() -> Vec<String> {
    if let Ok(visible) = std::env::var("CUDA_VISIBLE_DEVICES") {
        return visible_devices(&visible);
    }
    let Ok(files) = std::fs::read_dir("/dev") else {
        return Vec::new();
    };
    let mut numbers: Vec<u32> = files
        .filter_map(|file| device_number(file.ok()?.file_name().to_str()?))
        .collect();
    numbers.sort_unstable();
    numbers.iter().map(ToString::to_string).collect()
}

/// CUDA ends the list at the first entry that is no device.
fn visible_devices(list: &str) -> Vec<String> {
    list.split(',')
        .map(str::trim)
        .take_while(|id| !id.is_empty() && !id.starts_with('-') && *id != "NoDevFiles")
        .map(str::to_owned)
        .collect()
}

/// `nvidia3` is device 3; `nvidiactl` is none.
fn device_number(name: &str) -> Option<u32> {
    let digits = name.strip_prefix("nvidia")?;
    digits
        .bytes()
        .all(|byte| byte.is_ascii_digit())
        .then(|| digits.parse().ok())?
}

/// Settings of a [`Node`](super::Node). Start from [`NodeConfig::new`].
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// Where the head listens.
    pub head: SocketAddr,
    /// Who the node is.
    pub credentials: NodeCredentials,
    /// The folder that holds its identity, where it is stored as soon as the node has joined, and renewed certificates
    /// after that. Default: none; they are kept in memory.
    pub identity_dir: Option<PathBuf>,
    /// Its hostname. Default: what the operating system says. Nodes may have the same one.
    pub hostname: Option<String>,
    /// Where it listens for drivers. Default: `127.0.0.1:0`, which only processes of this host reach.
    pub listen: SocketAddr,
    /// The address that it tells others. Default: where it listens; if that is all interfaces, the one that
    /// faces the head.
    pub advertise: Option<SocketAddr>,
    /// What it offers. Default: what is found.
    pub resources: NodeResources,
    /// Where programs come from and go to. Default: memory.
    pub programs: ProgramSource,
    /// The program that wardens are started from. Default: this process's own, whose `main` must begin with
    /// [`kolo_process::run_if_warden`].
    pub warden_exe: Option<PathBuf>,
    /// How much output of each worker is kept.
    pub logs: LogLimits,
    /// How much memory the output of all jobs may take, in bytes. That of jobs which ended makes room first, the oldest first;
    /// after that, whichever job has most loses its oldest lines. Default: 256 MiB.
    pub output_memory: usize,
    /// How long to try to reach the head at the start. Default: 30 s.
    pub join_timeout: Duration,
    /// When a job's driver and the head have both been gone for so long, the node ends the job's workers; as long
    /// as one of them is there they live on. Default: 60 s.
    pub orphan_timeout: Duration,
    /// How long [`Node::stop`](super::Node::stop) waits for jobs to end before it kills them. Default: 60 s.
    pub stop_timeout: Duration,
    /// The runtime for QUIC, to share it with others of this process. Default: one of its own with one
    /// thread, which has the shortest round trips.
    pub transport: Option<TransportRuntime>,
    /// After how long without a packet a peer counts as gone. Default: 3 s.
    pub idle_timeout: Duration,
    /// How long a connection may be silent before a packet is sent. Default: 500 ms.
    pub keep_alive: Duration,
}

impl NodeConfig {
    /// The defaults, for a node of the head at this address.
    pub fn new(head: SocketAddr, credentials: impl Into<NodeCredentials>) -> Self {
        Self {
            head,
            credentials: credentials.into(),
            identity_dir: None,
            hostname: None,
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            advertise: None,
            resources: NodeResources::default(),
            programs: ProgramSource::default(),
            warden_exe: None,
            logs: LogLimits::default(),
            output_memory: 256 << 20,
            join_timeout: Duration::from_secs(30),
            orphan_timeout: Duration::from_secs(60),
            stop_timeout: Duration::from_secs(60),
            transport: None,
            idle_timeout: Duration::from_secs(3),
            keep_alive: Duration::from_millis(500),
        }
    }
}

/// The hostname that the operating system knows.
pub(super) fn hostname() -> String {
    let name = rustix::system::uname();
    let name = name.nodename().to_string_lossy();
    if name.is_empty() {
        "localhost".to_owned()
    } else {
        name.into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn custom(name: &str, amount: f64) -> NodeResources {
        NodeResources {
            cpus: Some(1.5),
            gpus: Some(2),
            custom: BTreeMap::from([(name.to_owned(), amount)]),
        }
    }

    #[test]
    fn declared_resources_are_taken_as_they_are() {
        let (resources, devices) = custom("fpga", 0.5).find().unwrap();
        assert_eq!(resources.to_string(), "1.5 cpus, 2 gpus, 0.5 fpga");
        assert_eq!(devices, ["0", "1"]);
    }

    #[test]
    fn what_is_not_declared_is_found() {
        let (resources, devices) = NodeResources::default().find().unwrap();
        assert!(resources.cpus >= Milli::units(1));
        assert_eq!(resources.gpus as usize, devices.len());
    }

    #[test]
    fn wrong_amounts_and_names_are_refused() {
        for (name, amount) in [("fpga", f64::NAN), ("fpga", -1.0), ("fpga", 1e9)] {
            let error = custom(name, amount).find().unwrap_err().to_string();
            assert!(error.starts_with("fpga is "), "{error}");
        }
        for name in ["", "a b", "cpus", "gpus", "a=b", "a\n"] {
            let error = custom(name, 1.0).find().unwrap_err();
            assert_eq!(error, ResourcesError::Name(name.to_owned()));
        }
        let mut many = custom("fpga", 1.0);
        many.gpus = Some(5000);
        assert_eq!(many.find().unwrap_err(), ResourcesError::Gpus(5000));
        many.cpus = Some(f64::INFINITY);
        assert!(
            many.find()
                .unwrap_err()
                .to_string()
                .starts_with("cpus is inf")
        );
    }

    #[test]
    fn devices_are_named_as_cuda_names_them() {
        assert_eq!(device_number("nvidia3"), Some(3));
        for other in ["nvidia", "nvidiactl", "nvidia-uvm", "nvidia3a", "tty0"] {
            assert_eq!(device_number(other), None);
        }
        assert_eq!(visible_devices("2, 3"), ["2", "3"]);
        assert_eq!(visible_devices("GPU-1,-1,4"), ["GPU-1"]);
        assert!(visible_devices("").is_empty());
        assert!(visible_devices("-1").is_empty());
    }
}
