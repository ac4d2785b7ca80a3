//! Commits on disk: what the node hears of them, and how others begin with them.

use std::path::PathBuf;

use kolo_transport::ids::Generation;
use kolo_transport::wire::{FromWorker, Handover, Kept};

use super::caller::says;
use super::node::Group;
use crate::context::Context;
use crate::elastic::{Checkpoints, State, Value};
use crate::error::Result;

/// An elastic loop that keeps all its commits, and goes on in the first generation until that ends. The result is the step that it
/// went on from.
#[kolo::function]
fn keeps(ctx: &Context, directory: PathBuf) -> Result<u64> {
    let checkpoints = Checkpoints::in_directory(directory);
    let mut state = State::new(Value(0_u64)).checkpoints(checkpoints);
    ctx.elastic(&mut state, |ctx, state| {
        let begun = ***state;
        while ctx.generation() == Generation(1) || ***state < begun + 2 {
            ***state += 1;
            state.commit(ctx)?;
            state.flush()?;
        }
        Ok(begun)
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_workers_begin_with_the_checkpoint_of_those_that_are_lost() {
    let folder = tempfile::tempdir().unwrap();
    let args = (folder.path().to_owned(),);
    let mut group = Group::elastic(&[1, 1]).await;
    group.complete().await;
    group.begin(&[0, 1], keeps, &args);
    let mut durable = [0; 2];
    for (index, durable) in durable.iter_mut().enumerate() {
        group
            .has_commit(index, (Generation(1), 2), Kept::Made)
            .await;
        // Those that did not write it know as well.
        let FromWorker::Committed {
            commit,
            kept: Kept::Durable,
            ..
        } = group.told(index).await
        else {
            panic!("a commit is on disk");
        };
        *durable = commit;
    }
    assert_eq!(durable, [2; 2]);
    let new = [group.add(1).await, group.add(1).await];
    group.table.handover = Handover::Restore;
    group.form(&new);
    group.publish(&[0, 1, new[0], new[1]]).await;
    for index in 0..2 {
        let failure = group.end::<u64>(index).unwrap_err();
        says(&failure, "is not in generation 2");
    }
    group.begin(&new, keeps, &args);
    let begun = new.map(|index| group.end::<u64>(index));
    assert!(matches!(begun[0], Ok(1..)), "{begun:?}");
    assert_eq!(begun[0], begun[1]);
    // The next loop of the generation is another one.
    group.begin(&new, keeps, &args);
    for index in new {
        let failure = group.end::<u64>(index).unwrap_err();
        says(&failure, "has checkpoints already");
    }
    group.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_can_not_begin_with_a_checkpoint_say_so() {
    let folder = tempfile::tempdir().unwrap();
    let mut group = Group::elastic(&[1, 1]).await;
    group.table.handover = Handover::Restore;
    group.form(&[0, 1]);
    group.complete().await;
    group.begin(&[0, 1], keeps, &(folder.path().to_owned(),));
    for index in 0..2 {
        let failure = group.end::<u64>(index).unwrap_err();
        let expected = "has no checkpoint on host";
        says(&failure, expected);
    }
    group.stop().await;
}
