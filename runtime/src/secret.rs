//! Files with secrets that people bring: tokens to join with, and the secret of the HTTP API.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// The most that is read of such a file, in bytes.
const LONGEST: u64 = 64 << 10;

/// What is in a file, and whether others can read it.
pub struct SecretFile {
    /// The secret, without what is around it.
    pub text: String,
    /// What is to be said of the file's mode: others on this machine can read it.
    ///
    /// kolo's own keys are refused then. These files come from elsewhere, with modes that were not always chosen (`scp`, mounted
    /// secrets), and a token ends soon: they are taken, with this warning.
    pub warning: Option<String>,
}

impl std::fmt::Debug for SecretFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SecretFile")
            .field("warning", &self.warning)
            .finish_non_exhaustive()
    }
}

/// Reads such a file: at most 64 KiB of it.
///
/// # Errors
///
/// If it can't be read or is no text.
pub fn read(path: &Path) -> io::Result<SecretFile> {
    let file = File::open(path)?;
    // Of the file that is read, whatever takes its name meanwhile.
    let metadata = file.metadata()?;
    let mode = metadata.permissions().mode() & 0o777;
    // A pipe is for its two ends. What the service manager hands over is for the service alone, whatever its mode seems to say.
    let exposed = metadata.is_file() && mode & 0o077 != 0 && !is_of_the_service_manager(path);
    Ok(SecretFile {
        text: text_of(file)?,
        warning: exposed.then(|| {
            format!(
                "{} has mode {mode:o}, so others on this machine can read the secret in it; `chmod 600` it",
                path.display()
            )
        }),
    })
}

/// The secret that comes from a file or a pipe: at most 64 KiB are read.
///
/// # Errors
///
/// If it can't be read or is no text.
pub fn text_of(source: impl Read) -> io::Result<String> {
    let mut bytes = Vec::new();
    source.take(LONGEST).read_to_end(&mut bytes)?;
    kolo_transport::token::secret_text(&bytes)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "it is no text in UTF-8"))
}

fn is_of_the_service_manager(path: &Path) -> bool {
    std::env::var_os("CREDENTIALS_DIRECTORY").is_some_and(|dir| path.starts_with(dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_others_can_read_is_taken_with_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        std::fs::write(&path, "hush\n").unwrap();
        for (mode, warns) in [
            (0o600, false),
            (0o400, false),
            (0o644, true),
            (0o640, true),
            (0o602, true),
        ] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let secret = read(&path).unwrap();
            assert_eq!(secret.text, "hush");
            assert!(!format!("{secret:?}").contains("hush"));
            let Some(warning) = secret.warning else {
                assert!(!warns, "{mode:o}");
                continue;
            };
            assert!(warns, "{warning}");
            assert!(warning.contains("chmod 600") && warning.contains(path.to_str().unwrap()));
            assert!(warning.contains(&format!("{mode:o}")) && !warning.contains("hush"));
        }
    }

    #[test]
    fn what_is_no_file_is_for_who_holds_it() {
        assert_eq!(read(Path::new("/dev/null")).unwrap().warning, None);
        assert!(read(Path::new("/nowhere/secret")).is_err());
    }
}
