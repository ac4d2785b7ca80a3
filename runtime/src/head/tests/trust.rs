//! Who may change who is trusted, what nodes are told, and leaving in order.

use std::time::Duration;

use kolo_transport::identity::{HEAD_NAME, Identity, Role, identity_of};
use kolo_transport::ids::{DriverId, JobId, NodeId, Slot};
use kolo_transport::wire::{HeadReply, HeadRequest, NodeRequest, RefusalKind, RevocationList};
use kolo_transport::{CertificateRequest, Credentials};
use rustls::pki_types::CertificateDer;

use super::fake::{FakeNode, Member, config, good, introduction, soon};
use crate::head::{Head, HeadConfig, HeadState};

const HOUR: Duration = Duration::from_secs(3600);

/// A head with a folder, and the operator's connection to it.
async fn administered() -> (tempfile::TempDir, Head, Member) {
    let dir = tempfile::tempdir().unwrap();
    let head = Head::start(HeadConfig {
        state: HeadState::Dir(dir.path().to_owned()),
        ..config()
    })
    .await
    .unwrap();
    let admin = Credentials::load(head.admin_dir().unwrap()).unwrap();
    let admin = Member::with(&head, admin).await;
    (dir, head, admin)
}

fn revoke(name: &str) -> HeadRequest {
    HeadRequest::Revoke {
        role: if name.starts_with("node") {
            Role::Node
        } else {
            Role::Driver
        },
        name: name.to_owned(),
        reason: String::new(),
    }
}

#[tokio::test]
async fn s2_only_administrators_change_who_is_trusted_and_each_renews_its_own() {
    let (_dir, head, admin) = administered().await;
    let node = NodeId(7).to_string();
    let worker = Identity::worker_name(JobId(1), Slot(0));
    let members = [
        Member::new(&head, Role::Driver, &DriverId(7).to_string()).await,
        Member::new(&head, Role::Node, &node).await,
        Member::new(&head, Role::Worker, &worker).await,
        Member::new(&head, Role::Head, HEAD_NAME).await,
    ];
    let requests = [
        HeadRequest::CreateToken {
            role: Role::Node,
            admin: false,
            ttl_s: 60,
            uses: None,
        },
        HeadRequest::Tokens,
        HeadRequest::RevokeToken {
            id: "token-00000000".to_owned(),
        },
        revoke(&node),
        HeadRequest::Reinstate {
            role: Role::Node,
            name: node.clone(),
        },
        HeadRequest::DrainNode {
            node: node.clone(),
            deadline_ms: 0,
        },
        HeadRequest::UndrainNode { node: node.clone() },
    ];
    for member in &members {
        for request in &requests {
            let refusal = member.refused(request).await;
            assert_eq!(refusal.kind, RefusalKind::Forbidden, "{request:?}");
        }
        let csr = CertificateRequest::generate().unwrap().der().to_vec();
        let reply = member.ask(&HeadRequest::Renew { csr }).await;
        let own = member.endpoint.identity();
        match (own.role, reply) {
            (Role::Node | Role::Driver, HeadReply::Renewed { certificate }) => {
                let new = identity_of(&CertificateDer::from(certificate)).unwrap();
                assert_eq!(new, *own);
            }
            (Role::Worker | Role::Head, HeadReply::Refused(refusal)) => {
                assert_eq!(refusal.kind, RefusalKind::Forbidden);
            }
            other => panic!("{other:?}"),
        }
        let csr = b"none".to_vec();
        member.refused(&HeadRequest::Renew { csr }).await;
        assert_eq!(
            member.refused(&HeadRequest::Drain).await.kind,
            RefusalKind::Forbidden
        );
    }
    assert!(matches!(
        admin.ask(&requests[0]).await,
        HeadReply::Token { .. }
    ));
    let HeadReply::Tokens(tokens) = admin.ask(&HeadRequest::Tokens).await else {
        panic!("no tokens");
    };
    assert_eq!(tokens.len(), 1);
}

#[tokio::test]
async fn every_node_is_told_and_one_that_comes_later_learns_at_its_registration() {
    let (_dir, head, admin) = administered().await;
    let mut told = FakeNode::good(&head, 1).await;
    let silent = FakeNode::new(&head, 1, |request| match request {
        NodeRequest::Revocations(_) => None,
        other => good(other),
    })
    .await;
    let name = DriverId(7).to_string();
    let out = Member::new(&head, Role::Driver, &name).await;
    let reply = soon(admin.ask(&revoke(&name))).await;
    assert_eq!(
        reply,
        HeadReply::Revoked {
            told: 1,
            late: vec![silent.id]
        }
    );
    let is_told = |request: &NodeRequest| matches!(request, NodeRequest::Revocations(_));
    let NodeRequest::Revocations(list) = told.sees(is_told).await else {
        panic!("no list");
    };
    assert_eq!(list.members[0].name, name);
    assert!(
        soon(out.connection.closed())
            .await
            .to_string()
            .contains("revoked")
    );
    // Whoever registers now has the same list or a newer one.
    let later = Member::new(&head, Role::Node, &NodeId(9).to_string()).await;
    let registration = HeadRequest::Register(introduction(NodeId(9), 1));
    let registered = |reply| -> RevocationList {
        match reply {
            HeadReply::Registered { revoked, .. } => revoked,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(registered(later.ask(&registration).await), list);
    silent.member.vanish();
    // The lists of one head are counted.
    let undo = HeadRequest::Reinstate {
        role: Role::Driver,
        name: name.clone(),
    };
    admin.ask(&undo).await;
    let NodeRequest::Revocations(newer) = told.sees(is_told).await else {
        panic!("no list");
    };
    assert_eq!(newer.epoch, list.epoch);
    assert!(newer.serial > list.serial && newer.members.is_empty());
    Member::new(&head, Role::Driver, &name).await;
}

#[tokio::test]
async fn nodes_are_told_also_if_the_administrator_is_gone_at_once() {
    let (_dir, head, admin) = administered().await;
    let mut silent = FakeNode::new(&head, 1, |request| match request {
        NodeRequest::Revocations(_) => None,
        other => good(other),
    })
    .await;
    let name = DriverId(7).to_string();
    let out = Member::new(&head, Role::Driver, &name).await;
    let connection = admin.connection.clone();
    let asking = tokio::spawn(async move {
        let reply: Result<HeadReply, _> = connection.request(&revoke(&name), HOUR).await;
        reply
    });
    let is_told = |request: &NodeRequest| matches!(request, NodeRequest::Revocations(_));
    silent.sees(is_told).await;
    soon(out.connection.closed()).await;
    admin.vanish();
    assert!(soon(asking).await.unwrap().is_err());
    // It has not confirmed, so it is told again.
    silent.sees(is_told).await;
}
