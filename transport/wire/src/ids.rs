//! Newtypes for every identity.
//!
//! Random identities (`ClusterId`, `NodeId`, `JobId`, `DriverId`) are 64 random bits, which the caller brings. They print as
//! `node-00f3a9c2d4e5b687`, are strings in JSON and plain integers in MessagePack.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A text that is no identity of the expected kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{given}` is not a {kind} id; expected `{kind}-` and 16 hexadecimal digits")]
pub struct ParseIdError {
    given: String,
    kind: &'static str,
}

macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&format!(concat!($prefix, "-{:016x}"), self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = ParseIdError;

            fn from_str(text: &str) -> Result<Self, ParseIdError> {
                text.strip_prefix(concat!($prefix, "-"))
                    .filter(|digits| {
                        digits.len() == 16 && digits.bytes().all(|b| b.is_ascii_hexdigit())
                    })
                    .and_then(|digits| u64::from_str_radix(digits, 16).ok())
                    .map(Self)
                    .ok_or_else(|| ParseIdError { given: text.to_owned(), kind: $prefix })
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                if serializer.is_human_readable() {
                    serializer.collect_str(self)
                } else {
                    serializer.serialize_u64(self.0)
                }
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                if deserializer.is_human_readable() {
                    let text = String::deserialize(deserializer)?;
                    text.parse().map_err(de::Error::custom)
                } else {
                    u64::deserialize(deserializer).map(Self)
                }
            }
        }
    };
}

random_id!(
    /// A cluster: one certificate authority and the head that owns it.
    ClusterId, "cluster"
);
random_id!(
    /// A node daemon. Two daemons on one host, or with one hostname, have different ids.
    NodeId, "node"
);
random_id!(
    /// A job: one group of workers, from submit to end.
    JobId, "job"
);
random_id!(
    /// A driver or an operator's command line, as its certificate names it.
    DriverId, "driver"
);

macro_rules! number {
    ($(#[$doc:meta])* $name:ident, $inner:ty) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

number!(
    /// One committed membership of a job. It starts at 1 and grows by one at every change.
    Generation, u64
);
number!(
    /// A member's number in the world: `0..world_size`.
    Rank, u32
);
number!(
    /// A member's number on its node: `0..local_size`.
    LocalRank, u32
);
number!(
    /// The number of a member's node among the nodes that have its local rank: `0..cross_size`.
    CrossRank, u32
);
number!(
    /// A place in a job that a worker process fills. It keeps its number across generations, its rank may change.
    Slot, u32
);
number!(
    /// The how-manieth process of a slot. The first is 1; a slot that never had a process is at 0.
    Incarnation, u64
);
number!(
    /// A call of one driver, unique in its job.
    CallId, u64
);
number!(
    /// An executable (one value of the user's type on every rank) in a job, chosen by the driver.
    ObjectId, u64
);

impl Incarnation {
    /// The first process of a slot, and the only one of a job that never changes its members.
    pub const FIRST: Self = Self(1);

    /// What a message means that names a slot alone: peers that know no incarnations start one process in each.
    #[must_use]
    pub(crate) fn first() -> Self {
        Self::FIRST
    }

    #[allow(clippy::trivially_copy_pass_by_ref)] // serde asks for it
    pub(crate) fn is_first(&self) -> bool {
        *self == Self::FIRST
    }
}

impl Generation {
    #[allow(clippy::trivially_copy_pass_by_ref)] // serde asks for it
    pub(crate) fn is_none(&self) -> bool {
        self.0 == 0
    }
}

impl Rank {
    /// The rank as an index into a table of members.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_print_and_parse() {
        let id = NodeId(0x00f3_a9c2_d4e5_b687);
        assert_eq!(id.to_string(), "node-00f3a9c2d4e5b687");
        assert_eq!(id.to_string().parse::<NodeId>(), Ok(id));
        for bad in [
            "",
            "node-",
            "node-1",
            "job-00f3a9c2d4e5b687",
            "node-00f3a9c2d4e5b68x",
            "node-+0f3a9c2d4e5b687",
        ] {
            let error = bad.parse::<NodeId>().unwrap_err().to_string();
            assert!(error.contains("16 hexadecimal digits"), "{error}");
        }
    }

    #[test]
    fn ids_are_text_for_people_and_integers_on_the_wire() {
        let id = JobId(7);
        assert_eq!(
            serde_json::to_string(&id).unwrap(),
            "\"job-0000000000000007\""
        );
        assert_eq!(rmp_serde::to_vec(&id).unwrap(), [7]);
        assert_eq!(rmp_serde::from_slice::<JobId>(&[7]).unwrap(), id);
    }
}
