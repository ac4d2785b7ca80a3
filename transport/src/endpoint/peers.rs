//! Who is connected, so that a member that is revoked can be put out at once.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::end::CloseCode;
use crate::identity::{Identity, Role};
use crate::session::{Connection, WeakConnection};
use crate::wire::RevocationList;

/// The peers of one endpoint.
#[derive(Default)]
pub(super) struct Peers(Mutex<State>);

#[derive(Default)]
struct State {
    /// Which head's count `serial` is.
    epoch: u64,
    serial: u64,
    revoked: HashSet<(Role, String)>,
    /// By [`Connection::stable_id`].
    connections: HashMap<usize, WeakConnection>,
    /// The number of connections from which on those that have ended are looked for.
    sweep_at: usize,
}

impl State {
    fn is_revoked(&self, member: &Identity) -> bool {
        // The usual case costs nothing.
        !self.revoked.is_empty() && self.revoked.contains(&(member.role, member.name.clone()))
    }
}

impl Peers {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new connection. False if its peer is revoked.
    pub(super) fn add(&self, connection: &Connection) -> bool {
        let mut state = self.state();
        if state.is_revoked(connection.peer()) {
            return false;
        }
        state
            .connections
            .insert(connection.stable_id(), connection.downgrade());
        if state.connections.len() >= state.sweep_at {
            state
                .connections
                .retain(|_, connection| connection.upgrade().is_some());
            state.sweep_at = 64.max(2 * state.connections.len());
        }
        true
    }

    pub(super) fn is_revoked(&self, member: &Identity) -> bool {
        self.state().is_revoked(member)
    }

    /// Takes a list unless a newer one of the same head is known; closes the connections of those on it.
    pub(super) fn revoke(&self, list: &RevocationList) -> bool {
        let out: Vec<Connection> = {
            let mut state = self.state();
            if list.epoch == state.epoch && list.serial < state.serial {
                return false;
            }
            state.epoch = list.epoch;
            state.serial = list.serial;
            state.revoked = list
                .members
                .iter()
                .map(|member| (member.role, member.name.clone()))
                .collect();
            state
                .connections
                .values()
                .filter_map(WeakConnection::upgrade)
                .filter(|connection| state.is_revoked(connection.peer()))
                .collect()
        };
        for connection in out {
            let peer = connection.peer();
            tracing::warn!(%peer, address = %connection.remote_addr(), "the connection of a revoked member is closed");
            connection.close(CloseCode::Revoked, &format!("{peer} was revoked"));
        }
        true
    }
}
