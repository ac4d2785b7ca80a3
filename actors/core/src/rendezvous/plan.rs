//! Which scopes a job has, how many members finish each, and who may come.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use kolo_wire::Member;

use super::RendezvousLimits;

/// Where workers publish by which addresses they hear that hosts have changed, as `HOSTNAME:LOCAL_RANK`. Horovod's elastic programs do
/// so in static jobs, too, where nobody asks them anything.
pub(super) const WORKER_ADDRESSES: &str = "worker_addresses";

/// What a process set's scopes have between the name of the scope they belong to and the set's hash.
pub(super) const PROCESS_SET: &str = "_process_set_hash_";

/// One member of the job, as its environment describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RendezvousSlot {
    /// The value of `HOROVOD_HOSTNAME` in its environment. The same for members of one node, and only for those.
    pub hostname: String,
    /// Its local rank.
    pub local_rank: u32,
    /// Members on its node.
    pub local_size: u32,
    /// Nodes that have its local rank.
    pub cross_size: u32,
}

/// The scopes of one job's rendezvous, and the addresses of its nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RendezvousPlan {
    world_size: u32,
    scopes: BTreeMap<String, u32>,
    peers: RendezvousPeers,
}

/// The addresses from which members of a job come.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RendezvousPeers(BTreeSet<IpAddr>);

impl RendezvousPeers {
    /// These addresses.
    pub fn new(peers: impl IntoIterator<Item = IpAddr>) -> Self {
        Self(peers.into_iter().map(|peer| peer.to_canonical()).collect())
    }

    /// Whether a connection from `peer` to `local` may come from one of the job's nodes.
    ///
    /// A node on this machine may be known by a loopback address while its workers come by another address of
    /// the machine; then both ends of the connection have the same address.
    #[must_use]
    pub fn admits(&self, peer: IpAddr, local: IpAddr) -> bool {
        let (peer, local) = (peer.to_canonical(), local.to_canonical());
        self.0.contains(&peer)
            || ((peer.is_loopback() || peer == local) && self.0.iter().any(IpAddr::is_loopback))
    }
}

impl RendezvousPlan {
    /// A plan for these members, who come from these addresses.
    ///
    /// The scopes are `global` with the size of the world, `local_<hostname>` with the local size and
    /// `cross_<local rank>` with the cross size.
    pub fn new(
        slots: impl IntoIterator<Item = RendezvousSlot>,
        peers: impl IntoIterator<Item = IpAddr>,
    ) -> Self {
        let mut scopes = BTreeMap::new();
        let mut world_size = 0;
        for slot in slots {
            world_size += 1;
            scopes.insert(format!("local_{}", slot.hostname), slot.local_size);
            scopes.insert(format!("cross_{}", slot.local_rank), slot.cross_size);
        }
        scopes.insert("global".to_owned(), world_size);
        Self {
            world_size,
            scopes,
            peers: RendezvousPeers::new(peers),
        }
    }

    /// A plan for the members of a generation. `hostname` gives the value of each one's `HOROVOD_HOSTNAME`.
    pub fn from_members(
        members: &[Member],
        hostname: impl Fn(&Member) -> String,
        peers: impl IntoIterator<Item = IpAddr>,
    ) -> Self {
        let slots = members.iter().map(|member| RendezvousSlot {
            hostname: hostname(member),
            local_rank: member.local_rank.0,
            local_size: member.local_size,
            cross_size: member.cross_size,
        });
        Self::new(slots, peers)
    }

    /// The scopes and their sizes, for [`RendezvousStore::init`](super::RendezvousStore::init).
    #[must_use]
    pub fn scopes(&self) -> &BTreeMap<String, u32> {
        &self.scopes
    }

    /// Number of members.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        self.world_size
    }

    /// Limits for a store of this job.
    #[must_use]
    pub fn limits(&self) -> RendezvousLimits {
        RendezvousLimits::for_world(self.world_size)
    }

    /// Whether a key belongs to this job: one in a scope of its own, in that of a process set in one of its own, or a member's in
    /// `worker_addresses`.
    #[must_use]
    pub fn allows(&self, scope: &str, key: &str) -> bool {
        if self.scopes.contains_key(scope) {
            return true;
        }
        if scope == WORKER_ADDRESSES {
            return self.is_member(key);
        }
        // A hostname may hold the same words, so the last place counts.
        scope.rsplit_once(PROCESS_SET).is_some_and(|(owner, hash)| {
            self.scopes.contains_key(owner)
                && (1..=16).contains(&hash.len())
                && hash.bytes().all(|byte| byte.is_ascii_hexdigit())
        })
    }

    /// Whether a member is meant by `HOSTNAME:LOCAL_RANK`.
    fn is_member(&self, key: &str) -> bool {
        // A hostname may be an address with colons.
        let Some((hostname, local_rank)) = key.rsplit_once(':') else {
            return false;
        };
        let size = self.scopes.get(&format!("local_{hostname}")).copied();
        let rank = local_rank.parse::<u32>().ok();
        // Written in one way only, so that a member has one key.
        size.zip(rank)
            .is_some_and(|(size, rank)| rank < size && rank.to_string() == local_rank)
    }

    /// Where members come from.
    #[must_use]
    pub fn peers(&self) -> &RendezvousPeers {
        &self.peers
    }
}
