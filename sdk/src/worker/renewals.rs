//! A worker's certificate is renewed through its node, in the same way in which it got the first one.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kolo_transport::Endpoint;
use kolo_transport::local::ControlSocket;
use kolo_transport::renewal::keep_renewed;
use kolo_transport::wire::FromWorker;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

/// How long the head may take, a node without a connection to it included.
const LIMIT: Duration = Duration::from_secs(30);

/// The renewal that waits for its certificate.
#[derive(Debug, Default)]
pub(super) struct Renewals {
    waiting: Mutex<Option<oneshot::Sender<Vec<u8>>>>,
    task: Mutex<Option<AbortHandle>>,
}

impl Drop for Renewals {
    fn drop(&mut self) {
        let task = self.task.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(task) = task.take() {
            task.abort();
        }
    }
}

impl Renewals {
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
                    *this.waiting.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender);
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
        let task = tokio::spawn(renewing).abort_handle();
        *self.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
    }

    /// Whether there is a certificate to be renewed.
    pub(super) fn has_begun(&self) -> bool {
        self.task
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    }

    /// A certificate that came.
    pub(super) fn came(&self, certificate: Vec<u8>) {
        let waiting = self
            .waiting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        // If it came too late, another one is asked for soon.
        if waiting.is_none_or(|waiting| waiting.send(certificate).is_err()) {
            tracing::debug!("nobody waits for a certificate");
        }
    }
}
