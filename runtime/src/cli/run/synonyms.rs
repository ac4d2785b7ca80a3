//! Options as other launchers write them, where they mean the same.

use std::cmp::Ordering;
use std::ffi::{OsStr, OsString};

use clap::Command;

use crate::settings::nearest;

/// `-np 4`, `--max_restarts 1` and `--grace -1` are no options as clap knows them. They are put into words that are, in front of the
/// program only: what comes after it is the program's own.
///
/// # Errors
///
/// What to say of a word that clap would take for something else: `-hots` for `-h`, which is a question for help.
pub(crate) fn translate(args: Vec<OsString>, command: &Command) -> Result<Vec<OsString>, String> {
    let Some(mut run) = position_of_run(&args, command) else {
        return Ok(args);
    };
    let Some(options) = command.find_subcommand("run") else {
        return Ok(args);
    };
    let both = [options, command];
    let mut args = args;
    let mut at = 1;
    while let Some(arg) = args.get_mut(at) {
        let commands = match at.cmp(&run) {
            Ordering::Less => &both[1..],
            Ordering::Equal => {
                at += 1;
                continue;
            }
            Ordering::Greater => &both[..],
        };
        if let Some(word) = spelled(arg, commands)? {
            *arg = word;
        }
        match length(arg, commands) {
            Some(2) if join_negative(&mut args, at) => {
                run -= usize::from(at < run);
                at += 1;
            }
            Some(length) => at += length,
            None => break,
        }
    }
    Ok(args)
}

/// `--NAME` for `-NAME`, and `-` for `_` in it, if there is such an option.
fn spelled(arg: &OsStr, commands: &[&Command]) -> Result<Option<OsString>, String> {
    let all = || commands.iter().flat_map(|command| command.get_arguments());
    let known = |word: &str| {
        let (name, value) = word.split_at(word.find('=').unwrap_or(word.len()));
        let name = name.replace('_', "-");
        // That of the help is not on the list.
        let is_known = name == "help" || all().any(|arg| is_called(arg, &name));
        is_known.then(|| OsString::from(format!("--{name}{value}")))
    };
    let Some(word) = arg.to_str().and_then(|arg| arg.strip_prefix('-')) else {
        return Ok(None);
    };
    if let Some(word) = word.strip_prefix('-') {
        return Ok(known(word));
    }
    let mut chars = word.chars();
    let (Some(first), Some(_)) = (chars.next(), chars.next()) else {
        return Ok(None);
    };
    if let Some(word) = known(word) {
        return Ok(Some(word));
    }
    let name = word.split_once('=').map_or(word, |(name, _)| name);
    // `-n4` holds its value.
    if all().any(|arg| arg.get_short() == Some(first) && arg.get_action().takes_values()) {
        return Ok(None);
    }
    let names = all().filter_map(clap::Arg::get_long);
    let meant = match nearest(name, names) {
        Some(name) => format!("did you mean `--{name}`?"),
        None => {
            "`kolo run --help` lists all; what belongs to the program stands behind it".to_owned()
        }
    };
    Err(format!(
        "there is no option `-{}`; {meant}",
        name.escape_debug()
    ))
}

/// `--tail -1` as `--tail=-1`, so that the option says what is allowed: a word that begins with `-` counts as an option of its own.
/// Whether the next word was one.
pub(crate) fn join_negative(line: &mut Vec<OsString>, at: usize) -> bool {
    let is_number = |word: &OsString| {
        let digits = word.to_str().and_then(|word| word.strip_prefix('-'));
        digits.is_some_and(|digits| digits.starts_with(|char: char| char.is_ascii_digit()))
    };
    let is_there = line.get(at + 1).is_some_and(is_number);
    if is_there {
        let word = line.remove(at + 1);
        line[at].push("=");
        line[at].push(word);
    }
    is_there
}

/// Whether a line is one of `kolo run`.
pub(crate) fn is_run(args: &[OsString], command: &Command) -> bool {
    position_of_run(args, command).is_some()
}

/// Where the subcommand `run` stands, if that is the subcommand.
pub(super) fn position_of_run(args: &[OsString], command: &Command) -> Option<usize> {
    let mut at = 1;
    while let Some(length) = length(args.get(at)?, &[command]) {
        at += length;
    }
    (args.get(at)? == "run").then_some(at)
}

/// Whether this is a long name of an option.
fn is_called(arg: &clap::Arg, name: &str) -> bool {
    arg.get_long() == Some(name)
        || arg
            .get_all_aliases()
            .is_some_and(|aliases| aliases.contains(&name))
}

/// How many words an option takes, itself included; `None` if it is no option.
fn length(arg: &OsStr, commands: &[&Command]) -> Option<usize> {
    let text = arg.to_str()?;
    if text == "--" || text == "-" || !text.starts_with('-') {
        return None;
    }
    // How many values follow.
    let values = |matches: &dyn Fn(&clap::Arg) -> bool| {
        let all = commands.iter().flat_map(|command| command.get_arguments());
        let takes_values = |arg: &&clap::Arg| arg.get_action().takes_values();
        let taken = all.filter(|arg| matches(arg)).find(takes_values);
        taken.map_or(0, |arg| {
            arg.get_num_args().map_or(1, |values| values.min_values())
        })
    };
    let follow = if let Some(long) = text.strip_prefix("--") {
        if long.contains('=') {
            0
        } else {
            values(&|arg| is_called(arg, long))
        }
    } else {
        // `-n4` holds its value.
        let mut chars = text[1..].chars();
        let (first, rest) = (chars.next(), chars.next());
        if rest.is_some() {
            0
        } else {
            values(&|arg: &clap::Arg| arg.get_short() == first)
        }
    };
    Some(1 + follow)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::super::super::command::Args;
    use super::*;

    fn translated(line: &str) -> String {
        let args = line.split(' ').map(OsString::from).collect();
        let words = translate(args, &Args::command()).unwrap();
        let words: Vec<_> = words.iter().map(|word| word.to_str().unwrap()).collect();
        words.join(" ")
    }

    #[test]
    fn only_what_stands_before_the_program_is_translated() {
        for (given, expected) in [
            ("kolo run -np 4 prog", "kolo run --np 4 prog"),
            ("kolo run -np 4 prog -np 5", "kolo run --np 4 prog -np 5"),
            ("kolo run -n 2 -- prog -np 5", "kolo run -n 2 -- prog -np 5"),
            ("kolo run --env -np -np 4 x", "kolo run --env -np --np 4 x"),
            (
                "kolo run -H a:2 -hostfile f x",
                "kolo run -H a:2 --hostfile f x",
            ),
            (
                "kolo --head h:1 run --dry-run -np 4 x",
                "kolo --head h:1 run --dry-run --np 4 x",
            ),
            (
                "kolo run --prefix=-np -np 4 x",
                "kolo run --prefix=-np --np 4 x",
            ),
            ("kolo run -n4 -np 3 x", "kolo run -n4 --np 3 x"),
            (
                "kolo run -np=2 -host localhost:2 python x.py -host",
                "kolo run --np=2 --host localhost:2 python x.py -host",
            ),
            (
                "kolo run -hosts a:1 -nproc-per-node=2 -wdir /x -e A=1 -eB=1 x",
                "kolo run --hosts a:1 --nproc-per-node=2 --wdir /x -e A=1 -eB=1 x",
            ),
            (
                "kolo run --num_proc 2 --max_restarts=1 -nproc_per_node=2 x --a_b",
                "kolo run --num-proc 2 --max-restarts=1 --nproc-per-node=2 x --a_b",
            ),
            (
                "kolo --connect-timeout -1 run --grace -1 -n -2 x --grace -1",
                "kolo --connect-timeout=-1 run --grace=-1 -n=-2 x --grace -1",
            ),
            (
                "kolo run --env A_B=1 --no_such x",
                "kolo run --env A_B=1 --no_such x",
            ),
            (
                "kolo run --blacklist-cooldown-range 1 10 -np 4 x -np",
                "kolo run --blacklist-cooldown-range 1 10 --np 4 x -np",
            ),
            (
                "kolo run -r 3 -t 0:1 -np 4 x",
                "kolo run -r 3 -t 0:1 --np 4 x",
            ),
            ("kolo run -Ha:2,b:2 -h", "kolo run -Ha:2,b:2 -h"),
            ("kolo run - -hosts", "kolo run - -hosts"),
            ("kolo -help run -help", "kolo --help run --help"),
            ("kolo logs -np 4", "kolo logs -np 4"),
            ("kolo", "kolo"),
        ] {
            assert_eq!(translated(given), expected);
        }
    }

    #[test]
    fn no_word_that_is_none_is_a_question_for_help() {
        let refused = |line: &str| {
            let args = line.split(' ').map(OsString::from).collect();
            translate(args, &Args::command()).unwrap_err()
        };
        let line = refused("kolo run -hots a:2 -n 2 x");
        assert_eq!(line, "there is no option `-hots`; did you mean `--hosts`?");
        let line = refused("kolo -hx run x");
        assert!(line.starts_with("there is no option `-hx`; "), "{line}");
        for word in ["-hx", "-hélas", "-h=1", "-hn", "-cb", "-vv"] {
            let line = refused(&format!("kolo --head h:1 run -n 2 {word} x"));
            let word = word.split('=').next().unwrap();
            assert!(
                line.starts_with(&format!("there is no option `{word}`; ")),
                "{line}"
            );
        }
    }
}
