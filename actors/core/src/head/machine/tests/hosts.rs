//! Jobs whose driver names the hosts that they may use. Tests that have a model in Horovod's have its name.

use kolo_wire::JobHost;

use super::drain::{drain, undrain};
use super::elastic::Group;
use super::*;

fn listed(hosts: &[(u64, u32)]) -> Vec<JobHost> {
    let host = |(node, slots): &(u64, u32)| JobHost {
        name: format!("host{node}"),
        slots: *slots,
    };
    hosts.iter().map(host).collect()
}

impl Group {
    fn submit_on(&mut self, min: u32, max: u32, hosts: &[(u64, u32)]) -> JobId {
        self.submit_as(1, min, max, |spec| {
            if let Some(elastic) = &mut spec.elastic {
                elastic.hosts = Some(listed(hosts));
            }
        })
    }

    /// The driver names the hosts.
    fn name_hosts(&mut self, job: JobId, hosts: &[(u64, u32)]) {
        self.world.frame(job, SubmitFrame::Hosts(listed(hosts)));
        self.run();
        self.pass(2);
    }

    /// The driver names the hosts, and the workers commit.
    fn list(&mut self, job: JobId, hosts: &[(u64, u32)]) {
        self.name_hosts(job, hosts);
        self.commit(job);
    }
}

#[test]
fn rank_and_size_with_host_added() {
    let mut group = Group::new();
    for node in 1..=3 {
        group.node(node, 4);
    }
    let job = group.submit_on(2, 8, &[(2, 2)]);
    assert_eq!(
        group.members(job),
        (1, vec![(2, 2)]),
        "no other host, and no other slot"
    );
    group.list(job, &[(2, 2), (3, 2)]);
    assert_eq!(group.members(job), (2, vec![(2, 2), (3, 2)]));
    let ranks: Vec<u64> = group
        .table(job)
        .members
        .iter()
        .map(|member| member.node.0)
        .collect();
    assert_eq!(ranks, [2, 2, 3, 3], "who was there keeps the low ranks");
    // A host that stands first now comes behind those that were there.
    group.list(job, &[(1, 1), (2, 2), (3, 2)]);
    let ranks: Vec<u64> = group
        .table(job)
        .members
        .iter()
        .map(|member| member.node.0)
        .collect();
    assert_eq!(ranks, [2, 2, 3, 3, 1]);
    // The same list again is no change.
    group.name_hosts(job, &[(1, 1), (2, 2), (3, 2)]);
    assert_eq!(group.members(job).0, 3);
    assert_eq!(group.world.free_cpus(), [3, 2, 2]);
}

#[test]
fn a_host_that_goes_from_the_list_is_left_and_not_drained() {
    let mut group = Group::new();
    let first = group.node(1, 2);
    group.node(2, 2);
    let job = group.submit_on(2, 4, &[(1, 2), (2, 2)]);
    assert_eq!(group.members(job), (1, vec![(1, 2), (2, 2)]));
    group.list(job, &[(2, 2)]);
    assert_eq!(group.members(job), (2, vec![(2, 2)]));
    assert_eq!(
        (group.world.stops(first, job), group.is_live(first, job)),
        (1, false)
    );
    // Other jobs use it.
    let other = group.world.submit(2, 2);
    assert!(group.world.is_healthy(other) || group.reservations(first) == 2);
    // A node that is lost and comes again is still not on the list.
    group.world.disconnect(first);
    group.node(1, 2);
    group.pass(5);
    assert_eq!(group.members(job), (2, vec![(2, 2)]));
    group.list(job, &[(1, 2), (2, 2)]);
    assert_eq!(group.members(job), (3, vec![(1, 2), (2, 2)]));
}

#[test]
fn wait_for_available_slots() {
    let mut group = Group::new();
    for node in 1..=2 {
        group.node(node, 4);
    }
    // A host without slots is listed and not used, and so is one that is not there.
    let job = group.submit_on(2, 4, &[(1, 0), (9, 4)]);
    assert_eq!(group.world.end(job), None);
    assert_eq!(group.world.free_cpus(), [4, 4]);
    group.name_hosts(job, &[(1, 1), (9, 4)]);
    assert_eq!(group.world.free_cpus(), [3, 4]);
    group.node(9, 1);
    group.pass(2);
    assert_eq!(group.members(job), (1, vec![(1, 1), (9, 1)]));
}

#[test]
fn a_host_with_fewer_slots_is_left_and_comes_again_with_these() {
    let mut group = Group::new();
    group.node(1, 4);
    group.node(2, 4);
    let job = group.submit_on(2, 6, &[(1, 3), (2, 3)]);
    assert_eq!(group.members(job), (1, vec![(1, 3), (2, 3)]));
    group.list(job, &[(1, 1), (2, 3)]);
    group.pass(2);
    group.commit(job);
    let (_, members) = group.members(job);
    assert_eq!(members, [(1, 1), (2, 3)]);
    assert_eq!(group.world.free_cpus(), [3, 1]);
}

#[test]
fn a_drain_counts_whatever_the_list_says_and_the_list_when_the_drain_is_over() {
    let mut group = Group::new();
    group.node(1, 1);
    let second = group.node(2, 1);
    let job = group.submit_on(2, 2, &[(1, 1), (2, 1)]);
    group.world.request(HTTP, drain("host2", 600));
    group.list(job, &[(1, 1)]);
    group.list(job, &[(1, 1), (2, 1)]);
    assert!(group.is_live(second, job), "it can't be spared");
    group.node(3, 1);
    group.list(job, &[(1, 1), (2, 1), (3, 1)]);
    assert_eq!(
        group.members(job).1,
        [(1, 1), (3, 1)],
        "it was drained all the time"
    );
    group.world.request(HTTP, undrain("host2"));
    group.world.request(HTTP, drain("host3", 600));
    group.list(job, &[(1, 1), (3, 1)]);
    // No longer drained, and off the list: it is not to stay.
    group.world.request(HTTP, undrain("host3"));
    group.list(job, &[(1, 1)]);
    assert_eq!(group.members(job).1, [(1, 1), (3, 1)], "nobody replaces it");
    group.list(job, &[(1, 1), (2, 1)]);
    assert_eq!(group.members(job).1, [(1, 1), (2, 1)]);
}

#[test]
fn a_dry_run_shows_what_the_job_would_begin_with() {
    let mut world = World::new();
    let nodes: Vec<Session> = (1..=3).map(|node| world.node(node, 2, good)).collect();
    let mut dry_run = |job, min, hosts: Option<&[(u64, u32)]>| {
        let mut limits = crate::head::job::fixtures::elastic(min, 8);
        limits.hosts = hosts.map(listed);
        let spec = JobSpec {
            elastic: Some(Box::new(limits)),
            ..spec(Placement::Pack { workers: 8 })
        };
        let before: Vec<usize> = nodes
            .iter()
            .map(|node| world.seen(*node, |_| true))
            .collect();
        let job = JobId(job);
        world.input(Input::Submit {
            session: Session(1),
            job,
            spec: Box::new(spec),
            dry_run: true,
        });
        let started = nodes
            .iter()
            .map(|node| world.seen(*node, |request| matches!(request, NodeRequest::Start(_))));
        assert_eq!(started.sum::<usize>(), 0);
        assert_eq!(world.free_cpus(), [2, 2, 2]);
        let asked = nodes
            .iter()
            .zip(before)
            .map(|(node, before)| world.seen(*node, |_| true) > before);
        (world.end(job).unwrap().1, asked.collect::<Vec<_>>())
    };
    assert_eq!(dry_run(1, 1, None), (None, vec![true; 3]));
    assert_eq!(dry_run(2, 6, None), (None, vec![true; 3]));
    let some = dry_run(3, 3, Some(&[(3, 2), (1, 1)]));
    assert_eq!(some, (None, vec![true, false, true]));
    let (refusal, asked) = dry_run(4, 7, None);
    let refusal = refusal.unwrap();
    assert_eq!(
        (refusal.kind, asked),
        (RefusalKind::Unplaceable, vec![false; 3])
    );
    assert!(
        refusal.message.starts_with("requested 7 workers"),
        "{refusal:?}"
    );
    // They are no jobs of the past.
    let jobs = world.request(HTTP, HeadRequest::Jobs);
    assert_eq!(jobs, HeadReply::Jobs(Vec::new()));
}

#[test]
fn names_are_hostnames_or_ids_and_lists_that_are_none_change_nothing() {
    let mut group = Group::new();
    group.node(1, 1);
    let job = group.submit_on(1, 1, &[]);
    let list = |name: &str| {
        SubmitFrame::Hosts(vec![JobHost {
            name: name.to_owned(),
            slots: 1,
        }])
    };
    group.world.frame(job, list(&"x".repeat(254)));
    group.run();
    assert_eq!(group.world.free_cpus(), [1]);
    for name in ["HOST1.", &NodeId(1).to_string()] {
        let mut group = Group::new();
        group.node(1, 1);
        let job = group.submit_on(1, 1, &[]);
        group.world.frame(job, list(name));
        group.run();
        assert_eq!(group.members(job).1, [(1, 1)], "{name}");
    }
    let refused = group.world.submit_as(7, |spec| {
        let mut limits = crate::head::job::fixtures::elastic(1, 1);
        limits.hosts = Some(listed(&vec![(1, 1); 5000]));
        spec.elastic = Some(Box::new(limits));
    });
    let refusal = group.world.refusal(refused);
    assert!(
        refusal.message.contains("5000 hosts; allowed are 4096"),
        "{refusal:?}"
    );
    // A job that never changes has no such list.
    let fixed = group.world.submit(8, 1);
    group.world.frame(fixed, list("host2"));
    assert!(group.world.end(fixed).is_none());
}
