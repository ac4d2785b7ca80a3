use super::*;

fn job_env() -> JobEnv {
    JobEnv {
        job: JobId(7),
        generation: Generation(1),
        world_size: 6,
        nodes: 3,
        master: "10.0.0.1".parse().unwrap(),
        master_port: 29_500,
        rendezvous: None,
        loopback: false,
        restarts: 0,
        max_restarts: 0,
        hostnames: BTreeMap::new(),
    }
}

fn member_five() -> Member {
    Member {
        rank: Rank(4),
        local_rank: LocalRank(1),
        local_size: 3,
        cross_rank: CrossRank(1),
        cross_size: 2,
        slot: Slot(4),
        node: NodeId(9),
        hostname: "c".to_owned(),
        address: None,
        incarnation: Incarnation::FIRST,
    }
}

fn text(env: &Env) -> String {
    let lines: Vec<_> = env.iter().map(|(k, v)| format!("{k}={v}\n")).collect();
    lines.concat()
}

#[test]
fn the_job_s_variables() {
    assert_eq!(
        text(&job(&job_env())),
        "GROUP_WORLD_SIZE=3\n\
         HOROVOD_CONTROLLER=gloo\n\
         HOROVOD_CPU_OPERATIONS=gloo\n\
         HOROVOD_SIZE=6\n\
         MASTER_ADDR=10.0.0.1\n\
         MASTER_PORT=29500\n\
         ROLE_NAME=default\n\
         ROLE_WORLD_SIZE=6\n\
         TORCHELASTIC_MAX_RESTARTS=0\n\
         TORCHELASTIC_RESTART_COUNT=0\n\
         TORCHELASTIC_RUN_ID=job-0000000000000007\n\
         TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT\n\
         TORCHELASTIC_USE_AGENT_STORE=False\n\
         WORLD_SIZE=6\n"
    );
}

#[test]
fn a_rendezvous_and_the_loopback_are_told_only_if_they_are_there() {
    let mut with = job_env();
    with.rendezvous = Some("10.0.0.2:4711".parse().unwrap());
    with.loopback = true;
    let without = job(&job_env());
    let mut added = job(&with);
    added.retain(|name, _| !without.contains_key(name));
    assert_eq!(
        text(&added),
        "HOROVOD_GLOO_IFACE=lo\n\
         HOROVOD_GLOO_RENDEZVOUS_ADDR=10.0.0.2\n\
         HOROVOD_GLOO_RENDEZVOUS_PORT=4711\n\
         NCCL_SOCKET_IFNAME=lo\n"
    );
}

#[test]
fn a_member_s_variables() {
    assert_eq!(
        text(&member(&job_env(), &member_five(), 2)),
        "GROUP_RANK=2\n\
         HOROVOD_CROSS_RANK=1\n\
         HOROVOD_CROSS_SIZE=2\n\
         HOROVOD_HOSTNAME=c\n\
         HOROVOD_LOCAL_RANK=1\n\
         HOROVOD_LOCAL_SIZE=3\n\
         HOROVOD_RANK=4\n\
         KOLO_CROSS_RANK=1\n\
         KOLO_CROSS_SIZE=2\n\
         KOLO_GENERATION=1\n\
         KOLO_HOSTNAME=c\n\
         KOLO_JOB=job-0000000000000007\n\
         KOLO_LOCAL_RANK=1\n\
         KOLO_LOCAL_SIZE=3\n\
         KOLO_NODE=node-0000000000000009\n\
         KOLO_RANK=4\n\
         KOLO_SIZE=6\n\
         KOLO_SLOT=4\n\
         LOCAL_RANK=1\n\
         LOCAL_WORLD_SIZE=3\n\
         RANK=4\n\
         ROLE_RANK=4\n"
    );
}

/// The variables of torch 2.15's agent, but for those in the table of semantics.md that are not set here.
#[test]
fn a_worker_has_what_torchrun_sets() {
    let mut all = job(&job_env());
    all.extend(member(&job_env(), &member_five(), 2));
    let defaults = defaults(3).iter().map(|(name, _)| *name);
    let set: BTreeSet<&str> = all.keys().map(String::as_str).chain(defaults).collect();
    for name in "LOCAL_RANK RANK GROUP_RANK ROLE_RANK ROLE_NAME LOCAL_WORLD_SIZE WORLD_SIZE \
                 GROUP_WORLD_SIZE ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT \
                 TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID \
                 TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_SIGNALS_TO_HANDLE \
                 TORCH_NCCL_ASYNC_ERROR_HANDLING OMP_NUM_THREADS"
        .split_whitespace()
    {
        assert!(set.contains(name), "{name}");
    }
    // The node makes a file for each worker. Nobody inherits that of a launcher above.
    assert_eq!(assigned(ERROR_FILE), Some(Assigned::Place));
    assert!(tells_a_place(ERROR_FILE) && tells_a_place("TORCHELASTIC_TIMER_FILE"));
}

#[test]
fn what_kolo_sets_is_known_from_what_it_sets() {
    use Assigned::{Devices, Place, Setting};
    let mut with = job_env();
    with.rendezvous = Some("10.0.0.2:4711".parse().unwrap());
    with.loopback = true;
    let mut env = job(&with);
    env.extend(member(&with, &member_five(), 2));
    env.extend(devices(&["3".to_owned()]));
    env.extend(interface("eth0", true));
    for name in env.keys() {
        assert!(assigned(name).is_some(), "{name}");
    }
    for (names, what) in [
        (
            "RANK WORLD_SIZE LOCAL_RANK GROUP_WORLD_SIZE MASTER_ADDR MASTER_PORT HOROVOD_HOSTNAME \
             HOROVOD_CROSS_SIZE HOROVOD_GLOO_RENDEZVOUS_ADDR KOLO_RANK",
            Some(Place),
        ),
        ("CUDA_VISIBLE_DEVICES", Some(Devices)),
        (
            "NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME HOROVOD_CONTROLLER TORCHELASTIC_RUN_ID",
            Some(Setting),
        ),
        ("NCCL_DEBUG OMP_NUM_THREADS HOROVOD_TIMELINE rank", None),
    ] {
        for name in names.split_whitespace() {
            assert_eq!(assigned(name), what, "{name}");
        }
    }
}

#[test]
fn nobody_inherits_a_place_in_another_group() {
    for name in "RANK WORLD_SIZE LOCAL_RANK MASTER_PORT HOROVOD_RANK HOROVOD_ELASTIC \
                 HOROVOD_GLOO_RENDEZVOUS_PORT TORCHELASTIC_ERROR_FILE NODE_RANK CROSS_RANK \
                 OMPI_COMM_WORLD_RANK OMPI_UNIVERSE_SIZE OMPI_MCA_orte_hnp_uri PMIX_RANK \
                 PMIX_SERVER_URI2 PMI_RANK PMI_FD MPI_LOCALRANKID MV2_COMM_WORLD_RANK SLURM_PROCID \
                 SLURM_LOCALID SLURM_NTASKS SLURM_STEP_NODELIST FLUX_TASK_RANK PALS_RANKID"
        .split_whitespace()
    {
        assert!(tells_a_place(name), "{name}");
    }
    for name in "PATH OMPI_MCA_btl SLURM_JOB_ID SLURM_JOB_NODELIST HOROVOD_TIMELINE \
                 NCCL_SOCKET_IFNAME CUDA_VISIBLE_DEVICES PMI RANKS MY_RANK"
        .split_whitespace()
    {
        assert!(!tells_a_place(name), "{name}");
    }
}

#[test]
fn what_is_passed_never_overrides_ranks_and_a_pattern_nothing_that_kolo_sets() {
    for (names, by_pattern, by_name) in [
        ("NCCL_DEBUG PATH PYTHONUNBUFFERED KOLO_LANE", true, true),
        (
            "NCCL_SOCKET_IFNAME HOROVOD_CONTROLLER SLURM_PROCID NOTIFY_SOCKET WATCHDOG_USEC \
             LISTEN_FDS CREDENTIALS_DIRECTORY",
            false,
            true,
        ),
        (
            "RANK MASTER_ADDR CUDA_VISIBLE_DEVICES KOLO_RANK KOLO_X",
            false,
            false,
        ),
    ] {
        for name in names.split_whitespace() {
            assert_eq!(not_passed(name, false).is_none(), by_pattern, "{name}");
            assert_eq!(not_passed(name, true).is_none(), by_name, "{name}");
        }
    }
}

#[test]
fn a_lone_worker_keeps_all_threads() {
    let names = |size| {
        defaults(size)
            .iter()
            .map(|(name, _)| *name)
            .collect::<Vec<_>>()
    };
    assert!(names(2).contains(&"OMP_NUM_THREADS"));
    assert!(!names(1).contains(&"OMP_NUM_THREADS"));
    assert!(names(1).contains(&"TORCH_NCCL_ASYNC_ERROR_HANDLING"));
}

#[test]
fn bad_variables_have_a_problem() {
    assert_eq!(problem("A", "b=c"), None);
    for (name, value) in [
        ("", "x"),
        ("A=B", "x"),
        ("A\0", "x"),
        ("A", "x\0"),
        ("KOLO_RANK", "1"),
    ] {
        assert!(problem(name, value).is_some(), "{name:?}");
    }
}

#[test]
fn nodes_have_their_names_and_two_of_one_name_are_told_apart() {
    let on = |slot, node, hostname: &str| Member {
        slot: Slot(slot),
        node: NodeId(node),
        hostname: hostname.to_owned(),
        ..member_five()
    };
    let members = [
        on(2, 1, "a"),
        on(0, 9, "a"),
        on(1, 9, "a"),
        on(3, 2, "fd00::2"),
        on(4, 3, "a-node-0000000000000001"),
        on(5, 4, "with blank/and more"),
    ];
    let names = horovod_hostnames(&members);
    let expected = [
        (1, "a-node-0000000000000001"),
        (2, "fd00::2"),
        (3, "a-node-0000000000000001-node-0000000000000003"),
        (4, "node-0000000000000004"),
        (9, "a"),
    ];
    let expected = expected.map(|(node, name)| (NodeId(node), name.to_owned()));
    assert_eq!(names, expected.into());
    let job = JobEnv {
        hostnames: names,
        ..job_env()
    };
    let env = member(&job, &members[0], 0);
    assert_eq!(env["HOROVOD_HOSTNAME"], "a-node-0000000000000001");
    assert_eq!(env["KOLO_HOSTNAME"], "a");
}
