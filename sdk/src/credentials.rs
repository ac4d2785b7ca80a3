//! What a driver shows to a cluster, and where it comes from.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use kolo_transport::token::{JoinToken, secret_text};

use crate::error::CredentialsError;

/// `HOST:PORT` of the head.
pub(crate) const HEAD: &str = "KOLO_HEAD";
/// Directory of a driver's certificate and key.
const CREDENTIALS: &str = "KOLO_CREDENTIALS";
/// File that holds a driver's token.
const TOKEN_FILE: &str = "KOLO_TOKEN_FILE";

/// Proof that this process may use a cluster: a driver's certificate, or a token to get one with.
///
/// Made of [`kolo_transport::Credentials`] or a [`JoinToken`] by `into()`, or read from files.
#[derive(Debug, Clone)]
pub struct Credentials(pub(crate) Source);

#[derive(Debug, Clone)]
pub(crate) enum Source {
    Certificate {
        certificate: kolo_transport::Credentials,
        /// The directory that it was read from, where a renewed one goes.
        dir: Option<PathBuf>,
    },
    Token {
        token: JoinToken,
        /// Where to keep the certificate that it gets.
        save_to: Option<PathBuf>,
    },
}

impl From<kolo_transport::Credentials> for Credentials {
    fn from(credentials: kolo_transport::Credentials) -> Self {
        Self(Source::Certificate {
            certificate: credentials,
            dir: None,
        })
    }
}

impl From<JoinToken> for Credentials {
    fn from(token: JoinToken) -> Self {
        Self(Source::Token {
            token,
            save_to: None,
        })
    }
}

impl Credentials {
    /// Reads a certificate and its key from a directory that `kolo login` wrote, or the head for its administrator. When
    /// the certificate is renewed, the new one is put there if that is possible.
    ///
    /// # Errors
    ///
    /// [`CredentialsError::Directory`].
    pub fn load(dir: impl AsRef<Path>) -> Result<Self, CredentialsError> {
        let dir = dir.as_ref();
        match kolo_transport::Credentials::load(dir) {
            Ok(certificate) => Ok(Self(Source::Certificate {
                certificate,
                dir: Some(dir.to_owned()),
            })),
            Err(error) => Err(CredentialsError::Directory {
                dir: dir.to_owned(),
                error,
            }),
        }
    }

    /// A driver's token, as the head prints it. With it every connect makes a new driver identity.
    ///
    /// # Errors
    ///
    /// [`CredentialsError::Token`].
    pub fn token(text: &str) -> Result<Self, CredentialsError> {
        parse_token(text, "the text")
    }

    /// Reads a driver's token from a file.
    ///
    /// # Errors
    ///
    /// [`CredentialsError::TokenFile`] or [`CredentialsError::Token`].
    pub fn token_file(path: impl AsRef<Path>) -> Result<Self, CredentialsError> {
        let path = path.as_ref();
        let text = std::fs::read(path).and_then(|bytes| {
            secret_text(&bytes).ok_or_else(|| {
                std::io::Error::new(std::io::ErrorKind::InvalidData, "it is no text in UTF-8")
            })
        });
        match text {
            Ok(text) => parse_token(&text, &path.display().to_string()),
            Err(error) => Err(CredentialsError::TokenFile {
                path: path.to_owned(),
                error,
            }),
        }
    }

    /// What the environment says, for a head that was named without credentials:
    ///
    /// 1. the directory `KOLO_CREDENTIALS`. If it has no certificate yet and `KOLO_TOKEN_FILE` is set, the token is
    ///    used once and the certificate that it gets is kept there;
    /// 2. the token in `KOLO_TOKEN_FILE`;
    /// 3. the directory where `kolo login` puts credentials: `$XDG_CONFIG_HOME/kolo` or `~/.config/kolo`.
    ///
    /// # Errors
    ///
    /// [`CredentialsError::Missing`] if there are none; else as [`Credentials::load`] and
    /// [`Credentials::token_file`].
    pub fn from_env() -> Result<Self, CredentialsError> {
        from_vars(&|name| env::var_os(name))
    }
}

fn parse_token(text: &str, origin: &str) -> Result<Credentials, CredentialsError> {
    text.parse::<JoinToken>()
        .map(Credentials::from)
        .map_err(|error| CredentialsError::Token {
            origin: origin.to_owned(),
            reason: error.to_string(),
        })
}

/// The head that the environment names.
pub(crate) fn head_from_env() -> Result<Option<String>, CredentialsError> {
    match env::var(HEAD) {
        Ok(head) if head.is_empty() => Ok(None),
        Ok(head) => Ok(Some(head)),
        Err(env::VarError::NotPresent) => Ok(None),
        Err(env::VarError::NotUnicode(_)) => Err(CredentialsError::Variable { name: HEAD }),
    }
}

fn from_vars(
    var: &dyn Fn(&'static str) -> Option<OsString>,
) -> Result<Credentials, CredentialsError> {
    let path = |name| {
        var(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    match (path(CREDENTIALS), path(TOKEN_FILE)) {
        (Some(dir), Some(token)) if !kolo_transport::Credentials::are_in(&dir) => {
            let mut credentials = Credentials::token_file(token)?;
            if let Source::Token { save_to, .. } = &mut credentials.0 {
                *save_to = Some(dir);
            }
            return Ok(credentials);
        }
        (Some(dir), _) => return Credentials::load(dir),
        (None, Some(token)) => return Credentials::token_file(token),
        (None, None) => {}
    }
    let config = path("XDG_CONFIG_HOME").or_else(|| path("HOME").map(|home| home.join(".config")));
    match config
        .map(|config| config.join("kolo"))
        .filter(|dir| kolo_transport::Credentials::are_in(dir))
    {
        Some(dir) => Credentials::load(dir),
        None => Err(CredentialsError::Missing {
            head: path(HEAD)
                .map(|head| head.display().to_string())
                .unwrap_or_default(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::Duration;

    use kolo_transport::identity::Role;
    use kolo_transport::ids::{ClusterId, DriverId};
    use kolo_transport::token::{TokenBook, random_secret};
    use kolo_transport::{Authority, RandomId as _};

    use super::*;

    struct Files {
        dir: tempfile::TempDir,
        vars: HashMap<&'static str, PathBuf>,
    }

    impl Files {
        fn new() -> Self {
            Self {
                dir: tempfile::tempdir().unwrap(),
                vars: HashMap::new(),
            }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn read(&self) -> Result<Credentials, CredentialsError> {
            from_vars(&|name| {
                self.vars
                    .get(name)
                    .map(|path| path.clone().into_os_string())
            })
        }

        fn certificate(&self, dir: &str) -> PathBuf {
            let authority = Authority::create(ClusterId::random()).unwrap();
            let name = DriverId::random().to_string();
            let dir = self.path(dir);
            authority
                .issue(Role::Driver, &name)
                .unwrap()
                .save(&dir)
                .unwrap();
            dir
        }

        fn token(&self) -> PathBuf {
            let authority = Authority::create(ClusterId::random()).unwrap();
            let token = TokenBook::new().create(
                Role::Driver,
                Duration::from_secs(60),
                None,
                authority.fingerprint(),
                0,
                random_secret(),
            );
            let path = self.path("token");
            std::fs::write(&path, format!("{token}\n")).unwrap();
            path
        }
    }

    #[test]
    fn a_directory_is_used_before_a_token_and_a_token_before_the_login() {
        let mut files = Files::new();
        files.vars.insert("HOME", files.path("home"));
        let error = files.read().unwrap_err();
        assert!(matches!(error, CredentialsError::Missing { .. }), "{error}");

        files.certificate("home/.config/kolo");
        assert!(matches!(
            files.read().unwrap().0,
            Source::Certificate { .. }
        ));
        files.vars.insert(TOKEN_FILE, files.token());
        assert!(matches!(
            files.read().unwrap().0,
            Source::Token { save_to: None, .. }
        ));
        let dir = files.path("new");
        files.vars.insert(CREDENTIALS, dir.clone());
        let Source::Token { save_to, .. } = files.read().unwrap().0 else {
            panic!("a token")
        };
        assert_eq!(save_to, Some(dir));
        files.certificate("new");
        assert!(matches!(
            files.read().unwrap().0,
            Source::Certificate { .. }
        ));
    }

    #[test]
    fn what_is_wrong_is_told_with_its_place_and_without_the_secret() {
        let mut files = Files::new();
        files.vars.insert(CREDENTIALS, files.path("nowhere"));
        let text = files.read().unwrap_err().to_string();
        assert!(text.contains("nowhere"), "{text}");
        files.vars.clear();
        files.vars.insert(TOKEN_FILE, files.path("missing"));
        let text = files.read().unwrap_err().to_string();
        assert!(text.contains("missing"), "{text}");
        let path = files.path("bad");
        std::fs::write(&path, "kolo1.driver.hush").unwrap();
        files.vars.insert(TOKEN_FILE, path);
        let text = files.read().unwrap_err().to_string();
        assert!(text.contains("bad") && !text.contains("hush"), "{text}");
        assert!(Credentials::token("nonsense").is_err());
    }
}
