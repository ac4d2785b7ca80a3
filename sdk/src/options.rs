//! What a group is to be, and whether that makes sense. No I/O.

mod elastic;

use std::collections::BTreeMap;
use std::time::Duration;

use kolo_collectives::lane::LaneChoice;
use kolo_transport::frame::Limits;
use kolo_transport::wire::{
    GroupFilter, InterfaceSelection, JobSpec, Milli, Placement, Program, ResourceError, Resources,
};

use crate::codec;
pub use elastic::Count;
pub(crate) use elastic::ElasticOptions;

/// What is wrong with the options of an executor. Nothing was started.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OptionsError {
    /// Neither a number of workers nor a number of hosts is given. Give one of them.
    #[error("how many workers? give workers(n), or hosts(h) and slots(s)")]
    NoSize,
    /// Both a number of workers and hosts or slots are given. Keep one of them.
    #[error(
        "workers({workers}) and {other} are given; give workers(n) to place them anywhere, or hosts(h) and slots(s) for s on each of h distinct nodes, not both"
    )]
    TwoSizes {
        /// The number of workers.
        workers: Count,
        /// What else is given.
        other: &'static str,
    },
    /// Slots are given without hosts. Give both, or a number of workers.
    #[error(
        "slots({slots}) is given without hosts(h); give both, or workers(n) to place them anywhere"
    )]
    SlotsWithoutHosts {
        /// The number of slots.
        slots: u32,
    },
    /// Spares are given that make up no whole host. Give a multiple of the slots.
    #[error(
        "spares({spares}) is given with slots({slots}), and hosts take part as a whole; give a multiple of {slots}"
    )]
    PartOfHost {
        /// The number of spares.
        spares: u32,
        /// Workers on each host.
        slots: u32,
    },
    /// A number of workers, hosts or slots is zero. It must be at least 1.
    #[error("{what}(0) is given; a group has at least one worker, so it must be 1 or more")]
    Zero {
        /// `workers`, `hosts` or `slots`.
        what: &'static str,
    },
    /// Bounds begin with 0, or are upside down. Give the smaller number first, from 1.
    #[error(
        "{what}({given}) is given; the lower bound must be 1 or more, and the upper bound no less"
    )]
    Bounds {
        /// `workers` or `hosts`.
        what: &'static str,
        /// The bounds.
        given: Count,
    },
    /// Spares are given for a group that may never change. Leave out one of both.
    #[error(
        "spares({spares}) and max_resets(0) are given; a group that never changes has no use for spares: allow resets, or give no spares"
    )]
    UselessSpares {
        /// The number of spares.
        spares: u32,
    },
    /// A filter has the number 0. Give at least 1.
    #[error("filter({filter:?}) is given; its number must be 1 or more")]
    EmptyFilter {
        /// The filter.
        filter: GroupFilter,
    },
    /// The health check can't be run. Give a path, or a name that is in the `PATH` of the node daemons.
    #[error("health_check({program:?}, ..) is given, but {reason}; no process can be started so")]
    HealthCheck {
        /// The program.
        program: String,
        /// The fault.
        reason: &'static str,
    },
    /// No number of workers within the bounds passes all filters. Widen the bounds, or leave a filter out.
    #[error("no number of workers from {least} to {most} passes the filters {filters:?}")]
    NoneFits {
        /// The fewest workers.
        least: u32,
        /// The most workers.
        most: u32,
        /// The filters.
        filters: Vec<GroupFilter>,
    },
    /// There would be more workers than kolo can count.
    #[error("{given} workers are asked for; allowed are up to {}", MAX_WORKERS)]
    TooMany {
        /// How many.
        given: u64,
    },
    /// GPUs per worker are given, but GPUs are not switched on. Add `use_gpu(true)`, or leave them out.
    #[error(
        "gpus_per_worker({gpus}) is given, but use_gpu(true) is not; add it, or leave gpus_per_worker out"
    )]
    GpusUnused {
        /// The number of GPUs.
        gpus: u32,
    },
    /// GPUs are switched on, but each worker has none. It must be at least 1, its default.
    #[error(
        "gpus_per_worker(0) is given with use_gpu(true); it must be 1 or more; leave it out for 1"
    )]
    NoGpus,
    /// An amount is NaN, infinite, negative, too large or too fine.
    #[error(transparent)]
    Amount(#[from] ResourceError),
    /// A custom resource has a name that it can't have.
    #[error("`{name}` can't be the name of a resource: {reason}")]
    ResourceName {
        /// The name.
        name: String,
        /// Why not.
        reason: &'static str,
    },
    /// A variable has a name or a value that it can't have.
    #[error("the environment variable `{name}` can't be set: {reason}")]
    Variable {
        /// The name.
        name: String,
        /// Why not.
        reason: &'static str,
    },
    /// An argument has a NUL byte, which no program can be given.
    #[error("argument {index} of the program has a NUL byte")]
    Argument {
        /// Its place, from 0.
        index: usize,
    },
    /// A time is too short or too long.
    #[error("{what} is {given:?}; allowed is {least:?} to {most:?}")]
    Time {
        /// Which.
        what: &'static str,
        /// The time.
        given: Duration,
        /// The shortest that is allowed.
        least: Duration,
        /// The longest that is allowed.
        most: Duration,
    },
    /// Name, arguments, variables and names of resources are too long together for one message to the head. Give workers
    /// what is large as arguments of a call.
    #[error(
        "the group's description takes {given} bytes, {entries} of them arguments and variables; a head takes {limit}; give the workers what is large as arguments of a call, or in files"
    )]
    TooLong {
        /// Its length in bytes.
        given: usize,
        /// How many of them are the program's arguments and the environment's variables.
        entries: usize,
        /// The longest that is allowed.
        limit: usize,
    },
    /// No call could ever be made. Give at least 1.
    #[error("max_in_flight({given}) is given; allowed is 1 to {}", MAX_IN_FLIGHT)]
    InFlight {
        /// The number.
        given: usize,
    },
}

/// Most workers of a group.
pub(crate) const MAX_WORKERS: u32 = 65_536;

/// Most calls that an executor may have in flight.
pub(crate) const MAX_IN_FLIGHT: usize = 1 << 20;

/// Longest request to a head, in bytes.
const MAX_SPEC: usize = Limits::CONTROL.head as usize;

/// What a request has around its job: the name of the request, with room to spare.
const ENVELOPE: usize = 64;

const START_TIMEOUT: [Duration; 2] = [Duration::from_millis(1), Duration::from_secs(24 * 3600)];
const GRACE: [Duration; 2] = [Duration::ZERO, Duration::from_secs(3600)];

/// Variables whose names begin so are set by kolo alone.
const RESERVED: &str = "KOLO_";

/// How workers reach those on other nodes; see [`LaneChoice`].
pub(crate) const LANE: &str = "KOLO_LANE";
/// Whether links between workers of one node have rings in shared memory: `on`, the default, or `off`.
pub(crate) const RINGS: &str = "KOLO_RINGS";

/// An amount of a resource: any number type. What is not allowed is refused by `start`.
pub trait Amount {
    /// The amount in units.
    fn units(self) -> f64;
}

macro_rules! amounts {
    ($($ty:ty)*) => {$(
        impl Amount for $ty {
            #[allow(clippy::cast_lossless, trivial_numeric_casts)]
            fn units(self) -> f64 {
                self as f64
            }
        }
    )*};
}
amounts!(f64 f32 i8 i16 i32 i64 isize u8 u16 u32 u64 usize);

/// The options as they were given: a field for each that the builder takes.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) name: Option<String>,
    pub(crate) workers: Option<Count>,
    pub(crate) hosts: Option<Count>,
    pub(crate) slots: Option<u32>,
    pub(crate) cpus: f64,
    pub(crate) use_gpu: bool,
    pub(crate) gpus: Option<u32>,
    pub(crate) custom: BTreeMap<String, f64>,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) args: Vec<String>,
    pub(crate) start_timeout: Duration,
    pub(crate) grace: Duration,
    pub(crate) rendezvous: bool,
    pub(crate) interfaces: InterfaceSelection,
    pub(crate) no_cache: bool,
    pub(crate) max_in_flight: usize,
    pub(crate) elastic: ElasticOptions,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: None,
            workers: None,
            hosts: None,
            slots: None,
            cpus: 1.0,
            use_gpu: false,
            gpus: None,
            custom: BTreeMap::new(),
            env: BTreeMap::new(),
            args: Vec::new(),
            start_timeout: Duration::from_secs(30),
            grace: Duration::from_secs(5),
            rendezvous: false,
            interfaces: InterfaceSelection::default(),
            no_cache: false,
            max_in_flight: 1024,
            elastic: ElasticOptions::default(),
        }
    }
}

impl Options {
    /// What the head is asked for. Everything that can be checked without a cluster is checked here.
    pub(crate) fn spec(&self, program: Program) -> Result<JobSpec, OptionsError> {
        let spec = JobSpec {
            name: self.name.clone().unwrap_or_else(|| program.name.clone()),
            program,
            args: self.args.clone(),
            placement: self.placement()?,
            per_worker: self.per_worker()?,
            env: self.env.clone(),
            start_timeout_ms: millis("start_timeout", self.start_timeout, START_TIMEOUT)?,
            grace_ms: millis("grace", self.grace, GRACE)?,
            rendezvous: self.rendezvous,
            installed: None,
            layout: Vec::new(),
            interfaces: self.interfaces.clone(),
            no_cache: self.no_cache,
            elastic: self.elastic()?.map(Box::new),
        };
        for (name, value) in &self.env {
            let reason = if name.is_empty() {
                "its name is empty"
            } else if name.contains(['=', '\0']) {
                "its name has `=` or a NUL byte"
            } else if value.contains('\0') {
                "its value has a NUL byte"
            } else if name == LANE {
                if value.parse::<LaneChoice>().is_ok() {
                    continue;
                }
                "it is `tls` or `quic`"
            } else if name == RINGS {
                if ["on", "off"].contains(&value.as_str()) {
                    continue;
                }
                "it is `on` or `off`"
            } else if name.starts_with(RESERVED) {
                "names that begin with KOLO_ are kolo's own"
            } else {
                continue;
            };
            return Err(OptionsError::Variable {
                name: name.clone(),
                reason,
            });
        }
        if let Some(index) = self.args.iter().position(|arg| arg.contains('\0')) {
            return Err(OptionsError::Argument { index });
        }
        if !(1..=MAX_IN_FLIGHT).contains(&self.max_in_flight) {
            return Err(OptionsError::InFlight {
                given: self.max_in_flight,
            });
        }
        self.check_length(&spec)?;
        Ok(spec)
    }

    /// A head does not read what is too long, so it could not say what is wrong with it.
    fn check_length(&self, spec: &JobSpec) -> Result<(), OptionsError> {
        let args = self.args.iter().map(String::len);
        let env = self
            .env
            .iter()
            .map(|(name, value)| name.len() + value.len());
        let entries = args.chain(env).sum();
        let encoded = codec::encode(spec).map_or(usize::MAX, |bytes| bytes.len());
        let given = encoded.saturating_add(ENVELOPE);
        if given > MAX_SPEC {
            return Err(OptionsError::TooLong {
                given,
                entries,
                limit: MAX_SPEC,
            });
        }
        Ok(())
    }

    fn placement(&self) -> Result<Placement, OptionsError> {
        for (what, given) in [("workers", self.workers), ("hosts", self.hosts)] {
            given.map_or(Ok(()), |given| given.check(what))?;
        }
        if self.slots == Some(0) {
            return Err(OptionsError::Zero { what: "slots" });
        }
        let placement = match (self.workers, self.hosts, self.slots) {
            (None, None, None) => return Err(OptionsError::NoSize),
            (None, None, Some(slots)) => return Err(OptionsError::SlotsWithoutHosts { slots }),
            (Some(workers), Some(_), _) => {
                return Err(OptionsError::TwoSizes {
                    workers,
                    other: "hosts(h)",
                });
            }
            (Some(workers), None, Some(_)) => {
                return Err(OptionsError::TwoSizes {
                    workers,
                    other: "slots(s)",
                });
            }
            (Some(workers), None, None) => Placement::Pack {
                workers: workers.most,
            },
            (None, Some(hosts), slots) => Placement::Spread {
                hosts: hosts.most,
                slots: slots.unwrap_or(1),
            },
        };
        let given = match placement {
            Placement::Pack { workers } => u64::from(workers),
            Placement::Spread { hosts, slots } => u64::from(hosts) * u64::from(slots),
        };
        if given > u64::from(MAX_WORKERS) {
            return Err(OptionsError::TooMany { given });
        }
        Ok(placement)
    }

    fn per_worker(&self) -> Result<Resources, OptionsError> {
        let gpus = match (self.use_gpu, self.gpus) {
            (false, Some(gpus)) if gpus > 0 => return Err(OptionsError::GpusUnused { gpus }),
            (true, Some(0)) => return Err(OptionsError::NoGpus),
            (false, _) => 0,
            (true, gpus) => gpus.unwrap_or(1),
        };
        let mut custom = BTreeMap::new();
        for (name, amount) in &self.custom {
            let reason = if name.trim() != name || name.is_empty() {
                "it is empty or has spaces around it"
            } else if matches!(name.as_str(), "cpus" | "gpus") {
                "use cpus_per_worker and gpus_per_worker"
            } else {
                let what = format!("the amount of `{name}` per worker");
                custom.insert(name.clone(), Milli::from_f64(&what, *amount)?);
                continue;
            };
            return Err(OptionsError::ResourceName {
                name: name.clone(),
                reason,
            });
        }
        Ok(Resources {
            cpus: Milli::from_f64("cpus_per_worker", self.cpus)?,
            gpus,
            custom,
        })
    }
}

fn millis(
    what: &'static str,
    given: Duration,
    [least, most]: [Duration; 2],
) -> Result<u64, OptionsError> {
    if given < least || given > most {
        return Err(OptionsError::Time {
            what,
            given,
            least,
            most,
        });
    }
    Ok(given.as_millis() as u64)
}

#[cfg(test)]
mod tests;
