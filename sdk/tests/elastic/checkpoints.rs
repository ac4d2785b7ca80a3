//! Commits on disk: all ranks are lost, and others go on.

use std::fs;
use std::path::{Path, PathBuf};

use kolo::elastic::{self, Checkpoints, Elastic, Parts, State, StateError};
use kolo::{Context, Error, Result};

use crate::loops::Alone;
use crate::state::group as job;

#[derive(Debug, Clone, PartialEq)]
struct Work {
    step: u64,
    weights: Vec<f32>,
}

impl Elastic for Work {
    fn parts(&mut self, parts: &mut Parts<'_>) {
        parts.value("step", &mut self.step);
        parts.buffer("weights", &mut self.weights);
    }
}

/// A state whose first values are those of its rank.
fn first(ctx: &Context, checkpoints: Checkpoints) -> State<Work> {
    let work = Work {
        step: 0,
        weights: vec![ctx.rank() as f32 + 100.0; 1_000],
    };
    State::new(work).checkpoints(checkpoints)
}

/// Commits so many steps.
fn work(ctx: &Context, state: &mut State<Work>, steps: u64) -> Result<(), StateError> {
    for _ in 0..steps {
        state.step += 1;
        let step = state.step as f32;
        state.weights.fill(step);
        state.commit(ctx)?;
    }
    Ok(())
}

/// The checkpoints of a directory, the oldest first.
fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap();
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|kind| kind == "kolo"));
    files.sort();
    files
}

/// A job that commits a sync and so many steps, all of which are on disk.
fn run(directory: &Path, steps: u64) {
    job(2, |ctx| {
        let mut state = first(ctx, Checkpoints::in_directory(directory));
        state.sync(ctx).unwrap();
        for _ in 0..steps {
            work(ctx, &mut state, 1).unwrap();
            state.flush().unwrap();
        }
    });
}

/// What the ranks of a job begin with that may resume the checkpoints of a directory.
fn resumed(directory: &Path) -> Vec<Result<(u64, f32), StateError>> {
    job(3, |ctx| {
        let mut state = first(ctx, Checkpoints::in_directory(directory).resume(true));
        state.sync(ctx).map(|()| (state.step, state.weights[999]))
    })
}

#[test]
fn a_job_goes_on_where_one_that_has_lost_all_its_ranks_had_its_last_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("run");
    let resumes = || Checkpoints::in_directory(&directory).resume(true);
    // There is nothing yet.
    job(3, |ctx| {
        let mut state = first(ctx, resumes());
        state.sync(ctx).unwrap();
        assert_eq!((state.step, state.weights[0]), (0, 100.0));
        work(ctx, &mut state, 5).unwrap();
        // What is not committed is lost.
        state.step = 99;
    });
    for begun in 0..3 {
        // More ranks than before, and less; in a loop, too.
        job(4 - begun, |ctx| {
            let mut state = first(ctx, resumes());
            state.sync(ctx).unwrap();
            let step = 5 + u64::from(begun);
            assert_eq!((state.step, state.weights[999]), (step, step as f32));
            // The sync of the first job and five commits; each job since has made two.
            assert_eq!(state.commits(), 7 + 2 * u64::from(begun));
            state.restore().unwrap();
            assert_eq!(state.step, step);
            work(ctx, &mut state, 1).unwrap();
        });
    }
    let mut state = State::new(Work {
        step: 0,
        weights: vec![0.0; 1_000],
    })
    .checkpoints(resumes());
    let step = elastic::run(&mut Alone::new(), &mut state, |_, state| {
        Ok::<_, Error>(state.step)
    });
    assert_eq!(step.unwrap(), 8);
    drop(state);
    assert_eq!(files(&directory).len(), 2);
}

#[test]
fn all_ranks_know_what_is_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let durable = job(3, |ctx| {
        let mut state = first(ctx, Checkpoints::in_directory(folder.path()));
        state.sync(ctx).unwrap();
        assert_eq!(state.durable(), 0);
        state.flush().unwrap();
        // The other ranks do not wait for the disk, but for rank 0.
        work(ctx, &mut state, 1).unwrap();
        let first = state.durable();
        state.flush().unwrap();
        work(ctx, &mut state, 1).unwrap();
        (first, state.durable())
    });
    assert_eq!(durable, [(1, 2); 3]);
}

#[test]
fn checkpoints_are_neither_resumed_nor_written_over_by_mistake() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path();
    run(directory, 2);
    let before = files(directory);
    let ends = job(2, |ctx| {
        let mut state = first(ctx, Checkpoints::in_directory(directory));
        let error = state.sync(ctx).unwrap_err();
        assert_eq!(state.step, 0);
        error.to_string()
    });
    let error = format!(
        "the state can't be synced: on rank 0 the directory `{}` has checkpoints already, `commit-000000000003-g1.kolo` for one: resume them \
         (`Checkpoints::resume`), or name another directory",
        directory.display()
    );
    assert_eq!(ends, [error.clone(), error]);
    assert_eq!(files(directory), before);
}

#[test]
fn the_next_older_checkpoint_counts_if_the_newest_is_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path();
    run(directory, 4);
    let [older, newest] = files(directory).try_into().unwrap();
    let mut bytes = fs::read(&newest).unwrap();
    bytes.truncate(bytes.len() - 1);
    fs::write(&newest, bytes).unwrap();
    assert_eq!(
        resumed(directory),
        [Ok((3, 3.0)), Ok((3, 3.0)), Ok((3, 3.0))]
    );
    // The one that was resumed is kept beside the new one.
    assert!(files(directory).contains(&older));

    for file in files(directory) {
        fs::write(&file, "something else").unwrap();
    }
    for end in resumed(directory) {
        let error = end.unwrap_err().to_string();
        for part in [
            "on rank 0 the directory",
            "has no good checkpoint",
            "`commit-000000000004-g1.kolo` has 14 bytes",
            "name another directory",
        ] {
            assert!(error.contains(part), "{error}");
        }
    }
}

#[test]
fn a_checkpoint_of_another_program_is_refused_by_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path();
    run(directory, 1);
    let ends = job(2, |ctx| {
        let work = Work {
            step: 0,
            weights: vec![0.5; 7],
        };
        let checkpoints = Checkpoints::in_directory(directory).resume(true);
        let mut state = State::new(work.clone()).checkpoints(checkpoints);
        let error = state.sync(ctx).unwrap_err();
        assert_eq!(*state, work);
        error.to_string()
    });
    let error = "the state can't be synced: on rank 0 the part `weights` of the state is a buffer of 7 f32, but a buffer of \
                 1000 f32 in the checkpoint of commit 2";
    assert_eq!(ends, [error, error]);
}

/// Rank 0 is lost; the next one writes where the first one has stopped.
#[test]
fn another_rank_0_goes_on_with_the_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path();
    let mut states = job(2, |ctx| {
        let mut state = first(ctx, Checkpoints::in_directory(directory));
        state.sync(ctx).unwrap();
        work(ctx, &mut state, 2).unwrap();
        state
    });
    let survivor = std::sync::Mutex::new(states.pop());
    drop(states);
    job(2, |ctx| {
        let mut state = match ctx.rank() {
            0 => survivor.lock().unwrap().take().unwrap(),
            _ => first(ctx, Checkpoints::in_directory(directory)),
        };
        state.sync(ctx).unwrap();
        assert_eq!(state.step, 2);
        work(ctx, &mut state, 3).unwrap();
    });
    assert_eq!(resumed(directory)[2], Ok((5, 5.0)));
}
