//! Where links from other nodes come in: for whichever generation is present.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kolo_collectives::lane::{Door, Terms};
use kolo_collectives::{Acceptor, LaneError};
use kolo_transport::Identity;
use kolo_transport::wire::span::Span;
use tokio::sync::watch;

use super::links::Links;
use super::plane::Plane;

/// The data plane's sockets, which outlive generations, and who takes the links that come in.
#[derive(Debug, Default)]
pub(crate) struct Listener {
    plane: Arc<OnceLock<Plane>>,
    present: watch::Sender<Option<Present>>,
}

/// The links of the generation that is present, and where new ones are handed in.
type Present = (Arc<Links>, Acceptor);

impl Listener {
    /// The sockets, once they are open.
    pub(crate) fn plane(&self) -> &Arc<OnceLock<Plane>> {
        &self.plane
    }

    /// Links are for these from now on. A link of another generation is refused (G-1).
    pub(crate) fn serve(&self, links: &Arc<Links>, acceptor: Acceptor) {
        self.present
            .send_replace(Some((Arc::clone(links), acceptor)));
    }

    /// This worker is in no generation: links wait for the next one.
    pub(crate) fn pause(&self) {
        self.present.send_replace(None);
    }

    /// Accepts links from other nodes, until the data plane is closed. Every step of a link takes at most `limit`.
    pub(crate) fn open(&self, plane: Plane, limit: Duration) {
        let doors: Vec<Door> = plane.doors().cloned().collect();
        if self.plane.set(plane).is_err() {
            return;
        }
        for door in doors {
            let present = self.present.subscribe();
            tokio::spawn(async move {
                let terms = move |peer| terms(peer, present.clone(), limit);
                Box::pin(door.serve(limit, terms)).await;
            });
        }
    }

    /// Tells the peers on other nodes that this worker goes, for at most `limit`.
    pub(crate) async fn close(&self, limit: Duration) {
        if let Some(plane) = self.plane.get()
            && tokio::time::timeout(limit, plane.close("the worker ends"))
                .await
                .is_err()
        {
            tracing::debug!("a peer did not confirm that the data plane is closed");
        }
    }
}

/// Who takes the link of a peer, when there is a generation and its members are known.
async fn terms(
    peer: Identity,
    mut present: watch::Receiver<Option<Present>>,
    limit: Duration,
) -> Result<Terms, LaneError> {
    let nobody = || LaneError::Timeout {
        reason: format!("this worker was in no generation for {}", Span(limit)),
    };
    let found = tokio::time::timeout(limit, present.wait_for(Option::is_some)).await;
    let Ok(Ok(Some((links, acceptor)))) = found.map(|found| found.map(|there| there.clone()))
    else {
        return Err(nobody());
    };
    let take = move |group, peer, lane| acceptor.accept_group(group, peer, lane);
    Terms::of(&peer, &*links.table().await?, links.own(), take)
}
