//! A cluster's certificate authority.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData,
    SanType,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, CertificateSigningRequestDer};
use time::OffsetDateTime;

use crate::credentials::{Credentials, crypto, generate_key, read_key};
use crate::files;
pub use crate::fingerprint::{Fingerprint, ParseFingerprintError};
use crate::identity::{Identity, IdentityError, Role};
use crate::ids::ClusterId;
use crate::random::RandomId as _;
use crate::random::random_u64;
use crate::validity::CLOCK_SKEW;
use crate::verify::SERVER_NAME;

const FILE: &str = "authority.pem";

/// How long an authority is valid.
const AUTHORITY_VALIDITY: Duration = Duration::from_secs(20 * 365 * 24 * 3600);

/// How long a certificate from [`Authority::issue`] is valid: one year.
pub const DEFAULT_VALIDITY: Duration = Duration::from_secs(365 * 24 * 3600);

/// A cluster's certificate authority: its key signs the certificates of all members.
///
/// Whoever has the key can be anyone in the cluster. It stays in the head.
pub struct Authority {
    cluster: ClusterId,
    certificate: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// A new authority, in memory alone.
    ///
    /// # Errors
    ///
    /// [`IdentityError::Crypto`].
    pub fn create(cluster: ClusterId) -> Result<Self, IdentityError> {
        let key = generate_key()?;
        let mut params = CertificateParams::default();
        set_validity(&mut params, AUTHORITY_VALIDITY);
        params.distinguished_name = DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::CommonName, cluster.to_string());
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let certificate = params.self_signed(&key).map_err(crypto)?;
        Ok(Self {
            cluster,
            certificate: certificate.into(),
            issuer: Issuer::new(params, key),
        })
    }

    /// The authority in `dir`; a new one for a new cluster at the first start.
    ///
    /// It is one file, `authority.pem` of mode 0600, in a folder of mode 0700. Two processes that start at once get the
    /// same authority.
    ///
    /// # Errors
    ///
    /// [`IdentityError`], which names the file.
    pub fn open(dir: &Path) -> Result<Self, IdentityError> {
        let path = dir.join(FILE);
        files::create_dir(dir)?;
        files::check_dir(dir)?;
        if !path.exists() {
            let new = Self::create(ClusterId::random())?;
            let pem = files::pem([
                ("CERTIFICATE", &new.certificate),
                ("PRIVATE KEY", &new.issuer.key().serialize_der()),
            ]);
            let staged = files::stage(&path, pem.as_bytes()).and_then(files::Staged::create);
            if staged.map_err(files::failed(&path))? {
                files::sync_dir(dir).map_err(files::failed(dir))?;
                return Ok(new);
            }
        }
        Self::load(&path)
    }

    fn load(path: &Path) -> Result<Self, IdentityError> {
        let refuse = |reason: &str| IdentityError::Content {
            path: path.to_owned(),
            reason: reason.to_owned(),
        };
        let pem = files::read_private(path)?;
        let certificate = CertificateDer::from_pem_slice(&pem)
            .map_err(|_| refuse("it holds no certificate in PEM"))?;
        let key = read_key(path, &pem)?;
        let (_, parsed) = x509_parser::parse_x509_certificate(&certificate)
            .map_err(|_| refuse("its certificate does not parse"))?;
        if parsed.public_key().subject_public_key.data.as_ref() != key.public_key_raw() {
            return Err(refuse("its certificate is for another private key"));
        }
        let cluster = parsed
            .subject()
            .iter_common_name()
            .next()
            .and_then(|name| name.as_str().ok())
            .and_then(|name| name.parse().ok())
            .filter(|_| parsed.is_ca())
            .ok_or_else(|| refuse("its certificate is not that of an authority of kolo"))?;
        let issuer = Issuer::from_ca_cert_der(&certificate, key)
            .map_err(|error| refuse(&error.to_string()))?;
        Ok(Self {
            cluster,
            certificate,
            issuer,
        })
    }

    /// The cluster.
    pub fn cluster(&self) -> ClusterId {
        self.cluster
    }

    /// The authority's own certificate.
    pub fn certificate(&self) -> CertificateDer<'static> {
        self.certificate.clone()
    }

    /// By which a joiner recognises the authority.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.certificate)
    }

    /// Certifies that the key of a signing request belongs to `role` and `name`. The names in the request
    /// don't count.
    ///
    /// # Errors
    ///
    /// [`IdentityError::Request`] if the request is not signed by its own key; [`IdentityError::Name`] if the
    /// name does not fit the role; [`IdentityError::Crypto`].
    pub fn sign(
        &self,
        csr_der: &[u8],
        role: Role,
        name: &str,
        valid: Duration,
    ) -> Result<CertificateDer<'static>, IdentityError> {
        let request =
            CertificateSigningRequestParams::from_der(&CertificateSigningRequestDer::from(csr_der))
                .map_err(|error| IdentityError::Request {
                    reason: error.to_string(),
                })?;
        let key = &request.public_key;
        // An uncompressed point on P-256; the algorithm alone does not tell the curve.
        if key.algorithm() != &rcgen::PKCS_ECDSA_P256_SHA256 || key.der_bytes().len() != 65 {
            return Err(IdentityError::Request {
                reason: "its key is not an ECDSA key on P-256".to_owned(),
            });
        }
        self.certify(key, role, name, valid)
    }

    /// A new key with its certificate, valid for [`DEFAULT_VALIDITY`]: for the head itself and for members in
    /// the same process.
    ///
    /// # Errors
    ///
    /// [`IdentityError::Name`], [`IdentityError::Crypto`].
    pub fn issue(&self, role: Role, name: &str) -> Result<Credentials, IdentityError> {
        self.issue_for(role, name, DEFAULT_VALIDITY)
    }

    /// As [`Authority::issue`], valid for `valid` from now on.
    ///
    /// # Errors
    ///
    /// As [`Authority::issue`].
    pub fn issue_for(
        &self,
        role: Role,
        name: &str,
        valid: Duration,
    ) -> Result<Credentials, IdentityError> {
        let key = generate_key()?;
        let certificate = self.certify(&key, role, name, valid)?;
        Credentials::new(certificate, self.certificate.clone(), key)
    }

    fn certify(
        &self,
        key: &impl PublicKeyData,
        role: Role,
        name: &str,
        valid: Duration,
    ) -> Result<CertificateDer<'static>, IdentityError> {
        let identity = Identity::new(self.cluster, role, name)?;
        let mut params = CertificateParams::default();
        set_validity(&mut params, valid);
        params.distinguished_name = DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::CommonName, format!("{role} {name}"));
        params.serial_number = Some(random_u64().into());
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        // Every member both listens and connects.
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        params.use_authority_key_identifier_extension = true;
        params.subject_alt_names = vec![
            SanType::DnsName(SERVER_NAME.try_into().map_err(crypto)?),
            SanType::URI(identity.uri().try_into().map_err(crypto)?),
        ];
        let certificate = params.signed_by(key, &self.issuer).map_err(crypto)?;
        Ok(certificate.into())
    }
}

fn set_validity(params: &mut CertificateParams, valid: Duration) {
    let now = OffsetDateTime::now_utc();
    params.not_before = now - CLOCK_SKEW;
    // 9999 is the last year that a certificate can name; anything that far is "for ever".
    params.not_after = time::Duration::try_from(valid)
        .ok()
        .and_then(|valid| now.checked_add(valid))
        .unwrap_or_else(|| rcgen::date_time_ymd(9999, 1, 1));
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority")
            .field("cluster", &self.cluster)
            .finish_non_exhaustive()
    }
}
