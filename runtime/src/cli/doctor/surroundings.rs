//! What is to be said of the surroundings of a process: of this one, of the head, or of a node.

use std::io;

use kolo_transport::wire::{DaemonState, FolderState, FolderUse};
use rustix::io::Errno;

use super::Finding;

/// The check of a folder for what must be kept.
pub(super) const STATE_FOLDER: &str = "state folder";

/// Shared memory of a host for collectives between its workers.
const SMALL_SHM: u64 = 256 << 20;

/// With less, the next program or the next change may not fit.
const SMALL_STATE: u64 = 64 << 20;

/// Whose surroundings they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Whose<'a> {
    /// This command's, and those of what it starts here.
    Here,
    /// The head's.
    Head,
    /// Those of the node on this host.
    Node(&'a str),
}

impl Whose<'_> {
    fn place(&self) -> &str {
        match self {
            Self::Here => "here",
            Self::Head => "head",
            Self::Node(name) => name,
        }
    }
}

/// All that there is to say. Of other hosts only what is not as it should be: a table of a cluster is long enough.
pub(super) fn judge(whose: Whose<'_>, state: &DaemonState) -> Vec<Finding> {
    let mut findings: Vec<Finding> = state
        .folders
        .iter()
        .filter_map(|folder| match folder.usage {
            FolderUse::State => Some(state_folder(whose, folder)),
            // A head has no workers.
            FolderUse::SharedMemory if whose != Whose::Head => Some(shared_memory(folder)),
            _ => None,
        })
        .collect();
    if whose != Whose::Head {
        findings.push(user(whose, state.uid));
    }
    findings.push(core_dumps(whose, state));
    if whose != Whose::Here {
        findings.retain(|finding| finding.remedy.is_some());
    }
    let placed = findings.into_iter();
    placed.map(|finding| finding.at(whose.place())).collect()
}

fn mib(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "?".to_owned(), |bytes| (bytes >> 20).to_string())
}

fn why(errno: i32) -> String {
    match Errno::from_raw_os_error(errno) {
        Errno::TIMEDOUT => "its file system does not answer".to_owned(),
        _ => format!(
            "nothing can be written there: {}",
            io::Error::from_raw_os_error(errno)
        ),
    }
}

fn state_folder(whose: Whose<'_>, folder: &FolderState) -> Finding {
    const CHECK: &str = STATE_FOLDER;
    let path = &folder.path;
    let lost = match whose {
        Whose::Here => "until then no login, renewed certificate or detached launch is kept",
        Whose::Head => {
            "until then no token, revocation or renewed certificate is kept, and what needs one fails"
        }
        Whose::Node(_) => {
            "until then no renewed certificate and no program is kept, and jobs with programs that are not there fail"
        }
    };
    let room = format!("make room on its disk (`df -h {path}`, `df -i {path}`)");
    if let Some(errno) = folder.problem {
        let to_do = match Errno::from_raw_os_error(errno) {
            Errno::NOSPC | Errno::DQUOT => room,
            Errno::ROFS => format!(
                "mount it for writing: `mount -o remount,rw` if it was meant to be; see `dmesg` if it was: the kernel does that \
                 to a disk that fails (`findmnt -T {path}`)"
            ),
            Errno::TIMEDOUT => {
                format!("look at the mount of {path}, and at the host that serves it")
            }
            _ => "give it to the user that kolo runs as (chown, chmod u+rwx), or look as that user"
                .to_owned(),
        };
        return Finding::bad(
            CHECK,
            format!("{path}: {}", why(errno)),
            format!("{to_do}; {lost}"),
        );
    }
    let found = format!("{path}: {} MiB free", mib(folder.free));
    match folder.free {
        Some(free) if free < SMALL_STATE => Finding::warning(CHECK, found, room),
        _ => Finding::good(CHECK, found),
    }
}

fn shared_memory(folder: &FolderState) -> Finding {
    const CHECK: &str = "shared memory";
    const NEEDED_BY: &str = "PyTorch and NCCL need it for workers of one host";
    let path = &folder.path;
    let larger = format!(
        "give it {} MiB or more: `mount -o remount,size=1g {path}`, or `--shm-size=1g` for a container; {NEEDED_BY}",
        SMALL_SHM >> 20
    );
    if let Some(errno) = folder.problem {
        let found = format!("{path}: {}", why(errno));
        return match Errno::from_raw_os_error(errno) {
            Errno::NOENT | Errno::NOTDIR => Finding::warning(
                CHECK,
                found,
                format!("mount a tmpfs on {path}; {NEEDED_BY}"),
            ),
            Errno::NOSPC | Errno::DQUOT => Finding::bad(
                CHECK,
                found,
                format!("remove what dead programs have left in it (`ls -l {path}`), or {larger}"),
            ),
            Errno::ROFS => Finding::bad(
                CHECK,
                found,
                format!(
                    "`mount -o remount,rw {path}`, or no `--read-only` for a container; {NEEDED_BY}"
                ),
            ),
            _ => Finding::bad(CHECK, found, format!("`chmod 1777 {path}`; {NEEDED_BY}")),
        };
    }
    let found = format!(
        "{path}: {} MiB, {} MiB free",
        mib(folder.total),
        mib(folder.free)
    );
    match folder.free {
        Some(free) if free < SMALL_SHM => Finding::warning(CHECK, found, larger),
        _ => Finding::good(CHECK, found),
    }
}

fn user(whose: Whose<'_>, uid: u32) -> Finding {
    const CHECK: &str = "user";
    let remedy = match whose {
        Whose::Node(_) => {
            "run kolo-node as a user of its own, as the unit for systemd does (User=kolo), and give that user its state folder"
        }
        _ => "run kolo as a user of your own",
    };
    match uid {
        0 => Finding::warning(
            CHECK,
            "workers that are started here run as root: a program of a job may do anything to this host",
            remedy,
        ),
        uid => Finding::good(
            CHECK,
            format!("workers that are started here run as user {uid}"),
        ),
    }
}

fn core_dumps(whose: Whose<'_>, state: &DaemonState) -> Finding {
    const CHECK: &str = "core dumps";
    let program = state.core_pattern.strip_prefix('|').map(first_word);
    // For a program behind a pipe the kernel does not enforce the limit; one of 1 alone keeps it from starting the program (core(5)).
    let none = match (state.core_limit, program) {
        (Some(0), Some(program)) => minds_limit(program),
        (Some(0 | 1), _) => true,
        _ => false,
    };
    if none {
        return Finding::good(CHECK, "none are left");
    }
    if state.core_pattern.is_empty() {
        return Finding::good(CHECK, "none are left: core_pattern is empty");
    }
    let limit = match state.core_limit {
        None => "no limit".to_owned(),
        Some(bytes) => format!("a limit of {bytes} bytes"),
    };
    if let Some(program) = program {
        let set = match whose {
            Whose::Here => "`prlimit --core=1 --pid $$` before kolo is started",
            Whose::Head | Whose::Node(_) => {
                "LimitCORE=1 in its unit, or `prlimit --core=1 --pid $$` before it is started"
            }
        };
        return Finding::warning(
            CHECK,
            format!(
                "a crash would give the memory of the process, keys included, to `{program}`, which decides what is left \
                 (core_pattern; there is {limit})"
            ),
            format!(
                "{set}: with a limit of 1 the kernel does not start `{program}`, with 0 it does"
            ),
        );
    }
    let remedy = match whose {
        Whose::Here => "`ulimit -c 0` before kolo is started, or in limits.conf",
        Whose::Head | Whose::Node(_) => {
            "LimitCORE=0 in its unit, or `ulimit -c 0` before it is started"
        }
    };
    Finding::warning(
        CHECK,
        format!(
            "a crash would leave the memory of the process, keys included, at `{}` (core_pattern; there is {limit})",
            state.core_pattern
        ),
        remedy,
    )
}

fn first_word(text: &str) -> &str {
    text.split_ascii_whitespace().next().unwrap_or_default()
}

/// Whether a program that gets core dumps leaves none where the limit is 0.
fn minds_limit(program: &str) -> bool {
    program.rsplit('/').next() == Some("systemd-coredump")
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    const GIB: u64 = 1 << 30;

    fn folder(usage: FolderUse, free: u64, problem: Option<Errno>) -> FolderState {
        FolderState {
            usage,
            path: "/f".to_owned(),
            free: Some(free),
            total: Some(GIB),
            problem: problem.map(Errno::raw_os_error),
        }
    }

    #[test]
    fn folders_are_good_small_full_read_only_or_of_another_user() {
        use FolderUse::{SharedMemory as Shm, State};
        use Level::{Bad, Good, Warning};
        let (full, quota) = (Some(Errno::NOSPC), Some(Errno::DQUOT));
        let (fixed, foreign) = (Some(Errno::ROFS), Some(Errno::ACCESS));
        let (hangs, missing) = (Some(Errno::TIMEDOUT), Some(Errno::NOENT));
        for (usage, free, problem, level, found, to_do) in [
            (State, GIB, None, Good, "1024 MiB free", ""),
            (State, 1 << 20, None, Warning, "1 MiB free", "make room"),
            (State, 0, full, Bad, "No space left", "make room"),
            (State, GIB, quota, Bad, "quota", "make room"),
            (State, GIB, fixed, Bad, "Read-only file", "remount,rw"),
            (State, GIB, foreign, Bad, "Permission denied", "chown"),
            (State, GIB, hangs, Bad, "does not answer", "the mount of"),
            (Shm, GIB, None, Good, "1024 MiB, 1024 MiB free", ""),
            (Shm, 64 << 20, None, Warning, "64 MiB free", "--shm-size"),
            (Shm, 0, full, Bad, "No space left", "remove what dead"),
            (Shm, GIB, fixed, Bad, "Read-only", "remount,rw /f"),
            (Shm, GIB, foreign, Bad, "Permission", "chmod 1777 /f"),
            (Shm, 0, missing, Warning, "No such file", "mount a tmpfs"),
        ] {
            for whose in [Whose::Here, Whose::Head, Whose::Node("b")] {
                let state = DaemonState {
                    uid: 1000,
                    core_limit: Some(0),
                    core_pattern: "core".to_owned(),
                    folders: vec![folder(usage, free, problem)],
                };
                let findings = judge(whose, &state);
                let told = findings
                    .iter()
                    .find(|finding| !matches!(finding.check, "user" | "core dumps"));
                let is_told = match whose {
                    Whose::Here => true,
                    Whose::Head => level != Level::Good && usage == State,
                    Whose::Node(_) => level != Level::Good,
                };
                assert_eq!(told.is_some(), is_told, "{whose:?} {findings:?}");
                let Some(told) = told else { continue };
                assert_eq!(told.level, level, "{told:?}");
                assert!(told.found.contains(found), "{told:?}");
                assert_eq!(told.at, whose.place());
                assert!(
                    told.remedy.as_deref().unwrap_or_default().contains(to_do),
                    "{told:?}"
                );
                assert_eq!(told.remedy.is_none(), level == Level::Good);
            }
        }
    }

    #[test]
    fn workers_that_run_as_root_and_core_dumps_with_keys_are_told() {
        let state = |uid, core_limit, core_pattern: &str| DaemonState {
            uid,
            core_limit,
            core_pattern: core_pattern.to_owned(),
            folders: Vec::new(),
        };
        let checks = |whose, state: &DaemonState| -> Vec<&str> {
            judge(whose, state)
                .iter()
                .filter(|finding| finding.level == Level::Warning)
                .map(|finding| finding.check)
                .collect()
        };
        let node = Whose::Node("b");
        assert_eq!(checks(node, &state(0, Some(0), "core")), ["user"]);
        assert_eq!(checks(Whose::Head, &state(0, Some(0), "core")), [""; 0]);
        assert_eq!(checks(node, &state(1, None, "core")), ["core dumps"]);
        assert_eq!(
            checks(node, &state(1, Some(4096), "|/usr/share/apport")),
            ["core dumps"]
        );
        assert_eq!(checks(Whose::Head, &state(1, None, "core")), ["core dumps"]);
        assert_eq!(checks(node, &state(1, None, "")), [""; 0]);
        // Of this host what is good is told as well.
        assert_eq!(judge(Whose::Here, &state(1, Some(0), "core")).len(), 2);
        let text = format!("{:?}", judge(node, &state(0, None, "/cores/%p")));
        for part in [
            r#"at: "b""#,
            "run as root",
            "User=kolo",
            "LimitCORE=0",
            "/cores/%p",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn a_limit_of_0_is_no_end_of_core_dumps_for_a_program_behind_a_pipe() {
        const APPORT: &str = "|/usr/share/apport/apport -p%p -c%c -- %E";
        const SYSTEMD: &str = "|/usr/lib/systemd/systemd-coredump %P %u %g %s %t %c %h";
        for (limit, pattern, program) in [
            (Some(0), "core", None),
            (Some(1), "core", None),
            (Some(0), SYSTEMD, None),
            (Some(1), SYSTEMD, None),
            (None, SYSTEMD, Some("`/usr/lib/systemd/systemd-coredump`")),
            (Some(0), APPORT, Some("`/usr/share/apport/apport`")),
            (Some(1), APPORT, None),
            (Some(2), APPORT, Some("`/usr/share/apport/apport`")),
            (None, APPORT, Some("`/usr/share/apport/apport`")),
            (Some(0), "| /x", Some("`/x`")),
            (
                Some(0),
                "|/not-systemd-coredump",
                Some("`/not-systemd-coredump`"),
            ),
        ] {
            for whose in [Whose::Here, Whose::Head, Whose::Node("b")] {
                let state = DaemonState {
                    uid: 1000,
                    core_limit: limit,
                    core_pattern: pattern.to_owned(),
                    folders: Vec::new(),
                };
                let finding = core_dumps(whose, &state);
                let Some(program) = program else {
                    assert_eq!(finding.level, Level::Good, "{finding:?}");
                    continue;
                };
                assert_eq!(finding.level, Level::Warning, "{finding:?}");
                assert!(finding.found.contains(program), "{finding:?}");
                let to_do = finding.remedy.unwrap();
                assert!(to_do.contains("--core=1"), "{to_do}");
                assert_eq!(to_do.contains("LimitCORE=1"), whose != Whose::Here);
            }
        }
    }
}
