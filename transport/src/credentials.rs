//! A process's certificate and key.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use rcgen::{CertificateParams, DistinguishedName, KeyPair};
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::files;
use crate::identity::{Identity, IdentityError, identity_of};
use crate::validity::Validity;
use crate::verify::{self, Dates};

/// The file of an identity in its folder: the private key, the certificate, and that of the authority.
const FILE: &str = "identity.pem";

/// The certificate that says who this process is, its private key, and the cluster's authority, by which
/// others are checked. A clone shares them.
#[derive(Clone)]
pub struct Credentials {
    inner: Arc<Inner>,
}

struct Inner {
    identity: Identity,
    certificate: CertificateDer<'static>,
    authority: CertificateDer<'static>,
    key: KeyPair,
    validity: Validity,
    certified: Arc<CertifiedKey>,
}

impl Credentials {
    /// Puts the parts together, after checking that they belong together.
    pub(crate) fn new(
        certificate: CertificateDer<'static>,
        authority: CertificateDer<'static>,
        key: KeyPair,
    ) -> Result<Self, IdentityError> {
        Self::checked(certificate, authority, key, Dates::Count)
    }

    fn checked(
        certificate: CertificateDer<'static>,
        authority: CertificateDer<'static>,
        key: KeyPair,
        dates: Dates,
    ) -> Result<Self, IdentityError> {
        verify::verify_member(&certificate, &authority, dates)?;
        let identity = identity_of(&certificate)?;
        let (_, parsed) = x509_parser::parse_x509_certificate(&certificate).map_err(|error| {
            IdentityError::Certificate {
                reason: error.to_string(),
            }
        })?;
        if parsed.public_key().subject_public_key.data.as_ref() != key.public_key_raw() {
            return Err(IdentityError::WrongKey);
        }
        let validity = Validity::of(&parsed);
        let certified = verify::certified_key(
            vec![certificate.clone(), authority.clone()],
            PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
        )
        .map_err(|error| IdentityError::Crypto {
            reason: error.to_string(),
        })?;
        Ok(Self {
            inner: Arc::new(Inner {
                identity,
                certificate,
                authority,
                key,
                validity,
                certified: Arc::new(certified),
            }),
        })
    }

    /// Who this is.
    pub fn identity(&self) -> &Identity {
        &self.inner.identity
    }

    /// The certificate of the cluster's authority.
    pub fn authority(&self) -> CertificateDer<'static> {
        self.inner.authority.clone()
    }

    /// What to present to a peer: the certificate, then the authority's.
    pub fn chain(&self) -> Vec<CertificateDer<'static>> {
        vec![self.inner.certificate.clone(), self.inner.authority.clone()]
    }

    /// From when to when the certificate is valid.
    pub fn validity(&self) -> Validity {
        self.inner.validity
    }

    /// The certificate alone, in DER.
    pub fn certificate(&self) -> CertificateDer<'static> {
        self.inner.certificate.clone()
    }

    /// The chain and the key as TLS takes them.
    pub(crate) fn certified(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.inner.certified)
    }

    /// A request for another certificate of the same key, to be sent before this one ends.
    ///
    /// The key stays the same. A new key comes with a new join.
    ///
    /// # Errors
    ///
    /// [`IdentityError::Crypto`].
    pub fn renewal_request(&self) -> Result<Vec<u8>, IdentityError> {
        Ok(CertificateRequest::of(self.copy_key()?)?.der)
    }

    /// These credentials with the certificate that [`Credentials::renewal_request`] has brought.
    ///
    /// # Errors
    ///
    /// [`IdentityError::WrongKey`] or [`IdentityError::Certificate`] if it is for another key or another identity, or not
    /// signed by the same authority.
    pub fn renewed(&self, certificate: &[u8]) -> Result<Self, IdentityError> {
        let certificate = CertificateDer::from(certificate.to_vec());
        let renewed = Self::new(certificate, self.authority(), self.copy_key()?)?;
        if renewed.identity() == self.identity() {
            Ok(renewed)
        } else {
            Err(IdentityError::Certificate {
                reason: format!(
                    "it is for {}, not for {}",
                    renewed.identity().uri(),
                    self.identity().uri()
                ),
            })
        }
    }

    fn copy_key(&self) -> Result<KeyPair, IdentityError> {
        let der = PrivatePkcs8KeyDer::from(self.inner.key.serialize_der());
        KeyPair::try_from(der.secret_pkcs8_der()).map_err(crypto)
    }

    /// As [`Credentials::save`], into a folder that holds these credentials with an earlier certificate. False if the folder holds
    /// others by now, which it keeps.
    ///
    /// # Errors
    ///
    /// [`IdentityError`], which names the file.
    pub fn save_renewed(&self, dir: &Path) -> Result<bool, IdentityError> {
        let _alone = files::alone(dir);
        let path = dir.join(FILE);
        let key = read_key(&path, &files::read_private(&path)?)?;
        let is_same = key.public_key_raw() == self.inner.key.public_key_raw();
        if is_same {
            self.write(dir)?;
        }
        Ok(is_same)
    }

    /// The private key, for a TLS library. Never log or send it.
    pub fn private_key(&self) -> PrivateKeyDer<'static> {
        PrivatePkcs8KeyDer::from(self.inner.key.serialize_der()).into()
    }

    /// Writes `identity.pem` into `dir`: the private key, the certificate and that of the authority, in PEM. The file has mode 0600.
    /// If `dir` does not exist it is made (mode 0700). A file that is there is replaced in one step: whoever loads it meanwhile, or
    /// after a crash at any point, gets the old or the new one.
    ///
    /// # Errors
    ///
    /// [`IdentityError::File`].
    pub fn save(&self, dir: &Path) -> Result<(), IdentityError> {
        files::create_dir(dir)?;
        let _alone = files::alone(dir);
        self.write(dir)
    }

    fn write(&self, dir: &Path) -> Result<(), IdentityError> {
        let pem = files::pem([
            ("PRIVATE KEY", &self.inner.key.serialize_der()),
            ("CERTIFICATE", &self.inner.certificate),
            ("CERTIFICATE", &self.inner.authority),
        ]);
        let path = dir.join(FILE);
        files::replace(&path, pem.as_bytes()).map_err(files::failed(&path))
    }

    /// Whether a folder has what [`Credentials::load`] reads, good or not.
    #[must_use]
    pub fn are_in(dir: &Path) -> bool {
        dir.join(FILE).exists()
    }

    /// Reads what [`Credentials::save`] wrote, and checks that it belongs together.
    ///
    /// # Errors
    ///
    /// [`IdentityError`], which names the file.
    pub fn load(dir: &Path) -> Result<Self, IdentityError> {
        Self::load_checked(dir, Dates::Count)
    }

    /// As [`Credentials::load`], also if the certificate is not valid yet, or any more, by this host's clock: for who looks what
    /// is there, or what is wrong with the clock.
    ///
    /// # Errors
    ///
    /// As [`Credentials::load`].
    pub fn load_undated(dir: &Path) -> Result<Self, IdentityError> {
        Self::load_checked(dir, Dates::DoNotCount)
    }

    fn load_checked(dir: &Path, dates: Dates) -> Result<Self, IdentityError> {
        let path = dir.join(FILE);
        let pem = files::read_private(&path)?;
        files::check_dir(dir)?;
        let key = read_key(&path, &pem)?;
        let mut certificates = CertificateDer::pem_slice_iter(&pem).map_while(Result::ok);
        let (Some(certificate), Some(authority)) = (certificates.next(), certificates.next())
        else {
            return Err(IdentityError::Content {
                path,
                reason:
                    "it does not hold two certificates in PEM, the member's and the authority's"
                        .to_owned(),
            });
        };
        Self::checked(certificate, authority, key, dates).map_err(|error| IdentityError::Content {
            path,
            reason: error.to_string(),
        })
    }
}

/// The key in a PEM file. Says nothing of the file's content in errors.
pub(crate) fn read_key(path: &Path, pem: &[u8]) -> Result<KeyPair, IdentityError> {
    PrivatePkcs8KeyDer::from_pem_slice(pem)
        .ok()
        .and_then(|der| KeyPair::try_from(der.secret_pkcs8_der()).ok())
        .ok_or_else(|| IdentityError::Content {
            path: path.to_owned(),
            reason: "it holds no private key in PEM (PKCS #8)".to_owned(),
        })
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("identity", &self.inner.identity.to_string())
            .finish_non_exhaustive()
    }
}

/// A new key and the request to have it certified. The key leaves the process only by [`Credentials::save`].
pub struct CertificateRequest {
    key: KeyPair,
    der: Vec<u8>,
}

impl CertificateRequest {
    /// Makes a key (ECDSA on P-256) and a signing request for it.
    ///
    /// # Errors
    ///
    /// [`IdentityError::Crypto`].
    pub fn generate() -> Result<Self, IdentityError> {
        Self::of(generate_key()?)
    }

    fn of(key: KeyPair) -> Result<Self, IdentityError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        let request = params.serialize_request(&key).map_err(crypto)?;
        Ok(Self {
            der: request.der().to_vec(),
            key,
        })
    }

    /// The certificate signing request in DER.
    pub fn der(&self) -> &[u8] {
        &self.der
    }

    /// Takes the certificate that the authority made of the request. Both are in DER.
    ///
    /// # Errors
    ///
    /// [`IdentityError::WrongKey`] or [`IdentityError::Certificate`] if the certificate is for another key,
    /// not signed by `authority`, or not one of kolo.
    pub fn finish(
        self,
        certificate: &[u8],
        authority: &[u8],
    ) -> Result<Credentials, IdentityError> {
        Credentials::new(
            CertificateDer::from(certificate.to_vec()),
            CertificateDer::from(authority.to_vec()),
            self.key,
        )
    }
}

impl fmt::Debug for CertificateRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CertificateRequest").finish_non_exhaustive()
    }
}

pub(crate) fn generate_key() -> Result<KeyPair, IdentityError> {
    KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).map_err(crypto)
}

pub(crate) fn crypto(error: rcgen::Error) -> IdentityError {
    IdentityError::Crypto {
        reason: error.to_string(),
    }
}
