//! Who may do what, and in what form the answers come.

use std::time::Duration;

use actix_web::ResponseError as _;
use kolo_transport::Authority;
use kolo_transport::identity::{Identity, Role};
use kolo_transport::ids::{ClusterId, DriverId, JobId, NodeId, Slot};
use kolo_transport::wire::{
    Exit, InterfaceRow, JobState, LeftOut, MembershipInfo, NetworkChoice, NetworkReport, Refusal,
    RefusalKind, WorkerState,
};
use serde_json::{Value, json};

use super::client::{PATIENCE, SECRET, Site};
use super::fake::{ADMIN, JOB, OTHER_JOB, OWNER, worker};
use crate::http::error::ApiError;
use crate::limiter::{BURST, REFILL};

/// All that needs a credential.
fn guarded() -> Vec<(&'static str, String)> {
    vec![
        ("GET", "/metrics".to_owned()),
        ("GET", "/api/v1/cluster".to_owned()),
        ("GET", "/api/v1/nodes".to_owned()),
        ("PUT", "/api/v1/nodes/box/drain".to_owned()),
        ("DELETE", "/api/v1/nodes/box/drain".to_owned()),
        ("GET", "/api/v1/jobs".to_owned()),
        ("GET", format!("/api/v1/jobs/{JOB}")),
        ("GET", "/api/v1/jobs/nonsense".to_owned()),
        ("DELETE", format!("/api/v1/jobs/{JOB}")),
        ("GET", format!("/api/v1/jobs/{JOB}/workers")),
    ]
}

#[actix_rt::test]
async fn probes_and_the_document_are_open_to_all() {
    let site = Site::new();
    let stranger = site.stranger();
    for path in ["/healthz", "/readyz"] {
        let answer = stranger.get(path).await;
        assert_eq!(
            (answer.status, answer.json()),
            (200, json!({"status": "ok"}))
        );
        let answer = stranger.send("HEAD", path, b"").await;
        assert_eq!((answer.status, answer.body.len()), (200, 0));
    }
    site.head.change(|known| known.ready = false);
    assert_eq!(stranger.get("/healthz").await.status, 200);
    assert_eq!(stranger.get("/readyz").await.status, 503);
    let document = stranger.get("/api/v1/openapi.json").await;
    assert_eq!(document.status, 200);
    let golden: Value = serde_json::from_str(include_str!("../openapi.json")).unwrap();
    assert_eq!(document.json(), golden);
    site.http.stop().await;
}

#[actix_rt::test]
async fn all_else_needs_a_credential_and_a_good_one() {
    for claim in [
        None,
        Some("Bearer".to_owned()),
        Some("Bearer another-secret-of-someone".to_owned()),
        Some(format!("Bearer {SECRET}x")),
        Some(format!("Basic {SECRET}")),
    ] {
        // Each has the attempts of an address to itself.
        let site = Site::new();
        let stranger = claim.map_or_else(|| site.stranger(), |claim| site.claiming(&claim));
        for (method, path) in guarded() {
            let answer = stranger.send(method, &path, b"").await;
            assert_eq!(answer.status, 401, "{method} {path}");
            assert_eq!(answer.error_kind(), "unauthenticated");
            assert_eq!(
                answer.header("WWW-Authenticate"),
                Some("Bearer realm=\"kolo\"")
            );
            assert!(!String::from_utf8_lossy(&answer.body).contains(SECRET));
        }
        assert!(site.head.change(|known| known.stopped.is_empty()));
        site.http.stop().await;
    }
}

#[actix_rt::test]
async fn guesses_of_the_bearer_secret_are_limited_by_address_and_by_connection() {
    let site = Site::new();
    let guess = site.claiming("Bearer another-secret-of-someone");
    // Many on one connection.
    let one = b"GET /api/v1/jobs HTTP/1.1\r\nHost: kolo\r\nAuthorization: Bearer wrong\r\n\r\n";
    let answers = guess.exchange(&one.repeat(200)).await.unwrap();
    let answers = String::from_utf8_lossy(&answers);
    let count = |status: &str| answers.matches(&format!("HTTP/1.1 {status} ")).count();
    assert!(
        (1..=BURST as usize + 5).contains(&count("401")),
        "{answers}"
    );
    assert!(
        (1..10).contains(&count("429")),
        "the connection ends: {answers}"
    );
    assert!(answers.contains("\r\nretry-after: "), "{answers}");
    // The good one is refused unseen, too, until there is an attempt again; whoever has a certificate is not.
    let began = std::time::Instant::now();
    let refused = guess.get("/api/v1/jobs").await;
    if began.elapsed() < REFILL / 2 {
        assert_eq!(refused.error_kind(), "busy");
    }
    let driver = site.member(Role::Driver, &DriverId(11).to_string());
    assert_eq!(driver.get("/api/v1/jobs").await.status, 200);
    while site.bearer().get("/api/v1/jobs").await.status != 200 {
        assert!(began.elapsed() < PATIENCE);
        actix_rt::time::sleep(REFILL / 4).await;
    }
    // Good ones are not counted.
    for _ in 0..2 * BURST {
        assert_eq!(site.bearer().get("/api/v1/jobs").await.status, 200);
    }
    site.http.stop().await;
}

#[actix_rt::test]
async fn drivers_and_the_bearer_see_all_and_other_roles_do_not() {
    let site = Site::new();
    let driver = site.member(Role::Driver, &DriverId(11).to_string());
    let node = site.member(Role::Node, &NodeId(30).to_string());
    let own_worker = site.member(Role::Worker, &Identity::worker_name(JOB, Slot(0)));
    for path in [
        "/api/v1/cluster".to_owned(),
        "/api/v1/nodes".to_owned(),
        "/api/v1/jobs".to_owned(),
        format!("/api/v1/jobs/{JOB}"),
        format!("/api/v1/jobs/{JOB}/workers"),
    ] {
        assert_eq!(driver.get(&path).await.status, 200, "{path}");
        assert_eq!(site.bearer().get(&path).await.status, 200, "{path}");
        for other in [&node, &own_worker] {
            let answer = other.get(&path).await;
            assert_eq!(
                (answer.status, answer.error_kind().as_str()),
                (403, "forbidden"),
                "{path}"
            );
        }
    }
    for other in [&node, &own_worker] {
        let answer = other
            .send("DELETE", &format!("/api/v1/jobs/{JOB}"), b"")
            .await;
        assert_eq!(answer.status, 403);
    }
    assert!(site.head.change(|known| known.stopped.is_empty()));
    site.http.stop().await;
}

#[actix_rt::test]
async fn a_certificate_of_another_cluster_is_refused_in_the_handshake() {
    let site = Site::new();
    // Even one that claims the same cluster: it is the authority that counts.
    for cluster in [ClusterId(1), ClusterId(2)] {
        let other = Authority::create(cluster).unwrap();
        let credentials = other.issue(Role::Driver, &OWNER.to_string()).unwrap();
        let client = site.presenting(&credentials);
        let refused = client.exchange(&client.bytes("GET", "/healthz", b"")).await;
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("alert"), "{error}");
    }
    assert_eq!(site.stranger().get("/healthz").await.status, 200);
    site.http.stop().await;
}

#[actix_rt::test]
async fn a_job_is_stopped_once_and_shown_as_it_ended() {
    let site = Site::new();
    let driver = site.member(Role::Driver, &DriverId(11).to_string());
    let answer = driver
        .send("DELETE", &format!("/api/v1/jobs/{JOB}"), b"")
        .await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json()["state"], "stopped");
    assert_eq!(site.head.change(|known| known.stopped.clone()), [JOB]);
    let jobs = driver.get("/api/v1/jobs").await.json();
    assert_eq!(jobs[0]["state"], "healthy");
    assert_eq!(jobs[1]["job"], JOB.to_string());
    site.http.stop().await;
}

#[actix_rt::test]
async fn what_is_not_there_is_told_in_json() {
    let site = Site::new();
    let bearer = site.bearer();
    let unknown = JobId(99);
    for (method, path, status, kind) in [
        ("GET", "/", 404, "not_found"),
        ("GET", "/api/v2/jobs", 404, "not_found"),
        ("GET", "/api/v1/jobs/", 404, "not_found"),
        ("GET", &format!("/api/v1/jobs/{unknown}"), 404, "not_found"),
        (
            "DELETE",
            &format!("/api/v1/jobs/{unknown}"),
            404,
            "not_found",
        ),
        (
            "GET",
            &format!("/api/v1/jobs/{unknown}/workers"),
            404,
            "not_found",
        ),
        ("GET", "/api/v1/jobs/7", 400, "invalid"),
        ("GET", "/api/v1/jobs/job-7/workers", 400, "invalid"),
        ("GET", "/api/v1/jobs/%ff", 400, "invalid"),
    ] {
        let answer = bearer.send(method, path, b"").await;
        assert_eq!(answer.status, status, "{method} {path}: {answer:?}");
        assert_eq!(answer.error_kind(), kind, "{method} {path}");
    }
    for (method, path, allow) in [
        ("POST", "/healthz".to_owned(), "GET, HEAD"),
        ("POST", "/api/v1/jobs".to_owned(), "GET"),
        ("PUT", format!("/api/v1/jobs/{JOB}"), "GET, DELETE"),
    ] {
        let answer = bearer.send(method, &path, b"").await;
        assert_eq!(answer.status, 405, "{method} {path}: {answer:?}");
        assert_eq!(answer.error_kind(), "method_not_allowed");
        assert_eq!(answer.header("Allow"), Some(allow));
    }
    site.http.stop().await;
}

#[actix_rt::test]
async fn a_refusal_of_the_head_keeps_its_message() {
    let site = Site::new();
    let refusal = Refusal::new(RefusalKind::Busy, "the head is full; try again");
    site.head.change(|known| known.refusal = Some(refusal));
    let answer = site.bearer().get("/api/v1/cluster").await;
    assert_eq!(answer.status, 503);
    let error = json!({"error": {"kind": "busy", "message": "the head is full; try again"}});
    assert_eq!(answer.json(), error);
    site.http.stop().await;
}

#[test]
fn kinds_of_refusal_have_their_status_codes() {
    for (kind, status) in [
        (RefusalKind::Invalid, 400),
        (RefusalKind::UnknownRequest, 400),
        (RefusalKind::Token, 401),
        (RefusalKind::Forbidden, 403),
        (RefusalKind::NotFound, 404),
        (RefusalKind::Stale, 409),
        (RefusalKind::Unplaceable, 409),
        (RefusalKind::TooLarge, 413),
        (RefusalKind::Internal, 500),
        (RefusalKind::Worker, 500),
        (RefusalKind::NoProgram, 500),
        (RefusalKind::NotExecutable, 500),
        (RefusalKind::NodeLost, 500),
        (RefusalKind::Other, 500),
        (RefusalKind::Busy, 503),
        (RefusalKind::Stopped, 503),
        (RefusalKind::Timeout, 504),
    ] {
        let error = ApiError::from(Refusal::new(kind, "no"));
        assert_eq!(error.status_code().as_u16(), status, "{kind:?}");
    }
}

fn network() -> NetworkReport {
    let row = |interface: &str, address: [u8; 4], chosen| InterfaceRow {
        node: NodeId(30),
        hostname: "box".to_owned(),
        interface: interface.to_owned(),
        address: address.into(),
        mtu: 9000,
        speed: None,
        reached_by: Vec::new(),
        chosen,
        why_not: None,
    };
    NetworkReport {
        choice: NetworkChoice::Interface("eth1".to_owned()),
        rows: vec![
            row("eth0", [10, 1, 0, 1], false),
            row("eth1", [10, 2, 0, 1], true),
        ],
        cached: true,
        took_ms: 12,
        problem: None,
    }
}

#[actix_rt::test]
async fn the_shapes_are_those_of_the_document() {
    let site = Site::new();
    site.head.change_job(JOB, |job| {
        job.state = JobState::Failed;
        job.reason = Some("rank 1 is gone".to_owned());
        job.rendezvous = Some(([10, 0, 0, 1], 8080).into());
        job.workers = vec![worker(1, WorkerState::Exited, Some(Exit::Signal(9)))];
        job.network = Some(network());
        job.membership = Some(Box::new(MembershipInfo {
            cause: Some("2 -> 1 members".to_owned()),
            decision: "members: 1 of at most 2".to_owned(),
            left_out: vec![LeftOut {
                hostname: "other".to_owned(),
                for_ms: 7,
                why: "no GPU".to_owned(),
            }],
        }));
    });
    let bearer = site.bearer();
    let expected_worker = json!({
        "rank": 1, "local_rank": 1, "local_size": 2, "cross_rank": 0, "cross_size": 2, "slot": 1,
        "node": "node-000000000000001e", "hostname": "box", "address": "127.0.0.1:5001",
        "state": "exited", "pid": 1001,
        "exit": {"code": null, "signal": 9, "text": "signal 9 (SIGKILL)"},
    });
    let expected = json!({
        "job": "job-0000000000000014", "name": "digits", "owner": "driver-000000000000000a",
        "state": "failed", "generation": 1, "workers": [expected_worker], "age_ms": 1234, "ended_ms": null,
        "reason": "rank 1 is gone", "rendezvous": "10.0.0.1:8080",
        "network": {
            "choice": "interface", "interface": "eth1", "cached": true, "took_ms": 12, "problem": null,
            "addresses": [{
                "node": "node-000000000000001e", "hostname": "box", "interface": "eth1",
                "address": "10.2.0.1", "mtu": 9000,
            }],
        },
        "membership": {
            "cause": "2 -> 1 members", "decision": "members: 1 of at most 2",
            "left_out": [{"hostname": "other", "for_ms": 7, "why": "no GPU"}],
        },
    });
    assert_eq!(
        bearer.get(&format!("/api/v1/jobs/{JOB}")).await.json(),
        expected
    );
    assert_eq!(bearer.get("/api/v1/jobs").await.json()[1], expected);
    let workers = bearer
        .get(&format!("/api/v1/jobs/{JOB}/workers"))
        .await
        .json();
    assert_eq!(workers, json!([expected_worker]));

    let expected = json!({
        "cluster": "cluster-0000000000000001", "version": "0.1.0", "uptime_ms": 99, "running_jobs": 2,
        "nodes": [{
            "node": "node-000000000000001e", "hostname": "box", "address": "127.0.0.1:4000",
            "state": "alive", "last_seen_ms": 12, "jobs": ["job-0000000000000014"],
            "total": {"cpus": 1.5, "gpus": 2, "custom": {"fpga": 1.0}},
            "available": {"cpus": 0.0, "gpus": 0, "custom": {}},
        }],
        "revoked": [],
    });
    assert_eq!(bearer.get("/api/v1/cluster").await.json(), expected);
    assert_eq!(bearer.get("/api/v1/nodes").await.json(), expected["nodes"]);
    assert_ne!(JOB, OTHER_JOB);
    site.http.stop().await;
}

#[actix_rt::test]
async fn only_an_administrator_drains_nodes() {
    let site = Site::new();
    let path = "/api/v1/nodes/box/drain";
    let driver = site.member(Role::Driver, &OWNER.to_string());
    for caller in [site.bearer(), driver] {
        for method in ["PUT", "DELETE"] {
            let answer = caller.send(method, path, b"").await;
            let found = (answer.status, answer.error_kind());
            assert_eq!(found, (403, "forbidden".to_owned()));
        }
    }
    assert!(site.head.change(|known| known.drained.is_empty()));
    let admin = site.member(Role::Driver, &ADMIN.to_string());
    for bad in ["deadline=-1", "deadline=x", "deadline=1e30", "dead=1"] {
        let answer = admin.send("PUT", &format!("{path}?{bad}"), b"").await;
        assert_eq!(answer.status, 400, "{bad}");
    }
    let expected = json!({
        "node": "node-000000000000001e", "hostname": "box", "leaving": [JOB.to_string()],
        "staying": [OTHER_JOB.to_string()],
    });
    assert_eq!(admin.send("PUT", path, b"").await.json(), expected);
    let soon = admin
        .send("PUT", &format!("{path}?deadline=0.5"), b"")
        .await;
    assert_eq!(soon.status, 200);
    assert_eq!(admin.send("DELETE", path, b"").await.status, 204);
    let known = site.head.change(|known| known.drained.clone());
    let drained = [Some(60_000), Some(500), None];
    let drained = drained.map(|ms| ("box".to_owned(), ms.map(Duration::from_millis)));
    assert_eq!(known, drained);
    site.http.stop().await;
}

#[actix_rt::test]
async fn nobody_is_served_after_stop() {
    for graceful in [true, false] {
        let site = Site::new();
        let client = site.stranger();
        let mut open = client.connect().await.unwrap();
        if graceful {
            site.http.stop().await;
        } else {
            drop(site.http);
        }
        let mut byte = [0];
        let end = tokio::io::AsyncReadExt::read(&mut open, &mut byte);
        let end = tokio::time::timeout(super::client::PATIENCE, end)
            .await
            .unwrap();
        assert!(!matches!(end, Ok(1..)), "{end:?}");
        while client.connect().await.is_ok() {
            tokio::task::yield_now().await;
        }
    }
}
