//! `--host-discovery-script`: the hosts that a job may use, by a command that is run once a second, as Horovod has it.

use std::convert::Infallible;
use std::process::Stdio;
use std::time::Duration;

use kolo_transport::wire::span::Span;
use kolo_transport::wire::{JobHost, JobSpec, NodeShare};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::Command;
use tokio::sync::watch;

use super::super::error::CliError;
use super::args::Run;
use super::say::say;
use crate::hosts::{HostSlots, List, own_name};

/// How long after the end of one look the next one begins.
const PERIOD: Duration = Duration::from_secs(1);

/// How long the script may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// How much the script may print, in bytes.
const LONGEST: u64 = 1 << 20;

/// The script.
#[derive(Debug)]
struct Script {
    command: String,
    /// Slots of hosts that are printed without.
    slots: Option<u32>,
    patience: Duration,
}

/// Runs the script, its first argument, and beside it, in the same process group, a watch that reads the standard input of both. If that
/// ends without a line, the watch kills the group: also when this command was killed, which can't do it itself any more.
const WATCHED: &str = "exec 3<&0 </dev/null; { read -r line || kill -KILL 0; } <&3 >/dev/null 2>&1 & \
                       exec 3<&-; exec /bin/sh -c \"$1\"";

impl Script {
    /// The hosts that the script prints, or what is wrong with it.
    async fn run(&self) -> Result<Vec<HostSlots>, String> {
        let looking = tokio::time::timeout(self.patience, self.output());
        let text = looking
            .await
            .unwrap_or_else(|_| Err(format!("it has not ended after {}", Span(self.patience))))?;
        let hosts = List::of(&own_name()).discovered(&text, self.slots);
        hosts.map_err(|error| error.to_string())
    }

    async fn output(&self) -> Result<String, String> {
        let mut child = Command::new("/bin/sh")
            .args(["-c", WATCHED, "sh", &self.command])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C in a terminal is for the workers.
            .process_group(0)
            .spawn()
            .map_err(|error| format!("/bin/sh: {error}"))?;
        // If this is dropped before the script has ended, the group is killed.
        let watch = child.stdin.take();
        let (out, err) = tokio::join!(read(child.stdout.take()), read(child.stderr.take()));
        let status = child.wait().await.map_err(|error| error.to_string())?;
        if let Some(mut watch) = watch {
            // One that is gone kills nobody.
            watch.write_all(b"\n").await.ok();
        }
        // A script that is cut off may end of that.
        if out.len() as u64 > LONGEST {
            return Err(format!("it printed more than {LONGEST} bytes"));
        }
        if !status.success() {
            let err = String::from_utf8_lossy(&err);
            let last = err.lines().last();
            let last = last.unwrap_or("it wrote nothing to standard error");
            return Err(format!("it ended with {status}: {}", last.escape_debug()));
        }
        String::from_utf8(out).map_err(|_| "what it printed is no text in UTF-8".to_owned())
    }
}

/// What is printed, or a little more than is allowed of it.
async fn read(stream: Option<impl AsyncRead + Unpin>) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(stream) = stream {
        // What can't be read is not there. The rest is nobody's: who writes it hears of that.
        stream.take(LONGEST + 1).read_to_end(&mut bytes).await.ok();
    }
    bytes
}

/// What has changed from one list of hosts to the next.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Update {
    /// The next list: hosts that were there keep their order, and new ones stand behind them.
    hosts: Vec<HostSlots>,
    /// Hosts that are new, or have more slots.
    added: Vec<HostSlots>,
    /// Hosts that are gone, or have fewer slots.
    removed: Vec<HostSlots>,
}

fn update(known: &[HostSlots], mut found: Vec<HostSlots>) -> Update {
    let mut update = Update::default();
    for old in known {
        let at = found.iter().position(|host| host.is_same_host(old));
        let Some(new) = at.map(|at| found.remove(at)) else {
            update.removed.push(old.clone());
            continue;
        };
        if new.slots > old.slots {
            update.added.push(new.clone());
        } else if new.slots < old.slots {
            update.removed.push(new.clone());
        }
        update.hosts.push(new);
    }
    update.added.extend(found.iter().cloned());
    update.hosts.extend(found);
    update
}

impl Update {
    fn is_none(&self) -> bool {
        self.added.is_empty() && self.removed.is_empty()
    }
}

fn listed(hosts: &[HostSlots]) -> String {
    let hosts: Vec<String> = hosts.iter().map(HostSlots::to_string).collect();
    match hosts.as_slice() {
        [] => "none".to_owned(),
        hosts => hosts.join(","),
    }
}

/// The hosts that a job may use, and the script that says which.
#[derive(Debug)]
pub(super) struct Hosts {
    script: Script,
    known: watch::Sender<Vec<HostSlots>>,
}

impl Hosts {
    /// Runs the script for the first time, if one is given: the job may use the hosts that it prints.
    ///
    /// # Errors
    ///
    /// [`CliError`] with what is wrong with the script.
    pub(super) async fn find(options: &Run, spec: &mut JobSpec) -> Result<Option<Self>, CliError> {
        let Some(command) = options.elastic.host_discovery_script.clone() else {
            return Ok(None);
        };
        let script = Script {
            command,
            slots: options.elastic.slots_per_host,
            patience: PATIENCE,
        };
        let found = script.run().await.map_err(|why| {
            CliError::Local(format!("--host-discovery-script {}: {why}", script.command))
        })?;
        if let Some(elastic) = &mut spec.elastic {
            elastic.hosts = Some(of_job(&found));
        }
        let (known, _) = watch::channel(found);
        Ok(Some(Self { script, known }))
    }

    /// The hosts, now and later.
    pub(super) fn watch(&self) -> watch::Receiver<Vec<HostSlots>> {
        self.known.subscribe()
    }

    /// Runs the script again and again.
    pub(super) async fn keep(&self) -> Infallible {
        let mut is_told = false;
        loop {
            tokio::time::sleep(PERIOD).await;
            let found = match self.script.run().await {
                Ok(found) => found,
                Err(why) => {
                    if !std::mem::replace(&mut is_told, true) {
                        say(&format!(
                            "the host discovery script fails, and the hosts stay as they are: {why}"
                        ));
                    }
                    continue;
                }
            };
            is_told = false;
            let update = update(&self.known.borrow(), found);
            if !update.is_none() {
                say(&format!(
                    "the hosts are {} now; new or larger: {}, gone or smaller: {}",
                    listed(&update.hosts),
                    listed(&update.added),
                    listed(&update.removed)
                ));
                self.known.send_replace(update.hosts);
            }
        }
    }
}

/// The hosts as the head takes them.
pub(super) fn of_job(hosts: &[HostSlots]) -> Vec<JobHost> {
    let host = |host: &HostSlots| JobHost {
        name: host.host.clone(),
        slots: host.slots,
    };
    hosts.iter().map(host).collect()
}

/// Nodes with the most workers on each, as the head takes them.
pub(super) fn of_nodes(nodes: &[NodeShare]) -> Vec<JobHost> {
    let host = |share: &NodeShare| JobHost {
        name: share.node.to_string(),
        slots: share.workers,
    };
    nodes.iter().map(host).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(command: &str, slots: Option<u32>) -> Script {
        Script {
            command: command.to_owned(),
            slots,
            patience: Duration::from_secs(30),
        }
    }

    fn hosts(text: &str) -> Vec<HostSlots> {
        let all = text.split_whitespace().map(|entry| {
            let (host, slots) = entry.rsplit_once(':').unwrap();
            HostSlots::new(host, slots.parse().unwrap())
        });
        all.collect()
    }

    /// The outputs of Horovod's test_elastic_discovery, and some more.
    #[tokio::test]
    async fn host_discovery_script() {
        for (text, slots, expected) in [
            ("", None, ""),
            ("\\n\\n", None, ""),
            ("host-1:2", None, "host-1:2"),
            ("host-1:2\\nhost-2:4\\n", None, "host-1:2 host-2:4"),
            ("\\nhost-1:2\\n\\nhost-2:4\\n\\n", None, "host-1:2 host-2:4"),
            ("host-1\\nhost-2\\n", Some(8), "host-1:8 host-2:8"),
            ("host-1:2\\nhost-2\\n", Some(8), "host-1:2 host-2:8"),
            ("# all\\n  h:1 \\t\\nh2:0 # off\\r\\n", None, "h:1 h2:0"),
        ] {
            let found = script(&format!("printf '{text}'"), slots).run().await;
            assert_eq!(found.unwrap(), hosts(expected), "{text}");
        }
        for (command, message) in [
            ("echo a:b:1", "line 1, `a:b:1`, "),
            (
                "printf 'a:1\\na:x\\n'",
                "line 2, `a:x`, has slots that are no whole number",
            ),
            (
                "echo a",
                "line 1, `a`, has no number of slots; expected HOST:SLOTS",
            ),
            ("printf 'a:1\\nA.:2\\n'", "are one machine"),
            ("echo why >&2; exit 3", "exit status: 3: why"),
            ("/no/such/script", "exit status: 127: "),
            ("kill -9 $$", "signal: 9"),
            ("printf '\\377'", "no text in UTF-8"),
            ("yes a:1", "it "),
        ] {
            let error = script(command, None).run().await.unwrap_err();
            assert!(error.contains(message), "{command}: {error}");
        }
    }

    #[tokio::test]
    async fn a_script_that_hangs_is_killed_with_all_that_it_has_started() {
        let dir = tempfile::tempdir().unwrap();
        let pid = dir.path().join("pid");
        let command = format!(
            "sleep 1000 & echo $! > {0}.new; mv {0}.new {0}; wait",
            pid.display()
        );
        let mut hangs = script(&command, None);
        hangs.patience = Duration::from_secs(3);
        let error = hangs.run().await.unwrap_err();
        assert_eq!(error, "it has not ended after 3s");
        let pid = std::fs::read_to_string(&pid).unwrap();
        let status = format!("/proc/{}/status", pid.trim());
        // It is gone, or waits to be reaped by whoever adopts it.
        let is_left = || {
            let status = std::fs::read_to_string(&status).unwrap_or_default();
            !status.is_empty() && !status.contains("State:\tZ")
        };
        while is_left() {
            tokio::task::yield_now().await;
        }
    }

    #[test]
    fn update_available_hosts() {
        let known = hosts("a:2 b:2");
        for (found, added, removed) in [
            ("a:2 b:2", "", ""),
            ("b:2 a:2", "", ""),
            ("a:2 b:2 c:2", "c:2", ""),
            ("a:2 b:4", "b:4", ""),
            ("a:2", "", "b:2"),
            ("a:2 b:1", "", "b:1"),
            ("a:4 c:1", "a:4 c:1", "b:2"),
            ("", "", "a:2 b:2"),
        ] {
            let update = update(&known, hosts(found));
            assert_eq!(update.added, hosts(added), "{found}");
            assert_eq!(update.removed, hosts(removed), "{found}");
            assert_eq!(update.is_none(), added.is_empty() && removed.is_empty());
        }
    }

    #[test]
    fn order_available_hosts() {
        let update = update(&hosts("a:2 b:2 c:2"), hosts("d:1 c:2 e:1 a:3"));
        assert_eq!(update.hosts, hosts("a:3 c:2 d:1 e:1"));
    }
}
