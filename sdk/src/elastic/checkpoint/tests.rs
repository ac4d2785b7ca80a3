use std::fs;
use std::io;
use std::path::Path;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kolo_transport::ids::JobId;

use super::file::{self, About, Opened};
use super::folder::{self, Name, Step};
use super::writer::{Base, Slot, Writer};
use super::*;
use crate::elastic::parts;
use crate::elastic::{Elastic, Parts, State};

const JOB: JobId = JobId(7);

#[derive(Debug, Clone, Default, PartialEq)]
struct Work {
    step: u64,
    flags: [bool; 3],
    weights: Vec<f32>,
}

impl Work {
    fn at(step: u64) -> Self {
        Self {
            step,
            flags: [true, false, step.is_multiple_of(2)],
            weights: vec![step as f32; 20],
        }
    }
}

impl Elastic for Work {
    fn parts(&mut self, parts: &mut Parts<'_>) {
        parts.value("step", &mut self.step);
        parts.buffer("flags", &mut self.flags);
        parts.list("weights", &mut self.weights);
    }
}

fn id(number: u64) -> CommitId {
    CommitId {
        generation: 2,
        number,
    }
}

/// The copy of a commit, whose work is at the step of the same number.
fn copy(number: u64) -> Arc<Snapshot> {
    let mut copy = Snapshot::default();
    parts::save(&mut Work::at(number), &mut copy).unwrap();
    Arc::new(copy)
}

fn store(directory: &Path, number: u64, before: folder::Before<'_>) -> io::Result<()> {
    let about = About::new(JOB, 2, number);
    let write = |to: &mut dyn io::Write| file::write(to, &about, &copy(number));
    folder::store(directory, Name::of(id(number)), write, before)
}

fn read(path: &Path) -> Result<(About, Work), String> {
    let mut opened = Opened::new(path)?;
    let (mut work, mut copy) = (Work::default(), Snapshot::default());
    opened.read_values(&mut copy)?;
    parts::check(&mut work, &copy, "in the file").unwrap();
    parts::make_room(&mut work, &mut copy).unwrap();
    opened.read_buffers(&mut copy)?;
    parts::load(&mut work, &copy).unwrap();
    Ok((opened.about, work))
}

/// All files of a directory but that of the lock, in order.
fn files(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut files: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != "writer.lock")
        .collect();
    files.sort();
    files
}

fn names(numbers: &[u64]) -> Vec<String> {
    let name = |number: &u64| Name::of(id(*number)).to_string();
    numbers.iter().map(name).collect()
}

fn newest(directory: &Path) -> Option<(About, Work)> {
    let name = folder::list(directory).unwrap().into_iter().next()?;
    Some(read(&directory.join(name.to_string())).unwrap())
}

#[test]
fn a_file_with_any_byte_changed_or_missing_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    store(folder.path(), 5, &mut |_| Ok(())).unwrap();
    let path = folder.path().join(&names(&[5])[0]);
    let good = fs::read(&path).unwrap();
    let bad = folder.path().join("bad");
    for index in 0..good.len() {
        let mut bytes = good.clone();
        bytes[index] ^= 1 << (index % 8);
        fs::write(&bad, &bytes).unwrap();
        let flaw = Opened::new(&bad).unwrap_err();
        let expected = match index {
            0..8 => "is no checkpoint",
            8..12 => "reads format 1 alone",
            _ => "wrong checksum",
        };
        assert!(flaw.contains(expected), "byte {index}: {flaw}");
        fs::write(&bad, &good[..index]).unwrap();
        assert!(Opened::new(&bad).is_err(), "{index} bytes");
    }
    fs::write(&bad, [&good[..], b"!"].concat()).unwrap();
    assert!(Opened::new(&bad).is_err());
    fs::write(&bad, good).unwrap();
    read(&bad).unwrap();
}

/// A process is killed before each step of a write, and in the middle of the file.
#[test]
fn a_write_that_is_cut_off_leaves_the_checkpoint_before() {
    for killed_at in 0.. {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path();
        fs::write(directory.join("commit-1.kolo"), "mine").unwrap();
        store(directory, 1, &mut |_| Ok(())).unwrap();
        let mut steps = Vec::new();
        let stored = store(directory, 2, &mut |step| {
            steps.push(step);
            if steps.len() > killed_at {
                return Err(io::Error::other("killed"));
            }
            Ok(())
        });
        let (about, work) = newest(directory).unwrap();
        assert_eq!(work, Work::at(about.commit));
        // What counts is on disk before the file has its name.
        let is_renamed = steps[..killed_at.min(steps.len())].contains(&Step::Rename);
        assert_eq!(about.commit, 1 + u64::from(is_renamed), "{steps:?}");

        // The next process is not disturbed, and nothing unfinished is left.
        let settings = Checkpoints::in_directory(directory);
        let writer = Writer::start(settings, JOB, Base::Read(id(about.commit)));
        for number in [2, 3] {
            writer.offer(id(number), copy(number));
            writer.flush().unwrap();
        }
        drop(writer);
        assert_eq!(newest(directory).unwrap().1, Work::at(3));
        // What is no checkpoint stays.
        let left = [names(&[2, 3]), vec!["commit-1.kolo".to_owned()]].concat();
        assert_eq!(files(directory), left, "killed at {killed_at}");
        if stored.is_ok() {
            steps.dedup();
            let expected = [
                Step::Create,
                Step::Write,
                Step::Sync,
                Step::Rename,
                Step::SyncDirectory,
            ];
            assert_eq!(steps, expected);
            assert!(killed_at > 8);
            return;
        }
    }
}

#[test]
fn the_newest_commit_replaces_those_that_wait() {
    let folder = tempfile::tempdir().unwrap();
    let (began, beginnings) = mpsc::channel();
    let (go, goes) = mpsc::channel();
    let settings = Checkpoints::in_directory(folder.path()).not_more_often_than(Duration::ZERO);
    let writer = Writer::start_with(settings, JOB, Base::Synced, move |step| {
        if step == Step::Create {
            began.send(()).unwrap();
            goes.recv().unwrap();
        }
        Ok(())
    });
    let copies: Vec<_> = (1..=4).map(copy).collect();
    writer.offer(id(1), Arc::clone(&copies[0]));
    beginnings.recv().unwrap();
    for number in 2..=4 {
        // Nothing waits for the disk.
        writer.offer(id(number), Arc::clone(&copies[number as usize - 1]));
    }
    // The writer has the one that it writes and the newest.
    let held: Vec<_> = copies.iter().map(Arc::strong_count).collect();
    assert_eq!(held, [2, 1, 1, 2]);
    assert_eq!(writer.written(), 0);
    go.send(()).unwrap();
    go.send(()).unwrap();
    drop(writer);
    assert_eq!(beginnings.try_iter().count(), 1);
    assert_eq!(files(folder.path()), names(&[1, 4]));
    assert!(copies.iter().all(|copy| Arc::strong_count(copy) == 1));
}

#[test]
fn a_write_is_due_after_so_many_commits_and_so_much_time() {
    let now = Instant::now();
    let mut slot = Slot::default();
    assert!(!slot.is_due());
    slot.due_commit = 4;
    slot.newest = Some((id(3), copy(3)));
    assert!(!slot.is_due());
    slot.newest = Some((id(4), copy(4)));
    assert!(slot.is_due());
    slot.due_at = Some(now + Duration::from_secs(3_600));
    assert!(!slot.is_due());
    slot.hurries = true;
    assert!(slot.is_due());

    let folder = tempfile::tempdir().unwrap();
    let settings = Checkpoints::in_directory(folder.path())
        .every(3)
        .not_more_often_than(Duration::from_secs(3_600));
    let writer = Writer::start(settings, JOB, Base::Synced);
    writer.offer(id(1), copy(1));
    writer.flush().unwrap();
    for number in 2..=8 {
        writer.offer(id(number), copy(number));
    }
    // The last commit is written in the end in any case.
    drop(writer);
    assert_eq!(files(folder.path()), names(&[1, 8]));
}

#[test]
fn a_full_disk_costs_checkpoints_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let full = Arc::new(Mutex::new(false));
    let is_full = Arc::clone(&full);
    let settings = Checkpoints::in_directory(folder.path());
    let writer = Writer::start_with(settings, JOB, Base::Synced, move |step| {
        if step == Step::Write && *is_full.lock().unwrap() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        Ok(())
    });
    let write = |number| {
        writer.offer(id(number), copy(number));
        writer.flush()
    };
    write(1).unwrap();
    *full.lock().unwrap() = true;
    let why = write(2).unwrap_err();
    assert!(why.contains("can't be written"), "{why}");
    assert_eq!((writer.written(), files(folder.path())), (1, names(&[1])));
    *full.lock().unwrap() = false;
    write(3).unwrap();
    assert_eq!(
        (writer.written(), files(folder.path())),
        (3, names(&[1, 3]))
    );
}

/// Another job, or ranks of an earlier generation that run on, unseen.
#[test]
fn e1_a_second_writer_writes_and_deletes_nothing_while_the_first_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let start = |job, base| Writer::start(Checkpoints::in_directory(folder.path()), job, base);
    let first = start(JOB, Base::Synced);
    first.offer(id(1), copy(1));
    first.flush().unwrap();
    let second = start(JobId(8), Base::Read(id(1)));
    second.offer(id(7), copy(7));
    let why = second.flush().unwrap_err();
    assert!(why.contains("another process writes"), "{why}");
    assert_eq!(files(folder.path()), names(&[1]));
    drop(first);
    second.offer(id(8), copy(8));
    second.flush().unwrap();
    assert_eq!(files(folder.path()), names(&[1, 8]));
}

/// The state was never synced, so that nobody has looked.
#[test]
fn checkpoints_of_others_are_not_written_over() {
    let folder = tempfile::tempdir().unwrap();
    store(folder.path(), 9, &mut |_| Ok(())).unwrap();
    let settings = Checkpoints::in_directory(folder.path());
    let writer = Writer::start(settings, JobId(8), Base::Unknown);
    writer.offer(id(1), copy(1));
    let why = writer.flush().unwrap_err();
    assert!(why.contains("sync first"), "{why}");
    drop(writer);
    assert_eq!(files(folder.path()), names(&[9]));
}

/// The head knows of no member that has the last commit, but an older member may have a later one than the disk.
#[test]
fn the_later_one_counts_of_a_checkpoint_and_a_commit_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let directory = |name: &str| folder.path().join(name);
    let begin = |name: &str| {
        State::new(Work::at(0)).checkpoints(Checkpoints::in_directory(directory(name)))
    };
    let contexts: Vec<_> = (kolo_collectives::local_group(2).unwrap().into_iter())
        .map(Context::for_tests)
        .collect();
    let rank = |ctx: &Context| {
        let mut state = begin("live");
        let mut commit = |step| {
            *state = Work::at(step);
            state.commit(ctx).unwrap();
            state.flush().unwrap();
        };
        commit(3);
        if ctx.rank() == 0 {
            // Three directories have the checkpoint of step 3 alone.
            let [file] = files(&directory("live")).try_into().unwrap();
            for name in ["first", "second", "third"] {
                fs::create_dir(directory(name)).unwrap();
                let file = |name| directory(name).join(&file);
                fs::copy(file("live"), file(name)).unwrap();
            }
        }
        commit(4);
        if ctx.rank() == 0 {
            // As if the disk were behind.
            fs::remove_file(directory("live").join(&files(&directory("live"))[1])).unwrap();
        }
        for (name, has, step) in [
            ("first", Some(1), 4),
            ("second", Some(0), 4),
            ("third", None, 3),
        ] {
            let mut next = begin(name);
            if has == Some(ctx.rank()) {
                std::mem::swap(&mut next, &mut state);
            }
            ctx.must_restore();
            next.sync(ctx).unwrap();
            assert_eq!(*next, Work::at(step), "{name}");
        }
    };
    std::thread::scope(|scope| {
        for ctx in &contexts {
            scope.spawn(|| rank(ctx));
        }
    });
}
