//! Who calls the API, and what that lets them do.
//!
//! | caller | may |
//! |---|---|
//! | the bearer token, or a driver's certificate | see the cluster and all jobs, stop jobs |
//! | the certificate of an administrator | drain nodes, and let them take work again |
//! | the bearer token, the driver that owns a job, or a worker of it | use the job's rendezvous |
//! | anyone | `/healthz`, `/readyz`, the OpenAPI document |
//!
//! Who presents a credential that is not good is refused, even where a second one is: it is a mistake to be told.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};

use actix_web::HttpRequest;
use actix_web::http::header;
use kolo_transport::identity::{Identity, Role};
use subtle::ConstantTimeEq;

use super::api::HeadApi;
use super::connection::Peer;
use super::error::ApiError;
use crate::limiter::Attempts;

/// The fewest characters of a bearer secret.
const SHORTEST: usize = 16;

/// The fewest bits of a bearer secret, as [`strength`] counts them: 16 random letters and digits have 95.
const WEAKEST: f64 = 80.0;

/// A secret that lets its bearer use the API as a driver may. Kept as a hash.
#[derive(Clone)]
pub struct BearerSecret {
    hash: [u8; 32],
}

/// A text that is no bearer secret. Does not repeat the text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a bearer secret has at least {SHORTEST} characters, all of them visible ASCII, that nobody can guess, such as what \
     `openssl rand -base64 24` prints; this one {0}"
)]
pub struct BearerSecretError(&'static str);

impl BearerSecret {
    /// The secret of this text, without white space around it.
    ///
    /// # Errors
    ///
    /// If it is shorter than 16 characters, has others than visible ASCII, which a header can't hold, or is easily guessed:
    /// digits alone, repetitions, sequences.
    pub fn new(text: &str) -> Result<Self, BearerSecretError> {
        let text = text.trim();
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(BearerSecretError("has other characters"));
        }
        if text.len() < SHORTEST {
            return Err(BearerSecretError("is shorter"));
        }
        if strength(text.as_bytes()) < WEAKEST {
            return Err(BearerSecretError("is too easy to guess"));
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

/// About how many bits a guesser has to get right, if nothing but the kinds of its characters is known. A character that goes on
/// with a repetition or a sequence counts nothing.
fn strength(text: &[u8]) -> f64 {
    let of = |is: fn(&u8) -> bool, size: u32| if text.iter().any(is) { size } else { 0 };
    // Hexadecimal digits are the letters of no other secret.
    let most = if text.iter().all(u8::is_ascii_hexdigit) {
        16
    } else {
        u32::MAX
    };
    let alphabet = of(u8::is_ascii_digit, 10)
        + of(u8::is_ascii_lowercase, 26)
        + of(u8::is_ascii_uppercase, 26)
        + of(u8::is_ascii_punctuation, 32);
    let step = |at: usize| i16::from(text[at]) - i16::from(text[at - 1]);
    let is_known = |at: usize| {
        let goes_on = at >= 2 && step(at) == step(at - 1) && step(at).abs() <= 1;
        let again = at >= 3 && text[..at].windows(3).any(|seen| *seen == text[at - 2..=at]);
        goes_on || again
    };
    let new = (0..text.len()).filter(|at| !is_known(*at)).count();
    new as f64 * f64::from(alphabet.min(most)).log2()
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
    /// Who sent a request. `secret` is the head's bearer secret, if it has one. Who has given too many wrong ones is refused,
    /// whatever this one is.
    pub(super) fn of(
        request: &HttpRequest,
        secret: Option<&BearerSecret>,
        attempts: &Attempts,
    ) -> Result<Self, ApiError> {
        if let Some(value) = request.headers().get(header::AUTHORIZATION) {
            // A connection has a peer; one that has gone meanwhile may be any.
            let peer = request
                .peer_addr()
                .map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |peer| peer.ip());
            attempts.attempt(peer).map_err(|again_in| {
                ApiError::too_many(
                    format!("too many wrong bearer tokens from {peer}; try again later"),
                    again_in,
                )
            })?;
            return match (bearer(value.as_bytes()), secret) {
                (Some(given), Some(secret)) if secret.is(given) => {
                    attempts.good(peer);
                    Ok(Self::Bearer)
                }
                _ => {
                    attempts.wrong.line(|| {
                        tracing::warn!(%peer, "a request over HTTPS with a wrong bearer token was refused");
                    });
                    Err(ApiError::unauthenticated(
                        "the Authorization header is not `Bearer` with this head's bearer token",
                    ))
                }
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

    /// Checks that the caller may drain nodes.
    pub(super) fn administrator(&self, head: &dyn HeadApi) -> Result<(), ApiError> {
        match self {
            Self::Member(identity) if head.is_administrator(identity) => Ok(()),
            _ => Err(ApiError::forbidden(
                "only an administrator may do this; present the certificate in the folder `admin` of the head's state folder",
            )),
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
        let secret = BearerSecret::new(" 7f3k9a0x2mq8zt5w\n").unwrap();
        assert!(secret.is(b"7f3k9a0x2mq8zt5w"));
        for other in [
            &b""[..],
            b"7f3k9a0x2mq8zt5",
            b"7f3k9a0x2mq8zt5ww",
            b"7f3k9a0x2mq8zt5W",
        ] {
            assert!(!secret.is(other));
        }
        assert_eq!(format!("{secret:?}"), "BearerSecret(..)");
    }

    #[test]
    fn what_can_not_be_a_secret_is_refused_without_repeating_it() {
        for (bad, why) in [
            ("", "is shorter"),
            ("tiny", "is shorter"),
            ("7f3k9a0x2mq8zt5", "is shorter"),
            ("7f3k9a0x 2mq8zt5w", "has other characters"),
            ("7f3k9a0x2mq8zt5ä", "has other characters"),
            ("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "easy to guess"),
            ("passwordpasswordpassword", "easy to guess"),
            ("changemechangemechangeme", "easy to guess"),
            ("0123456789abcdef", "easy to guess"),
            ("abcdefghijklmnopqrstuvwxyz", "easy to guess"),
            ("zyxwvutsrqponmlkjihgfedcba9876543210", "easy to guess"),
            ("12345678901234567890", "easy to guess"),
            ("8350172946120573", "easy to guess"),
        ] {
            let error = BearerSecret::new(bad).unwrap_err().to_string();
            assert!(error.contains("at least 16 characters"), "{error}");
            assert!(error.contains(why), "{bad}: {error}");
            assert!(error.contains("openssl rand") && !error.contains('\n'));
            assert!(bad.is_empty() || !error.contains(bad), "{error}");
        }
    }

    #[test]
    fn what_generators_of_secrets_make_is_taken() {
        for good in [
            // openssl rand -base64 12, 18, 24 and 32
            "sPz0hq3Vx9yJ4c1T",
            "pK1vC9Yb3nQ0m7WdZx2r+e8h",
            "Hq0vJ3k9yS1uQ7xW5mZbD2n4rT6cLpEg",
            "3Jp9VQb0nY1kX7mWz5Tr2uLd8sHc4gEa6oNfKiBt+v0=",
            // openssl rand -hex 16, with repetitions, as they come
            "9f86d081884c7d659a2feaa0c55ad015",
            "00e1f5a20b7c3d46988e12ab34f0c7d9",
            // uuidgen, and 24 letters
            "b3f1c2d4-8e7a-4f60-9c15-2ad7e08b6f93",
            "qhzrkwpmvbtxcjlgdnfsyaeu",
        ] {
            BearerSecret::new(good).unwrap();
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
        for (caller, operator) in [
            (Caller::Bearer, true),
            (driver, true),
            (worker, false),
            (node, false),
            (head, false),
        ] {
            assert_eq!(caller.operator().is_ok(), operator, "{caller:?}");
        }
    }
}
