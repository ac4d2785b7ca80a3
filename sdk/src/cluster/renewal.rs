//! A driver's certificate is renewed for as long as its cluster is used.

use std::path::PathBuf;
use std::sync::{Arc, Weak};

use kolo_transport::renewal::keep_renewed;
use kolo_transport::wire::{HeadReply, HeadRequest};

use super::{AbortOnDrop, Cluster, Inner, REQUEST_TIMEOUT};

/// Keeps the certificate of a cluster renewed until the cluster is dropped, and stores new ones in `dir`.
pub(super) fn start(inner: &Arc<Inner>, dir: Option<PathBuf>) {
    let weak = Arc::downgrade(inner);
    let renew = move |csr: Vec<u8>| {
        let weak = weak.clone();
        async move { ask(&weak, csr).await }
    };
    let renewing = keep_renewed(inner.credentials.clone(), renew, move |new| {
        let Some(dir) = &dir else { return };
        match new.save_renewed(dir) {
            Ok(true) => {}
            Ok(false) => {
                tracing::warn!(dir = %dir.display(), "the directory holds other credentials now; they are left alone");
            }
            // One that may only be read is fine: whoever may write to it renews it there.
            Err(error) => tracing::debug!(%error, "the new certificate could not be stored"),
        }
    });
    let task = inner.runtime.handle().spawn(renewing);
    *super::lock(&inner.renewal) = Some(AbortOnDrop(task));
}

async fn ask(inner: &Weak<Inner>, csr: Vec<u8>) -> Result<Vec<u8>, String> {
    let inner = inner.upgrade().ok_or("the cluster is not used any more")?;
    let cluster = Cluster { inner };
    let request = HeadRequest::Renew { csr };
    match cluster.ask(request, REQUEST_TIMEOUT).await {
        Ok(HeadReply::Renewed { certificate }) => Ok(certificate),
        Ok(HeadReply::Refused(refusal)) => Err(refusal.message),
        Ok(other) => Err(format!("the head answered {other:?}")),
        Err(error) => Err(error.to_string()),
    }
}
