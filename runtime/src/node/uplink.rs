//! The node's side of its one connection to the head: registration, heartbeats, events, and the head's
//! requests back.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kolo_actors::node::{Ask, BoxFuture, Happened, HeadLink};
use kolo_core::agent::{METRICS_GROUP, Metric, MetricHandler, MetricSums};
use kolo_core::node::messages::{Delivery, Input};
use kolo_transport::heartbeat::{HeartbeatAction, Heartbeats};
use kolo_transport::ids::{JobId, Slot};
use kolo_transport::wire::head::Beat;
use kolo_transport::wire::{
    HeadReply, HeadRequest, NodeEvent, NodeRegistration, Refusal, RefusalKind, RevocationList,
};
use kolo_transport::{
    CloseCode, ConnectError, Connection, ConnectionLost, Endpoint, Expect, Limits, RequestError,
};
use tokio::sync::{Notify, watch};

use super::NodeError;
use super::serve::Server;

/// How long the head may take to answer a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a worker waits for its certificate, a reconnect to the head included.
const SIGN_TIMEOUT: Duration = Duration::from_secs(15);

/// The pause after the first failed attempt to reach the head; it doubles up to [`MAX_PAUSE`].
const MIN_PAUSE: Duration = Duration::from_millis(50);

const MAX_PAUSE: Duration = Duration::from_secs(2);

/// The pause between two reports of metrics.
const METRICS_PAUSE: Duration = Duration::from_secs(1);

/// Heartbeats go before everything else.
const HEARTBEAT_PRIORITY: i32 = 100;

/// What the head says at a registration.
#[derive(Debug, Clone)]
pub(super) struct Registered {
    heartbeat: Duration,
    lease: Duration,
    /// Who was put out of the cluster.
    pub(super) revoked: RevocationList,
}

/// A connection over which the node is registered.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) connection: Connection,
    pub(super) registered: Registered,
}

/// The connection to the head.
#[derive(Debug)]
pub(super) struct Uplink {
    connection: watch::Sender<Option<Connection>>,
    /// The lease of the last registration, in milliseconds.
    lease_ms: AtomicU64,
    /// Why the connection is of no use any more, although it is there.
    left: watch::Sender<Option<String>>,
    /// Why the head wants this node no more.
    revoked: watch::Sender<Option<String>>,
    /// Metrics that the head has not heard of.
    metrics: Mutex<MetricSums>,
    /// There are some.
    measured: Notify,
}

/// Tries to connect to the head until `deadline`.
pub(super) async fn connect(
    endpoint: &Endpoint,
    head: std::net::SocketAddr,
    deadline: Instant,
) -> Result<Connection, ConnectError> {
    let mut pause = MIN_PAUSE;
    loop {
        match endpoint.connect(head, Expect::head()).await {
            Ok(connection) => return Ok(connection),
            Err(error) if !error.is_retryable() || Instant::now() + pause >= deadline => {
                return Err(error);
            }
            Err(error) => tracing::debug!(%head, %error, "the head is not there yet"),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(MAX_PAUSE);
    }
}

/// Registers over a connection.
pub(super) async fn register(
    connection: &Connection,
    registration: NodeRegistration,
) -> Result<Registered, NodeError> {
    let reply = connection
        .request(&HeadRequest::Register(registration), REQUEST_TIMEOUT)
        .await
        .map_err(NodeError::Register)?;
    match reply {
        HeadReply::Registered {
            heartbeat_ms,
            lease_ms,
            revoked,
        } => Ok(Registered {
            heartbeat: Duration::from_millis(heartbeat_ms).max(Duration::from_millis(1)),
            lease: Duration::from_millis(lease_ms).max(Duration::from_millis(1)),
            revoked,
        }),
        HeadReply::Refused(refusal) => Err(NodeError::Refused(refusal)),
        other => Err(NodeError::Answer(format!("{other:?}"))),
    }
}

impl Uplink {
    /// The connection to the head; `None` while it is away.
    pub(super) fn connection(&self) -> watch::Receiver<Option<Connection>> {
        self.connection.subscribe()
    }

    /// How long the head waits for a heartbeat, as it has said last.
    pub(super) fn lease(&self) -> Duration {
        Duration::from_millis(self.lease_ms.load(Ordering::Relaxed))
    }

    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            connection: watch::Sender::new(None),
            lease_ms: AtomicU64::new(0),
            left: watch::Sender::new(None),
            revoked: watch::Sender::new(None),
            metrics: Mutex::default(),
            measured: Notify::new(),
        })
    }

    /// Waits until the head has put this node out of the cluster; why it did.
    pub(super) async fn revoked(&self) -> String {
        reason(&self.revoked).await
    }

    /// Asks the head over the connection that is there.
    async fn ask(&self, request: &HeadRequest, limit: Duration) -> Result<HeadReply, String> {
        let connection = self
            .connection
            .borrow()
            .clone()
            .ok_or("the head is not connected")?;
        connection
            .request(request, limit)
            .await
            .map_err(|error| error.to_string())
    }

    /// Has the node's certificate renewed.
    pub(super) async fn renew(&self, csr: Vec<u8>) -> Result<Vec<u8>, String> {
        match self
            .ask(&HeadRequest::Renew { csr }, REQUEST_TIMEOUT)
            .await?
        {
            HeadReply::Renewed { certificate } => Ok(certificate),
            HeadReply::Refused(refusal) => Err(refusal.message),
            other => Err(format!("the head answered {other:?}")),
        }
    }

    /// Has the head place no more jobs here, and waits until none is left: by the word of the head, which knows of jobs that are
    /// on their way, however often it is away until then; or until `idle`, while it is away. `limit` is for each question.
    pub(super) async fn drain(&self, limit: Duration, idle: impl Future<Output = ()>) {
        let mut absences = self.connection();
        let by_the_head = insist(self.connection(), &HeadRequest::Drain, limit, |answer| {
            matches!(answer, Ok(HeadReply::Done)).then_some(())
        });
        let without_it = async {
            idle.await;
            absences.wait_for(Option::is_none).await.is_ok()
        };
        tokio::select! {
            () = by_the_head => {}
            _ = without_it => {}
        }
    }

    /// The head has put this node out: its jobs end as if it was lost.
    async fn put_out(&self, reason: String, server: &Server) {
        tracing::error!(
            head = %server.head,
            reason,
            "this node was revoked: its jobs are ended; an administrator may let it in again with `kolo revoke --undo`"
        );
        let stop = Ask::StopAll {
            reason: "the node was revoked".to_owned(),
        };
        if server.node.send(stop).await.is_err() {
            tracing::debug!("the node's actor is gone");
        }
        self.revoked.send_replace(Some(reason));
    }

    /// Keeps the node registered, until it is dropped or revoked.
    pub(super) async fn run(
        self: Arc<Self>,
        endpoint: Endpoint,
        server: Arc<Server>,
        first: Session,
    ) {
        let mut session = Some(first);
        let mut pause = MIN_PAUSE;
        let mut said = String::new();
        loop {
            if let Some(session) = session.take() {
                let since = Instant::now();
                said.clear();
                self.left.send_replace(None);
                let lease_ms = session.registered.lease.as_millis() as u64;
                self.lease_ms.store(lease_ms, Ordering::Relaxed);
                self.connection
                    .send_replace(Some(session.connection.clone()));
                tell_node(&server, true).await;
                let why = self.serve(&session, &server).await;
                self.connection.send_replace(None);
                tell_node(&server, false).await;
                let (replaced, revoked) = fate(&session.connection).await;
                session.connection.close(CloseCode::Done, "");
                if let Some(reason) = revoked {
                    return self.put_out(reason, &server).await;
                }
                if replaced {
                    // Nobody but another process with these credentials does that. Taking turns at full speed
                    // would help neither.
                    pause = MAX_PAUSE;
                    tracing::error!(
                        head = %server.head,
                        "another node has registered with this node's identity; each node needs a state folder of \
                         its own: stop one of them, or remove its folder `identity` and let it join with a token"
                    );
                } else {
                    if since.elapsed() >= MAX_PAUSE {
                        pause = MIN_PAUSE;
                    }
                    tracing::warn!(head = %server.head, %why, "the connection to the head is lost; workers run on");
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_PAUSE);
            match self.reconnect(&endpoint, &server).await {
                Ok(again) => {
                    kolo_actors::news!(head = %server.head, "registered again");
                    session = Some(again);
                }
                Err(error) if error.is_revoked() => {
                    return self.put_out(error.to_string(), &server).await;
                }
                Err(error) => {
                    let error = error.to_string();
                    // Once, as long as it stays the same.
                    if error != said {
                        tracing::warn!(head = %server.head, %error, "not registered again yet; trying");
                        said = error;
                    }
                }
            }
        }
    }

    async fn reconnect(&self, endpoint: &Endpoint, server: &Server) -> Result<Session, NodeError> {
        let connection = endpoint
            .connect(server.head, Expect::head())
            .await
            .map_err(NodeError::Connect)?;
        let registration = server.registration().await?;
        let registered = register(&connection, registration).await?;
        endpoint.revoke(&registered.revoked);
        Ok(Session {
            connection,
            registered,
        })
    }

    /// Serves one connection until it is of no use any more; says why.
    async fn serve(&self, session: &Session, server: &Arc<Server>) -> String {
        let connection = &session.connection;
        tokio::select! {
            why = heartbeats(connection, &session.registered) => why,
            why = reason(&self.left) => why,
            why = take_requests(connection, server) => why,
            why = tell_network(connection, server) => why,
            why = self.tell_metrics(connection) => why,
            lost = connection.closed() => lost.to_string(),
        }
    }

    /// Tells the head what agents have measured. What was on its way when the connection was lost is not counted.
    async fn tell_metrics(&self, connection: &Connection) -> String {
        loop {
            let metrics = self.metrics().take();
            if metrics.is_empty() {
                self.measured.notified().await;
                continue;
            }
            let request = HeadRequest::Metrics(metrics);
            match connection.request(&request, REQUEST_TIMEOUT).await {
                Ok(HeadReply::Done) => {}
                Ok(other) => tracing::debug!(?other, "the head did not want the metrics"),
                Err(error) => tracing::debug!(%error, "the metrics were not taken"),
            }
            tokio::time::sleep(METRICS_PAUSE).await;
        }
    }

    fn metrics(&self) -> std::sync::MutexGuard<'_, MetricSums> {
        self.metrics.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for a reason.
async fn reason(said: &watch::Sender<Option<String>>) -> String {
    let mut said = said.subscribe();
    let reason = said.wait_for(Option::is_some).await.ok();
    match reason.and_then(|reason| reason.clone()) {
        Some(reason) => reason,
        // Not while its sender is there.
        None => std::future::pending().await,
    }
}

/// The node is registered, or not any more.
async fn tell_node(server: &Server, registered: bool) {
    let happened = Happened(Input::Head { registered });
    if server.node.send(happened).await.is_err() {
        tracing::debug!("the node's actor is gone");
    }
}

/// Says of each end how long ago it was: events wait for the connection, and are sent again.
fn date(events: &mut [NodeEvent]) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |since| since.as_millis() as u64);
    for event in events {
        if let NodeEvent::WorkerExited { failure, .. } = event
            && let Some(account) = &mut failure.account
        {
            account.age_ms = now.saturating_sub(account.at_ms);
        }
    }
}

impl HeadLink for Uplink {
    fn send(&self, mut events: Vec<NodeEvent>) -> BoxFuture<Delivery> {
        let connection = self.connection.borrow().clone();
        date(&mut events);
        Box::pin(async move {
            let Some(connection) = connection else {
                return Delivery::Failed("the head is not connected".to_owned());
            };
            let request = HeadRequest::Events(events);
            match connection.request(&request, REQUEST_TIMEOUT).await {
                Ok(HeadReply::Done) => Delivery::Taken,
                Ok(HeadReply::Refused(refusal)) if refusal.kind == RefusalKind::Forbidden => {
                    // It counts this node as lost.
                    Delivery::Failed(format!(
                        "the head takes no events of this session: {refusal}"
                    ))
                }
                Ok(HeadReply::Refused(refusal)) => Delivery::Unwanted(refusal.to_string()),
                Ok(other) => Delivery::Unwanted(format!("its answer was {other:?}")),
                Err(RequestError::Deadline { .. }) => Delivery::Late,
                Err(error) => Delivery::Failed(format!("events were not taken: {error}")),
            }
        })
    }

    fn leave(&self, reason: String) {
        self.left.send_replace(Some(reason));
    }

    fn put_metrics(&self, metrics: &[Metric]) {
        for metric in metrics {
            self.metrics().put_metric(METRICS_GROUP, metric);
        }
        self.measured.notify_one();
    }

    fn sign(&self, job: JobId, slot: Slot, csr: Vec<u8>) -> BoxFuture<Result<Vec<u8>, Refusal>> {
        let connections = self.connection();
        Box::pin(async move {
            let request = HeadRequest::SignWorker { job, slot, csr };
            let signed = insist(connections, &request, SIGN_TIMEOUT, signed);
            match tokio::time::timeout(SIGN_TIMEOUT, signed).await {
                Ok(signed) => signed,
                Err(_) => Err(Refusal::new(
                    RefusalKind::Timeout,
                    format!("the head did not sign within {SIGN_TIMEOUT:?}"),
                )),
            }
        })
    }
}

/// Asks the head, over whatever connection is there, until `judge` takes an answer. The request does no harm twice.
async fn insist<T>(
    mut connections: watch::Receiver<Option<Connection>>,
    request: &HeadRequest,
    limit: Duration,
    judge: impl Fn(Result<HeadReply, RequestError>) -> Option<T>,
) -> T {
    let mut pause = MIN_PAUSE;
    loop {
        let connection = match connections.wait_for(Option::is_some).await {
            Ok(connection) => connection.clone(),
            Err(_) => None,
        };
        let Some(connection) = connection else {
            // The uplink is gone, and nobody waits.
            return std::future::pending().await;
        };
        if let Some(taken) = judge(connection.request(request, limit).await) {
            return taken;
        }
        tracing::debug!(?pause, "the head is asked again");
        // Until the loss of a connection is noticed, or whatever it was is over.
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(MAX_PAUSE);
    }
}

/// The last word on a signing request, unless it is worth another try.
fn signed(answer: Result<HeadReply, RequestError>) -> Option<Result<Vec<u8>, Refusal>> {
    let failed = |reason| Some(Err(Refusal::new(RefusalKind::Internal, reason)));
    match answer {
        Ok(HeadReply::Signed { certificate, .. }) => Some(Ok(certificate)),
        Ok(HeadReply::Refused(refusal)) if refusal.is_retryable() => None,
        Ok(HeadReply::Refused(refusal)) => Some(Err(refusal)),
        Ok(other) => failed(format!("the head answered {other:?}")),
        // Another connection may be better.
        Err(RequestError::Lost(_)) => None,
        Err(error) if error.is_retryable() => None,
        Err(error) => failed(error.to_string()),
    }
}

/// Whether the head has ended the connection for a newer one of the same node; why, if it has put the node out.
async fn fate(connection: &Connection) -> (bool, Option<String>) {
    if !connection.is_closed() {
        return (false, None);
    }
    match connection.closed().await {
        ConnectionLost::Closed {
            code: CloseCode::Duplicate,
            ..
        } => (true, None),
        ConnectionLost::Closed {
            code: CloseCode::Revoked,
            reason,
        } => (false, Some(reason)),
        _ => (false, None),
    }
}

/// Sends heartbeats until the head does not answer any more.
async fn heartbeats(connection: &Connection, registered: &Registered) -> String {
    let mut stream = match connection.open(Limits::CONTROL).await {
        Ok(stream) => stream,
        Err(lost) => return lost.to_string(),
    };
    stream.send.set_priority(HEARTBEAT_PRIORITY);
    if let Err(error) = stream.send.send(&HeadRequest::Heartbeats, &[]).await {
        return format!("no heartbeats: {error}");
    }
    // Answers that wait to be read while this process stands still count as heard.
    let clock = connection.runtime().clock();
    let mut beats = Heartbeats::new(registered.heartbeat, registered.lease, Instant::now());
    loop {
        let pause = match beats.poll(Instant::now(), clock.now()) {
            HeartbeatAction::Send(beat) => {
                if let Err(error) = stream.send.send(&beat, &[]).await {
                    return format!("no heartbeats: {error}");
                }
                continue;
            }
            HeartbeatAction::Wait(pause) => pause,
            HeartbeatAction::Lost => {
                return format!("no answer to heartbeats for {:?}", registered.lease);
            }
        };
        tokio::select! {
            // An answer that is there counts before the time.
            biased;
            answer = stream.recv.next::<Beat>() => match answer {
                Ok(Some(beat)) => beats.answered(beat.head, clock.now()),
                Ok(None) => return "the head ended the heartbeats".to_owned(),
                Err(error) => return format!("no heartbeats: {error}"),
            },
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// Tells the head when the network interfaces have changed.
async fn tell_network(connection: &Connection, server: &Arc<Server>) -> String {
    loop {
        let network = server.network.news().await;
        let request = HeadRequest::Network(network.clone());
        match connection.request(&request, REQUEST_TIMEOUT).await {
            Ok(HeadReply::Done) => {}
            // Saying it again would change nothing.
            Ok(other) => tracing::warn!(?other, "the head did not want the network interfaces"),
            Err(RequestError::Deadline { .. }) => continue,
            Err(error) => return format!("the network interfaces were not taken: {error}"),
        }
        server.network.was_told(&network);
    }
}

/// Answers the head's requests.
async fn take_requests(connection: &Connection, server: &Arc<Server>) -> String {
    loop {
        match connection.accept(Limits::CONTROL).await {
            Ok(stream) => {
                tokio::spawn(server.clone().serve(stream, connection.clone()));
            }
            Err(lost) => return lost.to_string(),
        }
    }
}
