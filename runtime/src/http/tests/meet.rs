//! The rendezvous of kolo's own workers.

use futures_util::future::join_all;
use kolo_transport::identity::{Identity, Role};
use kolo_transport::ids::{DriverId, Generation, JobId, Slot};
use kolo_transport::wire::JobState;
use serde_json::json;

use super::client::{Client, Site};
use super::fake::{JOB, OTHER_JOB, OWNER, job};

fn at(rest: &str) -> String {
    format!("/api/v1/jobs/{JOB}/rendezvous/{rest}")
}

fn worker_of(site: &Site, job: JobId, slot: u32) -> Client {
    site.member(Role::Worker, &Identity::worker_name(job, Slot(slot)))
}

#[actix_rt::test]
async fn values_are_put_read_and_finished() {
    let site = Site::new();
    let worker = worker_of(&site, JOB, 0);
    let missing = worker.get(&at("global/0")).await;
    assert_eq!(
        (missing.status, missing.error_kind().as_str()),
        (404, "not_found")
    );
    let stored = worker.send("PUT", &at("global/0"), b"\x00\xff here").await;
    assert_eq!(stored.status, 200);
    let found = worker.get(&at("global/0")).await;
    assert_eq!(
        (found.status, &found.body[..]),
        (200, &b"\x00\xff here"[..])
    );
    let version = stored.json()["version"].to_string();
    assert_eq!(found.header("Kolo-Version"), Some(version.as_str()));

    // `global` has the four members of the job.
    for finished in 1..4 {
        let answer = worker
            .send("DELETE", &at(&format!("global/{finished}")), b"")
            .await;
        let expected = json!({"outcome": "counted", "finished": finished, "expected": 4});
        assert_eq!(answer.json(), expected);
    }
    assert_eq!(worker.get(&at("global/0")).await.status, 200);
    let last = worker.send("DELETE", &at("global/0"), b"").await.json();
    assert_eq!(last["outcome"], "completed");
    assert_eq!(worker.get(&at("global/0")).await.status, 404);

    // Nodes are known by id, not by name.
    let local = worker
        .send("DELETE", &at("local_node-000000000000001e/0"), b"")
        .await
        .json();
    assert_eq!(local["expected"], 2);
    worker.send("PUT", &at("mine/k"), b"v").await;
    for outcome in ["removed", "absent"] {
        let answer = worker.send("DELETE", &at("mine/k"), b"").await.json();
        assert_eq!(answer["outcome"], outcome);
    }
    site.http.stop().await;
}

#[actix_rt::test]
async fn only_the_jobs_own_members_may_use_it() {
    let site = Site::new();
    let may = [
        worker_of(&site, JOB, 3),
        site.member(Role::Driver, &OWNER.to_string()),
        site.bearer(),
    ];
    let may_not = [
        worker_of(&site, OTHER_JOB, 0),
        site.member(Role::Driver, &DriverId(11).to_string()),
        site.member(Role::Node, "node-000000000000001e"),
    ];
    for client in &may {
        assert_eq!(client.send("PUT", &at("s/k"), b"v").await.status, 200);
        assert_eq!(client.get(&at("s/k")).await.status, 200);
    }
    for client in &may_not {
        for (method, path) in [
            ("GET", at("s/k")),
            ("PUT", at("s/k")),
            ("DELETE", at("s/k")),
            ("POST", at("batch")),
        ] {
            let answer = client.send(method, &path, b"{}").await;
            assert_eq!(answer.status, 403, "{method} {path}");
        }
    }
    assert_eq!(may[0].get(&at("s/k")).await.body, b"v");
    // The other job has a store of its own.
    let other = format!("/api/v1/jobs/{OTHER_JOB}/rendezvous/s/k");
    assert_eq!(worker_of(&site, OTHER_JOB, 0).get(&other).await.status, 404);
    site.http.stop().await;
}

#[actix_rt::test]
async fn a_reader_waits_until_the_key_is_there() {
    let site = Site::new();
    let reader = worker_of(&site, JOB, 0);
    let waiting = actix_rt::spawn(async move { reader.get(&at("s/k?wait=20")).await });
    let writer = worker_of(&site, JOB, 1);
    // Two round trips: the reader has most likely arrived, and whether or not, it must get the value.
    let first = writer.send("PUT", &at("s/other"), b"").await.json()["version"].as_u64();
    let second = writer.send("PUT", &at("s/k"), b"v").await.json()["version"].as_u64();
    assert!(second > first);
    let answer = waiting.await.unwrap();
    assert_eq!((answer.status, &answer.body[..]), (200, &b"v"[..]));

    // What is known already is not news.
    let version = answer.header("Kolo-Version").unwrap();
    let answer = writer
        .get(&at(&format!("s/k?wait=0.05&after={version}")))
        .await;
    assert_eq!(answer.status, 404);
    let newer = worker_of(&site, JOB, 2);
    let path = at(&format!("s/k?wait=20&after={version}"));
    let waiting = actix_rt::spawn(async move { newer.get(&path).await });
    writer.send("PUT", &at("s/k"), b"w").await;
    assert_eq!(waiting.await.unwrap().body, b"w");
    site.http.stop().await;
}

#[actix_rt::test]
async fn names_are_percent_decoded_and_options_are_checked() {
    let site = Site::new();
    let worker = worker_of(&site, JOB, 0);
    assert_eq!(
        worker.send("PUT", &at("a%20b/c%2Fd%3F"), b"v").await.status,
        200
    );
    assert_eq!(worker.get(&at("a%20b/c%2fd%3f")).await.body, b"v");
    let batch = json!({"get": [{"scope": "a b", "key": "c/d?"}]}).to_string();
    let answer = worker
        .send("POST", &at("batch"), batch.as_bytes())
        .await
        .json();
    assert_eq!(answer["values"][0]["value"], "dg==");

    for bad in [
        "s/k?wait=61",
        "s/k?wait=-1",
        "s/k?wait=NaN",
        "s/k?wait=inf",
        "s/k?wait=x",
        "s/k?wait=",
        "s/k?after=-1",
        "s/k?generation=x",
        "s/k?unknown=1",
        "s/k?wait=1&wait=2",
    ] {
        let answer = worker.get(&at(bad)).await;
        assert_eq!(
            (answer.status, answer.error_kind().as_str()),
            (400, "invalid"),
            "{bad}"
        );
    }
    let long = "x".repeat(600);
    let answer = worker.send("PUT", &at(&format!("s/{long}")), b"").await;
    assert_eq!(answer.status, 400);
    site.http.stop().await;
}

#[actix_rt::test]
async fn another_generation_has_another_store_and_a_stale_member_is_refused() {
    let site = Site::new();
    let worker = worker_of(&site, JOB, 0);
    assert_eq!(
        worker
            .send("PUT", &at("s/k?generation=1"), b"old")
            .await
            .status,
        200
    );
    let early = worker.get(&at("s/k?generation=2")).await;
    assert_eq!((early.status, early.error_kind().as_str()), (409, "stale"));

    site.head
        .change_job(JOB, |job| job.generation = Generation(2));
    let fresh = worker.get(&at("s/k?generation=2")).await;
    assert_eq!(fresh.status, 404);
    assert_eq!(
        worker
            .send("PUT", &at("s/k?generation=2"), b"new")
            .await
            .status,
        200
    );
    let stale = worker.send("PUT", &at("s/k?generation=1"), b"old").await;
    assert_eq!((stale.status, stale.error_kind().as_str()), (409, "stale"));
    assert_eq!(worker.get(&at("s/k")).await.body, b"new");
    site.http.stop().await;
}

#[actix_rt::test]
async fn it_ends_with_the_job() {
    let site = Site::new();
    let worker = worker_of(&site, JOB, 0);
    worker.send("PUT", &at("s/k"), b"v").await;
    site.head
        .change_job(JOB, |job| job.state = JobState::Succeeded);
    // The head's word is taken for true for a second, or until a generation is asked for that is not known.
    let answer = worker.get(&at("s/k?generation=2")).await;
    assert_eq!(answer.status, 404);
    assert!(
        answer.json()["error"]["message"]
            .as_str()
            .unwrap()
            .contains("has ended (succeeded)")
    );
    assert_eq!(worker.get(&at("s/k")).await.status, 404);

    site.head
        .change(|known| known.jobs = vec![job(OTHER_JOB, JobState::Pending)]);
    assert_eq!(worker.get(&at("s/k")).await.error_kind(), "not_found");
    site.http.stop().await;
}

#[actix_rt::test]
async fn a_group_exchanges_its_addresses_in_one_request_each() {
    let site = Site::new();
    let get: Vec<_> = (0..4)
        .map(|rank| json!({"scope": "global", "key": rank.to_string()}))
        .collect();
    let members = (0..4).map(|rank: u32| {
        let worker = worker_of(&site, JOB, rank);
        let value = ["bm9kZTA=", "bm9kZTE=", "bm9kZTI=", "bm9kZTM="][rank as usize];
        let put = json!([{"scope": "global", "key": rank.to_string(), "value": value}]);
        let body = json!({"put": put, "get": get}).to_string();
        async move {
            worker
                .send("POST", &at("batch?wait=20"), body.as_bytes())
                .await
        }
    });
    for answer in join_all(members).await {
        assert_eq!(answer.status, 200);
        let values: Vec<_> = answer.json()["values"]
            .as_array()
            .unwrap()
            .iter()
            .map(|value| value["value"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(values, ["bm9kZTA=", "bm9kZTE=", "bm9kZTI=", "bm9kZTM="]);
    }
    site.http.stop().await;
}

#[actix_rt::test]
async fn a_batch_that_waits_in_vain_gives_what_is_there() {
    let site = Site::new();
    let worker = worker_of(&site, JOB, 0);
    let body = json!({
        "put": [{"scope": "s", "key": "a", "value": "YQ=="}],
        "get": [{"scope": "s", "key": "b"}, {"scope": "s", "key": "a"}],
    })
    .to_string();
    let answer = worker
        .send("POST", &at("batch?wait=0.05"), body.as_bytes())
        .await
        .json();
    assert_eq!(answer["values"][0], json!(null));
    assert_eq!(answer["values"][1]["value"], "YQ==");
    assert_eq!(answer["values"][1]["version"], answer["version"]);
    site.http.stop().await;
}

#[actix_rt::test]
async fn a_bad_batch_is_refused_with_what_is_wrong() {
    let site = Site::new();
    let worker = worker_of(&site, JOB, 0);
    let too_many: Vec<_> = (0..4097)
        .map(|_| json!({"scope": "s", "key": "k"}))
        .collect();
    for (body, message) in [
        (String::new(), "not a batch"),
        ("[1]".to_owned(), "not a batch"),
        ("{\"got\": []}".to_owned(), "unknown field `got`"),
        (
            "{\"get\": [{\"scope\": \"s\"}]}".to_owned(),
            "missing field `key`",
        ),
        (
            json!({"put": [{"scope": "s", "key": "k", "value": "*"}]}).to_string(),
            "not base64",
        ),
        (
            json!({"put": [{"scope": "", "key": "k", "value": ""}]}).to_string(),
            "allowed are 1 to 512",
        ),
        (json!({"get": too_many}).to_string(), "4097 keys"),
        (
            format!("{}1{}", "[".repeat(5000), "]".repeat(5000)),
            "not a batch",
        ),
    ] {
        let answer = worker.send("POST", &at("batch"), body.as_bytes()).await;
        assert_eq!(answer.status, 400, "{message}: {answer:?}");
        let given = answer.json()["error"]["message"]
            .as_str()
            .unwrap()
            .to_owned();
        assert!(given.contains(message), "{given}");
    }
    site.http.stop().await;
}

#[actix_rt::test]
async fn the_answer_to_a_batch_is_limited() {
    let site = Site::new();
    let worker = worker_of(&site, JOB, 0);
    let value = vec![7; 1 << 20];
    let stored = worker.send("PUT", &at("s/k"), &value).await;
    assert_eq!(stored.status, 200);
    let ask = |times: usize| {
        let keys = vec![json!({"scope": "s", "key": "k"}); times];
        json!({ "get": keys }).to_string()
    };
    for (times, status) in [(16, 200), (17, 413), (4096, 413)] {
        let body = ask(times);
        let answer = worker.send("POST", &at("batch"), body.as_bytes()).await;
        assert_eq!(answer.status, status, "{times}");
        if status == 413 {
            assert_eq!(answer.error_kind(), "too_large");
        }
    }
    site.http.stop().await;
}

#[actix_rt::test]
async fn values_end_with_their_job_and_all_jobs_share_one_memory() {
    let site = Site::with_memory(200_000);
    let value = vec![b'x'; 60_000];
    let (one, two) = (worker_of(&site, JOB, 0), worker_of(&site, OTHER_JOB, 0));
    let of_other = |key: &str| format!("/api/v1/jobs/{OTHER_JOB}/rendezvous/s/{key}");
    for key in ["s/1", "s/2"] {
        assert_eq!(one.send("PUT", &at(key), &value).await.status, 200);
    }
    assert_eq!(two.send("PUT", &of_other("1"), &value).await.status, 200);
    let full = two.send("PUT", &of_other("2"), &value).await;
    assert_eq!((full.status, full.error_kind().as_str()), (507, "full"));
    let held = site.stores.memory().held();
    assert!((180_000..200_000).contains(&held), "{held}");
    // The head says the end of a job without that anybody asks for its values.
    let waiting = actix_rt::spawn({
        let one = one.clone();
        async move { one.get(&at("s/never?wait=50")).await }
    });
    while site.stores.waiting(JOB) == 0 {
        actix_rt::task::yield_now().await;
    }
    site.head
        .change_job(JOB, |job| job.state = JobState::Succeeded);
    site.stores.end(JOB);
    assert_eq!(waiting.await.unwrap().status, 404);
    assert!(site.stores.memory().held() < 70_000);
    assert_eq!(two.send("PUT", &of_other("2"), &value).await.status, 200);
    // An answer of the head that is older than the end opens nothing again.
    site.head
        .change_job(JOB, |job| job.state = JobState::Healthy);
    let late = one.send("PUT", &at("s/1"), &value).await;
    assert_eq!(
        (late.status, late.error_kind().as_str()),
        (404, "not_found")
    );
    site.stores.end(OTHER_JOB);
    assert_eq!(site.stores.memory().held(), 0);
    site.http.stop().await;
}
