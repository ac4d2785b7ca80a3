//! Runs the binary.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// What a run has printed, and how it ended.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ran {
    pub(crate) fn of(output: &Output) -> Self {
        Self {
            code: output.status.code().expect("it ends by itself"),
            out: String::from_utf8(output.stdout.clone()).unwrap(),
            err: String::from_utf8(output.stderr.clone()).unwrap(),
        }
    }

    /// The output of a run that has succeeded.
    #[track_caller]
    pub(crate) fn good(self) -> String {
        assert_eq!((self.code, self.err.as_str()), (0, ""), "{self:?}");
        self.out
    }

    /// The one line of a run that has failed with this code. If no connection could be had, a second line says what to do; it follows
    /// a semicolon here.
    #[track_caller]
    pub(crate) fn bad(self, code: i32) -> String {
        assert_eq!((self.code, self.out.as_str()), (code, ""), "{self:?}");
        let line = self.err.strip_suffix('\n').unwrap_or(&self.err);
        let line = line.replacen("\n      ", "; ", 1);
        let mut more = line.lines().skip(1);
        assert!(
            more.all(|line| line.starts_with("  ")),
            "not one message: {line}"
        );
        line.strip_prefix("kolo: ")
            .unwrap_or_else(|| panic!("{line}"))
            .to_owned()
    }

    #[track_caller]
    pub(crate) fn json(self) -> Value {
        let text = self.good();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }
}

/// A command that knows nothing of the user who runs the tests.
pub(crate) fn command(home: &Path, args: &[impl AsRef<OsStr>]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
    command
        .args(args)
        .env_clear()
        .env("HOME", home)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs it without a home.
pub(crate) fn kolo(args: &[&str]) -> Ran {
    let home = Path::new("/nonexistent");
    Ran::of(&command(home, args).output().unwrap())
}
