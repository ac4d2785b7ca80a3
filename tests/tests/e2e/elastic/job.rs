//! An elastic group at work, as its driver sees it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kolo::prelude::*;
use kolo::{
    ExecutorBuilder, GenerationChange, GenerationChanges, GenerationTable, JobId, JobInfo, Member,
};
use kolo_harness::TestCluster;
use tempfile::TempDir;
use tokio::task::JoinHandle;

use super::training::{Outcome, Task, train};
use crate::support::{is_running, soon};

/// How often a file or the list of processes is looked at.
const LOOK: Duration = Duration::from_millis(5);

/// Slot and incarnation of a member.
pub type Process = (u32, u64);

fn process(member: &Member) -> Process {
    (member.slot.0, member.incarnation.0)
}

/// The generations of a group, each of which is checked.
pub struct Watch {
    changes: GenerationChanges,
    /// Members, with the generation since which they have been such without a break.
    since: Vec<(Process, u64)>,
    last: Option<Arc<GenerationTable>>,
    /// How many there were.
    pub generations: u64,
    /// Processes that left, and that joined after the first generation.
    pub left: usize,
    pub joined: usize,
}

impl Watch {
    pub fn new(executor: &Executor) -> Self {
        Self {
            changes: executor.generations(),
            since: Vec::new(),
            last: None,
            generations: 0,
            left: 0,
            joined: 0,
        }
    }

    /// The next change.
    pub async fn next(&mut self) -> GenerationChange {
        let change = soon(self.changes.next()).await.expect("the job has ended");
        self.check(&change);
        self.last = Some(Arc::clone(&change.table));
        change
    }

    /// The first change from here on that is as wanted.
    pub async fn until(
        &mut self,
        mut wanted: impl FnMut(&GenerationTable) -> bool,
    ) -> GenerationChange {
        loop {
            let change = self.next().await;
            if wanted(&change.table) {
                return change;
            }
        }
    }

    /// The first change from here on after which the group has this size.
    pub async fn until_size(&mut self, size: usize) -> GenerationChange {
        self.until(|table| table.members.len() == size).await
    }

    /// whoever stays keeps the order; the longest-lived come first.
    fn check(&mut self, change: &GenerationChange) {
        let table = &change.table;
        self.generations += 1;
        let generation = table.generation.0;
        let before: BTreeMap<Process, u64> = self.since.iter().copied().collect();
        assert_eq!(change.before, before.len());
        let numbered = table.members.iter().enumerate();
        assert!(
            numbered
                .clone()
                .all(|(rank, member)| member.rank.index() == rank)
        );
        let since: Vec<(Process, u64)> = table
            .members
            .iter()
            .map(|member| {
                let process = process(member);
                (process, before.get(&process).copied().unwrap_or(generation))
            })
            .collect();
        assert!(since.is_sorted_by_key(|(_, since)| *since), "{since:?}");
        let stayed = |of: &[(Process, u64)], there: &[(Process, u64)]| -> Vec<Process> {
            let is_there = |process: &Process| there.iter().any(|(other, _)| other == process);
            of.iter()
                .map(|(process, _)| *process)
                .filter(is_there)
                .collect()
        };
        let order = stayed(&since, &self.since);
        assert_eq!(
            order,
            stayed(&self.since, &since),
            "survivors keep their order"
        );
        if let Some(last) = &self.last {
            assert!(generation > last.generation.0);
            assert_eq!(change.left.len(), self.since.len() - order.len());
            assert_eq!(change.joined.len(), since.len() - order.len());
            self.left += change.left.len();
            self.joined += change.joined.len();
        }
        self.since = since;
    }

    /// The members now.
    pub fn table(&self) -> &GenerationTable {
        self.last.as_ref().expect("there was a generation")
    }
}

/// A group that works on [`train`].
pub struct Job {
    pub executor: Executor,
    pub watch: Watch,
    task: Task,
    run: JoinHandle<Result<Vec<(usize, Outcome)>, CallError>>,
    _folder: TempDir,
}

/// Length of the large buffer of a state that may be small.
const NUMBERS: usize = 64;

impl Job {
    /// Starts a group of `builder` on the cluster, and its work, and waits until it has grown to `size`: members to whose node the
    /// program comes late join later.
    pub async fn start(
        cluster: &TestCluster,
        builder: ExecutorBuilder,
        size: usize,
    ) -> anyhow::Result<Self> {
        Self::with(&cluster.connect().await?, builder, size, NUMBERS).await
    }

    /// As [`Job::start`], with a state of that many numbers.
    pub async fn with(
        cluster: &Cluster,
        builder: ExecutorBuilder,
        size: usize,
        numbers: usize,
    ) -> anyhow::Result<Self> {
        Self::patient(cluster, builder, size, (numbers, Duration::from_secs(60))).await
    }

    /// As [`Job::with`], with operations that wait so long for a rank.
    pub async fn patient(
        cluster: &Cluster,
        builder: ExecutorBuilder,
        size: usize,
        (numbers, patience): (usize, Duration),
    ) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let task = Task {
            folder: folder.path().to_owned(),
            numbers,
            patience,
        };
        let executor = soon(builder.output(Output::Silent).start(cluster)).await?;
        let mut watch = Watch::new(&executor);
        watch.next().await;
        let run = tokio::spawn(executor.run(train, (task.clone(),)).into_future());
        while watch.table().members.len() < size {
            watch.next().await;
        }
        Ok(Self {
            executor,
            watch,
            task,
            run,
            _folder: folder,
        })
    }

    /// Committed steps.
    pub fn steps(&self) -> u64 {
        let text = std::fs::read_to_string(self.task.steps());
        text.ok().and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    /// Waits until the group has made and committed some more steps.
    pub async fn works(&self) {
        let until = self.steps() + 3;
        soon(async {
            while self.steps() < until {
                assert!(!self.run.is_finished(), "the group has ended");
                tokio::time::sleep(LOOK).await;
            }
        })
        .await;
    }

    /// The call of the work, when it has failed.
    pub async fn failure(self) -> anyhow::Result<(CallError, Executor)> {
        match soon(self.run).await? {
            Ok(outcomes) => anyhow::bail!("it has ended well: {outcomes:?}"),
            Err(error) => Ok((error, self.executor)),
        }
    }

    /// Lets the work end; nothing of the group is left then.
    pub async fn end(mut self) -> anyhow::Result<Ended> {
        std::fs::write(self.task.stop(), "")?;
        let outcomes = soon(self.run).await??;
        assert!(
            outcomes
                .iter()
                .enumerate()
                .all(|(at, (rank, _))| at == *rank),
            "{outcomes:?}"
        );
        let outcomes: Vec<Outcome> = outcomes.into_iter().map(|(_, outcome)| outcome).collect();
        let first = outcomes[0].clone();
        assert!(outcomes.iter().all(|other| *other == first), "{outcomes:?}");
        assert!(
            first.epochs > 0 && first.steps == first.epochs * 4,
            "{first:?}"
        );
        assert_eq!(
            (first.uneven_epochs, first.torn_interrupts),
            (0, 0),
            "{first:?}"
        );
        let job = self.executor.job();
        soon(self.executor.shutdown()).await?;
        nothing_left(job).await;
        while let Some(change) = soon(self.watch.changes.next()).await {
            self.watch.check(&change);
            self.watch.last = Some(change.table);
        }
        Ok(Ended {
            size: outcomes.len(),
            outcome: first,
            watch: self.watch,
        })
    }
}

/// What has come of a [`Job`].
pub struct Ended {
    pub size: usize,
    pub outcome: Outcome,
    pub watch: Watch,
}

/// All processes that run for a job, on this machine, by the environment that they were started with.
pub fn processes(job: JobId) -> Vec<u32> {
    let mark = format!("KOLO_JOB={job}");
    let is_of_job = |environment: &[u8]| {
        environment
            .split(|byte| *byte == 0)
            .any(|variable| variable == mark.as_bytes())
    };
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| {
            let environment =
                std::fs::read(Path::new("/proc").join(pid.to_string()).join("environ"));
            environment.is_ok_and(|bytes| is_of_job(&bytes)) && is_running(*pid)
        })
        .collect()
}

/// Waits until no process of a job runs.
pub async fn nothing_left(job: JobId) {
    soon(async {
        while !processes(job).is_empty() {
            tokio::time::sleep(LOOK).await;
        }
    })
    .await;
}

/// Waits until the head sees a job as is wanted.
pub async fn wait_for_job(
    cluster: &TestCluster,
    job: JobId,
    wanted: impl Fn(&JobInfo) -> bool,
) -> anyhow::Result<()> {
    let cluster = cluster.connect().await?;
    soon(async {
        while !wanted(&cluster.job(job).await?) {
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    })
    .await
}

/// The process id of a member.
pub async fn pid_of(cluster: &TestCluster, job: JobId, member: &Member) -> anyhow::Result<u32> {
    let info = cluster.job(job).await?;
    let worker = info
        .workers
        .iter()
        .find(|worker| process(&worker.member) == process(member) && worker.pid != 0);
    let worker = worker.ok_or_else(|| anyhow::anyhow!("{member:?} is not in {info:?}"))?;
    Ok(worker.pid)
}

/// Kills a process.
pub fn kill(pid: u32) -> anyhow::Result<()> {
    let pid = rustix::process::Pid::from_raw(pid.try_into()?);
    let pid = pid.ok_or_else(|| anyhow::anyhow!("no process"))?;
    Ok(rustix::process::kill_process(
        pid,
        rustix::process::Signal::KILL,
    )?)
}
