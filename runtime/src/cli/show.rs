//! `kolo status` and `kolo jobs`.

use std::collections::BTreeSet;

use kolo_transport::wire::{ClusterInfo, JobInfo, JobState, NodeInfo, WorkerState};

use super::args::{Connect, Format, Jobs};
use super::client::Client;
use super::error::CliError;
use super::output::{Cell, Output, Tone, human};
use crate::http::dto;

pub(super) async fn status(
    connect: &Connect,
    format: Format,
    out: &mut Output<'_>,
) -> Result<(), CliError> {
    let client = Client::connect(&connect.config()).await?;
    let cluster = client.cluster().await?;
    let address = client.address();
    client.close().await;
    if format == Format::Json {
        return out.json(&dto::Cluster::from(&cluster));
    }
    out.line(&format!(
        "{}: head {} at {address}, up {}, {}",
        cluster.cluster,
        cluster.version,
        human(cluster.uptime_ms),
        count(cluster.running_jobs as usize, "running job"),
    ))?;
    if cluster.nodes.is_empty() {
        out.line("no nodes have registered; start one by `kolo-node --head HOST:PORT`")?;
    } else {
        out.line("")?;
        nodes(&cluster, out)?;
    }
    super::trust::show(&cluster.revoked, out)
}

fn count(number: usize, what: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {what}{plural}")
}

fn nodes(cluster: &ClusterInfo, out: &mut Output<'_>) -> Result<(), CliError> {
    let rows: Vec<[Cell; 8]> = cluster.nodes.iter().map(node).collect();
    out.table(
        [
            "NODE",
            "HOSTNAME",
            "ADDRESS",
            "STATE",
            "CPUS FREE",
            "GPUS FREE",
            "JOBS",
            "OTHER FREE",
        ],
        &rows,
    )
}

fn node(node: &NodeInfo) -> [Cell; 8] {
    let state = if node.alive && node.draining {
        Cell::toned("draining", Tone::Changing)
    } else if node.alive {
        Cell::toned("alive", Tone::Good)
    } else {
        Cell::toned(format!("lost {} ago", human(node.last_seen_ms)), Tone::Bad)
    };
    let (total, free) = (&node.total, &node.available);
    let other: Vec<String> = total
        .custom
        .iter()
        .map(|(name, amount)| {
            let free = free.custom.get(name).copied().unwrap_or_default();
            format!("{name} {free}/{amount}")
        })
        .collect();
    [
        node.node.to_string().into(),
        node.hostname.as_str().into(),
        node.address.to_string().into(),
        state,
        format!("{}/{}", free.cpus, total.cpus).into(),
        format!("{}/{}", free.gpus, total.gpus).into(),
        node.jobs.len().to_string().into(),
        other.join(", ").into(),
    ]
}

pub(super) async fn jobs(
    options: &Jobs,
    connect: &Connect,
    format: Format,
    out: &mut Output<'_>,
) -> Result<(), CliError> {
    let client = Client::connect(&connect.config()).await?;
    if let Some(text) = &options.job {
        // Lists leave out what would make them long.
        let job = client.find(text).await?.job;
        let job = client.job(job).await?;
        client.close().await;
        return match format {
            Format::Json => out.json(&dto::Job::from(&job)),
            Format::Table => workers(&job, out),
        };
    }
    let jobs = client.jobs().await?;
    client.close().await;
    match format {
        Format::Json => {
            let jobs: Vec<dto::Job> = jobs.iter().map(Into::into).collect();
            out.json(&jobs)
        }
        Format::Table if jobs.is_empty() => out.line("there are no jobs"),
        Format::Table => {
            let rows: Vec<[Cell; 7]> = jobs.iter().map(job).collect();
            out.table(
                ["JOB", "NAME", "STATE", "READY", "NODES", "AGE", "REASON"],
                &rows,
            )
        }
    }
}

fn state(state: JobState) -> Cell {
    let tone = match state {
        JobState::Healthy | JobState::Succeeded => Tone::Good,
        JobState::Failed => Tone::Bad,
        JobState::Stopped => Tone::Faint,
        JobState::Pending
        | JobState::Placing
        | JobState::Probing
        | JobState::Starting
        | JobState::Recovering => Tone::Changing,
    };
    Cell::toned(state.to_string(), tone)
}

fn job(job: &JobInfo) -> [Cell; 7] {
    [
        job.job.to_string().into(),
        job.name.as_str().into(),
        state(job.state),
        ready(job).into(),
        placed_on(job).to_string().into(),
        human(job.age_ms).into(),
        job.reason.clone().unwrap_or_default().into(),
    ]
}

/// Members that take calls, of how many, and the spares beside them.
fn ready(job: &JobInfo) -> String {
    let count = |state| {
        let workers = job.workers.iter();
        workers.filter(|worker| worker.state == state).count()
    };
    let (ready, spares) = (count(WorkerState::Ready), count(WorkerState::Spare));
    let members = format!("{ready}/{}", job.workers.len() - spares);
    match spares {
        0 => members,
        _ => format!("{members} +{spares}"),
    }
}

fn placed_on(job: &JobInfo) -> usize {
    let nodes: BTreeSet<_> = job.nodes.iter().map(|node| node.node).collect();
    nodes.len()
}

fn workers(job: &JobInfo, out: &mut Output<'_>) -> Result<(), CliError> {
    // The head stops the clock of a job that has ended.
    let age = human(job.age_ms);
    let age = if job.state.is_final() {
        format!("lasted {age}, submitted by")
    } else {
        format!("submitted {age} ago by")
    };
    out.line(&format!(
        "{} ({}): {}, generation {}, {} on {}, {age} {}",
        job.job,
        job.name,
        job.state,
        job.generation,
        count(job.workers.len(), "worker"),
        count(placed_on(job), "node"),
        job.owner,
    ))?;
    if let Some(reason) = &job.reason {
        for line in reason.lines() {
            out.line(&format!("  {line}"))?;
        }
    }
    if let Some(membership) = &job.membership {
        if let Some(cause) = &membership.cause {
            out.line(&format!("  members: {cause}"))?;
        }
        if !job.state.is_final() && !membership.decision.is_empty() {
            out.line(&format!("  decision: {}", membership.decision))?;
        }
        for host in &membership.left_out {
            let seconds = host.for_ms.div_ceil(1000);
            out.line(&format!(
                "  left out for {seconds} s: {}: {}",
                host.hostname, host.why
            ))?;
        }
    }
    if let Some(network) = &job.network
        && network.problem.is_none()
    {
        out.line(&format!(
            "  network: {}; `kolo interfaces --job {}` shows what was tried",
            network.choice, job.job
        ))?;
    }
    if let Some(address) = job.rendezvous {
        out.line(&format!(
            "  rendezvous for other systems at http://{address}"
        ))?;
    }
    if job.workers.is_empty() {
        return Ok(());
    }
    out.line("")?;
    let rows: Vec<[Cell; 8]> = job
        .workers
        .iter()
        .map(|worker| {
            let member = &worker.member;
            let tone = match (worker.state, worker.exit) {
                (WorkerState::Ready, _) => Tone::Good,
                (WorkerState::Exited, Some(exit)) if !exit.is_success() => Tone::Bad,
                (WorkerState::Exited, _) => Tone::Faint,
                (WorkerState::Starting | WorkerState::Spare | WorkerState::Stopping, _) => {
                    Tone::Changing
                }
            };
            [
                member.rank.to_string().into(),
                format!("{}/{}", member.local_rank, member.local_size).into(),
                format!("{}/{}", member.cross_rank, member.cross_size).into(),
                member.node.to_string().into(),
                member.hostname.as_str().into(),
                worker.pid.to_string().into(),
                Cell::toned(worker.state.to_string(), tone),
                worker
                    .exit
                    .map(|exit| exit.to_string())
                    .unwrap_or_default()
                    .into(),
            ]
        })
        .collect();
    out.table(
        [
            "RANK", "LOCAL", "CROSS", "NODE", "HOSTNAME", "PID", "STATE", "EXIT",
        ],
        &rows,
    )
}
