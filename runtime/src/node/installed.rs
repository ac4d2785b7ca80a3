//! Programs that are installed on this host: found, and checked before anything is started.

use std::ffi::OsString;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kolo_actors::node::InstalledFile;
use kolo_transport::wire::{Installed, Refusal, RefusalKind};
use rustix::fs::Access;

/// How long a file system may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// How much of a first line the kernel looks at.
const FIRST_LINE: usize = 256;

/// Finds a program on this host.
///
/// # Errors
///
/// [`RefusalKind::NoProgram`] if it is not here, [`RefusalKind::NotExecutable`] if it can't be executed or its directory
/// can't be entered, [`RefusalKind::Timeout`] if its file system does not answer.
pub(super) async fn find(installed: &Installed) -> Result<InstalledFile, Refusal> {
    let name = installed.program.clone();
    let installed = installed.clone();
    // A file system of another host may hang for ever: nothing else of this daemon is to wait for it.
    let found = tokio::task::spawn_blocking(move || look(&installed));
    match tokio::time::timeout(PATIENCE, found).await {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => Err(Refusal::new(
            RefusalKind::Internal,
            format!("looking for the program `{}`: {error}", name.escape_debug()),
        )),
        Err(_) => Err(Refusal::new(
            RefusalKind::Timeout,
            format!(
                "the program `{}` or its directory was not found within {PATIENCE:?}; does a file system hang?",
                name.escape_debug()
            ),
        )),
    }
}

fn look(installed: &Installed) -> Result<InstalledFile, Refusal> {
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
            RefusalKind::NotExecutable,
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
            Judgement::Good => check_form(path, cwd),
            Judgement::Absent => Err(Refusal::new(
                RefusalKind::NoProgram,
                format!("the program `{}` does not exist", path.display()),
            )),
            Judgement::Directory => Err(not_executable(&path, "it is a directory")),
            Judgement::NoFile => Err(not_executable(&path, "it is no file")),
            Judgement::NotExecutable => Err(not_permitted(&path, name)),
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
    let here = cwd.unwrap_or(Path::new("."));
    for dir in std::env::split_paths(&search) {
        // An empty entry is the current directory.
        let path = here.join(dir).join(name);
        match judge(&path) {
            Judgement::Good => return check_form(path, cwd),
            Judgement::NotExecutable => {
                refused.get_or_insert(path);
            }
            _ => {}
        }
    }
    if let Some(path) = refused {
        Err(not_permitted(&path, name))
    } else {
        let file = here.join(name);
        let instead = match judge(&file) {
            Judgement::Good => format!("; write `./{name}` to run the file"),
            Judgement::NotExecutable => match interpreter_of(&file) {
                Some(by) => format!("; write `{by} {name}` to run the file"),
                None => "; the file of that name has no execute permission".to_owned(),
            },
            _ => String::new(),
        };
        Err(Refusal::new(
            RefusalKind::NoProgram,
            format!("the program `{name}` is not in PATH{instead}"),
        ))
    }
}

fn not_executable(path: &Path, reason: &str) -> Refusal {
    // Without the `.` of `./run`.
    let path: PathBuf = path.components().collect();
    Refusal::new(
        RefusalKind::NotExecutable,
        format!(
            "the program `{}` can't be executed: {reason}",
            path.display()
        ),
    )
}

fn not_permitted(path: &Path, name: &str) -> Refusal {
    let remedy = match interpreter_of(path) {
        Some(by) => format!("write `{by} {name}`, or allow it by chmod +x"),
        None => "allow it by chmod +x".to_owned(),
    };
    not_executable(path, &format!("it has no execute permission; {remedy}"))
}

/// The program that runs a script, by its first line or else by its name.
fn interpreter_of(path: &Path) -> Option<String> {
    let mut first = [0; FIRST_LINE];
    let filled = std::fs::File::open(path).and_then(|mut file| file.read(&mut first));
    let text = String::from_utf8_lossy(&first[..filled.unwrap_or(0)]).into_owned();
    if let Some(line) = text.strip_prefix("#!") {
        let mut words = line.lines().next()?.split_whitespace();
        let word = words.next()?;
        let by = match word.rsplit('/').next()? {
            "env" => words.next()?,
            by => by,
        };
        return Some(by.to_owned());
    }
    match path.extension()?.to_str()? {
        "py" => Some("python3".to_owned()),
        "sh" => Some("sh".to_owned()),
        _ => None,
    }
}

/// Whether the kernel will take it for a program, as far as that can be seen: so that it is one clear refusal, and not
/// workers of which some have begun.
fn check_form(path: PathBuf, cwd: Option<&Path>) -> Result<PathBuf, Refusal> {
    let mut first = [0; FIRST_LINE];
    let read = std::fs::File::open(&path).and_then(|mut file| {
        let mut filled = 0;
        while filled < first.len() {
            match file.read(&mut first[filled..])? {
                0 => break,
                more => filled += more,
            }
        }
        Ok(filled)
    });
    // What may be executed need not be readable.
    let Ok(filled) = read else { return Ok(path) };
    let problem = problem_of(&first[..filled], cwd, others_are_programs);
    match problem {
        Some(problem) => Err(not_executable(&path, &problem)),
        None => Ok(path),
    }
}

fn problem_of(first: &[u8], cwd: Option<&Path>, others: impl Fn() -> bool) -> Option<String> {
    if first.starts_with(b"\x7fELF") {
        return problem_of_elf(first)
            .filter(|_| !others())
            .map(str::to_owned);
    }
    let Some(line) = first.strip_prefix(b"#!") else {
        return (!others()).then(|| {
            "it is neither a program for this machine nor a script with `#!` and its interpreter in the first line"
                .to_owned()
        });
    };
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let words = |byte: &u8| *byte == b' ' || *byte == b'\t';
    let interpreter = line.split(words).find(|word| !word.is_empty())?;
    let shown = String::from_utf8_lossy(interpreter);
    let path = Path::new(std::ffi::OsStr::from_bytes(interpreter));
    let path = cwd.unwrap_or(Path::new(".")).join(path);
    match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Some(match shown.strip_suffix('\r') {
                Some(shown) => format!(
                    "its first line, with the interpreter `{shown}`, ends with a carriage return, as files of Windows do (dos2unix)"
                ),
                None => {
                    format!("its interpreter `{shown}`, which its first line names, does not exist")
                }
            })
        }
        _ => None,
    }
}

/// The values of `e_machine` that this kernel executes; empty if that is not known for this kind of processor.
const MACHINES: &[u16] = if cfg!(target_arch = "x86_64") {
    &[62, 3]
} else if cfg!(target_arch = "aarch64") {
    &[183, 40]
} else {
    &[]
};

/// Why the kernel refuses a file with the ELF magic number: what `load_elf_binary` of Linux looks at in the header.
fn problem_of_elf(header: &[u8]) -> Option<&'static str> {
    const DAMAGED: Option<&str> =
        Some("it begins as an ELF program, but its header is damaged or cut off");
    let number = |at: usize| {
        let bytes = [*header.get(at)?, *header.get(at + 1)?];
        Some(if header[5] == 2 {
            u16::from_be_bytes(bytes)
        } else {
            u16::from_le_bytes(bytes)
        })
    };
    // Where the size and the count of the program headers are, and what the size must be.
    let (size_at, size) = match header.get(4) {
        Some(1) => (42, 32),
        Some(2) => (54, 56),
        _ => return DAMAGED,
    };
    let (Some(kind), Some(machine), Some(entry_size), Some(entries)) =
        (number(16), number(18), number(size_at), number(size_at + 2))
    else {
        return DAMAGED;
    };
    if !MACHINES.is_empty() && !MACHINES.contains(&machine) {
        return Some("it is a program for another kind of processor");
    }
    match kind {
        2 | 3 if entry_size == size && entries > 0 => None,
        2 | 3 => DAMAGED,
        _ => Some("it is an object file or a core dump, not a program (it was not linked)"),
    }
}

/// Whether this kernel was told of other forms of programs.
fn others_are_programs() -> bool {
    std::fs::read_dir("/proc/sys/fs/binfmt_misc").is_ok_and(|entries| {
        entries
            .filter_map(Result::ok)
            .any(|entry| entry.file_name() != "register" && entry.file_name() != "status")
    })
}

enum Judgement {
    Good,
    Absent,
    Directory,
    NoFile,
    NotExecutable,
    Other(io::Error),
}

fn judge(path: &Path) -> Judgement {
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => Judgement::Directory,
        Ok(found) if !found.is_file() => Judgement::NoFile,
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
        let refusal = look(installed).unwrap_err();
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
        let found = look(&installed("run", Some(&search), None)).unwrap();
        assert_eq!(found.path, two.join("run"), "what can't run is passed over");
        let found = look(&installed("./run", None, Some(&two))).unwrap();
        assert_eq!(found.path, two.join("./run"));
        assert_eq!(found.cwd.as_deref(), Some(two.as_path()));
        assert!(look(&installed("run", Some("two::"), Some(dir.path()))).is_ok());

        let (kind, message) = refused(&installed("run", Some("/nowhere:/nirgends"), None));
        assert_eq!(kind, RefusalKind::NoProgram);
        assert_eq!(message, "the program `run` is not in PATH");
        std::fs::write(one.join("train.py"), "print()").unwrap();
        std::fs::write(one.join("sum.py"), "#!/usr/bin/env pypy3 -u\n").unwrap();
        std::fs::write(one.join("data"), "1 2 3").unwrap();
        for (name, dir, said) in [
            (
                "train.py",
                &one,
                "is not in PATH; write `python3 train.py` to run the file",
            ),
            (
                "./train.py",
                &one,
                "permission; write `python3 ./train.py`, or",
            ),
            ("sum.py", &one, "; write `pypy3 sum.py` to run the file"),
            (
                "data",
                &one,
                "; the file of that name has no execute permission",
            ),
            ("./data", &one, "permission; allow it by chmod +x"),
            ("run", &two, "; write `./run` to run the file"),
        ] {
            let (_, message) = refused(&installed(name, Some("/nowhere"), Some(dir)));
            assert!(message.contains(said), "{name}: {message}");
            assert!(!message.contains("/./"), "{message}");
        }
        let (kind, message) = refused(&installed("/nowhere/run", None, None));
        assert_eq!(kind, RefusalKind::NoProgram);
        assert_eq!(message, "the program `/nowhere/run` does not exist");
        let path = format!("{}/", two.display());
        assert_eq!(
            refused(&installed(&path, None, None)).0,
            RefusalKind::NotExecutable
        );
        let (kind, message) = refused(&installed("run", None, Some(Path::new("/nowhere"))));
        assert_eq!(kind, RefusalKind::NotExecutable);
        assert!(message.starts_with("the working directory `/nowhere` does not exist"));
    }

    #[test]
    fn what_the_kernel_would_not_execute_is_refused_before_anything_is_started() {
        let cwd = Some(Path::new("/bin"));
        let own = std::fs::read("/proc/self/exe").unwrap()[..FIRST_LINE].to_vec();
        let (mut other, mut object) = (own.clone(), own.clone());
        // A machine that nobody has built, and a file that was compiled and not linked.
        other[18..20].fill(0xee);
        object[16..18].copy_from_slice(&1u16.to_ne_bytes());
        for (first, part) in [
            (&own[..], None),
            (&other[..], Some("another kind of processor")),
            (&object[..], Some("an object file")),
            (b"\x7fELFxxxx", Some("damaged")),
            (b"\x7fELF\x02", Some("damaged")),
            (b"#!/bin/sh\necho", None),
            (b"#! /bin/sh -e", None),
            (b"#!sh\n", None),
            (b"#!\n", None),
            (b"#!/no/such -x\n", Some("its interpreter `/no/such`")),
            (b"#!/bin/sh\r\n", Some("carriage return")),
            (b"echo hello\n", Some("neither a program")),
            (b"", Some("neither a program")),
        ] {
            let problem = problem_of(first, cwd, || false);
            match part {
                None => assert_eq!(problem, None, "{first:?}"),
                Some(part) => assert!(problem.unwrap().contains(part), "{first:?}"),
            }
        }
        assert_eq!(problem_of(b"PK", cwd, || true), None);
        assert_eq!(problem_of(&other, cwd, || true), None);
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("run");
        std::fs::write(&file, "#!/no/such\n").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        let (kind, message) = refused(&installed("./run", None, Some(dir.path())));
        assert_eq!(kind, RefusalKind::NotExecutable);
        assert!(message.contains("`/no/such`"), "{message}");
    }
}
