//! What a started process gets, how it ends, and what is said when it can't be started.
#![allow(clippy::unwrap_used)] // a failed step is a failed test

mod common;

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};

use common::{program, script, stat, warden, within};
use kolo_process::{SpawnError, Warden, pipe};
use kolo_transport::wire::Exit;

#[tokio::test]
async fn exit_code_and_signal_are_reported() {
    let warden = warden().await;
    let code = script("exit 7").start(&warden).await;
    let signal = script("kill -9 $$").start(&warden).await;
    let success = script("exit 0").start(&warden).await;
    assert_eq!(within(code.child.wait()).await, Exit::Code(7));
    assert_eq!(within(signal.child.wait()).await, Exit::Signal(9));
    assert_eq!(within(success.child.wait()).await, Exit::Code(0));
    // Again, and by others.
    assert_eq!(code.child.exit(), Some(Exit::Code(7)));
    assert_eq!(within(code.child.clone().wait()).await, Exit::Code(7));
    within(warden.close()).await;
}

#[tokio::test]
async fn the_environment_is_exactly_what_was_asked_for() {
    let warden = warden().await;
    let mut request = program("/usr/bin/env", &[]);
    request.request.env = vec![
        ("KOLO_RANK".into(), "3".into()),
        ("EMPTY".into(), "".into()),
        ("TWO LINES".into(), "a=b c".into()),
        (kolo_process::WARDEN_FD_VAR.into(), "0".into()),
        ("KOLO_RANK".into(), "4".into()),
    ];
    let mut started = request.start(&warden).await;
    let lines = started.lines().await;
    // And the warden's mark, by which what it leaves is found.
    assert!(lines[0].starts_with("KOLO_MARK=test/"), "{lines:?}");
    assert_eq!(lines[1..], ["EMPTY=", "TWO LINES=a=b c", "KOLO_RANK=4"]);
    within(warden.close()).await;
}

#[tokio::test]
async fn arguments_and_name_arrive() {
    let warden = warden().await;
    let mut request = script("printf '%s\\n' \"$0\" \"$@\"");
    let args = ["zero", "", "with space", "ünï"].map(str::to_owned);
    request.request.args.extend(args);
    let mut started = request.start(&warden).await;
    assert_eq!(started.lines().await, ["zero", "", "with space", "ünï"]);
    let mut request = script("cat /proc/$$/cmdline");
    request.request.argv0 = "worker 1".to_owned();
    let mut started = request.start(&warden).await;
    assert!(started.line().await.starts_with("worker 1\0-c\0"));
    within(warden.close()).await;
}

#[tokio::test]
async fn descriptors_are_in_place_and_nothing_else_is_open() {
    // Inherited by the warden, because it is not close-on-exec.
    let (leak, _other) = pipe().unwrap();
    let leak: OwnedFd = rustix::io::dup(&leak).unwrap();
    let warden = warden().await;
    let of_warden = std::fs::read_dir(format!("/proc/{}/fd", warden.pid())).unwrap();
    for entry in of_warden {
        let target = std::fs::read_link(entry.unwrap().path());
        assert_ne!(
            target.ok(),
            std::fs::read_link(format!("/proc/self/fd/{}", leak.as_raw_fd())).ok()
        );
    }
    // `ls` opens the folder with the lowest free number, which is 5.
    let (_read, three) = pipe().unwrap();
    let (_read, four) = pipe().unwrap();
    let request = program("/bin/ls", &["/proc/self/fd"]);
    let mut started = request.fd(three, 3).fd(four, 4).start(&warden).await;
    let open: BTreeSet<String> = started.lines().await.into_iter().collect();
    assert_eq!(
        open,
        ["0", "1", "2", "3", "4", "5"].map(str::to_owned).into()
    );
    within(warden.close()).await;
}

#[tokio::test]
async fn any_order_of_descriptor_numbers_works() {
    let warden = warden().await;
    let numbers: Vec<i32> = (3..15).rev().chain([255]).collect();
    assert_eq!(numbers.len(), kolo_process::MAX_FDS);
    let list = numbers.iter().map(i32::to_string).collect::<Vec<_>>();
    let mut request = script(&format!(
        "for n in {}; do readlink /proc/$$/fd/$n; done",
        list.join(" ")
    ));
    let mut expected = Vec::new();
    let mut ends = Vec::new();
    for number in numbers {
        let (read, write) = pipe().unwrap();
        let link = std::fs::read_link(format!("/proc/self/fd/{}", write.as_raw_fd())).unwrap();
        expected.push(link.to_str().unwrap().to_owned());
        ends.push(read);
        request = request.fd(write, number);
    }
    let mut started = request.start(&warden).await;
    assert_eq!(started.lines().await, expected);
    within(warden.close()).await;
}

#[tokio::test]
async fn stdin_is_empty_and_signals_are_as_new() {
    let warden = warden().await;
    let mut started = script("readlink /proc/$$/fd/0; cat; echo end")
        .start(&warden)
        .await;
    assert_eq!(started.lines().await, ["/dev/null", "end"]);
    let mut started = program("/bin/grep", &["^Sig[BI]", "/proc/self/status"])
        .start(&warden)
        .await;
    let none = "0000000000000000";
    let expected = [format!("SigBlk:\t{none}"), format!("SigIgn:\t{none}")];
    assert_eq!(started.lines().await, expected);
    within(warden.close()).await;
}

#[tokio::test]
async fn it_leads_a_session_below_the_warden() {
    let warden = warden().await;
    let started = script("exec sleep 1000").start(&warden).await;
    let pid = started.child.pid().to_string();
    let stat = stat(started.child.pid()).unwrap();
    assert_eq!(stat[1..4], [warden.pid().to_string(), pid.clone(), pid]);
    within(warden.close()).await;
    assert_eq!(started.child.exit(), Some(Exit::Signal(9)));
}

#[tokio::test]
async fn the_working_directory_is_set() {
    let warden = warden().await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().canonicalize().unwrap();
    let mut request = script("pwd -P");
    request.request.cwd = Some(path.clone());
    assert_eq!(
        request.start(&warden).await.lines().await,
        [path.to_str().unwrap()]
    );
    let mut started = script("pwd -P").start(&warden).await;
    let here = std::env::current_dir().unwrap().canonicalize().unwrap();
    assert_eq!(started.lines().await, [here.to_str().unwrap()]);
    // A relative program counts from there.
    std::os::unix::fs::symlink("/bin/sh", path.join("shell")).unwrap();
    let mut request = program("./shell", &["-c", "echo here"]);
    request.request.cwd = Some(path);
    assert_eq!(request.start(&warden).await.lines().await, ["here"]);
    within(warden.close()).await;
}

#[tokio::test]
async fn every_reason_not_to_start_has_its_error() {
    let warden = warden().await;
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &[u8], mode: u32| {
        let path = dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    };
    let fails = async |path: &Path| {
        let request = program(path.to_str().unwrap(), &[]);
        within(warden.spawn(request.request)).await.unwrap_err()
    };
    let path = dir.path().join("absent");
    assert_eq!(fails(&path).await, SpawnError::NotFound { path });
    let path = file("file", b"x", 0o644).join("below");
    assert_eq!(fails(&path).await, SpawnError::NotFound { path });
    let path = file("no-interpreter", b"#!/no/such/interpreter\n", 0o755);
    assert_eq!(fails(&path).await, SpawnError::NotFound { path });
    let path = file("not-executable", b"#!/bin/sh\n", 0o644);
    assert_eq!(fails(&path).await, SpawnError::NotExecutable { path });
    let path = dir.path().to_owned();
    assert_eq!(fails(&path).await, SpawnError::NotExecutable { path });
    let path = file("text", b"no program\n", 0o755);
    assert_eq!(fails(&path).await, SpawnError::NotAProgram { path });
    let path = file("truncated", b"\x7fELF\x02\x01\x01", 0o755);
    assert_eq!(fails(&path).await, SpawnError::NotAProgram { path });

    let path = file("busy", b"#!/bin/sh\n", 0o755);
    let writer = std::fs::OpenOptions::new()
        .append(true)
        .open(&path)
        .unwrap();
    assert_eq!(fails(&path).await, SpawnError::Busy { path: path.clone() });
    drop(writer);
    let ended = program(path.to_str().unwrap(), &[]).start(&warden).await;
    assert_eq!(within(ended.child.wait()).await, Exit::Code(0));

    let directory = dir.path().join("absent");
    let mut request = script("exit 0").request;
    request.cwd = Some(directory.clone());
    let error = within(warden.spawn(request)).await.unwrap_err();
    assert!(
        matches!(&error, SpawnError::BadDirectory { directory: given, .. } if *given == directory),
        "{error}"
    );

    // One argument may have 128 KiB.
    let mut request = script("exit 0").request;
    request.args.push("x".repeat(200_000));
    let error = within(warden.spawn(request)).await.unwrap_err();
    assert!(
        matches!(
            error,
            SpawnError::TooLarge {
                bytes: 200_038..,
                ..
            }
        ),
        "{error}"
    );
    // More than a frame holds.
    let mut request = script("exit 0").request;
    request.args.extend(vec!["x".repeat(100_000); 50]);
    let error = within(warden.spawn(request)).await.unwrap_err();
    assert!(matches!(error, SpawnError::TooLarge { .. }), "{error}");
    let request = script("exit 0").fd(std::fs::File::open("/dev/null").unwrap().into(), 1);
    let error = within(warden.spawn(request.request)).await.unwrap_err();
    assert!(matches!(error, SpawnError::Invalid { .. }), "{error}");

    // After all that the warden is as good as before, and none of the attempts is left.
    let ended = script("exit 3").start(&warden).await;
    assert_eq!(within(ended.child.wait()).await, Exit::Code(3));
    assert_eq!(common::children(warden.pid()), []);
    within(warden.close()).await;
}

#[tokio::test]
async fn a_warden_without_room_for_descriptors_says_so_and_lives_on() {
    let warden = warden().await;
    let limit = rustix::process::Rlimit {
        current: Some(20),
        maximum: Some(20),
    };
    let pid = rustix::process::Pid::from_raw(warden.pid().cast_signed());
    rustix::process::prlimit(pid, rustix::process::Resource::Nofile, limit).unwrap();
    let mut request = script("exit 0");
    for number in 3..16 {
        request = request.fd(std::fs::File::open("/dev/null").unwrap().into(), number);
    }
    let error = within(warden.spawn(request.request)).await.unwrap_err();
    assert!(matches!(error, SpawnError::Resources { .. }), "{error}");
    assert!(error.is_retryable());
    let ended = script("exit 3").start(&warden).await;
    assert_eq!(within(ended.child.wait()).await, Exit::Code(3));
    within(warden.close()).await;
}

#[tokio::test]
async fn the_executed_file_is_known_by_inode() {
    let warden = warden().await;
    let started = program("/bin/sleep", &["1000"]).start(&warden).await;
    let file = std::fs::metadata("/bin/sleep").unwrap();
    assert_eq!(
        started.child.executable_id().unwrap(),
        (file.dev(), file.ino())
    );
    within(warden.close()).await;
    let error = started.child.executable_id().unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
}

#[tokio::test]
async fn a_program_that_is_no_warden_is_refused() {
    let error = within(Warden::start(Path::new("/bin/false"), common::OWNER))
        .await
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "/bin/false was started as a warden and ended with exit status: 1; its main must begin with \
         kolo_process::run_if_warden() (#[kolo::main] does it)"
    );
    let error = within(Warden::start(Path::new("/no/such/warden"), common::OWNER))
        .await
        .unwrap_err();
    assert_eq!(
        error,
        SpawnError::NotFound {
            path: "/no/such/warden".into()
        }
    );
}

/// A program that is no warden, leaves others in sessions of their own, and then goes on as it is told.
fn no_warden(dir: &Path, then: &str) -> std::path::PathBuf {
    let path = dir.join("program");
    let pids = dir.join("pids");
    let text = format!(
        "#!/bin/sh\n(setsid sleep 1000 &)\nsetsid sh -c 'echo $$ > {0}.new; mv {0}.new {0}; exec sleep 1000' &\n\
         until [ -e {0} ]; do sleep 0.01; done\n{then}\n",
        pids.display()
    );
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// Nobody has a variable with this value any more.
async fn nothing_is_left_with(mark: &str) {
    let mark = mark.as_bytes();
    let is_left = || {
        std::fs::read_dir("/proc").unwrap().any(|entry| {
            let environ = std::fs::read(entry.unwrap().path().join("environ"));
            environ.is_ok_and(|environ| environ.windows(mark.len()).any(|window| window == mark))
        })
    };
    within(async {
        while is_left() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn nothing_is_left_of_a_program_that_is_no_warden() {
    for (number, then) in [
        "exit 1",
        "exec sleep 1000 <&-",
        "exec 3>&0; head -c 64 /dev/zero | tr '\\0' '\\377' >&3; exec sleep 1000",
    ]
    .into_iter()
    .enumerate()
    {
        let dir = tempfile::tempdir().unwrap();
        let exe = no_warden(dir.path(), then);
        let owner = format!("no-warden-{}-{number}", std::process::id());
        let error = within(Warden::start(&exe, &owner)).await.unwrap_err();
        assert!(matches!(error, SpawnError::NotAWarden { .. }), "{error}");
        // At once.
        let pid: u32 = std::fs::read_to_string(dir.path().join("pids"))
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        assert!(stat(pid).is_none_or(|stat| stat[0] == "Z"), "{then}");
        nothing_is_left_with(&owner).await;
    }
}

#[tokio::test]
async fn nothing_is_left_of_a_start_that_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let exe = no_warden(dir.path(), "exec sleep 1000");
    let owner = format!("given-up-{}", std::process::id());
    let started = async {
        while !dir.path().join("pids").exists() {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        warden = Warden::start(&exe, &owner) => panic!("{warden:?}"),
        () = within(started) => {}
    }
    nothing_is_left_with(&owner).await;
}

#[test]
fn a_warden_that_nobody_needs_says_what_is_wrong() {
    let run = |value: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_kolo-warden"))
            .env(kolo_process::WARDEN_FD_VAR, value)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(run("7").contains("KOLO_WARDEN_FD is 7, allowed is 0"));
    assert!(run("0").contains("standard input is no Unix socket"));
}
