//! Who calls the API, and what that lets them do.
//!
//! | caller | may |
//! |---|---|
//! | the bearer token, or a driver's certificate | see the cluster and all jobs, stop jobs |
//! | the bearer token, the driver that owns a job, or a worker of it | use the job's rendezvous |
//! | anyone | `/healthz`, `/readyz`, the OpenAPI document |
//!
//! Who presents a credential that is not good is refused, even where a second one is: it is a mistake to be told.

use std::fmt;

use actix_web::HttpRequest;
use actix_web::http::header;
use kolo_transport::identity::{Identity, Role};
use kolo_transport::ids::{DriverId, JobId};
use subtle::ConstantTimeEq;

use super::connection::Peer;
use super::error::ApiError;

/// The fewest bytes of a bearer secret: 128 bits, if they are random.
const SHORTEST: usize = 16;

/// A secret that lets its bearer use the API as a driver may. Kept as a hash.
#[derive(Clone)]
pub struct BearerSecret {
    hash: [u8; 32],
}

/// A text that is no bearer secret. Does not repeat the text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a bearer secret has at least {SHORTEST} characters, all of them visible ASCII; this one does not"
)]
pub struct BearerSecretError(());

impl BearerSecret {
    /// The secret of this text, without white space around it.
    ///
    /// # Errors
    ///
    /// If it is shorter than 16 characters or has others than visible ASCII, which a header can't hold.
    pub fn new(text: &str) -> Result<Self, BearerSecretError> {
        let text = text.trim();
        if text.len() < SHORTEST || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(BearerSecretError(()));
        }
        Ok(Self {
            hash: hash(text.as_bytes()),
        })
    }

    /// Compares in a time that depends on neither secret: hashes have one length, and nobody can choose them.
    fn is(&self, given: &[u8]) -> bool {
        self.hash.ct_eq(&hash(given)).into()
    }
}

impl fmt::Debug for BearerSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BearerSecret(..)")
    }
}

fn hash(secret: &[u8]) -> [u8; 32] {
    *blake3::hash(secret).as_bytes()
}

/// An authenticated caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Caller {
    /// Has the bearer secret.
    Bearer,
    /// Has a certificate of the cluster.
    Member(Identity),
}

impl Caller {
    /// Who sent a request. `secret` is the head's bearer secret, if it has one.
    pub(super) fn of(
        request: &HttpRequest,
        secret: Option<&BearerSecret>,
    ) -> Result<Self, ApiError> {
        if let Some(value) = request.headers().get(header::AUTHORIZATION) {
            return match (bearer(value.as_bytes()), secret) {
                (Some(given), Some(secret)) if secret.is(given) => Ok(Self::Bearer),
                _ => Err(ApiError::unauthenticated(
                    "the Authorization header is not `Bearer` with this head's bearer token",
                )),
            };
        }
        match request.conn_data::<Peer>() {
            Some(Peer::Member(identity)) => Ok(Self::Member(identity.clone())),
            Some(Peer::Unusable(reason)) => Err(ApiError::unauthenticated(reason.clone())),
            Some(Peer::Unknown) | None => Err(ApiError::unauthenticated(
                "present a certificate of this cluster, or its bearer token in an Authorization header",
            )),
        }
    }

    /// Checks that the caller may see and stop jobs.
    pub(super) fn operator(&self) -> Result<(), ApiError> {
        match self {
            Self::Bearer => Ok(()),
            Self::Member(identity) if identity.role == Role::Driver => Ok(()),
            Self::Member(identity) => Err(ApiError::forbidden(format!(
                "a {} may not do this; a driver's certificate or the bearer token is needed",
                identity.role
            ))),
        }
    }

    /// Checks, before the job is looked up, that the caller may use some rendezvous, and that of `job` if it is a worker.
    pub(super) fn could_meet(&self, job: JobId) -> Result<(), ApiError> {
        match self {
            Self::Bearer => Ok(()),
            Self::Member(identity) => match identity.role {
                Role::Driver => Ok(()),
                Role::Worker if identity.worker().is_some_and(|(own, _)| own == job) => Ok(()),
                role => Err(ApiError::forbidden(format!(
                    "a {role} that does not belong to the job may not use its rendezvous"
                ))),
            },
        }
    }

    /// Checks that the caller may use the rendezvous of `job`, which `owner` has submitted.
    pub(super) fn meets(&self, job: JobId, owner: DriverId) -> Result<(), ApiError> {
        self.could_meet(job)?;
        match self {
            Self::Member(identity)
                if identity.role == Role::Driver && identity.driver() != Some(owner) =>
            {
                Err(ApiError::forbidden(
                    "only the driver that has submitted the job may use its rendezvous",
                ))
            }
            _ => Ok(()),
        }
    }
}

/// The token of an `Authorization: Bearer TOKEN` header. The scheme's case does not matter.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    const SCHEME: &[u8] = b"bearer ";
    let (scheme, token) = value.split_at_checked(SCHEME.len())?;
    scheme
        .eq_ignore_ascii_case(SCHEME)
        .then(|| token.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_compared_whole_and_not_shown() {
        let secret = BearerSecret::new(" 0123456789abcdef\n").unwrap();
        assert!(secret.is(b"0123456789abcdef"));
        for other in [
            &b""[..],
            b"0123456789abcde",
            b"0123456789abcdefg",
            b"0123456789abcdeF",
        ] {
            assert!(!secret.is(other));
        }
        assert_eq!(format!("{secret:?}"), "BearerSecret(..)");
    }

    #[test]
    fn what_can_not_be_a_secret_is_refused_without_repeating_it() {
        for bad in ["", "short", "0123456789 abcdef", "0123456789abcdeä"] {
            let error = BearerSecret::new(bad).unwrap_err().to_string();
            assert!(error.contains("at least 16 characters"), "{error}");
            assert!(bad.is_empty() || !error.contains(bad), "{error}");
        }
    }

    #[test]
    fn the_scheme_of_a_header_is_read_without_regard_to_case() {
        assert_eq!(bearer(b"Bearer abc"), Some(&b"abc"[..]));
        assert_eq!(bearer(b"bEARER   abc "), Some(&b"abc"[..]));
        for bad in [&b""[..], b"Bearer", b"Basic abc", b"Bearerabc"] {
            assert_eq!(bearer(bad), None);
        }
    }

    #[test]
    fn roles_may_do_what_the_table_says() {
        let member = |text: &str| Caller::Member(text.parse().unwrap());
        let cluster = "kolo://cluster-0000000000000001";
        let driver = member(&format!("{cluster}/driver/driver-000000000000000a"));
        let node = member(&format!("{cluster}/node/node-000000000000000b"));
        let head = member(&format!("{cluster}/head/head"));
        let worker = member(&format!("{cluster}/worker/job-0000000000000001/0"));
        let owner = DriverId(10);
        for (caller, operator, own, of_another_driver, other_job) in [
            (Caller::Bearer, true, true, true, true),
            (driver, true, true, false, true),
            (worker, false, true, true, false),
            (node, false, false, false, false),
            (head, false, false, false, false),
        ] {
            assert_eq!(caller.operator().is_ok(), operator, "{caller:?}");
            assert_eq!(caller.meets(JobId(1), owner).is_ok(), own, "{caller:?}");
            let other = caller.meets(JobId(1), DriverId(11)).is_ok();
            assert_eq!(other, of_another_driver, "{caller:?}");
            assert_eq!(
                caller.meets(JobId(2), owner).is_ok(),
                other_job,
                "{caller:?}"
            );
        }
    }
}
