//! The blueprint of a group of workers.

use std::time::Duration;

use crate::ranks::MAX_WORLD_SIZE;

/// The role of workers that were given none.
pub const DEFAULT_ROLE: &str = "default";

/// The blueprint of the workers of one role that one agent runs. Agents of one group may run different numbers of workers.
///
/// ```
/// use kolo_core::agent::{LocalRendezvous, SpecError, WorkerSpec};
///
/// let group = LocalRendezvous::new(1..=1)?;
/// let mut spec = WorkerSpec::new("/usr/bin/python3", 4, group.handler());
/// spec.arguments = vec!["train.py".to_owned()];
/// assert_eq!((spec.role.as_str(), spec.max_restarts), ("default", 100));
/// assert_eq!(spec.check(), Ok(()));
///
/// spec.local_world_size = 0;
/// assert!(matches!(spec.check(), Err(SpecError::Workers { given: 0 })));
/// # Ok::<(), SpecError>(())
/// ```
#[derive(Debug, Clone)]
pub struct WorkerSpec<H> {
    /// The role of the workers. Metrics have it in their names. `default` if not said.
    pub role: String,
    /// How many workers the agent runs. At least 1.
    pub local_world_size: u32,
    /// The program of each worker.
    pub entry: String,
    /// The arguments of the program.
    pub arguments: Vec<String>,
    /// Where the agents of the group meet.
    pub rendezvous: H,
    /// How many restarts after failures the job has, all its agents together. 0 is allowed: the first failure is the last. 100
    /// by default.
    pub max_restarts: u32,
    /// The longest time between two looks at the workers. An exit is seen at once all the same. Longer than 0, 5 s by default.
    pub monitor_interval: Duration,
    /// The address under which workers reach rank 0, if rank 0 is here. The agent finds one if not said.
    pub master_address: Option<String>,
    /// The port for the store of rank 0, if rank 0 is here. The agent finds a free one for each group if not said.
    pub master_port: Option<u16>,
    /// The longest time in which a group must come together. Longer than 0, 600 s by default.
    pub rendezvous_timeout: Duration,
    /// How long an agent whose workers have succeeded waits for the agents whose workers run on. A longer wait fails nothing:
    /// the agent ends without the others. 300 s by default.
    pub exit_barrier_timeout: Duration,
}

/// Why a group of workers can't be run as specified.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// A role that can't be in the name of a metric. Give letters, digits, `-` and `_`.
    #[error(
        "role `{}` is given; a role is 1 to 64 letters, digits, `-` and `_`",
        given.escape_debug()
    )]
    Role {
        /// The role.
        given: String,
    },
    /// No worker, or more than a world has. Give a number in between.
    #[error("local_world_size={given} is given; allowed are 1 to {MAX_WORLD_SIZE} workers")]
    Workers {
        /// The number of workers.
        given: u32,
    },
    /// No program. Give one.
    #[error("no entry is given; an entry is the program that each worker runs")]
    NoEntry,
    /// An entry or an argument that no process can have. Leave out the NUL byte.
    #[error("{name} `{}` has a NUL byte, which no process can be given", given.escape_debug())]
    Nul {
        /// `entry` or `argument`.
        name: &'static str,
        /// The text.
        given: String,
    },
    /// A time of 0. Give a longer one.
    #[error("{name}=0 is given; it must be longer than 0")]
    NoTime {
        /// The setting.
        name: &'static str,
    },
    /// Port 0. Give another one, or none: then a free port is found for each group.
    #[error("master_port=0 is given; give a port from 1 to 65535, or none for a free one")]
    Port,
    /// The fewest and the most nodes exclude each other. Give at least 1, and no more at least than at most.
    #[error(
        "nodes={min}:{max} is given; a group has at least 1 node, and no fewer at most than at least"
    )]
    Nodes {
        /// The fewest.
        min: u32,
        /// The most.
        max: u32,
    },
}

impl<H> WorkerSpec<H> {
    /// Workers of the role `default` with the default of everything else.
    #[must_use]
    pub fn new(entry: impl Into<String>, local_world_size: u32, rendezvous: H) -> Self {
        Self {
            role: DEFAULT_ROLE.to_owned(),
            local_world_size,
            entry: entry.into(),
            arguments: Vec::new(),
            rendezvous,
            max_restarts: 100,
            monitor_interval: Duration::from_secs(5),
            master_address: None,
            master_port: None,
            rendezvous_timeout: Duration::from_secs(600),
            exit_barrier_timeout: Duration::from_secs(300),
        }
    }

    /// Looks for what makes no sense.
    ///
    /// # Errors
    ///
    /// [`SpecError`]: the first that is found.
    pub fn check(&self) -> Result<(), SpecError> {
        let of_a_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        let role = &self.role;
        if role.is_empty() || role.len() > 64 || !role.bytes().all(of_a_name) {
            let given = role.clone();
            return Err(SpecError::Role { given });
        }
        let given = self.local_world_size;
        if given == 0 || given > MAX_WORLD_SIZE {
            return Err(SpecError::Workers { given });
        }
        if self.entry.is_empty() {
            return Err(SpecError::NoEntry);
        }
        let arguments = self.arguments.iter().map(|argument| ("argument", argument));
        for (name, text) in [("entry", &self.entry)].into_iter().chain(arguments) {
            if text.contains('\0') {
                let given = text.clone();
                return Err(SpecError::Nul { name, given });
            }
        }
        for (name, time) in [
            ("monitor_interval", self.monitor_interval),
            ("rendezvous_timeout", self.rendezvous_timeout),
        ] {
            if time.is_zero() {
                return Err(SpecError::NoTime { name });
            }
        }
        if self.master_port == Some(0) {
            return Err(SpecError::Port);
        }
        Ok(())
    }
}
