//! A folder with the three files of an identity, and how they are replaced so that a crash leaves all old or all new ones.
//!
//! One rename can't replace three files. So all of them are first put into one file, [`PENDING`], which appears in one step:
//! from then on it is what counts, and the three follow. Whoever finds it there, after a crash or because somebody else is
//! just at it, takes what is in it.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

use crate::files::{self, Staged};
use crate::identity::IdentityError;

pub(crate) const AUTHORITY: &str = "ca.pem";
pub(crate) const CERTIFICATE: &str = "cert.pem";
pub(crate) const KEY: &str = "key.pem";

/// Holds all three while they are replaced.
pub(crate) const PENDING: &str = "new.pem";

/// What is in the files.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Pems {
    pub(crate) key: String,
    pub(crate) certificate: String,
    pub(crate) authority: String,
}

impl Pems {
    fn bundle(&self) -> String {
        [&*self.key, &self.certificate, &self.authority].concat()
    }

    /// Reads what [`Pems::bundle`] wrote.
    fn parse(bundle: &str) -> Option<Self> {
        const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
        let mut parts = bundle.split(BEGIN);
        let key = parts.next()?.to_owned();
        let mut certificate = || Some(format!("{BEGIN}{}", parts.next()?));
        Some(Self {
            key,
            certificate: certificate()?,
            authority: certificate()?,
        })
    }

    fn stage(&self, dir: &Path) -> Result<[Staged; 3], IdentityError> {
        Ok([
            files::stage(&dir.join(KEY), self.key.as_bytes())?,
            files::stage(&dir.join(AUTHORITY), self.authority.as_bytes())?,
            files::stage(&dir.join(CERTIFICATE), self.certificate.as_bytes())?,
        ])
    }

    /// Writes the files into a folder that nobody knows yet.
    pub(crate) fn fill(&self, dir: &Path) -> Result<(), IdentityError> {
        for file in self.stage(dir)? {
            file.replace()?;
        }
        files::sync_dir(dir)
    }

    /// Replaces the files of a folder. `step` is asked after each step; its error ends it there, as a crash would.
    pub(crate) fn replace(
        &self,
        dir: &Path,
        mut step: impl FnMut() -> Result<(), IdentityError>,
    ) -> Result<(), IdentityError> {
        let _alone = Alone::wait(dir);
        let staged = self.stage(dir)?;
        step()?;
        files::stage(&dir.join(PENDING), self.bundle().as_bytes())?.replace()?;
        files::sync_dir(dir)?;
        step()?;
        follow(dir, staged, step)
    }
}

/// The files come to what is pending.
fn follow(
    dir: &Path,
    staged: [Staged; 3],
    mut step: impl FnMut() -> Result<(), IdentityError>,
) -> Result<(), IdentityError> {
    for file in staged {
        file.replace()?;
        step()?;
    }
    files::sync_dir(dir)?;
    let pending = dir.join(PENDING);
    fs::remove_file(&pending).map_err(files::failed(&pending))?;
    files::sync_dir(dir)
}

/// What is pending in a folder, if something is.
pub(crate) fn pending(dir: &Path) -> Result<Option<Pems>, IdentityError> {
    let path = dir.join(PENDING);
    match files::read_private(&path) {
        Ok(text) => {
            files::check_dir(dir)?;
            let text = String::from_utf8(text).ok();
            let pems = text.and_then(|text| Pems::parse(&text));
            pems.map(Some).ok_or_else(|| IdentityError::Content {
                path,
                reason: "it holds no key with two certificates in PEM".to_owned(),
            })
        }
        Err(IdentityError::File { error, .. }) if error.kind() == std::io::ErrorKind::NotFound => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Does what a crash has kept from being done. Whether nothing is pending any more: false if it is not this user's to do.
pub(crate) fn settle(dir: &Path) -> Result<bool, IdentityError> {
    let Some(pems) = pending(dir)? else {
        return Ok(true);
    };
    let path = dir.join(PENDING);
    let owner = fs::metadata(&path).map_err(files::failed(&path))?.uid();
    // Files of root's would be of no use to the daemon that has the folder.
    if owner != rustix::process::geteuid().as_raw() {
        return Ok(false);
    }
    follow(dir, pems.stage(dir)?, || Ok(()))?;
    Ok(true)
}

/// Held by who changes a folder.
pub(crate) struct Alone(Option<File>);

impl Alone {
    /// Waits until nobody else changes the folder, which takes as long as a few small files do. Where a file system has no locks
    /// it is as if nobody did.
    pub(crate) fn wait(dir: &Path) -> Self {
        let lock = File::open(dir).and_then(|file| {
            flock(&file, FlockOperation::LockExclusive)?;
            Ok(file)
        });
        if let Err(error) = &lock {
            tracing::debug!(%error, dir = %dir.display(), "the folder is not locked");
        }
        let alone = Self(lock.ok());
        if alone.0.is_some() {
            sweep(dir);
        }
        alone
    }
}

/// As [`settle`], unless somebody is at the folder: after a crash nobody is, and those who read the files by themselves want them to
/// fit. What can't be done is left to the next who saves.
pub(crate) fn settle_if_free(dir: &Path) {
    let free = File::open(dir).and_then(|file| {
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        Ok(file)
    });
    let Ok(file) = free else {
        return;
    };
    let _alone = Alone(Some(file));
    match settle(dir) {
        Ok(true) => sweep(dir),
        Ok(false) => {}
        Err(error) => tracing::debug!(%error, "a folder stays as a crash has left it"),
    }
}

/// Removes the files under passing names that a crash has left: they may hold a key.
fn sweep(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let ours = [KEY, CERTIFICATE, AUTHORITY, PENDING].iter().any(|file| {
            name.strip_prefix(file)
                .and_then(|rest| rest.strip_prefix('.')?.strip_suffix(".tmp"))
                .is_some_and(|nonce| {
                    nonce.len() == 16 && nonce.bytes().all(|byte| byte.is_ascii_hexdigit())
                })
        });
        if ours {
            drop(fs::remove_file(entry.path()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn pems(mark: char) -> Pems {
        let block = |label: &str, fill: &str| files::pem(label, fill.as_bytes());
        Pems {
            key: block("PRIVATE KEY", &format!("key {mark}")),
            certificate: block("CERTIFICATE", &format!("certificate {mark}")),
            authority: block("CERTIFICATE", &format!("authority {mark}")),
        }
    }

    /// What a reader takes: what is pending, or else the three files.
    fn read(dir: &Path) -> Pems {
        let file = |name| fs::read_to_string(dir.join(name)).unwrap();
        pending(dir).unwrap().unwrap_or_else(|| Pems {
            key: file(KEY),
            certificate: file(CERTIFICATE),
            authority: file(AUTHORITY),
        })
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_crash_at_any_step_leaves_all_old_or_all_new() {
        let (old, new) = (pems('o'), pems('n'));
        let mut crashes = 0;
        loop {
            let root = tempfile::tempdir().unwrap();
            let dir = root.path();
            old.fill(dir).unwrap();
            let mut steps = 0;
            let done = new.replace(dir, || {
                steps += 1;
                if steps <= crashes {
                    return Ok(());
                }
                Err(files::failed(dir)(std::io::Error::other("a crash")))
            });
            if done.is_ok() {
                break;
            }
            // Before the second step nothing has happened, and from then on everything has.
            assert!(
                read(dir)
                    == if crashes == 0 {
                        old.clone()
                    } else {
                        new.clone()
                    }
            );
            assert!(
                settle(dir).unwrap()
                    && read(dir)
                        == if crashes == 0 {
                            old.clone()
                        } else {
                            new.clone()
                        }
            );
            assert_eq!(names(dir), [AUTHORITY, CERTIFICATE, KEY]);
            // And once more over what is left.
            crashes += 1;
        }
        assert_eq!(crashes, 5, "each step was a crash once");
    }

    #[test]
    fn a_second_change_goes_over_what_a_crash_has_left() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path();
        pems('a').fill(dir).unwrap();
        let mut steps = 0;
        let crash = || {
            steps += 1;
            match steps {
                3 => Err(files::failed(dir)(std::io::Error::other("a crash"))),
                _ => Ok(()),
            }
        };
        assert!(pems('b').replace(dir, crash).is_err());
        // As a power cut leaves it, which drops nothing.
        let left = dir.join("key.pem.0123456789abcdef.tmp");
        let other = dir.join("key.pem.mine.tmp");
        fs::write(&left, "a key").unwrap();
        fs::write(&other, "no business of ours").unwrap();
        pems('c').replace(dir, || Ok(())).unwrap();
        assert!(read(dir) == pems('c'));
        assert_eq!(
            names(dir),
            [AUTHORITY, CERTIFICATE, KEY, "key.pem.mine.tmp"]
        );
    }

    #[test]
    fn what_is_pending_is_private_and_whole() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path();
        let path = dir.join(PENDING);
        assert!(pending(dir).unwrap().is_none());
        for damaged in ["", "x", &pems('a').key] {
            drop(fs::remove_file(&path));
            assert!(
                files::stage(&path, damaged.as_bytes())
                    .unwrap()
                    .create()
                    .unwrap()
            );
            let error = pending(dir).err().unwrap().to_string();
            assert!(error.contains("no key with two certificates"), "{error}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(matches!(pending(dir), Err(IdentityError::Exposed { .. })));
    }
}
