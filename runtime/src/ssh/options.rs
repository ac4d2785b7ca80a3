//! How hosts are brought up.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use super::script::REMOTE_COMMAND;
use crate::hosts::HostSlots;

/// How hosts are reached, and what is started there. Start from [`SshOptions::default`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct SshOptions {
    /// The ssh client. Default: `ssh`, looked for in `PATH`.
    pub program: PathBuf,
    /// Port of the hosts' ssh servers. Default: what ssh_config says, or else 22.
    pub port: Option<u16>,
    /// Private key to log in with. Default: what ssh_config and the agent have.
    pub identity_file: Option<PathBuf>,
    /// ssh_config to use in place of the user's and the system's. Default: those.
    pub config_file: Option<PathBuf>,
    /// How long ssh may take for a connection. Default: 10 s.
    pub connect_timeout: Duration,
    /// How long a host may be silent while it is brought up: to log in, to take a part of the program, to reach the
    /// head. Default: 30 s. Longer for slow links and loaded machines.
    pub stall_timeout: Duration,
    /// How many hosts are brought up at the same time. Default: 64. Allowed: at least 1; 0 counts as 1.
    pub parallel: usize,
    /// The `kolo-node` to send. Default: the one beside this program, or else in `PATH`.
    pub node_program: Option<PathBuf>,
    /// Path of a `kolo-node` that is on the hosts already; then none is sent. Default: none.
    pub remote_program: Option<String>,
    /// Whether this machine, too, is reached by ssh. Default: no.
    pub ssh_local: bool,
    /// How long a node lives when nothing is heard from the launcher any more, as when the network between them is cut.
    /// Default: 30 s. (If the launcher dies, its nodes learn of it at once.) Allowed: 1 s to 1 h.
    pub lease: Duration,
    /// How long the jobs of a node have to end when it is stopped. Default: 60 s.
    pub stop_timeout: Duration,
    /// How long the jobs of a detached node may take to end by themselves before they are stopped. Default: they are stopped
    /// at once.
    pub drain_timeout: Option<Duration>,
    /// Whether nodes run on when the launcher ends. Default: no.
    pub detach: bool,
    /// Whether each node is there for one job: see [`NodeConfig::gpus_for_all`](crate::NodeConfig::gpus_for_all). Default: no.
    pub gpus_for_all: bool,
}

impl Default for SshOptions {
    fn default() -> Self {
        Self {
            program: PathBuf::from("ssh"),
            port: None,
            identity_file: None,
            config_file: None,
            connect_timeout: Duration::from_secs(10),
            stall_timeout: Duration::from_secs(30),
            parallel: 64,
            node_program: None,
            remote_program: None,
            ssh_local: false,
            lease: Duration::from_secs(30),
            stop_timeout: Duration::from_secs(60),
            drain_timeout: None,
            detach: false,
            gpus_for_all: false,
        }
    }
}

/// How often ssh asks a silent host whether it is there, and how often in vain until it gives up: 15 s in all.
const ALIVE_INTERVAL: u32 = 5;
const ALIVE_COUNT: u32 = 3;

impl SshOptions {
    /// The lease in its limits.
    pub(super) fn lease(&self) -> Duration {
        self.lease
            .clamp(Duration::from_secs(1), Duration::from_secs(3600))
    }

    /// Arguments of the ssh client for one host.
    ///
    /// It never asks anybody anything, and host keys are verified as ssh_config says, which by default is always. What
    /// would get into the way of one plain command (terminals, forwardings, a command of ssh_config) is turned off.
    pub(super) fn arguments(&self, host: &HostSlots) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = Vec::new();
        let mut add = |text: &str| arguments.push(text.into());
        if let Some(file) = &self.config_file {
            add("-F");
            arguments.push(file.into());
        }
        let mut add = |text: &str| arguments.push(text.into());
        add("-T");
        add("-x");
        let seconds = self.connect_timeout.as_secs().max(1);
        for option in [
            "BatchMode=yes".to_owned(),
            format!("ConnectTimeout={seconds}"),
            format!("ServerAliveInterval={ALIVE_INTERVAL}"),
            format!("ServerAliveCountMax={ALIVE_COUNT}"),
            // A master that others use is used; none is left behind.
            "ControlMaster=no".to_owned(),
            "ClearAllForwardings=yes".to_owned(),
            "PermitLocalCommand=no".to_owned(),
            "RemoteCommand=none".to_owned(),
            "EscapeChar=none".to_owned(),
            "LogLevel=ERROR".to_owned(),
        ] {
            add("-o");
            add(&option);
        }
        if let Some(port) = self.port {
            add("-p");
            add(&port.to_string());
        }
        if let Some(file) = &self.identity_file {
            add("-i");
            arguments.push(file.into());
        }
        let mut add = |text: &str| arguments.push(text.into());
        if let Some(user) = &host.user {
            add("-l");
            add(user);
        }
        add("--");
        add(&host.host);
        add(REMOTE_COMMAND);
        arguments
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hosts::parse_hosts;

    fn line(options: &SshOptions, host: &str) -> String {
        let host = &parse_hosts(host).unwrap()[0];
        options
            .arguments(host)
            .iter()
            .map(|word| word.to_string_lossy().into_owned())
            .collect::<Vec<_>>()
            .join(" ")
    }

    #[test]
    fn ssh_asks_nobody_and_verifies_host_keys() {
        let line = line(&SshOptions::default(), "b:4");
        assert!(line.contains("-o BatchMode=yes"), "{line}");
        assert!(line.contains("-o ConnectTimeout=10"), "{line}");
        assert!(!line.contains("StrictHostKeyChecking"), "{line}");
        assert!(!line.contains("UserKnownHostsFile"), "{line}");
        assert!(line.ends_with(" -- b exec /bin/sh"), "{line}");
        for flag in ["-F", "-p", "-i", "-l"] {
            assert!(!line.contains(&format!(" {flag} ")), "{line}");
        }
    }

    #[test]
    fn what_is_given_is_passed_on_word_by_word() {
        let options = SshOptions {
            port: Some(2222),
            identity_file: Some("/home/it's me/$(key)".into()),
            config_file: Some("/etc/a b".into()),
            ..SshOptions::default()
        };
        let host = &parse_hosts("me@[fd00::2]:4").unwrap()[0];
        let arguments = options.arguments(host);
        let pair = |flag: &str| {
            let at = arguments.iter().position(|word| word == flag).unwrap();
            arguments[at + 1].to_str().unwrap().to_owned()
        };
        assert_eq!(pair("-p"), "2222");
        assert_eq!(pair("-i"), "/home/it's me/$(key)");
        assert_eq!(pair("-F"), "/etc/a b");
        assert_eq!(pair("-l"), "me");
        assert_eq!(pair("--"), "fd00::2");
    }

    #[test]
    fn a_lease_has_limits() {
        let lease = |seconds| {
            SshOptions {
                lease: Duration::from_secs(seconds),
                ..SshOptions::default()
            }
            .lease()
        };
        assert_eq!(lease(0), Duration::from_secs(1));
        assert_eq!(lease(30), Duration::from_secs(30));
        assert_eq!(lease(1 << 40), Duration::from_secs(3600));
    }
}
