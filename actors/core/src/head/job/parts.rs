//! The nodes of a job: what each holds of it, and what is under way there.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::{Deref, DerefMut};

use kolo_wire::ids::{Generation, NodeId, Slot};
use kolo_wire::{NodeRequest, Refusal, WorkerSignal};

use super::messages::Site;
use crate::membership::Process;

/// What of the job is on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hold {
    /// Reserve was sent.
    Reserving,
    /// Resources are held.
    Reserved,
    /// Start was sent.
    Starting,
    /// Workers are or were there.
    Running,
    /// Release or stop was sent.
    Undoing,
    /// Nothing, as the node says.
    Free,
    /// Unknown, and not our concern any more.
    Abandoned,
    /// Unknown: the node is lost.
    Lost,
}

impl Hold {
    pub(super) fn is_over(self) -> bool {
        matches!(self, Self::Free | Self::Abandoned | Self::Lost)
    }
}

/// Something to deliver to a node.
#[derive(Debug, PartialEq)]
pub(super) enum Push {
    /// A generation.
    Membership(Generation),
    /// Anything else.
    Order(Box<NodeRequest>),
}

impl Push {
    pub(super) fn is_revocation(&self) -> bool {
        matches!(self, Self::Order(request) if matches!(**request, NodeRequest::Revoke { .. }))
    }

    pub(super) fn is_start(&self) -> bool {
        matches!(self, Self::Order(request) if matches!(**request, NodeRequest::Start(_)))
    }
}

impl From<NodeRequest> for Push {
    fn from(request: NodeRequest) -> Self {
        Self::Order(Box::new(request))
    }
}

/// What is delivered to one node, in order. Each message is made when its turn comes: those of all nodes at once would be too
/// much.
#[derive(Debug, Default)]
pub(super) struct Pushes {
    pub(super) queue: VecDeque<Push>,
    /// The last generation that was sent.
    pub(super) sent: Option<Generation>,
}

impl Pushes {
    /// Forgets a generation that the node has not been sent. False if it was, or never is to be.
    pub(super) fn take_back(&mut self, generation: Generation) -> bool {
        let before = self.queue.len();
        if self.sent != Some(generation) {
            (self.queue).retain(|push| *push != Push::Membership(generation));
        }
        self.queue.len() < before
    }
}

/// Signals on their way to a node: one at a time is pushed, and of those that wait there is one of each kind at most, as
/// of signals that are pending for a process.
#[derive(Debug, Default)]
pub(super) struct Signals {
    pub(super) under_way: bool,
    waiting: Vec<WorkerSignal>,
}

impl Signals {
    pub(super) fn add(&mut self, signal: WorkerSignal) {
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

    pub(super) fn next(&mut self) -> Option<WorkerSignal> {
        if self.under_way || self.waiting.is_empty() {
            return None;
        }
        self.under_way = true;
        Some(self.waiting.remove(0))
    }
}

/// What is under way between an elastic job and a node.
#[derive(Debug, Default)]
pub(super) struct Flow {
    /// Seats that are given to the node, and about which membership has not heard yet.
    pub(super) asking: Vec<Slot>,
    /// Processes that are to be started.
    pub(super) queue: Vec<Process>,
    /// The how-manieth word of the driver says that the node has the program.
    pub(super) program: u64,
    /// A request is under way whose answer is still to come, though the node was lost.
    pub(super) is_owed: bool,
}

/// A node of a job.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) site: Site,
    /// The seats that the node holds.
    pub(super) slots: Vec<Slot>,
    pub(super) hold: Hold,
    /// Start was sent, so release is not enough.
    pub(super) started: bool,
    /// Processes in the request to start that is under way.
    pub(super) starting: Vec<Process>,
    pub(super) has_program: bool,
    pub(super) free_port: u16,
    pub(super) has_membership: bool,
    /// Why an installed program can't run there.
    pub(super) problem: Option<Refusal>,
    pub(super) signals: Signals,
    /// What is delivered to it.
    pub(super) pushes: Pushes,
    /// Of an elastic job: what is under way.
    pub(super) flow: Flow,
}

impl Part {
    /// The reservation is sent next.
    pub(super) fn new(site: Site) -> Self {
        Self {
            site,
            slots: Vec::new(),
            hold: Hold::Reserving,
            started: false,
            starting: Vec::new(),
            has_program: false,
            free_port: 0,
            has_membership: false,
            problem: None,
            signals: Signals::default(),
            pushes: Pushes::default(),
            flow: Flow::default(),
        }
    }

    /// The host and the id, for messages.
    pub(super) fn name(&self) -> String {
        format!("{} ({})", self.site.hostname, self.site.node)
    }
}

/// The nodes of a job. Those of an elastic job are looked at again where something has happened.
#[derive(Debug, Default)]
pub(super) struct Parts {
    list: Vec<Part>,
    by_node: BTreeMap<NodeId, usize>,
    /// Nodes where a seat or a process may come further now.
    pub(super) pending: BTreeSet<NodeId>,
    /// Nodes where something was given up, so that perhaps nothing is left.
    pub(super) touched: BTreeSet<NodeId>,
    /// Nodes may be over, and are to be forgotten.
    has_over: bool,
    /// Signals that were pushed.
    pub(super) signals: u64,
}

impl Deref for Parts {
    type Target = [Part];

    fn deref(&self) -> &[Part] {
        &self.list
    }
}

impl DerefMut for Parts {
    fn deref_mut(&mut self) -> &mut [Part] {
        &mut self.list
    }
}

impl Parts {
    pub(super) fn find(&self, node: NodeId) -> Option<usize> {
        self.by_node.get(&node).copied()
    }

    /// The node, if it is not over.
    pub(super) fn there(&self, node: NodeId) -> Option<usize> {
        self.find(node)
            .filter(|part| !self.list[*part].hold.is_over())
    }

    /// One more node, or one in a later stay. Its index.
    pub(super) fn add(&mut self, part: Part) -> usize {
        let node = part.site.node;
        if let Some(known) = self.find(node) {
            self.list[known] = part;
            return known;
        }
        let index = self.list.len();
        self.by_node.insert(node, index);
        self.list.push(part);
        index
    }

    /// Nothing of the job is on the node any more, or nobody knows.
    pub(super) fn end(&mut self, part: usize, hold: Hold) {
        self.list[part].hold = hold;
        self.has_over = true;
    }

    /// The last answer of a node that is over has come.
    pub(super) fn mark_over(&mut self) {
        self.has_over = true;
    }

    pub(super) fn pend(&mut self, node: NodeId) {
        self.pending.insert(node);
    }

    pub(super) fn touch(&mut self, node: NodeId) {
        self.touched.insert(node);
    }

    /// The nodes where something may come further now.
    pub(super) fn pending(&self) -> Vec<usize> {
        let nodes = self.pending.iter();
        nodes.filter_map(|node| self.find(*node)).collect()
    }

    /// The network is another one: what has waited for it may come further.
    pub(super) fn pend_all(&mut self) {
        let waits = |part: &&Part| !(part.flow.asking.is_empty() && part.flow.queue.is_empty());
        let waiting = self.list.iter().filter(waits);
        self.pending.extend(waiting.map(|part| part.site.node));
    }

    /// A process is to be started on the node.
    pub(super) fn queue(&mut self, part: usize, process: Process) {
        self.list[part].flow.queue.push(process);
        self.pend(self.list[part].site.node);
    }

    /// Forgets nodes that are over, so that a job that lives long does not grow.
    pub(super) fn forget_over(&mut self) {
        let is_over = |part: &Part| part.hold.is_over() && !part.flow.is_owed;
        if !std::mem::take(&mut self.has_over) {
            debug_assert!(!self.list.iter().any(is_over));
            return;
        }
        self.list.retain(|part| !is_over(part));
        let nodes = self.list.iter().map(|part| part.site.node);
        self.by_node = nodes.zip(0..).collect();
    }

    /// The names of those nodes for which this is so.
    pub(super) fn names(&self, is: impl Fn(&Part) -> bool) -> Vec<String> {
        let parts = self.list.iter().filter(|part| is(part));
        parts.map(Part::name).collect()
    }
}
