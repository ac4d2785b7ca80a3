//! Settings of the daemons: flags, environment variables and a file, which say the same.
//!
//! A daemon describes its settings once, as flags in the manner of [`clap`]. From that everything else follows. For a
//! flag `--state-dir` of a daemon with the prefix `KOLO_HEAD` there are
//!
//! | where | written as |
//! |---|---|
//! | command line | `--state-dir DIR` |
//! | environment | `KOLO_HEAD_STATE_DIR=DIR`, or what the flag itself names |
//! | file (TOML), named by `--config FILE` or `KOLO_HEAD_CONFIG` | `state_dir = "DIR"` |
//!
//! and the first of these that says something holds, before the default. The values have the same form everywhere and
//! are read by the same parser. A flag that may be given many times is a list in the file, and in the environment
//! separated by commas; the lists of two places are not added up.

mod file;
pub mod logging;
pub(crate) mod manual;
pub mod size;
pub mod values;

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::{OsStr, Resettable};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory, FromArgMatches};

pub use self::file::SettingsError;
use self::file::Values;
pub(crate) use self::file::nearest;

const CONFIG: &str = "config";
const PRINT: &str = "print-config";
const CHECK: &str = "check-config";
pub(crate) const MANUAL: &str = "print-man";

/// Flags that are no settings.
const NO_SETTINGS: [&str; 6] = ["help", "version", CONFIG, PRINT, CHECK, MANUAL];

/// Exit code for settings that are wrong.
const WRONG: u8 = 2;

/// A daemon that has settings.
#[derive(Debug, Clone, Copy)]
pub struct Daemon {
    /// Its name, as in messages.
    pub name: &'static str,
    /// What its environment variables begin with, without the last `_`.
    pub prefix: &'static str,
}

/// Where a setting comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The command line.
    Flag,
    /// The environment.
    Environment,
    /// The file.
    File,
    /// Nobody said anything.
    Default,
}

impl Origin {
    fn as_str(self) -> &'static str {
        match self {
            Self::Flag => "flag",
            Self::Environment => "environment",
            Self::File => "file",
            Self::Default => "default",
        }
    }
}

/// A setting as it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// Its name in the file.
    pub key: String,
    /// Its values; none if nobody said anything and there is no default.
    pub values: Vec<String>,
    /// Where they come from.
    pub origin: Origin,
    many: bool,
}

/// Settings that were read.
#[derive(Debug)]
pub struct Loaded<A> {
    /// The arguments.
    pub args: A,
    /// All settings, in the order of the help.
    pub settings: Vec<Setting>,
    /// What to do other than to run.
    action: Action,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Run,
    Print,
    Check,
}

/// Why there are no settings.
#[derive(Debug)]
pub enum LoadError {
    /// What is wrong with the command line or the environment; or the help, which is no error.
    Arguments(Box<clap::Error>),
    /// What is wrong with the file.
    File(SettingsError),
}

fn is_setting(arg: &Arg) -> bool {
    arg.get_long()
        .is_some_and(|long| !NO_SETTINGS.contains(&long))
}

fn takes_many(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
}

fn key_of(long: &str) -> String {
    long.replace('-', "_")
}

/// The command line of a daemon, with everything that this module adds to its flags.
pub fn command<A: CommandFactory>(daemon: Daemon) -> Command {
    let prefix = daemon.prefix;
    A::command()
        .term_width(help_width())
        .mut_args(|arg| {
            if !is_setting(&arg) {
                return arg;
            }
            let arg = if takes_many(&arg) {
                arg.value_delimiter(',')
            } else {
                arg
            };
            let arg = arg.hide_env_values(true);
            match (arg.get_env(), arg.get_long()) {
                (None, Some(long)) => {
                    let variable = format!("{prefix}_{}", key_of(long).to_ascii_uppercase());
                    arg.env(variable)
                }
                _ => arg,
            }
        })
        .arg(
            Arg::new(CONFIG)
                .long(CONFIG)
                .value_name("FILE")
                .env(format!("{prefix}_CONFIG"))
                .value_parser(clap::value_parser!(PathBuf))
                .help("File with settings (TOML); each key is the name of a flag with `_` for `-`"),
        )
        .arg(
            Arg::new(PRINT)
                .long(PRINT)
                .action(ArgAction::SetTrue)
                .help("Print all settings as they hold and where they come from, as such a file"),
        )
        .arg(
            Arg::new(CHECK)
                .long(CHECK)
                .action(ArgAction::SetTrue)
                .conflicts_with(PRINT)
                .help("Check all settings and do nothing else"),
        )
        .arg(
            Arg::new(MANUAL)
                .long(MANUAL)
                .action(ArgAction::SetTrue)
                .exclusive(true)
                .help("Print the manual page; `kolo man` writes those of all commands"),
        )
}

/// Reads the settings of a daemon. `args` begin with the name of the program.
///
/// # Errors
///
/// [`LoadError`].
pub fn load<A: CommandFactory + FromArgMatches>(
    daemon: Daemon,
    args: &[OsString],
) -> Result<Loaded<A>, LoadError> {
    let wrong = |error: clap::Error| LoadError::Arguments(Box::new(error));
    let command = command::<A>(daemon);
    let values = match file_of(&command, args).map_err(wrong)? {
        Some(path) => {
            let values = Values::read(daemon, &path, &keys(&command)).map_err(LoadError::File)?;
            check_values(&command, &values).map_err(LoadError::File)?;
            values
        }
        None => Values::default(),
    };
    let mut command = with_defaults(command, &values);
    let matches = command.try_get_matches_from_mut(args).map_err(wrong)?;
    let settings = command
        .get_arguments()
        .filter(|arg| is_setting(arg))
        .map(|arg| setting(arg, &matches, &values))
        .collect();
    let action = if matches.get_flag(PRINT) {
        Action::Print
    } else if matches.get_flag(CHECK) {
        Action::Check
    } else {
        Action::Run
    };
    let args = A::from_arg_matches(&matches).map_err(|error| wrong(error.format(&mut command)))?;
    Ok(Loaded {
        args,
        settings,
        action,
    })
}

/// The keys of all settings, and whether each may have several values.
fn keys(command: &Command) -> Vec<(String, bool)> {
    command
        .get_arguments()
        .filter(|arg| is_setting(arg))
        .filter_map(|arg| Some((key_of(arg.get_long()?), takes_many(arg))))
        .collect()
}

/// The file with the settings, whatever else may be wrong with the command line.
fn file_of(command: &Command, args: &[OsString]) -> Result<Option<PathBuf>, clap::Error> {
    let lenient = command
        .clone()
        .ignore_errors(true)
        .mut_args(|arg| arg.required(false));
    let matches = lenient.try_get_matches_from(args)?;
    Ok(matches.get_one::<PathBuf>(CONFIG).cloned())
}

/// What the file says takes the place of the defaults: flags and the environment go before it.
fn with_defaults(command: Command, values: &Values) -> Command {
    command.mut_args(|arg| {
        let given = arg.get_long().and_then(|long| values.get(&key_of(long)));
        match given {
            Some(given) if is_setting(&arg) => arg.required(false).default_values(given.to_vec()),
            _ => arg,
        }
    })
}

/// Has each value of the file read by the parser of its flag, so that what is wrong is told with file and key.
fn check_values(command: &Command, values: &Values) -> Result<(), SettingsError> {
    for (key, given) in values.iter() {
        let flag = format!("--{}", key.replace('_', "-"));
        let mut args = vec![OsString::from(command.get_name())];
        args.extend(
            given
                .iter()
                .map(|value| OsString::from(format!("{flag}={value}"))),
        );
        let alone = command
            .clone()
            .mut_args(|arg| arg.required(false).env(Resettable::<OsStr>::Reset));
        let Err(error) = alone.try_get_matches_from(args) else {
            continue;
        };
        // Not about other flags that are missing: they may be given elsewhere.
        if error.kind() == ErrorKind::MissingRequiredArgument {
            continue;
        }
        return Err(values.wrong(key, reason(&error)));
    }
    Ok(())
}

/// The one line of an error that says what is wrong.
fn reason(error: &clap::Error) -> String {
    let value = match error.get(ContextKind::InvalidValue) {
        Some(ContextValue::String(value)) => format!("`{}`", value.escape_debug()),
        _ => "the value".to_owned(),
    };
    if let Some(cause) = std::error::Error::source(error) {
        return format!("{value} is not usable: {cause}");
    }
    match error.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(allowed)) if !allowed.is_empty() => {
            format!("{value} is not usable; allowed are {}", allowed.join(", "))
        }
        _ => {
            let text = error.to_string();
            let text = text.lines().next().unwrap_or_default();
            text.trim_start_matches("error: ").to_owned()
        }
    }
}

fn setting(arg: &Arg, matches: &ArgMatches, values: &Values) -> Setting {
    let key = key_of(arg.get_long().unwrap_or_default());
    let id = arg.get_id().as_str();
    let origin = match matches.value_source(id) {
        Some(ValueSource::CommandLine) => Origin::Flag,
        Some(ValueSource::EnvVariable) => Origin::Environment,
        _ if values.get(&key).is_some() => Origin::File,
        _ => Origin::Default,
    };
    let values = matches
        .get_raw(id)
        .into_iter()
        .flatten()
        .map(|value| value.to_string_lossy().into_owned())
        .collect();
    Setting {
        key,
        values,
        origin,
        many: takes_many(arg),
    }
}

impl<A> Loaded<A> {
    /// All settings as a file that says the same, with where each comes from.
    pub fn render(&self) -> String {
        let mut out = String::new();
        for setting in &self.settings {
            let quoted: Vec<String> = setting
                .values
                .iter()
                .map(|value| toml::Value::from(value.as_str()).to_string())
                .collect();
            let line = match (setting.many, quoted.as_slice()) {
                (_, []) => format!("# {} is not set", setting.key),
                (false, [value, ..]) => format!("{} = {value}", setting.key),
                (true, _) => format!("{} = [{}]", setting.key, quoted.join(", ")),
            };
            out.push_str(&line);
            if !setting.values.is_empty() {
                out.push_str("  # ");
                out.push_str(setting.origin.as_str());
            }
            out.push('\n');
        }
        out
    }
}

/// Reads the settings of this process, for its `main`: says what is wrong, or prints or checks them if that is asked
/// for. `check` looks at what no single setting shows.
///
/// # Errors
///
/// The exit code if there is nothing to run: 0 if all is well, 2 if not.
pub fn start<A: CommandFactory + FromArgMatches>(
    daemon: Daemon,
    check: impl Fn(&A) -> Result<(), String>,
) -> Result<A, ExitCode> {
    let args: Vec<OsString> = std::env::args_os().collect();
    let complain = |message: &str| {
        // Nobody may be there to read it.
        writeln!(std::io::stderr(), "{}: {message}", daemon.name).ok();
        ExitCode::from(WRONG)
    };
    let print = |text: &str| match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => complain(&format!("it can't be printed: {error}")),
    };
    if args
        .get(1)
        .is_some_and(|arg| *arg == *format!("--{MANUAL}"))
    {
        let mut command = command::<A>(daemon);
        command.build();
        let page = manual::page(&command, "8", &["kolo(1)".to_owned()]);
        return Err(match page {
            Ok(page) => print(&page),
            Err(error) => complain(&error.to_string()),
        });
    }
    let loaded = match load::<A>(daemon, &args) {
        Ok(loaded) => loaded,
        Err(LoadError::Arguments(error)) => {
            let code = u8::try_from(error.exit_code()).unwrap_or(WRONG);
            if error.use_stderr() {
                let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
                write!(
                    std::io::stderr(),
                    "{}",
                    in_words(daemon.name, &error, colours)
                )
                .ok();
            } else {
                error.print().ok();
            }
            return Err(ExitCode::from(code));
        }
        Err(LoadError::File(error)) => return Err(complain(&error.to_string())),
    };
    if let Err(message) = check(&loaded.args) {
        return Err(complain(&message));
    }
    let text = match loaded.action {
        Action::Run => return Ok(loaded.args),
        Action::Print => loaded.render(),
        Action::Check => format!("{}: the settings are good\n", daemon.name),
    };
    Err(print(&text))
}

/// The columns that help is written in: those of the terminal, at most 100, and 80 where there is none.
pub(crate) fn help_width() -> usize {
    let size = rustix::termios::tcgetwinsize(std::io::stdout());
    match size.map_or(0, |size| size.ws_col) {
        0 => 80,
        columns => usize::from(columns).min(100),
    }
}

/// What is wrong with a command line, beginning with the name of the program, as all that a program of kolo says of itself.
pub(crate) fn in_words(program: &str, error: &clap::Error, colours: bool) -> String {
    let text = error.render();
    let text = if colours {
        text.ansi().to_string()
    } else {
        text.to_string()
    };
    text.replacen("error:", &format!("{program}:"), 1)
}

/// Reads the settings of this process again, for instance when it is told that the file has changed.
///
/// # Errors
///
/// What is wrong, in words.
pub fn reload<A: CommandFactory + FromArgMatches>(daemon: Daemon) -> Result<Loaded<A>, String> {
    let args: Vec<OsString> = std::env::args_os().collect();
    load(daemon, &args).map_err(|error| match error {
        LoadError::Arguments(error) => error.to_string(),
        LoadError::File(error) => error.to_string(),
    })
}

#[cfg(test)]
mod tests;
