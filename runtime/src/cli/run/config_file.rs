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
use std::path::Path;

use clap::{Arg, ArgAction, Command};
use toml::{Table, Value};

use super::super::error::CliError;
use super::super::host_args::read;
use crate::settings::nearest;

/// The longest file that is read.
const LONGEST_FILE: u64 = 16 << 20;

/// Options that make no sense in a file.
const NOT_HERE: [&str; 3] = ["config-file", "help", "dry-run"];

/// The options of a file as words of a command line.
///
/// `options` is the subcommand: its long options are the keys.
pub(crate) fn words(path: &Path, options: &Command) -> Result<Vec<OsString>, CliError> {
    let wrong = |reason| CliError::Usage(format!("{}: {reason}", path.display()));
    let text = read(path, LONGEST_FILE)
        .map_err(|reason| wrong(format!("the --config-file can't be read: {reason}")))?;
    parse(&text, options).map_err(wrong)
}

fn parse(text: &str, options: &Command) -> Result<Vec<OsString>, String> {
    let table: Table = text
        .parse()
        .map_err(|error: toml::de::Error| error.to_string().trim_end().to_owned())?;
    let known: Vec<&Arg> = options
        .get_arguments()
        .filter(|arg| arg.get_long().is_some_and(|long| !NOT_HERE.contains(&long)))
        .collect();
    let mut words = Vec::new();
    let mut program = Vec::new();
    for (key, value) in &table {
        if key == "program" {
            program = list(key, value)?;
            continue;
        }
        let Some((arg, name)) = known.iter().find_map(|arg| named(arg, key)) else {
            return Err(unknown(key, &known));
        };
        let option = format!("--{name}");
        match (arg.get_action(), value) {
            (ArgAction::SetTrue, Value::Boolean(true)) => words.push(option),
            (ArgAction::SetTrue, Value::Boolean(false)) => {}
            (ArgAction::SetTrue, other) => {
                return Err(format!("`{key}` is {other}; allowed are true and false"));
            }
            (ArgAction::Append, Value::Table(table)) if name == "env" => {
                for (name, value) in table {
                    words.push(format!("{option}={name}={}", scalar(name, value)?));
                }
            }
            // One option with several values.
            (ArgAction::Append, value)
                if arg
                    .get_num_args()
                    .is_some_and(|number| number.min_values() > 1) =>
            {
                words.push(option);
                words.extend(list(key, value)?);
            }
            (ArgAction::Append, value) => {
                for item in list(key, value)? {
                    words.push(format!("{option}={item}"));
                }
            }
            (_, value) => words.push(format!("{option}={}", scalar(key, value)?)),
        }
    }
    let mut words: Vec<OsString> = words.into_iter().map(OsString::from).collect();
    if !program.is_empty() {
        words.push(OsString::from("--"));
        words.extend(program.into_iter().map(OsString::from));
    }
    Ok(words)
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

    use super::super::super::args::Args;
    use super::*;

    fn parsed(text: &str) -> Result<Vec<String>, String> {
        let mut command = Args::command();
        let options = command.find_subcommand_mut("run").unwrap();
        let words = parse(text, options)?;
        Ok(words
            .into_iter()
            .map(|word| word.into_string().unwrap())
            .collect())
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
