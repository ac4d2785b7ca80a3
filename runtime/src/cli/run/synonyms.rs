//! Options as other launchers write them, where they mean the same.

use std::ffi::{OsStr, OsString};

use clap::Command;

/// `-np 4` and `-hostfile F` are no short options as clap knows them. They are put into words, in front of the program
/// only: what comes after it is the program's own.
pub(crate) fn translate(args: Vec<OsString>, command: &Command) -> Vec<OsString> {
    let Some(run) = position_of_run(&args, command) else {
        return args;
    };
    let Some(options) = command.find_subcommand("run") else {
        return args;
    };
    let mut args = args;
    let mut at = run + 1;
    while let Some(arg) = args.get(at) {
        if arg == "-np" {
            args[at] = OsString::from("--num-proc");
        } else if arg == "-hostfile" {
            args[at] = OsString::from("--hostfile");
        }
        match length(&args[at], &[options, command]) {
            Some(length) => at += length,
            None => break,
        }
    }
    args
}

/// Where the subcommand `run` stands, if that is the subcommand.
fn position_of_run(args: &[OsString], command: &Command) -> Option<usize> {
    let mut at = 1;
    while let Some(length) = length(args.get(at)?, &[command]) {
        at += length;
    }
    (args.get(at)? == "run").then_some(at)
}

/// How many words an option takes, itself included; `None` if it is no option.
fn length(arg: &OsStr, commands: &[&Command]) -> Option<usize> {
    let text = arg.to_str()?;
    if text == "--" || text == "-" || !text.starts_with('-') {
        return None;
    }
    let takes = |matches: &dyn Fn(&clap::Arg) -> bool| {
        let all = commands.iter().flat_map(|command| command.get_arguments());
        let takes_value = |arg: &clap::Arg| arg.get_action().takes_values();
        all.filter(|arg| matches(arg)).any(takes_value)
    };
    let needs_value = if let Some(long) = text.strip_prefix("--") {
        let is_it = |arg: &clap::Arg| {
            arg.get_long() == Some(long)
                || arg
                    .get_all_aliases()
                    .is_some_and(|aliases| aliases.contains(&long))
        };
        !long.contains('=') && takes(&is_it)
    } else {
        // `-n4` holds its value.
        let mut chars = text[1..].chars();
        let (first, rest) = (chars.next(), chars.next());
        rest.is_none() && takes(&|arg: &clap::Arg| arg.get_short() == first)
    };
    Some(if needs_value { 2 } else { 1 })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::super::super::args::Args;
    use super::*;

    fn translated(line: &str) -> String {
        let args = line.split(' ').map(OsString::from).collect();
        let words = translate(args, &Args::command());
        let words: Vec<_> = words.iter().map(|word| word.to_str().unwrap()).collect();
        words.join(" ")
    }

    #[test]
    fn only_what_stands_before_the_program_is_translated() {
        for (given, expected) in [
            ("kolo run -np 4 prog", "kolo run --num-proc 4 prog"),
            (
                "kolo run -np 4 prog -np 5",
                "kolo run --num-proc 4 prog -np 5",
            ),
            ("kolo run -n 2 -- prog -np 5", "kolo run -n 2 -- prog -np 5"),
            (
                "kolo run --env -np -np 4 x",
                "kolo run --env -np --num-proc 4 x",
            ),
            (
                "kolo run -H a:2 -hostfile f x",
                "kolo run -H a:2 --hostfile f x",
            ),
            (
                "kolo --head h:1 run --dry-run -np 4 x",
                "kolo --head h:1 run --dry-run --num-proc 4 x",
            ),
            (
                "kolo run --prefix=-np -np 4 x",
                "kolo run --prefix=-np --num-proc 4 x",
            ),
            ("kolo run -n4 -np 3 x", "kolo run -n4 --num-proc 3 x"),
            ("kolo logs -np 4", "kolo logs -np 4"),
            ("kolo", "kolo"),
        ] {
            assert_eq!(translated(given), expected);
        }
    }
}
