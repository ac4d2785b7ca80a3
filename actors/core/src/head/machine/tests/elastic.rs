//! Elastic jobs: workers that do at once what they are told, and how a job changes its members.

mod losses;

use kolo_wire::ids::{Generation, Incarnation, Slot};
use kolo_wire::{Cooldown, Exit, GenerationTable, Handover, HealthCheck, JobInfo, Kept, Member};

use super::*;
use crate::head::job::fixtures::{elastic, failure};

/// A head with nodes whose workers say what workers say.
pub(super) struct Group {
    pub(super) world: World,
    /// Requests of each node that its workers have seen.
    read: BTreeMap<Session, usize>,
    /// The processes of each job.
    live: BTreeMap<(Session, JobId), BTreeSet<(Slot, Incarnation)>>,
    /// Nodes of which nothing reaches the head.
    pub(super) cut: BTreeSet<Session>,
    commits: u64,
}

impl Group {
    pub(super) fn new() -> Self {
        Self {
            world: World::new(),
            read: BTreeMap::new(),
            live: BTreeMap::new(),
            cut: BTreeSet::new(),
            commits: 0,
        }
    }

    /// A node with so many CPUs registers.
    pub(super) fn node(&mut self, node: u64, cpus: u64) -> Session {
        let session = self.world.node(node, cpus, good);
        self.run();
        session
    }

    pub(super) fn submit(&mut self, job: u64, min: u32, max: u32) -> JobId {
        self.submit_as(job, min, max, |_| ())
    }

    pub(super) fn submit_as(
        &mut self,
        job: u64,
        min: u32,
        max: u32,
        change: impl FnOnce(&mut JobSpec),
    ) -> JobId {
        let job = self.world.submit_as(job, |spec| {
            spec.placement = Placement::Pack { workers: max };
            spec.elastic = Some(Box::new(elastic(min, max)));
            change(spec);
        });
        self.run();
        job
    }

    pub(super) fn pass(&mut self, seconds: u64) {
        // In small steps: workers answer at once.
        for _ in 0..seconds * 10 {
            self.world.pass(Duration::from_millis(100));
            self.beat();
            self.run();
        }
    }

    fn beat(&mut self) {
        let cut = &self.cut;
        let peers = self.world.peers.iter();
        let there = peers.filter(|(node, peer)| peer.closed.is_none() && !cut.contains(node));
        for node in there.map(|(node, _)| *node).skip(1).collect::<Vec<_>>() {
            self.world
                .request(Caller::Peer(node), HeadRequest::Heartbeats);
        }
    }

    /// Workers do what their nodes were told, until nothing is left to do.
    pub(super) fn run(&mut self) {
        while let Some((node, request)) = self.next() {
            let events = self.events(node, request);
            if !events.is_empty() && !self.cut.contains(&node) {
                self.world
                    .request(Caller::Peer(node), HeadRequest::Events(events));
            }
        }
    }

    fn next(&mut self) -> Option<(Session, NodeRequest)> {
        let peers = self.world.peers.iter();
        let (node, request) = peers.into_iter().find_map(|(node, peer)| {
            let read = self.read.get(node).copied().unwrap_or_default();
            Some((*node, peer.seen.get(read)?.clone()))
        })?;
        *self.read.entry(node).or_default() += 1;
        Some((node, request))
    }

    fn events(&mut self, node: Session, request: NodeRequest) -> Vec<NodeEvent> {
        match request {
            NodeRequest::Start(start) if start.is_elastic() => {
                let job = start.job;
                let live = self.live.entry((node, job)).or_default();
                let mut events = Vec::new();
                assert_eq!(start.env["WORLD_SIZE"], start.world_size.to_string());
                for slot in start.slots {
                    assert!(slot.member.rank.0 < start.world_size, "{slot:?}");
                    let (slot, incarnation) = (slot.member.slot, slot.member.incarnation);
                    live.retain(|(other, _)| *other != slot);
                    live.insert((slot, incarnation));
                    events.push(ready_again(job, slot, incarnation));
                }
                events
            }
            NodeRequest::Membership(table) => {
                let live = self.live.get(&(node, table.job)).into_iter().flatten();
                live.map(|(slot, incarnation)| NodeEvent::Taken {
                    job: table.job,
                    slot: *slot,
                    incarnation: *incarnation,
                    generation: table.generation,
                })
                .collect()
            }
            NodeRequest::StopWorker {
                job,
                slot,
                incarnation,
                ..
            } => self.end(node, job, (slot, incarnation), Exit::Signal(15), true),
            NodeRequest::Stop { job, .. } | NodeRequest::Kill { job } => {
                self.live.remove(&(node, job));
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    fn end(
        &mut self,
        node: Session,
        job: JobId,
        process: (Slot, Incarnation),
        exit: Exit,
        expected: bool,
    ) -> Vec<NodeEvent> {
        let live = self.live.get_mut(&(node, job));
        if !live.is_some_and(|live| live.remove(&process)) {
            return Vec::new();
        }
        vec![NodeEvent::WorkerExited {
            job,
            slot: process.0,
            incarnation: process.1,
            generation: Generation(0),
            failure: failure(exit),
            expected,
        }]
    }

    /// The first worker of a job on a node is killed.
    pub(super) fn kill(&mut self, node: Session, job: JobId) {
        let first = *self.live[&(node, job)].first().unwrap();
        let events = self.end(node, job, first, Exit::Signal(9), false);
        self.world.report(node, events);
        self.run();
    }

    /// The members of a job's generation hold at a commit.
    pub(super) fn commit(&mut self, job: JobId) {
        self.members_say(job, |job, slot, incarnation, generation, commit| {
            NodeEvent::Holding {
                job,
                slot,
                incarnation,
                generation,
                commit,
                failed: None,
            }
        });
    }

    /// The members of a job's generation have made a commit, and go on.
    fn committed(&mut self, job: JobId) {
        self.members_say(job, |job, slot, incarnation, generation, commit| {
            NodeEvent::Committed {
                job,
                slot,
                incarnation,
                generation,
                commit,
                kept: Kept::Made,
            }
        });
    }

    fn members_say(
        &mut self,
        job: JobId,
        event: impl Fn(JobId, Slot, Incarnation, Generation, u64) -> NodeEvent,
    ) {
        self.commits += 1;
        let table = self.table(job);
        let nodes: Vec<Session> = self.world.peers.keys().copied().collect();
        for node in nodes {
            let live = self.live.get(&(node, job)).cloned().unwrap_or_default();
            let is_member = |process: &&(Slot, Incarnation)| {
                let mut members = table.members.iter();
                members.any(|member| (member.slot, member.incarnation) == **process)
            };
            let members = live.iter().filter(is_member);
            let events = members.map(|(slot, incarnation)| {
                event(job, *slot, *incarnation, table.generation, self.commits)
            });
            let events: Vec<_> = events.collect();
            if !events.is_empty() && !self.cut.contains(&node) {
                self.world.report(node, events);
            }
        }
        self.run();
    }

    /// The generation that the driver was told last.
    pub(super) fn table(&self, job: JobId) -> GenerationTable {
        let told = self.world.told[&job].iter().rev();
        let mut tables = told.filter_map(|event| match event {
            JobEvent::Generation { table, .. } => Some(table.clone()),
            _ => None,
        });
        tables.next().expect("a generation is active")
    }

    /// Its number, and how many members each node has.
    pub(super) fn members(&self, job: JobId) -> (u64, Vec<(u64, usize)>) {
        let table = self.table(job);
        let mut nodes = BTreeMap::<u64, usize>::new();
        for member in &table.members {
            *nodes.entry(member.node.0).or_default() += 1;
        }
        (table.generation.0, nodes.into_iter().collect())
    }

    /// `slot.incarnation` of the members, in rank order. Checks R-1.
    fn ranks(&self, job: JobId) -> Vec<String> {
        let members = self.table(job).members;
        for (rank, member) in (0..).zip(&members) {
            assert_eq!(member.rank.0, rank, "R-1");
        }
        let name = |member: &Member| format!("{}.{}", member.slot, member.incarnation);
        members.iter().map(name).collect()
    }

    fn info(&mut self, job: JobId) -> JobInfo {
        match self.world.request(HTTP, HeadRequest::Job { job }) {
            HeadReply::Job(info) => info,
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn reservations(&self, node: Session) -> usize {
        let is = |request: &_| matches!(request, NodeRequest::Reserve { .. });
        self.world.seen(node, is)
    }

    pub(super) fn is_live(&self, node: Session, job: JobId) -> bool {
        let live = self.live.get(&(node, job));
        live.is_some_and(|live| !live.is_empty())
    }
}

fn ready_again(job: JobId, slot: Slot, incarnation: Incarnation) -> NodeEvent {
    NodeEvent::WorkerReady {
        job,
        slot,
        incarnation,
        address: Some(format!("10.0.0.9:{}", 5000 + slot.0).parse().unwrap()),
    }
}

#[test]
fn a_job_starts_with_what_there_is_and_grows_with_the_cluster() {
    let mut group = Group::new();
    group.node(1, 1);
    let job = group.submit(1, 1, 3);
    assert_eq!(group.members(job), (1, vec![(1, 1)]));
    let second = group.node(2, 4);
    assert_eq!(group.reservations(second), 1);
    assert_eq!(group.world.free_cpus(), [0, 2]);
    group.commit(job);
    assert_eq!(group.members(job), (2, vec![(1, 1), (2, 2)]));
    // It has all that it can use.
    let third = group.node(3, 4);
    assert_eq!(group.reservations(third), 0);
    let info = group.info(job);
    assert_eq!(
        (info.state, info.generation),
        (JobState::Healthy, Generation(2))
    );
    let why = info.membership.unwrap();
    assert_eq!(why.cause.as_deref(), Some("1 -> 3 members: 2 new"));
    assert_eq!(why.decision, "members: 3 of at most 3");
    group.world.frame(job, SubmitFrame::Done);
    assert_eq!(group.world.end(job).unwrap().0, JobState::Succeeded);
    assert_eq!(group.world.free_cpus(), [1, 4, 4]);
}

#[test]
fn a_group_grows_between_two_calls_of_its_driver() {
    let mut group = Group::new();
    group.node(1, 1);
    let job = group.submit(1, 1, 3);
    group.node(2, 4);
    let holds = |group: &Group| {
        let told = group.world.told[&job].iter();
        told.filter(|event| matches!(event, JobEvent::Hold { generation } if generation.0 == 1))
            .count()
    };
    assert_eq!(holds(&group), 1);
    // The members are asked again, and the driver is not: its stream loses nothing.
    group.pass(5);
    assert_eq!((group.members(job).0, holds(&group)), (1, 1));
    let generation = Generation(1);
    for _ in 0..2 {
        group.world.frame(job, SubmitFrame::Holding { generation });
        group.run();
        assert_eq!(group.members(job), (2, vec![(1, 1), (2, 2)]));
    }
}

#[test]
fn a_job_waits_for_room_as_long_as_for_its_start() {
    let mut group = Group::new();
    let job = group.submit(1, 2, 4);
    group.node(1, 1);
    group.pass(29);
    assert!(group.world.end(job).is_none());
    group.pass(2);
    let refusal = group.world.refusal(job);
    assert_eq!(refusal.kind, RefusalKind::Timeout);
    // The fewest workers of the job count here, not the most.
    let missing = "requested 2 workers with 1 cpu each: room for 1 on 1 node\n  host1";
    assert!(
        refusal.message.contains("min_workers") && refusal.message.contains(missing),
        "{refusal}"
    );
    assert_eq!(group.world.free_cpus(), [1]);
    // With a node in time it starts.
    let job = group.submit(2, 2, 2);
    group.node(2, 1);
    assert_eq!(group.members(job), (1, vec![(1, 1), (2, 1)]));
}

#[test]
fn what_a_job_gives_back_is_for_others() {
    let mut group = Group::new();
    let first = group.node(1, 2);
    group.node(2, 1);
    let cooldown = Some(Cooldown {
        least_ms: 3_600_000,
        most_ms: 3_600_000,
    });
    let job = group.submit_as(1, 2, 2, |spec| {
        spec.elastic.as_mut().unwrap().cooldown = cooldown;
        spec.start_timeout_ms = 600_000;
    });
    let other = group.submit(2, 1, 1);
    let waits = group.submit_as(3, 1, 1, |spec| spec.start_timeout_ms = 600_000);
    assert_eq!(group.world.free_cpus(), [0, 0]);
    // A host that cools down gets nothing of the job, and there is no other one.
    group.kill(first, job);
    assert_eq!(group.world.free_cpus(), [0, 0]);
    // It moves its seat when it can; the seat's old place is for the job that waits.
    group.world.frame(other, SubmitFrame::Done);
    group.run();
    assert_eq!(group.members(job), (2, vec![(1, 1), (2, 1)]));
    assert_eq!(group.members(waits), (1, vec![(1, 1)]));
    assert_eq!(group.world.free_cpus(), [0, 0]);
}

#[test]
fn a_node_that_is_not_healthy_is_left_out_until_it_has_cooled_down() {
    let sick = |request: &NodeRequest| match good(request) {
        Some(Reply::Answer(NodeReply::Reserved { .. })) => {
            let problem = Refusal::new(RefusalKind::Unplaceable, "no GPU");
            Some(Reply::Answer(NodeReply::Reserved {
                has_program: true,
                free_port: 1,
                problem: Some(problem),
            }))
        }
        other => other,
    };
    let mut group = Group::new();
    let checked = std::rc::Rc::new(std::cell::Cell::new(0));
    let count = checked.clone();
    let first = group.world.node(1, 2, move |request| {
        let is_first =
            matches!(request, NodeRequest::Reserve { .. }) && count.replace(count.get() + 1) == 0;
        if is_first {
            sick(request)
        } else {
            good(request)
        }
    });
    let second = group.node(2, 1);
    let job = group.submit_as(1, 1, 2, |spec| {
        let elastic = spec.elastic.as_mut().unwrap();
        // No worker has failed.
        elastic.restarts_without_progress = 0;
        elastic.health_check = Some(HealthCheck {
            program: "check".to_owned(),
            args: Vec::new(),
            timeout_ms: 2000,
        });
    });
    // The other node is asked at once, and the first one is not asked again.
    assert_eq!(group.members(job), (1, vec![(2, 1)]));
    assert_eq!((checked.get(), group.is_live(first, job)), (1, false));
    let left_out = group.info(job).membership.unwrap().left_out;
    assert_eq!(left_out.len(), 1);
    let host = &left_out[0];
    assert_eq!((&*host.hostname, &*host.why), ("host1", "no GPU"));
    assert!((20_000..=30_000).contains(&host.for_ms), "{host:?}");
    group.pass(15);
    assert_eq!(checked.get(), 1);
    group.pass(16);
    assert_eq!(checked.get(), 2);
    group.commit(job);
    assert_eq!(group.members(job), (2, vec![(1, 1), (2, 1)]));
    assert_eq!(group.info(job).membership.unwrap().left_out, []);
    assert!(group.is_live(second, job));
}

#[test]
fn a_job_without_a_healthy_node_says_why() {
    let mut group = Group::new();
    let late = |request: &NodeRequest| match request {
        NodeRequest::Reserve { .. } => None,
        other => good(other),
    };
    group.world.node(1, 1, late);
    let job = group.submit_as(1, 1, 1, |spec| {
        spec.elastic.as_mut().unwrap().health_check = Some(HealthCheck {
            program: "check".to_owned(),
            args: Vec::new(),
            timeout_ms: 20_000,
        });
    });
    // The answer is waited for as long as the check may take.
    group.pass(19);
    let open = group.world.open.iter().copied().next().unwrap();
    let problem = Some(Refusal::new(RefusalKind::Unplaceable, "no GPU"));
    let reply = Reply::Answer(NodeReply::Reserved {
        has_program: true,
        free_port: 1,
        problem,
    });
    group.world.open.remove(&open);
    group.world.input(Input::Replied(open, reply));
    group.pass(12);
    let refusal = group.world.refusal(job);
    let why = "host1 is left out: no GPU";
    assert!(refusal.message.contains(why), "{refusal}");
    assert_eq!(group.world.free_cpus(), [1]);
}

#[test]
fn hosts_take_part_as_a_whole_on_nodes_of_their_own() {
    let mut group = Group::new();
    let first = group.node(1, 6);
    let job = group.submit_as(1, 4, 6, |spec| {
        spec.placement = Placement::Spread { hosts: 3, slots: 2 };
    });
    // There is room for all slots, and not on two hosts.
    group.pass(5);
    group.node(2, 1);
    assert_eq!(group.world.free_cpus(), [4, 1]);
    group.node(3, 2);
    assert_eq!(group.members(job), (1, vec![(1, 2), (3, 2)]));
    assert_eq!(group.world.free_cpus(), [4, 1, 0]);
    // Replaced where it was.
    group.kill(first, job);
    assert_eq!(group.members(job), (2, vec![(1, 2), (3, 2)]));
    group.node(4, 3);
    group.commit(job);
    assert_eq!(group.members(job), (3, vec![(1, 2), (3, 2), (4, 2)]));
    assert_eq!(group.world.free_cpus(), [4, 1, 0, 1]);
    let short = group.submit_as(2, 2, 2, |spec| {
        spec.placement = Placement::Spread { hosts: 1, slots: 2 };
        spec.start_timeout_ms = 1000;
    });
    assert_eq!(group.members(short), (1, vec![(1, 2)]));
}

#[test]
fn r2_survivors_of_a_kill_go_on_in_their_order_and_its_successor_is_given_the_state() {
    let mut group = Group::new();
    // A process for each pid, as it were.
    let started = |request: &NodeRequest| match request {
        NodeRequest::Start(start) => {
            let members = start.slots.iter().map(|slot| &slot.member);
            let pid = |member: &Member| {
                let pid = member.slot.0 * 100 + member.incarnation.0 as u32;
                (member.slot, pid)
            };
            let pids = members.map(pid).collect();
            Some(Reply::Answer(NodeReply::Started { pids }))
        }
        other => good(other),
    };
    let nodes = [1, 2].map(|node| group.world.node(node, 2, started));
    let job = group.submit(1, 2, 4);
    group.committed(job);
    let seen = group.world.peers[&nodes[1]].seen.len();
    group.kill(nodes[0], job);
    // In one step: nobody waits for the successor.
    let news: Vec<u64> = group.world.peers[&nodes[1]].seen[seen..]
        .iter()
        .map(|request| match request {
            NodeRequest::Revoke { generation, .. } => generation.0,
            NodeRequest::Membership(table) => 10 * table.generation.0,
            NodeRequest::Hold { generation, .. } => 100 * generation.0,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(news[..2], [1, 20], "revoked, and followed by the next one");
    assert_eq!(group.ranks(job), ["1.1", "2.1", "3.1"]);
    let table = group.table(job);
    assert!(table.cause.contains("rank 0"), "{}", table.cause);
    assert_eq!(table.handover, Handover::None);
    let local = table.members.iter().map(|member| member.local_size);
    assert_eq!(local.collect::<Vec<_>>(), [1, 2, 2]);
    let workers = group.info(job).workers;
    let pid = |slot: u32| workers.iter().find(|it| it.member.slot == Slot(slot));
    assert_eq!(
        [0, 1].map(|slot| pid(slot).unwrap().pid),
        [2, 101],
        "the second process of the slot is the last"
    );

    group.pass(2);
    group.commit(job);
    assert_eq!(group.ranks(job), ["1.1", "2.1", "3.1", "0.2"]);
    let table = group.table(job);
    assert_eq!(table.handover, Handover::Sync);
    assert_eq!(table.members[3].address.unwrap().port(), 5000);

    // A driver that has what it wanted ends the job well, whatever was lost.
    group.kill(nodes[1], job);
    group.world.frame(job, SubmitFrame::Done);
    assert_eq!(group.world.end(job), Some((JobState::Succeeded, None)));
}
