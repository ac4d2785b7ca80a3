//! What no order of requests shows for certain.

use kolo_transport::ids::ClusterId;
use kolo_transport::{Authority, EndpointConfig, TransportRuntime};

use super::*;
use crate::head::HeadState;

const HOUR: Duration = Duration::from_secs(3600);

/// Whoever is put out in the middle of making a token has none afterwards.
#[test]
fn a_token_that_is_made_while_its_maker_is_put_out_does_not_stay() {
    let store = Arc::new(Store::open(&HeadState::Memory, HOUR).unwrap());
    let runtime = TransportRuntime::new(1).unwrap();
    let credentials = Authority::create(ClusterId(1))
        .unwrap()
        .issue(Role::Head, HEAD_NAME)
        .unwrap();
    let live = LiveCredentials::new(credentials);
    let config = EndpointConfig::towards("127.0.0.1:1".parse().unwrap());
    let endpoint = Endpoint::bind(&runtime, live.clone(), config).unwrap();
    let lives = Lives {
        member: HOUR,
        worker: HOUR,
    };
    let trust = Trust::new(store, lives, live, endpoint).unwrap();
    let name = DriverId(7).to_string();
    let add = |members: &mut crate::head::members::Members| {
        assert!(members.add_administrator(&name));
        Ok::<_, HeadError>(())
    };
    trust.store.change_members(add).unwrap();
    let create = || trust.create_token(&name, Role::Driver, true, HOUR, None);
    create().unwrap();
    trust.revoke("driver", Role::Driver, &name, "").unwrap();
    assert_eq!(trust.store.book().list(), []);
    // As if its right had been looked at before.
    let refusal = create().unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::Forbidden);
    assert_eq!(trust.store.book().list(), []);
}
