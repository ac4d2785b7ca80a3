//! Letting nodes and drivers in.

use std::net::SocketAddr;
use std::sync::Arc;

use kolo_transport::authority::DEFAULT_VALIDITY;
use kolo_transport::identity::Role;
use kolo_transport::ids::{DriverId, NodeId};
use kolo_transport::wire::{JoinReply, JoinRequest, Refusal, RefusalKind};
use kolo_transport::{IdentityError, JoinHandler, TokenError};

use super::error::HeadError;
use super::state::{Store, unix_now};

/// Checks tokens and signs certificates.
pub(super) struct Joins {
    store: Arc<Store>,
}

impl Joins {
    pub(super) fn new(store: Arc<Store>) -> Self {
        Self { store }
    }

    fn admit(&self, request: &JoinRequest) -> Result<JoinReply, Denied> {
        let authority = self.store.authority();
        self.store.change_tokens(|book| {
            book.redeem(request.role, &request.secret, unix_now())?;
            let name = match request.role {
                Role::Node => NodeId::random().to_string(),
                Role::Driver => DriverId::random().to_string(),
                Role::Head | Role::Worker => return Err(TokenError::Unknown.into()),
            };
            let certificate =
                authority.sign(&request.csr, request.role, &name, DEFAULT_VALIDITY)?;
            Ok(JoinReply::Joined {
                cluster: authority.cluster(),
                name,
                certificate: certificate.to_vec(),
            })
        })
    }
}

impl JoinHandler for Joins {
    fn join(&self, request: JoinRequest, peer: SocketAddr) -> JoinReply {
        self.admit(&request).unwrap_or_else(|denied| {
            tracing::warn!(%peer, role = %request.role, reason = %denied.0.message, "a joiner was refused");
            JoinReply::Refused(denied.0)
        })
    }
}

struct Denied(Refusal);

impl From<TokenError> for Denied {
    fn from(error: TokenError) -> Self {
        Self(Refusal::new(RefusalKind::Token, error.to_string()))
    }
}

impl From<IdentityError> for Denied {
    fn from(error: IdentityError) -> Self {
        Self(match error {
            IdentityError::Request { .. } => Refusal::new(RefusalKind::Invalid, error.to_string()),
            other => {
                tracing::error!(error = %other, "a certificate could not be made");
                Refusal::new(
                    RefusalKind::Internal,
                    "the head could not make a certificate; its log says more",
                )
            }
        })
    }
}

impl From<HeadError> for Denied {
    fn from(error: HeadError) -> Self {
        tracing::error!(%error, "the use of a join token could not be stored");
        Self(Refusal::new(
            RefusalKind::Internal,
            "the head could not store the use of the token; its log says more",
        ))
    }
}
