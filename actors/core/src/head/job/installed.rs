//! Jobs whose program is installed on the hosts: any executable.
//!
//! Their workers say no hello. Each is ready when it runs; the job succeeds when all have exited with code 0, and the first
//! that ends otherwise ends the group.

use kolo_wire::ids::Slot;
use kolo_wire::{NodeRequest, Refusal, WorkerSignal, WorkerState};

use super::report::listed;
use super::{Hold, Job, Manner, Part, Push, Signals};

impl Job {
    pub(super) fn is_installed(&self) -> bool {
        self.spec.installed.is_some()
    }

    /// Ends the job if its program can't run on some of the hosts. All have answered.
    pub(super) fn check_installed(&mut self) {
        let mut problems: Vec<(&Refusal, Vec<String>)> = Vec::new();
        for part in &self.parts {
            let Some(problem) = &part.problem else {
                continue;
            };
            let at = part.site.hostname.clone();
            match problems.iter_mut().find(|(known, _)| *known == problem) {
                Some((_, hosts)) => hosts.push(at),
                None => problems.push((problem, vec![at])),
            }
        }
        let Some((first, _)) = problems.first() else {
            return;
        };
        let kind = first.kind;
        let texts: Vec<String> = problems
            .iter()
            .map(|(problem, hosts)| format!("{} (on {})", problem.message, listed(hosts)))
            .collect();
        self.fail(kind, texts.join("; "));
    }

    /// A worker runs, or has run: there is nothing else to wait for.
    pub(super) fn installed_ready(&mut self, slot: Slot) {
        let seat = self.seats.get_mut(&slot);
        if let Some(seat) = seat.filter(|seat| seat.state == WorkerState::Starting) {
            seat.state = WorkerState::Ready;
            self.ready += 1;
        }
    }

    /// Ends the job because its driver was interrupted.
    pub(super) fn interrupt(&mut self) {
        if self.is_installed() && self.ending.is_none() {
            self.manner = Manner::Interrupt;
        }
        self.stop("its driver was interrupted".to_owned(), true);
    }

    /// Sends a signal to all workers that run and are not about to be ended.
    pub(super) fn signal(&mut self, signal: WorkerSignal) {
        if !self.is_installed() || self.ending.is_some() {
            return;
        }
        if matches!(signal, WorkerSignal::User1 | WorkerSignal::User2) {
            self.noticed();
        }
        for part in 0..self.parts.len() {
            if self.parts[part].hold == Hold::Running {
                self.parts[part].signals.add(signal);
                self.push_signal(part);
            }
        }
    }

    /// The node has taken what was pushed to it.
    pub(super) fn signalled(&mut self, part: usize) {
        self.parts[part].signals.under_way = false;
        if self.ending.is_none() {
            self.push_signal(part);
        }
    }

    fn push_signal(&mut self, part: usize) {
        let Some(signal) = self.parts[part].signals.next() else {
            return;
        };
        self.signals += 1;
        let request = NodeRequest::Signal {
            job: self.id,
            signal,
            seq: self.signals,
        };
        self.push(part, Push::order(request));
    }

    /// Ends what is left without any grace.
    pub(super) fn kill(&mut self) {
        if std::mem::replace(&mut self.manner, Manner::Kill) == Manner::Kill {
            return;
        }
        let is_stopping = |part: &Part| part.hold == Hold::Undoing && part.started;
        let parts = (0..).zip(&self.parts);
        let stopping: Vec<usize> = parts
            .filter(|(_, part)| is_stopping(part))
            .map(|(part, _)| part)
            .collect();
        self.stop("its driver has ended it at once".to_owned(), true);
        for part in stopping {
            self.deliver(part, Push::order(NodeRequest::Kill { job: self.id }));
        }
    }
}

impl Signals {
    fn add(&mut self, signal: WorkerSignal) {
        let undone = match signal {
            WorkerSignal::Stop => Some(WorkerSignal::Continue),
            WorkerSignal::Continue => Some(WorkerSignal::Stop),
            WorkerSignal::User1 | WorkerSignal::User2 => None,
        };
        // The later of the two is what is wanted.
        self.waiting
            .retain(|other| *other != signal && Some(*other) != undone);
        self.waiting.push(signal);
    }

    fn next(&mut self) -> Option<WorkerSignal> {
        if self.under_way || self.waiting.is_empty() {
            return None;
        }
        self.under_way = true;
        Some(self.waiting.remove(0))
    }
}

#[cfg(test)]
mod tests {
    use kolo_wire::ids::{Generation, Incarnation, NodeId};
    use kolo_wire::{
        Exit, Installed, JobEvent, JobState, NodeEvent, NodeReply, RankFailure, RefusalKind,
        SubmitFrame,
    };

    use super::super::fixtures::{accounted, ended, exited};
    use super::super::tests::{JOB, Run, submit};
    use super::super::{Action, Event};
    use super::*;

    fn installed(workers: &[u32]) -> Run {
        submit(workers, |spec| {
            spec.installed = Some(Installed {
                program: "train".to_owned(),
                ..Installed::default()
            });
        })
    }

    fn started(run: &mut Run, node: u64, slots: &[(u32, u32)]) {
        let pids = slots
            .iter()
            .map(|(slot, pid)| (Slot(*slot), *pid))
            .collect();
        run.answer(node, NodeReply::Started { pids });
    }

    fn end(run: &mut Run, node: u64, slot: u32, exit: Exit) {
        let event = NodeEvent::WorkerExited {
            job: JOB,
            slot: Slot(slot),
            failure: RankFailure {
                pid: 40 + slot,
                ..super::super::fixtures::failure(exit)
            },
            expected: false,
            incarnation: Incarnation::FIRST,
            generation: Generation(0),
        };
        run.report(node, event);
    }

    fn requests(run: &Run, wanted: impl Fn(&NodeRequest) -> bool) -> usize {
        let asked = run.actions.iter().filter_map(|action| match action {
            Action::Request { request, .. } => Some(&**request),
            _ => None,
        });
        let pushed = run.pushed.iter().map(|(_, request)| request);
        asked.chain(pushed).filter(|it| wanted(it)).count()
    }

    #[test]
    fn workers_are_ready_when_they_run_and_the_job_succeeds_when_all_have() {
        let mut run = installed(&[1, 1]);
        run.reserve_all(2, false);
        assert_eq!(
            requests(
                &run,
                |request| matches!(request, NodeRequest::Start(start) if start.installed.is_some() && !start.needs_data_plane)
            ),
            2,
            "no program is waited for"
        );
        started(&mut run, 1, &[(0, 40)]);
        started(&mut run, 2, &[(1, 41)]);
        let healthy = |action: &Action| matches!(action, Action::Tell(JobEvent::Healthy { .. }));
        assert!(run.actions.iter().any(healthy));
        assert_eq!(
            requests(&run, |request| matches!(
                request,
                NodeRequest::Membership(_)
            )),
            0
        );
        end(&mut run, 1, 0, Exit::Code(0));
        assert_eq!(
            requests(&run, |request| matches!(request, NodeRequest::Stop { .. })),
            0
        );
        end(&mut run, 2, 1, Exit::Code(0));
        run.all_done(2);
        assert_eq!(run.ended(), (JobState::Succeeded, None, None));
    }

    #[test]
    fn workers_may_end_before_the_answer_to_the_start() {
        let mut run = installed(&[2]);
        run.reserve(1, false);
        end(&mut run, 1, 0, Exit::Code(0));
        end(&mut run, 1, 1, Exit::Code(0));
        started(&mut run, 1, &[(0, 40), (1, 41)]);
        run.answer(1, NodeReply::Done);
        assert_eq!(run.ended().0, JobState::Succeeded);
    }

    #[test]
    fn the_first_bad_end_ends_the_group_and_is_its_cause() {
        for early in [true, false] {
            let mut run = installed(&[2, 1]);
            run.reserve_all(2, false);
            if !early {
                started(&mut run, 1, &[(0, 40), (1, 41)]);
                started(&mut run, 2, &[(2, 42)]);
            }
            end(&mut run, 1, 1, Exit::Code(3));
            end(&mut run, 1, 0, Exit::Signal(15));
            if early {
                started(&mut run, 1, &[(0, 40), (1, 41)]);
                started(&mut run, 2, &[(2, 42)]);
            }
            assert_eq!(
                requests(&run, |request| matches!(request, NodeRequest::Stop { .. })),
                2
            );
            run.all_done(2);
            let (state, refusal, failure) = run.ended();
            assert_eq!(state, JobState::Failed);
            let failure = failure.unwrap();
            assert_eq!((failure.rank.0, failure.exit), (1, Exit::Code(3)));
            assert!(refusal.unwrap().message.contains("exit code 3"));
        }
    }

    #[test]
    fn a_worker_that_was_stopped_may_have_failed_first() {
        // Rank 0 has said its error a while before its exit, and is stopped because of rank 1. Or only just: nobody knows.
        for (second, cause) in [(6, 0), (9, 1)] {
            let mut run = installed(&[2]);
            run.reserve(1, false);
            started(&mut run, 1, &[(0, 40), (1, 41)]);
            end(&mut run, 1, 1, Exit::Code(3));
            let failure = RankFailure {
                reason: Some("the job was stopped: because".to_owned()),
                ..accounted(Exit::Signal(15), 9500, Some(second))
            };
            run.report(1, ended(JOB, 0, failure, true));
            run.answer(1, NodeReply::Done);
            let (_, refusal, failure) = run.ended();
            let failure = failure.unwrap();
            assert_eq!(failure.rank.0, cause);
            assert_eq!(failure.reason, None, "the stop is no cause");
            assert_eq!(refusal.unwrap().message, failure.to_string());
            let reason = run.job.info(std::time::Duration::ZERO).reason.unwrap();
            assert!(failure.to_string().starts_with(&reason), "{reason}");
        }
    }

    #[test]
    fn hosts_without_the_program_are_named_together() {
        let mut run = installed(&[1, 1, 1, 1]);
        let problem = |kind, text: &str| NodeReply::Reserved {
            has_program: false,
            free_port: 1,
            problem: Some(Refusal::new(kind, text)),
        };
        run.answer(1, problem(RefusalKind::NoProgram, "no `train` in PATH"));
        run.reserve(2, false);
        run.answer(3, problem(RefusalKind::NoProgram, "no `train` in PATH"));
        run.answer(4, problem(RefusalKind::Forbidden, "not executable"));
        run.all_done(4);
        let (state, refusal, _) = run.ended();
        let refusal = refusal.unwrap();
        assert_eq!(
            (state, refusal.kind),
            (JobState::Failed, RefusalKind::NoProgram)
        );
        assert_eq!(
            refusal.message,
            "no `train` in PATH (on host1, host3); not executable (on host4)"
        );
        assert_eq!(
            requests(&run, |request| matches!(request, NodeRequest::Start(_))),
            0
        );
    }

    #[test]
    fn a_dry_run_ends_where_its_workers_would_start() {
        let dry = || {
            let mut run = submit(&[1, 1], |spec| {
                spec.installed = Some(Installed::default());
                spec.rendezvous = true;
            });
            run.job.run_dry();
            run.asked();
            run.reserve(1, false);
            run
        };
        let mut run = dry();
        run.reserve(2, false);
        assert_eq!(run.asked(), ["tell:placed", "open 2"]);
        run.step(Event::Rendezvous(Ok("10.0.0.7:80".parse().unwrap())));
        assert_eq!(run.asked(), ["1:release", "2:release"]);
        run.all_done(2);
        assert_eq!(run.ended(), (JobState::Succeeded, None, None));
        let asked = run.asked();
        assert_eq!(asked[2..], ["close", "tell:succeeded", "finished"]);

        let mut run = dry();
        let problem = NodeReply::Reserved {
            has_program: false,
            free_port: 1,
            problem: Some(Refusal::new(RefusalKind::NoProgram, "no `train` in PATH")),
        };
        run.answer(2, problem);
        assert_eq!(run.asked(), ["1:release", "2:release"]);
        run.all_done(2);
        let (state, refusal, _) = run.ended();
        assert_eq!(state, JobState::Failed);
        assert_eq!(refusal.unwrap().message, "no `train` in PATH (on host2)");
    }

    #[test]
    fn a_kill_follows_a_stop_or_takes_its_place() {
        let up = || {
            let mut run = installed(&[1]);
            run.reserve(1, false);
            started(&mut run, 1, &[(0, 40)]);
            run
        };
        let kills =
            |run: &Run| requests(run, |request| matches!(request, NodeRequest::Kill { .. }));
        let stops =
            |run: &Run| requests(run, |request| matches!(request, NodeRequest::Stop { .. }));
        let mut run = up();
        run.step(Event::Driver(SubmitFrame::Stop));
        assert_eq!((stops(&run), kills(&run)), (1, 0));
        run.step(Event::Driver(SubmitFrame::Kill));
        assert_eq!((stops(&run), kills(&run)), (1, 1));
        run.report(1, exited(JOB, 0, Exit::Signal(9)));
        run.answer(1, NodeReply::Done);
        assert_eq!(run.ended().0, JobState::Stopped);

        let mut run = up();
        run.step(Event::Driver(SubmitFrame::Kill));
        assert_eq!((stops(&run), kills(&run)), (0, 1));
        run.answer(1, NodeReply::Done);
        assert_eq!(run.ended().0, JobState::Stopped);
    }

    #[test]
    fn an_interrupt_ends_the_job_and_the_nodes_are_told_how() {
        let stop = |run: &Run, how: bool| {
            requests(
                run,
                |request| matches!(request, NodeRequest::Stop { interrupt, .. } if *interrupt == how),
            )
        };
        let mut run = installed(&[1, 1]);
        run.reserve_all(2, false);
        started(&mut run, 1, &[(0, 40)]);
        run.step(Event::Driver(SubmitFrame::Interrupt));
        run.step(Event::Driver(SubmitFrame::Stop));
        // One that is still starting is told when it has.
        assert_eq!(stop(&run, true), 1);
        started(&mut run, 2, &[(1, 41)]);
        assert_eq!((stop(&run, true), stop(&run, false)), (2, 0));
        run.all_done(2);
        assert_eq!(run.ended().0, JobState::Stopped);

        // An end that has begun otherwise goes on as it was.
        let mut run = installed(&[1]);
        run.reserve(1, false);
        run.step(Event::Driver(SubmitFrame::Stop));
        run.step(Event::Driver(SubmitFrame::Interrupt));
        started(&mut run, 1, &[(0, 40)]);
        assert_eq!((stop(&run, true), stop(&run, false)), (0, 1));
    }

    #[test]
    fn signals_go_to_every_node_one_at_a_time_and_none_is_waiting_twice() {
        use WorkerSignal::{Continue, Stop, User1, User2};
        let sent = |run: &Run, at: u64| -> Vec<(WorkerSignal, u64)> {
            let of_node = |(node, request): &(NodeId, NodeRequest)| match request {
                NodeRequest::Signal { signal, seq, .. } if node.0 == at => Some((*signal, *seq)),
                _ => None,
            };
            run.pushed.iter().filter_map(of_node).collect()
        };
        let taken = |run: &mut Run, node: u64| {
            run.step(Event::Pushed {
                node: NodeId(node),
                answer: Ok(NodeReply::Done),
            });
        };
        let mut run = installed(&[1, 1]);
        run.reserve_all(2, false);
        run.step(Event::Driver(SubmitFrame::Signal(User1)));
        assert_eq!(sent(&run, 1), [], "nobody is there to hear it");
        started(&mut run, 1, &[(0, 40)]);
        started(&mut run, 2, &[(1, 41)]);
        run.step(Event::Driver(SubmitFrame::Signal(User1)));
        assert_eq!(
            (sent(&run, 1), sent(&run, 2)),
            (vec![(User1, 1)], vec![(User1, 2)])
        );
        for signal in [User1, Stop, User1, Continue, Stop, Continue, User2] {
            run.step(Event::Driver(SubmitFrame::Signal(signal)));
        }
        assert_eq!(sent(&run, 1).len(), 1, "it has not taken the first");
        for _ in 0..9 {
            taken(&mut run, 1);
        }
        let kinds: Vec<WorkerSignal> = sent(&run, 1).iter().map(|(signal, _)| *signal).collect();
        assert_eq!(kinds, [User1, User1, Continue, User2]);
        let numbers: Vec<u64> = sent(&run, 1).iter().map(|(_, seq)| *seq).collect();
        assert!(numbers.is_sorted_by(|one, next| one < next), "{numbers:?}");
        // The end overtakes what is waiting, and what comes then.
        run.step(Event::Driver(SubmitFrame::Stop));
        run.step(Event::Driver(SubmitFrame::Signal(User1)));
        taken(&mut run, 2);
        assert_eq!(sent(&run, 2), [(User1, 2)]);
    }
}
