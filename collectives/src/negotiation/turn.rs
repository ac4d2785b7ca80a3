//! Running what was decided.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::mpsc::UnboundedSender;

use super::book::likeness;
use super::{Command, Key, Negotiation, Pending, Taken, Task, listed};
use crate::communicator::Communicator;
use crate::error::CollectiveError;
use crate::operation::Tag;
use crate::record::ShortName;

impl Negotiation {
    /// Runs these, as the coordinator has decided, as the operation with this number of the call. Requests that it had not `heard`
    /// are not meant. If this rank `follows`, it gives no data, as it said by that join.
    pub(super) fn run(
        self: &Arc<Self>,
        number: (u64, u64),
        names: Vec<String>,
        heard: u64,
        follows: Option<u64>,
    ) {
        let (taken, has_joined, why) = match follows {
            // If that join has failed, there may be data here by now: the others must not have a result without them.
            Some(join) => {
                let has_joined = self.lock().joining.holds(join);
                let why = "began without data of this rank, whose join has failed";
                (Taken::new(), has_joined, why)
            }
            None => (self.take(number.0, &names, heard), false, "was given up"),
        };
        let part = if taken.len() == names.len() && are_alike(&taken, self.world) {
            Part::Performs
        } else if has_joined {
            Part::Follows
        } else {
            Part::GivesUp
        };
        self.do_part(number, taken, part, move || CollectiveError::Aborted {
            reason: format!("{} {why}", listed(&names)),
        });
    }

    /// Gives up this rank's part in an operation of which it has not heard. An error that names members of the data group is told to
    /// the others.
    pub(super) fn miss(self: &Arc<Self>, number: (u64, u64), error: CollectiveError) {
        self.do_part(number, Taken::new(), Part::GivesUp, || error);
    }

    /// Does this rank's part in an operation with this number of the call. `why` says for what reason it is given up.
    fn do_part(
        self: &Arc<Self>,
        (call, number): (u64, u64),
        taken: Taken,
        part: Part,
        why: impl FnOnce() -> CollectiveError + Send + 'static,
    ) {
        // If no thread can run them, what waits here ends all the same.
        let tasks = Arc::new(Mutex::new(taken));
        let taken = Arc::clone(&tasks);
        let end = Ended(self.commands.clone());
        let comm = Communicator::of(Arc::clone(&self.data));
        let own = comm.clone();
        let tag = Tag::new(call, number);
        let job = Box::new(move || {
            let tasks = take(&taken);
            // All count alike, whatever came of the operations before.
            let in_call = comm.inner.signals.go_to(tag);
            match part {
                Part::Performs if in_call => perform(&comm, tasks),
                Part::Follows if in_call => follow(&comm),
                _ => {
                    // The others hear that now.
                    let error = why();
                    comm.give_up(tag, error.clone());
                    for (_, pending) in tasks {
                        pending.fail(&comm.inner, tag, error.clone());
                    }
                }
            }
            drop(end);
        });
        let started = own.progress().and_then(|progress| {
            // The thread of this task may be the only one that reads the links: it must not wait.
            let full = |_| CollectiveError::Invalid {
                reason: "the coordinator has more run than this rank can have under way".to_owned(),
            };
            progress.try_start(job).map_err(full)
        });
        if let Err(error) = started {
            self.fail_with(take(&tasks), &error);
            let reason = error.to_string();
            own.give_up_meanwhile(tag, CollectiveError::Aborted { reason });
        }
    }
}

/// Why a rank gives up its part in an operation of which the coordinator could not tell it.
pub(super) fn unheard() -> CollectiveError {
    CollectiveError::Aborted {
        reason: "the link over which the operation was to be announced ended before".to_owned(),
    }
}

/// What this rank does in an operation that was decided.
#[derive(Clone, Copy)]
enum Part {
    Performs,
    /// It takes part without data.
    Follows,
    /// It was given up here in the meantime.
    GivesUp,
}

fn take(tasks: &Mutex<Taken>) -> Taken {
    std::mem::take(&mut *tasks.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Tells the shell that an operation has ended, well or not, when this is dropped.
struct Ended(UnboundedSender<Command>);

impl Drop for Ended {
    fn drop(&mut self) {
        if self.0.send(Command::Ended).is_err() {
            tracing::debug!("named operations have ended");
        }
    }
}

/// Runs operations of this rank. If there are several, they [are alike](are_alike).
fn perform(comm: &Communicator, tasks: Taken) {
    let more = tasks.len().saturating_sub(1);
    let mut tasks = tasks.into_iter();
    let Some(((_, name), first)) = tasks.next() else {
        return;
    };
    let short = match more {
        0 => first.name,
        more => ShortName::new(&format!("{name} +{more}")),
    };
    let comm = comm.with(first.options.called(short, first.options.asked));
    match first.task {
        Task::Alone(run) => run(Ok(comm)),
        Task::Fusable(one) => {
            let others = tasks.filter_map(|(_, pending)| match pending.task {
                Task::Fusable(other) => Some(other),
                Task::Alone(_) => None,
            });
            one.perform(others.collect(), &comm);
        }
    }
}

/// Whether these may be run as one operation.
fn are_alike(tasks: &[(Key, Pending)], world: u32) -> bool {
    let mut alike = tasks
        .iter()
        .map(|(_, pending)| likeness(&pending.operation, world));
    match alike.next() {
        Some(first) => tasks.len() == 1 || first.is_some() && alike.all(|other| other == first),
        None => false,
    }
}

/// Takes part in the others' operation without data.
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

    use super::*;
    use crate::local_group;
    use crate::operation::ReduceOp;

    fn group(world: u32, timeout: Duration) -> Vec<Communicator> {
        let group = local_group(world).unwrap();
        for comm in &group {
            comm.set_timeout(timeout);
        }
        group
    }

    fn sum(comm: &Communicator, name: &str) -> crate::Handle<Vec<u32>> {
        comm.named(name).all_reduce(vec![1], ReduceOp::Sum)
    }

    #[test]
    fn a_rank_without_room_for_an_operation_says_so_in_it() {
        let group = group(2, Duration::from_secs(60));
        let data = Communicator::of(Arc::clone(&Negotiation::of(&group[1].inner).data));
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
        let [one, other] = [&group[0], &group[1]].map(|comm| sum(comm, "sum"));
        let error = other.wait().unwrap_err().to_string();
        assert!(error.contains("can have under way"), "{error}");
        drop(end);
        let error = one.wait().unwrap_err().to_string();
        assert!(error.contains("can have under way"), "{error}");
    }

    /// The coordinator's word that it gives a name up is not about requests that it had not heard.
    #[test]
    fn a_request_stays_that_the_coordinator_had_not_heard_when_it_gave_up() {
        let group = group(2, Duration::from_secs(60));
        let other = sum(&group[1], "sum");
        let cause = CollectiveError::PeerLeft {
            rank: Rank(0),
            reason: "it gave up".to_owned(),
        };
        let negotiation = Negotiation::of(&group[1].inner);
        negotiation.fail(negotiation.take(0, &["sum".to_owned()], 0), &cause);
        let results = [sum(&group[0], "sum").wait(), other.wait()];
        assert_eq!(results, [Ok(vec![2]), Ok(vec![2])]);
    }

    /// The word that an operation runs was lost with the link. Nobody waits for the rank that did not hear it.
    #[test]
    fn an_operation_of_which_a_rank_has_not_heard_ends_at_once_on_the_others() {
        let group = group(2, Duration::from_secs(60));
        let [told, missed] = [0, 1].map(|rank| Negotiation::of(&group[rank].inner));
        let waiting = sum(&group[0], "sum");
        told.run((0, 0), vec!["sum".to_owned()], u64::MAX, None);
        missed.miss((0, 0), unheard());
        let error = waiting.wait().unwrap_err();
        assert_eq!(error.culprit_rank(), Some(Rank(1)), "{error}");
        assert!(error.to_string().contains("the link"), "{error}");
    }

    /// Who gives up an operation because of a loss says which rank is lost.
    #[test]
    fn an_operation_that_is_given_up_because_of_a_loss_ends_with_the_lost_rank() {
        let group = group(3, Duration::from_secs(60));
        let [told, missed] = [0, 1].map(|rank| Negotiation::of(&group[rank].inner));
        let waiting = sum(&group[0], "sum");
        told.run((0, 0), vec!["sum".to_owned()], u64::MAX, None);
        let data = &missed.data;
        data.signals.change(|state| state.lost.add(2, "killed"));
        missed.miss((0, 0), unheard());
        let error = waiting.wait().unwrap_err();
        assert_eq!(error.culprit_rank(), Some(Rank(2)), "{error}");
    }

    /// Rank 2 starts all and then does none: what it keeps waiting ends two by two, and the last ones wait for long. That is
    /// not the fault of the coordinator, which has the others run meanwhile.
    #[test]
    fn operations_behind_those_of_a_late_rank_name_that_rank() {
        let group = group(3, Duration::from_millis(100));
        for comm in &group {
            comm.set_fusion_threshold(0);
        }
        let data = Communicator::of(Arc::clone(&Negotiation::of(&group[2].inner).data));
        let progress = data.progress().unwrap();
        let (end, ended) = channel::<()>();
        let busy = Box::new(move || ended.recv().unwrap_or_default());
        assert!(progress.try_start(busy).is_ok());
        let start = |comm| (0..10).map(move |index| sum(comm, &format!("t{index}")));
        let handles: Vec<_> = group
            .iter()
            .map(|comm| start(comm).collect::<Vec<_>>())
            .collect();
        for handle in handles.into_iter().take(2).flatten() {
            let error = handle.wait().unwrap_err();
            assert_eq!(error.culprit_rank(), Some(Rank(2)), "{error}");
        }
        drop(end);
    }
}
