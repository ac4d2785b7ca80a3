//! The cluster that a job runs on: one that is there, or one that is started for it.

use std::convert::Infallible;
use std::ffi::OsString;
use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kolo_transport::descriptors::{self, TooFewDescriptors};
use kolo_transport::ids::NodeId;
use kolo_transport::wire::NodeShare;
use kolo_transport::wire::counted::Counted;
use kolo_transport::{CloseCode, Endpoint, EndpointConfig, Expect};

use super::super::args::Connect;
use super::super::client::Client;
use super::super::error::CliError;
use super::super::link::Link;
use super::super::progress::Progress;
use super::args::Run;
use super::discovery::{self, Hosts};
use super::joining::Joining;
use super::layout;
use super::plan::Plan;
use super::target::{Surroundings, Target, usage};
use crate::hosts::HostSlots;
use crate::local::{self, LocalConfig, LocalError};
use crate::node::whence_gpus;
use crate::ssh::{self, BroughtUp, Ending, HeadAccess, Place, SshOptions};
use crate::{Head, Node, NodeResources};

/// Descriptors that a node has for each worker, at most.
const FILES_PER_WORKER: u64 = 8;

/// Descriptors that a head and a node have for themselves, and files of output that are open at once.
const OWN_FILES: u64 = 256;

/// Without so many for each worker, and for head and node, a job here does not start at all.
const LEAST_PER_WORKER: u64 = 4;
const LEAST_OWN: u64 = 44;

/// How long this command stays after its work.
const GOODBYE: Duration = Duration::from_millis(2);

/// Everything that must live as long as the job.
pub(crate) struct Grounds {
    pub(crate) link: Arc<Link>,
    members: Members,
}

enum Members {
    /// They have nothing to do with this process.
    Elsewhere,
    Here {
        _nodes: Vec<Node>,
        _head: Box<Head>,
    },
    Hosts {
        up: Box<BroughtUp>,
        _head: Box<Head>,
    },
    Joining {
        nodes: Box<Joining>,
        head: Box<Head>,
    },
}

impl Grounds {
    /// Looks for hosts that come and go, if they do, and starts nodes there if that is to be done.
    pub(crate) async fn keep(&mut self, hosts: Option<&Hosts>) -> Infallible {
        let Some(hosts) = hosts else {
            return pending().await;
        };
        match &mut self.members {
            Members::Joining { nodes, head } => tokio::select! {
                never = nodes.run(head, hosts.watch()) => never,
                never = hosts.keep() => never,
            },
            _ => hosts.keep().await,
        }
    }

    /// Takes down what was started for the job, which has ended.
    pub(crate) async fn end(self) {
        match self.members {
            Members::Elsewhere => {
                self.link.endpoint.close(CloseCode::Done, "");
                // Time for one packet. If it is lost the cluster misses this driver a little later, without any harm: it
                // has no job any more.
                drop(tokio::time::timeout(GOODBYE, self.link.endpoint.drained()).await);
            }
            // Its workers have ended; the rest ends with this process.
            Members::Here { _nodes, _head } => {}
            Members::Joining { nodes, head: _head } => nodes.end().await,
            Members::Hosts { up, _head } => {
                for (host, result) in up.down(Ending::Forced).await {
                    if let Err(error) = result {
                        super::say::say(&format!("{}: {error}", host.destination()));
                    }
                }
            }
        }
    }
}

fn failed(error: LocalError) -> CliError {
    CliError::Local(error.to_string())
}

/// Connects to the cluster that is there, or starts one.
pub(crate) async fn prepare(
    options: &Run,
    plan: &mut Plan,
    here: &Surroundings,
    connect: &Connect,
) -> Result<Grounds, CliError> {
    let patience = connect.connect_timeout;
    let shares = plan.shares.clone().into_iter();
    match plan.target.clone() {
        Target::Cluster => Ok(elsewhere(Client::connect(&connect.config()).await?)),
        Target::Nodes(hosts) => {
            let client = Client::connect(&connect.config()).await?;
            let nodes = client.cluster().await?.nodes;
            if let Some(elastic) = &mut plan.spec.elastic {
                // Any of them may take the place of another one.
                let used = hosts.into_iter().filter(|host| host.slots > 0);
                let used = used.map(|host| (host.clone(), host.slots)).collect();
                let nodes = layout::nodes_called(used, &nodes)?;
                elastic.hosts = Some(discovery::of_nodes(&nodes));
            } else {
                let used = shares.map(|(at, workers)| (hosts[at].clone(), workers));
                plan.spec.layout = layout::nodes_called(used.collect(), &nodes)?;
            }
            Ok(elsewhere(client))
        }
        Target::Local => here_alone(options, plan, patience, None).await,
        Target::Discovered => as_they_come(options, plan, patience).await,
        Target::Hosts(hosts) => {
            // Hosts included that get no worker: the list is wrong all the same.
            let places = ssh::locate(&hosts, &here.hostname, &options.ssh.options()).await?;
            if let [(only, _)] = plan.shares[..]
                && places[only].here
            {
                // This machine alone, which may be called otherwise than it calls itself.
                let name = Some(hosts[only].host.clone()).filter(|name| name != "localhost");
                return here_alone(options, plan, patience, name).await;
            }
            let used = shares.map(|(at, workers)| (places[at].clone(), workers));
            on_hosts(options, plan, used.collect(), patience).await
        }
    }
}

/// On a cluster that has nothing to do with this process.
fn elsewhere(client: Client) -> Grounds {
    Grounds {
        link: Arc::new(client.into_link()),
        members: Members::Elsewhere,
    }
}

/// Sees to it that workers of this host do not fail for want of descriptors; the usual limit of 1024 is enough for a hundred.
/// Workers inherit it, so it stays as it is where it does.
fn make_room(workers: u32) -> Result<(), TooFewDescriptors> {
    let workers = u64::from(workers);
    if descriptors::make_room("the job", workers * FILES_PER_WORKER + OWN_FILES).is_ok() {
        return Ok(());
    }
    // All that there may be, which is enough for most.
    descriptors::raise();
    descriptors::make_room("the job", workers * LEAST_PER_WORKER + LEAST_OWN)
}

/// What this machine offers to a job of its own: as many CPUs as are asked for.
fn own_resources(plan: &Plan) -> NodeResources {
    NodeResources {
        cpus: Some(plan.spec.per_worker.cpus.as_f64() * f64::from(plan.workers)),
        ..NodeResources::default()
    }
}

/// Whether workers see all GPUs of their host: nobody else is there, and nothing is shared out.
fn gpus_for_all(options: &Run) -> bool {
    options.gpus_per_worker.is_none()
}

/// Refuses a job that this machine has too few GPUs for, which no waiting changes.
fn has_gpus(plan: &Plan) -> Result<(), CliError> {
    let each = plan.spec.per_worker.gpus;
    if each == 0 {
        return Ok(());
    }
    let elastic = plan.spec.elastic.as_deref();
    let workers = elastic.map_or(plan.workers, |elastic| elastic.min);
    let found = own_resources(plan).find();
    let found = found.map_err(|error| CliError::Usage(error.to_string()))?;
    let variable = std::env::var_os("CUDA_VISIBLE_DEVICES");
    let lack = lack_of_gpus(each, workers, found.resources.gpus, variable);
    lack.map_or(Ok(()), usage)
}

/// The message for too few GPUs; `None` if there are enough.
fn lack_of_gpus(each: u32, workers: u32, there: u32, visible: Option<OsString>) -> Option<String> {
    if u64::from(each) * u64::from(workers) <= u64::from(there) {
        return None;
    }
    let there = match there {
        0 => "no GPU".to_owned(),
        some => Counted(some, "GPU").to_string(),
    };
    let by = whence_gpus(visible);
    let workers = Counted(workers, "worker");
    Some(format!(
        "--gpus-per-worker is {each} for {workers}, and this machine has {there} ({by}); leave --gpus-per-worker out, or give hosts with more"
    ))
}

async fn here_alone(
    options: &Run,
    plan: &mut Plan,
    connect_timeout: Duration,
    hostname: Option<String>,
) -> Result<Grounds, CliError> {
    make_room(plan.workers)?;
    has_gpus(plan)?;
    // This process starts nothing but wardens: what one that is killed leaves comes here.
    if let Err(error) = kolo_process::adopt_orphans() {
        tracing::warn!(%error, "orphans can't be adopted");
    }
    let config = LocalConfig {
        resources: own_resources(plan),
        gpus_for_all: gpus_for_all(options),
        hostname,
        ..LocalConfig::default()
    };
    let (head, runtime, driver) = local::start_head(config.listen, None)
        .await
        .map_err(failed)?;
    // Both only need the head.
    let (nodes, link) = tokio::join!(
        local::start_nodes(&head, &runtime, config),
        link(&runtime, driver, head.address(), connect_timeout)
    );
    Ok(Grounds {
        link: Arc::new(link?),
        members: Members::Here {
            _nodes: nodes.map_err(failed)?,
            _head: Box::new(head),
        },
    })
}

/// How hosts are reached and their nodes started.
fn ssh_options(options: &Run, plan: &Plan) -> SshOptions {
    SshOptions {
        stop_timeout: plan.grace + Duration::from_secs(5),
        gpus_for_all: gpus_for_all(options),
        ..options.ssh.options()
    }
}

/// With a head that nodes on hosts join when these are told.
async fn as_they_come(
    options: &Run,
    plan: &mut Plan,
    connect_timeout: Duration,
) -> Result<Grounds, CliError> {
    let everywhere = kolo_transport::interfaces::wildcard(0);
    let (head, runtime, driver) = local::start_head(everywhere, None).await.map_err(failed)?;
    layout::lay_out(&mut plan.spec, Vec::new());
    let address = local::loopback(head.address());
    let link = link(&runtime, driver, address, connect_timeout).await?;
    Ok(Grounds {
        link: Arc::new(link),
        members: Members::Joining {
            nodes: Box::new(Joining::new(ssh_options(options, plan))),
            head: Box::new(head),
        },
    })
}

async fn on_hosts(
    options: &Run,
    plan: &mut Plan,
    hosts: Vec<(Place, u32)>,
    connect_timeout: Duration,
) -> Result<Grounds, CliError> {
    let everywhere = kolo_transport::interfaces::wildcard(0);
    let (head, runtime, driver) = local::start_head(everywhere, None).await.map_err(failed)?;
    let ssh = ssh_options(options, plan);
    let access = HeadAccess::to(&head);
    let (places, workers): (Vec<Place>, Vec<u32>) = hosts.into_iter().unzip();
    let given: Vec<HostSlots> = places.iter().map(|place| place.host.clone()).collect();
    let mut progress = Progress::new(&given, true);
    let up = ssh::bring_up_at(places, &ssh, &access, |event| progress.watch(&event)).await?;
    drop(access);
    let layout = up
        .nodes()
        .iter()
        .zip(workers)
        .map(|(node, workers): (_, u32)| NodeShare {
            node: NodeId::clone(&node.node),
            workers,
        })
        .collect();
    layout::lay_out(&mut plan.spec, layout);
    let address = local::loopback(head.address());
    let link = link(&runtime, driver, address, connect_timeout).await?;
    Ok(Grounds {
        link: Arc::new(link),
        members: Members::Hosts {
            up: Box::new(up),
            _head: Box::new(head),
        },
    })
}

async fn link(
    runtime: &kolo_transport::TransportRuntime,
    credentials: kolo_transport::Credentials,
    head: SocketAddr,
    connect_timeout: Duration,
) -> Result<Link, CliError> {
    let config = EndpointConfig {
        idle_timeout: local::PATIENCE,
        keep_alive: local::PATIENCE / 6,
        ..EndpointConfig::towards(head)
    };
    let endpoint = Endpoint::bind(runtime, credentials.clone(), config)?;
    let connection = endpoint
        .connect(head, Expect::head())
        .await
        .map_err(|error| CliError::Connect {
            what: "the head".to_owned(),
            error,
        })?;
    Ok(Link {
        runtime: runtime.clone(),
        credentials,
        endpoint,
        head: connection,
        connect_timeout,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_few_gpus_are_told_with_what_is_seen() {
        let lack = |each, workers, there, visible: Option<&str>| {
            lack_of_gpus(each, workers, there, visible.map(OsString::from))
        };
        assert_eq!(lack(2, 4, 8, None), None);
        let none = lack(1, 1, 0, None).unwrap();
        assert!(
            none.starts_with(
                "--gpus-per-worker is 1 for 1 worker, and this machine has no GPU (of /dev/nvidia*); "
            ),
            "{none}"
        );
        let few = lack(2, 4, 1, Some("3")).unwrap();
        assert!(
            few.contains("for 4 workers, and this machine has 1 GPU (CUDA_VISIBLE_DEVICES is `3`)"),
            "{few}"
        );
    }
}
