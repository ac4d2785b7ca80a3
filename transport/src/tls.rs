//! TLS as kolo uses it: version 1.3 only, one crypto provider, the cluster's authority as the only root.
//!
//! Members know each other by the URI in their certificates ([`Identity`](crate::Identity)). The certificates
//! also carry the DNS name [`SERVER_NAME`], so that the ordinary verifier checks them; the role and name must be checked
//! after the handshake, as [`Endpoint`](crate::Endpoint) does.

use std::sync::{Arc, OnceLock};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs;
use rustls::server::WebPkiClientVerifier;
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig,
    SignatureScheme,
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};

use crate::authority::Fingerprint;
use crate::identity::IdentityError;
use crate::live::LiveCredentials;
use crate::suites;

/// The DNS name in every member's certificate, which clients ask for.
pub const SERVER_NAME: &str = "kolo";

/// A TLS configuration could not be made: the credentials do not fit, which [`Credentials`](crate::Credentials) has checked, or a fault in kolo.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("TLS could not be set up: {0}")]
pub struct TlsError(String);

impl TlsError {
    pub(crate) fn new(error: impl std::fmt::Display) -> Self {
        Self(error.to_string())
    }
}

/// Whether a listener wants a certificate of the cluster from its clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientAuth {
    /// The handshake fails without one.
    Required,
    /// A client may have none. One that it presents must still be good.
    Optional,
}

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

fn roots(authority: &CertificateDer<'static>) -> Result<Arc<RootCertStore>, rustls::Error> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.clone())?;
    Ok(Arc::new(roots))
}

fn server_verifier(
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

/// The configuration of a listener that presents `credentials`: of [live](LiveCredentials) ones always the newest.
///
/// # Errors
///
/// [`TlsError`].
pub fn server_config(
    credentials: impl Into<LiveCredentials>,
    clients: ClientAuth,
    alpn: &[&[u8]],
) -> Result<ServerConfig, TlsError> {
    let credentials = credentials.into();
    let authority = credentials.authority();
    let verifier = WebPkiClientVerifier::builder_with_provider(
        roots(&authority).map_err(TlsError::new)?,
        provider(),
    );
    let verifier = match clients {
        ClientAuth::Required => verifier,
        ClientAuth::Optional => verifier.allow_unauthenticated(),
    }
    .build()
    .map_err(TlsError::new)?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(TlsError::new)?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(Arc::new(credentials));
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    // A resumed session would be as good as its certificate was when the ticket was made.
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// The configuration of a client that presents `credentials` (of [live](LiveCredentials) ones always the newest) and takes servers of the same cluster.
///
/// # Errors
///
/// [`TlsError`].
pub fn client_config(
    credentials: impl Into<LiveCredentials>,
    alpn: &[&[u8]],
) -> Result<ClientConfig, TlsError> {
    let credentials = credentials.into();
    let verifier = server_verifier(&credentials.authority()).map_err(TlsError::new)?;
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(TlsError::new)?
        .with_webpki_verifier(verifier)
        .with_client_cert_resolver(Arc::new(credentials));
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
}

/// As [`client_config`], and takes servers whose certificates are not valid yet, or any more, by this host's clock.
pub(crate) fn undated_client_config(
    credentials: impl Into<LiveCredentials>,
    alpn: &[&[u8]],
) -> Result<ClientConfig, TlsError> {
    let credentials = credentials.into();
    let verifier = server_verifier(&credentials.authority()).map_err(TlsError::new)?;
    let mut config = client_config(credentials, alpn)?;
    config
        .dangerous()
        .set_certificate_verifier(Arc::new(Undated(verifier)));
    Ok(config)
}

/// The configuration of a client that has no certificate yet and knows the cluster by its authority's
/// fingerprint.
pub(crate) fn joining_config(
    verifier: Arc<PinnedAuthority>,
    alpn: &[&[u8]],
) -> Result<ClientConfig, TlsError> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(TlsError::new)?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
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
struct Undated(Arc<WebPkiServerVerifier>);

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

/// Takes a server whose chain holds the authority with a known fingerprint, and checks the server's certificate
/// against that authority as usual.
#[derive(Debug)]
pub(crate) struct PinnedAuthority {
    fingerprint: Fingerprint,
    found: OnceLock<CertificateDer<'static>>,
    other: OnceLock<()>,
}

impl PinnedAuthority {
    pub(crate) fn new(fingerprint: Fingerprint) -> Self {
        Self {
            fingerprint,
            found: OnceLock::new(),
            other: OnceLock::new(),
        }
    }

    /// The authority, once a server has presented it.
    pub(crate) fn authority(&self) -> Option<CertificateDer<'static>> {
        self.found.get().cloned()
    }

    /// Whether a server has presented another authority.
    pub(crate) fn saw_another(&self) -> bool {
        self.other.get().is_some()
    }
}

impl ServerCertVerifier for PinnedAuthority {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let Some(authority) = intermediates
            .iter()
            .find(|certificate| Fingerprint::of(certificate) == self.fingerprint)
        else {
            self.other.get_or_init(|| ());
            return Err(CertificateError::UnknownIssuer.into());
        };
        let authority = authority.clone().into_owned();
        let verified = server_verifier(&authority)?.verify_server_cert(
            end_entity,
            &[],
            server_name,
            ocsp_response,
            now,
        )?;
        self.found.get_or_init(|| authority);
        Ok(verified)
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
        rustls::crypto::verify_tls13_signature(
            message,
            certificate,
            signature,
            &provider().signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider()
            .signature_verification_algorithms
            .supported_schemes()
    }
}
