//! `kolo status` and `kolo jobs`.

use std::collections::BTreeSet;
use std::fmt::Display;

use kolo_transport::wire::counted::Counted;
use kolo_transport::wire::{ClusterInfo, JobInfo, JobState, NodeInfo, RevokedMember, WorkerState};

use super::args::{Connect, Format, Jobs, Status, Watch};
use super::client::Client;
use super::error::CliError;
use super::ids::Short;
use super::output::{Cell, Output, Tone, human, now_ms, timestamp};
use crate::http::dto::{self, NodeState};

/// Shows something once, or again and again until this process is ended.
async fn shown(
    (watch, format): (&Watch, Format),
    connect: &Connect,
    out: &mut Output<'_>,
    show: impl AsyncFn(&Client, &mut Output<'_>) -> Result<(), CliError>,
) -> Result<(), CliError> {
    let client = Client::connect(&connect.config()).await?;
    let mut is_first = true;
    loop {
        let mut page = Vec::new();
        show(&client, &mut out.aside(&mut page)).await?;
        if !std::mem::replace(&mut is_first, false) {
            out.next_page()?;
        }
        let Some(every) = watch.every else {
            out.bytes(&page)?;
            break;
        };
        // A document for programs is whole.
        match format {
            Format::Json => out.bytes(&page)?,
            Format::Table => out.page(&page)?,
        }
        out.flush()?;
        tokio::time::sleep(every).await;
    }
    client.close().await;
    Ok(())
}

pub(super) async fn status(
    options: &Status,
    connect: &Connect,
    format: Format,
    out: &mut Output<'_>,
) -> Result<(), CliError> {
    shown((&options.watch, format), connect, out, async |client, out| {
        let cluster = client.cluster().await?;
        if format == Format::Json {
            return out.json(&dto::Cluster::from(&cluster));
        }
        out.prose(&format!(
            "{}: head {} at {}, up {}, {}",
            cluster.cluster,
            cluster.version,
            client.address(),
            human(cluster.uptime_ms),
            Counted(cluster.running_jobs, "running job"),
        ))?;
        if cluster.nodes.is_empty() {
            out.prose("no nodes have registered; start one by `kolo-node --head HOST:PORT --token-file FILE`")?;
        } else {
            out.line("")?;
            nodes(&cluster, out)?;
        }
        super::trust::show(&cluster.revoked, out)
    })
    .await
}

fn nodes(cluster: &ClusterInfo, out: &mut Output<'_>) -> Result<(), CliError> {
    let ids = Short::of(cluster.nodes.iter().map(|node| node.node.to_string()));
    let rows = cluster.nodes.iter();
    let rows: Vec<[Cell; 8]> = rows.map(|info| node(info, &cluster.revoked, ids)).collect();
    let header = [
        "NODE",
        "HOSTNAME",
        "ADDRESS",
        "STATE",
        "CPUS FREE",
        "GPUS FREE",
        "JOBS",
        "OTHER FREE",
    ];
    out.table(header, &rows)
}

fn node(node: &NodeInfo, revoked: &[RevokedMember], ids: Short) -> [Cell; 8] {
    let state = NodeState::of(node, revoked);
    let since = || format!("{} {} ago", state.word(), human(node.last_seen_ms));
    let state = match state {
        NodeState::Alive => Cell::toned(state.word(), Tone::Good),
        NodeState::Draining | NodeState::Drained => Cell::toned(state.word(), Tone::Changing),
        NodeState::Revoked => Cell::toned(state.word(), Tone::Bad),
        NodeState::Lost => Cell::toned(since(), Tone::Bad),
        NodeState::Left => Cell::toned(since(), Tone::Faint),
    };
    let (total, free) = (&node.total, &node.available);
    let if_alive = |text: String| {
        if node.alive { text } else { NOTHING.to_owned() }
    };
    let of = |free: &dyn Display, total: &dyn Display| if_alive(format!("{free} of {total}"));
    let other: Vec<String> = total
        .custom
        .iter()
        .map(|(name, amount)| {
            let free = free.custom.get(name).copied().unwrap_or_default();
            format!("{name} {}", of(&free, amount))
        })
        .collect();
    [
        ids.show(node.node).into(),
        node.hostname.as_str().into(),
        node.address.to_string().into(),
        state,
        of(&free.cpus, &total.cpus).into(),
        of(&free.gpus, &total.gpus).into(),
        if_alive(node.jobs.len().to_string()).into(),
        other.join(", ").into(),
    ]
}

pub(super) async fn jobs(
    options: &Jobs,
    connect: &Connect,
    format: Format,
    out: &mut Output<'_>,
) -> Result<(), CliError> {
    shown(
        (&options.watch, format),
        connect,
        out,
        async |client, out| {
            if let Some(text) = &options.job {
                // Lists leave out what would make them long.
                let job = client.find(text).await?.job;
                let job = client.job(job).await?;
                return match format {
                    Format::Json => out.json(&dto::Job::from(&job)),
                    Format::Table => workers(&job, out),
                };
            }
            let jobs = client.jobs().await?;
            match format {
                Format::Json => {
                    let jobs: Vec<dto::Job> = jobs.iter().map(Into::into).collect();
                    out.json(&jobs)
                }
                Format::Table if jobs.is_empty() => out.line("there are no jobs"),
                Format::Table => list(&jobs, out),
            }
        },
    )
    .await
}

/// The columns of a list of jobs. A new one is a line here and in [`job`].
const COLUMNS: [&str; 9] = [
    "JOB",
    "NAME",
    "STATE",
    "READY",
    "NODES",
    "OWNER",
    "SUBMITTED",
    "ENDED",
    "REASON",
];

/// The state of a job that ends.
const ENDING: &str = "ending";

/// A field that has nothing to say.
const NOTHING: &str = "-";

fn list(jobs: &[JobInfo], out: &mut Output<'_>) -> Result<(), CliError> {
    let ids = Short::of(jobs.iter().map(|job| job.job.to_string()));
    let owners = Short::of(jobs.iter().map(|job| job.owner.to_string()));
    let rows = jobs.iter().map(|info| job(info, ids, owners));
    let rows: Vec<[Cell; COLUMNS.len()]> = rows.collect();
    out.table(COLUMNS, &rows)
}

/// How long ago a job was submitted, in milliseconds. The head stops the clock of a job that has ended.
fn submitted(job: &JobInfo) -> u64 {
    job.age_ms.saturating_add(job.ended_ms.unwrap_or(0))
}

/// An age for a table: in the largest unit alone.
fn ago(ms: u64) -> String {
    let units = [86_400_000, 3_600_000, 60_000];
    let unit = units.into_iter().find(|unit| ms >= *unit);
    let whole = unit.map_or(ms, |unit| ms - ms % unit);
    format!("{} ago", human(whole))
}

/// Whether the job has failed or was stopped, and its workers have not ended yet.
pub(super) fn is_ending(job: &JobInfo) -> bool {
    job.reason.is_some() && !job.state.is_final()
}

fn state(job: &JobInfo) -> Cell {
    if is_ending(job) {
        return Cell::toned(ENDING, Tone::Changing);
    }
    let tone = match job.state {
        JobState::Healthy | JobState::Succeeded => Tone::Good,
        JobState::Failed => Tone::Bad,
        JobState::Stopped => Tone::Faint,
        JobState::Pending
        | JobState::Placing
        | JobState::Probing
        | JobState::Starting
        | JobState::Recovering => Tone::Changing,
    };
    Cell::toned(job.state.to_string(), tone)
}

fn job(job: &JobInfo, ids: Short, owners: Short) -> [Cell; COLUMNS.len()] {
    let reason = job.reason.as_deref().unwrap_or_default();
    // The state says it all.
    let is_told = job.state != JobState::Succeeded;
    let nodes = match placed_on(job) {
        0 => NOTHING.to_owned(),
        nodes => nodes.to_string(),
    };
    [
        ids.show(job.job).into(),
        job.name.as_str().into(),
        state(job),
        ready(job).into(),
        nodes.into(),
        owners.show(job.owner).into(),
        ago(submitted(job)).into(),
        job.ended_ms.map_or_else(|| NOTHING.to_owned(), ago).into(),
        ids.within(
            reason
                .lines()
                .next()
                .filter(|_| is_told)
                .unwrap_or_default(),
        )
        .into(),
    ]
}

/// Members that take calls, of how many, and the spares beside them. Nothing of a job that has no workers yet, or any more.
fn ready(job: &JobInfo) -> String {
    if job.state.is_final() || job.workers.is_empty() {
        return NOTHING.to_owned();
    }
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
    let age = human(job.age_ms);
    let age = match job.ended_ms {
        Some(ended) => format!("lasted {age}, ended {} ago", human(ended)),
        None if job.state.is_final() => format!("lasted {age}"),
        None => format!("runs for {age}"),
    };
    out.prose(&format!(
        "{} ({}): {}, generation {}, {} on {}",
        job.job,
        job.name,
        if is_ending(job) {
            ENDING.to_owned()
        } else {
            job.state.to_string()
        },
        job.generation,
        Counted(job.workers.len(), "worker"),
        Counted(placed_on(job), "node"),
    ))?;
    if let Some(reason) = &job.reason {
        for line in reason.lines() {
            out.prose(&format!("  {line}"))?;
        }
    }
    out.prose(&format!(
        "  submitted at {} by {}; {age}",
        timestamp(now_ms().saturating_sub(submitted(job))),
        job.owner,
    ))?;
    if let Some(membership) = &job.membership {
        if let Some(cause) = &membership.cause {
            out.prose(&format!("  members: {cause}"))?;
        }
        if !job.state.is_final() && !membership.decision.is_empty() {
            out.prose(&format!("  decision: {}", membership.decision))?;
        }
        for host in &membership.left_out {
            out.prose(&format!(
                "  left out for {}: {}: {}",
                human(host.for_ms.next_multiple_of(1000)),
                host.hostname,
                host.why
            ))?;
        }
    }
    if let Some(network) = &job.network
        && network.problem.is_none()
    {
        out.prose(&format!(
            "  network: {}; `kolo interfaces --job {}` shows what was tried",
            network.choice, job.job
        ))?;
    }
    if let Some(address) = job.rendezvous {
        out.prose(&format!(
            "  rendezvous for other systems at http://{address}"
        ))?;
    }
    if job.workers.is_empty() {
        return Ok(());
    }
    out.line("")?;
    let ids = Short::of(job.nodes.iter().map(|node| node.node.to_string()));
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
                ids.show(member.node).into(),
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
