//! What is done when it is the turn of named operations.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::mpsc::UnboundedSender;

use super::book::likeness;
use super::loss::Loss;
use super::{Command, Names, Pending, Task};
use crate::communicator::Communicator;
use crate::error::CollectiveError;
use crate::group::Member;
use crate::handle::Job;
use crate::operation::Tag;
use crate::record::ShortName;

impl Names {
    /// Rank 0 says that it is the turn of these, as the operation with this number of the call; what it had not `heard` is not meant. If this rank `follows` it gives no
    /// data, as it said by that join.
    pub(super) fn run(
        self: &Arc<Self>,
        (call, number): (u64, u64),
        names: Vec<String>,
        heard: u64,
        follows: Option<u64>,
    ) {
        let mut tasks = Vec::new();
        let (has_joined, why) = {
            let mut state = self.lock();
            if let Some(join) = follows {
                // If that failed in the meantime there may be data here: the others must not have a result without those.
                let why = "began without data of this rank, whose join has failed";
                (state.joining.holds(join), why)
            } else {
                for name in &names {
                    tasks.extend(state.take(call, name, heard));
                }
                (false, "was given up")
            }
        };
        let whole = tasks.len() == names.len() && are_alike(&tasks, self.world);
        // Who can't run them says so to those that wait here.
        let tasks = Arc::new(Mutex::new(tasks));
        let taken = Arc::clone(&tasks);
        let end = Ended(self.commands.clone());
        let comm = Communicator::of(Arc::clone(&self.data));
        let own = comm.clone();
        let tag = Tag::new(call, number);
        let job = Box::new(move || {
            let tasks = take(&taken);
            // All count alike, whatever came of those before.
            let in_call = comm.inner.signals.go_to(tag);
            if in_call && whole {
                perform(&comm, tasks, &names);
            } else if in_call && has_joined {
                follow(&comm);
            } else {
                // They were given up here in the meantime: the others hear that now.
                let reason = format!("{} {why}", listed(&names));
                comm.give_up(tag, &reason);
                for pending in tasks {
                    let reason = reason.clone();
                    pending.fail(&comm.inner, tag, CollectiveError::Aborted { reason });
                }
            }
            drop(end);
        });
        let started = own.progress().and_then(|progress| {
            // This may be the only thread that reads the links.
            progress
                .try_start(job)
                .map_err(|_| CollectiveError::Invalid {
                    reason: "rank 0 has more run than it can have under way".to_owned(),
                })
        });
        if let Err(error) = started {
            let (rank, reason) = (self.me, error.to_string());
            for pending in take(&tasks) {
                pending.fail(&self.data, tag, error.clone());
            }
            // Who waits in it for this rank hears it there.
            own.give_up_meanwhile(tag, reason.clone());
            self.tell(Command::Lost(Loss {
                rank,
                reason,
                for_good: true,
            }));
        }
    }
}

impl Names {
    /// This rank runs nothing any more after what it was told to, because a rank (one of all) is lost. If that is rank 0 others may
    /// have been told more, and wait for this one.
    pub(super) fn leave_data(&self, rank: u32, reason: String) {
        let data = Arc::clone(&self.data);
        let job = Box::new(move || data.rank_lost(rank, &reason));
        // Not before what is under way: whoever is gone may have done its part of that.
        let left = match self.data.progress.get() {
            Some(progress) => progress.try_start(job).err(),
            None => Some(job as Job),
        };
        if let Some(job) = left {
            job();
        }
    }
}

/// The first of them, and how many more there are.
fn listed(names: &[String]) -> String {
    const FIRST: usize = 6;
    let first = names[..names.len().min(FIRST)].join(", ");
    match names.len().saturating_sub(FIRST) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

fn take(tasks: &Mutex<Vec<Pending>>) -> Vec<Pending> {
    std::mem::take(&mut *tasks.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Tells the hub that a batch has ended, however it did.
struct Ended(UnboundedSender<Command>);

impl Drop for Ended {
    fn drop(&mut self) {
        if self.0.send(Command::Ended).is_err() {
            tracing::debug!("named operations have ended");
        }
    }
}

/// Does what is one's own. If there are several, they [are alike](are_alike).
fn perform(comm: &Communicator, tasks: Vec<Pending>, names: &[String]) {
    let short = match names {
        [one] => ShortName::new(one),
        [first, ..] => ShortName::new(&format!("{first} +{}", names.len() - 1)),
        [] => ShortName::default(),
    };
    let mut tasks = tasks.into_iter();
    let Some(first) = tasks.next() else {
        return;
    };
    let comm = comm.with(first.options.called(short, first.options.asked));
    match first.task {
        Task::Alone(run) => run(Ok(comm)),
        Task::Fusable(one) => {
            let others = tasks.filter_map(|pending| match pending.task {
                Task::Fusable(other) => Some(other),
                Task::Alone(_) => None,
            });
            one.perform(others.collect(), &comm);
        }
    }
}

/// Whether rank 0 may have these run as one.
fn are_alike(tasks: &[Pending], world: u32) -> bool {
    let mut alike = tasks
        .iter()
        .map(|pending| likeness(&pending.operation, world));
    match alike.next() {
        Some(first) => tasks.len() == 1 || first.is_some() && alike.all(|other| other == first),
        None => false,
    }
}

/// Takes part in what the others do.
fn follow(comm: &Communicator) {
    if let Err(error) = comm.follow_one() {
        // It failed on all.
        tracing::debug!(%error, "an operation failed that this rank only took part in");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use kolo_transport::ids::Rank;

    use super::super::book::Request;
    use super::*;
    use crate::cause::Cause;
    use crate::local_group;
    use crate::operation::{Operation, ReduceOp};

    #[test]
    fn who_has_no_room_for_an_operation_says_so_in_it() {
        let group = local_group(2).unwrap();
        for comm in &group {
            comm.set_timeout(Duration::from_secs(60));
        }
        let data = Communicator::of(Arc::clone(&group[1].inner.names().data));
        let progress = data.progress().unwrap();
        let (begin, has_begun) = channel::<()>();
        let (end, ended) = channel::<()>();
        let busy = Box::new(move || {
            begin.send(()).unwrap();
            ended.recv().unwrap_or_default();
        });
        assert!(progress.try_start(busy).is_ok());
        // It takes no room any more.
        has_begun.recv().unwrap();
        while progress.try_start(Box::new(|| ())).is_ok() {}
        let [one, other] = [&group[0], &group[1]].map(|comm| {
            let sum = comm.named("sum");
            sum.all_reduce(vec![1.0_f32; 10], ReduceOp::Sum)
        });
        let error = other.wait().unwrap_err().to_string();
        assert!(error.contains("more run than it can have"), "{error}");
        drop(end);
        let error = one.wait().unwrap_err();
        assert!(
            !matches!(error, CollectiveError::Deadline { .. }),
            "{error}"
        );
    }

    /// That rank 0 has given up a name is no word about what it had not heard of then.
    #[test]
    fn what_is_asked_while_rank_0_gives_up_is_there_for_the_next_attempt() {
        let group = local_group(2).unwrap();
        for comm in &group {
            comm.set_timeout(Duration::from_secs(60));
        }
        let sum = |comm: &Communicator| {
            let named = comm.named("sum");
            named.all_reduce(vec![1_u32], ReduceOp::Sum)
        };
        let other = sum(&group[1]);
        let cause = Cause::Left {
            rank: Rank(0),
            reason: "it gave up".to_owned(),
        };
        let names = group[1].inner.names();
        names.fail(0, &["sum".to_owned()], 0, &cause);
        let results = [sum(&group[0]).wait(), other.wait()];
        assert_eq!(results, [Ok(vec![2]), Ok(vec![2])]);
    }

    #[test]
    fn what_was_given_up_before_it_was_said_is_not_said() {
        for stale in 0..2 {
            let group = local_group(2).unwrap();
            for comm in &group {
                comm.set_timeout(Duration::from_millis(100));
            }
            let request = Request {
                operation: Operation::BARRIER,
                limit: Duration::from_secs(60),
                serial: 0,
                epoch: 0,
            };
            let key = (0, "met".to_owned());
            let names = group[stale].inner.names();
            names.tell(Command::Ask { key, request });
            let error = group[1 - stale].named("met").barrier().wait().unwrap_err();
            let CollectiveError::Deadline { late, .. } = &error else {
                panic!("{error}");
            };
            assert_eq!(late, &[Rank(stale as u32)]);
        }
    }

    /// Rank 0 is killed when only rank 1 has heard that it is the turn of an operation, in which that one waits for rank 2. Which may
    /// have found before that rank 0 is gone, in an operation that did not need it.
    #[test]
    fn who_waits_for_one_that_hears_nothing_any_more_hears_why() {
        for has_found in [false, true] {
            let group = local_group(3).unwrap();
            for comm in &group {
                comm.set_timeout(Duration::from_secs(60));
            }
            let broadcast = |comm: &Communicator, name| {
                let named = comm.named(name);
                named.broadcast(vec![comm.rank().0; 10], Rank(2))
            };
            let first: Vec<_> = group.iter().map(|comm| broadcast(comm, "first")).collect();
            for handle in first {
                assert_eq!(handle.wait(), Ok(vec![2; 10]));
            }
            let waits = broadcast(&group[1], "second");
            let names = group[1].inner.names();
            names.run((0, 1), vec!["second".to_owned()], u64::MAX, None);
            let names = group[2].inner.names();
            if has_found {
                names.data.signals.lock().gone_notices.insert(0, Vec::new());
            }
            names.tell(Command::Lost(Loss {
                rank: 0,
                reason: "killed".to_owned(),
                for_good: true,
            }));
            let error = waits.wait().unwrap_err();
            assert!(
                matches!(error, CollectiveError::PeerLost { rank: Rank(0), .. }),
                "{error}"
            );
        }
    }

    /// Rank 2 starts all and then does none: what it keeps waiting ends two by two, and the last ones wait for long. That is
    /// not the fault of rank 0, which has the others run meanwhile.
    #[test]
    fn who_waits_behind_a_late_rank_names_that_one() {
        let group = local_group(3).unwrap();
        for comm in &group {
            comm.set_timeout(Duration::from_millis(100));
            comm.set_fusion_threshold(0);
        }
        let data = Communicator::of(Arc::clone(&group[2].inner.names().data));
        let progress = data.progress().unwrap();
        let (end, ended) = channel::<()>();
        let busy = Box::new(move || ended.recv().unwrap_or_default());
        assert!(progress.try_start(busy).is_ok());
        let handles: Vec<_> = group
            .iter()
            .map(|comm| {
                let start = |index| {
                    let named = comm.named(format!("t{index}"));
                    named.all_reduce(vec![1.0_f32; 10], ReduceOp::Sum)
                };
                (0..10).map(start).collect::<Vec<_>>()
            })
            .collect();
        for handle in handles.into_iter().take(2).flatten() {
            let error = handle.wait().unwrap_err();
            let who = error.culprit_rank();
            assert_eq!(who.map(|rank| rank.0), Some(2), "{error}");
        }
        drop(end);
    }
}
