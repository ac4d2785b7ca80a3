//! The warden of a job on this node.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_process::{SpawnError, Warden};
use kolo_transport::ids::JobId;
use tokio::sync::Mutex;

use super::ports::NodeContext;

/// The warden of one stay of a job. Another takes the place of one that was killed: its workers are lost, those that make up for them
/// are not.
#[derive(Clone)]
pub(super) struct JobWarden {
    context: Arc<NodeContext>,
    job: JobId,
    place: Arc<Mutex<Place>>,
}

/// How long after a warden could not be started no other is tried: the workers of one start fail together.
const AGAIN: Duration = Duration::from_secs(2);

enum Place {
    None,
    Up(Arc<Warden>),
    /// None could be started, at this time.
    Failed(Instant, SpawnError),
    /// No process is started any more.
    Closed,
}

impl JobWarden {
    pub(super) fn new(context: Arc<NodeContext>, job: JobId) -> Self {
        let place = Arc::new(Mutex::new(Place::None));
        Self {
            context,
            job,
            place,
        }
    }

    /// The warden, which is started first if there is none, or none any more.
    pub(super) async fn get(&self) -> Result<Arc<Warden>, SpawnError> {
        let mut place = self.place.lock().await;
        match &*place {
            Place::Up(warden) if !warden.is_lost() => return Ok(warden.clone()),
            Place::Up(_) => {
                tracing::warn!(job = %self.job, "the job's warden is lost: another is started");
            }
            Place::Failed(at, error) if at.elapsed() < AGAIN => return Err(error.clone()),
            Place::None | Place::Failed(..) => {}
            Place::Closed => {
                let path = self.context.warden_exe.clone();
                return Err(SpawnError::WardenLost { path });
            }
        }
        let (context, job) = (self.context.clone(), self.job);
        // A warden lives with the runtime that has started it.
        let starting = self.context.runtime.spawn(start(context, job)).await;
        let started = starting.map_err(|error| SpawnError::System {
            path: self.context.warden_exe.clone(),
            step: "start a warden",
            reason: error.to_string(),
        });
        match started.flatten() {
            Ok(warden) => {
                let warden = Arc::new(warden);
                *place = Place::Up(warden.clone());
                Ok(warden)
            }
            Err(error) => {
                *place = Place::Failed(Instant::now(), error.clone());
                Err(error)
            }
        }
    }

    /// Ends the warden, with whatever is left of its workers.
    pub(super) async fn close(&self) {
        let place = std::mem::replace(&mut *self.place.lock().await, Place::Closed);
        if let Place::Up(warden) = place
            // A start that is just ending may hold it; the last one to drop it ends it.
            && let Ok(warden) = Arc::try_unwrap(warden)
        {
            warden.close().await;
        }
    }
}

/// Starts a warden that tells the head when this daemon dies.
async fn start(context: Arc<NodeContext>, job: JobId) -> Result<Warden, SpawnError> {
    let node = context.here.node;
    context.wardens.send_modify(|wardens| *wardens += 1);
    let started = Warden::start(&context.warden_exe, &node.to_string()).await;
    let gone = started.as_ref().ok().map(Warden::gone);
    let wardens = context.wardens.clone();
    tokio::spawn(async move {
        if let Some(gone) = gone {
            gone.await;
        }
        wardens.send_modify(|wardens| *wardens -= 1);
    });
    let warden = started?;
    let datagram = context.obituary.datagram(node, job);
    if let Err(error) = warden.will(context.head_address, datagram).await {
        tracing::warn!(%job, %error, "the head will not hear at once of this daemon's death");
    }
    Ok(warden)
}
