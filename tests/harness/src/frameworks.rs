//! Horovod and torch, where they are installed.

use std::ffi::{OsStr, OsString};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Names the Python to use; `none` leaves the frameworks out.
const VARIABLE: &str = "KOLO_INTEROP_PYTHON";

/// A framework whose programs kolo runs, and whose launcher kolo is measured beside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framework {
    /// Horovod with its PyTorch part.
    Horovod,
    /// PyTorch with `torch.distributed`.
    Torch,
}

impl Framework {
    /// A Python that can import the framework: the one that the variable `KOLO_INTEROP_PYTHON` names, else `python3`, else Debian's.
    ///
    /// # Errors
    ///
    /// One line that says which framework is missing, and how to install it.
    pub fn python(self) -> Result<&'static OsStr, String> {
        static PYTHONS: [OnceLock<Option<OsString>>; 2] = [const { OnceLock::new() }; 2];
        let module = match self {
            Self::Horovod => "horovod.torch",
            Self::Torch => "torch.distributed",
        };
        let python = PYTHONS[self as usize].get_or_init(|| {
            let mut pythons = candidates().into_iter();
            pythons.find(|python| imports(python, module))
        });
        python.as_deref().ok_or_else(|| {
            format!(
                "{module} is missing; `.ci/interop` installs it, and {VARIABLE} names its Python"
            )
        })
    }

    /// The command of the framework's own launcher: `horovodrun`, `torchrun`.
    ///
    /// # Errors
    ///
    /// As [`Framework::python`].
    pub fn launcher(self) -> Result<[&'static OsStr; 3], String> {
        let module = match self {
            Self::Horovod => "horovod.runner.launch",
            Self::Torch => "torch.distributed.run",
        };
        Ok([self.python()?, OsStr::new("-m"), OsStr::new(module)])
    }
}

fn candidates() -> Vec<OsString> {
    match std::env::var_os(VARIABLE) {
        Some(none) if none == "none" => Vec::new(),
        Some(python) => vec![python],
        None => vec!["python3".into(), "/usr/bin/python3".into()],
    }
}

fn imports(python: &OsStr, module: &str) -> bool {
    Command::new(python)
        .args(["-c", &format!("import {module}")])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}
