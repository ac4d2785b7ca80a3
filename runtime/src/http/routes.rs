//! The cluster and its jobs.

use std::time::Duration;

use actix_web::{HttpRequest, HttpResponse, web};
use serde::Deserialize;
use utoipa::IntoParams;

use super::dto::{Cluster, Drain, ErrorBody, Health, Job, Node, Worker};
use super::error::ApiError;
use super::state::{Answer, Api, PATIENCE, answered, job_id};

/// How long a job may take to end before the caller is told to look again.
const STOP_PATIENCE: Duration = Duration::from_secs(60);

/// How long elastic jobs have to leave a node that is drained, in seconds.
const DRAIN_DEADLINE: f64 = 60.0;

/// Whether the daemon runs.
#[utoipa::path(
    get, path = "/healthz", tag = "health",
    responses((status = 200, description = "It runs", body = Health)),
    security(())
)]
pub(super) async fn healthz() -> HttpResponse {
    HttpResponse::Ok().json(Health {
        status: "ok".to_owned(),
    })
}

/// Whether the head takes jobs.
#[utoipa::path(
    get, path = "/readyz", tag = "health",
    responses(
        (status = 200, description = "It takes jobs", body = Health),
        (status = 503, description = "Not yet, or not any more", body = Health),
    ),
    security(())
)]
pub(super) async fn readyz(api: web::Data<Api>) -> HttpResponse {
    if api.head.ready() {
        HttpResponse::Ok().json(Health {
            status: "ok".to_owned(),
        })
    } else {
        HttpResponse::ServiceUnavailable().json(Health {
            status: "the head does not take jobs now".to_owned(),
        })
    }
}

/// The whole cluster.
#[utoipa::path(
    get, path = "/api/v1/cluster", tag = "cluster",
    responses(
        (status = 200, description = "The cluster and its nodes", body = Cluster),
        (status = 401, description = "No credential, or one that is not good", body = ErrorBody),
        (status = 403, description = "The caller's role may not do this", body = ErrorBody),
    )
)]
pub(super) async fn cluster(request: HttpRequest, api: web::Data<Api>) -> Answer {
    api.operator(&request)?;
    let cluster = answered(PATIENCE, api.head.cluster()).await?;
    Ok(HttpResponse::Ok().json(Cluster::from(&cluster)))
}

/// All nodes, in order of registration.
#[utoipa::path(
    get, path = "/api/v1/nodes", tag = "cluster",
    responses(
        (status = 200, description = "The nodes", body = [Node]),
        (status = 401, description = "No credential, or one that is not good", body = ErrorBody),
        (status = 403, description = "The caller's role may not do this", body = ErrorBody),
    )
)]
pub(super) async fn nodes(request: HttpRequest, api: web::Data<Api>) -> Answer {
    api.operator(&request)?;
    let cluster = answered(PATIENCE, api.head.cluster()).await?;
    Ok(HttpResponse::Ok().json(Cluster::from(&cluster).nodes))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct DrainOptions {
    /// Seconds after which members of elastic jobs that are still there are ended, up to one day. 60 by default.
    deadline: Option<f64>,
}

/// Drains a node: it takes no new work, and elastic jobs leave it. Answered at once.
#[utoipa::path(
    put, path = "/api/v1/nodes/{node}/drain", tag = "cluster",
    params(("node" = String, Path, description = "Its id or hostname"), DrainOptions),
    responses(
        (status = 200, description = "The jobs that leave, and those that stay until they end", body = Drain),
        (status = 400, description = "Several nodes have the hostname, or the deadline is none", body = ErrorBody),
        (status = 401, description = "No credential, or one that is not good", body = ErrorBody),
        (status = 403, description = "The caller is no administrator", body = ErrorBody),
        (status = 404, description = "No such node", body = ErrorBody),
    )
)]
pub(super) async fn drain(request: HttpRequest, api: web::Data<Api>) -> Answer {
    let node = api.administered(&request)?;
    let options = web::Query::<DrainOptions>::from_query(request.query_string())
        .map_err(|error| ApiError::invalid(format!("the query is not understood: {error}")))?;
    let seconds = options.deadline.unwrap_or(DRAIN_DEADLINE);
    let deadline = Duration::try_from_secs_f64(seconds).map_err(|_| {
        ApiError::invalid(format!(
            "deadline is {seconds}; allowed are 0 to 86400 seconds"
        ))
    })?;
    let drain = answered(PATIENCE, api.head.drain(node, deadline)).await?;
    Ok(HttpResponse::Ok().json(Drain::from(&drain)))
}

/// Lets a drained node take work again.
#[utoipa::path(
    delete, path = "/api/v1/nodes/{node}/drain", tag = "cluster",
    params(("node" = String, Path, description = "Its id or hostname")),
    responses(
        (status = 204, description = "It takes work again"),
        (status = 400, description = "Several nodes have the hostname", body = ErrorBody),
        (status = 401, description = "No credential, or one that is not good", body = ErrorBody),
        (status = 403, description = "The caller is no administrator", body = ErrorBody),
        (status = 404, description = "No such node", body = ErrorBody),
        (status = 503, description = "Its daemon is stopping", body = ErrorBody),
    )
)]
pub(super) async fn undrain(request: HttpRequest, api: web::Data<Api>) -> Answer {
    let node = api.administered(&request)?;
    answered(PATIENCE, api.head.undrain(node)).await?;
    Ok(HttpResponse::NoContent().finish())
}

/// All jobs that the head remembers, the newest first.
#[utoipa::path(
    get, path = "/api/v1/jobs", tag = "jobs",
    responses(
        (status = 200, description = "The jobs", body = [Job]),
        (status = 401, description = "No credential, or one that is not good", body = ErrorBody),
        (status = 403, description = "The caller's role may not do this", body = ErrorBody),
    )
)]
pub(super) async fn jobs(request: HttpRequest, api: web::Data<Api>) -> Answer {
    api.operator(&request)?;
    let jobs = answered(PATIENCE, api.head.jobs()).await?;
    let jobs: Vec<Job> = jobs.iter().map(Into::into).collect();
    Ok(HttpResponse::Ok().json(jobs))
}

/// One job.
#[utoipa::path(
    get, path = "/api/v1/jobs/{job}", tag = "jobs",
    params(("job" = String, Path, description = "Its id, `job-` and 16 hexadecimal digits")),
    responses(
        (status = 200, description = "The job and its workers", body = Job),
        (status = 400, description = "That is no job id", body = ErrorBody),
        (status = 401, description = "No credential, or one that is not good", body = ErrorBody),
        (status = 403, description = "The caller's role may not do this", body = ErrorBody),
        (status = 404, description = "No such job", body = ErrorBody),
    )
)]
pub(super) async fn job(request: HttpRequest, api: web::Data<Api>) -> Answer {
    api.operator(&request)?;
    let job = api.find(&request).await?;
    Ok(HttpResponse::Ok().json(Job::from(&job)))
}

/// Stops a job: notice, TERM, KILL. Answered when it has ended; a job that has ended already stays as it is.
#[utoipa::path(
    delete, path = "/api/v1/jobs/{job}", tag = "jobs",
    params(("job" = String, Path, description = "Its id, `job-` and 16 hexadecimal digits")),
    responses(
        (status = 200, description = "The job as it ended", body = Job),
        (status = 400, description = "That is no job id", body = ErrorBody),
        (status = 401, description = "No credential, or one that is not good", body = ErrorBody),
        (status = 403, description = "The caller's role may not do this", body = ErrorBody),
        (status = 404, description = "No such job", body = ErrorBody),
        (status = 504, description = "It is being stopped but has not ended after 60 seconds", body = ErrorBody),
    )
)]
pub(super) async fn stop(request: HttpRequest, api: web::Data<Api>) -> Answer {
    let caller = api.caller(&request)?;
    caller.operator()?;
    let job = job_id(&request)?;
    tracing::info!(%job, ?caller, "the API is asked to stop a job");
    answered(STOP_PATIENCE, api.head.stop(job)).await?;
    let job = answered(PATIENCE, api.head.job(job)).await?;
    Ok(HttpResponse::Ok().json(Job::from(&job)))
}

/// The workers of a job, in rank order.
#[utoipa::path(
    get, path = "/api/v1/jobs/{job}/workers", tag = "jobs",
    params(("job" = String, Path, description = "Its id, `job-` and 16 hexadecimal digits")),
    responses(
        (status = 200, description = "The workers", body = [Worker]),
        (status = 400, description = "That is no job id", body = ErrorBody),
        (status = 401, description = "No credential, or one that is not good", body = ErrorBody),
        (status = 403, description = "The caller's role may not do this", body = ErrorBody),
        (status = 404, description = "No such job", body = ErrorBody),
    )
)]
pub(super) async fn workers(request: HttpRequest, api: web::Data<Api>) -> Answer {
    api.operator(&request)?;
    let job = api.find(&request).await?;
    Ok(HttpResponse::Ok().json(Job::from(&job).workers))
}
