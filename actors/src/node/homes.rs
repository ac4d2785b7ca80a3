//! Processes of jobs: wardens, and the actors of workers.

use std::collections::BTreeMap;
use std::future::Future;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use actix::prelude::*;
use kolo_core::node::colocator::millis;
use kolo_core::node::environment::{self, Place};
use kolo_core::node::messages::{
    AskId, Found, Input, Link, Opening, Signal, Spawning, Stay, Wanted, WorkerEvent, WorkerId,
};
use kolo_transport::ids::{Incarnation, JobId, Rank, Slot};
use kolo_transport::wire::{GenerationTable, HealthCheck, ToWorker, WorkerSignal};
use tokio::sync::watch;

use super::asks::Happened;
use super::author::Author;
use super::health;
use super::launch::Launch;
use super::leftovers::Stopping;
use super::output::Output;
use super::ports::{ControlError, ControlSender, NodeContext};
use super::supervisor::WorkerPlan;
use super::warden::JobWarden;
use super::worker::{SignalWorker, Worker};

/// How long a job's output waits for its driver after the job's end.
const UNCLAIMED: Duration = Duration::from_secs(30);

/// What the workers of a job are started from.
struct Means {
    program: Launch,
    output: Arc<Output>,
}

/// The newest process of a slot.
struct Member {
    incarnation: Incarnation,
    author: Arc<Author>,
    actor: Addr<Worker>,
    control: ControlSender,
    stopping: Arc<watch::Sender<Stopping>>,
}

/// What there is of one stay of a job.
struct Home {
    warden: JobWarden,
    means: Option<Means>,
    members: BTreeMap<Slot, Member>,
}

/// The processes of all jobs, and the programs that were found for orders.
pub(super) struct Homes {
    context: Arc<NodeContext>,
    stays: BTreeMap<Stay, Home>,
    found: Arc<Mutex<BTreeMap<AskId, Launch>>>,
}

impl Homes {
    pub(super) fn new(context: Arc<NodeContext>) -> Self {
        Self {
            context,
            stays: BTreeMap::new(),
            found: Arc::default(),
        }
    }

    /// Looks for a program, and keeps it until it is [taken](Homes::forget).
    pub(super) fn find(
        &self,
        ask: AskId,
        program: Wanted,
        port: bool,
    ) -> impl Future<Output = Input> + use<> {
        let finding = self.context.programs.find(program);
        let (context, found) = (self.context.clone(), self.found.clone());
        async move {
            let program = match finding.await {
                Ok(Some(launch)) => {
                    lock(&found).insert(ask, launch);
                    Found::Here
                }
                Ok(None) => Found::NotSent,
                Err(refusal) => Found::Unusable(refusal),
            };
            let free_port = if port {
                context.programs.free_port()
            } else {
                0
            };
            Input::Found {
                ask,
                program,
                free_port,
            }
        }
    }

    /// The program that was found for an order, which needs it no more.
    pub(super) fn forget(&self, ask: AskId) -> Option<Launch> {
        lock(&self.found).remove(&ask)
    }

    pub(super) fn start_warden(&mut self, stay: Stay) -> impl Future<Output = Input> + use<> {
        let warden = self.home(stay).warden.clone();
        async move {
            let started = warden.get().await.map(drop);
            if let Err(error) = &started {
                tracing::error!(job = %stay.job, %error, "a job has no warden");
            }
            let started = started.map_err(|error| error.to_string());
            Input::Warden { stay, started }
        }
    }

    /// Runs a health check below a stay's warden.
    pub(super) fn check(
        &self,
        (ask, stay): (AskId, Stay),
        check: HealthCheck,
    ) -> impl Future<Output = Input> + use<> {
        let home = self.stays.get(&stay);
        let warden = home.map(|home| home.warden.clone());
        let running =
            self.context
                .runtime
                .spawn(health::run(self.context.programs.clone(), warden, check));
        async move {
            let ended = running.await;
            let checked = ended.unwrap_or_else(|error| Err(error.to_string()));
            Input::Checked { ask, checked }
        }
    }

    /// Ends a warden whose workers have ended, with whatever else is left of them.
    pub(super) fn close_warden(&mut self, stay: Stay) -> impl Future<Output = Input> + use<> {
        let home = self.stays.remove(&stay);
        async move {
            if let Some(home) = home {
                home.warden.close().await;
            }
            tracing::debug!(job = %stay.job, "nothing of the job is left");
            Input::Closed(stay)
        }
    }

    fn home(&mut self, stay: Stay) -> &mut Home {
        self.stays.entry(stay).or_insert_with(|| Home {
            warden: JobWarden::new(self.context.clone(), stay.job),
            means: None,
            members: BTreeMap::new(),
        })
    }

    /// No worker begins to write any more.
    pub(super) fn end_output(&self, job: JobId) {
        self.context.outputs.end(job);
        // A driver that does not come for it can't be waited for.
        if let Some(output) = self.context.outputs.get(job)
            && output.stream().is_some()
        {
            self.context.runtime.spawn(async move {
                tokio::time::sleep(UNCLAIMED).await;
                output.abandon();
            });
        }
    }

    pub(super) fn open(&mut self, opening: Opening) {
        let Some(program) = self.forget(opening.ask) else {
            return;
        };
        let output = self.context.outputs.open(opening.stay.job);
        self.home(opening.stay).means = Some(Means { program, output });
    }

    pub(super) fn spawn(&mut self, spawning: Spawning, node: Recipient<Happened>) {
        let Spawning {
            worker,
            start,
            devices,
        } = spawning;
        let Some(home) = self.stays.get_mut(&worker.stay) else {
            return;
        };
        let Some(means) = &home.means else {
            return;
        };
        let Some(slot) = start
            .slots
            .iter()
            .find(|other| other.member.slot == worker.slot)
        else {
            return;
        };
        let (control, messages) = ControlSender::channel();
        let stopping = Arc::new(watch::Sender::new(Stopping::No));
        let place = Place {
            cluster: self.context.here.cluster,
            ip: self.context.ip,
            devices: (self.context.hides_gpus || !devices.is_empty()).then_some(&devices),
        };
        let author = Author::new(means.output.clone(), worker.slot, slot.member.rank);
        let author = Arc::new(author);
        let plan = WorkerPlan {
            worker,
            generation: start.generation,
            program: means.program.clone(),
            argv0: match &start.installed {
                Some(installed) => installed.program.clone(),
                None => start.program.name.clone(),
            },
            args: start.args.clone(),
            env: environment::worker(std::env::vars_os(), &start, slot, place),
            control: control.clone(),
            messages,
            author: author.clone(),
            linger: millis(start.grace_ms),
            stopping: stopping.clone(),
        };
        let member = Member {
            incarnation: worker.incarnation,
            author,
            actor: Worker::new(self.context.clone(), node, home.warden.clone(), plan).start(),
            control,
            stopping,
        };
        home.members.insert(worker.slot, member);
    }

    /// Lines that are read from now on have the ranks of this generation.
    pub(super) fn complete(&self, table: &GenerationTable) {
        let homes = self.stays.iter().filter(|(stay, _)| stay.job == table.job);
        let ranks: BTreeMap<_, _> = table
            .members
            .iter()
            .map(|member| ((member.slot, member.incarnation), member.rank))
            .collect();
        for (slot, member) in homes.flat_map(|(_, home)| &home.members) {
            let rank = ranks.get(&(*slot, member.incarnation));
            // Who is in no generation has the number of its slot, as before its first one.
            member
                .author
                .set_rank(rank.copied().unwrap_or(Rank(slot.0)));
        }
    }

    fn member(&self, worker: WorkerId) -> Option<&Member> {
        let member = self.stays.get(&worker.stay)?.members.get(&worker.slot)?;
        (member.incarnation == worker.incarnation).then_some(member)
    }

    /// Sends a worker a message; what is wrong if that does not go.
    pub(super) fn tell(&self, worker: WorkerId, message: ToWorker) -> Option<Input> {
        let member = self.member(worker)?;
        if matches!(message, ToWorker::Stop { .. }) {
            // Before it can obey.
            member.stopping.send_if_modified(|stopping| {
                let first = *stopping == Stopping::No;
                *stopping = (*stopping).max(Stopping::Told);
                first
            });
        }
        // It is asked again, and a worker that stands still is not to end because others wait for it.
        let may_be_lost = matches!(message, ToWorker::LinkRequested { .. });
        match member.control.try_send(message) {
            Err(ControlError::Full) if may_be_lost => None,
            sent => fault(worker, sent),
        }
    }

    /// Connects two workers.
    pub(super) fn link(&self, link: Link) -> Vec<Input> {
        let Link {
            first,
            second,
            generation,
        } = link;
        let (one, other) = match UnixStream::pair() {
            Ok(pair) => pair,
            Err(error) => {
                // Both wait for it, each with a deadline of its own.
                tracing::error!(job = %first.0.stay.job, %error, "no sockets for two workers");
                return Vec::new();
            }
        };
        [(first.0, second.1, one), (second.0, first.1, other)]
            .into_iter()
            .filter_map(|(worker, rank, socket)| {
                let message = ToWorker::Peer { rank, generation };
                let control = &self.member(worker)?.control;
                fault(worker, control.try_send_with(message, vec![socket.into()]))
            })
            .collect()
    }

    pub(super) fn signal(
        &self,
        worker: WorkerId,
        signal: Signal,
    ) -> impl Future<Output = ()> + use<> {
        use kolo_process::Signal as Real;
        let signal = match signal {
            Signal::Interrupt => Real::Interrupt,
            Signal::Terminate => Real::Terminate,
            Signal::Kill => Real::Kill,
            Signal::Pass(WorkerSignal::User1) => Real::User1,
            Signal::Pass(WorkerSignal::User2) => Real::User2,
            Signal::Pass(WorkerSignal::Stop) => Real::Stop,
            Signal::Pass(WorkerSignal::Continue) => Real::Continue,
        };
        let sent = self
            .member(worker)
            .map(|member| member.actor.send(SignalWorker(signal)));
        async move {
            // The worker's actor ends when its process has.
            if let Some(sent) = sent
                && let Err(error) = sent.await
            {
                tracing::debug!(slot = %worker.slot, %error, "a worker had ended before its signal");
            }
        }
    }
}

/// What the core must know of a message to a worker.
fn fault(worker: WorkerId, sent: Result<(), ControlError>) -> Option<Input> {
    match sent {
        // A worker that is gone is told by its supervisor.
        Ok(()) | Err(ControlError::Closed) => None,
        Err(error) => {
            let reason = error.to_string();
            let event = WorkerEvent::Fault { reason };
            Some(Input::Worker { worker, event })
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
