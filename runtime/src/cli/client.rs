//! The client's side of the head and the nodes, as operators use it.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use kolo_transport::CloseCode;
use kolo_transport::credentials::Credentials;
use kolo_transport::endpoint::{ConnectError, Endpoint, EndpointConfig, Expect};
use kolo_transport::ids::JobId;
use kolo_transport::runtime::TransportRuntime;
use kolo_transport::session::Connection;
use kolo_transport::wire::{ClusterInfo, HeadReply, HeadRequest, JobInfo, NodeInfo, PlacedNode};

use super::error::CliError;
use super::ids::{Called, pick};
use super::link::Link;
use crate::private_file;

/// How long the head may take for an answer that needs no waiting.
const ANSWER: Duration = Duration::from_secs(10);

/// How long a command stays after its work so that peers learn that it is gone.
const GOODBYE: Duration = Duration::from_millis(20);

/// How much later the next address of a name is tried, while the one before has not answered.
pub(super) const HEAD_START: Duration = Duration::from_millis(250);

/// The file beside the credentials that remembers the head.
const HEAD_FILE: &str = "head";

/// What peers are called in messages.
const THE_HEAD: &str = "the head";

/// How to reach a head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ClientConfig {
    /// `HOST:PORT`; `None` takes the head of the last login.
    pub(super) head: Option<String>,
    /// Folder of the credentials; `None` takes [`default_credentials_dir`].
    pub(super) credentials: Option<PathBuf>,
    /// For a connection, all addresses of the name together.
    pub(super) connect_timeout: Duration,
}

impl ClientConfig {
    /// Where the credentials are.
    pub(super) fn credentials_dir(&self) -> Result<PathBuf, CliError> {
        self.credentials
            .clone()
            .filter(|dir| !dir.as_os_str().is_empty())
            .or_else(|| default_credentials_dir(std::env::var_os))
            .ok_or_else(|| {
                CliError::Usage(
                    "there is no home folder; give the folder of the credentials by --credentials or KOLO_CREDENTIALS"
                        .to_owned(),
                )
            })
    }

    /// The head that is given, or that of the last login.
    pub(super) fn head(&self, dir: &Path) -> Result<String, CliError> {
        if let Some(head) = self.head.as_deref().map(str::trim)
            && !head.is_empty()
        {
            return Ok(head.to_owned());
        }
        match fs::read_to_string(dir.join(HEAD_FILE)) {
            Ok(head) => Ok(head.trim().to_owned()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(CliError::NoHead),
            Err(error) => Err(CliError::File {
                path: dir.join(HEAD_FILE),
                error,
            }),
        }
    }
}

/// Where credentials are if nobody says otherwise: `kolo` in `$XDG_CONFIG_HOME` or in `~/.config`.
pub(super) fn default_credentials_dir(
    var: impl Fn(&'static str) -> Option<OsString>,
) -> Option<PathBuf> {
    let folder = |name| {
        var(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    folder("XDG_CONFIG_HOME")
        .or_else(|| folder("HOME").map(|home| home.join(".config")))
        .map(|config| config.join("kolo"))
}

/// Remembers the head for later commands.
pub(super) fn remember_head(dir: &Path, head: &str) -> Result<(), CliError> {
    let path = dir.join(HEAD_FILE);
    private_file::replace(&path, format!("{head}\n").as_bytes())
        .map_err(|error| CliError::File { path, error })
}

/// The addresses of a `HOST:PORT`.
pub(super) async fn resolve(head: &str, patience: Duration) -> Result<Vec<SocketAddr>, CliError> {
    let refuse = |reason: String| CliError::Resolve {
        head: head.to_owned(),
        reason,
    };
    let fits = head.rsplit_once(':').is_some_and(|(host, port)| {
        let is_host = !host.is_empty() && (host.starts_with('[') || !host.contains(':'));
        is_host && port.parse().is_ok_and(|port: u16| port > 0)
    });
    if !fits {
        return Err(CliError::Address {
            head: head.to_owned(),
        });
    }
    match tokio::time::timeout(patience, kolo_transport::names::resolve(head)).await {
        Ok(found) => found.map_err(|error| {
            let text = error.to_string();
            let said = text.strip_prefix("failed to lookup address information: ");
            refuse(said.unwrap_or(&text).to_owned())
        }),
        Err(_) => Err(refuse("the name server does not answer".to_owned())),
    }
}

/// A connection to a head, with a driver's credentials.
#[derive(Debug)]
pub(super) struct Client {
    runtime: TransportRuntime,
    credentials: Credentials,
    connect_timeout: Duration,
    endpoint: Endpoint,
    head: Connection,
}

impl Client {
    /// Connects to the head.
    pub(super) async fn connect(config: &ClientConfig) -> Result<Self, CliError> {
        let dir = config.credentials_dir()?;
        let client = Self::connect_as(config, true).await?;
        client.renew_if_due(&dir).await;
        Ok(client)
    }

    /// As [`Client::connect`], also where a certificate is not valid yet, or any more, by this host's clock: to learn what the
    /// clock of the head says.
    pub(super) async fn connect_undated(config: &ClientConfig) -> Result<Self, CliError> {
        Self::connect_as(config, false).await
    }

    async fn connect_as(config: &ClientConfig, dates_count: bool) -> Result<Self, CliError> {
        let dir = config.credentials_dir()?;
        let head = config.head(&dir)?;
        if !Credentials::are_in(&dir) {
            return Err(CliError::NoCredentials(dir));
        }
        let credentials = if dates_count {
            Credentials::load(&dir)?
        } else {
            Credentials::load_undated(&dir)?
        };
        let addresses = resolve(&head, config.connect_timeout).await?;
        let runtime = TransportRuntime::new(1).map_err(CliError::Start)?;
        // One that nobody answers at must not use up the time of the others.
        let attempts = (0..).zip(&addresses).map(|(number, address)| {
            let (runtime, credentials) = (&runtime, &credentials);
            Box::pin(async move {
                tokio::time::sleep(HEAD_START * number).await;
                let timeout = config.connect_timeout;
                let head = Expect::head();
                connect(runtime, credentials, *address, head, timeout, dates_count).await
            })
        });
        let connecting = futures_util::future::select_ok(attempts);
        let (endpoint, connection) = tokio::time::timeout(config.connect_timeout, connecting)
            .await
            .unwrap_or_else(|_| Err(unreachable(&head)))
            .map(|(connected, _)| connected)
            .map_err(|error| match error {
                CliError::Connect {
                    error: ConnectError::TimedOut { .. },
                    ..
                } => unreachable(&head),
                other => other,
            })?;
        Ok(Self {
            runtime,
            credentials,
            connect_timeout: config.connect_timeout,
            endpoint,
            head: connection,
        })
    }

    /// Renews the certificate if it is time, and stores the new one in `dir`. A driver that is used now and then
    /// keeps its place in the cluster by this.
    async fn renew_if_due(&self, dir: &Path) {
        let credentials = &self.credentials;
        if credentials.validity().renew_at(1.0) > SystemTime::now() {
            return;
        }
        let renewed = async {
            let csr = credentials.renewal_request()?;
            match self.request(&HeadRequest::Renew { csr }, ANSWER).await? {
                HeadReply::Renewed { certificate } => {
                    credentials.renewed(&certificate)?.save_renewed(dir)?;
                    Ok(())
                }
                _ => Err(CliError::Answer(THE_HEAD.to_owned())),
            }
        };
        // What was asked for can be done with the old one.
        if let Err(error) = renewed.await {
            tracing::debug!(%error, "the certificate was not renewed");
        }
    }

    /// The head's address.
    pub(super) fn address(&self) -> SocketAddr {
        self.head.remote_addr()
    }

    /// Asks the head.
    pub(super) async fn request(
        &self,
        request: &HeadRequest,
        deadline: Duration,
    ) -> Result<HeadReply, CliError> {
        match self.head.request(request, deadline).await {
            Ok(HeadReply::Refused(refusal)) => Err(refusal.into()),
            Ok(reply) => Ok(reply),
            Err(error) => Err(CliError::Request {
                what: THE_HEAD.to_owned(),
                error,
            }),
        }
    }

    /// The whole cluster.
    pub(super) async fn cluster(&self) -> Result<ClusterInfo, CliError> {
        match self.request(&HeadRequest::Cluster, ANSWER).await? {
            HeadReply::Cluster(cluster) => Ok(cluster),
            _ => Err(CliError::Answer(THE_HEAD.to_owned())),
        }
    }

    /// All jobs, the newest first.
    pub(super) async fn jobs(&self) -> Result<Vec<JobInfo>, CliError> {
        match self.request(&HeadRequest::Jobs, ANSWER).await? {
            HeadReply::Jobs(jobs) => Ok(jobs),
            _ => Err(CliError::Answer(THE_HEAD.to_owned())),
        }
    }

    /// One job.
    pub(super) async fn job(&self, job: JobId) -> Result<JobInfo, CliError> {
        match self.request(&HeadRequest::Job { job }, ANSWER).await? {
            HeadReply::Job(job) => Ok(job),
            _ => Err(CliError::Answer(THE_HEAD.to_owned())),
        }
    }

    /// The one job whose id starts with `text`, with or without `job-`.
    pub(super) async fn find(&self, text: &str) -> Result<JobInfo, CliError> {
        let mut jobs = self.jobs().await?;
        let ids = jobs.iter().map(|job| job.job.to_string());
        let id = pick("job", text, ids, "kolo jobs")?
            .ok_or_else(|| CliError::NoSuchJob(text.to_owned()))?;
        jobs.retain(|job| job.job.to_string() == id);
        jobs.pop().ok_or(CliError::NoSuchJob(id))
    }

    /// The node that [is called so](Called::find), if there is one.
    pub(super) async fn node_named(&self, text: &str) -> Result<Option<NodeInfo>, CliError> {
        let nodes = self.cluster().await?.nodes;
        Ok(Called::of(&nodes).find(text)?.cloned())
    }

    /// The id of the node that is meant, or the text as it is if [none is found](Self::node_named).
    pub(super) async fn node_name(&self, text: &str) -> Result<String, CliError> {
        let found = self.node_named(text).await?;
        Ok(found.map_or_else(|| text.to_owned(), |node| node.node.to_string()))
    }

    /// Stops a job and waits until it has ended.
    pub(super) async fn stop(&self, job: JobId, deadline: Duration) -> Result<(), CliError> {
        match self.request(&HeadRequest::Stop { job }, deadline).await? {
            HeadReply::Done => Ok(()),
            _ => Err(CliError::Answer(THE_HEAD.to_owned())),
        }
    }

    /// A connection to a node of a job. The endpoint must live as long as it. If dates do not count, also one whose certificate is
    /// not valid yet, or any more, by this host's clock.
    pub(super) async fn node(
        &self,
        node: &PlacedNode,
        dates_count: bool,
    ) -> Result<(Endpoint, Connection), CliError> {
        let (runtime, credentials) = (&self.runtime, &self.credentials);
        let (expect, timeout) = (Expect::node(node.node), self.connect_timeout);
        let connected = connect(
            runtime,
            credentials,
            node.address,
            expect,
            timeout,
            dates_count,
        );
        connected.await.map_err(|error| match error {
            CliError::Connect { error, .. } => CliError::Connect {
                what: format!("{} ({})", node.hostname, node.node),
                error,
            },
            other => other,
        })
    }

    /// For a command that talks to head and nodes in its own way.
    pub(super) fn into_link(self) -> Link {
        Link {
            runtime: self.runtime,
            credentials: self.credentials,
            endpoint: self.endpoint,
            head: self.head,
            connect_timeout: self.connect_timeout,
        }
    }

    /// Ends the connection, and gives the head a moment to learn of it.
    pub(super) async fn close(self) {
        goodbye(&self.endpoint).await;
    }
}

/// Closes an endpoint and gives its peers a moment to learn of it.
pub(super) async fn goodbye(endpoint: &Endpoint) {
    endpoint.close(CloseCode::Done, "");
    // A peer that is gone can't be told.
    drop(tokio::time::timeout(GOODBYE, endpoint.drained()).await);
}

/// One clear line for a head that is not there, whichever clock was the first to run out.
pub(super) fn unreachable(head: &str) -> CliError {
    CliError::Unreachable {
        head: head.to_owned(),
    }
}

async fn connect(
    runtime: &TransportRuntime,
    credentials: &Credentials,
    address: SocketAddr,
    expect: Expect,
    timeout: Duration,
    dates_count: bool,
) -> Result<(Endpoint, Connection), CliError> {
    let mut config = EndpointConfig::towards(address);
    config.dates_count = dates_count;
    config.handshake_timeout = timeout;
    // It counts from the first packet, so a shorter one would end the handshake.
    config.idle_timeout = config.idle_timeout.max(timeout);
    let endpoint = Endpoint::bind(runtime, credentials.clone(), config)?;
    let connection =
        endpoint
            .connect(address, expect)
            .await
            .map_err(|error| CliError::Connect {
                what: THE_HEAD.to_owned(),
                error,
            })?;
    Ok((endpoint, connection))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;

    #[test]
    fn credentials_are_looked_for_where_the_desktop_keeps_settings() {
        let dir = |vars: &[(&str, &str)]| {
            default_credentials_dir(|name| {
                let found = vars.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| OsString::from(value))
            })
        };
        let home = ("HOME", "/home/me");
        let config = ("XDG_CONFIG_HOME", "/cfg");
        assert_eq!(dir(&[home, config]), Some("/cfg/kolo".into()));
        assert_eq!(dir(&[home]), Some("/home/me/.config/kolo".into()));
        let unset = ("XDG_CONFIG_HOME", "");
        assert_eq!(dir(&[home, unset]), Some("/home/me/.config/kolo".into()));
        assert_eq!(dir(&[]), None);
    }

    #[tokio::test]
    async fn an_address_without_a_port_is_told_at_once() {
        for bad in ["", "head", "head:", "head:x", "head:0", "head:99999", "::1"] {
            let error = resolve(bad, Duration::from_secs(1)).await.unwrap_err();
            assert_eq!(error.exit_code(), 2, "{bad}");
        }
        let found = resolve("[::1]:70", Duration::from_secs(1)).await.unwrap();
        assert_eq!(found, ["[::1]:70".parse().unwrap()]);
    }
}
