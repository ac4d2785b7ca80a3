use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;

use tempfile::TempDir;

use super::file::MODE;
use super::*;

/// Pieces from a list; an `Err` breaks the upload.
struct List(VecDeque<Result<Bytes, String>>);

impl Pieces for List {
    async fn next(&mut self) -> Result<Option<Bytes>, String> {
        self.0.pop_front().transpose()
    }
}

fn pieces(content: &[u8]) -> List {
    List(
        content
            .chunks(7)
            .map(|piece| Ok(Bytes::copy_from_slice(piece)))
            .collect(),
    )
}

fn program(content: &[u8]) -> Program {
    Program {
        hash: ProgramHash(*blake3::hash(content).as_bytes()),
        size: content.len() as u64,
        name: "program".to_owned(),
    }
}

fn open(dir: Option<&TempDir>) -> Programs {
    let source = ProgramSource {
        cache: dir.map(|dir| dir.path().join("programs")),
        ..ProgramSource::default()
    };
    Programs::open(source, Handle::current()).unwrap()
}

fn names(dir: &TempDir) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir.path().join("programs"))
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

const SCRIPT: &[u8] = b"#!/bin/sh\nexit 42\n";

#[tokio::test]
async fn a_program_is_stored_verified_and_found_again() {
    let dir = TempDir::new().unwrap();
    let program = program(SCRIPT);
    let programs = open(Some(&dir));
    assert!(programs.get(program.hash).await.is_none());
    programs.put(&program, &mut pieces(SCRIPT)).await.unwrap();
    let file = programs.get(program.hash).await.unwrap();
    assert_eq!(fs::read(&file.path).unwrap(), SCRIPT);
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(mode(&file.path), 0o500);
    assert_eq!(mode(file.path.parent().unwrap()), 0o700);
    assert_eq!(names(&dir), [program.hash.to_string()]);
    // A daemon that starts again finds it.
    let again = open(Some(&dir)).get(program.hash).await.unwrap();
    assert_eq!(again.id, file.id);
}

#[tokio::test]
async fn without_a_directory_a_program_is_sealed_memory_that_can_be_executed() {
    let content = fs::read("/bin/true").unwrap();
    let program = program(&content);
    let programs = open(None);
    programs.put(&program, &mut pieces(&content)).await.unwrap();
    let file = programs.get(program.hash).await.unwrap();
    let written = OpenOptions::new()
        .write(true)
        .open(&file.path)
        .and_then(|mut file| file.write_all(b"x"));
    assert!(written.is_err(), "nobody can change it");
    let mut child = std::process::Command::new(&file.path).spawn().unwrap();
    assert!(child.wait().unwrap().success());
}

#[tokio::test]
async fn an_upload_that_breaks_leaves_nothing() {
    let dir = TempDir::new().unwrap();
    let programs = open(Some(&dir));
    let good = program(SCRIPT);
    let mut short = pieces(SCRIPT);
    short.0.pop_back();
    let mut long = pieces(SCRIPT);
    long.0.push_back(Ok(Bytes::from_static(b"more than fits")));
    // The last piece of a program that is too long has to come before its end.
    long.0.swap(0, 3);
    let mut broken = pieces(SCRIPT);
    broken.0[1] = Err("the stream failed".to_owned());
    let mut changed = pieces(SCRIPT);
    changed.0[0] = Ok(Bytes::from_static(b"#!/bin/"));
    changed.0[1] = Ok(Bytes::from_static(b"SH\nexit"));
    for (mut pieces, text) in [
        (short, "4 bytes before its end"),
        (long, "longer than the 18 bytes"),
        (broken, "the stream failed"),
        (changed, "changed while it was sent"),
    ] {
        let refusal = programs.put(&good, &mut pieces).await.unwrap_err();
        assert_eq!(refusal.kind, RefusalKind::Invalid);
        assert!(refusal.message.contains(text), "{refusal}");
        assert_eq!(names(&dir), [""; 0]);
        assert!(programs.get(good.hash).await.is_none());
    }
    // And does not stand in the way of a good one.
    programs.put(&good, &mut pieces(SCRIPT)).await.unwrap();
    assert_eq!(names(&dir).len(), 1);
}

/// Stops after its first piece until the other upload is done.
struct Slow<'a>(List, &'a Programs, Program);
impl Pieces for Slow<'_> {
    async fn next(&mut self) -> Result<Option<Bytes>, String> {
        if self.0.0.len() == 2 {
            let Self(_, programs, program) = self;
            programs.put(program, &mut pieces(SCRIPT)).await.unwrap();
        }
        self.0.next().await
    }
}

#[tokio::test]
async fn a_program_that_somebody_else_has_sent_meanwhile_is_not_read_to_its_end() {
    let dir = TempDir::new().unwrap();
    let programs = open(Some(&dir));
    let good = program(SCRIPT);

    let mut slow = Slow(pieces(SCRIPT), &programs, good.clone());
    programs.put(&good, &mut slow).await.unwrap();
    assert_eq!(slow.0.0.len(), 1, "the rest was not read");
    assert_eq!(names(&dir).len(), 1);
    programs
        .put(&good, &mut List(VecDeque::new()))
        .await
        .unwrap();
}

#[tokio::test]
async fn two_uploads_that_end_at_once_leave_the_file_of_the_first() {
    for _ in 0..20 {
        let dir = TempDir::new().unwrap();
        let programs = open(Some(&dir));
        let good = program(SCRIPT);
        let send = async || {
            programs.put(&good, &mut pieces(SCRIPT)).await.unwrap();
            programs.get(good.hash).await.unwrap().id
        };
        let (first, second) = tokio::join!(send(), send());
        assert_eq!(first, second, "a worker may run from the first already");
        assert_eq!(names(&dir).len(), 1);
    }
}

#[tokio::test]
async fn sizes_are_checked_before_anything_is_read() {
    let programs = Programs::open(
        ProgramSource {
            max_size: 10,
            ..ProgramSource::default()
        },
        Handle::current(),
    )
    .unwrap();
    let refusal = programs
        .put(&program(SCRIPT), &mut pieces(SCRIPT))
        .await
        .unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::TooLarge);
    assert!(refusal.message.contains("allowed is 1 to 10"), "{refusal}");
    let empty = programs.put(&program(b""), &mut pieces(b"")).await;
    assert_eq!(empty.unwrap_err().kind, RefusalKind::TooLarge);
}

#[tokio::test]
async fn the_oldest_that_nobody_uses_makes_room() {
    let dir = TempDir::new().unwrap();
    let source = ProgramSource {
        cache: Some(dir.path().join("programs")),
        max_total: 20,
        ..ProgramSource::default()
    };
    let programs = Programs::open(source, Handle::current()).unwrap();
    let contents = [*b"first    8", *b"second   8", *b"third    8"];
    let [first, second, third] = contents.map(|content| program(&content));
    for (program, content) in [(&first, &contents[0]), (&second, &contents[1])] {
        programs.put(program, &mut pieces(content)).await.unwrap();
    }
    let in_use = programs.get(first.hash).await.unwrap();
    let also = programs.get(second.hash).await.unwrap();
    let refusal = programs
        .put(&third, &mut pieces(&contents[2]))
        .await
        .unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::Busy);
    drop(also);
    programs
        .put(&third, &mut pieces(&contents[2]))
        .await
        .unwrap();
    assert!(programs.get(second.hash).await.is_none());
    assert!(in_use.path.exists());
    assert_eq!(names(&dir).len(), 2);
}

#[tokio::test]
async fn what_lies_in_the_cache_is_not_believed() {
    let dir = TempDir::new().unwrap();
    let good = program(SCRIPT);
    drop(open(Some(&dir)));
    let place = dir.path().join("programs").join(good.hash.to_string());
    fs::write(&place, b"something else").unwrap();
    fs::write(dir.path().join("programs/.upload-1"), b"half").unwrap();
    let programs = open(Some(&dir));
    assert!(programs.get(good.hash).await.is_none());
    assert_eq!(names(&dir), [""; 0], "what is wrong is removed");
    programs.put(&good, &mut pieces(SCRIPT)).await.unwrap();
    // A file that somebody removes is not here any more.
    fs::remove_file(&place).unwrap();
    assert!(programs.get(good.hash).await.is_none());
}

/// A file is written over, cut short, and replaced by another, behind the node's back.
#[tokio::test]
async fn what_is_changed_under_a_running_node_is_not_used_and_comes_again() {
    let dir = TempDir::new().unwrap();
    let programs = open(Some(&dir));
    let good = program(SCRIPT);
    let place = dir.path().join("programs").join(good.hash.to_string());
    let write = |content: &[u8]| {
        fs::set_permissions(&place, fs::Permissions::from_mode(0o700)).unwrap();
        fs::write(&place, content).unwrap();
    };
    let same_length = b"#!/bin/sh\nexit 43\n";
    assert_eq!(same_length.len(), SCRIPT.len());
    let changes: [(&str, &dyn Fn()); 4] = [
        ("cut short", &|| write(b"")),
        ("overwritten", &|| write(same_length)),
        ("replaced", &|| {
            fs::remove_file(&place).unwrap();
            fs::write(&place, b"other").unwrap();
        }),
        ("removed", &|| fs::remove_file(&place).unwrap()),
    ];
    for (what, change) in changes {
        programs.put(&good, &mut pieces(SCRIPT)).await.unwrap();
        assert!(programs.get(good.hash).await.is_some(), "{what}");
        change();
        assert!(programs.get(good.hash).await.is_none(), "{what}");
        assert_eq!(names(&dir), [""; 0], "{what}");
    }
    programs.put(&good, &mut pieces(SCRIPT)).await.unwrap();
    let file = programs.get(good.hash).await.unwrap();
    assert_eq!(fs::read(&file.path).unwrap(), SCRIPT);
}

#[tokio::test]
async fn what_only_looks_changed_is_still_the_same_program() {
    let dir = TempDir::new().unwrap();
    let programs = open(Some(&dir));
    let good = program(SCRIPT);
    programs.put(&good, &mut pieces(SCRIPT)).await.unwrap();
    let file = programs.get(good.hash).await.unwrap();
    // Nobody can start it like this, and it is put right.
    fs::set_permissions(&file.path, fs::Permissions::from_mode(0o600)).unwrap();
    let again = programs.get(good.hash).await.unwrap();
    assert!(Arc::ptr_eq(&file, &again));
    assert_eq!(fs::metadata(&file.path).unwrap().mode() & 0o777, MODE);
    // The same bytes in another file.
    let copy = dir.path().join("copy");
    fs::write(&copy, SCRIPT).unwrap();
    fs::rename(&copy, &file.path).unwrap();
    let other = programs.get(good.hash).await.unwrap();
    assert_ne!(other.id, file.id);
    assert_eq!(Stamp::of(&other.path).unwrap().id(), other.id);
}

#[tokio::test]
async fn a_preloaded_program_that_was_changed_is_not_here_and_is_not_removed() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("mine");
    fs::write(&path, SCRIPT).unwrap();
    let good = program(SCRIPT);
    let source = ProgramSource {
        preloaded: vec![(good.hash, path.clone())],
        ..ProgramSource::default()
    };
    let programs = Programs::open(source, Handle::current()).unwrap();
    // A second name changes the file's time and not the file.
    fs::hard_link(&path, dir.path().join("second")).unwrap();
    assert!(programs.get(good.hash).await.is_some());
    fs::write(&path, b"built anew").unwrap();
    assert!(programs.get(good.hash).await.is_none());
    assert_eq!(fs::read(&path).unwrap(), b"built anew");
    // It can be sent like any other.
    programs.put(&good, &mut pieces(SCRIPT)).await.unwrap();
    assert!(programs.get(good.hash).await.is_some());
}

#[tokio::test]
async fn a_directory_that_others_can_write_to_is_refused() {
    let dir = TempDir::new().unwrap();
    let open_to_all = dir.path().join("programs");
    fs::create_dir(&open_to_all).unwrap();
    fs::set_permissions(&open_to_all, fs::Permissions::from_mode(0o777)).unwrap();
    let source = ProgramSource {
        cache: Some(open_to_all),
        ..ProgramSource::default()
    };
    let error = Programs::open(source, Handle::current()).unwrap_err();
    assert!(error.to_string().contains("chmod 700"), "{error}");
}

#[tokio::test]
async fn a_preloaded_program_is_here_from_the_start() {
    let hash = ProgramHash([9; 32]);
    let source = |path: &str| ProgramSource {
        preloaded: vec![(hash, path.into())],
        ..ProgramSource::default()
    };
    let programs = Programs::open(source("/proc/self/exe"), Handle::current()).unwrap();
    let file = programs.get(hash).await.unwrap();
    assert!(!file.path.starts_with("/proc/self"));
    for missing in ["/no/such/program", "/"] {
        let error = Programs::open(source(missing), Handle::current()).unwrap_err();
        assert!(error.to_string().contains(missing), "{error}");
    }
}

#[test]
fn only_hashes_are_hashes() {
    let hash = ProgramHash([0xab; 32]);
    assert_eq!(parse_hash(&hash.to_string()), Some(hash));
    for bad in [
        "",
        "ab",
        &"AB".repeat(32),
        &"zz".repeat(32),
        &"é".repeat(32),
    ] {
        assert_eq!(parse_hash(bad), None);
    }
}

#[tokio::test]
async fn a_full_disk_makes_the_oldest_programs_go_and_none_that_runs() {
    let dir = TempDir::new().unwrap();
    let programs = open(Some(&dir));
    let contents: Vec<Vec<u8>> = (0..4).map(|n| vec![b'a' + n; 10]).collect();
    for content in &contents {
        programs
            .put(&program(content), &mut pieces(content))
            .await
            .unwrap();
    }
    // The oldest runs.
    let running = programs.get(program(&contents[0]).hash).await.unwrap();
    let full = || io::Error::from(io::ErrorKind::StorageFull);
    // A disk that has room again when two programs are gone.
    let folder = dir.path().join("programs");
    let count = move || fs::read_dir(&folder).unwrap().count();
    let stored = programs
        .storing(move || if count() > 2 { Err(full()) } else { Ok(7) })
        .await;
    assert_eq!(stored.unwrap(), 7);
    for (content, is_here) in contents.iter().zip([true, false, false, true]) {
        let found = programs.get(program(content).hash).await;
        assert_eq!(found.is_some(), is_here);
    }
    // One that never has room.
    let refused = programs
        .storing(move || Err::<(), _>(full()))
        .await
        .unwrap_err();
    assert_eq!(refused.kind, RefusalKind::Busy);
    assert!(refused.message.contains("free some space"), "{refused}");
    assert_eq!(names(&dir), [program(&contents[0]).hash.to_string()]);
    assert_eq!(fs::read(&running.path).unwrap(), contents[0]);
    // Another fault costs no program.
    let refused = programs
        .storing(|| Err::<(), _>(io::Error::other("broken")))
        .await
        .unwrap_err();
    assert_eq!(refused.kind, RefusalKind::Internal);
    assert_eq!(names(&dir).len(), 1);
}

#[tokio::test]
async fn a_piece_that_found_the_disk_full_is_added_once() {
    let dir = TempDir::new().unwrap();
    let mut upload = Upload::begin(Some(dir.path())).unwrap();
    upload.add(b"one ").unwrap();
    // What a failed attempt leaves is written over.
    let file = fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap();
    OpenOptions::new()
        .append(true)
        .open(file.path())
        .unwrap()
        .write_all(b"tw")
        .unwrap();
    upload.add(b"two").unwrap();
    let place = dir.path().join("place");
    let done = upload.finish(Some(&place)).unwrap();
    assert_eq!(fs::read(&done.file.path).unwrap(), b"one two");
    assert_eq!(upload.hash().0, *blake3::hash(b"one two").as_bytes());
    upload.finish(Some(&place)).unwrap_err();
}

#[tokio::test]
async fn a_bound_that_was_lowered_holds_from_the_start() {
    let dir = TempDir::new().unwrap();
    let programs = open(Some(&dir));
    for content in [b"1234567890", b"abcdefghij", b"ABCDEFGHIJ"] {
        programs
            .put(&program(content), &mut pieces(content))
            .await
            .unwrap();
    }
    drop(programs);
    assert_eq!(names(&dir).len(), 3);
    let source = ProgramSource {
        cache: Some(dir.path().join("programs")),
        max_total: 20,
        ..ProgramSource::default()
    };
    Programs::open(source, Handle::current()).unwrap();
    assert_eq!(names(&dir).len(), 2);
}
