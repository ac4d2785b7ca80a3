//! What to start, and how it is checked and packed before it leaves the daemon.

use std::ffi::OsString;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use serde_bytes::ByteBuf;

use crate::error::SpawnError;
use crate::protocol::{Spawn, WARDEN_FD_VAR};
use crate::sweep::MARK_VAR;

/// The lowest number that [`SpawnRequest::fds`] may ask for; below are stdin, stdout and stderr.
pub const FIRST_FD: RawFd = 3;

/// The highest number that [`SpawnRequest::fds`] may ask for.
pub const LAST_FD: RawFd = 255;

/// How many descriptors [`SpawnRequest::fds`] may hold: a frame's, less stdin, stdout and stderr.
pub const MAX_FDS: usize = kolo_transport::local::MAX_FDS - 3;

/// The longest arguments and environment, in bytes. Linux takes at most 6 MiB and usually 2; a frame's head takes 4.
const MAX_STRINGS: usize = 3 << 20;

/// A process to start.
///
/// It gets a session of its own, `/dev/null` as standard input unless another is given, default signal dispositions and an empty signal
/// mask, exactly these descriptors, exactly this environment (and the warden's mark), and dies with its supervisor.
#[derive(Debug)]
pub struct SpawnRequest {
    /// The file to execute. There is no search in `PATH`; a relative path counts from `cwd`.
    pub program: PathBuf,
    /// What the process sees as its own name.
    pub argv0: String,
    /// Arguments after the name.
    pub args: Vec<String>,
    /// The whole environment but for the warden's mark, `KOLO_MARK`. If a name is there twice, the last one counts.
    /// `KOLO_WARDEN_FD` is left out.
    pub env: Vec<(OsString, OsString)>,
    /// Where it starts; the daemon's directory (at the start of the warden) if `None`.
    pub cwd: Option<PathBuf>,
    /// Further descriptors, each with its number in the process: [`FIRST_FD`] to [`LAST_FD`], no number twice, at
    /// most [`MAX_FDS`].
    pub fds: Vec<(OwnedFd, RawFd)>,
    /// Its standard input; `/dev/null` if `None`.
    pub stdin: Option<OwnedFd>,
    /// Its standard output, for instance the write end of a [`pipe`](crate::pipe).
    pub stdout: OwnedFd,
    /// Its standard error.
    pub stderr: OwnedFd,
}

impl SpawnRequest {
    fn invalid(&self, reason: String) -> SpawnError {
        SpawnError::Invalid {
            path: self.program.clone(),
            reason,
        }
    }

    /// Checks the request and packs all but the descriptors.
    pub(crate) fn pack(&self, id: u64, mark: &str) -> Result<Spawn, SpawnError> {
        self.check_fds()?;
        let program = self.program.as_os_str().as_bytes();
        let cwd = self.cwd.as_ref().map(|cwd| cwd.as_os_str().as_bytes());
        if program.contains(&0) || cwd.is_some_and(|cwd| cwd.contains(&0)) {
            return Err(self.invalid("a path has a zero byte".to_owned()));
        }
        let mut argv = Vec::new();
        let args = std::iter::once(&self.argv0).chain(&self.args);
        for (index, argument) in args.enumerate() {
            if argument.as_bytes().contains(&0) {
                return Err(self.invalid(format!("argument {index} has a zero byte")));
            }
            argv.extend_from_slice(argument.as_bytes());
            argv.push(0);
        }
        let env = self.pack_env(mark)?;
        let bytes = argv.len() + env.len();
        if bytes > MAX_STRINGS {
            return Err(SpawnError::TooLarge {
                path: self.program.clone(),
                bytes,
            });
        }
        Ok(Spawn {
            id,
            program: ByteBuf::from(program),
            argv: ByteBuf::from(argv),
            env: ByteBuf::from(env),
            cwd: cwd.map(ByteBuf::from),
            numbers: self
                .fds
                .iter()
                .map(|(_, number)| *number)
                .chain(self.stdin.as_ref().map(|_| 0))
                .collect(),
        })
    }

    fn check_fds(&self) -> Result<(), SpawnError> {
        if self.fds.len() > MAX_FDS {
            return Err(self.invalid(format!(
                "{} descriptors, allowed are {MAX_FDS}",
                self.fds.len()
            )));
        }
        for (index, (_, number)) in self.fds.iter().enumerate() {
            if !(FIRST_FD..=LAST_FD).contains(number) {
                return Err(self.invalid(format!(
                    "descriptor number {number}, allowed are {FIRST_FD} to {LAST_FD}"
                )));
            }
            if self.fds[..index].iter().any(|(_, other)| other == number) {
                return Err(self.invalid(format!("descriptor number {number} twice")));
            }
        }
        Ok(())
    }

    fn pack_env(&self, mark: &str) -> Result<Vec<u8>, SpawnError> {
        let mut last = std::collections::HashMap::with_capacity(self.env.len());
        for (index, (name, value)) in self.env.iter().enumerate() {
            let bytes = name.as_bytes();
            let shown = name.to_string_lossy();
            // A leading = is odd but exists; `std::env::vars_os` takes it for a part of the name too.
            let ends_early = bytes.get(1..).is_some_and(|rest| rest.contains(&b'='));
            if bytes.is_empty() || ends_early || bytes.contains(&0) {
                return Err(self.invalid(format!(
                    "environment variable name {shown:?}; it must not be empty or have = or a zero byte"
                )));
            }
            if value.as_bytes().contains(&0) {
                // The value may be a secret.
                return Err(self.invalid(format!(
                    "the value of environment variable {shown:?} has a zero byte"
                )));
            }
            last.insert(bytes, index);
        }
        let mut env = format!("{MARK_VAR}={mark}\0").into_bytes();
        for (index, (name, value)) in self.env.iter().enumerate() {
            let bytes = name.as_bytes();
            let is_ours = [WARDEN_FD_VAR, MARK_VAR]
                .map(str::as_bytes)
                .contains(&bytes);
            if last.get(bytes) == Some(&index) && !is_ours {
                env.extend_from_slice(bytes);
                env.push(b'=');
                env.extend_from_slice(value.as_bytes());
                env.push(0);
            }
        }
        Ok(env)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> SpawnRequest {
        let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        SpawnRequest {
            program: "/bin/true".into(),
            argv0: "true".to_owned(),
            args: vec!["a".to_owned(), String::new()],
            env: vec![
                ("A".into(), "1".into()),
                ("B".into(), "x=y".into()),
                (WARDEN_FD_VAR.into(), "7".into()),
                (MARK_VAR.into(), "other".into()),
                ("A".into(), "2".into()),
            ],
            cwd: None,
            fds: vec![(null(), 3)],
            stdin: None,
            stdout: null(),
            stderr: null(),
        }
    }

    #[test]
    fn strings_are_packed_and_the_last_of_a_name_counts() {
        let packed = request().pack(7, "m/1").unwrap();
        assert_eq!(packed.argv.as_ref(), b"true\0a\0\0");
        assert_eq!(packed.env.as_ref(), b"KOLO_MARK=m/1\0B=x=y\0A=2\0");
        assert_eq!(packed.numbers, [3]);
    }

    #[test]
    fn what_cannot_be_passed_is_refused() {
        let refused = |change: fn(&mut SpawnRequest)| {
            let mut request = request();
            change(&mut request);
            request.pack(0, "m").unwrap_err()
        };
        for (change, expected) in [
            (
                (|r| r.args.push("a\0b".to_owned())) as fn(&mut SpawnRequest),
                "cannot start /bin/true: argument 3 has a zero byte",
            ),
            (
                |r| r.env.push(("".into(), "x".into())),
                "cannot start /bin/true: environment variable name \"\"; it must not be empty or have = or a zero byte",
            ),
            (
                |r| r.env.push(("C".into(), "s\0".into())),
                "cannot start /bin/true: the value of environment variable \"C\" has a zero byte",
            ),
            (
                |r| r.fds[0].1 = 2,
                "cannot start /bin/true: descriptor number 2, allowed are 3 to 255",
            ),
            (
                |r| {
                    let copy = r.fds[0].0.try_clone().unwrap();
                    r.fds.push((copy, 3));
                },
                "cannot start /bin/true: descriptor number 3 twice",
            ),
            (
                |r| r.cwd = Some("/tmp\0".into()),
                "cannot start /bin/true: a path has a zero byte",
            ),
            (
                |r| r.args.push("x".repeat(4 << 20)),
                "cannot start /bin/true: 4194335 bytes of arguments and environment are more than the system takes",
            ),
        ] {
            assert_eq!(refused(change).to_string(), expected);
        }
    }
}
