//! Why a socket or a connection could not be had.

use std::net::SocketAddr;

use quinn::{ConnectionError, TransportErrorCode};

use crate::end::{CloseCode, ConnectionLost};
use crate::frame::FrameError;
use crate::identity::Identity;
use crate::tls::TlsError;
use crate::verify::span;

/// Why an [`Endpoint`](super::Endpoint) could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// The address could not be bound: it is taken, or not one of this host. Choose another, or port 0.
    #[error("UDP address {address} can't be used: {error}")]
    Socket {
        /// Which.
        address: SocketAddr,
        /// What the operating system said.
        error: std::io::Error,
    },
    /// The TCP port can't be listened on: another process has it.
    #[error("TCP address {address} can't be listened on: {error}")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// What the operating system said.
        error: std::io::Error,
    },
    /// A setting has a value that it can't have.
    #[error("setting `{field}`: {reason}")]
    Config {
        /// Which.
        field: &'static str,
        /// What is allowed.
        reason: String,
    },
    /// TLS could not be set up with the credentials.
    #[error(transparent)]
    Tls(TlsError),
}

/// Why there is no connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// Nobody answered in time: nothing listens there, a firewall drops the packets, or the peer hangs. Check address and
    /// port.
    #[error("{address} did not answer in time; is the process running, and is its UDP port open?")]
    TimedOut {
        /// The peer's address.
        address: SocketAddr,
    },
    /// The address can't be connected to, for instance because of its port 0.
    #[error("can't connect to {address}: {reason}")]
    Address {
        /// The peer's address.
        address: SocketAddr,
        /// Why.
        reason: String,
    },
    /// The network has no way to the peer at the moment, or the peer ended the connection before it said anything. Try again; if
    /// that does not help, check routes and firewalls.
    #[error("{address} can't be reached: {reason}")]
    Unreachable {
        /// The peer's address.
        address: SocketAddr,
        /// What the operating system said.
        reason: String,
    },
    /// This endpoint is closed.
    #[error("this endpoint is closed")]
    ClosedHere,
    /// The peer's certificate is not one of this cluster. The address is that of another cluster, or the
    /// credentials are old.
    #[error("{address} is not a member of this cluster: {reason}")]
    Certificate {
        /// The peer's address.
        address: SocketAddr,
        /// What is wrong with it.
        reason: String,
    },
    /// A member of this cluster, but not the one that was looked for.
    #[error("{address} is {found}, but {expected} was looked for; check the address")]
    WrongPeer {
        /// The peer's address.
        address: SocketAddr,
        /// Who was looked for.
        expected: String,
        /// Who is there.
        found: Box<Identity>,
    },
    /// The peer does not take this side's certificate. Join the peer's cluster.
    #[error("{address} refused this side's certificate: {reason}")]
    Rejected {
        /// The peer's address.
        address: SocketAddr,
        /// What the peer said.
        reason: String,
    },
    /// A certificate is not valid yet, or any more, by the clock of who checks it: one of the two clocks is wrong, or this
    /// side's certificate has ended.
    #[error("{}", dated.told(*address, *whose))]
    Date {
        /// The peer's address.
        address: SocketAddr,
        /// What the clock says that it was checked by, and what the certificate says.
        dated: Dated,
        /// Whose certificate it is.
        whose: Whose,
    },
    /// The peer speaks another version of the protocol. Use the same version of kolo everywhere.
    #[error(
        "{address} does not speak this version of the protocol ({protocol}); use the same version of kolo on all hosts",
        protocol = String::from_utf8_lossy(super::ALPN)
    )]
    Version {
        /// The peer's address.
        address: SocketAddr,
    },
    /// The peer has too many handshakes at once. Try again.
    #[error("{address} is busy")]
    Busy {
        /// The peer's address.
        address: SocketAddr,
    },
    /// The connection ended during the handshake.
    #[error("the connection to {address} ended at once: {lost}")]
    Lost {
        /// The peer's address.
        address: SocketAddr,
        /// How.
        lost: ConnectionLost,
    },
}

/// Whose certificate is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// This side's, which the peer has checked by its clock.
    Own,
    /// The peer's, which this side has checked by its clock.
    Theirs,
}

/// A certificate, and a clock by which its time has not come or is over. In seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dated {
    /// What the clock said.
    pub clock: u64,
    /// The end of the certificate's life on that side: its first or its last second.
    pub limit: u64,
}

impl Dated {
    /// Reads it from the words of rustls, in which alone QUIC hands it over.
    fn of(reason: &str) -> Option<Self> {
        let number_after = |mark: &str| {
            let (_, rest) = reason.split_once(mark)?;
            let end = rest
                .find(|c: char| !c.is_ascii_digit())
                .unwrap_or(rest.len());
            rest[..end].parse().ok()
        };
        Some(Self {
            clock: number_after("verification time ")?,
            limit: number_after("is not valid before ")
                .or_else(|| number_after("is not valid after "))?,
        })
    }

    /// How far the clock is outside the certificate's life, in seconds.
    #[must_use]
    pub fn outside(&self) -> u64 {
        self.clock.abs_diff(self.limit)
    }

    /// Whether the certificate's time has not come yet.
    #[must_use]
    pub fn is_early(&self) -> bool {
        self.clock < self.limit
    }

    fn told(&self, address: SocketAddr, whose: Whose) -> String {
        let by = span(self.outside());
        let to_do = "one of the two clocks is wrong: `kolo doctor` tells by how much";
        match (whose, self.is_early()) {
            (Whose::Theirs, true) => {
                format!(
                    "the certificate of {address} is not valid before {by} from now by this host's clock; {to_do}"
                )
            }
            (Whose::Theirs, false) => {
                format!(
                    "the certificate of {address} has ended {by} ago by this host's clock; {to_do}"
                )
            }
            (Whose::Own, true) => format!(
                "{address} refused this side's certificate, which is not valid before {by} from now by its clock; {to_do}"
            ),
            (Whose::Own, false) => format!(
                "{address} refused this side's certificate, which has ended {by} ago by its clock; join, or log in, again with a \
                 new token, if the clocks agree (`kolo doctor`)"
            ),
        }
    }
}

impl ConnectError {
    /// Whether another attempt may work without any change on this side.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::TimedOut { .. } | Self::Unreachable { .. } | Self::Busy { .. } => true,
            Self::Lost { lost, .. } => lost.is_retryable(),
            _ => false,
        }
    }

    pub(crate) fn start(address: SocketAddr, error: &quinn::ConnectError) -> Self {
        match error {
            quinn::ConnectError::EndpointStopping => Self::ClosedHere,
            other => Self::Address {
                address,
                reason: other.to_string(),
            },
        }
    }

    pub(crate) fn handshake(address: SocketAddr, error: ConnectionError) -> Self {
        match &error {
            ConnectionError::TimedOut => Self::TimedOut { address },
            ConnectionError::LocallyClosed => Self::ClosedHere,
            ConnectionError::ConnectionClosed(close)
                if close.error_code == TransportErrorCode::CONNECTION_REFUSED =>
            {
                Self::Busy { address }
            }
            ConnectionError::ConnectionClosed(close) => match alert(close.error_code) {
                Some(NO_APPLICATION_PROTOCOL) => Self::Version { address },
                Some(alert) if is_about_certificate(alert) => {
                    let reason = String::from_utf8_lossy(&close.reason);
                    match Dated::of(&reason) {
                        Some(dated) => Self::Date {
                            address,
                            dated,
                            whose: Whose::Own,
                        },
                        None => Self::Rejected {
                            address,
                            reason: reason.into_owned(),
                        },
                    }
                }
                _ => Self::lost(address, error),
            },
            ConnectionError::TransportError(failure) => match alert(failure.code) {
                Some(NO_APPLICATION_PROTOCOL) => Self::Version { address },
                Some(alert) if is_about_certificate(alert) => match Dated::of(&failure.reason) {
                    Some(dated) => Self::Date {
                        address,
                        dated,
                        whose: Whose::Theirs,
                    },
                    None => Self::Certificate {
                        address,
                        reason: explained(&failure.reason),
                    },
                },
                _ => Self::lost(address, error),
            },
            ConnectionError::VersionMismatch => Self::Version { address },
            _ => Self::lost(address, error),
        }
    }

    /// Why there was no handshake. The peer has not shown who it is: what it says to end the connection may come from
    /// anybody on the way, and does not count as the word of a member (such as that this side was revoked).
    pub(crate) fn before_proof(address: SocketAddr, error: ConnectionError) -> Self {
        // A head refuses a certificate when this side knows it already: what comes earlier is not its word.
        let is_refusal = match &error {
            ConnectionError::ApplicationClosed(_) => true,
            ConnectionError::ConnectionClosed(close) => {
                alert(close.error_code).is_some_and(is_about_certificate)
            }
            _ => false,
        };
        if !is_refusal {
            return Self::handshake(address, error);
        }
        Self::Lost {
            address,
            lost: ConnectionLost::Closed {
                code: CloseCode::Internal,
                reason: "before the other side had shown who it is".to_owned(),
            },
        }
    }

    fn lost(address: SocketAddr, error: ConnectionError) -> Self {
        Self::Lost {
            address,
            lost: error.into(),
        }
    }

    /// After the handshake, when the peer did not let this side in.
    pub(crate) fn welcome(
        address: SocketAddr,
        connection: &quinn::Connection,
        error: &FrameError,
    ) -> Self {
        match connection.close_reason() {
            Some(reason) => Self::handshake(address, reason),
            None => Self::Lost {
                address,
                lost: ConnectionLost::Failed {
                    reason: error.to_string(),
                },
            },
        }
    }
}

const NO_APPLICATION_PROTOCOL: u8 = 120;

/// What rustls says of a peer's certificate, and what to do about an authority that is not this side's.
fn explained(reason: &str) -> String {
    if reason.contains("UnknownIssuer") {
        "the authority of another cluster has signed its certificate (UnknownIssuer); check the address, or, if the cluster \
             was made anew, log in again with a token of it, and let nodes join again without their old folder `identity`".to_owned()
    } else {
        reason.to_owned()
    }
}

/// The TLS alert behind a QUIC error code.
fn alert(code: TransportErrorCode) -> Option<u8> {
    let code = u64::from(code);
    (code & !0xff == 0x100).then_some(code as u8)
}

/// Whether a TLS alert (RFC 8446, section 6.2) is about who a peer is.
fn is_about_certificate(alert: u8) -> bool {
    // bad_certificate to unknown_ca, access_denied, decrypt_error, certificate_required
    matches!(alert, 42..=46 | 48 | 49 | 51 | 116)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn a_certificate_outside_its_life_is_told_with_the_distance() {
        let early = "invalid peer certificate: certificate not valid yet: verification time 1700000000 (UNIX), but \
                     certificate is not valid before 1700172800 (172800 seconds in future)";
        let late = "invalid peer certificate: certificate expired: verification time 1700172800 (UNIX), but \
                    certificate is not valid after 1700000000 (172800 seconds ago)";
        let address: SocketAddr = "127.0.0.1:1".parse().unwrap();
        for (reason, is_early, whose, part) in [
            (
                early,
                true,
                Whose::Theirs,
                "not valid before 2d 0h from now by this host's clock",
            ),
            (
                late,
                false,
                Whose::Theirs,
                "has ended 2d 0h ago by this host's clock",
            ),
            (
                early,
                true,
                Whose::Own,
                "not valid before 2d 0h from now by its clock",
            ),
            (
                late,
                false,
                Whose::Own,
                "has ended 2d 0h ago by its clock; join, or log in, again",
            ),
        ] {
            let dated = Dated::of(reason).unwrap();
            assert_eq!((dated.is_early(), dated.outside()), (is_early, 172_800));
            let error = ConnectError::Date {
                address,
                dated,
                whose,
            };
            assert!(error.to_string().contains(part), "{error}");
        }
        for other in [
            "",
            "invalid peer certificate: UnknownIssuer",
            "verification time",
            "verification time 99999999999999999999 is not valid before 1",
            "verification time 1 (UNIX), but",
        ] {
            assert_eq!(Dated::of(other), None, "{other}");
        }
    }

    #[test]
    fn nobody_can_say_that_this_side_was_revoked_before_showing_who_they_are() {
        let address: SocketAddr = "127.0.0.1:1".parse().unwrap();
        let closed = || {
            ConnectionError::ApplicationClosed(quinn::ApplicationClose {
                error_code: CloseCode::Revoked.varint(),
                reason: Bytes::from_static(b"you are out"),
            })
        };
        let code = |error| match error {
            ConnectError::Lost {
                lost: ConnectionLost::Closed { code, .. },
                ..
            } => code,
            other => panic!("{other}"),
        };
        let forged = ConnectError::before_proof(address, closed());
        assert!(forged.is_retryable() && !forged.to_string().contains("you are out"));
        assert_eq!(code(forged), CloseCode::Internal);
        assert_eq!(
            code(ConnectError::handshake(address, closed())),
            CloseCode::Revoked
        );
        // Nor that a certificate is no good (TLS: unknown authority).
        let alert = || {
            ConnectionError::ConnectionClosed(quinn::ConnectionClose {
                error_code: TransportErrorCode::crypto(48),
                frame_type: None,
                reason: Bytes::from_static(b"no good"),
            })
        };
        let forged = ConnectError::before_proof(address, alert());
        assert_eq!(code(forged), CloseCode::Internal);
        let rejected = ConnectError::handshake(address, alert());
        assert!(
            matches!(rejected, ConnectError::Rejected { .. }),
            "{rejected}"
        );
    }
}
