//! What a group is to be, and whether that makes sense. No I/O.

use std::collections::BTreeMap;
use std::time::Duration;

use kolo_collectives::lane::LaneChoice;
use kolo_transport::frame::Limits;
use kolo_transport::wire::{
    InterfaceSelection, JobSpec, Milli, Placement, Program, ResourceError, Resources,
};

use crate::codec;

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
        workers: u32,
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
    /// A number of workers, hosts or slots is zero. It must be at least 1.
    #[error("{what}(0) is given; a group has at least one worker, so it must be 1 or more")]
    Zero {
        /// `workers`, `hosts` or `slots`.
        what: &'static str,
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

/// The options as they were given.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) name: Option<String>,
    pub(crate) workers: Option<u32>,
    pub(crate) hosts: Option<u32>,
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
            elastic: None,
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
                "it is one of `auto`, `quic` and `tls`"
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
        for (what, given) in [
            ("workers", self.workers),
            ("hosts", self.hosts),
            ("slots", self.slots),
        ] {
            if given == Some(0) {
                return Err(OptionsError::Zero { what });
            }
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
            (Some(workers), None, None) => Placement::Pack { workers },
            (None, Some(hosts), slots) => Placement::Spread {
                hosts,
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
mod tests {
    use kolo_transport::wire::ProgramHash;

    use super::*;

    fn spec(change: impl FnOnce(&mut Options)) -> Result<JobSpec, OptionsError> {
        let mut options = Options {
            workers: Some(2),
            ..Options::default()
        };
        change(&mut options);
        let program = Program {
            hash: ProgramHash([0; 32]),
            size: 1,
            name: "train".to_owned(),
        };
        options.spec(program)
    }

    fn refused(change: impl FnOnce(&mut Options)) -> String {
        spec(change).unwrap_err().to_string()
    }

    #[test]
    fn sizes_are_workers_or_hosts_and_slots() {
        assert_eq!(
            spec(|_| {}).unwrap().placement,
            Placement::Pack { workers: 2 }
        );
        let hosts = |hosts, slots| {
            spec(|o| (o.workers, o.hosts, o.slots) = (None, Some(hosts), slots))
                .map(|s| s.placement)
        };
        assert_eq!(
            hosts(3, Some(2)),
            Ok(Placement::Spread { hosts: 3, slots: 2 })
        );
        assert_eq!(hosts(3, None), Ok(Placement::Spread { hosts: 3, slots: 1 }));
        assert_eq!(hosts(0, Some(2)), Err(OptionsError::Zero { what: "hosts" }));
        assert_eq!(hosts(2, Some(0)), Err(OptionsError::Zero { what: "slots" }));
        let given = u64::from(u32::MAX) * u64::from(u32::MAX);
        assert_eq!(
            hosts(u32::MAX, Some(u32::MAX)),
            Err(OptionsError::TooMany { given })
        );
        assert!(hosts(MAX_WORKERS, Some(1)).is_ok());
    }

    #[test]
    fn sizes_that_contradict_are_refused() {
        assert!(refused(|o| o.workers = None).starts_with("how many workers?"));
        assert!(refused(|o| o.hosts = Some(1)).contains("workers(2) and hosts(h) are given"));
        assert!(refused(|o| o.slots = Some(1)).contains("workers(2) and slots(s) are given"));
        let text = refused(|o| (o.workers, o.slots) = (None, Some(3)));
        assert!(
            text.contains("slots(3) is given without hosts(h)"),
            "{text}"
        );
        assert!(refused(|o| o.workers = Some(0)).starts_with("workers(0) is given"));
        assert!(refused(|o| o.workers = Some(70_000)).contains("70000 workers"));
    }

    #[test]
    fn gpus_are_as_in_horovod() {
        let gpus = |use_gpu, gpus| {
            spec(|o| (o.use_gpu, o.gpus) = (use_gpu, gpus)).map(|s| s.per_worker.gpus)
        };
        assert_eq!(gpus(false, None), Ok(0));
        // A falsy number is no number there.
        assert_eq!(gpus(false, Some(0)), Ok(0));
        assert_eq!(gpus(true, None), Ok(1));
        assert_eq!(gpus(true, Some(2)), Ok(2));
        assert_eq!(
            gpus(false, Some(1)),
            Err(OptionsError::GpusUnused { gpus: 1 })
        );
        assert_eq!(gpus(true, Some(0)), Err(OptionsError::NoGpus));
    }

    #[test]
    fn amounts_are_exact_or_refused() {
        let resources = spec(|o| {
            o.cpus = 0.5;
            o.custom = BTreeMap::from([("fpga".to_owned(), 2.0)]);
        });
        let resources = resources.unwrap().per_worker;
        assert_eq!(resources.to_string(), "0.5 cpus, 2 fpga");
        for bad in [f64::NAN, f64::INFINITY, -1.0, 1e9, 0.0001] {
            assert!(
                refused(|o| o.cpus = bad).starts_with("cpus_per_worker is "),
                "{bad}"
            );
            let text = refused(|o| o.custom = BTreeMap::from([("fpga".to_owned(), bad)]));
            assert!(
                text.starts_with("the amount of `fpga` per worker is "),
                "{text}"
            );
        }
        for bad in ["", " fpga", "cpus", "gpus"] {
            let text = refused(|o| o.custom = BTreeMap::from([(bad.to_owned(), 1.0)]));
            assert!(text.contains("can't be the name of a resource"), "{text}");
        }
        assert_eq!(
            (1_u8.units(), 2_usize.units(), 0.5_f32.units(), (-3).units()),
            (1.0, 2.0, 0.5, -3.0)
        );
    }

    #[test]
    fn variables_arguments_and_times_are_checked() {
        for (name, value) in [
            ("", "x"),
            ("A=B", "x"),
            ("A\0", "x"),
            ("A", "\0"),
            ("KOLO_RANK", "7"),
            (LANE, "rdma"),
            (RINGS, "maybe"),
        ] {
            let text = refused(|o| o.env = BTreeMap::from([(name.to_owned(), value.to_owned())]));
            assert!(text.contains("can't be set"), "{text}");
        }
        assert!(
            spec(|o| o.env = BTreeMap::from([("HOROVOD_X".to_owned(), String::new())])).is_ok()
        );
        assert!(spec(|o| o.env = BTreeMap::from([(LANE.to_owned(), "tls".to_owned())])).is_ok());
        assert!(spec(|o| o.env = BTreeMap::from([(RINGS.to_owned(), "off".to_owned())])).is_ok());
        assert!(refused(|o| o.args = vec!["a".to_owned(), "\0".to_owned()]).contains("argument 1"));
        for bad in [Duration::ZERO, Duration::from_micros(999), Duration::MAX] {
            assert!(refused(|o| o.start_timeout = bad).starts_with("start_timeout is "));
        }
        assert!(refused(|o| o.grace = Duration::MAX).ends_with("allowed is 0ns to 3600s"));
        assert_eq!(
            spec(|o| o.grace = Duration::ZERO).map(|s| s.grace_ms),
            Ok(0)
        );
        assert!(refused(|o| o.max_in_flight = 0).contains("max_in_flight(0)"));
        assert!(refused(|o| o.max_in_flight = usize::MAX).contains("allowed is 1 to 1048576"));
    }

    #[test]
    fn what_is_too_long_for_a_head_is_not_sent() {
        use bytes::BytesMut;
        use kolo_transport::frame::{PREFIX, encode_head};
        use kolo_transport::wire::HeadRequest;

        let with = |len| move |o: &mut Options| o.env = [("A".to_owned(), "x".repeat(len))].into();
        let text = refused(with(5 << 20));
        assert!(
            text.contains(" 5242881 of them arguments and variables; a head takes 4194304;"),
            "{text}"
        );
        assert!(refused(|o| o.name = Some("x".repeat(5 << 20))).contains(" 0 of them"));
        // The longest that is sent is one that a head reads.
        let (mut fits, mut over) = (1 << 20, 5 << 20);
        while over - fits > 1 {
            let half = usize::midpoint(fits, over);
            if spec(with(half)).is_ok() {
                fits = half;
            } else {
                over = half;
            }
        }
        let mut frame = BytesMut::new();
        let longest = HeadRequest::Submit(spec(with(fits)).unwrap());
        encode_head(&mut frame, &longest, 0).unwrap();
        let length = frame.len() - PREFIX;
        assert!(
            (MAX_SPEC - ENVELOPE..=MAX_SPEC).contains(&length),
            "{length}"
        );
    }

    #[test]
    fn the_rest_is_passed_on() {
        let spec = spec(|o| {
            o.args = vec!["-v".to_owned()];
            o.start_timeout = Duration::from_millis(1500);
            o.rendezvous = true;
        });
        let spec = spec.unwrap();
        assert_eq!(spec.name, "train");
        assert_eq!(
            (spec.start_timeout_ms, spec.grace_ms, spec.rendezvous),
            (1500, 5000, true)
        );
        assert_eq!(spec.args, ["-v"]);
    }
}
