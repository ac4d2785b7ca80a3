//! A daemon as a process of its own: what it is told, and what it tells.

use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use kolo_runtime::{
    Head, HeadConfig, HeadState, Node, NodeConfig, NodeCredentials, NodeResources, ProgramSource,
};
use kolo_transport::identity::Role;
use kolo_transport::ids::NodeId;
use kolo_transport::wire::ProgramHash;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt as _;
use tokio::signal::unix::{SignalKind, signal};

/// Holds a [`Task`] as JSON.
pub(crate) const TASK: &str = "KOLO_HARNESS_TASK";

/// In place of a [`Task`]: be the `kolo` command.
pub(crate) const CLI: &str = "kolo";

/// How long jobs may go on after a node's `SIGTERM`, as `kolo-node` has it.
const DRAIN: Duration = Duration::from_secs(60);

/// What a daemon process is told.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Task {
    Head {
        state: PathBuf,
        lease_ms: u64,
        /// Of certificates.
        life_ms: Option<u64>,
        listen: Option<SocketAddr>,
        /// The address that it tells, if it listens on all.
        address: Option<IpAddr>,
    },
    Node {
        head: SocketAddr,
        token: String,
        hostname: Option<String>,
        cpus: f64,
        gpus: u32,
        custom: Vec<(String, f64)>,
        programs: PathBuf,
        /// The hash of the test's own program, if the node has it from the start.
        has_program: Option<ProgramHash>,
        listen: Option<SocketAddr>,
        orphan_timeout_ms: u64,
    },
}

/// What it tells, as one line, when it is ready.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Ready {
    Head {
        address: SocketAddr,
        node_token: String,
    },
    Node {
        node: NodeId,
    },
    Failed {
        error: String,
    },
}

/// Is the daemon that the environment asks for, and never returns then.
pub(crate) fn run_if_daemon() {
    let Ok(task) = std::env::var(TASK) else {
        return;
    };
    if task == CLI {
        let code = kolo_runtime::cli::run(
            std::env::args_os(),
            &mut std::io::stdout(),
            &mut std::io::stderr(),
            kolo_runtime::cli::Screen::default(),
        );
        std::process::exit(code.into());
    }
    let code = match run(&task) {
        Ok(()) => 0,
        Err(error) => {
            let ready = Ready::Failed {
                error: error.to_string(),
            };
            // Nobody is left to tell if this fails.
            drop(say(&ready));
            eprintln!("{error}");
            1
        }
    };
    std::process::exit(code);
}

fn say(ready: &Ready) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(ready)?;
    line.push(b'\n');
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(&line)?;
    stdout.flush()
}

fn run(task: &str) -> Result<(), Box<dyn std::error::Error>> {
    // A test process that is killed must not leave its daemons behind, stopped ones included.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("KOLO_LOG")
                .unwrap_or_else(|_| "info".into()),
        )
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let task: Task = serde_json::from_str(task)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        match task {
            Task::Head {
                state,
                lease_ms,
                life_ms,
                listen,
                address,
            } => {
                let config = HeadConfig {
                    state: HeadState::Dir(state),
                    lease: Duration::from_millis(lease_ms),
                    ..with_life(life_ms.map(Duration::from_millis))
                };
                let config = HeadConfig {
                    listen: listen.unwrap_or(config.listen),
                    ..config
                };
                let head = Head::start(config).await?;
                let token = head.create_token(Role::Node, Duration::from_secs(24 * 3600), None);
                say(&Ready::Head {
                    address: address.map_or(head.address(), |ip| {
                        SocketAddr::new(ip, head.address().port())
                    }),
                    node_token: token.to_string(),
                })?;
                until_told_to_stop().await;
                head.stop().await;
            }
            Task::Node {
                head,
                token,
                hostname,
                cpus,
                gpus,
                custom,
                programs,
                has_program,
                listen,
                orphan_timeout_ms,
            } => {
                let config = NodeConfig {
                    hostname,
                    // In a file, and not in memory, a program finds the symbols for its backtraces.
                    programs: ProgramSource {
                        cache: Some(programs),
                        preloaded: preloaded(has_program),
                        ..ProgramSource::default()
                    },
                    resources: NodeResources {
                        cpus: Some(cpus),
                        gpus: Some(gpus),
                        custom: custom.into_iter().collect(),
                    },
                    orphan_timeout: Duration::from_millis(orphan_timeout_ms),
                    ..NodeConfig::new(head, NodeCredentials::Token(token.parse()?))
                };
                let config = NodeConfig {
                    listen: listen.unwrap_or(config.listen),
                    ..config
                };
                let mut terminate = signal(SignalKind::terminate())?;
                let node = Node::start(config).await?;
                say(&Ready::Node { node: node.id() })?;
                tokio::select! {
                    () = until_told_to_stop() => {}
                    _ = terminate.recv() => {
                        node.drain(DRAIN).await;
                    }
                }
                node.stop().await;
            }
        }
        Ok(())
    })
}

/// The test's own program, which is that of its daemons, too.
pub(crate) fn preloaded(own: Option<ProgramHash>) -> Vec<(ProgramHash, PathBuf)> {
    own.map(|hash| (hash, "/proc/self/exe".into()))
        .into_iter()
        .collect()
}

/// Settings of a head whose certificates live so long.
pub(crate) fn with_life(life: Option<Duration>) -> HeadConfig {
    let mut config = HeadConfig::default();
    if let Some(life) = life {
        config.certificate_life = life;
        config.worker_certificate_life = life;
    }
    config
}

/// Standard input is a pipe from the test: its end asks for a graceful stop.
async fn until_told_to_stop() {
    let mut stdin = tokio::net::unix::pipe::Receiver::from_owned_fd(
        std::os::fd::AsFd::as_fd(&std::io::stdin())
            .try_clone_to_owned()
            .expect("standard input is open"),
    )
    .expect("standard input is a pipe");
    let mut buffer = [0; 64];
    while matches!(stdin.read(&mut buffer).await, Ok(count) if count > 0) {}
}
