//! At least one of each kind of message.

use super::*;

const CLUSTER: ClusterId = ClusterId(0xc0);
const NODE: NodeId = NodeId(0xa1);
const JOB: JobId = JobId(0xb2);
const DRIVER: DriverId = DriverId(0xd3);
const GENERATION: Generation = Generation(1);

fn address() -> std::net::SocketAddr {
    "192.0.2.1:4433".parse().unwrap()
}

fn resources() -> Resources {
    Resources {
        cpus: Milli(1500),
        gpus: 2,
        custom: BTreeMap::from([("FPGA".to_owned(), Milli(500))]),
    }
}

fn program() -> Program {
    Program {
        hash: ProgramHash([0xee; 32]),
        size: 123_456,
        name: "train".to_owned(),
    }
}

fn installed() -> Installed {
    Installed {
        program: "python3".to_owned(),
        search: Some("/opt/bin:/usr/bin".to_owned()),
        cwd: Some("/home/me".to_owned()),
        stream_output: true,
        stdin: true,
    }
}

fn env(value: &str) -> BTreeMap<String, String> {
    BTreeMap::from([("PATH".to_owned(), value.to_owned())])
}

fn member() -> Member {
    Member {
        rank: Rank(3),
        local_rank: LocalRank(1),
        local_size: 2,
        cross_rank: CrossRank(1),
        cross_size: 2,
        slot: Slot(3),
        incarnation: Incarnation::FIRST,
        node: NODE,
        hostname: "host".to_owned(),
        address: Some("[2001:db8::1]:4433".parse().unwrap()),
    }
}

fn table() -> GenerationTable {
    GenerationTable {
        job: JOB,
        generation: GENERATION,
        members: vec![member()],
        cause: String::new(),
        handover: Handover::None,
    }
}

/// Of a job whose members come and go.
fn second() -> Member {
    Member {
        incarnation: Incarnation(2),
        ..member()
    }
}

fn next_table() -> GenerationTable {
    GenerationTable {
        generation: Generation(2),
        members: vec![second()],
        cause: "rank 1 is lost".to_owned(),
        handover: Handover::Sync,
        ..table()
    }
}

fn spec() -> JobSpec {
    JobSpec {
        name: "digits".to_owned(),
        program: program(),
        args: vec!["--epochs".to_owned(), "5".to_owned()],
        placement: Placement::Pack { workers: 4 },
        per_worker: resources(),
        env: env("/bin"),
        start_timeout_ms: 30_000,
        grace_ms: 5000,
        rendezvous: true,
        installed: None,
        layout: Vec::new(),
        interfaces: InterfaceSelection::default(),
        no_cache: false,
        elastic: None,
    }
}

fn elastic() -> Elastic {
    Elastic {
        min: 2,
        max: 4,
        spares: 1,
        max_resets: Some(100),
        restarts_within: Some(RestartWindow {
            restarts: 5,
            within_ms: 60_000,
        }),
        restarts_without_progress: 3,
        cooldown: Some(Cooldown {
            least_ms: 1000,
            most_ms: 60_000,
        }),
        join_window_ms: 1000,
        ack_timeout_ms: 10_000,
        filters: vec![
            GroupFilter::DivisibleBy(2),
            GroupFilter::WholeHosts(2),
            GroupFilter::Max(4),
        ],
        health_check: Some(health_check()),
        on_change: OnChange::InPlace,
        hosts: None,
    }
}

fn reserve(installed: Option<InstalledHere>, health_check: Option<HealthCheck>) -> NodeRequest {
    NodeRequest::Reserve {
        job: JOB,
        per_worker: resources(),
        workers: 2,
        lease_ms: 10_000,
        program: program().hash,
        installed,
        health_check,
    }
}

fn health_check() -> HealthCheck {
    HealthCheck {
        program: "gpu-check".to_owned(),
        args: vec!["-q".to_owned()],
        timeout_ms: 5000,
    }
}

fn failure() -> RankFailure {
    RankFailure {
        rank: Rank(3),
        node: NODE,
        hostname: "host".to_owned(),
        pid: 4711,
        exit: Exit::Signal(9),
        reason: Some("out of memory".to_owned()),
        stderr_tail: vec!["last words".to_owned()],
        account: None,
    }
}

fn fall() -> Fall {
    let account = |error| {
        Some(Box::new(Account {
            at_ms: 1_800_000_000_123,
            age_ms: 7,
            error,
        }))
    };
    let error = WorkerError {
        message: "ValueError: bad batch".to_owned(),
        place: Some("train.py:12".to_owned()),
        callstack: vec!["  raise ValueError".to_owned()],
        at_s: Some(1_800_000_000),
    };
    Fall {
        cause: RankFailure {
            account: account(Some(error)),
            ..failure()
        },
        followers: Followers {
            first: vec![Follower {
                after_ms: 40,
                failure: RankFailure {
                    account: account(None),
                    ..failure()
                },
            }],
            more: 3,
        },
    }
}

fn token() -> TokenEntry {
    TokenEntry {
        id: "token-0000002a".to_owned(),
        role: Role::Driver,
        admin: true,
        expires_unix: 1_800_000_000,
        uses_left: Some(1),
    }
}

fn revocations() -> RevocationList {
    RevocationList {
        epoch: 7,
        serial: 2,
        members: vec![RevokedMember {
            role: Role::Node,
            name: NODE.to_string(),
            since_unix: 1_700_000_000,
            reason: "stolen".to_owned(),
        }],
    }
}

fn refusal() -> Refusal {
    Refusal::new(RefusalKind::Unplaceable, "cpus: requested 2, available 1")
}

fn placed() -> PlacedNode {
    PlacedNode {
        node: NODE,
        hostname: "host".to_owned(),
        address: address(),
        ranks: vec![Rank(0), Rank(1)],
        has_program: true,
    }
}

fn network() -> NodeNetwork {
    NodeNetwork {
        listen: address(),
        host: "00112233aabbccdd".to_owned(),
        interfaces: vec![Interface {
            name: "eth0".to_owned(),
            up: true,
            loopback: false,
            mtu: 9000,
            speed: Some(25_000),
            addresses: vec![InterfaceAddress {
                ip: address().ip(),
                prefix: 24,
            }],
        }],
    }
}

fn selection() -> InterfaceSelection {
    InterfaceSelection {
        names: vec!["eth0".to_owned()],
        by_host: BTreeMap::from([("B".to_owned(), vec!["ib0".to_owned()])]),
    }
}

fn echo() -> Echo {
    Echo {
        seen: address(),
        local: Some(address().ip()),
        interface: Some("eth0".to_owned()),
        time_ms: 1_700_000_000_000,
    }
}

fn surroundings() -> DaemonState {
    DaemonState {
        uid: 0,
        core_limit: Some(4096),
        core_pattern: "core".to_owned(),
        folders: vec![FolderState {
            usage: FolderUse::State,
            path: "/var/lib/kolo-node".to_owned(),
            free: Some(4096),
            total: Some(1 << 30),
            problem: Some(30),
        }],
    }
}

fn report() -> NetworkReport {
    NetworkReport {
        choice: NetworkChoice::Interface("eth0".to_owned()),
        rows: vec![InterfaceRow {
            node: NODE,
            hostname: "b".to_owned(),
            interface: "eth0".to_owned(),
            address: address().ip(),
            mtu: 9000,
            speed: Some(25_000),
            reached_by: vec![ReachedBy {
                node: NODE,
                hostname: "a".to_owned(),
                interface: "eth0".to_owned(),
                rtt_us: 250,
            }],
            chosen: false,
            why_not: Some("eth1 is nearer".to_owned()),
        }],
        cached: true,
        took_ms: 12,
        problem: Some(refusal()),
    }
}

fn job_info() -> JobInfo {
    JobInfo {
        job: JOB,
        name: "digits".to_owned(),
        owner: DRIVER,
        state: JobState::Healthy,
        generation: GENERATION,
        workers: vec![WorkerInfo {
            member: member(),
            state: WorkerState::Exited,
            pid: 4711,
            exit: Some(Exit::Code(3)),
        }],
        nodes: vec![placed()],
        age_ms: 1000,
        reason: Some("a worker failed".to_owned()),
        rendezvous: Some(address()),
        network: Some(report()),
        membership: None,
    }
}

pub(crate) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    macro_rules! add {
        ($kind:ident: $($message:expr),* $(,)?) => {$(
            all.push(case::<$kind>(stringify!($kind), &$message));
        )*};
    }
    add!(JoinRequest: JoinRequest { role: Role::Node, secret: vec![1, 2], csr: vec![3, 4] });
    add!(JoinReply:
        JoinReply::Joined { cluster: CLUSTER, name: NODE.to_string(), certificate: vec![5, 6] },
        JoinReply::Refused(Refusal::new(RefusalKind::Token, "expired")),
        JoinReply::Refused(Refusal::new(RefusalKind::NoProgram, "not in PATH")),
        JoinReply::Refused(Refusal::new(RefusalKind::NotExecutable, "a directory")),
    );
    add!(Welcome: Welcome { version: "0.1.0".to_owned() });
    add!(HeadRequest:
        HeadRequest::Register(NodeRegistration {
            node: NODE,
            hostname: "host".to_owned(),
            address: address(),
            resources: resources(),
            version: "0.1.0".to_owned(),
            jobs: vec![JOB],
            network: Some(network()),
            instance: 77,
            seal: Some(Seal([8; 32])),
            draining: true,
        }),
        HeadRequest::Heartbeats,
        HeadRequest::Events(vec![NodeEvent::JobGone { job: JOB }]),
        HeadRequest::SignWorker { job: JOB, slot: Slot(3), csr: vec![7; 40] },
        HeadRequest::Submit(spec()),
        HeadRequest::Submit(JobSpec {
            name: "train".to_owned(),
            program: program(),
            args: vec!["train.py".to_owned()],
            placement: Placement::Pack { workers: 4 },
            per_worker: resources(),
            env: env("/bin"),
            start_timeout_ms: 30_000,
            grace_ms: 5000,
            rendezvous: true,
            installed: Some(installed()),
            layout: vec![NodeShare { node: NODE, workers: 4 }],
            interfaces: selection(),
            no_cache: true,
            elastic: None,
        }),
        HeadRequest::Submit(JobSpec {
            elastic: Some(Box::new(elastic())),
            ..spec()
        }),
        HeadRequest::Submit(JobSpec {
            elastic: Some(Box::new(Elastic { on_change: OnChange::Restart, ..elastic() })),
            ..spec()
        }),
        HeadRequest::Submit(JobSpec {
            elastic: Some(Box::new(Elastic { on_change: OnChange::Horovod, ..elastic() })),
            ..spec()
        }),
        HeadRequest::DryRun(spec()),
        HeadRequest::Cluster,
        HeadRequest::Jobs,
        HeadRequest::Job { job: JOB },
        HeadRequest::Stop { job: JOB },
        HeadRequest::Renew { csr: vec![7; 40] },
        HeadRequest::Drain,
        HeadRequest::CreateToken { role: Role::Driver, admin: true, ttl_s: 3600, uses: Some(1) },
        HeadRequest::Tokens,
        HeadRequest::RevokeToken { id: "token-0000002a".to_owned() },
        HeadRequest::Revoke {
            role: Role::Node,
            name: NODE.to_string(),
            reason: "stolen".to_owned(),
        },
        HeadRequest::Reinstate { role: Role::Driver, name: DRIVER.to_string() },
        HeadRequest::Network(network()),
        HeadRequest::Surroundings,
        HeadRequest::DrainNode { node: "host".to_owned(), deadline_ms: 60_000 },
        HeadRequest::UndrainNode { node: NODE.to_string() },
        HeadRequest::Interfaces(InterfacesQuery {
            job: Some(JOB),
            nodes: vec!["b".to_owned()],
            selection: selection(),
            no_cache: true,
        }),
    );
    add!(SubmitFrame: SubmitFrame::ProgramReady, SubmitFrame::Stop, SubmitFrame::Kill, SubmitFrame::Done,
        SubmitFrame::Interrupt, SubmitFrame::Signal(WorkerSignal::User1), SubmitFrame::Signal(WorkerSignal::User2),
        SubmitFrame::Signal(WorkerSignal::Stop), SubmitFrame::Signal(WorkerSignal::Continue),
        SubmitFrame::Unreachable { generation: GENERATION, why: "gone".to_owned() },
        SubmitFrame::Hosts(vec![JobHost { name: "a".to_owned(), slots: 4 }]));
    add!(Beat: Beat { seq: 300 });
    add!(NodeEvent:
        NodeEvent::WorkerReady { job: JOB, slot: Slot(3), incarnation: Incarnation::FIRST, address: Some(address()) },
        NodeEvent::WorkerExited {
            job: JOB,
            slot: Slot(3),
            incarnation: Incarnation::FIRST,
            generation: Generation(0),
            failure: failure(),
            expected: false,
        },
        NodeEvent::JobGone { job: JOB },
        NodeEvent::JobLeft { job: JOB, reason: "the node is stopping".to_owned() },
        NodeEvent::WorkerReady { job: JOB, slot: Slot(3), incarnation: Incarnation(2), address: Some(address()) },
        NodeEvent::WorkerExited {
            job: JOB,
            slot: Slot(3),
            incarnation: Incarnation(2),
            generation: Generation(4),
            failure: failure(),
            expected: false,
        },
        NodeEvent::WorkerUnseen { job: JOB, slot: Slot(3), incarnation: Incarnation(2) },
        NodeEvent::Taken { job: JOB, slot: Slot(3), incarnation: Incarnation(2), generation: Generation(4) },
        NodeEvent::Committed {
            job: JOB,
            slot: Slot(3),
            incarnation: Incarnation(2),
            generation: Generation(4),
            commit: 300,
            kept: Kept::Durable,
        },
        NodeEvent::Holding {
            job: JOB,
            slot: Slot(3),
            incarnation: Incarnation(2),
            generation: Generation(4),
            commit: 300,
            failed: None,
        },
        NodeEvent::Holding {
            job: JOB,
            slot: Slot(3),
            incarnation: Incarnation(2),
            generation: Generation(4),
            commit: 300,
            failed: Some(FailedOperation { culprit: Some(Rank(2)), reason: "rank 2 is late".to_owned() }),
        },
    );
    add!(HeadReply:
        HeadReply::Done,
        HeadReply::Registered { heartbeat_ms: 250, lease_ms: 3000, revoked: revocations() },
        HeadReply::Signed { certificate: vec![8; 40], generation: GENERATION },
        HeadReply::Cluster(ClusterInfo {
            cluster: CLUSTER,
            version: "0.1.0".to_owned(),
            uptime_ms: 5000,
            nodes: vec![NodeInfo {
                node: NODE,
                hostname: "host".to_owned(),
                address: address(),
                alive: true,
                total: resources(),
                available: Resources::default(),
                last_seen_ms: 20,
                jobs: vec![JOB],
                draining: true,
            }],
            running_jobs: 1,
            revoked: revocations().members,
            time_ms: 1_800_000_000_000,
        }),
        HeadReply::Jobs(vec![job_info()]),
        HeadReply::Job(job_info()),
        HeadReply::Job(JobInfo {
            membership: Some(Box::new(MembershipInfo {
                cause: Some("rank 1 is lost".to_owned()),
                decision: "3 of at most 4 members".to_owned(),
                left_out: vec![LeftOut {
                    hostname: "box".to_owned(),
                    for_ms: 5000,
                    why: "no GPU".to_owned(),
                }],
            })),
            ..job_info()
        }),
        HeadReply::Renewed { certificate: vec![8; 40] },
        HeadReply::Token { entry: token(), token: SecretText("kolo1.driver".to_owned()) },
        HeadReply::Tokens(vec![token()]),
        HeadReply::Revoked { told: 3, late: vec![NODE] },
        HeadReply::Placed(vec![placed()]),
        HeadReply::Interfaces(report()),
        HeadReply::Surroundings(surroundings()),
        HeadReply::Draining(NodeDrain {
            node: NODE,
            hostname: "host".to_owned(),
            leaving: vec![JOB],
            staying: Vec::new(),
        }),
        HeadReply::Refused(refusal()),
    );
    add!(JobEvent:
        JobEvent::Placed { job: JOB, nodes: vec![placed()] },
        JobEvent::Healthy { table: table(), nodes: vec![placed()] },
        JobEvent::Generation { table: next_table(), nodes: vec![placed()], fall: None },
        JobEvent::Generation { table: next_table(), nodes: vec![placed()], fall: Some(Box::new(fall())) },
        JobEvent::Fell {
            why: "rank 1 on b: exit code 3".to_owned(),
            failure: Some(Box::new(failure())),
            stopped: 3,
            restart: Some((1, 3)),
        },
        JobEvent::Waits { room: 2, needed: 4, for_ms: 600_000 },
        JobEvent::RankLost { generation: GENERATION, failure: failure() },
        JobEvent::Ended {
            state: JobState::Failed,
            refusal: Some(refusal()),
            failure: Some(failure()),
            stopped: Some(2),
            followers: Followers::default(),
        },
        JobEvent::Ended {
            state: JobState::Failed,
            refusal: None,
            failure: Some(fall().cause),
            stopped: Some(0),
            followers: fall().followers,
        },
    );
    add!(NodeRequest:
        NodeRequest::Revocations(revocations()),
        reserve(None, None),
        reserve(None, Some(health_check())),
        reserve(Some(InstalledHere { owner: DRIVER, program: installed() }), None),
        NodeRequest::Release { job: JOB },
        NodeRequest::Start(StartWorkers {
            job: JOB,
            generation: GENERATION,
            owner: DRIVER,
            program: program(),
            args: vec!["-v".to_owned()],
            env: env("/a"),
            user_env: env("/b"),
            slots: vec![SlotStart { member: member(), env: env("/c") }],
            world_size: 4,
            needs_data_plane: true,
            hello_timeout_ms: 10_000,
            grace_ms: 5000,
            installed: Some(installed()),
            next_within_ms: None,
            on_change: OnChange::InPlace,
        }),
        NodeRequest::Start(StartWorkers {
            job: JOB,
            generation: Generation(0),
            owner: DRIVER,
            program: program(),
            args: Vec::new(),
            env: BTreeMap::new(),
            user_env: BTreeMap::new(),
            slots: vec![SlotStart { member: second(), env: BTreeMap::new() }],
            world_size: 4,
            needs_data_plane: true,
            hello_timeout_ms: 10_000,
            grace_ms: 5000,
            installed: None,
            next_within_ms: Some(125_000),
            on_change: OnChange::InPlace,
        }),
        NodeRequest::Start(StartWorkers {
            job: JOB,
            generation: GENERATION,
            owner: DRIVER,
            program: program(),
            args: Vec::new(),
            env: BTreeMap::new(),
            user_env: BTreeMap::new(),
            slots: vec![SlotStart { member: second(), env: BTreeMap::new() }],
            world_size: 4,
            needs_data_plane: false,
            hello_timeout_ms: 10_000,
            grace_ms: 5000,
            installed: Some(installed()),
            next_within_ms: Some(125_000),
            on_change: OnChange::Restart,
        }),
        NodeRequest::Membership(next_table().into()),
        NodeRequest::Revoke {
            job: JOB,
            generation: GENERATION,
            lost: vec![Rank(1)],
            cause: "rank 1 is lost".to_owned(),
        },
        NodeRequest::Hold { job: JOB, generation: GENERATION, why: "a node has joined".to_owned() },
        NodeRequest::FreePort { job: JOB },
        NodeRequest::StopWorker {
            job: JOB,
            slot: Slot(3),
            incarnation: Incarnation(2),
            why: "its node leaves".to_owned(),
        },
        NodeRequest::Membership(table().into()),
        NodeRequest::RankLost { job: JOB, generation: GENERATION, failure: failure() },
        NodeRequest::Stop { job: JOB, reason: "asked".to_owned(), interrupt: false },
        NodeRequest::Stop { job: JOB, reason: "asked".to_owned(), interrupt: true },
        NodeRequest::Signal { job: JOB, signal: WorkerSignal::Stop, seq: 3 },
        NodeRequest::Kill { job: JOB },
        NodeRequest::Output { job: JOB, without: vec![Rank(2)] },
        NodeRequest::Probe(Probe {
            targets: vec![ProbeTarget {
                node: NODE,
                address: address(),
                scope: Some("eth0".to_owned()),
            }],
            limit_ms: 2000,
        }),
        NodeRequest::Echo,
        NodeRequest::Surroundings,
        NodeRequest::HasProgram { hash: program().hash },
        NodeRequest::PutProgram { program: program() },
        NodeRequest::Attach { job: JOB, generation: GENERATION },
        NodeRequest::Logs { job: JOB, ranks: vec![Rank(1)], tail: Some(10), follow: true },
    );
    add!(NodeReply:
        NodeReply::Done,
        NodeReply::Reserved { has_program: false, free_port: 29_500, problem: None },
        NodeReply::Reserved { has_program: false, free_port: 29_500, problem: Some(refusal()) },
        NodeReply::Output,
        NodeReply::Started { pids: vec![(Slot(3), 4711)] },
        NodeReply::FreePort(29_500),
        NodeReply::HasProgram(true),
        NodeReply::Attached { ranks: vec![Rank(2), Rank(3)] },
        NodeReply::Logs,
        NodeReply::Probed(vec![
            ProbeResult::Reached { rtt_us: 250, echo: echo() },
            ProbeResult::Failed {
                kind: ProbeFailure::Silent,
                reason: "no answer within 2s".to_owned(),
            },
        ]),
        NodeReply::Echo(echo()),
        NodeReply::Surroundings(surroundings()),
        NodeReply::Refused(refusal()),
    );
    add!(OutputChunk: OutputChunk {
        rank: Rank(3),
        generation: GENERATION,
        stream: Stdio::Stderr,
        time_ms: 1_795_000_000_000,
    });
    add!(StdinChunk: StdinChunk {});
    add!(LogBatch: LogBatch {
        lines: vec![LogLine {
            rank: Rank(3),
            stream: Stdio::Stderr,
            seq: 7,
            time_ms: 1_795_000_000_000,
            text: b"caf\xe9".to_vec(),
        }],
    });
    add!(CallOp:
        CallOp::Function { name: "whoami".to_owned() },
        CallOp::Create { object: ObjectId(9), class: "Trainer".to_owned() },
        CallOp::Method { object: ObjectId(9), name: "train".to_owned() },
        CallOp::Drop { object: ObjectId(9) },
        CallOp::Recover { object: ObjectId(9), class: "Trainer".to_owned() },
        CallOp::Commit { object: ObjectId(9) },
        CallOp::Retain,
    );
    add!(CallFrame:
        CallFrame::Call {
            call: CallId(1),
            generation: GENERATION,
            ranks: vec![Rank(0), Rank(1)],
            deadline_ms: Some(1000),
            op: CallOp::Function { name: "whoami".to_owned() },
        },
        CallFrame::Cancel { call: CallId(1), ranks: vec![Rank(1)] },
    );
    let echo = CallFailure {
        kind: FailureKind::Panic,
        message: "index out of bounds".to_owned(),
        backtrace: Some("at main.rs:3".to_owned()),
        caused_by: Some(Rank(2)),
        stopping: true,
    };
    add!(CallReply:
        CallReply::Result {
            call: CallId(1),
            slot: Slot(4),
            generation: GENERATION,
            outcome: Outcome::Returned,
        },
        CallReply::Refused {
            call: CallId(1),
            rank: Rank(0),
            failure: CallFailure::new(FailureKind::NoSuchRank, "rank 0 is not on this node"),
        },
        CallReply::Lost {
            slot: Slot(4),
            incarnation: Incarnation(2),
            failure: failure(),
            stopping: true,
        },
    );
    add!(Outcome: Outcome::Returned, Outcome::Failed(echo.clone()));
    add!(ToWorker:
        ToWorker::Welcome {
            cluster: CLUSTER,
            job: JOB,
            generation: GENERATION,
            member: member(),
            world_size: 4,
            needs_data_plane: true,
            next_within_ms: None,
        },
        ToWorker::Welcome {
            cluster: CLUSTER,
            job: JOB,
            generation: GENERATION,
            member: member(),
            world_size: 4,
            needs_data_plane: true,
            next_within_ms: Some(600_000),
        },
        ToWorker::Certificate { certificate: vec![1; 40], authority: vec![2; 40] },
        ToWorker::Membership(table().into()),
        ToWorker::Revoke { generation: GENERATION, cause: "a node is lost".to_owned(), lost: vec![Rank(1), Rank(3)] },
        ToWorker::Hold { generation: GENERATION, why: "node b is drained".to_owned() },
        ToWorker::RankLost { generation: GENERATION, failure: failure() },
        ToWorker::Peer { rank: Rank(2), generation: GENERATION },
        ToWorker::LinkRequested { rank: Rank(1), generation: GENERATION, group: u64::MAX },
        ToWorker::Cancel { call: CallId(1) },
        ToWorker::Stop { reason: "the job ended".to_owned() },
    );
    add!(FromWorker:
        FromWorker::Hello { protocol: worker::LOCAL_PROTOCOL, pid: 4711, registry: u64::MAX },
        FromWorker::Sign { csr: vec![3; 40] },
        FromWorker::Ready { address: None },
        FromWorker::ConnectPeer { rank: Rank(2), generation: GENERATION },
        FromWorker::RequestLink { rank: Rank(2), generation: GENERATION, group: u64::MAX },
        FromWorker::Taken { generation: GENERATION },
        FromWorker::Committed { generation: GENERATION, commit: 1, kept: Kept::Made },
        FromWorker::Committed { generation: GENERATION, commit: 4, kept: Kept::Durable },
        FromWorker::Holding { generation: GENERATION, commit: 17, failed: None },
        FromWorker::Holding {
            generation: GENERATION,
            commit: 17,
            failed: Some(FailedOperation { culprit: Some(Rank(2)), reason: "the link to rank 2 has ended".to_owned() }),
        },
    );
    add!(WorkerCall: WorkerCall {
        call: CallId(1),
        generation: GENERATION,
        deadline_ms: None,
        op: CallOp::Drop { object: ObjectId(9) },
    });
    add!(WorkerResult: WorkerResult { call: CallId(1), generation: GENERATION, outcome: Outcome::Failed(echo) });
    add!(Placement: Placement::Pack { workers: 4 }, Placement::Spread { hosts: 2, slots: 3 });
    add!(Exit: Exit::Code(-1), Exit::Signal(9), Exit::Unknown);
    for state in [
        JobState::Pending,
        JobState::Placing,
        JobState::Probing,
        JobState::Starting,
        JobState::Healthy,
        JobState::Recovering,
        JobState::Succeeded,
        JobState::Failed,
        JobState::Stopped,
    ] {
        let mut case = case("JobState", &state);
        "JobState".clone_into(&mut case.name);
        all.push(case);
    }
    all
}
