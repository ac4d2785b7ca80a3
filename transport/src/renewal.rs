//! When to renew a certificate.
//!
//! [`Validity`] is pure: the clock is an argument. [`keep_renewed`] goes by it.

use std::future::Future;
use std::time::{Duration, SystemTime};

use crate::credentials::Credentials;
use crate::identity::IdentityError;
use crate::live::LiveCredentials;
use crate::random::random_u64;
use crate::validity::MIN_PAUSE;
pub use crate::validity::Validity;

/// The longest sleep.
const LOOK_AGAIN: Duration = Duration::from_secs(60);

/// Keeps credentials renewed, until it is dropped: waits until it is time, asks `renew` for a certificate with a signing
/// request in DER, and replaces the credentials. `renewed` is told of each success, for instance to store it.
///
/// Runs in the time of the current tokio runtime, and by the wall clock.
pub async fn keep_renewed<R, F>(
    live: LiveCredentials,
    mut renew: R,
    mut renewed: impl FnMut(&Credentials),
) where
    R: FnMut(Vec<u8>) -> F,
    F: Future<Output = Result<Vec<u8>, String>>,
{
    let mut jitter = random_fraction();
    let mut failures = 0;
    let mut changes = live.changes();
    loop {
        let current = changes.borrow_and_update().clone();
        let now = SystemTime::now();
        let due = now + current.validity().wait(now, jitter, failures);
        // In pieces: a clock that is set, or a machine that was suspended, is noticed after one of them.
        let mut replaced = false;
        while let Ok(wait) = due.duration_since(SystemTime::now())
            && !wait.is_zero()
            && !replaced
        {
            let pause = wait.min(LOOK_AGAIN);
            replaced = tokio::time::timeout(pause, changes.changed()).await.is_ok();
        }
        if replaced {
            failures = 0;
            continue;
        }
        let attempt = async {
            let request = current.renewal_request().map_err(|e| e.to_string())?;
            let certificate = renew(request).await?;
            let new = current
                .renewed(&certificate)
                .map_err(|error: IdentityError| error.to_string())?;
            live.replace(new.clone()).map_err(|e| e.to_string())?;
            Ok::<_, String>(new)
        };
        match attempt.await {
            Ok(new) => {
                tracing::info!(identity = %new.identity(), life = ?new.validity().life(), "the certificate is renewed");
                renewed(&new);
                jitter = random_fraction();
                failures = 0;
                // Whatever the authority gives: never a busy loop.
                tokio::time::sleep(MIN_PAUSE).await;
            }
            Err(reason) => {
                failures += 1;
                let left = current.validity().end.duration_since(SystemTime::now());
                if let Ok(left) = left {
                    tracing::warn!(%reason, ?left, "the certificate could not be renewed; trying again");
                } else {
                    tracing::error!(
                        %reason,
                        "the certificate has ended and could not be renewed: connections that exist go on, new ones are refused"
                    );
                }
                // At least once through the wait above.
                tokio::time::sleep(MIN_PAUSE).await;
            }
        }
    }
}

/// From 0 up to 1.
fn random_fraction() -> f64 {
    (random_u64() >> 11) as f64 / (1_u64 << 53) as f64
}
