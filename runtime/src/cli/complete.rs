//! `kolo completions` and `kolo man`: what shells and `man` need to know of the command line.

use clap::CommandFactory as _;

use super::args::{Completions, Man, Shell};
use super::command::Args;
use super::error::CliError;
use super::output::Output;
use crate::settings::{MANUAL, manual};

pub(super) fn completions(options: &Completions, out: &mut Output<'_>) -> Result<(), CliError> {
    let shell = match options.shell {
        Shell::Bash => clap_complete::Shell::Bash,
        Shell::Zsh => clap_complete::Shell::Zsh,
        Shell::Fish => clap_complete::Shell::Fish,
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "kolo", &mut script);
    out.bytes(&script)
}

pub(super) fn manual(options: &Man, out: &mut Output<'_>) -> Result<(), CliError> {
    let write = |name: &str, section: &str, text: &str| {
        let dir = options.dir.join(format!("man{section}"));
        let path = dir.join(format!("{name}.{section}"));
        let written = std::fs::create_dir_all(dir).and_then(|()| std::fs::write(&path, text));
        written.map_err(|error| CliError::File { path, error })
    };
    let mut command = Args::command().disable_help_subcommand(true);
    command.build();
    let daemons = ["kolo-head", "kolo-node"].map(|name| (name, of_daemon(name)));
    let there = daemons.iter().filter(|(_, page)| page.is_some());
    let also: Vec<String> = there.map(|(name, _)| format!("{name}(8)")).collect();
    let mut left = vec![(&command, also)];
    while let Some((command, also)) = left.pop() {
        let name = manual::name(command);
        let page = manual::page(command, "1", &also).map_err(CliError::Output)?;
        write(&name, "1", &page)?;
        let parent = vec![format!("{name}(1)")];
        left.extend(command.get_subcommands().map(|sub| (sub, parent.clone())));
    }
    for (name, page) in daemons {
        match page {
            Some(page) => write(name, "8", &page)?,
            None => out.line(&format!(
                "there is no {name} beside kolo, so that its page is missing"
            ))?,
        }
    }
    let dir = options.dir.display();
    out.line(&format!(
        "the pages are in {dir}; `man -M {dir} kolo` shows the first"
    ))
}

/// The page of a daemon whose program stands beside this one.
fn of_daemon(name: &str) -> Option<String> {
    let program = std::env::current_exe().ok()?.with_file_name(name);
    let printed = std::process::Command::new(program)
        .arg(format!("--{MANUAL}"))
        .stderr(std::process::Stdio::null())
        .output()
        .ok()?;
    let page = printed.status.success().then_some(printed.stdout)?;
    String::from_utf8(page).ok()
}

#[cfg(test)]
mod tests {
    use super::super::output::Screen;
    use super::*;

    #[test]
    fn every_shell_and_every_command_is_served() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            let mut out = Output::new(&mut script, Screen::default());
            completions(&Completions { shell }, &mut out).unwrap();
            let script = String::from_utf8(script).unwrap();
            for word in ["interfaces", "drain", "nproc-per-node"] {
                assert!(script.contains(word), "{shell:?} does not know {word}");
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let man = Man {
            dir: dir.path().join("man"),
        };
        manual(&man, &mut Output::new(&mut Vec::new(), Screen::default())).unwrap();
        for page in ["kolo", "kolo-run", "kolo-node-drain", "kolo-man"] {
            let path = man.dir.join(format!("man1/{page}.1"));
            let text = std::fs::read_to_string(path).unwrap();
            assert!(text.starts_with(".ie"), "{text}");
            for part in [".TH", "SYNOPSIS", "EXAMPLES"] {
                assert!(text.contains(part), "{page} has no {part}: {text}");
            }
            assert!(!text.contains(['`', '…']), "{page}: {text}");
        }
    }
}
