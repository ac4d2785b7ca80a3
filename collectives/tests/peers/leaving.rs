//! Programs that end as soon as they hear of a loss: the others still hear who was lost first.

use super::children::Process;
use super::*;

/// What a program does until something goes wrong.
#[derive(Debug, Clone, Copy)]
enum Work {
    /// Operations of all.
    All,
    /// Operations of all, by name.
    Named,
    /// Operations of neighbours, two by two: who waits for one has nothing to do with the others.
    Neighbours,
    /// Groups that are made anew each time.
    NewGroups,
}

impl Work {
    const ALL: [Self; 4] = [Self::All, Self::Named, Self::Neighbours, Self::NewGroups];

    fn do_once(
        self,
        comm: &Communicator,
        neighbours: &[Communicator],
    ) -> Result<(), CollectiveError> {
        let sum = |comm: &Communicator| comm.all_reduce(&mut [1.0_f32; 100], ReduceOp::Sum);
        match self {
            Self::All => sum(comm),
            Self::Named => {
                let named = comm
                    .named("sum")
                    .all_reduce(vec![1.0_f32; 100], ReduceOp::Sum);
                named.wait().map(drop)
            }
            Self::Neighbours => neighbours.iter().try_for_each(sum),
            Self::NewGroups => {
                let all: Vec<Rank> = (0..comm.world_size()).map(Rank).collect();
                match comm.group(&all)? {
                    Some(group) => sum(&group),
                    None => Ok(()),
                }
            }
        }
    }
}

/// What such a program does, in a process of its own. `dies` is killed in the middle.
pub(crate) fn leave(comm: &Communicator, work: &str, dies: u32) {
    let work = Work::ALL
        .into_iter()
        .find(|one| format!("{one:?}") == work)
        .unwrap();
    comm.set_timeout(LONG);
    let (me, world) = (comm.rank().0, comm.world_size());
    // First those of even ranks with the next one, then the others.
    let neighbours: Vec<Communicator> = [0, 1]
        .into_iter()
        .filter_map(|first| {
            let low = (me + first) % 2;
            let low = me.checked_sub(low)?;
            let pair = [Rank(low), Rank(low + 1)];
            (low + 1 < world).then(|| comm.group(&pair).unwrap().unwrap())
        })
        .collect();
    for count in 0.. {
        if me == dies && count == 20 {
            let me = rustix::process::getpid();
            rustix::process::kill_process(me, rustix::process::Signal::KILL).unwrap();
        }
        if let Err(error) = work.do_once(comm, &neighbours) {
            let culprit = error.culprit_rank().map_or(-1, |rank| i64::from(rank.0));
            println!("\nkolo: {culprit} {error}\nkolo: done");
            std::process::exit(0);
        }
    }
}

fn check(way: &str, work: Work, world: u32, dies: u32) {
    let begun = Instant::now();
    let folder = Folder::new(&format!("leaves-{way}-{work:?}-{world}-{dies}"));
    let given = |rank: u32, place: &Path| {
        format!(
            "leaves,{},{rank},{world},{way},{work:?},{dies}",
            place.display()
        )
    };
    let mut ranks: Vec<Process> = if way == "local" {
        (0..world)
            .map(|rank| Process::start(&given(rank, &folder.0)))
            .collect()
    } else {
        on_hosts(&folder, world, given)
    };
    let killed = ranks.remove(dies as usize);
    let others = (0..world).filter(|rank| *rank != dies);
    let (mut wrong, mut is_named) = (Vec::new(), false);
    for (me, mut rank) in others.zip(ranks) {
        let said = rank.line("kolo: ");
        let names = |rank: u32| said.starts_with(&format!("kolo: {rank} rank {rank} is lost"));
        let is_right = match work {
            // Who has nothing to do with the first one names its neighbour, which has left.
            Work::Neighbours if me.abs_diff(dies) > 1 => {
                names(dies) || names(if me < dies { me + 1 } else { me - 1 })
            }
            // Who comes to a group when all others have left finds all of them gone at once.
            Work::NewGroups => (0..world).any(names),
            _ => names(dies),
        };
        is_named |= names(dies);
        if !is_right {
            wrong.push((me, said));
        }
        rank.ends_well();
    }
    drop(killed);
    assert!(
        begun.elapsed() < LONG / 2,
        "{way}, {work:?} of {world}, {dies} was killed: by the loss, and not by a deadline"
    );
    for left in folder.files() {
        drop(std::fs::remove_file(&left));
        drop(std::fs::remove_dir_all(&left));
    }
    assert!(is_named, "{way}, {work:?} of {world}: nobody named {dies}");
    assert!(
        wrong.is_empty(),
        "{way}, {work:?} of {world}: {dies} was killed, and not so: {wrong:?}"
    );
}

#[test]
fn processes_of_one_host_that_leave_because_of_a_loss_name_the_lost_one() {
    for work in Work::ALL {
        for (world, dies) in [(4, 3), (4, 0), (5, 2)] {
            check("local", work, world, dies);
        }
    }
}

#[test]
fn processes_of_several_hosts_that_leave_because_of_a_loss_name_the_lost_one() {
    for work in Work::ALL {
        for (world, dies) in [(4, 3), (4, 0), (5, 2)] {
            check("tls", work, world, dies);
        }
        // Here nobody's system ends the links of a process that was killed: it takes longer to find out.
        check("quic", work, 4, 3);
    }
}
