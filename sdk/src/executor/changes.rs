//! From one generation of an elastic group to the next, as its driver takes part: programs for nodes that join, channels to the members.

use std::collections::BTreeMap;
use std::time::Duration;

use std::sync::Arc;

use futures_util::future::{BoxFuture, join_all};
use futures_util::stream::{FuturesOrdered, StreamExt as _};
use kolo_transport::ids::Generation;
use kolo_transport::wire::{GenerationTable, PlacedNode};
use tokio::task::JoinSet;

use super::nodes::{self, Channels, Nodes, is_stale};
use super::output::Printing;
use crate::call::{Generations, InFlight, Listener as _, Recovery};

/// How long to wait before a node that can't be reached is tried again.
const AGAIN: Duration = Duration::from_millis(200);

/// How long after a node was not reached the head is told. A loss is known by then, if it is one.
const EXPLAINED: Duration = Duration::from_secs(2);

/// See the [module](self). Dropping it ends all channels.
pub(super) struct Changes {
    nodes: Nodes,
    generations: Arc<Generations>,
    in_flight: InFlight,
    /// Of each generation that still has calls, and of those that span generations.
    tasks: BTreeMap<Generation, JoinSet<()>>,
    _timer: JoinSet<()>,
    /// Programs on their way to nodes that have joined. The head wants its answers in order.
    preparing: FuturesOrdered<BoxFuture<'static, ()>>,
    /// The newest generation, while channels to its nodes are being opened.
    opening: Option<BoxFuture<'static, (Option<Channels>, Vec<PlacedNode>)>>,
    /// The newest generation, while values of executables are brought there.
    recovering: Option<Recovery>,
    /// A generation with a node that is not reached, and why, until the head is told.
    cut_off: Option<BoxFuture<'static, (Generation, String)>>,
}

/// Something that the job's task may have to see to.
pub(super) enum Change {
    /// Nodes that have joined hold the program, as far as possible: the head is to be told.
    Prepared,
    /// A generation can't be called, for a reason in words: the head is to be told.
    Unreachable(Generation, String),
    /// A generation has ended between two calls: the head is to be told.
    Holding(Generation),
    /// Anything else has been seen to.
    Done,
}

impl Changes {
    pub(super) fn new(
        nodes: Nodes,
        generations: Arc<Generations>,
        in_flight: InFlight,
        first: JoinSet<()>,
    ) -> Self {
        let mut timer = JoinSet::new();
        timer.spawn(Arc::clone(&generations).keep_time());
        Self {
            nodes,
            in_flight,
            tasks: BTreeMap::from([(generations.now().generation(), first)]),
            generations,
            _timer: timer,
            preparing: FuturesOrdered::new(),
            opening: None,
            recovering: None,
            cut_off: None,
        }
    }

    /// Nodes have joined the job.
    pub(super) fn placed(&mut self, joined: Vec<PlacedNode>) {
        let nodes = self.nodes.clone();
        self.preparing.push_back(Box::pin(async move {
            let prepare = joined.iter().map(|node| async {
                // The node refuses to start workers without the program, and the head hears why.
                if let Err(error) = nodes.prepare(node).await {
                    tracing::warn!(node = %node.node, %error, "a node that joins has no program");
                }
            });
            join_all(prepare).await;
        }));
    }

    /// All members of a generation have taken it. An earlier one whose channels are not open yet is left out.
    pub(super) fn generation(&mut self, table: GenerationTable, placed: Vec<PlacedNode>) {
        let nodes = self.nodes.clone();
        let clock = nodes.cluster.runtime().clock().clone();
        let generations = Arc::clone(&self.generations);
        self.opening = Some(Box::pin(async move {
            loop {
                match nodes.attach_all(table.clone(), &placed).await {
                    Ok(channels) => return (Some(channels), placed),
                    // The head tells of a later generation, or is about to.
                    Err(error) if is_stale(&error) => return (None, placed),
                    Err(error) => {
                        tracing::warn!(generation = %table.generation, %error, "a generation can't be called yet");
                        let why = format!("its driver can't call it: {error}");
                        generations.note_unreachable(table.generation, why);
                    }
                }
                clock.sleep_until(clock.now() + AGAIN).await;
            }
        }));
    }

    /// A change of a generation waits.
    pub(super) fn hold(&self, generation: Generation) {
        self.generations.hold(generation);
    }

    /// Waits for something to be done. Cancel safe.
    pub(super) async fn next(&mut self, printing: &mut Printing) -> Change {
        let opened = async {
            match &mut self.opening {
                Some(opening) => opening.await,
                None => std::future::pending().await,
            }
        };
        let recovered = async {
            match &mut self.recovering {
                Some(recovery) => recovery.done().await,
                None => std::future::pending().await,
            }
        };
        let (generations, clock) = (&self.generations, self.nodes.cluster.runtime().clock());
        let cut_off = async {
            let told = match &mut self.cut_off {
                Some(told) => told,
                none => {
                    let (found, clock) = (generations.unreachable().await, clock.clone());
                    none.insert(Box::pin(async move {
                        clock.sleep_until(clock.now() + EXPLAINED).await;
                        found
                    }))
                }
            };
            told.await
        };
        tokio::select! {
            (generation, why) = cut_off => {
                self.cut_off = None;
                return Change::Unreachable(generation, why);
            }
            generation = generations.holding() => return Change::Holding(generation),
            Some(()) = self.preparing.next() => return Change::Prepared,
            (channels, placed) = opened => {
                self.opening = None;
                if let Some(channels) = channels {
                    printing.follow(&channels, &placed);
                    self.begin(channels, printing.say());
                }
            }
            goes_on = recovered => {
                if let Some(recovery) = self.recovering.take()
                    && goes_on
                {
                    self.generations.publish(recovery.group());
                }
            }
            retired = self.generations.retired() => {
                for generation in retired {
                    self.tasks.remove(&generation);
                }
            }
        }
        Change::Done
    }

    fn begin(&mut self, channels: Channels, say: impl Fn(String) + Send + 'static) {
        let all = Arc::downgrade(&self.generations);
        let (group, replies) = channels.into_group(self.in_flight.clone(), Some(all));
        let table = group.members();
        tracing::debug!(
            job = %table.job,
            generation = %table.generation,
            workers = table.members.len(),
            cause = table.cause,
            "the group has changed"
        );
        // Values that were on their way to the generation before are on their way to this one.
        self.recovering = None;
        let recovery = self.generations.install(group);
        let group = recovery.group();
        let runtime = self.nodes.cluster.runtime();
        let tasks = nodes::serve(runtime, group, replies, say);
        self.tasks.insert(group.generation(), tasks);
        if recovery.is_empty() {
            self.generations.publish(group);
        } else {
            self.recovering = Some(recovery);
        }
    }
}
