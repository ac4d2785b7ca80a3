//! Tokens, certificates that are renewed, and members that are put out.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::identity::Role;

/// A text that must not be logged: its `Debug` does not show it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SecretText(pub String);

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretText(..)")
    }
}

/// A join token, as the head shows it: without its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenEntry {
    /// Its id.
    pub id: String,
    /// Who joins with it.
    pub role: Role,
    /// Whether drivers that join with it may administer the cluster.
    #[serde(default)]
    pub admin: bool,
    /// When it ends, in seconds since 1970.
    pub expires_unix: u64,
    /// How often it can still be used; `None` for any number of times.
    #[serde(default)]
    pub uses_left: Option<u32>,
}

/// A node or driver that was put out of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevokedMember {
    /// Its role.
    pub role: Role,
    /// Its id.
    pub name: String,
    /// Since when, in seconds since 1970.
    #[serde(default)]
    pub since_unix: u64,
    /// Why, as the operator said it.
    #[serde(default)]
    pub reason: String,
}

/// Who is out, from the head to its nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevocationList {
    /// Random, another one at each start of the head.
    pub epoch: u64,
    /// Counts the changes since then. Of two lists of one epoch the larger number holds.
    pub serial: u64,
    /// All that are out.
    pub members: Vec<RevokedMember>,
}
