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

/// Options that make no sense in a file.
const NOT_HERE: [&str; 3] = ["config-file", "help", "dry-run"];

/// The options of a file as words of a command line.
///
/// `options` is the subcommand: its long options are the keys.
pub(crate) fn words(path: &Path, options: &Command) -> Result<Vec<OsString>, CliError> {
    let text = std::fs::read_to_string(path).map_err(|error| CliError::File {
        path: path.to_owned(),
        error,
    })?;
    parse(&text, options).map_err(|reason| CliError::Usage(format!("{}: {reason}", path.display())))
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
        let spelled = key.replace('_', "-");
        let Some(arg) = known
            .iter()
            .find(|arg| arg.get_long() == Some(spelled.as_str()))
        else {
            return Err(unknown(key, &known));
        };
        let option = format!("--{spelled}");
        match (arg.get_action(), value) {
            (ArgAction::SetTrue, Value::Boolean(true)) => words.push(option),
            (ArgAction::SetTrue, Value::Boolean(false)) => {}
            (ArgAction::SetTrue, other) => {
                return Err(format!("`{key}` is {other}; allowed are true and false"));
            }
            (ArgAction::Append, Value::Table(table)) if key == "env" => {
                for (name, value) in table {
                    words.push(format!("{option}={name}={}", scalar(name, value)?));
                }
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
    let spelled = key.replace('_', "-");
    let nearest = names
        .iter()
        .map(|name| (distance(&spelled, name), *name))
        .min();
    match nearest {
        Some((distance, name)) if distance <= 1 + name.len() / 4 => {
            format!("there is no option `{key}`; did you mean `{name}`?")
        }
        _ => format!("there is no option `{key}`; there are {}", names.join(", ")),
    }
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

/// How many characters must be changed, added or left out (Levenshtein).
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (index, char) in one.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = index + 1;
        for (at, wanted) in other.iter().enumerate() {
            let changed = diagonal + usize::from(char != *wanted);
            diagonal = row[at + 1];
            row[at + 1] = changed.min(row[at] + 1).min(diagonal + 1);
        }
    }
    row[other.len()]
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
    fn distances_are_counted() {
        for (one, other, expected) in [("", "ab", 2), ("kitten", "sitting", 3), ("ab", "ba", 2)] {
            assert_eq!(distance(one, other), expected);
        }
    }
}
