//! Describing a group.

use std::ops::RangeInclusive;
use std::time::Duration;

use kolo_collectives::lane::LaneChoice;
use kolo_transport::wire::GroupFilter;

use super::output::Output;
use super::{Executor, start};
use crate::cluster::{AbortOnDrop, Cluster};
use crate::error::StartError;
use crate::options::{Amount, Count, LANE, Options, RINGS};

/// Describes a group of workers; made by [`Executor::builder`].
///
/// Give its size, [`workers`](Self::workers) or [`hosts`](Self::hosts) and [`slots`](Self::slots); everything else has a
/// default. Nothing is checked before [`start`](Self::start).
#[derive(Debug, Clone, Default)]
#[must_use = "nothing is started without `start`"]
pub struct ExecutorBuilder {
    options: Options,
    output: Output,
}

impl ExecutorBuilder {
    /// This many workers in all, on as few nodes as possible. Not together with [`hosts`](Self::hosts).
    ///
    /// Bounds make the group *elastic*: with `workers(2..=8)` it has as many workers as there is room for, at most 8, and goes on
    /// while 2 are left. See [`Executor`](Executor#elastic-groups).
    pub fn workers(mut self, workers: impl Into<Count>) -> Self {
        self.options.workers = Some(workers.into());
        self
    }

    /// Workers on this many nodes, all distinct; [`slots`](Self::slots) on each. Not together with
    /// [`workers`](Self::workers).
    ///
    /// Bounds make the group *elastic*, as with [`workers`](Self::workers): `hosts(1..=4).slots(2)` has 2 to 8 workers. Hosts take
    /// part as a whole. A lost worker is replaced on its host; a host that can't get a new worker leaves the group.
    pub fn hosts(mut self, hosts: impl Into<Count>) -> Self {
        self.options.hosts = Some(hosts.into());
        self
    }

    /// This many workers on each of the [`hosts`](Self::hosts). Default: 1.
    pub fn slots(mut self, slots: u32) -> Self {
        self.options.slots = Some(slots);
        self
    }

    /// Processes that are kept ready beside the members, to replace lost ones at once. Default: 0. This makes the group elastic.
    pub fn spares(mut self, spares: u32) -> Self {
        self.options.elastic.spares = Some(spares);
        self
    }

    /// How often the members may change, for any reason; the job fails at the next change. Default: no limit. This makes the group
    /// elastic.
    pub fn max_resets(mut self, resets: u32) -> Self {
        self.options.elastic.max_resets = Some(resets);
        self
    }

    /// How many workers may fail within a time; the job fails with the next. Default: no limit. This makes the group elastic.
    pub fn restarts(mut self, restarts: u32, within: Duration) -> Self {
        self.options.elastic.restarts = Some((restarts, within));
        self
    }

    /// How many workers may fail without a [commit](crate::elastic::State::commit) in between; the job fails with the next. So a
    /// loop that fails at once, again and again, ends soon. Default: 3. This makes the group elastic.
    pub fn restarts_without_progress(mut self, restarts: u32) -> Self {
        self.options.elastic.restarts_without_progress = Some(restarts);
        self
    }

    /// The shortest and the longest time in which a host gets no new worker after one has failed there. The time doubles with each
    /// failure. Default: none. Allowed: 1 s to 1 h. This makes the group elastic.
    pub fn cooldown(mut self, range: RangeInclusive<Duration>) -> Self {
        self.options.elastic.cooldown = Some(range);
        self
    }

    /// A command that must succeed on a node before workers of the group start there, `within` a time: each time the group comes to
    /// the node, also again. Default: none. Allowed for the time: 1 ms to the [start timeout](Self::start_timeout). This makes the
    /// group elastic.
    ///
    /// The node runs the command itself: a path, or a name in the `PATH` of its daemon, with the environment of its daemon.
    /// If the command is not there, ends otherwise than with exit code 0, or is late, the host gets no worker of the group for as
    /// long as after a [failed worker](Self::cooldown); 20 s to 10 min if no cool-down is given. Then the command runs again.
    pub fn health_check<A: Into<String>>(
        mut self,
        program: impl Into<String>,
        args: impl IntoIterator<Item = A>,
        within: Duration,
    ) -> Self {
        let args = args.into_iter().map(Into::into).collect();
        self.options.elastic.health_check = Some((program.into(), args, within));
        self
    }

    /// Which sizes and shapes of the group are wanted. Repeated calls add filters, which are applied in order. This makes the group
    /// elastic.
    pub fn filter(mut self, filter: GroupFilter) -> Self {
        self.options.elastic.filters.push(filter);
        self
    }

    /// Whether calls that are made between two generations wait for the next one, in place of failing with
    /// [`CallError::GenerationOver`](crate::CallError::GenerationOver). Default: no. This makes the group elastic.
    pub fn wait_for_recovery(mut self, wait: bool) -> Self {
        self.options.elastic.waits = wait;
        self
    }

    /// CPUs that each worker holds, in thousandths: `1`, `0.5`. Default: 1. It is a count for the placement; nothing stops a
    /// worker from using more.
    pub fn cpus_per_worker(mut self, cpus: impl Amount) -> Self {
        self.options.cpus = cpus.units();
        self
    }

    /// Whether workers use GPUs, one each or [`gpus_per_worker`](Self::gpus_per_worker). Default: no; then they see none. All
    /// workers of a node see all devices of the group there, in `CUDA_VISIBLE_DEVICES`.
    pub fn use_gpu(mut self, use_gpu: bool) -> Self {
        self.options.use_gpu = use_gpu;
        self
    }

    /// GPUs that each worker holds. Default: 1. Only with [`use_gpu`](Self::use_gpu).
    pub fn gpus_per_worker(mut self, gpus: u32) -> Self {
        self.options.gpus = Some(gpus);
        self
    }

    /// An amount of a custom resource that each worker holds, in thousandths. Nodes declare what they have. May be repeated
    /// for other names.
    pub fn resource(mut self, name: impl Into<String>, amount: impl Amount) -> Self {
        self.options.custom.insert(name.into(), amount.units());
        self
    }

    /// A variable in the environment of every worker, over what the node and kolo set; only `KOLO_*` is kolo's own. One that kolo
    /// sets for each worker, such as `RANK`, is then the same for all; what [`Context`](crate::Context) says stays right. May
    /// be repeated.
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.options.env.insert(name.into(), value.into());
        self
    }

    /// How collectives reach workers on other nodes. Default: what `KOLO_LANE` says in the driver's environment (`tls` or `quic`),
    /// or else [`LaneChoice::Tls`]. Both kinds have mutual TLS 1.3; QUIC is for networks that pass only UDP.
    ///
    /// Workers of one node use rings in shared memory between them; the variable `KOLO_RINGS=off`, in the driver's environment or by
    /// [`env`](Self::env), leaves them their Unix sockets.
    pub fn lane(self, lane: LaneChoice) -> Self {
        self.env(LANE, lane.to_string())
    }

    /// Arguments of the workers' program, without its name. Default: none. Workers do not run `main`; a constructor may read
    /// them with [`std::env::args`].
    pub fn args<A: Into<String>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.options.args = args.into_iter().map(Into::into).collect();
        self
    }

    /// How long it may take until all workers are ready, the program's way to the nodes included. Default: 30 s. Allowed:
    /// 1 ms to 24 h.
    pub fn start_timeout(mut self, timeout: Duration) -> Self {
        self.options.start_timeout = timeout;
        self
    }

    /// How long a worker that is to end has after the notice, before `SIGTERM`; and after that again, before `SIGKILL`.
    /// Default: 5 s. Allowed: 0 to 1 h.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.options.grace = grace;
        self
    }

    /// A name for the job, for people. Need not be unique. Default: the program's file name.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.options.name = Some(name.into());
        self
    }

    /// Whether to open the plain HTTP rendezvous that workers of other systems need. Default: no. It has no
    /// authentication, but serves only this job's scopes to the addresses of its nodes.
    pub fn rendezvous(mut self, rendezvous: bool) -> Self {
        self.options.rendezvous = rendezvous;
        self
    }

    /// The network interfaces that the group may use, by name. Default: whichever connect all nodes best. They are
    /// verified: if they don't connect the nodes, the start fails with a table of who reached whom. Repeated calls add.
    pub fn interfaces<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        let names = names.into_iter().map(Into::into);
        self.options.interfaces.names.extend(names);
        self
    }

    /// As [`interfaces`](Self::interfaces), for one host (its hostname or its node's id), in place of those for all.
    pub fn interfaces_on<S: Into<String>>(
        mut self,
        host: impl Into<String>,
        names: impl IntoIterator<Item = S>,
    ) -> Self {
        let names = names.into_iter().map(Into::into);
        let all = &mut self.options.interfaces.by_host;
        all.entry(host.into()).or_default().extend(names);
        self
    }

    /// Whether to probe the network interfaces even if what connects the nodes is known from an earlier start. Default:
    /// no. A change of any node's interfaces is seen without it; a change of routes or firewalls is not, for an hour.
    pub fn no_cache(mut self, no_cache: bool) -> Self {
        self.options.no_cache = no_cache;
        self
    }

    /// What becomes of the lines that workers print. Default: [`Output::Inherit`].
    pub fn output(mut self, output: Output) -> Self {
        self.output = output;
        self
    }

    /// How many calls may be in flight at once. Default: 1024. Allowed: 1 to 1048576. This bounds the driver's memory: a call
    /// in flight keeps its arguments until they are written, and its results until all are there. See
    /// [`Call`](crate::Call#back-pressure).
    pub fn max_in_flight(mut self, calls: usize) -> Self {
        self.options.max_in_flight = calls;
        self
    }

    /// Starts the group: places it, sends the program to nodes that lack it, starts the workers and waits until all are
    /// ready. All or nothing: on an error nothing is left.
    ///
    /// May be awaited on any executor. Cancel safe: when the future is dropped, what was started is stopped.
    ///
    /// # Errors
    ///
    /// [`StartError`]. What can't be placed now is an error at once and not a wait.
    pub async fn start(self, cluster: &Cluster) -> Result<Executor, StartError> {
        let (mut options, output) = (self.options, self.output);
        for name in [LANE, RINGS] {
            if let Ok(value) = std::env::var(name) {
                options.env.entry(name.to_owned()).or_insert(value);
            }
        }
        let start =
            cluster
                .runtime()
                .handle()
                .spawn(start::start(cluster.clone(), options, output));
        AbortOnDrop(start).join().await.unwrap_or_else(|reason| {
            Err(StartError::Unexpected {
                from: "the driver's own runtime".to_owned(),
                reply: reason,
            })
        })
    }
}
