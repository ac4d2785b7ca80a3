//! Programs that are installed on this host: found, and checked before anything is started.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use kolo_actors::node::InstalledFile;
use kolo_transport::wire::{Installed, Refusal, RefusalKind};
use rustix::fs::Access;

/// Finds a program on this host.
///
/// # Errors
///
/// [`RefusalKind::NotFound`] if it is not here, [`RefusalKind::Forbidden`] if it may not be executed,
/// [`RefusalKind::Invalid`] if the directory can't be entered.
pub(super) fn find(installed: &Installed) -> Result<InstalledFile, Refusal> {
    let own_path = std::env::var_os("PATH");
    let cwd = installed.cwd.as_ref().map(PathBuf::from);
    if let Some(dir) = &cwd {
        check_dir(dir)?;
    }
    let path = locate(installed, own_path, cwd.as_deref())?;
    Ok(InstalledFile {
        path,
        cwd,
        stdin: installed.stdin,
    })
}

fn check_dir(dir: &Path) -> Result<(), Refusal> {
    let problem = |text: String| {
        Refusal::new(
            RefusalKind::Invalid,
            format!(
                "the working directory `{}` {text}; give one that exists on every host with --cwd",
                dir.display()
            ),
        )
    };
    match std::fs::metadata(dir) {
        Ok(found) if !found.is_dir() => Err(problem("is no directory".to_owned())),
        Ok(_) => rustix::fs::access(dir, Access::EXEC_OK)
            .map_err(|error| problem(format!("can't be entered: {}", io::Error::from(error)))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(problem("does not exist".to_owned()))
        }
        Err(error) => Err(problem(format!("can't be used: {error}"))),
    }
}

fn locate(
    installed: &Installed,
    own_path: Option<OsString>,
    cwd: Option<&Path>,
) -> Result<PathBuf, Refusal> {
    let name = &installed.program;
    if name.contains('/') {
        let path = cwd.map_or_else(|| PathBuf::from(name), |cwd| cwd.join(name));
        return match judge(&path) {
            Judgement::Good => Ok(path),
            Judgement::Absent => Err(Refusal::new(
                RefusalKind::NotFound,
                format!("the program `{}` does not exist", path.display()),
            )),
            Judgement::Directory => Err(not_executable(&path, "it is a directory")),
            Judgement::NotExecutable => Err(not_executable(
                &path,
                "it has no execute permission (chmod +x)",
            )),
            Judgement::Other(error) => Err(not_executable(&path, &error.to_string())),
        };
    }
    let search = installed
        .search
        .clone()
        .map(OsString::from)
        .or(own_path)
        .unwrap_or_else(|| OsString::from("/usr/local/bin:/usr/bin:/bin"));
    let mut refused = None;
    for dir in std::env::split_paths(&search) {
        let here = cwd.unwrap_or(Path::new("."));
        // An empty entry is the current directory.
        let path = here.join(dir).join(name);
        match judge(&path) {
            Judgement::Good => return Ok(path),
            Judgement::NotExecutable => {
                refused.get_or_insert(path);
            }
            _ => {}
        }
    }
    match refused {
        Some(path) => Err(not_executable(
            &path,
            "it has no execute permission (chmod +x)",
        )),
        None => Err(Refusal::new(
            RefusalKind::NotFound,
            format!(
                "the program `{name}` is not in PATH ({})",
                String::from_utf8_lossy(search.as_bytes())
            ),
        )),
    }
}

fn not_executable(path: &Path, reason: &str) -> Refusal {
    Refusal::new(
        RefusalKind::Forbidden,
        format!(
            "the program `{}` can't be executed: {reason}",
            path.display()
        ),
    )
}

enum Judgement {
    Good,
    Absent,
    Directory,
    NotExecutable,
    Other(io::Error),
}

fn judge(path: &Path) -> Judgement {
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => Judgement::Directory,
        Ok(_) if rustix::fs::access(path, Access::EXEC_OK).is_ok() => Judgement::Good,
        Ok(_) => Judgement::NotExecutable,
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Judgement::Absent
        }
        Err(error) => Judgement::Other(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn installed(program: &str, search: Option<&str>, cwd: Option<&Path>) -> Installed {
        Installed {
            program: program.to_owned(),
            search: search.map(str::to_owned),
            cwd: cwd.map(|cwd| cwd.display().to_string()),
            ..Installed::default()
        }
    }

    fn refused(installed: &Installed) -> (RefusalKind, String) {
        let refusal = find(installed).unwrap_err();
        (refusal.kind, refusal.message)
    }

    #[test]
    fn names_are_looked_for_in_path_and_paths_from_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        for (dir, mode) in [(&one, 0o600), (&two, 0o755)] {
            std::fs::create_dir(dir).unwrap();
            std::fs::write(dir.join("run"), "#!/bin/sh\n").unwrap();
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(dir.join("run"), mode).unwrap();
        }
        let search = format!("{}:/nowhere:{}", one.display(), two.display());
        let found = find(&installed("run", Some(&search), None)).unwrap();
        assert_eq!(found.path, two.join("run"), "what can't run is passed over");
        let found = find(&installed("./run", None, Some(&two))).unwrap();
        assert_eq!(found.path, two.join("./run"));
        assert_eq!(found.cwd.as_deref(), Some(two.as_path()));
        assert!(find(&installed("run", Some("two::"), Some(dir.path()))).is_ok());

        let (kind, message) = refused(&installed("run", Some("/nowhere:/nirgends"), None));
        assert_eq!(kind, RefusalKind::NotFound);
        assert_eq!(
            message,
            "the program `run` is not in PATH (/nowhere:/nirgends)"
        );
        let (kind, message) = refused(&installed("/nowhere/run", None, None));
        assert_eq!(kind, RefusalKind::NotFound);
        assert_eq!(message, "the program `/nowhere/run` does not exist");
        let path = format!("{}/", two.display());
        assert_eq!(
            refused(&installed(&path, None, None)).0,
            RefusalKind::Forbidden
        );
        let (kind, message) = refused(&installed("run", None, Some(Path::new("/nowhere"))));
        assert_eq!(kind, RefusalKind::Invalid);
        assert!(message.starts_with("the working directory `/nowhere` does not exist"));
    }
}
