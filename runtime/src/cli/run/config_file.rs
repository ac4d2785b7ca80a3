//! `--config-file`: the options of `kolo run` in TOML.
//!
//! ```toml
//! num-proc = 4
//! pass-env = ["NCCL_*"]
//! grace = 10
//! program = ["python3", "train.py"]
//!
//! [env]
//! OMP_NUM_THREADS = "2"
//! ```

use std::ffi::OsString;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches};
use toml::{Table, Value};

use super::super::error::CliError;
use super::super::host_args::read;
use super::args::Run;
use super::synonyms::position_of_run;
use crate::settings::nearest;

/// The longest file that is read.
const LONGEST_FILE: u64 = 16 << 20;

/// Options that make no sense in a file.
const NOT_HERE: [&str; 3] = ["config-file", "help", "dry-run"];

/// Options that the file has as well as the command line. Of one name the last counts.
const BOTH: [&str; 2] = ["env", "pass_env"];

/// A command line of `kolo`, and the command that reads it.
pub(in super::super) struct Line {
    /// All words, the name of the program first.
    pub(in super::super) words: Vec<OsString>,
    /// The whole command, of which `run` is a subcommand.
    pub(in super::super) command: Command,
}

/// The options of a command line, with those of its `--config-file`.
pub(super) fn with_file(options: Run, line: Line) -> Result<Run, CliError> {
    let Some(path) = &options.config_file else {
        return Ok(options);
    };
    let wrong = |reason| CliError::Usage(format!("{}: {reason}", path.display()));
    let text = read(path, LONGEST_FILE)
        .map_err(|reason| wrong(format!("the --config-file can't be read: {reason}")))?;
    under(&text, line).map_err(wrong)
}

/// The options of a file in front of those of a command line, which count more.
fn under(text: &str, line: Line) -> Result<Run, String> {
    let Line {
        words: mut line,
        command,
    } = line;
    let options = command.find_subcommand("run").ok_or("no run")?;
    let File { given, program } = File::parse(text, options)?;
    let alone = given.iter().flat_map(|(_, words)| words.clone());
    let from_file = words("kolo run").chain(alone).chain(behind(&program));
    parsed(&command, from_file)?;
    let matches = command.clone().try_get_matches_from(&line);
    let matches = matches.map_err(|error| first_line(&error))?;
    let matches = matches.subcommand_matches("run").ok_or("no run")?;
    let (Some(at), has_program) = (
        position_of_run(&line, &command),
        is_given(matches, "program"),
    ) else {
        return Err("no run".to_owned());
    };
    if !has_program {
        line.extend(behind(&program));
    }
    let kept = given.into_iter().filter(|(arg, _)| {
        let id = arg.get_id().as_str();
        let excluded = |other: &&Arg| {
            let excludes = |one, other| options.get_arg_conflicts_with(one).contains(other);
            excludes(*arg, other) || excludes(*other, arg)
        };
        let mut others = options.get_arguments().filter(excluded);
        BOTH.contains(&id)
            || !(is_given(matches, id)
                || others.any(|arg| is_given(matches, arg.get_id().as_str())))
    });
    let behind_run = line.split_off(at + 1);
    let kept = kept.flat_map(|(_, words)| words);
    let all: Vec<OsString> = line.into_iter().chain(kept).chain(behind_run).collect();
    parsed(&command, all)
}

fn words(text: &str) -> impl Iterator<Item = OsString> {
    text.split(' ').map(OsString::from)
}

/// The program, as it stands behind the options.
fn behind(program: &[OsString]) -> impl Iterator<Item = OsString> {
    let mark = (!program.is_empty()).then(|| OsString::from("--"));
    mark.into_iter().chain(program.iter().cloned())
}

fn is_given(matches: &ArgMatches, id: &str) -> bool {
    matches.value_source(id) == Some(ValueSource::CommandLine)
}

fn first_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let first = text.lines().next().unwrap_or_default();
    first.strip_prefix("error: ").unwrap_or(first).to_owned()
}

fn parsed(command: &Command, line: impl IntoIterator<Item = OsString>) -> Result<Run, String> {
    let read = || {
        let matches = command.clone().try_get_matches_from(line)?;
        let (_, run) = matches
            .subcommand()
            .filter(|(name, _)| *name == "run")
            .ok_or_else(|| clap::Error::new(ErrorKind::InvalidSubcommand))?;
        Run::from_arg_matches(run)
    };
    read().map_err(|error: clap::Error| first_line(&error))
}

/// What a file says.
struct File<'a> {
    /// Each option, as words of a command line.
    given: Vec<(&'a Arg, Vec<OsString>)>,
    program: Vec<OsString>,
}

impl<'a> File<'a> {
    /// `options` is the subcommand: its long options are the keys.
    fn parse(text: &str, options: &'a Command) -> Result<Self, String> {
        let table: Table = text
            .parse()
            .map_err(|error: toml::de::Error| error.to_string().trim_end().to_owned())?;
        let known: Vec<&Arg> = options
            .get_arguments()
            .filter(|arg| arg.get_long().is_some_and(|long| !NOT_HERE.contains(&long)))
            .collect();
        let (mut given, mut program) = (Vec::new(), Vec::new());
        for (key, value) in &table {
            if key == "program" {
                program = list(key, value)?.into_iter().map(OsString::from).collect();
                continue;
            }
            let found = known.iter().find_map(|arg| named(arg, key));
            let (arg, name) = found.ok_or_else(|| unknown(key, &known))?;
            let words = option(arg, name, key, value)?.into_iter();
            given.push((arg, words.map(OsString::from).collect()));
        }
        Ok(Self { given, program })
    }
}

/// An option as words of a command line.
fn option(arg: &Arg, name: &str, key: &str, value: &Value) -> Result<Vec<String>, String> {
    let option = format!("--{name}");
    let takes_several = || {
        arg.get_num_args()
            .is_some_and(|number| number.min_values() > 1)
    };
    Ok(match (arg.get_action(), value) {
        (ArgAction::SetTrue, Value::Boolean(true)) => vec![option],
        (ArgAction::SetTrue, Value::Boolean(false)) => Vec::new(),
        (ArgAction::SetTrue, other) => {
            return Err(format!("`{key}` is {other}; allowed are true and false"));
        }
        (ArgAction::Append, Value::Table(table)) if name == "env" => {
            let pair = |(name, value): (&String, &Value)| {
                Ok(format!("{option}={name}={}", scalar(name, value)?))
            };
            table.iter().map(pair).collect::<Result<_, String>>()?
        }
        (ArgAction::Append, value) if takes_several() => {
            std::iter::once(option).chain(list(key, value)?).collect()
        }
        (ArgAction::Append, value) => {
            let items = list(key, value)?.into_iter();
            items.map(|item| format!("{option}={item}")).collect()
        }
        (_, value) => vec![format!("{option}={}", scalar(key, value)?)],
    })
}

fn unknown(key: &str, known: &[&Arg]) -> String {
    let names: Vec<&str> = known
        .iter()
        .filter_map(|arg| arg.get_long())
        .chain(["program"])
        .collect();
    match nearest(&key.replace('_', "-"), names.iter().copied()) {
        Some(name) => format!("there is no option `{key}`; did you mean `{name}`?"),
        None => format!("there is no option `{key}`; there are {}", names.join(", ")),
    }
}

/// The option and its name, if `key` is its name or one of its others (`np`, `n`).
fn named<'a>(arg: &'a Arg, key: &str) -> Option<(&'a Arg, &'a str)> {
    let name = arg.get_long()?;
    let spelled = key.replace('_', "-");
    let is_it = name == spelled
        || arg
            .get_all_aliases()
            .is_some_and(|aliases| aliases.contains(&key) || aliases.contains(&spelled.as_str()))
        || arg.get_short().is_some_and(|short| key.chars().eq([short]));
    is_it.then_some((arg, name))
}

fn scalar(key: &str, value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Integer(number) => Ok(number.to_string()),
        Value::Float(number) => Ok(number.to_string()),
        Value::Boolean(choice) => Ok(choice.to_string()),
        other => Err(format!("`{key}` is {other}; allowed is a text or a number")),
    }
}

fn list(key: &str, value: &Value) -> Result<Vec<String>, String> {
    match value {
        Value::Array(items) => items.iter().map(|item| scalar(key, item)).collect(),
        single => Ok(vec![scalar(key, single)?]),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::super::super::command::Args;
    use super::super::plan::Plan;
    use super::super::plan::tests::{here, plan_of};
    use super::super::prefix::Prefix;
    use super::super::target::Target;
    use super::*;

    /// The words of a file.
    fn parsed(text: &str) -> Result<Vec<String>, String> {
        let command = Args::command();
        let file = File::parse(text, command.find_subcommand("run").unwrap())?;
        let given = file.given.into_iter().flat_map(|(_, words)| words);
        let words = given.chain(behind(&file.program));
        Ok(words.map(|word| word.into_string().unwrap()).collect())
    }

    fn read_with(line: &str, file: &str) -> Result<Run, String> {
        let line = Line {
            words: words(&format!("kolo run {line}")).collect(),
            command: Args::command(),
        };
        under(file, line)
    }

    fn merged(line: &str, file: &str) -> Run {
        read_with(line, file).unwrap()
    }

    #[test]
    fn the_command_line_counts_more_than_the_file() {
        let file = "n = 8\nH = 'a:8'\ntimestamps = true\nno-stdin = true\noutput-dir = 'd'\nssh-program = 's'\n\
                    interfaces = ['a', 'b']\nprogram = ['./from-file', 1]\n[env]\nA = 1\nB = 1\n";
        let line = "-n 2 --local --prefix none -e B=2 --output-filename o";
        let options = merged(line, file);
        assert_eq!(options.output_dir, None);
        let Plan {
            workers,
            target,
            prefix,
            spec,
            ..
        } = plan_of(&options, &here()).unwrap();
        assert_eq!((workers, &target), (2, &Target::Local));
        assert_eq!(prefix, Prefix::parse("none").unwrap());
        assert_eq!((spec.env["A"].as_str(), spec.env["B"].as_str()), ("1", "2"));
        assert!(!spec.installed.as_ref().unwrap().stdin);
        assert_eq!(spec.args, ["1"]);
        let options = merged("--interfaces c --ssh-program ssh ./own 2", file);
        assert_eq!((options.num_proc, options.program.len()), (Some(8), 2));
        assert!(options.timestamps && options.hosts.is_some());
        assert_eq!(options.interfaces, ["c"]);
        assert_eq!(options.ssh.options().program.to_str(), Some("ssh"));
        assert_eq!(merged("x", file).interfaces, ["a", "b"]);
        // What only the file gives is wrong there.
        let error = read_with("-n 2 y", "n = 'x'").unwrap_err();
        assert!(
            error.starts_with("invalid value 'x' for '--num-proc"),
            "{error}"
        );
    }

    #[test]
    fn keys_are_the_long_options() {
        let words = parsed(
            "num-proc = 4\nnproc_per_node = 2\nno-stdin = true\ntimestamps = false\ngrace = 2.5\n\
             pass-env = [\"A*\", \"B\"]\nprogram = [\"./x\", \"-n\", 3]\n[env]\nX = \"1 2\"\nY = 3\n",
        )
        .unwrap();
        assert_eq!(
            words,
            [
                "--env=X=1 2",
                "--env=Y=3",
                "--grace=2.5",
                "--no-stdin",
                "--nproc-per-node=2",
                "--num-proc=4",
                "--pass-env=A*",
                "--pass-env=B",
                "--",
                "./x",
                "-n",
                "3"
            ]
        );
    }

    #[test]
    fn unknown_keys_are_refused_by_name_with_a_suggestion() {
        for (text, message) in [
            (
                "nnods = 1",
                "there is no option `nnods`; did you mean `nnodes`?",
            ),
            (
                "output_dri = 'x'",
                "there is no option `output_dri`; did you mean `output-dir`?",
            ),
            (
                "no-stdin = 1",
                "`no-stdin` is 1; allowed are true and false",
            ),
            (
                "grace = [1]",
                "`grace` is [1]; allowed is a text or a number",
            ),
        ] {
            assert_eq!(parsed(text).unwrap_err(), message);
        }
        assert!(
            parsed("zzzzzz = 1")
                .unwrap_err()
                .contains("there are num-proc, ")
        );
        assert!(parsed("config-file = 'x'").is_err());
        assert!(parsed("a = ").unwrap_err().contains("line 1"));
    }

    #[test]
    fn other_names_of_an_option_are_keys_as_well() {
        let words = parsed("np = 4\nH = \"a:4\"\noutput-filename = \"x\"\n[e]\nA = 1\n").unwrap();
        assert_eq!(
            words,
            [
                "--hosts=a:4",
                "--env=A=1",
                "--num-proc=4",
                "--output-filename=x"
            ]
        );
        assert!(parsed("npp = 4").is_err());
    }
}
