//! What every handler of the API needs: the head, who may ask, and answers in bounded time.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use actix_web::{HttpRequest, HttpResponse};
use kolo_transport::ids::JobId;
use kolo_transport::wire::{JobInfo, Refusal};

use super::api::HeadApi;
use super::auth::{BearerSecret, Caller};
use super::error::ApiError;
use crate::limiter::Attempts;

/// How long the head may take for an answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

pub(super) type Answer = Result<HttpResponse, ApiError>;

/// What the head answers, in bounded time.
pub(super) async fn answered<T>(
    patience: Duration,
    answer: impl Future<Output = Result<T, Refusal>>,
) -> Result<T, ApiError> {
    match tokio::time::timeout(patience, answer).await {
        Ok(answer) => answer.map_err(Into::into),
        Err(_) => Err(ApiError::late(format!(
            "the head did not answer within {} seconds; ask again",
            patience.as_secs()
        ))),
    }
}

/// What every handler needs.
pub(super) struct Api {
    pub(super) head: Arc<dyn HeadApi>,
    pub(super) bearer: Option<BearerSecret>,
    pub(super) attempts: Attempts,
}

pub(super) fn job_id(request: &HttpRequest) -> Result<JobId, ApiError> {
    request
        .match_info()
        .query("job")
        .parse()
        .map_err(|error: kolo_transport::ids::ParseIdError| ApiError::invalid(error.to_string()))
}

impl Api {
    pub(super) fn caller(&self, request: &HttpRequest) -> Result<Caller, ApiError> {
        let caller = Caller::of(request, self.bearer.as_ref(), &self.attempts)?;
        match &caller {
            // Also on a connection that is older than the revocation.
            Caller::Member(identity) if self.head.is_revoked(identity) => {
                Err(ApiError::unauthenticated(format!("{identity} was revoked")))
            }
            _ => Ok(caller),
        }
    }

    pub(super) fn operator(&self, request: &HttpRequest) -> Result<(), ApiError> {
        self.caller(request)?.operator()
    }

    /// The node in the path of a request that only an administrator may send.
    pub(super) fn administered(&self, request: &HttpRequest) -> Result<String, ApiError> {
        let caller = self.caller(request)?;
        caller.administrator(&*self.head)?;
        let node = request.match_info().query("node").to_owned();
        tracing::info!(node, ?caller, method = %request.method(), "the API is asked to drain a node, or to end that");
        Ok(node)
    }

    pub(super) async fn find(&self, request: &HttpRequest) -> Result<JobInfo, ApiError> {
        let job = job_id(request)?;
        answered(PATIENCE, self.head.job(job)).await
    }
}
