//! Certificates that live for seconds are renewed, and nobody notices.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use common::{Cluster, within};
use kolo_transport::identity::HEAD_NAME;
use kolo_transport::ids::DriverId;
use kolo_transport::renewal::keep_renewed;
use kolo_transport::wire::{HeadReply, HeadRequest};
use kolo_transport::{
    Connection, Credentials, Endpoint, EndpointConfig, Expect, Limits, LiveCredentials, Role,
};

/// Certificates have whole seconds, and this leaves one of them after the renewal.
const LIFE: Duration = Duration::from_secs(3);

/// Waits until a certificate has ended, by the clock that TLS goes by.
async fn ended(credentials: &Credentials) {
    within(async {
        // TLS counts whole seconds, and the last one is still good.
        while SystemTime::now() <= credentials.validity().end + Duration::from_secs(1) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

/// A request and its answer over a connection.
async fn echo(client: &Connection, server: &Connection) {
    let serve = async {
        let mut stream = server.accept(Limits::CONTROL).await.unwrap();
        stream.recv.expect::<HeadRequest>().await.unwrap();
        stream.send.send(&HeadReply::Done, &[]).await.unwrap();
        stream.send.finish();
    };
    let ask = client.request::<_, HeadReply>(&HeadRequest::Jobs, Duration::from_secs(20));
    let ((), reply) = within(async { tokio::join!(serve, ask) }).await;
    assert_eq!(reply.unwrap(), HeadReply::Done);
}

async fn connect(client: &Endpoint, server: &Endpoint) -> Option<(Connection, Connection)> {
    within(async {
        tokio::select! {
            biased;
            (accepted, connected) = async {
                let connecting = client.connect(server.local_addr(), Expect::head());
                // A server that refuses accepts nobody.
                match connecting.await {
                    Ok(connected) => (server.accept().await, Some(connected)),
                    Err(_) => (None, None),
                }
            } => Some((connected?, accepted?)),
        }
    })
    .await
}

#[tokio::test]
async fn renewed_certificates_are_presented_by_both_sides_and_old_connections_go_on() {
    let cluster = Cluster::new();
    let authority = &cluster.authority;
    let name = DriverId(1).to_string();
    let bind = |live: &LiveCredentials| {
        Endpoint::bind(&cluster.runtime, live, EndpointConfig::default()).unwrap()
    };
    let head = LiveCredentials::new(authority.issue_for(Role::Head, HEAD_NAME, LIFE).unwrap());
    let driver = LiveCredentials::new(authority.issue_for(Role::Driver, &name, LIFE).unwrap());
    // The same without renewal, to show that certificates do end.
    let (stale_head, stale_driver) = (bind(&head.current().into()), bind(&driver.current().into()));
    let client = bind(&driver);
    // Another test's client may have the TCP port.
    let (server, bulk) = loop {
        let server = bind(&head);
        if let Ok(bulk) = server.listen_tls() {
            break (server, bulk);
        }
    };
    let (old_client, old_server) = connect(&client, &server).await.unwrap();
    let first = (head.current(), driver.current());

    let mut tasks = Vec::new();
    for live in [&head, &driver] {
        let (authority, identity) = (Arc::clone(authority), live.identity().clone());
        let renew = move |csr: Vec<u8>| {
            let signed = authority.sign(&csr, identity.role, &identity.name, LIFE);
            async { Ok(signed.map_err(|error| error.to_string())?.to_vec()) }
        };
        tasks.push(tokio::spawn(keep_renewed(live.clone(), renew, |_| {})));
    }
    for (live, first) in [(&head, &first.0), (&driver, &first.1)] {
        let mut changes = live.changes();
        within(changes.wait_for(|current| current.validity().end > first.validity().end))
            .await
            .unwrap();
    }
    ended(&first.0).await;
    ended(&first.1).await;

    echo(&old_client, &old_server).await;
    let (new_client, new_server) = connect(&client, &server).await.unwrap();
    echo(&new_client, &new_server).await;
    // Over TCP too, by a listener and a client that are older than the certificates.
    let (accepted, connected) = within(async {
        tokio::join!(
            bulk.accept(),
            client.connect_tls(bulk.local_addr(), Expect::head())
        )
    })
    .await;
    assert_eq!(accepted.unwrap().peer(), driver.identity());
    assert_eq!(connected.unwrap().peer(), head.identity());
    assert!(connect(&client, &stale_head).await.is_none());
    assert!(connect(&stale_driver, &server).await.is_none());
    for task in tasks {
        task.abort();
    }
}

#[tokio::test]
async fn a_renewal_that_fails_is_tried_again_before_the_end() {
    let cluster = Cluster::new();
    let authority = Arc::clone(&cluster.authority);
    let name = DriverId(1).to_string();
    // Two seconds for all of the attempts.
    let life = 2 * LIFE;
    let live = LiveCredentials::new(authority.issue_for(Role::Driver, &name, life).unwrap());
    let first = live.current();
    let attempts = Arc::new(AtomicU32::new(0));
    let renew = {
        let (attempts, name) = (Arc::clone(&attempts), name.clone());
        move |csr: Vec<u8>| {
            let attempt = attempts.fetch_add(1, Ordering::Relaxed);
            let result = match attempt {
                0 => Err("the head is away".to_owned()),
                1 => Ok(vec![1, 2, 3]),
                // Another's certificate.
                2 => Ok(authority.issue(Role::Driver, &name).unwrap().chain()[0].to_vec()),
                _ => Ok(authority
                    .sign(&csr, Role::Driver, &name, life)
                    .unwrap()
                    .to_vec()),
            };
            async { result }
        }
    };
    let (told, mut renewed) = tokio::sync::mpsc::unbounded_channel();
    let task = tokio::spawn(keep_renewed(live.clone(), renew, move |new| {
        told.send(new.clone()).unwrap();
    }));
    let new = within(renewed.recv()).await.unwrap();
    assert_eq!(attempts.load(Ordering::Relaxed), 4);
    assert!(!first.validity().has_ended(SystemTime::now()));
    assert_eq!(new.identity(), first.identity());
    assert_eq!(new.certificate(), live.current().certificate());
    task.abort();
}

#[test]
fn only_the_same_identity_key_and_authority_take_the_place_of_a_certificate() {
    let cluster = Cluster::new();
    let own = cluster.driver(1);
    let live = LiveCredentials::new(own.clone());
    let csr = own.renewal_request().unwrap();
    let day = Duration::from_secs(24 * 3600);
    let sign = |cluster: &Cluster, role, name: &str| {
        let signed = cluster.authority.sign(&csr, role, name, day);
        own.renewed(&signed.unwrap())
    };
    let renewed = sign(&cluster, Role::Driver, &DriverId(1).to_string()).unwrap();
    assert!(renewed.validity().life() <= day);
    live.replace(renewed).unwrap();
    let error = sign(&cluster, Role::Driver, &DriverId(2).to_string()).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("it is for kolo://"), "{error}");
    sign(&Cluster::new(), Role::Driver, &DriverId(1).to_string()).unwrap_err();
    own.renewed(&cluster.driver(1).certificate()).unwrap_err();
    live.replace(cluster.driver(2)).unwrap_err();
    live.replace(Cluster::new().driver(1)).unwrap_err();
    assert!(live.current().validity().life() <= day);
}

#[test]
fn a_renewed_certificate_is_stored_beside_its_key_and_nowhere_else() {
    let cluster = Cluster::new();
    let dir = tempfile::tempdir().unwrap();
    let own = cluster.driver(1);
    own.save(dir.path()).unwrap();
    let day = Duration::from_secs(24 * 3600);
    let csr = own.renewal_request().unwrap();
    let name = DriverId(1).to_string();
    let signed = cluster.authority.sign(&csr, Role::Driver, &name, day);
    let renewed = own.renewed(&signed.unwrap()).unwrap();
    assert!(renewed.save_renewed(dir.path()).unwrap());
    let read = || Credentials::load(dir.path()).unwrap();
    assert_eq!(read().certificate(), renewed.certificate());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    // Somebody has logged in again meanwhile.
    let other = cluster.driver(2);
    other.save(dir.path()).unwrap();
    assert!(!renewed.save_renewed(dir.path()).unwrap());
    assert_eq!(read().certificate(), other.certificate());
}
