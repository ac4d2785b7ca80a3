//! A worker's certificate is renewed through its node, in the same way in which it got the first one.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kolo_transport::Endpoint;
use kolo_transport::local::ControlSocket;
use kolo_transport::renewal::keep_renewed;
use kolo_transport::wire::FromWorker;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

/// How long the head may take, a node without a connection to it included.
const LIMIT: Duration = Duration::from_secs(30);

/// The renewals of a worker's certificate.
#[derive(Debug, Default)]
pub(super) struct Renewals {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The renewal that waits for its certificate.
    waiting: Option<oneshot::Sender<Vec<u8>>>,
    /// It ends with this.
    task: JoinSet<()>,
}

impl Renewals {
    fn state(&self) -> MutexGuard<'_, State> {
        // Every state between two statements is fine.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the certificate of the data plane renewed from now on.
    pub(super) fn start(self: &Arc<Self>, endpoint: &Endpoint, control: &Arc<ControlSocket>) {
        // Both end with the conversation, which must not wait for this.
        let (this, control) = (Arc::downgrade(self), Arc::downgrade(control));
        let renew = move |csr: Vec<u8>| {
            let (this, control) = (this.clone(), control.clone());
            async move {
                let gone = || "the node is gone".to_owned();
                let answer = {
                    let this = this.upgrade().ok_or_else(gone)?;
                    let control = control.upgrade().ok_or_else(gone)?;
                    let (sender, answer) = oneshot::channel();
                    this.state().waiting = Some(sender);
                    control
                        .send(&FromWorker::Sign { csr }, &[])
                        .await
                        .map_err(|error| error.to_string())?;
                    answer
                };
                match tokio::time::timeout(LIMIT, answer).await {
                    Ok(Ok(certificate)) => Ok(certificate),
                    Ok(Err(_)) => Err(gone()),
                    Err(_) => Err(format!("the node gave no certificate within {LIMIT:?}")),
                }
            }
        };
        let renewing = keep_renewed(endpoint.live_credentials().clone(), renew, |_| {});
        self.state().task.spawn(renewing);
    }

    /// Whether there is a certificate to be renewed.
    pub(super) fn has_begun(&self) -> bool {
        !self.state().task.is_empty()
    }

    /// A certificate that came.
    pub(super) fn came(&self, certificate: Vec<u8>) {
        let waiting = self.state().waiting.take();
        // If it came too late, another one is asked for soon.
        if waiting.is_none_or(|waiting| waiting.send(certificate).is_err()) {
            tracing::debug!("nobody waits for a certificate");
        }
    }
}
