//! Ranks that do things on different links, so that each of them may be right: another thread may yet do the other thing. They wait
//! until their deadlines, and hear of each other, though some have never had a link to each other.

use super::*;

/// What a rank does.
#[derive(Debug, Clone, Copy)]
enum Does {
    Sum,
    Send(u32),
    Receive(u32),
    Broadcast,
    Join,
    Nothing,
    Named(&'static str),
    /// In a group of all, the last one first, which others do not make.
    Group,
}

impl Does {
    fn run(self, comm: &Communicator) -> Result<(), CollectiveError> {
        match self {
            Self::Sum => comm.all_reduce(&mut [1.0_f32; 5], ReduceOp::Sum),
            Self::Send(to) => comm.send(&[1.0_f32; 7], Rank(to)),
            Self::Receive(from) => comm.receive::<f32>(Rank(from)).map(drop),
            Self::Broadcast => comm.broadcast(&mut [1_u8; 3], Rank(0)),
            Self::Join => comm.join().map(drop),
            Self::Nothing => Ok(()),
            Self::Named(name) => {
                let sum = comm.named(name).all_reduce(vec![1_i32], ReduceOp::Sum);
                sum.wait().map(drop)
            }
            Self::Group => {
                let all: Vec<Rank> = (0..comm.world_size()).rev().map(Rank).collect();
                let group = comm.group(&all)?.unwrap();
                group.all_reduce(&mut [1_i64; 3], ReduceOp::Max)
            }
        }
    }

    /// What others hear of it.
    fn in_words(self) -> String {
        match self {
            Self::Sum => "it is in all_reduce(sum) of 5 f32".to_owned(),
            Self::Send(to) => format!("it is in send f32 to rank {to}"),
            Self::Receive(from) => format!("it is in receive f32 from rank {from}"),
            Self::Broadcast => "it is in broadcast of 3 u8 from root 0".to_owned(),
            Self::Join => "it is in join".to_owned(),
            Self::Nothing => "it has done no operation yet".to_owned(),
            Self::Named(name) => format!("it waits for all_reduce(sum) of 1 i32 named `{name}`"),
            Self::Group => "it is in all_reduce(max) of 3 i64 (operation".to_owned(),
        }
    }
}

/// Those who wait ask higher ranks, too, which make the links; and a rank whose deadline comes later has heard what those did that
/// have left with their error.
#[test]
fn ranks_that_wait_for_each_other_in_different_things_say_what_they_do_instead() {
    use Does::{Broadcast, Group as InGroup, Join, Named, Nothing, Receive, Send, Sum};
    // By rank, and of which other one its error has to tell.
    let cases: [&[(Does, u32)]; 25] = [
        // Two on different links.
        &[(Sum, 1), (Send(0), 0)],
        &[(Send(1), 1), (Sum, 0)],
        &[(Sum, 1), (Receive(0), 0)],
        &[(Receive(1), 1), (Sum, 0)],
        // One does something else than the others.
        &[(Sum, 2), (Sum, 2), (Send(0), 0), (Sum, 2)],
        &[(Sum, 2), (Sum, 2), (Send(3), 3), (Sum, 2)],
        &[(Sum, 1), (Receive(2), 2), (Sum, 1), (Sum, 1)],
        &[(Broadcast, 3), (Broadcast, 3), (Broadcast, 3), (Send(1), 1)],
        &[(Join, 2), (Join, 2), (Send(0), 0)],
        &[(Sum, 1), (Nothing, 0), (Sum, 1)],
        // In a circle, both ways round.
        &[(Send(1), 1), (Send(2), 2), (Send(0), 0)],
        &[(Send(2), 2), (Send(0), 0), (Send(1), 1)],
        &[(Send(1), 1), (Nothing, 0)],
        // Some wait for a name.
        &[(Named("a"), 1), (Sum, 0)],
        &[(Sum, 1), (Named("a"), 0)],
        &[(Named("a"), 1), (Nothing, 0)],
        &[(Nothing, 1), (Named("a"), 0)],
        &[(Named("a"), 1), (Named("b"), 0)],
        &[(Named("a"), 2), (Named("a"), 2), (Send(0), 0)],
        &[(Receive(1), 1), (Named("a"), 0), (Named("a"), 0)],
        // Some are in a group that others have not made.
        &[(InGroup, 1), (Sum, 0)],
        &[(Sum, 1), (InGroup, 0)],
        &[(InGroup, 1), (Nothing, 0)],
        &[(Nothing, 1), (InGroup, 0)],
        &[(InGroup, 2), (InGroup, 2), (Named("a"), 0)],
    ];
    let check = |kind, ranks: &[(Does, u32)], warm: bool, leave: bool| {
        let mut group = Group::new(kind, ranks.len() as u32);
        if warm {
            group.run(|comm| comm.barrier().unwrap());
        }
        group.set_timeout(Duration::from_secs(4));
        let run = |comm: &Communicator| ranks[comm.rank().index()].0.run(comm);
        let results = if leave {
            let members = std::mem::take(&mut group.members);
            std::thread::scope(|scope| {
                let threads = members.into_iter();
                let threads = threads.map(|comm| scope.spawn(move || run(&comm)));
                let threads: Vec<_> = threads.collect();
                threads.into_iter().map(|one| one.join().unwrap()).collect()
            })
        } else {
            group.run(run)
        };
        let at = format!("{kind:?}, {ranks:?}, warm: {warm}, leave: {leave}");
        for ((does, other), result) in ranks.iter().zip(results) {
            if matches!(does, Nothing) {
                continue;
            }
            let error: CollectiveError = result.unwrap_err();
            let theirs = ranks[*other as usize].0;
            let text = match (does, theirs) {
                (InGroup, InGroup) => theirs.in_words(),
                (InGroup, _) => format!("it has not made this group; {}", theirs.in_words()),
                _ => theirs.in_words(),
            };
            let CollectiveError::Deadline { doing, .. } = &error else {
                // Its peer may have left a moment before.
                assert!(leave && error.to_string().contains(&text), "{at}: {error}");
                continue;
            };
            let tells = |doing: &Missing| doing.rank.0 == *other && doing.doing.starts_with(&text);
            assert!(doing.iter().any(tells), "{at}: {error}");
        }
        if let (
            false,
            [(Sum, _), (Send(_) | Receive(_), _)] | [(Send(_) | Receive(_), _), (Sum, _)],
        ) = (leave, ranks)
        {
            // The collective that the one missed has failed. What they agree on works.
            let alone = usize::from(matches!(ranks[0].0, Sum));
            assert!(Sum.run(&group.members[alone]).is_err(), "{at}");
            assert!(
                group.run(Communicator::barrier).iter().all(Result::is_ok),
                "{at}"
            );
        }
    };
    std::thread::scope(|scope| {
        for kind in [Kind::Memory, Kind::Unix, Kind::Shared, Kind::Tls] {
            for ranks in cases {
                scope.spawn(move || check(kind, ranks, false, false));
            }
            for ranks in &cases[..4] {
                scope.spawn(move || check(kind, ranks, true, false));
                scope.spawn(move || check(kind, ranks, false, true));
                scope.spawn(move || check(kind, ranks, true, true));
            }
        }
    });
}
