//! Hosts that come while a job runs: a node is started on each over ssh, and joins the job's own head.

use std::collections::HashMap;
use std::convert::Infallible;
use std::time::Duration;

use futures_util::future::{join_all, pending, select_all};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use kolo_core::placement::MAX_PER_NODE;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::say::say;
use crate::Head;
use crate::hosts::{HostSlots, own_name};
use crate::ssh::{self, BroughtUp, Ending, HeadAccess, HostError, SshOptions, UpError};

/// How soon a host that did not come up is tried again: at first, and at the most.
const PAUSES: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(60)];

/// A host on which a node was to be started.
#[derive(Debug, Clone, Copy, Default)]
struct Stage {
    /// When it is tried again. Not if it is on its way, or there.
    again: Option<Instant>,
    /// The pause before that, if it has failed since it was there last.
    pause: Option<Duration>,
}

/// The nodes of a job that looks for its hosts.
pub(super) struct Joining {
    options: SshOptions,
    up: Vec<(HostSlots, BroughtUp)>,
    stages: HashMap<String, Stage>,
}

impl Joining {
    pub(super) fn new(options: SshOptions) -> Self {
        Self {
            options,
            up: Vec::new(),
            stages: HashMap::new(),
        }
    }

    /// Starts nodes on hosts as they come. The job has the hosts of the list alone: those that are gone are left by it, and their
    /// nodes stay until the job ends.
    pub(super) async fn run(
        &mut self,
        head: &Head,
        mut hosts: watch::Receiver<Vec<HostSlots>>,
    ) -> Infallible {
        let access = HeadAccess::to(head);
        let options = self.options.clone();
        let mut coming = FuturesUnordered::new();
        loop {
            let list = hosts.borrow_and_update().clone();
            for host in self.due(&list) {
                coming.push(bring_up(host, &options, &access));
            }
            let again = self.again(&list);
            tokio::select! {
                // Its end is the end of this command.
                changed = hosts.changed() => if changed.is_err() {
                    return pending().await;
                },
                Some((host, result)) = coming.next(), if !coming.is_empty() => match result {
                    Ok(up) => {
                        self.stages.insert(host.destination(), Stage::default());
                        self.up.push((host, up));
                    }
                    Err(error) => self.failed(&host, &why(&error)),
                },
                (host, error) = lost(&mut self.up) => self.failed(&host, &error.to_string()),
                () = sleep_until(again.unwrap_or_else(Instant::now)), if again.is_some() => {}
            }
        }
    }

    /// Hosts on which a node is to be started now.
    fn due(&mut self, list: &[HostSlots]) -> Vec<HostSlots> {
        let now = Instant::now();
        let mut due = Vec::new();
        for host in list.iter().filter(|host| host.slots > 0) {
            let name = host.destination();
            let is_new = !self.stages.contains_key(&name);
            let stage = self.stages.entry(name).or_default();
            if is_new || stage.again.is_some_and(|at| at <= now) {
                stage.again = None;
                due.push(host.clone());
            }
        }
        due
    }

    /// When the next host is tried again that is still on the list.
    fn again(&self, list: &[HostSlots]) -> Option<Instant> {
        let used = list.iter().filter(|host| host.slots > 0);
        let stages = used.filter_map(|host| self.stages.get(&host.destination()));
        stages.filter_map(|stage| stage.again).min()
    }

    fn failed(&mut self, host: &HostSlots, why: &str) {
        let name = host.destination();
        let [first, most] = PAUSES;
        let stage = self.stages.entry(name.clone()).or_default();
        if stage.pause.is_none() {
            say(&format!(
                "{name}: {why}; the host is tried again as long as it is on the list"
            ));
        }
        let pause = stage.pause.map_or(first, |pause| most.min(pause * 2));
        *stage = Stage {
            again: Some(Instant::now() + pause),
            pause: Some(pause),
        };
    }

    /// Takes all nodes down: their job has ended.
    pub(super) async fn end(self) {
        let down = self.up.into_iter().map(|(_, up)| up.down(Ending::Forced));
        for (host, result) in join_all(down).await.into_iter().flatten() {
            if let Err(error) = result {
                say(&format!("{}: {error}", host.destination()));
            }
        }
    }
}

/// Starts a node on a host. How many workers it gets says the list.
async fn bring_up(
    host: HostSlots,
    options: &SshOptions,
    access: &HeadAccess<&Head>,
) -> (HostSlots, Result<BroughtUp, UpError>) {
    let up = async {
        let mut places = ssh::locate(std::slice::from_ref(&host), &own_name(), options).await?;
        for place in &mut places {
            place.host.slots = MAX_PER_NODE;
        }
        ssh::bring_up_at(places, options, access, |_| {}).await
    };
    let up = up.await;
    (host, up)
}

/// What is wrong with the one host.
fn why(error: &UpError) -> String {
    match error {
        UpError::Hosts { failed, .. } if failed.len() == 1 => failed[0].1.to_string(),
        error => error.to_string(),
    }
}

/// The next node that is lost.
async fn lost(all: &mut Vec<(HostSlots, BroughtUp)>) -> (HostSlots, HostError) {
    if all.is_empty() {
        return pending().await;
    }
    let each = all.iter_mut().map(|(_, up)| Box::pin(up.lost()));
    let ((_, error), at, _) = select_all(each).await;
    let (host, _) = all.swap_remove(at);
    (host, error)
}
