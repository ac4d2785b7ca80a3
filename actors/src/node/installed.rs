//! Workers that run a program which is installed on the host: no hello, no sockets, no calls.

use kolo_core::node::messages::WorkerEvent;
use kolo_process::{Child, SpawnRequest};
use kolo_transport::wire::{Account, Stdio};
use tokio::task::JoinHandle;

use super::author::now_ms;
use super::error_file::ErrorFile;
use super::launch::InstalledFile;
use super::leftovers::{DRAIN, drain, see_off};
use super::supervisor::{NotStarted, STDERR_TAIL, Supervisor, WorkerPlan};
use super::warden::JobWarden;

impl Supervisor {
    /// A worker's life, from its start to its end.
    pub(super) async fn run_installed(
        self,
        warden: JobWarden,
        mut plan: WorkerPlan,
        file: &InstalledFile,
    ) {
        let launched = self.launch_installed(warden, &mut plan, file).await;
        let (child, mut readers, error_file) = match launched {
            Ok(launched) => launched,
            Err(failed) => return self.tell(failed.into()).await,
        };
        if !self.introduce(&child).await {
            return;
        }
        self.tell(WorkerEvent::Spawned { pid: child.pid() }).await;
        let exit = child.wait().await;
        let at_ms = now_ms();
        // News of a failure does not wait for long.
        let limit = if exit.is_success() {
            plan.linger
        } else {
            DRAIN
        };
        see_off(&child, &plan.stopping, limit, &mut readers).await;
        drain(&mut readers, None).await;
        let error = match error_file {
            Some(file) => self.context.runtime.spawn_blocking(|| file.take()).await,
            None => Ok(None),
        };
        let account = Account {
            at_ms,
            age_ms: 0,
            error: error.ok().flatten(),
        };
        self.tell(WorkerEvent::Accounted(account)).await;
        self.tell(WorkerEvent::Exited {
            exit,
            stderr_tail: plan.author.stderr_tail(STDERR_TAIL),
        })
        .await;
    }

    async fn launch_installed(
        &self,
        warden: JobWarden,
        plan: &mut WorkerPlan,
        file: &InstalledFile,
    ) -> Result<(Child, Vec<JoinHandle<()>>, Option<ErrorFile>), NotStarted> {
        let failed = |error: std::io::Error| {
            format!(
                "no pipes for a worker: {error}; if it is the limit of open files, raise it (`ulimit -n`, LimitNOFILE=): a node \
                 needs about 8 for each worker"
            )
        };
        let (stdout_reader, stdout) = kolo_process::pipe().map_err(failed)?;
        let (stderr_reader, stderr) = kolo_process::pipe().map_err(failed)?;
        let stdin = if file.stdin && plan.author.rank().0 == 0 {
            let (stdin, writer) = kolo_process::pipe().map_err(failed)?;
            if let Some(stream) = plan.author.output().stream() {
                stream.give_stdin(writer);
            }
            Some(stdin)
        } else {
            None
        };
        let warden = warden.get().await?;
        let name = format!("rank-{}.gen-{}.json", plan.author.rank(), plan.generation);
        let error_file = ErrorFile::name(&warden, &name, &mut plan.env).await;
        let child = warden
            .spawn(SpawnRequest {
                program: file.path.clone(),
                argv0: std::mem::take(&mut plan.argv0),
                args: std::mem::take(&mut plan.args),
                env: std::mem::take(&mut plan.env),
                cwd: file.cwd.clone(),
                fds: Vec::new(),
                stdin,
                stdout,
                stderr,
            })
            .await?;
        let readers = vec![
            self.read(plan, stdout_reader, Stdio::Stdout),
            self.read(plan, stderr_reader, Stdio::Stderr),
        ];
        Ok((child, readers, error_file))
    }
}
