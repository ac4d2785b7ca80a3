//! Joining: the one exchange in which the peer is not known by a certificate yet.

use serde::{Deserialize, Serialize};

use super::Refusal;
use crate::identity::Role;
use crate::ids::ClusterId;

/// From a node daemon or a driver that holds a token, on the ALPN for joining.
#[derive(Clone, Serialize, Deserialize)]
pub struct JoinRequest {
    /// The role it wants; must be the token's.
    pub role: Role,
    /// The secret part of the token.
    #[serde(with = "serde_bytes")]
    pub secret: Vec<u8>,
    /// A certificate signing request in DER. Its key is the joiner's; subject and names are the head's choice.
    #[serde(with = "serde_bytes")]
    pub csr: Vec<u8>,
}

impl std::fmt::Debug for JoinRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JoinRequest")
            .field("role", &self.role)
            .finish_non_exhaustive()
    }
}

/// The head's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum JoinReply {
    /// Welcome: the certificate for the request's key.
    Joined {
        /// The cluster.
        cluster: ClusterId,
        /// The identity's name in the certificate: a node or driver id.
        name: String,
        /// The certificate in DER.
        #[serde(with = "serde_bytes")]
        certificate: Vec<u8>,
    },
    /// No.
    Refused(Refusal),
}

/// From a listener to a peer that it has let in, on a stream of its own: the first thing on a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Version of the listener's software, for logs.
    #[serde(default)]
    pub version: String,
}
