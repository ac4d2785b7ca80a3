//! TLS as kolo uses it: version 1.3 only, one crypto provider, the cluster's authority as the only root.
//!
//! Members know each other by the URI in their certificates ([`Identity`](crate::Identity)). The certificates
//! also carry the DNS name [`SERVER_NAME`], so that the ordinary verifier checks them; the role and name must be checked
//! after the handshake, as [`Endpoint`](crate::Endpoint) does.

use std::sync::{Arc, OnceLock};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::server::WebPkiClientVerifier;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, ServerConfig, SignatureScheme,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

use crate::fingerprint::Fingerprint;
use crate::live::LiveCredentials;
pub use crate::verify::{SERVER_NAME, provider};
use crate::verify::{Undated, roots, server_verifier};

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
