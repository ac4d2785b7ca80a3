//! Tokens, renewals and revocations, as they are asked for over the network.
//!
//! | request | who |
//! |---|---|
//! | `Renew` | a node or a driver, for itself |
//! | `CreateToken`, `Tokens`, `RevokeToken`, `Revoke`, `Reinstate` | an administrator: the driver in the head's own folder `admin/`, and drivers that joined with a token for administrators |
//!
//! Other drivers may not make tokens: with one for nodes a driver could become a node and receive the programs
//! and data of others, and with one for drivers it could outlive its own revocation.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kolo_transport::identity::{HEAD_NAME, Identity, Role};
use kolo_transport::ids::{DriverId, NodeId};
use kolo_transport::renewal::keep_renewed;
use kolo_transport::wire::span::Span;
use kolo_transport::wire::{
    HeadReply, HeadRequest, NodeReply, NodeRequest, Refusal, RefusalKind, RevocationList,
    RevokedMember, SecretText, TokenEntry,
};
use kolo_transport::{
    Connection, Credentials, Endpoint, IdentityError, LiveCredentials, RandomId as _, RequestError,
    TokenId, TokenInfo,
};
use tokio::task::{AbortHandle, JoinSet};

use super::error::HeadError;
use super::state::{Store, unix_now};

/// How long an answer waits for the nodes to confirm a revocation.
const CONFIRM: Duration = Duration::from_secs(1);

/// How long a node may take before it is told again.
const PUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// How long to wait before that.
const PUSH_PAUSE: Duration = Duration::from_millis(250);

/// The longest life of a token.
const LONGEST_TTL: Duration = Duration::from_secs(366 * 24 * 3600);

/// The most tokens at one time.
const MAX_TOKENS: usize = 10_000;

/// How long certificates live.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lives {
    /// Of the head, nodes and drivers.
    pub(super) member: Duration,
    /// Of workers.
    pub(super) worker: Duration,
}

/// Who is in, who is out, and until when.
pub(super) struct Trust {
    pub(super) store: Arc<Store>,
    pub(super) lives: Lives,
    /// The head's own.
    live: LiveCredentials,
    /// The administrator's, in its folder.
    admin: Option<LiveCredentials>,
    endpoint: Endpoint,
    list: Mutex<RevocationList>,
    nodes: Mutex<HashMap<NodeId, Connection>>,
}

impl Trust {
    pub(super) fn new(
        store: Arc<Store>,
        lives: Lives,
        live: LiveCredentials,
        endpoint: Endpoint,
    ) -> Result<Arc<Self>, HeadError> {
        let admin = store
            .admin_dir()
            .map(Credentials::load)
            .transpose()
            .map_err(HeadError::Identity)?
            .map(LiveCredentials::new);
        let trust = Self {
            list: Mutex::new(RevocationList {
                epoch: DriverId::random().0,
                serial: 0,
                members: Vec::new(),
            }),
            store,
            lives,
            live,
            admin,
            endpoint,
            nodes: Mutex::default(),
        };
        trust.enforce();
        Ok(Arc::new(trust))
    }

    fn list(&self) -> MutexGuard<'_, RevocationList> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn nodes(&self) -> MutexGuard<'_, HashMap<NodeId, Connection>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All that are out, for people.
    pub(super) fn revoked(&self) -> Vec<RevokedMember> {
        self.store.members().revoked().to_vec()
    }

    /// Whether a member is out.
    pub(super) fn is_revoked(&self, member: &Identity) -> bool {
        self.endpoint.is_revoked(member)
    }

    /// A node has registered over this connection: it is told of each change from now on, and must know this list first.
    pub(super) fn registered(&self, node: NodeId, connection: &Connection) -> RevocationList {
        let mut nodes = self.nodes();
        nodes.retain(|_, connection| !connection.is_closed());
        nodes.insert(node, connection.clone());
        drop(nodes);
        self.list().clone()
    }

    /// What is stored holds at this head from now on. Gives the list for the nodes.
    fn enforce(&self) -> RevocationList {
        let mut list = self.list();
        list.serial += 1;
        list.members = self
            .revoked()
            .into_iter()
            // The nodes need not know why.
            .map(|member| RevokedMember {
                reason: String::new(),
                ..member
            })
            .collect();
        self.endpoint.revoke(&list);
        list.clone()
    }

    /// Tells all nodes, and waits a moment for them to confirm. Those that don't are told again and again while
    /// they are connected.
    async fn tell_nodes(&self, list: RevocationList) -> HeadReply {
        let nodes: Vec<_> = self
            .nodes()
            .iter()
            .filter(|(_, connection)| !connection.is_closed())
            .map(|(node, connection)| (*node, connection.clone()))
            .collect();
        let mut late: Vec<NodeId> = nodes.iter().map(|(node, _)| *node).collect();
        let request = Arc::new(NodeRequest::Revocations(list));
        let mut told = JoinSet::new();
        for (node, connection) in nodes {
            let request = Arc::clone(&request);
            told.spawn(async move { tell(&connection, &request).await.then_some(node) });
        }
        let mut count = 0;
        let confirmed = self.endpoint.runtime().timeout(CONFIRM, async {
            while let Some(done) = told.join_next().await {
                if let Ok(Some(node)) = done {
                    late.retain(|late| *late != node);
                    count += 1;
                }
            }
        });
        confirmed.await;
        told.detach_all();
        HeadReply::Revoked { told: count, late }
    }

    /// Answers a request of this module's table.
    pub(super) async fn answer(
        self: &Arc<Self>,
        peer: &Identity,
        request: HeadRequest,
    ) -> Result<HeadReply, Refusal> {
        if self.is_revoked(peer) {
            return Err(Refusal::new(
                RefusalKind::Forbidden,
                format!("{peer} was revoked"),
            ));
        }
        match request {
            HeadRequest::Renew { csr } => self.renew(peer, &csr),
            HeadRequest::CreateToken {
                role,
                admin,
                ttl_s,
                uses,
            } => {
                let by = self.administrator(peer)?;
                let ttl = Duration::from_secs(ttl_s);
                self.blocking(move |trust| trust.create_token(&by, role, admin, ttl, uses))
                    .await
            }
            HeadRequest::Tokens => {
                self.administrator(peer)?;
                let tokens = self.store.book().list();
                Ok(HeadReply::Tokens(tokens.iter().map(entry).collect()))
            }
            HeadRequest::RevokeToken { id } => {
                let by = self.administrator(peer)?;
                self.blocking(move |trust| trust.revoke_token(&by, &id))
                    .await
            }
            HeadRequest::Revoke { role, name, reason } => {
                let by = self.administrator(peer)?;
                if role == Role::Driver && name == by {
                    return Err(Refusal::new(
                        RefusalKind::Invalid,
                        format!(
                            "{by} can't revoke itself: nobody might be left who can let it in again; let another administrator \
                             do it"
                        ),
                    ));
                }
                self.everywhere(move |trust| trust.revoke(&by, role, &name, &reason))
                    .await
            }
            HeadRequest::Reinstate { role, name } => {
                let by = self.administrator(peer)?;
                self.everywhere(move |trust| trust.reinstate(&by, role, &name))
                    .await
            }
            _ => Err(Refusal::new(
                RefusalKind::Internal,
                "the request was routed wrongly",
            )),
        }
    }

    /// Changes who is out and tells the nodes, to the end: also if whoever has asked for it is gone before that.
    async fn everywhere(
        self: &Arc<Self>,
        change: impl FnOnce(&Self) -> Result<RevocationList, Refusal> + Send + 'static,
    ) -> Result<HeadReply, Refusal> {
        let trust = Arc::clone(self);
        let changing = self.endpoint.runtime().handle().spawn(async move {
            let list = trust.blocking(change).await?;
            Ok(trust.tell_nodes(list).await)
        });
        changing.await.unwrap_or_else(|error| {
            tracing::error!(%error, "a change of who is trusted failed");
            Err(not_stored())
        })
    }

    /// The store writes to the disk.
    async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        change: impl FnOnce(&Self) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let trust = Arc::clone(self);
        self.endpoint
            .runtime()
            .handle()
            .spawn_blocking(move || change(&trust))
            .await
            .unwrap_or_else(|error| {
                tracing::error!(%error, "a change of who is trusted failed");
                Err(not_stored())
            })
    }

    /// The name of an administrator.
    pub(super) fn administrator(&self, peer: &Identity) -> Result<String, Refusal> {
        if peer.role == Role::Driver && self.store.members().is_administrator(&peer.name) {
            return Ok(peer.name.clone());
        }
        Err(Refusal::new(
            RefusalKind::Forbidden,
            format!(
                "only an administrator may ask for this, and {peer} is none; use the credentials in the folder `admin` of the \
                 head's state folder, or log in with a token that was made with --admin"
            ),
        ))
    }

    fn renew(&self, peer: &Identity, csr: &[u8]) -> Result<HeadReply, Refusal> {
        if !peer.role.joins() {
            return Err(Refusal::new(
                RefusalKind::Forbidden,
                format!("only nodes and drivers renew certificates, and {peer} is neither"),
            ));
        }
        let certificate = self
            .store
            .authority()
            .sign(csr, peer.role, &peer.name, self.lives.member)
            .map_err(signing)?;
        tracing::info!(%peer, "a certificate is renewed");
        Ok(HeadReply::Renewed {
            certificate: certificate.to_vec(),
        })
    }

    fn create_token(
        &self,
        by: &str,
        role: Role,
        admin: bool,
        ttl: Duration,
        uses: Option<u32>,
    ) -> Result<HeadReply, Refusal> {
        let invalid = |message: String| Err(Refusal::new(RefusalKind::Invalid, message));
        if !role.joins() {
            return invalid(format!(
                "a {role} does not join with a token; tokens are for nodes and drivers"
            ));
        }
        if admin && role != Role::Driver {
            return invalid(format!(
                "a {role} can't be an administrator; only a token for drivers may be one for administrators"
            ));
        }
        if ttl.is_zero() || ttl > LONGEST_TTL {
            return invalid(format!(
                "the token would be valid for {}; allowed are 1s to {}",
                Span(ttl),
                Span(LONGEST_TTL)
            ));
        }
        if uses == Some(0) {
            return invalid("the token could be used 0 times; allowed are 1 or more".to_owned());
        }
        if self.store.book().list().len() >= MAX_TOKENS {
            return Err(Refusal::new(
                RefusalKind::TooLarge,
                format!(
                    "there are {MAX_TOKENS} tokens, which is the most; end some with `kolo token revoke`"
                ),
            ));
        }
        let token = self
            .store
            .new_token(by, role, admin, ttl, uses)
            .map_err(|error| store_failed(&error))?;
        let id = token.id();
        // Revoked since it was looked at: that may have ended its tokens before this one was there.
        if !self.store.members().is_administrator(by) {
            self.store
                .change_tokens(|book| Ok::<_, HeadError>(book.revoke(id)))
                .map_err(|error| store_failed(&error))?;
            return Err(Refusal::new(
                RefusalKind::Forbidden,
                format!("{by} is no administrator any more"),
            ));
        }
        let info = self.store.book().find(id).ok_or_else(not_stored)?;
        tracing::info!(%id, by, %role, admin, ?ttl, ?uses, "a token is made");
        Ok(HeadReply::Token {
            entry: entry(&info),
            token: SecretText(token.to_string()),
        })
    }

    fn revoke_token(&self, by: &str, id: &str) -> Result<HeadReply, Refusal> {
        let id: TokenId = id.parse().map_err(|_| {
            Refusal::new(
                RefusalKind::Invalid,
                "a token's id is `token-` and 8 hexadecimal digits, as `kolo token list` shows it",
            )
        })?;
        let known = self
            .store
            .change_tokens(|book| Ok::<_, HeadError>(book.revoke(id)))
            .map_err(|error| store_failed(&error))?;
        if !known {
            return Err(Refusal::new(
                RefusalKind::NotFound,
                format!("the head knows no {id}; `kolo token list` shows those that it knows"),
            ));
        }
        tracing::info!(%id, by, "a token is revoked");
        Ok(HeadReply::Done)
    }

    fn revoke(
        &self,
        by: &str,
        role: Role,
        name: &str,
        reason: &str,
    ) -> Result<RevocationList, Refusal> {
        self.store.change_members(|members| {
            members
                .revoke(role, name, reason, unix_now())
                .map_err(Denied)
        })?;
        // From here on it is out, whatever comes.
        let list = self.enforce();
        tracing::warn!(%role, name, by, reason, "a member is revoked");
        if role == Role::Driver {
            // It must not come back with what it has put aside.
            let ended = self
                .store
                .change_tokens(|book| Ok::<_, HeadError>(book.revoke_made_by(name)))
                .map_err(|error| store_failed(&error))?;
            if ended > 0 {
                tracing::warn!(name, ended, "the tokens that it had made are revoked, too");
            }
        }
        Ok(list)
    }

    fn reinstate(&self, by: &str, role: Role, name: &str) -> Result<RevocationList, Refusal> {
        self.store
            .change_members(|members| members.reinstate(role, name).map_err(Denied))?;
        let list = self.enforce();
        tracing::warn!(%role, name, by, "a revoked member is let in again");
        Ok(list)
    }

    /// Keeps the certificates of the head and of its operator renewed.
    pub(super) fn keep_renewed(self: &Arc<Self>) -> Vec<AbortHandle> {
        let handle = self.endpoint.runtime().handle();
        let own = {
            let trust = Arc::clone(self);
            let renew = move |csr: Vec<u8>| {
                let signed = trust.sign_own(&csr, Role::Head, HEAD_NAME);
                async { signed }
            };
            handle.spawn(keep_renewed(self.live.clone(), renew, |_| {}))
        };
        let admin = self.admin.clone().map(|admin| {
            let trust = Arc::clone(self);
            let name = admin.identity().name.clone();
            let renew = move |csr: Vec<u8>| {
                let signed = trust.sign_own(&csr, Role::Driver, &name);
                async { signed }
            };
            let trust = Arc::clone(self);
            handle.spawn(keep_renewed(admin, renew, move |new| trust.save_admin(new)))
        });
        [Some(own), admin]
            .into_iter()
            .flatten()
            .map(|task| task.abort_handle())
            .collect()
    }

    fn sign_own(&self, csr: &[u8], role: Role, name: &str) -> Result<Vec<u8>, String> {
        self.store
            .authority()
            .sign(csr, role, name, self.lives.member)
            .map(|certificate| certificate.to_vec())
            .map_err(|error| error.to_string())
    }

    fn save_admin(&self, credentials: &Credentials) {
        let Some(dir) = self.store.admin_dir() else {
            return;
        };
        match credentials.save_renewed(dir) {
            Ok(true) => {}
            Ok(false) => {
                tracing::warn!(dir = %dir.display(), "the operator's folder holds other credentials now; they are left alone");
            }
            Err(error) => {
                tracing::error!(%error, "the operator's new certificate could not be stored");
            }
        }
    }

    /// Renews the certificates of the head and of its operator now.
    pub(super) fn renew_now(&self) -> Result<(), IdentityError> {
        for live in [Some(&self.live), self.admin.as_ref()]
            .into_iter()
            .flatten()
        {
            let current = live.current();
            let identity = live.identity();
            let certificate = self.store.authority().sign(
                &current.renewal_request()?,
                identity.role,
                &identity.name,
                self.lives.member,
            )?;
            let new = current.renewed(&certificate)?;
            live.replace(new.clone())?;
            if identity.role == Role::Driver {
                self.save_admin(&new);
            }
        }
        Ok(())
    }
}

/// Until the node confirms or is gone.
async fn tell(connection: &Connection, request: &NodeRequest) -> bool {
    loop {
        match connection.request(request, PUSH_TIMEOUT).await {
            Ok(NodeReply::Done) => return true,
            Ok(NodeReply::Refused(refusal)) => {
                // One of an older version.
                tracing::error!(node = %connection.peer().name, %refusal, "a node does not take revocations");
                return false;
            }
            Ok(other) => {
                tracing::error!(node = %connection.peer().name, ?other, "a node's answer to a revocation is none");
                return false;
            }
            Err(RequestError::Deadline { .. }) => {}
            Err(_) if connection.is_closed() => return false,
            Err(error) => {
                tracing::warn!(node = %connection.peer().name, %error, "a node was not told of a revocation; trying again");
            }
        }
        tokio::time::sleep(PUSH_PAUSE).await;
    }
}

fn entry(info: &TokenInfo) -> TokenEntry {
    TokenEntry {
        id: info.id.to_string(),
        role: info.role,
        admin: info.admin,
        expires_unix: info.expires_unix,
        uses_left: info.uses_left,
    }
}

fn not_stored() -> Refusal {
    Refusal::new(
        RefusalKind::Internal,
        "the head could not store the change; its log says more",
    )
}

fn store_failed(error: &HeadError) -> Refusal {
    tracing::error!(%error, "a change of who is trusted could not be stored");
    not_stored()
}

/// What to answer to a request for a certificate that can't be made.
pub(super) fn signing(error: IdentityError) -> Refusal {
    match error {
        IdentityError::Request { .. } => Refusal::new(RefusalKind::Invalid, error.to_string()),
        other => {
            tracing::error!(error = %other, "a certificate could not be made");
            Refusal::new(
                RefusalKind::Internal,
                "the head could not make a certificate; its log says more",
            )
        }
    }
}

/// A refusal, or a store that failed.
struct Denied(Refusal);

impl From<HeadError> for Denied {
    fn from(error: HeadError) -> Self {
        Self(store_failed(&error))
    }
}

impl From<Denied> for Refusal {
    fn from(denied: Denied) -> Self {
        denied.0
    }
}

#[cfg(test)]
mod tests;
