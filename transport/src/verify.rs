//! Checks of certificates, and the crypto that they are made with.

use std::sync::{Arc, OnceLock};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::sign::CertifiedKey;
use rustls::{CertificateError, DigitallySignedStruct, RootCertStore, SignatureScheme};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};

use crate::identity::IdentityError;
use crate::suites;

/// The DNS name in every member's certificate, which clients ask for.
pub const SERVER_NAME: &str = "kolo";

/// The crypto provider: AWS-LC for keys, signatures and random numbers; AES-128-GCM first, which costs the least per packet,
/// from *ring* on processors for which AWS-LC has no wide code.
pub fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: OnceLock<Arc<CryptoProvider>> = OnceLock::new();
    Arc::clone(PROVIDER.get_or_init(|| {
        Arc::new(CryptoProvider {
            cipher_suites: suites::suites(),
            ..aws_lc_rs::default_provider()
        })
    }))
}

pub(crate) fn roots(
    authority: &CertificateDer<'static>,
) -> Result<Arc<RootCertStore>, rustls::Error> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.clone())?;
    Ok(Arc::new(roots))
}

pub(crate) fn server_verifier(
    authority: &CertificateDer<'static>,
) -> Result<Arc<WebPkiServerVerifier>, rustls::Error> {
    WebPkiServerVerifier::builder_with_provider(roots(authority)?, provider())
        .build()
        .map_err(|error| rustls::Error::General(error.to_string()))
}

/// A key and its chain as TLS takes them.
pub(crate) fn certified_key(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<CertifiedKey, rustls::Error> {
    CertifiedKey::from_der(chain, key, &provider())
}

/// Whether the dates of a certificate count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dates {
    Count,
    /// For who wants to know what is wrong with the clocks.
    DoNotCount,
}

/// Checks that `certificate` is a member's, signed by `authority` and valid now if dates count.
pub(crate) fn verify_member(
    certificate: &CertificateDer<'static>,
    authority: &CertificateDer<'static>,
    dates: Dates,
) -> Result<(), IdentityError> {
    let refuse = |error: rustls::Error| {
        IdentityError::Certificate {
        reason: match error {
            rustls::Error::InvalidCertificate(
                CertificateError::Expired | CertificateError::ExpiredContext { .. },
            ) => "it has ended; join, or log in, again with a new token, if this host's clock is right".to_owned(),
            rustls::Error::InvalidCertificate(CertificateError::NotValidYetContext {
                time,
                not_before,
            }) => format!(
                "its time comes in {}: this host's clock is behind that of the head; set it right (`kolo doctor`)",
                span(not_before.as_secs().saturating_sub(time.as_secs()))
            ),
            error => error.to_string(),
        },
    }
    };
    let name = ServerName::try_from(SERVER_NAME).expect("it is a DNS name");
    let verifier = server_verifier(authority).map_err(refuse)?;
    let (now, intermediates, ocsp) = (UnixTime::now(), &[], &[]);
    match dates {
        Dates::Count => verifier.verify_server_cert(certificate, intermediates, &name, ocsp, now),
        Dates::DoNotCount => {
            Undated(verifier).verify_server_cert(certificate, intermediates, &name, ocsp, now)
        }
    }
    .map_err(refuse)?;
    Ok(())
}

/// A span of time, in its two largest units.
pub(crate) fn span(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{minutes}m {}s", seconds % 60),
        3600..86400 => format!("{hours}h {}m", minutes % 60),
        _ => format!("{days}d {}h", hours % 24),
    }
}

/// Checks all but the dates: a certificate whose time has not come, or is over, is checked as of the nearest moment of its life.
#[derive(Debug)]
pub(crate) struct Undated(pub(crate) Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for Undated {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let check = |at| {
            self.0
                .verify_server_cert(end_entity, intermediates, server_name, ocsp_response, at)
        };
        match check(now) {
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidYetContext { not_before: at, .. }
                | CertificateError::ExpiredContext { not_after: at, .. },
            )) => check(at),
            checked => checked,
        }
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0
            .verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}
