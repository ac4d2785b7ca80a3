//! Faults on demand.

use kolo_transport::ids::{JobId, Rank};
use rustix::process::{Pid, Signal};

use super::{HarnessError, HeadMember, NodeMember, TestCluster};

impl TestCluster {
    /// Sends `SIGTERM` to a node's daemon and waits for its end: the daemon first lets jobs leave, as `kolo-node` does.
    ///
    /// # Errors
    ///
    /// [`HarnessError::Fault`] if the node is not running or not a process; [`HarnessError::Daemon`] if it does not end well.
    pub async fn terminate_node(&mut self, index: usize) -> Result<(), HarnessError> {
        self.signal_node(index, Signal::TERM)?;
        match self.nodes[index].take() {
            Some(NodeMember::Process(daemon, _)) => {
                let log = daemon.log.clone();
                let ended = daemon.end_by_itself().await;
                self.old_logs
                    .push((format!("node {index}, terminated"), log.text()));
                ended
            }
            _ => Ok(()),
        }
    }

    /// Kills a node as a power cut would: `SIGKILL`, no goodbye.
    ///
    /// # Errors
    ///
    /// [`HarnessError::Fault`] if it is not running.
    pub fn kill_node(&mut self, index: usize) -> Result<(), HarnessError> {
        self.node(index)?;
        match self.nodes[index].take() {
            Some(NodeMember::Process(daemon, _)) => {
                self.old_logs
                    .push((format!("node {index}, killed"), daemon.log.text()));
                daemon.kill();
            }
            Some(NodeMember::Here(node)) => node.kill(),
            None => {}
        }
        Ok(())
    }

    /// Stops a node's daemon with `SIGSTOP`: it is there, but says nothing. Its workers run on.
    ///
    /// # Errors
    ///
    /// [`HarnessError::Fault`] if it is not running or not a process.
    pub fn pause_node(&self, index: usize) -> Result<(), HarnessError> {
        self.signal_node(index, Signal::STOP)
    }

    /// Lets a paused node go on.
    ///
    /// # Errors
    ///
    /// As [`TestCluster::pause_node`].
    pub fn resume_node(&self, index: usize) -> Result<(), HarnessError> {
        self.signal_node(index, Signal::CONT)
    }

    fn signal_node(&self, index: usize, signal: Signal) -> Result<(), HarnessError> {
        match self.node(index)? {
            NodeMember::Process(daemon, _) => daemon.signal(signal),
            NodeMember::Here(_) => Err(HarnessError::Fault(
                "nodes are no processes in this mode".to_owned(),
            )),
        }
    }

    /// Starts a node again that was killed, or kills and starts it. It joins as a new node.
    ///
    /// # Errors
    ///
    /// [`HarnessError::Fault`] if there was no such node; [`HarnessError::Daemon`] if it does not start.
    pub async fn restart_node(&mut self, index: usize) -> Result<(), HarnessError> {
        if index >= self.nodes.len() {
            return Err(HarnessError::Fault(format!(
                "there is no node {index}; there are {}",
                self.nodes.len()
            )));
        }
        if self.nodes[index].is_some() {
            self.kill_node(index)?;
        }
        self.nodes[index] = Some(self.start_node(index).await?);
        Ok(())
    }

    /// Stops the head's process with `SIGSTOP`, as [`TestCluster::pause_node`] does a node's.
    ///
    /// # Errors
    ///
    /// [`HarnessError::Fault`] if it was killed or is no process.
    pub fn pause_head(&self) -> Result<(), HarnessError> {
        self.signal_head(Signal::STOP)
    }

    /// Lets a paused head go on.
    ///
    /// # Errors
    ///
    /// As [`TestCluster::pause_head`].
    pub fn resume_head(&self) -> Result<(), HarnessError> {
        self.signal_head(Signal::CONT)
    }

    fn signal_head(&self, signal: Signal) -> Result<(), HarnessError> {
        match &self.head {
            Some(HeadMember::Process(daemon)) => daemon.signal(signal),
            _ => Err(HarnessError::Fault("there is no head process".to_owned())),
        }
    }

    /// Kills the head.
    ///
    /// # Errors
    ///
    /// [`HarnessError::Fault`] if it was killed before or is no process.
    pub fn kill_head(&mut self) -> Result<(), HarnessError> {
        match self.head.take() {
            Some(HeadMember::Process(daemon)) => {
                self.old_logs
                    .push(("head, killed".to_owned(), daemon.log.text()));
                daemon.kill();
                Ok(())
            }
            other => {
                self.head = other;
                Err(HarnessError::Fault("there is no head process".to_owned()))
            }
        }
    }

    /// Sends a signal to a job's worker: `Signal::KILL`, `Signal::STOP`, `Signal::CONT`, …
    ///
    /// # Errors
    ///
    /// As [`TestCluster::worker_pid`]; [`HarnessError::Fault`] if the process is gone.
    pub async fn signal_worker(
        &self,
        job: JobId,
        rank: Rank,
        signal: Signal,
    ) -> Result<(), HarnessError> {
        let pid = self.worker_pid(job, rank).await?;
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| HarnessError::Fault(format!("rank {rank} has no process")))?;
        rustix::process::kill_process(pid, signal)
            .map_err(|error| HarnessError::Fault(error.to_string()))
    }

    /// Kills a job's worker with `SIGKILL`.
    ///
    /// # Errors
    ///
    /// As [`TestCluster::signal_worker`].
    pub async fn kill_worker(&self, job: JobId, rank: Rank) -> Result<(), HarnessError> {
        self.signal_worker(job, rank, Signal::KILL).await
    }
}
