//! Flags about hosts and ssh, for all commands that reach hosts.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use super::args::time;
use super::error::CliError;
use crate::hosts::{HostSlots, HostsError, List, own_name};
use crate::settings::values::port;
use crate::ssh::SshOptions;
use crate::ssh::state::SshRecord;

/// The longest hostfile that is read.
const LONGEST_FILE: u64 = 16 << 20;

/// Which hosts.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct HostArgs {
    /// Hosts and their slots; USER@HOST and [IPV6] are allowed
    #[arg(
        long,
        short = 'H',
        value_name = "HOST:SLOTS,...",
        conflicts_with = "hostfile"
    )]
    pub(super) hosts: Option<String>,
    /// File with `HOST slots=N` on each line; blank lines and `#` comments are skipped
    #[arg(long, value_name = "FILE")]
    pub(super) hostfile: Option<PathBuf>,
}

impl HostArgs {
    /// The hosts, if any were given.
    ///
    /// # Errors
    ///
    /// [`CliError::Usage`] with the entry or line that is wrong.
    pub(super) fn read(&self) -> Result<Option<Vec<HostSlots>>, CliError> {
        self.read_by(List::hosts)
    }

    /// The hosts, where their slots don't matter: `--hosts` may leave them out.
    ///
    /// # Errors
    ///
    /// As [`HostArgs::read`].
    pub(super) fn read_names(&self) -> Result<Option<Vec<HostSlots>>, CliError> {
        self.read_by(List::names)
    }

    fn read_by(
        &self,
        entries: fn(List, &str) -> Result<Vec<HostSlots>, HostsError>,
    ) -> Result<Option<Vec<HostSlots>>, CliError> {
        let list = List::of(&own_name());
        if let Some(text) = &self.hosts {
            return entries(list, text)
                .map(Some)
                .map_err(|error| CliError::Usage(format!("--hosts: {error}")));
        }
        let Some(path) = &self.hostfile else {
            return Ok(None);
        };
        let wrong = |reason: String| CliError::Usage(format!("{}: {reason}", path.display()));
        let text = read(path, LONGEST_FILE)
            .map_err(|reason| wrong(format!("the hostfile can't be read: {reason}")))?;
        list.file(&text)
            .map(Some)
            .map_err(|error| wrong(error.to_string()))
    }
}

/// The text of a file that people write; an error says why there is none.
pub(super) fn read(path: &Path, longest: u64) -> Result<String, String> {
    use std::io::Read as _;
    let mut bytes = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(longest + 1).read_to_end(&mut bytes))
        .map_err(|error| error.to_string())?;
    if bytes.len() as u64 > longest {
        return Err(format!("it has more than {longest} bytes"));
    }
    String::from_utf8(bytes).map_err(|error| {
        format!(
            "it is no text in UTF-8 (byte {} is none of it)",
            error.utf8_error().valid_up_to() + 1
        )
    })
}

/// How hosts are reached.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "SSH")]
pub(super) struct SshArgs {
    /// Port of the hosts' ssh servers [default: what ssh_config says, or 22]
    #[arg(long, value_name = "PORT", value_parser = port)]
    pub(super) ssh_port: Option<u16>,
    /// Private key to log in with [default: what ssh_config and the agent have]
    #[arg(long, value_name = "FILE")]
    pub(super) ssh_identity_file: Option<PathBuf>,
    /// ssh_config to use in place of the user's and the system's
    #[arg(
        long,
        value_name = "FILE",
        env = "KOLO_SSH_CONFIG_FILE",
        hide_env_values = true
    )]
    pub(super) ssh_config_file: Option<PathBuf>,
    /// The ssh client
    #[arg(
        long,
        value_name = "PROGRAM",
        env = "KOLO_SSH_PROGRAM",
        hide_env_values = true,
        default_value = "ssh"
    )]
    pub(super) ssh_program: PathBuf,
    /// How long ssh may take for a connection
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = time)]
    pub(super) ssh_connect_timeout: Duration,
    /// How long a host may be silent while its node is brought up
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = time)]
    pub(super) ssh_stall_timeout: Duration,
    /// Reach this machine by ssh, too; else its node is started without
    #[arg(long)]
    pub(super) ssh_local: bool,
    /// The kolo-node to send to hosts that lack it [default: the one beside kolo]
    #[arg(
        long,
        value_name = "FILE",
        env = "KOLO_NODE_PROGRAM",
        hide_env_values = true,
        conflicts_with = "remote_program"
    )]
    pub(super) node_program: Option<PathBuf>,
    /// Path of the kolo-node that is installed on the hosts; none is sent then
    #[arg(long, value_name = "PATH")]
    pub(super) remote_program: Option<String>,
}

impl SshArgs {
    /// The settings for a launch.
    pub(super) fn options(&self) -> SshOptions {
        SshOptions {
            program: self.ssh_program.clone(),
            port: self.ssh_port,
            identity_file: self.ssh_identity_file.clone(),
            config_file: self.ssh_config_file.clone(),
            connect_timeout: self.ssh_connect_timeout,
            stall_timeout: self.ssh_stall_timeout,
            ssh_local: self.ssh_local,
            node_program: self.node_program.clone(),
            remote_program: self.remote_program.clone(),
            ..SshOptions::default()
        }
    }

    /// What is kept for later; files by their full paths, since the next command may be run elsewhere.
    pub(super) fn record(&self) -> SshRecord {
        let full = |path: &Option<PathBuf>| {
            path.as_ref()
                .map(|path| std::path::absolute(path).unwrap_or_else(|_| path.clone()))
        };
        SshRecord {
            port: self.ssh_port,
            identity_file: full(&self.ssh_identity_file),
            config_file: full(&self.ssh_config_file),
            remote_program: self.remote_program.clone(),
            node_program: full(&self.node_program),
            ssh_local: self.ssh_local,
        }
    }

    /// As [`options`](Self::options), with what is on record where nothing is given.
    pub(super) fn options_or(&self, record: &SshRecord) -> SshOptions {
        let mut options = self.options();
        options.port = options.port.or(record.port);
        options.identity_file = options
            .identity_file
            .or_else(|| record.identity_file.clone());
        options.config_file = options.config_file.or_else(|| record.config_file.clone());
        if options.node_program.is_none() && options.remote_program.is_none() {
            options.node_program.clone_from(&record.node_program);
            options.remote_program.clone_from(&record.remote_program);
        }
        options.ssh_local |= record.ssh_local;
        options
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        hosts: HostArgs,
        #[command(flatten)]
        ssh: SshArgs,
    }

    fn line(text: &str) -> Line {
        Line::try_parse_from(std::iter::once("x").chain(text.split_whitespace())).unwrap()
    }

    #[test]
    fn hosts_come_from_the_line_or_from_a_file() {
        let hosts = line("-H a:1,me@b:2").hosts.read().unwrap().unwrap();
        assert_eq!(hosts.len(), 2);
        assert_eq!(line("").hosts.read().unwrap(), None);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hosts");
        std::fs::write(&path, "# mine\na slots=1\n\nme@b slots=2\n").unwrap();
        let path = path.to_str().unwrap();
        let same = line(&format!("--hostfile {path}")).hosts.read().unwrap();
        assert_eq!(same, Some(hosts));
        std::fs::write(path, "a slots=1\nb\n").unwrap();
        let error = line(&format!("--hostfile {path}"))
            .hosts
            .read()
            .unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(
            error
                .to_string()
                .starts_with(&format!("{path}: line 2, `b`")),
            "{error}"
        );
        assert!(Line::try_parse_from(["x", "-H", "a:1", "--hostfile", path]).is_err());
        let error = line("--hostfile /nowhere/hosts").hosts.read().unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(
            error
                .to_string()
                .starts_with("/nowhere/hosts: the hostfile can't be read: No such file"),
            "{error}"
        );
        std::fs::write(path, b"a slots=1\n\xff").unwrap();
        let error = line(&format!("--hostfile {path}"))
            .hosts
            .read()
            .unwrap_err();
        assert!(
            error.to_string().contains("no text in UTF-8 (byte 11"),
            "{error}"
        );
        assert_eq!(
            super::read(Path::new(path), 4).unwrap_err(),
            "it has more than 4 bytes"
        );
        let error = line("-H a").hosts.read().unwrap_err();
        assert!(error.to_string().starts_with("--hosts: entry 1"), "{error}");
    }

    #[test]
    fn what_is_given_wins_over_what_is_on_record() {
        let record = line("--ssh-port 1 --ssh-identity-file /k --node-program /n --ssh-local")
            .ssh
            .record();
        let options = line("--ssh-port 2 --remote-program /r")
            .ssh
            .options_or(&record);
        assert_eq!(options.port, Some(2));
        assert_eq!(options.identity_file, Some("/k".into()));
        assert_eq!(options.remote_program.as_deref(), Some("/r"));
        assert_eq!(options.node_program, None);
        assert!(options.ssh_local);
        let options = line("").ssh.options_or(&record);
        assert_eq!(options.port, Some(1));
        assert_eq!(options.node_program, Some("/n".into()));
    }

    #[test]
    fn relative_paths_are_recorded_in_full() {
        let record = line("--ssh-identity-file key").ssh.record();
        assert!(record.identity_file.unwrap().is_absolute());
    }
}
