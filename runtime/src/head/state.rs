//! What survives a head: its authority, its join tokens, who administers and who is out (D-1).

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kolo_transport::identity::Role;
use kolo_transport::ids::{ClusterId, DriverId};
use kolo_transport::token::random_secret;
use kolo_transport::{Authority, Credentials, IdentityError, JoinToken, RandomId as _, TokenBook};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::admin_path;
use super::config::HeadState;
use super::error::HeadError;
use super::members::Members;
use crate::private_file;

const MEMBERS: &str = "members.json";
const TOKENS: &str = "tokens.json";
const LOCK: &str = "lock";

/// The durable state of a head, and its authority.
pub(super) struct Store {
    authority: Authority,
    tokens: Mutex<TokenBook>,
    members: Mutex<Members>,
    dir: Option<Dir>,
}

struct Dir {
    path: PathBuf,
    admin: PathBuf,
    /// Locked for as long as it is open.
    _lock: File,
}

/// Seconds since 1970, for what must hold across restarts.
pub(super) fn unix_now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> HeadError {
    let path = path.to_owned();
    move |error| HeadError::Store { path, error }
}

impl Store {
    /// `life` is that of the certificate of the operator.
    pub(super) fn open(state: &HeadState, life: Duration) -> Result<Self, HeadError> {
        match state {
            HeadState::Memory => Ok(Self {
                authority: Authority::create(ClusterId::random())?,
                tokens: Mutex::default(),
                members: Mutex::default(),
                dir: None,
            }),
            HeadState::Dir(path) => Self::open_dir(path, life),
        }
    }

    fn open_dir(path: &Path, life: Duration) -> Result<Self, HeadError> {
        private_file::make_dir(path).map_err(failed(path))?;
        let lock = lock(path)?;
        let authority = Authority::open(path)?;
        let tokens = load(&path.join(TOKENS))?;
        let mut members: Members = load(&path.join(MEMBERS))?;
        let admin = admin_path(path);
        let name = keep_admin(&authority, &admin, &members, life)?;
        if members.add_administrator(&name) {
            save(&path.join(MEMBERS), &members)?;
        }
        Ok(Self {
            authority,
            tokens: Mutex::new(tokens),
            members: Mutex::new(members),
            dir: Some(Dir {
                path: path.to_owned(),
                admin,
                _lock: lock,
            }),
        })
    }

    pub(super) fn authority(&self) -> &Authority {
        &self.authority
    }

    pub(super) fn admin_dir(&self) -> Option<&Path> {
        self.dir.as_ref().map(|dir| dir.admin.as_path())
    }

    /// Who administers and who is out.
    pub(super) fn members(&self) -> MutexGuard<'_, Members> {
        // Changed by single assignments, so a panic leaves them whole.
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the members if `change` succeeds and the result is stored; else all is as it was.
    pub(super) fn change_members<T, E: From<HeadError>>(
        &self,
        change: impl FnOnce(&mut Members) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut members = self.members();
        let mut changed = members.clone();
        let result = change(&mut changed)?;
        if let Some(dir) = &self.dir {
            save(&dir.path.join(MEMBERS), &changed)?;
        }
        *members = changed;
        Ok(result)
    }

    /// A new token, and whether it is stored.
    pub(super) fn create_token(
        &self,
        role: Role,
        ttl: Duration,
        uses: Option<u32>,
    ) -> (JoinToken, Result<(), HeadError>) {
        let mut book = self.book();
        let token = book.create(
            role,
            ttl,
            uses,
            self.authority.fingerprint(),
            unix_now(),
            random_secret(),
        );
        let stored = self.save(&book);
        (token, stored)
    }

    /// A new token of an administrator; none if it can't be stored.
    pub(super) fn new_token(
        &self,
        by: &str,
        role: Role,
        admin: bool,
        ttl: Duration,
        uses: Option<u32>,
    ) -> Result<JoinToken, HeadError> {
        let fingerprint = self.authority.fingerprint();
        self.change_tokens(|book| {
            let token = book.create(role, ttl, uses, fingerprint, unix_now(), random_secret());
            book.describe_newest(by, admin);
            Ok(token)
        })
    }

    /// Changes the book if `change` succeeds and the result is stored; else all is as it was.
    pub(super) fn change_tokens<T, E: From<HeadError>>(
        &self,
        change: impl FnOnce(&mut TokenBook) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut book = self.book();
        let mut changed = book.clone();
        let result = change(&mut changed)?;
        self.save(&changed)?;
        *book = changed;
        Ok(result)
    }

    pub(super) fn book(&self) -> MutexGuard<'_, TokenBook> {
        // The book is changed by single assignments, so a panic leaves it whole.
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn save(&self, book: &TokenBook) -> Result<(), HeadError> {
        match &self.dir {
            Some(dir) => save(&dir.path.join(TOKENS), book),
            None => Ok(()),
        }
    }
}

fn save(path: &Path, content: &impl Serialize) -> Result<(), HeadError> {
    let text = serde_json::to_vec_pretty(content)
        .map_err(|error| failed(path)(io::Error::other(error)))?;
    private_file::replace(path, &text).map_err(failed(path))
}

fn lock(dir: &Path) -> Result<File, HeadError> {
    let path = dir.join(LOCK);
    let file = private_file::lock(&path).map_err(failed(&path))?;
    file.ok_or_else(|| HeadError::Locked {
        path: dir.to_owned(),
    })
}

fn load<T: Default + DeserializeOwned>(path: &Path) -> Result<T, HeadError> {
    match fs::read(path) {
        Ok(text) => serde_json::from_slice(&text).map_err(|error| HeadError::Damaged {
            path: path.to_owned(),
            reason: error.to_string(),
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(T::default()),
        Err(error) => Err(failed(path)(error)),
    }
}

/// Writes the credentials of an operator unless good ones are there; gives their name.
fn keep_admin(
    authority: &Authority,
    dir: &Path,
    members: &Members,
    life: Duration,
) -> Result<String, HeadError> {
    match Credentials::load(dir) {
        Ok(old)
            if old.authority() == authority.certificate()
                && !members.is_revoked(old.identity()) =>
        {
            let now = SystemTime::now();
            if old.validity().renew_at(0.0) <= now || old.validity().end > now + life * 2 {
                let name = &old.identity().name;
                let certificate =
                    authority.sign(&old.renewal_request()?, Role::Driver, name, life)?;
                old.renewed(&certificate)?.save_renewed(dir)?;
            }
            return Ok(old.identity().name.clone());
        }
        // Of another cluster, of a start that was cut off, ended, revoked, or none yet.
        Ok(_) | Err(IdentityError::Content { .. } | IdentityError::File { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let name = DriverId::random().to_string();
    authority.issue_for(Role::Driver, &name, life)?.save(dir)?;
    Ok(name)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    fn open(dir: &Path) -> Result<Store, HeadError> {
        Store::open(&HeadState::Dir(dir.to_owned()), DAY)
    }

    #[test]
    fn d1_the_cluster_and_its_tokens_survive() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("new").join("state");
        let store = open(&dir).unwrap();
        let cluster = store.authority().cluster();
        let hour = Duration::from_secs(3600);
        let (token, stored) = store.create_token(Role::Node, hour, Some(2));
        stored.unwrap();
        let admin = Credentials::load(store.admin_dir().unwrap()).unwrap();
        assert_eq!(admin.identity().role, Role::Driver);
        assert_eq!(mode(&dir), 0o700);
        assert_eq!(mode(&dir.join(TOKENS)), 0o600);
        let text = fs::read_to_string(dir.join(TOKENS)).unwrap();
        let secret = token.to_string().rsplit('.').next().unwrap().to_owned();
        assert!(!text.contains(&secret), "the secret itself is not stored");
        drop(store);

        let store = open(&dir).unwrap();
        assert_eq!(store.authority().cluster(), cluster);
        let redeem = |store: &Store| {
            store.change_tokens(|book| {
                book.redeem(Role::Node, token.secret(), unix_now())
                    .map_err(|error| HeadError::Damaged {
                        path: PathBuf::new(),
                        reason: error.to_string(),
                    })
            })
        };
        redeem(&store).unwrap();
        let again = Credentials::load(store.admin_dir().unwrap()).unwrap();
        assert_eq!(again.identity(), admin.identity());
        drop(store);

        let store = open(&dir).unwrap();
        redeem(&store).unwrap();
        assert!(redeem(&store).unwrap_err().to_string().contains("used up"));
        let left: Vec<_> = fs::read_dir(&dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.contains("tmp"))
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }

    #[test]
    fn one_head_at_a_time_uses_a_folder() {
        let dir = tempfile::tempdir().unwrap();
        let first = open(dir.path()).unwrap();
        assert!(matches!(open(dir.path()), Err(HeadError::Locked { .. })));
        drop(first);
        open(dir.path()).unwrap();
    }

    #[test]
    fn damaged_files_are_named_and_not_written_over() {
        let dir = tempfile::tempdir().unwrap();
        drop(open(dir.path()).unwrap());
        let path = dir.path().join(TOKENS);
        fs::write(&path, "{").unwrap();
        let error = open(dir.path()).err().unwrap().to_string();
        assert!(error.contains("tokens.json is damaged"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "{");
        fs::remove_file(&path).unwrap();

        let authority = dir.path().join("authority.pem");
        fs::write(&authority, "no").unwrap();
        let error = open(dir.path()).err().unwrap().to_string();
        assert!(error.contains("authority.pem"), "{error}");
        assert_eq!(fs::read_to_string(&authority).unwrap(), "no");
    }

    #[test]
    fn a_change_that_fails_changes_nothing() {
        let store = Store::open(&HeadState::Memory, DAY).unwrap();
        let (token, stored) = store.create_token(Role::Driver, Duration::from_secs(60), Some(1));
        stored.unwrap();
        let result: Result<(), HeadError> = store.change_tokens(|book| {
            book.redeem(Role::Driver, token.secret(), unix_now())
                .unwrap();
            Err(HeadError::Crashed)
        });
        assert!(result.is_err());
        assert_eq!(store.book().list()[0].uses_left, Some(1));
    }
}
