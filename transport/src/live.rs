//! Credentials that may be replaced while they are in use.

use std::fmt;
use std::sync::Arc;

use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::CertificateDer;
use tokio::sync::watch;

use crate::credentials::Credentials;
use crate::identity::{Identity, IdentityError};

/// Credentials of one identity, of which only the certificate and the key change. Clones share them.
///
/// Every TLS configuration that is made of them presents the newest in its next handshake. What is connected stays
/// connected: TLS looks at a certificate in the handshake only.
#[derive(Clone)]
pub struct LiveCredentials {
    current: Arc<watch::Sender<Credentials>>,
    identity: Identity,
    authority: CertificateDer<'static>,
}

impl LiveCredentials {
    /// Begins with these.
    pub fn new(credentials: Credentials) -> Self {
        Self {
            identity: credentials.identity().clone(),
            authority: credentials.authority(),
            current: Arc::new(watch::Sender::new(credentials)),
        }
    }

    /// Who this is. Never changes.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The certificate of the cluster's authority. Never changes.
    pub fn authority(&self) -> CertificateDer<'static> {
        self.authority.clone()
    }

    /// The newest.
    pub fn current(&self) -> Credentials {
        self.current.borrow().clone()
    }

    /// Takes newer ones, for all handshakes that begin from now on.
    ///
    /// # Errors
    ///
    /// [`IdentityError::Certificate`] if they are of another identity or authority; nothing has changed then.
    pub fn replace(&self, credentials: Credentials) -> Result<(), IdentityError> {
        let identity = credentials.identity();
        if *identity != self.identity || credentials.authority() != self.authority {
            return Err(IdentityError::Certificate {
                reason: format!(
                    "it is for {}, and {} can't become another",
                    identity.uri(),
                    self.identity.uri()
                ),
            });
        }
        self.current.send_replace(credentials);
        Ok(())
    }

    /// Tells of each replacement.
    pub fn changes(&self) -> watch::Receiver<Credentials> {
        self.current.subscribe()
    }

    fn certified(&self) -> Arc<CertifiedKey> {
        self.current.borrow().certified()
    }
}

impl From<Credentials> for LiveCredentials {
    fn from(credentials: Credentials) -> Self {
        Self::new(credentials)
    }
}

impl From<&Credentials> for LiveCredentials {
    fn from(credentials: &Credentials) -> Self {
        Self::new(credentials.clone())
    }
}

impl From<&LiveCredentials> for LiveCredentials {
    fn from(credentials: &LiveCredentials) -> Self {
        credentials.clone()
    }
}

impl ResolvesServerCert for LiveCredentials {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.certified())
    }
}

impl ResolvesClientCert for LiveCredentials {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.certified())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

impl fmt::Debug for LiveCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LiveCredentials")
            .field("identity", &self.identity.to_string())
            .finish_non_exhaustive()
    }
}
