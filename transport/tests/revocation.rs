//! Members that are put out.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod common;

use common::{Cluster, within};
use kolo_transport::ids::{DriverId, NodeId};
use kolo_transport::wire::{RevocationList, RevokedMember};
use kolo_transport::{CloseCode, ConnectError, Connection, ConnectionLost, Endpoint, Expect, Role};

fn list(epoch: u64, serial: u64, members: &[(Role, String)]) -> RevocationList {
    RevocationList {
        epoch,
        serial,
        members: members
            .iter()
            .map(|(role, name)| RevokedMember {
                role: *role,
                name: name.clone(),
                since_unix: 0,
                reason: String::new(),
            })
            .collect(),
    }
}

async fn connect(
    client: &Endpoint,
    server: &Endpoint,
) -> Result<(Connection, Connection), ConnectError> {
    within(async {
        let expect = Expect {
            role: server.identity().role,
            name: None,
        };
        let connected = client.connect(server.local_addr(), expect).await?;
        Ok((connected, server.accept().await.unwrap()))
    })
    .await
}

fn is_revoked(lost: &ConnectionLost) -> bool {
    matches!(
        lost,
        ConnectionLost::Closed {
            code: CloseCode::Revoked,
            ..
        }
    )
}

#[tokio::test]
async fn a_revoked_member_is_out_at_once_and_others_are_not_touched() {
    let cluster = Cluster::new();
    let server = cluster.bind(cluster.node(7));
    let (bad, good) = (
        cluster.bind(cluster.driver(1)),
        cluster.bind(cluster.driver(2)),
    );
    let (bad_end, _bad_served) = connect(&bad, &server).await.unwrap();
    let (good_end, _good_served) = connect(&good, &server).await.unwrap();
    let out = [
        (Role::Driver, DriverId(1).to_string()),
        // Of the same number, and another role.
        (Role::Node, NodeId(2).to_string()),
    ];
    assert!(server.revoke(&list(5, 1, &out)));
    assert!(server.is_revoked(bad.identity()));
    let lost = within(bad_end.closed()).await;
    assert!(is_revoked(&lost), "{lost}");
    assert!(
        lost.to_string()
            .contains("driver-0000000000000001 was revoked"),
        "{lost}"
    );
    assert!(!lost.is_retryable());
    assert!(!good_end.is_closed());
    // It is refused from now on, and says why.
    let error = connect(&bad, &server).await.unwrap_err();
    assert!(error.to_string().contains("was revoked"), "{error}");
    assert!(!error.is_retryable());
    connect(&good, &server).await.unwrap();
    // The newest list of one head counts, whatever the order in which they come.
    assert!(!server.revoke(&list(5, 0, &[])));
    connect(&bad, &server).await.unwrap_err();
    assert!(server.revoke(&list(5, 2, &[])));
    connect(&bad, &server).await.unwrap();
    // A head that was started again counts anew.
    assert!(server.revoke(&list(6, 1, &out)));
    connect(&bad, &server).await.unwrap_err();
}

#[tokio::test]
async fn a_revoked_member_is_not_connected_to_either() {
    let cluster = Cluster::new();
    let server = cluster.bind(cluster.node(7));
    let client = cluster.bind(cluster.driver(1));
    let (end, _served) = connect(&client, &server).await.unwrap();
    let out = [(Role::Node, NodeId(7).to_string())];
    client.revoke(&list(1, 1, &out));
    assert_eq!(within(end.closed()).await, ConnectionLost::ClosedHere);
    let error = connect(&client, &server).await.unwrap_err();
    assert!(error.to_string().contains("was revoked"), "{error}");
}
