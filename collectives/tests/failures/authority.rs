//! Ranks that somebody watches: the end of a link is a suspicion until that one has said why the rank ended.

use super::*;

/// Every kind of link whose end is seen.
const KINDS: [Kind; 4] = [Kind::Memory, Kind::Unix, Kind::Shared, Kind::Tls];

/// Rank 2 of three has ended, and the others are in an operation in which they need it. Their results, when they have heard this
/// (or nothing), and how long that took.
fn after_an_end(
    kind: Kind,
    word: Option<&str>,
    patience: Duration,
) -> (Vec<CollectiveError>, Duration) {
    let mut group = Group::new(kind, 3);
    group.set_word_within(patience);
    group.run(|comm| comm.barrier().unwrap());
    drop(group.members.remove(2));
    let begun = Instant::now();
    let errors = std::thread::scope(|scope| {
        let waiting: Vec<_> = (group.members.iter())
            .map(|comm| scope.spawn(|| sum(comm, 10_000).unwrap_err()))
            .collect();
        if let Some(word) = word {
            for comm in &group.members {
                until(|| !comm.records().is_empty());
                comm.rank_lost(Rank(2), word);
            }
        }
        let errors = waiting.into_iter().map(|one| one.join().unwrap());
        errors.collect()
    });
    (errors, begun.elapsed())
}

#[test]
fn the_word_of_the_authority_ends_the_wait_at_once_and_without_it_the_link_is_believed() {
    for kind in KINDS {
        for (word, patience, says) in [
            (Some("killed by signal 9"), LONG, "killed by signal 9"),
            (None, LONG / 100, "link lost to rank 2: "),
        ] {
            let (errors, took) = after_an_end(kind, word, patience);
            assert!(took < LONG / 2, "{kind:?}: {took:?}");
            for error in errors {
                let is_right = matches!(
                    &error,
                    CollectiveError::PeerLost { rank: Rank(2), reason } if reason.starts_with(says)
                );
                assert!(is_right, "{kind:?}: {error}");
            }
        }
    }
}

#[test]
fn survivors_go_on_in_a_group_of_their_own() {
    for kind in KINDS {
        let mut group = Group::new(kind, 3);
        group.set_word_within(LONG / 100);
        group.run(|comm| comm.barrier().unwrap());
        drop(group.members.remove(1));
        group.run(|comm| {
            let error = sum(comm, 10_000).unwrap_err();
            assert_eq!(error.culprit_rank(), Some(Rank(1)), "{error}");
            let part = comm.group(&[Rank(0), Rank(2)]).unwrap().unwrap();
            sum(&part, 1000).unwrap();
            if part.rank() == Rank(0) {
                comm.send(&[7_u8], Rank(2)).unwrap();
            } else {
                assert_eq!(comm.receive::<u8>(Rank(0)).unwrap(), [7]);
            }
        });
    }
}

/// The rank that ended last is not named, wherever its link ends first.
#[test]
fn of_two_ranks_that_end_the_first_one_is_named() {
    for kind in KINDS {
        let mut group = Group::new(kind, 4);
        group.set_word_within(LONG);
        group.run(|comm| comm.barrier().unwrap());
        let (three, two) = (group.members.pop(), group.members.pop());
        let ended = std::thread::scope(|scope| {
            let waiting: Vec<_> = (group.members.iter())
                .map(|comm| scope.spawn(|| sum(comm, 1000).unwrap_err()))
                .collect();
            drop((two, three));
            for comm in &group.members {
                comm.rank_lost(Rank(3), "killed by signal 9");
                comm.rank_lost(Rank(2), "its process ended with exit code 1");
            }
            let errors = waiting.into_iter().map(|one| one.join().unwrap());
            errors.collect::<Vec<_>>()
        });
        for error in ended {
            assert_eq!(error.culprit_rank(), Some(Rank(3)), "{kind:?}: {error}");
        }
    }
}

/// A rank may end when it has done its part: what nobody needs any more is no suspicion.
#[test]
fn the_end_of_a_rank_that_nobody_needs_is_no_suspicion() {
    for kind in KINDS {
        let mut group = Group::new(kind, 3);
        group.set_word_within(LONG);
        group.run(|comm| comm.barrier().unwrap());
        let pairs = group.run(|comm| comm.group(&[Rank(0), Rank(1)]).unwrap());
        drop(group.members.remove(2));
        let results = run(pairs.iter().flatten(), |comm| sum(comm, 1000));
        assert_eq!(results, [Ok(()), Ok(())], "{kind:?}");
    }
}
