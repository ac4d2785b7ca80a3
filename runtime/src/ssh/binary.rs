//! The `kolo-node` that is sent to hosts.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::UpError;

/// What the program is called where it is installed.
const NAME: &str = "kolo-node";

/// The program, read once for all hosts.
#[derive(Debug, Clone)]
pub(super) struct Binary {
    pub(super) path: PathBuf,
    pub(super) bytes: Arc<[u8]>,
    pub(super) sha256: String,
}

/// SHA-256 as `sha256sum` prints it: the one that hosts can check with what they have.
pub(super) fn sha256(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, bytes);
    digest
        .as_ref()
        .iter()
        .fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

/// Where a program of this package is: beside the one that runs, or else in `PATH`.
pub(crate) fn find_program(name: &str) -> Result<PathBuf, UpError> {
    let beside = std::env::current_exe().ok().and_then(|exe| {
        // Tests are in a folder below that of the programs.
        let dir = exe.parent()?;
        [dir, dir.parent()?]
            .iter()
            .map(|dir| dir.join(name))
            .find(|path| path.is_file())
    });
    beside
        .or_else(|| {
            let path = std::env::var_os("PATH")?;
            std::env::split_paths(&path)
                .map(|dir| dir.join(name))
                .find(|path| path.is_file())
        })
        .ok_or_else(|| UpError::NoProgram {
            name: name.to_owned(),
        })
}

impl Binary {
    /// Reads the program that was given, or the one beside this program.
    pub(super) fn load(given: Option<&Path>) -> Result<Self, UpError> {
        let path = match given {
            Some(path) => path.to_owned(),
            None => find_program(NAME)?,
        };
        let bytes = std::fs::read(&path).and_then(|bytes| {
            if bytes.is_empty() {
                return Err(io::Error::other("it is empty"));
            }
            Ok(bytes)
        });
        let bytes = bytes.map_err(|error| UpError::Program {
            path: path.clone(),
            error,
        })?;
        Ok(Self {
            path,
            sha256: sha256(&bytes),
            bytes: bytes.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_is_that_of_sha256sum() {
        assert_eq!(
            sha256(b"abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let error = Binary::load(Some(Path::new("/nowhere/kolo-node"))).unwrap_err();
        assert!(error.to_string().contains("/nowhere/kolo-node"), "{error}");
        let error = find_program("kolo-no-such-program").unwrap_err();
        assert!(
            error.to_string().contains("kolo-no-such-program"),
            "{error}"
        );
    }
}
