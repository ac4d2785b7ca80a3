//! The rendezvous of kolo's own workers and drivers: keys and values of one job, with long-poll and batch.

use std::time::Duration;

use actix_web::http::header;
use actix_web::{FromRequest as _, HttpRequest, HttpResponse, web};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use kolo_core::rendezvous::{Deleted, Entry};
use kolo_transport::ids::Generation;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use utoipa::{IntoParams, ToSchema};

use super::body;
use super::dto::ErrorBody;
use super::error::ApiError;
use super::routes::job_id;
use super::server::Api;
use super::stores::JobStore;

/// The longest time that a request may wait for a key, in seconds.
const LONGEST_WAIT: f64 = 60.0;

/// The most keys of one batch.
const LARGEST_BATCH: usize = 4096;

/// The longest batch, in bytes of JSON.
const BATCH_BYTES: usize = 16 << 20;

/// The most bytes of values in the answer to a batch. A key may be asked for many times.
const ANSWER_BYTES: usize = 16 << 20;

/// The header that carries the version of a value.
const VERSION: &str = "Kolo-Version";

type Answer = Result<HttpResponse, ApiError>;

/// What may follow the `?`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Options {
    /// Seconds to wait for the key, 0 to 60. By default it is not waited for.
    wait: Option<f64>,
    /// Only a value with a later version than this.
    after: Option<u64>,
    /// The generation for which the request is meant. Refused with 409 if it is not the current one.
    generation: Option<u64>,
}

/// The version of the store after a PUT.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Stored {
    /// Counts up over the whole store of a generation.
    version: u64,
}

/// What a DELETE did.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct DeleteOutcome {
    outcome: DeleteKind,
    /// In a scope of known size: different keys that are finished.
    finished: Option<u32>,
    /// In a scope of known size: its members.
    expected: Option<u32>,
}

/// The outcomes of a DELETE.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum DeleteKind {
    /// The key is gone.
    Removed,
    /// There was no such key.
    Absent,
    /// The key is counted as finished; its value stays until all members have finished.
    Counted,
    /// The last member has finished: all values of the scope are gone.
    Completed,
}

impl From<Deleted> for DeleteOutcome {
    fn from(deleted: Deleted) -> Self {
        let (outcome, finished, expected) = match deleted {
            Deleted::Removed => (DeleteKind::Removed, None, None),
            Deleted::Absent => (DeleteKind::Absent, None, None),
            Deleted::Counted { finished, expected } => {
                (DeleteKind::Counted, Some(finished), Some(expected))
            }
            Deleted::Completed => (DeleteKind::Completed, None, None),
        };
        Self {
            outcome,
            finished,
            expected,
        }
    }
}

/// A key to read.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct BatchKey {
    #[schema(example = "global")]
    scope: String,
    #[schema(example = "0")]
    key: String,
}

/// A value to store.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct BatchPut {
    #[schema(example = "global")]
    scope: String,
    #[schema(example = "0")]
    key: String,
    /// The value in base64.
    #[schema(example = "MTAuMC4wLjI6NDEyMzQ=")]
    value: String,
}

/// Many changes and reads at once. The values are stored first, in order; then the keys are read, at one time.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Batch {
    /// Values to store.
    #[serde(default)]
    put: Vec<BatchPut>,
    /// Keys to read.
    #[serde(default)]
    get: Vec<BatchKey>,
}

/// A value as a batch reads it.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct BatchValue {
    /// The value in base64.
    value: String,
    /// The version that brought it.
    version: u64,
}

impl From<Entry> for BatchValue {
    fn from(entry: Entry) -> Self {
        Self {
            value: BASE64.encode(&entry.value),
            version: entry.version,
        }
    }
}

/// What a batch has read.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct BatchAnswer {
    /// The version of the store when it was read.
    version: u64,
    /// The values in the order of `get`; null for a key that is not there.
    values: Vec<Option<BatchValue>>,
}

impl Options {
    fn of(request: &HttpRequest) -> Result<Self, ApiError> {
        let options = web::Query::<Self>::from_query(request.query_string())
            .map_err(|error| ApiError::invalid(format!("the query is not valid: {error}")))?
            .into_inner();
        match options.wait {
            Some(wait) if !(0.0..=LONGEST_WAIT).contains(&wait) => Err(ApiError::invalid(format!(
                "wait is {wait}; allowed are 0 to {LONGEST_WAIT} seconds"
            ))),
            _ => Ok(options),
        }
    }

    fn deadline(&self) -> Instant {
        Instant::now() + Duration::from_secs_f64(self.wait.unwrap_or(0.0))
    }
}

/// Checks the caller and finds the store, before anything else is read.
async fn enter(request: &HttpRequest, api: &Api) -> Result<(Options, JobStore), ApiError> {
    let caller = api.caller(request)?;
    let job = job_id(request)?;
    caller.could_meet(job)?;
    let options = Options::of(request)?;
    let found = api
        .stores
        .get(api.head.as_ref(), job, options.generation.map(Generation))
        .await?;
    caller.meets(job, found.owner)?;
    Ok((options, found))
}

/// Scope and key, percent-decoded.
fn place(request: &HttpRequest) -> Result<(String, String), ApiError> {
    web::Path::<(String, String, String)>::extract(request)
        .into_inner()
        .map(|path| {
            let (_, scope, key) = path.into_inner();
            (scope, key)
        })
        .map_err(|error| ApiError::invalid(format!("the path is not valid: {error}")))
}

/// The value of a key, as it was put. With `wait`, as soon as it is there.
#[utoipa::path(
    get, path = "/api/v1/jobs/{job}/rendezvous/{scope}/{key}", tag = "rendezvous",
    operation_id = "rendezvous_get",
    params(
        ("job" = String, Path, description = "The job"),
        ("scope" = String, Path, description = "`global`, `local_<node id>` and `cross_<local rank>` are finalised by DELETE; others are ad hoc"),
        ("key" = String, Path, description = "Any name"),
        Options,
    ),
    responses(
        (status = 200, description = "The value; its version in the header `Kolo-Version`", body = [u8], content_type = "application/octet-stream"),
        (status = 400, description = "A name or option that is not possible", body = ErrorBody),
        (status = 401, description = "No credential, or one that is not good", body = ErrorBody),
        (status = 403, description = "Neither the job's driver nor one of its workers", body = ErrorBody),
        (status = 404, description = "No such job; or no such key, not even after the wait", body = ErrorBody),
        (status = 409, description = "The generation is not the current one", body = ErrorBody),
    )
)]
pub(super) async fn get(request: HttpRequest, api: web::Data<Api>) -> Answer {
    let (options, found) = enter(&request, &api).await?;
    let (scope, key) = place(&request)?;
    let entry = found
        .store
        .wait(&scope, &key, options.after.unwrap_or(0), options.deadline())
        .await?
        .ok_or_else(|| {
            ApiError::not_found(format!("there is no key `{key}` in scope `{scope}`"))
        })?;
    Ok(HttpResponse::Ok()
        .content_type("application/octet-stream")
        .insert_header((header::CACHE_CONTROL, "no-store"))
        .insert_header((VERSION, entry.version.to_string()))
        .body(entry.value))
}

/// Stores a value, over an older one if there is one, and wakes who waits for it.
#[utoipa::path(
    put, path = "/api/v1/jobs/{job}/rendezvous/{scope}/{key}", tag = "rendezvous",
    operation_id = "rendezvous_put",
    params(
        ("job" = String, Path, description = "The job"),
        ("scope" = String, Path, description = "The scope"),
        ("key" = String, Path, description = "Any name"),
        ("generation" = Option<u64>, Query, description = "The generation for which the request is meant"),
    ),
    request_body(content = [u8], content_type = "application/octet-stream", description = "The value"),
    responses(
        (status = 200, description = "Stored", body = Stored),
        (status = 400, description = "A name that is not possible", body = ErrorBody),
        (status = 401, description = "No credential, or one that is not good", body = ErrorBody),
        (status = 403, description = "Neither the job's driver nor one of its workers", body = ErrorBody),
        (status = 404, description = "No such job", body = ErrorBody),
        (status = 408, description = "The body did not come in time", body = ErrorBody),
        (status = 409, description = "The generation is not the current one", body = ErrorBody),
        (status = 413, description = "The value is too long", body = ErrorBody),
        (status = 507, description = "The store is full", body = ErrorBody),
    )
)]
pub(super) async fn put(
    request: HttpRequest,
    payload: web::Payload,
    api: web::Data<Api>,
) -> Answer {
    let (_, found) = enter(&request, &api).await?;
    let (scope, key) = place(&request)?;
    let limit = found.store.limits().value_bytes;
    let declared = body::declared_length(&request);
    let value = body::read(payload, declared, limit, api.limits.body).await?;
    let version = found.store.put(&scope, &key, value)?;
    Ok(HttpResponse::Ok().json(Stored { version }))
}

/// Deletes a key; in a scope of known size, counts it as finished.
#[utoipa::path(
    delete, path = "/api/v1/jobs/{job}/rendezvous/{scope}/{key}", tag = "rendezvous",
    operation_id = "rendezvous_delete",
    params(
        ("job" = String, Path, description = "The job"),
        ("scope" = String, Path, description = "The scope"),
        ("key" = String, Path, description = "The name"),
        ("generation" = Option<u64>, Query, description = "The generation for which the request is meant"),
    ),
    responses(
        (status = 200, description = "What it did", body = DeleteOutcome),
        (status = 401, description = "No credential, or one that is not good", body = ErrorBody),
        (status = 403, description = "Neither the job's driver nor one of its workers", body = ErrorBody),
        (status = 404, description = "No such job", body = ErrorBody),
        (status = 409, description = "The generation is not the current one", body = ErrorBody),
    )
)]
pub(super) async fn delete(request: HttpRequest, api: web::Data<Api>) -> Answer {
    let (_, found) = enter(&request, &api).await?;
    let (scope, key) = place(&request)?;
    let outcome = DeleteOutcome::from(found.store.delete(&scope, &key));
    Ok(HttpResponse::Ok().json(outcome))
}

/// Stores and reads many keys in one request. With `wait`, waits until all keys of `get` are there: a whole
/// group exchanges its addresses with one request for each member.
///
/// A value that is refused ends the batch; those before it are stored.
#[utoipa::path(
    post, path = "/api/v1/jobs/{job}/rendezvous/batch", tag = "rendezvous",
    operation_id = "rendezvous_batch",
    params(
        ("job" = String, Path, description = "The job"),
        ("wait" = Option<f64>, Query, description = "Seconds to wait for all keys, 0 to 60"),
        ("generation" = Option<u64>, Query, description = "The generation for which the request is meant"),
    ),
    request_body(content = Batch),
    responses(
        (status = 200, description = "The values that are there at the end of the wait", body = BatchAnswer),
        (status = 400, description = "Not a batch, or a name that is not possible", body = ErrorBody),
        (status = 401, description = "No credential, or one that is not good", body = ErrorBody),
        (status = 403, description = "Neither the job's driver nor one of its workers", body = ErrorBody),
        (status = 404, description = "No such job", body = ErrorBody),
        (status = 408, description = "The body did not come in time", body = ErrorBody),
        (status = 409, description = "The generation is not the current one", body = ErrorBody),
        (status = 413, description = "The batch, a value or the answer is too long", body = ErrorBody),
        (status = 507, description = "The store is full", body = ErrorBody),
    )
)]
pub(super) async fn batch(
    request: HttpRequest,
    payload: web::Payload,
    api: web::Data<Api>,
) -> Answer {
    let (options, found) = enter(&request, &api).await?;
    let declared = body::declared_length(&request);
    let body = body::read(payload, declared, BATCH_BYTES, api.limits.body).await?;
    let batch: Batch = serde_json::from_slice(&body)
        .map_err(|error| ApiError::invalid(format!("the body is not a batch: {error}")))?;
    let count = batch.put.len() + batch.get.len();
    if count > LARGEST_BATCH {
        return Err(ApiError::invalid(format!(
            "the batch has {count} keys; allowed are up to {LARGEST_BATCH}"
        )));
    }
    for BatchPut { scope, key, value } in &batch.put {
        let value = BASE64.decode(value).map_err(|error| {
            ApiError::invalid(format!(
                "the value of `{scope}/{key}` is not base64: {error}"
            ))
        })?;
        found.store.put(scope, key, Bytes::from(value))?;
    }
    let deadline = options.deadline();
    if options.wait.is_some() {
        for BatchKey { scope, key } in &batch.get {
            if found.store.wait(scope, key, 0, deadline).await?.is_none() {
                break;
            }
        }
    }
    let keys = batch
        .get
        .iter()
        .map(|BatchKey { scope, key }| (scope.as_str(), key.as_str()));
    let (version, values) = found.store.get_many(keys);
    let bytes: usize = values.iter().flatten().map(|entry| entry.value.len()).sum();
    if bytes > ANSWER_BYTES {
        return Err(ApiError::too_large(format!(
            "the values have {bytes} bytes together; allowed are up to {ANSWER_BYTES}: ask for fewer keys at once"
        )));
    }
    Ok(HttpResponse::Ok().json(BatchAnswer {
        version,
        values: values
            .into_iter()
            .map(|entry| entry.map(Into::into))
            .collect(),
    }))
}
