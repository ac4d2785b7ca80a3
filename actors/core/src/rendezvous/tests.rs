use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use bytes::Bytes;
use proptest::prelude::*;

use super::*;

fn store(scopes: &[(&str, u32)]) -> RendezvousStore {
    let mut store = RendezvousStore::default();
    let scopes = scopes.iter();
    store.init(
        scopes
            .map(|(name, size)| ((*name).to_owned(), *size))
            .collect(),
    );
    store
}

fn put(store: &mut RendezvousStore, scope: &str, key: &str, value: &'static str) {
    let value = Bytes::from_static(value.as_bytes());
    store.put(scope, key, value).unwrap();
}

#[test]
fn init_clears_everything() {
    let mut store = store(&[("global", 2)]);
    put(&mut store, "global", "0", "x");
    store.delete("global", "0");
    let sizes = [("global".to_owned(), 1), ("none".to_owned(), 0)];
    store.init(sizes.into());
    assert_eq!(store.usage(), RendezvousUsage::default());
    assert_eq!(store.delete("global", "1"), Deleted::Completed);
    put(&mut store, "none", "k", "v");
    assert_eq!(store.delete("none", "k"), Deleted::Removed);
}

#[test]
fn what_is_over_a_limit_is_refused_and_changes_nothing() {
    let limits = RendezvousLimits {
        name_bytes: 4,
        value_bytes: 8,
        total_bytes: 16,
        keys: 3,
    };
    let mut store = RendezvousStore::new(limits);
    let zeros = |length| Bytes::from(vec![0; length]);
    let refused = |store: &mut RendezvousStore, scope: &str, key: &str, length| {
        let refused = store.put(scope, key, zeros(length)).unwrap_err();
        refused.to_string()
    };
    for (scope, key, length, why) in [
        (
            "",
            "k",
            0,
            "the name of a scope has 0 bytes; allowed are 1 to 4",
        ),
        (
            "s",
            "12345",
            0,
            "the name of a key has 5 bytes; allowed are 1 to 4",
        ),
        (
            "s",
            "k",
            9,
            "the value of `s/k` has 9 bytes; allowed are up to 8",
        ),
    ] {
        assert_eq!(refused(&mut store, scope, key, length), why);
    }
    store.put("s", "a", zeros(8)).unwrap();
    assert!(refused(&mut store, "s", "b", 8).starts_with("the rendezvous is full"));
    for key in ["a", "b", "c"] {
        store.put("s", key, zeros(0)).unwrap();
    }
    let before = store.usage();
    assert!(refused(&mut store, "s", "d", 0).contains("3 keys"));
    assert_eq!(store.usage(), before);
}

fn slot(hostname: &str, local_rank: u32, local_size: u32, cross_size: u32) -> RendezvousSlot {
    RendezvousSlot {
        hostname: hostname.to_owned(),
        local_rank,
        local_size,
        cross_size,
    }
}

#[test]
fn a_plan_gives_the_scopes_of_horovod() {
    // a:2,b:1,c:3 of reference section 2
    let plan = RendezvousPlan::new(
        [
            slot("a", 0, 2, 3),
            slot("a", 1, 2, 2),
            slot("b", 0, 1, 3),
            slot("c", 0, 3, 3),
            slot("c", 1, 3, 2),
            slot("c", 2, 3, 1),
        ],
        [],
    );
    let expected = [
        ("cross_0", 3),
        ("cross_1", 2),
        ("cross_2", 1),
        ("global", 6),
        ("local_a", 2),
        ("local_b", 1),
        ("local_c", 3),
    ];
    let expected = expected.map(|(name, size)| (name.to_owned(), size));
    assert_eq!(plan.scopes(), &expected.into());
    assert_eq!(plan.world_size(), 6);
}

#[test]
fn a_plan_allows_its_scopes_and_their_process_sets_only() {
    let plan = RendezvousPlan::new(
        [slot("a", 0, 1, 2), slot("x_process_set_hash_1", 0, 1, 2)],
        [],
    );
    for good in "global local_a cross_0 global_process_set_hash_1f local_a_process_set_hash_0123456789abcdef \
                 cross_0_process_set_hash_F local_x_process_set_hash_1 \
                 local_x_process_set_hash_1_process_set_hash_2"
        .split(' ')
    {
        assert!(plan.allows(good, "0"), "{good}");
    }
    for bad in " Global local_b local_ cross_1 rank_and_size runfunc global_process_set_hash_ \
                global_process_set_hash_g global_process_set_hash_01234567890123456 \
                other_process_set_hash_1 global_process_set_hash_1_process_set_hash_2"
        .split(' ')
    {
        assert!(!plan.allows(bad, "0"), "{bad}");
    }
}

#[test]
fn members_publish_addresses_and_nobody_else_does() {
    let plan = RendezvousPlan::new(
        [
            slot("a", 0, 2, 2),
            slot("a", 1, 2, 1),
            slot("fd00::2", 0, 1, 2),
        ],
        [],
    );
    for key in ["a:0", "a:1", "fd00::2:0"] {
        assert!(plan.allows("worker_addresses", key), "{key}");
    }
    for key in " a a: a:2 a:-1 a:+1 a:01 b:0 fd00::2:1 fd00::2 :0 a:0:0".split(' ') {
        assert!(!plan.allows("worker_addresses", key), "{key}");
    }
    assert!(!plan.allows("worker_addresses_process_set_hash_1", "a:0"));
}

#[test]
fn a_plan_admits_the_addresses_of_its_nodes() {
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    let remote = &["10.0.0.2", "::ffff:10.0.0.3"][..];
    let mixed = &["127.0.0.1", "10.0.0.2"][..];
    for (nodes, peer, local, is_admitted) in [
        (remote, "10.0.0.2", "10.0.0.1", true),
        (remote, "::ffff:10.0.0.2", "::ffff:10.0.0.1", true),
        (remote, "10.0.0.3", "10.0.0.1", true),
        (remote, "10.0.0.4", "10.0.0.1", false),
        (remote, "127.0.0.1", "127.0.0.1", false),
        (remote, "10.0.0.1", "10.0.0.1", false),
        (mixed, "127.0.0.1", "127.0.0.1", true),
        (mixed, "10.0.0.1", "10.0.0.1", true),
        (mixed, "10.0.0.4", "10.0.0.1", false),
    ] {
        let plan = RendezvousPlan::new([], nodes.iter().map(|node| ip(node)));
        let admits = plan.peers().admits(ip(peer), ip(local));
        assert_eq!(admits, is_admitted, "{peer} of {nodes:?}");
    }
}

#[test]
fn limits_leave_room_for_horovods_full_mesh() {
    for world in [1_u32, 2, 64, 1024] {
        let limits = RendezvousLimits::for_world(world);
        let value = world as usize * 136;
        assert!(limits.value_bytes >= value);
        // global, local and cross scope, each with `<r>` and `rank_<r>`, at worst all of full size
        assert!(limits.total_bytes >= 3 * world as usize * (value + 100));
        assert!(limits.keys >= 6 * world as usize);
    }
}

/// The same store, written naively.
#[derive(Default)]
struct Model {
    expected: BTreeMap<String, u32>,
    finished: BTreeMap<String, BTreeSet<String>>,
    values: BTreeMap<(String, String), Bytes>,
}

impl Model {
    fn delete(&mut self, scope: &str, key: &str) -> Deleted {
        let place = (scope.to_owned(), key.to_owned());
        let Some(expected) = self.expected.get(scope).copied() else {
            let removed = self.values.remove(&place);
            return removed.map_or(Deleted::Absent, |_| Deleted::Removed);
        };
        let finished = self.finished.entry(scope.to_owned()).or_default();
        finished.insert(key.to_owned());
        let count = finished.len() as u32;
        if count < expected {
            return Deleted::Counted {
                finished: count,
                expected,
            };
        }
        finished.clear();
        self.values.retain(|(other, _), _| other != scope);
        Deleted::Completed
    }
}

#[derive(Debug, Clone)]
enum Op {
    Put(&'static str, u8, Vec<u8>),
    Delete(&'static str, u8),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let scope = || prop::sample::select(vec!["global", "local_a", "cross_0", "adhoc", "other"]);
    let key = 0_u8..5;
    prop::collection::vec(
        prop_oneof![
            (
                scope(),
                key.clone(),
                prop::collection::vec(any::<u8>(), 0..4)
            )
                .prop_map(|(scope, key, value)| Op::Put(scope, key, value)),
            (scope(), key).prop_map(|(scope, key)| Op::Delete(scope, key)),
        ],
        0..120,
    )
}

proptest! {
    #[test]
    fn a_store_does_what_the_naive_one_does_and_its_books_balance(ops in ops()) {
        let sizes = [("global", 3), ("local_a", 2), ("cross_0", 1)];
        let mut store = store(&sizes);
        let mut model = Model {
            expected: sizes.iter().map(|(name, size)| ((*name).to_owned(), *size)).collect(),
            ..Model::default()
        };
        for op in ops {
            match op {
                Op::Put(scope, key, value) => {
                    let place = (scope.to_owned(), key.to_string());
                    store.put(scope, &place.1, value.clone().into()).unwrap();
                    // A DELETE repeated after its scope completed must not count for the next round.
                    if let Some(finished) = model.finished.get_mut(scope) {
                        finished.remove(&place.1);
                    }
                    model.values.insert(place, value.into());
                }
                Op::Delete(scope, key) => {
                    let deleted = store.delete(scope, &key.to_string());
                    prop_assert_eq!(deleted, model.delete(scope, &key.to_string()));
                }
            }
            for scope in ["global", "local_a", "cross_0", "adhoc", "other"] {
                for key in 0..5 {
                    let key = key.to_string();
                    let expected = model.values.get(&(scope.to_owned(), key.clone()));
                    prop_assert_eq!(store.get(scope, &key), expected);
                }
            }
            let bytes: usize = model.values.iter().map(|((scope, key), value)| scope.len() + key.len() + value.len()).sum();
            let expected = RendezvousUsage { keys: model.values.len(), bytes };
            prop_assert_eq!(store.usage(), expected);
        }
    }
}
