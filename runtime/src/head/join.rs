//! Letting nodes and drivers in. Each attempt is one line in the log, apart from floods of them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kolo_transport::identity::Role;
use kolo_transport::ids::{DriverId, NodeId};
use kolo_transport::wire::span::Span;
use kolo_transport::wire::{JoinReply, JoinRequest, Refusal, RefusalKind};
use kolo_transport::{IdentityError, JoinHandler, RandomId as _, TokenError, TokenId};

use super::error::HeadError;
use super::state::{Store, unix_now};
use crate::limiter::Attempts;

/// Checks tokens and signs certificates.
pub(super) struct Joins {
    store: Arc<Store>,
    /// Of the certificates.
    life: Duration,
    attempts: Attempts,
}

/// Who was let in.
struct Joined {
    reply: JoinReply,
    name: String,
    token: TokenId,
    admin: bool,
}

impl Joins {
    pub(super) fn new(store: Arc<Store>, life: Duration, attempts: Attempts) -> Self {
        Self {
            store,
            life,
            attempts,
        }
    }

    fn admit(&self, request: &JoinRequest) -> Result<Joined, Denied> {
        let authority = self.store.authority();
        let joined = self.store.change_tokens(|book| {
            let token = book.redeem(request.role, &request.secret, unix_now())?;
            let name = match request.role {
                Role::Node => NodeId::random().to_string(),
                Role::Driver => DriverId::random().to_string(),
                Role::Head | Role::Worker => return Err(TokenError::Unknown.into()),
            };
            let admin = book.find(token).is_some_and(|info| info.admin);
            if admin {
                // The token is not used then.
                self.store
                    .members()
                    .room_for_administrator()
                    .map_err(Denied)?;
            }
            let certificate = authority.sign(&request.csr, request.role, &name, self.life)?;
            Ok::<_, Denied>(Joined {
                reply: JoinReply::Joined {
                    cluster: authority.cluster(),
                    name: name.clone(),
                    certificate: certificate.to_vec(),
                },
                name,
                token,
                admin,
            })
        })?;
        if joined.admin {
            self.store.change_members(|members| {
                members.add_administrator(&joined.name);
                Ok::<_, HeadError>(())
            })?;
        }
        Ok(joined)
    }
}

impl JoinHandler for Joins {
    fn join(&self, request: JoinRequest, peer: SocketAddr) -> JoinReply {
        if let Err(again_in) = self.attempts.attempt(peer.ip()) {
            return JoinReply::Refused(Refusal::new(
                RefusalKind::Busy,
                format!(
                    "too many attempts to join from {}; try again in {}",
                    peer.ip(),
                    Span(again_in)
                ),
            ));
        }
        match self.admit(&request) {
            Ok(joined) => {
                self.attempts.good(peer.ip());
                tracing::info!(%peer, name = joined.name, token = %joined.token, admin = joined.admin, "joined");
                joined.reply
            }
            Err(denied) => {
                self.attempts.wrong.line(|| {
                    tracing::warn!(%peer, role = %request.role, reason = %denied.0.message, "a joiner was refused");
                });
                JoinReply::Refused(denied.0)
            }
        }
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
