//! Who a peer is.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ids::{ClusterId, DriverId, JobId, NodeId, Slot};

/// The name of every cluster's one head.
pub const HEAD_NAME: &str = "head";

/// What a process may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The head.
    Head,
    /// A node daemon.
    Node,
    /// A driver or an operator.
    Driver,
    /// A worker of a job.
    Worker,
}

impl Role {
    /// Whether processes of this role join a cluster with a token: nodes and drivers do.
    #[must_use]
    pub fn joins(self) -> bool {
        matches!(self, Self::Node | Self::Driver)
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Head => "head",
            Self::Node => "node",
            Self::Driver => "driver",
            Self::Worker => "worker",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A text that is no [`Role`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no role; there are `head`, `node`, `driver` and `worker`")]
pub struct ParseRoleError(String);

impl FromStr for Role {
    type Err = ParseRoleError;

    fn from_str(text: &str) -> Result<Self, ParseRoleError> {
        [Self::Head, Self::Node, Self::Driver, Self::Worker]
            .into_iter()
            .find(|role| role.as_str() == text)
            .ok_or_else(|| ParseRoleError(text.to_owned()))
    }
}

/// A process of a cluster, as its certificate's URI names it: `kolo://CLUSTER/ROLE/NAME`. Messages call it by its name alone.
///
/// The name is `head` for the head, a [`NodeId`] for a node, a [`DriverId`] for a driver and `JOB/SLOT`
/// for a worker.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Identity {
    /// The cluster, whose authority signed the certificate.
    pub cluster: ClusterId,
    /// What it is.
    pub role: Role,
    /// Which one of that role.
    pub name: String,
}

/// A text that is no [`Identity`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{given}` is not an identity: {reason}; expected `kolo://CLUSTER/ROLE/NAME`")]
pub struct ParseIdentityError {
    given: String,
    reason: String,
}

impl Identity {
    /// The identity of `role` with `name`.
    ///
    /// # Errors
    ///
    /// If the name does not have the form that the role's names have.
    pub fn new(
        cluster: ClusterId,
        role: Role,
        name: impl Into<String>,
    ) -> Result<Self, ParseIdentityError> {
        let identity = Self {
            cluster,
            role,
            name: name.into(),
        };
        identity.check().map_err(|reason| ParseIdentityError {
            given: identity.uri(),
            reason,
        })?;
        Ok(identity)
    }

    fn check(&self) -> Result<(), String> {
        let name = &self.name;
        let fits = match self.role {
            Role::Head => name == HEAD_NAME,
            Role::Node => self.node().is_some(),
            Role::Driver => self.driver().is_some(),
            Role::Worker => self.worker().is_some(),
        };
        if fits {
            Ok(())
        } else {
            let form = match self.role {
                Role::Head => "`head`",
                Role::Node => "a node id",
                Role::Driver => "a driver id",
                Role::Worker => "`JOB/SLOT`",
            };
            Err(format!("the name of a {} is {form}", self.role))
        }
    }

    /// The node, if this is one.
    pub fn node(&self) -> Option<NodeId> {
        (self.role == Role::Node).then(|| self.name.parse().ok())?
    }

    /// The driver, if this is one.
    pub fn driver(&self) -> Option<DriverId> {
        (self.role == Role::Driver).then(|| self.name.parse().ok())?
    }

    /// The worker's job and slot, if this is one.
    pub fn worker(&self) -> Option<(JobId, Slot)> {
        if self.role != Role::Worker {
            return None;
        }
        let (job, slot) = self.name.split_once('/')?;
        let number: u32 = slot.parse().ok()?;
        // One spelling only: `+1` and `01` are numbers, too.
        (number.to_string() == slot).then_some((job.parse().ok()?, Slot(number)))
    }

    /// The URI in its certificate.
    #[must_use]
    pub fn uri(&self) -> String {
        format!("kolo://{}/{}/{}", self.cluster, self.role, self.name)
    }

    /// The name of a worker.
    #[must_use]
    pub fn worker_name(job: JobId, slot: Slot) -> String {
        format!("{job}/{slot}")
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.worker() {
            Some((job, slot)) => write!(f, "slot {slot} of {job}"),
            None if self.role == Role::Head => f.write_str("the head"),
            None => f.write_str(&self.name),
        }
    }
}

impl FromStr for Identity {
    type Err = ParseIdentityError;

    fn from_str(text: &str) -> Result<Self, ParseIdentityError> {
        let refuse = |reason: String| ParseIdentityError {
            given: text.chars().take(200).collect(),
            reason,
        };
        let rest = text
            .strip_prefix("kolo://")
            .ok_or_else(|| refuse("it does not start with `kolo://`".to_owned()))?;
        let mut parts = rest.splitn(3, '/');
        let (Some(cluster), Some(role), Some(name)) = (parts.next(), parts.next(), parts.next())
        else {
            return Err(refuse("a part is missing".to_owned()));
        };
        let cluster = cluster
            .parse()
            .map_err(|error: crate::ids::ParseIdError| refuse(error.to_string()))?;
        let role = role
            .parse()
            .map_err(|error: ParseRoleError| refuse(error.to_string()))?;
        let identity = Self {
            cluster,
            role,
            name: name.to_owned(),
        };
        identity.check().map_err(refuse)?;
        Ok(identity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_print_and_parse() {
        for (rest, words) in [
            ("head/head", "the head"),
            ("node/node-00000000000000ab", "node-00000000000000ab"),
            ("driver/driver-00000000000000ab", "driver-00000000000000ab"),
            (
                "worker/job-0000000000000003/12",
                "slot 12 of job-0000000000000003",
            ),
        ] {
            let uri = format!("kolo://cluster-0000000000000001/{rest}");
            let identity: Identity = uri.parse().unwrap();
            assert_eq!(
                (identity.uri(), identity.to_string()),
                (uri, words.to_owned())
            );
        }
        let worker: Identity = "kolo://cluster-0000000000000001/worker/job-0000000000000003/12"
            .parse()
            .unwrap();
        assert_eq!(worker.worker(), Some((JobId(3), Slot(12))));
        assert_eq!(worker.node(), None);
        assert_eq!(Identity::worker_name(JobId(3), Slot(12)), worker.name);
    }

    #[test]
    fn what_is_no_identity_is_refused() {
        for (text, reason) in [
            ("", "does not start"),
            (
                "https://cluster-0000000000000001/head/head",
                "does not start",
            ),
            ("kolo://cluster-0000000000000001/head", "a part is missing"),
            (
                "kolo://node-0000000000000001/head/head",
                "16 hexadecimal digits",
            ),
            ("kolo://cluster-0000000000000001/king/head", "is no role"),
            (
                "kolo://cluster-0000000000000001/head/other",
                "the name of a head",
            ),
            (
                "kolo://cluster-0000000000000001/node/head",
                "the name of a node",
            ),
            (
                "kolo://cluster-0000000000000001/driver/",
                "the name of a driver",
            ),
            (
                "kolo://cluster-0000000000000001/worker/job-0000000000000003",
                "`JOB/SLOT`",
            ),
            (
                "kolo://cluster-0000000000000001/worker/job-0000000000000003/01",
                "`JOB/SLOT`",
            ),
            (
                "kolo://cluster-0000000000000001/worker/job-0000000000000003/1/2",
                "`JOB/SLOT`",
            ),
            (
                "kolo://cluster-0000000000000001/node/node-00000000000000ab/",
                "the name of a node",
            ),
        ] {
            let error = text.parse::<Identity>().unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
        assert!(Identity::new(ClusterId(1), Role::Node, "me").is_err());
    }
}
