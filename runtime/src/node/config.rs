//! Settings of a node.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use kolo_core::node::logs::LogLimits;
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
    /// GPUs. Default: what `CUDA_VISIBLE_DEVICES` shows, or else as many as there are `/dev/nvidia*`. A number declares
    /// the first of what the variable shows; where it is not set, devices `0` to `n-1`, whether they exist or not.
    pub gpus: Option<u32>,
    /// Everything else, by name.
    pub custom: BTreeMap<String, f64>,
}

/// Names that no custom resource may have.
const BUILT_IN: [&str; 2] = ["cpus", "gpus"];

/// What a node has.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Found {
    /// The amounts.
    pub(crate) resources: Resources,
    /// The ids of the GPUs, as `CUDA_VISIBLE_DEVICES` takes them.
    pub(super) devices: Vec<String>,
    /// Whether there are GPUs, declared or not, which a job that holds none could see.
    pub(super) has_gpus: bool,
}

impl NodeResources {
    /// What is declared, and what is found where nothing is.
    ///
    /// # Errors
    ///
    /// [`ResourcesError`] if an amount is no amount or a name no name, or if there are fewer GPUs than are declared.
    pub(crate) fn find(&self) -> Result<Found, ResourcesError> {
        let cpus = match self.cpus {
            Some(cpus) => Milli::from_f64("cpus", cpus)?,
            None => Milli::units(
                std::thread::available_parallelism().map_or(1, |count| count.get() as u64),
            ),
        };
        let gpus = Gpus::find();
        let devices = gpus.offer(self.gpus)?;
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
        Ok(Found {
            resources,
            has_gpus: !devices.is_empty() || gpus.are_there(),
            devices,
        })
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
    /// More GPUs than this process may use. Declare fewer, or set the variable otherwise.
    #[error(
        "gpus is {declared}, and CUDA_VISIBLE_DEVICES (`{}`) shows {shown}; declare at most {shown}, or change the variable",
        .visible.escape_debug()
    )]
    FewerGpus {
        /// What was declared.
        declared: u32,
        /// What the variable says.
        visible: String,
        /// How many devices that are.
        shown: usize,
    },
    /// A name that a custom resource can't have.
    #[error(
        "`{}` is no name for a resource; allowed are 1 to 64 letters, digits and `-_./`, other than cpus and gpus",
        .0.escape_debug()
    )]
    Name(String),
}

/// The GPUs that this process may use.
#[derive(Debug)]
struct Gpus {
    /// `CUDA_VISIBLE_DEVICES`, if it is set.
    visible: Option<String>,
    /// How many files of devices there are.
    files: usize,
}

impl Gpus {
    fn find() -> Self {
        let files = std::fs::read_dir("/dev").map_or(0, |files| {
            files
                .flatten()
                .filter(|file| file.file_name().to_str().is_some_and(is_device))
                .count()
        });
        Self {
            visible: std::env::var_os("CUDA_VISIBLE_DEVICES")
                .map(|list| list.to_string_lossy().into_owned()),
            files,
        }
    }

    /// Whether a process could see any, or is kept from it by the variable alone.
    fn are_there(&self) -> bool {
        self.visible.is_some() || self.files > 0
    }

    /// The ids of those that a node offers.
    fn offer(&self, declared: Option<u32>) -> Result<Vec<String>, ResourcesError> {
        let numbers = |count| (0..count).map(|id| id.to_string()).collect();
        if let Some(count) = declared.filter(|count| *count > MAX_GPUS) {
            return Err(ResourcesError::Gpus(count));
        }
        match (&self.visible, declared) {
            (Some(visible), declared) => {
                let mut devices = visible_devices(visible);
                let shown = devices.len();
                match declared {
                    Some(count) if count as usize > shown => Err(ResourcesError::FewerGpus {
                        declared: count,
                        visible: visible.clone(),
                        shown,
                    }),
                    declared => {
                        devices.truncate(declared.map_or(shown, |count| count as usize));
                        Ok(devices)
                    }
                }
            }
            // CUDA numbers what it finds from 0, whatever the files are called.
            (None, None) => Ok(numbers(self.files as u32)),
            (None, Some(count)) => {
                // Files are not the whole truth: other makes of GPU have other names.
                if (1..count as usize).contains(&self.files) {
                    tracing::warn!(
                        declared = count,
                        found = self.files,
                        "fewer GPUs are here than are declared: jobs may be given some that do not exist"
                    );
                }
                Ok(numbers(count))
            }
        }
    }
}

/// The devices that CUDA shows for a list: numbers, or ids that begin with `GPU-` or `MIG-`, of the kind of the first. The list
/// ends at the first entry that is none of these. What stands there twice is one device.
fn visible_devices(list: &str) -> Vec<String> {
    let mut devices: Vec<String> = Vec::new();
    let kind = |device: &str| {
        device
            .get(..4)
            .filter(|start| start.ends_with('-'))
            .map(str::to_owned)
    };
    for device in list.split(',').map_while(|entry| device(entry.trim())) {
        if devices
            .first()
            .is_some_and(|first| kind(first) != kind(&device))
        {
            break;
        }
        if !devices
            .iter()
            .any(|known| known.eq_ignore_ascii_case(&device))
        {
            devices.push(device);
        }
    }
    devices
}

/// A device as the list has it. A number is read as C does: what follows its digits does not count.
fn device(entry: &str) -> Option<String> {
    if entry.starts_with("GPU-") || entry.starts_with("MIG-") {
        return Some(entry.to_owned());
    }
    let number = entry.strip_prefix('+').unwrap_or(entry);
    let digits = number.bytes().take_while(u8::is_ascii_digit).count();
    let number: u32 = number[..digits].parse().ok()?;
    (number < MAX_GPUS).then(|| number.to_string())
}

/// By what GPUs are counted, if `CUDA_VISIBLE_DEVICES` is this: for people.
pub(crate) fn whence_gpus(visible: Option<OsString>) -> String {
    match visible {
        Some(devices) => format!("CUDA_VISIBLE_DEVICES is `{}`", devices.display()),
        None => "of /dev/nvidia*".to_owned(),
    }
}

/// `nvidia3` is a device; `nvidiactl` is none.
fn is_device(name: &str) -> bool {
    name.strip_prefix("nvidia").is_some_and(|number| {
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

/// Settings of a [`Node`](super::Node), one field for each. Start from [`NodeConfig::new`].
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
    /// Whether the workers of a job that asks for no GPU may use all that the daemon may use: for a node that is there for
    /// one job. Default: no; they see none.
    pub gpus_for_all: bool,
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
            gpus_for_all: false,
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

    /// The folders that its identity and its programs are in.
    pub(super) fn state_dirs(&self) -> Vec<PathBuf> {
        let inside = [&self.identity_dir, &self.programs.cache];
        let parents = inside.into_iter().flatten().filter_map(|dir| dir.parent());
        let mut dirs: Vec<PathBuf> = parents.map(std::path::Path::to_path_buf).collect();
        dirs.dedup();
        dirs
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
            gpus: Some(0),
            custom: BTreeMap::from([(name.to_owned(), amount)]),
        }
    }

    #[test]
    fn declared_resources_are_taken_as_they_are() {
        let mut given = custom("fpga", 0.5);
        // Two may be more than this machine shows.
        given.gpus = Some(0);
        let found = given.find().unwrap();
        assert_eq!(found.resources.to_string(), "1.5 cpus, 0.5 fpga");
        assert!(found.devices.is_empty());
    }

    #[test]
    fn what_is_not_declared_is_found() {
        let found = NodeResources::default().find().unwrap();
        assert!(found.resources.cpus >= Milli::units(1));
        assert_eq!(found.resources.gpus as usize, found.devices.len());
        assert!(found.devices.is_empty() || found.has_gpus);
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
        assert!(is_device("nvidia3"));
        for other in ["nvidia", "nvidiactl", "nvidia-uvm", "nvidia3a", "tty0"] {
            assert!(!is_device(other), "{other}");
        }
        let cases: [(&str, &[&str]); 23] = [
            ("0,0", &["0"]),
            ("4,5,6", &["4", "5", "6"]),
            ("2, 3", &["2", "3"]),
            (" 1 ,\t0 ", &["1", "0"]),
            ("1,0,1,2", &["1", "0", "2"]),
            ("01,1,+1", &["1"]),
            ("1gpu2,2ampere", &["1", "2"]),
            ("0,-1,1", &["0"]),
            ("0,,1", &["0"]),
            ("0,x,1", &["0"]),
            ("0,NoDevFiles,1", &["0"]),
            ("0,GPU-1", &["0"]),
            ("0,99999999999999999999", &["0"]),
            ("GPU-1,-1,4", &["GPU-1"]),
            ("GPU-8f,GPU-8F,GPU-2", &["GPU-8f", "GPU-2"]),
            ("GPU-1,MIG-2", &["GPU-1"]),
            ("MIG-GPU-1/2/0,MIG-3", &["MIG-GPU-1/2/0", "MIG-3"]),
            ("", &[]),
            ("  ", &[]),
            ("-1", &[]),
            ("NoDevFiles", &[]),
            ("none,0", &[]),
            ("é", &[]),
        ];
        for (list, devices) in cases {
            assert_eq!(visible_devices(list), devices, "{list:?}");
        }
    }

    /// What the variable shows, files of devices, what is declared, and what is offered.
    type Offer = (
        Option<&'static str>,
        usize,
        Option<u32>,
        &'static [&'static str],
    );

    #[test]
    fn a_node_offers_what_is_visible_and_of_that_as_many_as_are_declared() {
        let gpus = |visible: Option<&str>, files| Gpus {
            visible: visible.map(str::to_owned),
            files,
        };
        let cases: [Offer; 11] = [
            (None, 0, None, &[]),
            (None, 2, None, &["0", "1"]),
            (None, 2, Some(1), &["0"]),
            (None, 2, Some(0), &[]),
            // Whether they exist or not.
            (None, 0, Some(2), &["0", "1"]),
            (None, 1, Some(2), &["0", "1"]),
            (Some("4,5,6"), 8, None, &["4", "5", "6"]),
            (Some("4,5,6"), 8, Some(2), &["4", "5"]),
            (Some("0,0"), 1, None, &["0"]),
            (Some("0,0"), 1, Some(1), &["0"]),
            (Some(""), 8, None, &[]),
        ];
        for (visible, files, declared, devices) in cases {
            let offered = gpus(visible, files).offer(declared);
            assert_eq!(
                offered.unwrap(),
                devices,
                "{visible:?} {files} {declared:?}"
            );
        }
        for (visible, declared) in [("0,1", 3), ("0,0", 2), ("", 1), ("-1", 1)] {
            let error = gpus(Some(visible), 8).offer(Some(declared)).unwrap_err();
            let shown = visible_devices(visible).len();
            assert_eq!(
                error.to_string(),
                format!(
                    "gpus is {declared}, and CUDA_VISIBLE_DEVICES (`{visible}`) shows {shown}; declare at most {shown}, or \
                     change the variable"
                )
            );
        }
        assert!(!gpus(None, 0).are_there());
        // Without the variable a worker would see what it hides.
        assert!(gpus(Some(""), 0).are_there() && gpus(None, 1).are_there());
    }
}
