//! Settings of a head.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use kolo_core::head::job::JobConfig;
use kolo_transport::TransportRuntime;
use kolo_transport::authority::DEFAULT_VALIDITY;
use kolo_transport::wire::span::Span;

use super::error::HeadError;
use crate::http::BearerSecret;

/// Where a head keeps what must survive it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HeadState {
    /// Nowhere: a new cluster at every start. For tests and local mode.
    Memory,
    /// In this folder, which one head at a time may use: the authority, join tokens, and in `admin/` the
    /// credentials of an operator. It is made at the first start, for its owner alone.
    Dir(PathBuf),
}

/// Settings of a [`Head`](super::Head). Start from [`HeadConfig::default`].
#[derive(Clone)]
pub struct HeadConfig {
    /// What survives the head. Default: nothing.
    pub state: HeadState,
    /// Where nodes and drivers connect. Default: `127.0.0.1:0`, the loopback with a port that is free.
    pub listen: SocketAddr,
    /// Where HTTPS listens. Default: nowhere.
    pub http: Option<SocketAddr>,
    /// A secret that gives who knows it the rights of a driver over HTTPS. Default: none.
    pub bearer: Option<BearerSecret>,
    /// How much memory the rendezvous of all jobs may take, in bytes. Default: 1 GiB. Horovod's takes 136 for each
    /// pair of ranks: 267 MB for 1,400 ranks.
    pub rendezvous_memory: usize,
    /// A node that is not heard for so long counts as lost, or for longer in a cluster of more than 2,500 nodes (see
    /// [`kolo_core::pace::Pace`]). Default: 1.25 s, so that the loss of a host is known within 1.5 s. Shorter finds losses sooner
    /// and takes a stall of a busy machine for one.
    pub lease: Duration,
    /// How often nodes send heartbeats, or less often in a cluster of more than 2,500 nodes. Default: 250 ms. At most a quarter
    /// of the lease.
    pub heartbeat: Duration,
    /// How long a peer may take to send a request once it has begun. Default: 5 s.
    pub read_timeout: Duration,
    /// How long certificates of nodes, drivers and the head itself are valid; they are renewed at two thirds of it.
    /// Default: 90 days. From 2s to 365d. A driver that is away for longer must log in again.
    pub certificate_life: Duration,
    /// How long certificates of workers are valid, within the same limits; they are renewed, too. Default: one day.
    pub worker_certificate_life: Duration,
    /// Deadlines of jobs.
    pub job: JobConfig,
    /// How long [`Head::stop`](super::Head::stop) waits for jobs to end. Default: 30 s.
    pub stop_timeout: Duration,
    /// Threads for connections, if `runtime` is `None`. Default: 2.
    pub threads: usize,
    /// The runtime for connections. Default: one of its own.
    pub runtime: Option<TransportRuntime>,
}

impl Default for HeadConfig {
    fn default() -> Self {
        Self {
            state: HeadState::Memory,
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            http: None,
            bearer: None,
            rendezvous_memory: 1 << 30,
            lease: Duration::from_millis(1250),
            heartbeat: Duration::from_millis(250),
            read_timeout: Duration::from_secs(5),
            certificate_life: Duration::from_secs(90 * 24 * 3600),
            worker_certificate_life: Duration::from_secs(24 * 3600),
            job: JobConfig::default(),
            stop_timeout: Duration::from_secs(30),
            threads: 2,
            runtime: None,
        }
    }
}

impl HeadConfig {
    /// Checks the settings, as [`Head::start`](super::Head::start) does first.
    ///
    /// # Errors
    ///
    /// [`HeadError::Config`], which names the field, what is given and what is allowed.
    pub fn check(&self) -> Result<(), HeadError> {
        const LEASES: std::ops::RangeInclusive<Duration> =
            Duration::from_millis(50)..=Duration::from_secs(3600);
        if !LEASES.contains(&self.lease) {
            return Err(HeadError::Config {
                field: "lease",
                given: Span(self.lease).to_string(),
                allowed: "50ms to 1h".to_owned(),
            });
        }
        if self.heartbeat < Duration::from_millis(10) || self.heartbeat > self.lease / 4 {
            return Err(HeadError::Config {
                field: "heartbeat",
                given: Span(self.heartbeat).to_string(),
                allowed: format!("10ms to a quarter of the lease, {}", Span(self.lease / 4)),
            });
        }
        // Members are forgotten when no certificate of theirs can be valid any more: see `Members`.
        let lives = Duration::from_secs(2)..=DEFAULT_VALIDITY;
        for (field, life) in [
            ("certificate_life", self.certificate_life),
            ("worker_certificate_life", self.worker_certificate_life),
        ] {
            if !lives.contains(&life) {
                return Err(HeadError::Config {
                    field,
                    given: Span(life).to_string(),
                    allowed: "2s to 365d".to_owned(),
                });
            }
        }
        Ok(())
    }
}

impl fmt::Debug for HeadConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeadConfig")
            .field("state", &self.state)
            .field("listen", &self.listen)
            .field("http", &self.http)
            .field("lease", &self.lease)
            .field("heartbeat", &self.heartbeat)
            .field("job", &self.job)
            .finish_non_exhaustive()
    }
}
