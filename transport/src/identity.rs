//! Identities in certificates, and what can be wrong with either.

use std::path::PathBuf;

pub use kolo_wire::identity::{HEAD_NAME, Identity, ParseIdentityError, ParseRoleError, Role};
use rustls_pki_types::CertificateDer;
use x509_parser::extensions::GeneralName;

/// The identity that a certificate carries. It says nothing about who signed it.
///
/// # Errors
///
/// [`IdentityError::Certificate`] if it is not a certificate of kolo: it must have exactly one URI.
pub fn identity_of(certificate: &CertificateDer<'_>) -> Result<Identity, IdentityError> {
    let refuse = |reason: String| IdentityError::Certificate { reason };
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate)
        .map_err(|error| refuse(error.to_string()))?;
    let names = parsed
        .subject_alternative_name()
        .map_err(|error| refuse(error.to_string()))?
        .map_or(&[][..], |extension| &extension.value.general_names);
    let mut uris = names.iter().filter_map(|name| match name {
        GeneralName::URI(uri) => Some(*uri),
        _ => None,
    });
    let (Some(uri), None) = (uris.next(), uris.next()) else {
        return Err(refuse(
            "it must have exactly one URI among its names".to_owned(),
        ));
    };
    uri.parse()
        .map_err(|error: ParseIdentityError| refuse(error.to_string()))
}

/// Why an identity, a certificate or an authority could not be made, read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// A file or folder could not be read or written. Check the path and its owner.
    #[error("{path}: {error}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What the operating system said.
        error: std::io::Error,
    },
    /// A file holds something else than it should. Restore it, or remove the folder and join again.
    #[error("{path}: {reason}", path = path.display())]
    Content {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A private key can be read by others. Take their rights away with `chmod 600`, and think about who has
    /// read it.
    #[error(
        "{path} has mode {mode:o}, so others can read the private key; `chmod 600` it, or join again",
        path = path.display()
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A folder for keys can be written by others than its owner, who could put keys of theirs there. Correct its mode.
    #[error(
        "{path} has mode {mode:o}, so others can put keys of theirs there; `chmod 700` it after a look at what is in it",
        path = path.display()
    )]
    Writable {
        /// The folder.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A certificate is not one of kolo, or not one of this cluster.
    #[error("the certificate is not usable: {reason}")]
    Certificate {
        /// What is wrong.
        reason: String,
    },
    /// A certificate and a private key don't belong together.
    #[error("the certificate is for another private key")]
    WrongKey,
    /// A certificate signing request does not parse, is not signed by its own key, or has a kind of key that
    /// kolo does not use.
    #[error("the certificate signing request is not usable: {reason}")]
    Request {
        /// What is wrong.
        reason: String,
    },
    /// The name does not fit the role.
    #[error(transparent)]
    Name(#[from] ParseIdentityError),
    /// A key or signature could not be made.
    #[error("a key or certificate could not be made: {reason}")]
    Crypto {
        /// What the library said.
        reason: String,
    },
}
