//! Whether a daemon does its work.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use kolo_transport::TransportRuntime;

/// A round trip through the daemon's actors.
type Question = dyn Fn() -> Pin<Box<dyn Future<Output = bool> + Send>> + Send + Sync;

/// Asks a daemon whether it does its work. Lives on when the daemon does not; it is not healthy then.
#[derive(Clone)]
pub struct Health {
    runtime: TransportRuntime,
    actors: Arc<Question>,
}

impl Health {
    pub(crate) fn new<F>(
        runtime: TransportRuntime,
        actors: impl Fn() -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = bool> + Send + 'static,
    {
        Self {
            runtime,
            actors: Arc::new(move || Box::pin(actors())),
        }
    }

    /// Whether the actors answer and connections are served, within `limit`. Cancel safe.
    pub async fn is_good(&self, limit: Duration) -> bool {
        let asked = async {
            let served = self.runtime.handle().spawn(async {});
            (self.actors)().await && served.await.is_ok()
        };
        self.runtime.timeout(limit, asked).await == Some(true)
    }
}

impl fmt::Debug for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Health").finish_non_exhaustive()
    }
}
